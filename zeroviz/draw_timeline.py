"""Timeline -> picture: stacked areas over the step's moments, on paper for the notebook and for files.

Areas carry their own names where they are wide enough; only what is too narrow goes to the key above the plot.
Nothing here computes a number that is shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroviz.category import Category
from zeroviz.head import LINE, MARGIN, ROOM, WIDTH, headed
from zeroviz.paper import CLEAR, Paper, Say, Shape, text_width
from zeroviz.plot_area import Floats, Name, Plot, Rooms, Table, tops_of
from zeroviz.style import BLUE, INK, MUTED, ON_PAINT, PAINT, PAPER, RULE, label_of, short_of
from zeroviz.timeline import OpMark, Timeline
from zeroviz.timeline_part import Part

NAME = "zeroviz-timeline"
PLOT_HEIGHT, HOST_HEIGHT = 300.0, 110.0
MAX_HOVERS = 400
"""Above this many ops, tooltips are given by unit, and of more units than that by neighbours of them, so that the page
stays light."""
_HERE_DASH, _REFERENCE_DASH, _DASH = (1.5, 3.0), (1.5, 4.0), (5.0, 4.0)
_THICK = 2.2
_DENSE_POINTS = 2.5
"""Columns narrower than this would be all outline."""

_MARK_POINTS = 4.0
"""Units narrower than this are not all marked off from one another."""
_UNIT_ROW = ("unit", "block")  # what the row of units is called; the second where the word is left out in it

Dash = tuple[float, ...]


def paper_of(timeline: Timeline) -> Paper:
    """The picture laid out."""
    return _Sheet(timeline).paper


def timeline_svg(timeline: Timeline) -> str:
    """The picture as one `<svg>` element."""
    return paper_of(timeline).svg(NAME, timeline.sentence)


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Write the picture as .svg, .png or .pdf."""
    paper_of(timeline).save(path, NAME, timeline.sentence)


def placed_timeline(timeline: Timeline, moments: Sequence[int], say: Say = str) -> dict[str, Any]:
    """The picture, and where `moments` lie in it, for a cursor that moves over it without being asked for: the svg,
    `xs`, and `top` and `bottom` of the plot. Points, as in the svg's viewBox. tips: the tooltip of each op, which are
    not in this svg; ends: where each op ends."""
    sheet = _Sheet(timeline, has_tips=False)
    at = np.array(moments, dtype=np.int64)
    shown = [mark for mark in timeline.ops if mark.span.stop > mark.span.start]
    return {
        "svg": sheet.paper.svg(NAME, timeline.sentence, on_page=True, say=say),
        "xs": np.round((sheet.xs(at) + sheet.xs(at + 1)) / 2, 1).tolist(),
        "left": round(sheet.left, 1),
        "top": sheet.plot_top,
        "bottom": sheet.plot_bottom,
        "tips": [_tip(mark, mark, timeline.overlaid) for mark in shown],
        "ends": np.round(sheet.xs([mark.span.stop for mark in shown]), 1).tolist(),
    }


class _Sheet:
    """One drawing under construction, top to bottom."""

    def __init__(self, timeline: Timeline, *, has_tips: bool = True) -> None:
        self.timeline, self.has_tips = timeline, has_tips
        self.paper = Paper(WIDTH)
        beside = [_UNIT_ROW[1], *(tick.label for part in timeline.parts for tick in part.ticks)]
        self.left = MARGIN + max(map(text_width, beside)) + 8
        rest = ["at rest", *(part.amount(part.rest_nbytes) for part in timeline.parts)]
        self.right = WIDTH - MARGIN - max(map(text_width, rest)) - 10
        self.edges = self._edges()
        self._stops = [stop for _, stop, _, _ in self.edges]
        y = self._head()
        for number, part in enumerate(timeline.parts):
            y = self._plot(part, y, PLOT_HEIGHT if number == 0 else HOST_HEIGHT, is_first=number == 0)
        self.paper.height = self._foot(y) + MARGIN

    # ---- where things go ----

    def _edges(self) -> list[tuple[int, int, float, float]]:
        """The phases as (first moment, end, x, x of the end): in proportion to their moments, but wide enough to be
        named."""
        phases, room = self.timeline.phases, self.right - self.left
        labels = [phase.label for phase in phases]
        wanted = [text_width(label, weight="bold") + 12 for label in labels]
        if sum(wanted) > room / 2:  # micro-batches: then the first of a name is named
            firsts = [labels.index(label) == number for number, label in enumerate(labels)]
            wanted = [width if is_first else 0.0 for width, is_first in zip(wanted, firsts, strict=True)]
        moments = [float(phase.stop - phase.start) for phase in phases]
        widths = [room * count / sum(moments) for count in moments]
        narrow = [width < least for width, least in zip(widths, wanted, strict=True)]
        left_over = room - sum(least for least, is_narrow in zip(wanted, narrow, strict=True) if is_narrow)
        wide = sum(count for count, is_narrow in zip(moments, narrow, strict=True) if not is_narrow)
        widths = [
            least if is_narrow else left_over * count / wide
            for least, is_narrow, count in zip(wanted, narrow, moments, strict=True)
        ]
        starts = list(accumulate(widths, initial=self.left))
        return [(phase.start, phase.stop, x, end) for phase, x, end in zip(phases, starts, starts[1:], strict=False)]

    def x(self, moment: int) -> float:
        """Where a moment begins."""
        number = bisect_left(self._stops, moment)
        if number == len(self.edges):
            return self.right
        start, stop, left, right = self.edges[number]
        return left + (right - left) * (moment - start) / max(1, stop - start)

    def xs(self, moments: Sequence[int] | NDArray[np.int64]) -> Floats:
        """Where each of `moments` begins; they ascend."""
        at = np.asarray(moments)
        starts, stops, lefts, rights = np.array(self.edges).T
        number = np.searchsorted(stops, at)
        within = np.minimum(number, len(stops) - 1)
        share = (at - starts[within]) / np.maximum(1, stops[within] - starts[within])
        found: Floats = np.where(number == len(stops), self.right, lefts[within] + (rights - lefts)[within] * share)
        return found

    # ---- the parts of the picture ----

    def _head(self) -> float:
        """Title and words. Returns where they end."""
        return headed(self.paper, self.timeline.title, self.timeline.subtitle) + LINE * 0.3

    def _plot(self, part: Part, y: float, height: float, *, is_first: bool) -> float:
        """Key, axis, areas, lines and marks of one part. Returns where they end."""
        paper = self.paper
        edges = self.xs(part.edges)
        held = _table_of(part)
        tops = tops_of(held)
        # An axis from rest leaves what is always held below it.
        shown = [level for level, most in enumerate(tops[1:].max(axis=1)) if most > part.axis_min]
        names = self._names(Plot(part, 0.0, height), edges, held, tops, shown)
        y = self._key(y + LINE, [part.categories[level] for level in shown if names[level] is None], part)
        paper.text(MARGIN, y, part.axis_label, color=MUTED)
        plot = Plot(part, y + LINE * (2.1 if is_first else 0.9), height)
        if is_first:
            self.plot_top, self.plot_bottom = plot.top, plot.bottom
        for tick in part.ticks:
            at = plot.y(tick.nbytes)
            paper.line(((self.left, at), (self.right, at)), RULE)
            paper.text(self.left - 6, at, tick.label, anchor="end", color=MUTED)
        self._areas(plot, edges, held, tops, shown)
        self._phase_lines(plot)
        self._lines(plot, edges)
        if is_first:
            self._peak(plot)
            if self.has_tips:
                self._hovers(plot)
        for level, name in names.items():
            if name is not None:
                category = part.categories[level]
                is_plain = category in part.held_at_rest and not name.crosses
                ink = (ON_PAINT if PAINT[category].color != BLUE else PAPER) if is_plain else INK
                paper.text(name.x, plot.top + name.y, name.words, anchor="middle", color=ink, is_backed=not is_plain)
        paper.line(((self.left, plot.bottom), (self.right, plot.bottom)), INK, 1.2)
        return plot.bottom

    def _key(self, y: float, rest: Sequence[Category], part: Part) -> float:
        """Swatches for the areas without a name of their own, and the lines. Returns where the next line goes."""
        paper, x = self.paper, MARGIN
        spec = self.timeline.spec
        entries: list[tuple[str, Category | None, Dash]] = [(label_of(c, spec), c, ()) for c in rest]
        if part.is_measured:
            entries.append((self.timeline.overlaid, None, ()))
        if part.has_artefacts:
            entries.append(("as here", None, _HERE_DASH))
        for words, category, dash in entries:
            advance = 32 + text_width(words)
            if x + advance > WIDTH - MARGIN:
                x, y = MARGIN, y + LINE * 1.2
            if category is None:
                paper.line(((x, y), (x + 25, y)), INK, _THICK, dash)
            else:
                paint, is_held = PAINT[category], category in part.held_at_rest
                paper.rectangle(x, y - 8, 25, 16, paint.color, None if is_held else paint.hatch, line=0.8)
            paper.text(x + 32, y, words)
            x += advance + 18
        return y + (LINE * 1.2 if entries else 0)

    def _areas(self, plot: Plot, edges: Floats, held: Table, tops: Table, shown: Sequence[int]) -> None:
        """Each area down to the axis, the topmost first: the next one covers what is not its own."""
        part = plot.part
        line = 0.3 if self._is_dense(part) else 0.7
        for level in reversed(shown):
            category = part.categories[level]
            paint = PAINT[category]
            points = [(self.left, plot.bottom), *plot.staircase(edges, tops[level + 1]), (self.right, plot.bottom)]
            hatch = None if category in part.held_at_rest else paint.hatch
            data = {"category": category.value, "most": str(held[:, level].max())}
            self.paper.add(Shape(points, paint.color, hatch, line=line, data=data))

    def _is_dense(self, part: Part) -> bool:
        return part.num_columns * _DENSE_POINTS > self.right - self.left

    def _phase_lines(self, plot: Plot) -> None:
        for start, _, x, _ in self.edges:
            if start:
                self.paper.line(((x, plot.top), (x, plot.bottom)), MUTED, 1.0)

    def _lines(self, plot: Plot, edges: Floats) -> None:
        """What is held at rest, the reference, the measured step."""
        part, paper = plot.part, self.paper
        at = plot.y(part.rest_nbytes)
        paper.line(((self.left, at), (self.right + 6, at)), INK, 1.2, _DASH)
        low = min(max(at, plot.top + LINE), plot.bottom - LINE * 0.5)
        paper.text(self.right + 10, low - LINE * 0.5, "at rest")
        paper.text(self.right + 10, low + LINE * 0.5, part.amount(part.rest_nbytes))
        reference = self.timeline.reference
        if reference is not None and part is self.timeline.parts[0] and reference.nbytes > part.most:
            at = plot.y(reference.nbytes)
            paper.line(((self.left, at), (self.right, at)), INK, 2.0, _REFERENCE_DASH)
            words = f"{reference.label} {part.amount(reference.nbytes)}"
            paper.text(self.right - 4, at + LINE * 0.7, words, anchor="end", color=MUTED, is_backed=True)
        if part.here is not None and part.has_artefacts:
            paper.line(plot.staircase(edges, part.here), INK, 1.4, _HERE_DASH)
        if part.measured is not None:
            paper.line(plot.staircase(edges, part.measured), INK, 1.4 if self._is_dense(part) else _THICK)

    def _peak(self, plot: Plot) -> None:
        """A pin on the peak, a line down to where it stands, and words above."""
        peak, part = self.timeline.peak, plot.part
        x = (self.x(peak.moment) + self.x(peak.moment + 1)) / 2
        at = plot.y(peak.nbytes)
        self.paper.line(((x, at), (x, plot.bottom)), INK, 1.2, _DASH)
        self.paper.line(((x, plot.top - LINE * 0.3), (x, at)), INK, 1.2)
        self.paper.add(Shape(((x - 5, at - 9), (x + 5, at - 9), (x, at)), INK))
        words = f"peak {part.amount(peak.nbytes)} in {peak.place}"
        half = text_width(words, weight="bold") / 2
        centre = min(max(x, MARGIN + half), WIDTH - MARGIN - half)
        self.paper.text(centre, plot.top - LINE * 1.05, words, anchor="middle", is_bold=True)

    def _names(
        self, plot: Plot, edges: Floats, held: Table, tops: Table, shown: Sequence[int]
    ) -> dict[int, Name | None]:
        """Each shown area's own name where it has most room: off the upright lines if it can be. Those are the peak's
        and the phases', or the words would be struck through."""
        rooms = Rooms(edges, (self.x(self.timeline.peak.moment), *(x for _, _, x, _ in self.edges[1:])))
        ys = plot.ys(tops)
        part, spec = plot.part, self.timeline.spec
        found: dict[int, Name | None] = {}
        for level in shown:
            category = part.categories[level]
            least, most = int(held[:, level].min()), int(held[:, level].max())
            label, short = label_of(category, spec), short_of(category, spec)
            full = f"{label} {'' if least == most else 'up to '}{part.amount(most)}"
            found[level] = _name(rooms, ys[level + 1], ys[level], (full, label, short))
        return found

    def _hovers(self, plot: Plot) -> None:
        """Tooltips over all of it: one an op or, where there are very many, one a unit in use, or a few of these."""
        timeline = self.timeline
        if len(timeline.ops) <= MAX_HOVERS:
            groups = [(m.span.start, m.span.stop, [m]) for m in timeline.ops if m.span.stop > m.span.start]
        else:
            starts = [mark.span.start for mark in timeline.ops]
            together = -(-len(timeline.units) // MAX_HOVERS)
            runs = [timeline.units[at : at + together] for at in range(0, len(timeline.units), together)]
            groups = [
                (
                    run[0].start,
                    run[-1].stop,
                    list(timeline.ops[bisect_left(starts, run[0].start) : bisect_left(starts, run[-1].stop)]),
                )
                for run in runs
            ]
        for start, stop, marks in groups:
            largest = max(marks, key=lambda mark: mark.span.max_nbytes)
            x, span = self.x(start), largest.span
            data = {"op": span.op, "unit": span.unit, "phase": span.phase, "nbytes": str(span.max_nbytes)}
            self.paper.rectangle(
                x,
                plot.top,
                self.x(stop) - x,
                plot.bottom - plot.top,
                CLEAR,
                tip=_tip(largest, marks[-1], timeline.overlaid),
                data=data,
            )

    def _foot(self, y: float) -> float:
        """Units, phases, what the axis counts, notes. Returns where they end."""
        paper, timeline = self.paper, self.timeline
        y += LINE * 0.75
        self._unit_row(y)
        y += LINE * 0.75
        for phase, (_, _, x, end) in zip(timeline.phases, self.edges, strict=True):
            paper.line(((x + 1.5, y), (x + 1.5, y + 5), (end - 1.5, y + 5), (end - 1.5, y)), INK, 1.2)
            if text_width(phase.label, weight="bold") + 6 <= end - x:
                paper.text((x + end) / 2, y + LINE * 0.95, phase.label, anchor="middle", is_bold=True)
        y += LINE * 1.1
        for note in (f"{timeline.num_moments - 1:,} {timeline.axis_words}.", *timeline.notes):
            for line in paper.wrapped(note, ROOM):
                y += LINE
                paper.text(MARGIN, y, line, color=MUTED)
        return y + LINE * 0.4

    def _unit_row(self, y: float) -> None:
        """Names of the units in use, as many as there is room for: `block 2` whole, or its number alone."""
        paper = self.paper
        bands = [(band, self.x(band.start), self.x(band.stop)) for band in self.timeline.units]
        is_tight = any(text_width(band.label) + 6 > end - x for band, x, end in bands)
        are_marked = all(end - x >= _MARK_POINTS for _, x, end in bands)
        free, num_short = self.left - 4, 0
        for start, stop, *_ in self.edges:
            labels: list[tuple[float, str]] = []
            within = [(band, x, end) for band, x, end in bands if start <= band.start < stop]
            for band, x, end in within:
                words = _short(band.label) if is_tight else band.label
                left = (x + end - text_width(words)) / 2
                if are_marked or left >= free:
                    for at in (x, end):
                        paper.line(((at, y - LINE * 0.7), (at, y - LINE * 0.45)), MUTED)
                too_wide = text_width(words) > max(2.2 * (end - x) + 12, text_width("999"))
                if too_wide or left < free or left + text_width(words) > self.right + 4:
                    continue
                labels.append((left, words))
                free = left + text_width(words) + 8
                num_short += words != band.label
            if len(labels) > 1 or len(within) < 4:  # one number of thirty says nothing
                for left, words in labels:
                    paper.text(left, y, words)
        paper.text(self.left - 6, y, _UNIT_ROW[num_short > 0], anchor="end", color=MUTED)


def _table_of(part: Part) -> Table:
    """What each column holds, a row each; sums of a row fit, or are Python's own."""
    return np.array(part.held, dtype=np.int64 if part.most < 2**62 else object)


def _name(rooms: Rooms, uppers: Floats, lowers: Floats, words: tuple[str, str, str]) -> Name | None:
    """The longest of `words` that has room; what may be left off goes before crossing a line, but not all of it."""
    full, label, short = words
    tries = ((full, False), (label, False), (full, True), (label, True), (short, False), (short, True))
    for text, crosses in tries:
        found = rooms.roomiest(uppers, lowers, text_width(text) + 10, crosses=crosses)
        if found is not None and found[0] >= LINE * 1.02:
            return Name(found[1], found[2], text, crosses=crosses)
    return None


def _short(label: str) -> str:
    return label.removeprefix("blocks ").removeprefix("block ")


def _tip(mark: OpMark, last: OpMark, overlaid: str) -> str:
    """The most held in an op and what is left after it; of a unit in use, in the op that reaches most."""
    span = mark.span
    of = f" of {span.unit}" if span.unit else ""
    words = f"{span.phase}, {span.op}{of}: at most {span.max_nbytes:,} B; {last.span.end_nbytes:,} B at its end"
    if mark.measured_max is None:
        return words
    difference = mark.measured_max - span.max_nbytes
    return f"{words}; {overlaid} at most {mark.measured_max:,} B ({f'{difference:+,}' if difference else '0'} B)"
