"""Scene -> picture: bars on paper, for the notebook and for files.

y grows downward, in points, so that layout is plain arithmetic and a picture of eight ranks is a hundred rectangles and
as many words. Nothing here computes a number that is shown.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroviz.bar_layout import figures_of, layout_of, named_ticks
from zeroviz.capacity_line import Beyond, CapacityLine
from zeroviz.compare import Moment
from zeroviz.head import LINE, MARGIN, WIDTH, headed
from zeroviz.paper import Paper, Say, Shape, text_width
from zeroviz.scene import Row, Scene, Segment
from zeroviz.style import (
    BLUE,
    FONT_POINTS,
    INK,
    MUTED,
    ON_PAINT,
    PADDING,
    PAINT,
    PAPER,
    RULE,
    label_of,
    short_of,
)
from zeroviz.trace import Origin
from zeroviz.wording import ranks_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "zeroviz-picture"
INSET = 1.5
SHORT_BAR = 24.0
"""Below this length in points, outlines and separators would be most of a bar, so they are thin."""
OUTLINE_DASH, REFERENCE_DASH, CAPACITY_DASH = (10.0, 4.0), (2.0, 3.5), (13.0, 3.0, 3.5, 3.0)
CAPACITY_LINE, CAPACITY_CASING = 3.6, 6.0
"""Widths of the line of what a GPU has, and of the paper on which it crosses bars."""
TOOTH, TOOTH_DEPTH = 7.0, 4.5
"""Of the saw along what of a bar lies beyond that line: no deeper, or it would touch words in a bar of MIN_BAR."""
KEY_BEYOND = "Below the saw: beyond what the GPU has."
KEY = "Solid, to the thick mark: held at rest. Hatched, to the end of the outline: only within the step."
KEY_GIVEN_BACK = (
    "Solid: held at rest and at the peak. Hatched, to the end of the outline: only within the step. "
    "White, to the thick mark: held at rest, given back before the peak."
)
STRIP = 0.42
"""How much of a bar's height is taken by what is given back before the peak: a white strip along its upper edge."""


def paper_of(scene: Scene) -> Paper:
    """The picture laid out."""
    return _Sheet(scene).paper


def draw(scene: Scene) -> Figure:
    """The picture as a matplotlib Figure, to save or to build on."""
    return paper_of(scene).figure()


def save_figure(scene: Scene, path: Path) -> None:
    """Write the picture as .svg, .png or .pdf. The same scene gives the same bytes: no dates, no random ids."""
    paper_of(scene).save(path, NAME, scene.sentence)


def svg_text(scene: Scene, name: str = NAME, *, on_page: bool = False, say: Say = str) -> str:
    """The picture as one `<svg>` element as wide as its cell, each mark with its figures as data and as a tooltip.

    name: its class, another one where a page has a picture of this kind already. say: what each label is put as.
    """
    return paper_of(scene).svg(name, scene.sentence, on_page=on_page, say=say)


def placed(scene: Scene, say: Say = str, rank: int = 0, aspect: float = 0.0) -> dict[str, Any]:
    """The picture, and where a number of bytes lies in it, for marks that move over it without being asked for: the
    svg, `left` and `right` of the axis, its `most` bytes, and (upper edge, height, whether it is `rank`'s) of the bars
    that are not measured. Points, as in the svg's viewBox. aspect: of the room for it, its width by its height: where
    that is wider than the picture, the picture is laid out wider, with longer bars."""
    sheet = _Sheet(scene)
    for times in (1.1, 1.2, 1.3, 1.4, 1.5) if aspect else ():
        wider = _Sheet(scene, WIDTH * times)
        sheet = wider if wider.width <= aspect * wider.paper.height else sheet
    bars = [(sheet.y(row), sheet.bar, rank in row.ranks) for row in scene.rows if row.origin is scene.rows[0].origin]
    return {
        "svg": sheet.paper.svg(NAME, scene.sentence, on_page=True, say=say),
        "left": sheet.left,
        "right": sheet.right,
        "most": scene.axis_max,
        "bars": bars,
    }


class _Sheet:
    """One drawing under construction: where things go, top to bottom."""

    def __init__(self, scene: Scene, width: float = WIDTH) -> None:
        self.scene, self.width, self.paper = scene, width, Paper(width)
        self.is_free_above = True  # whether the capacity's line can reach up to its words
        self.saws: dict[int, tuple[tuple[float, float], ...]] = {}  # by bytes beyond the line
        self.layout = layout_of(scene, width)
        self.left, self.right, self.bar = self.layout.left, self.layout.right, self.layout.bar
        self._given_back = defaultdict[int, list[Segment]](list)  # by row
        for segment in scene.segments:
            if segment.is_given_back:
                self._given_back[segment.row].append(segment)
        # The capacity's words have a line of their own, whether or not it lies within the axis: a page then rests.
        self.top = self._head() + LINE * (0.1 + len(self.layout.lines(self.layout.heads[0])))
        self.top += LINE * 1.4 if scene.capacity is not None else 0.0
        self.bottom = self.top + self.layout.height
        self.paper.height = self._axis() + MARGIN
        self._bars()
        if scene.capacity is not None:
            self._capacity(scene.capacity)
        for segment in scene.segments:
            self._label(segment)

    def x(self, nbytes: int) -> float:
        """Where a number of bytes lies on the axis."""
        return self.left + (self.right - self.left) * nbytes / max(1, self.scene.axis_max)

    def y(self, row: Row) -> float:
        """The upper edge of a row's bar."""
        return self.top + self.layout.tops[row.index]

    def _head(self) -> float:
        """Title, what is drawn, legend. Returns where they end."""
        scene, paper = self.scene, self.paper
        y = headed(paper, scene.title, (scene.recipe, *scene.subtitle), num_muted=2)
        x, y = MARGIN, y + LINE * 1.4
        for entry in scene.legend:
            paint = PADDING if entry.category is None else PAINT[entry.category]
            hatch = paint.hatch if entry.category is None or not entry.held else None
            words = PADDING.label if entry.category is None else label_of(entry.category, scene.spec)
            advance = 32 + text_width(words)
            if x + advance > self.width - MARGIN / 2:
                x, y = MARGIN, y + LINE * 1.2
            ink = PAPER if paint is PADDING else INK
            paper.rectangle(x, y - 8, 25, 16, paint.color, hatch, line=0.8, edge=ink)
            paper.text(x + 32, y, words)
            x += advance + 18
        y += LINE * 0.15
        key = KEY_GIVEN_BACK if scene.gives_back else KEY
        key += f" {KEY_BEYOND}" if scene.beyond else ""
        for line in paper.wrapped(key, self.width - 2 * MARGIN):
            y += LINE
            paper.text(MARGIN, y, line, color=MUTED)
        return y + LINE * 0.3

    def _axis(self) -> float:
        """Grid, ticks, column heads and notes. Returns where they end."""
        scene, paper, y = self.scene, self.paper, self.bottom + LINE * 0.7
        for tick in scene.ticks:
            paper.line(((self.x(tick.nbytes), self.top), (self.x(tick.nbytes), self.bottom)), RULE)
        for tick in named_ticks(scene.ticks, self.x(1) - self.x(0)):
            paper.text(self.x(tick.nbytes), y, tick.label, anchor="middle", color=MUTED)
        left = min(self.left, self.width - MARGIN - text_width(scene.axis_label))
        paper.text(left, y + LINE, scene.axis_label, color=MUTED)
        for down, name in self.layout.above:
            paper.text(MARGIN, self.top + down, name, is_bold=True, is_backed=True)
        if scene.reference is not None:
            x = self.x(scene.reference.nbytes)
            paper.line(((x, self.top), (x, self.bottom)), INK, 2.0, REFERENCE_DASH)
            self._reference_words(x, f"{scene.reference.label} {scene.amount(scene.reference.nbytes)}")
        for edge, words in zip(self.layout.edges, self.layout.heads, strict=True):
            for number, line in enumerate(reversed(self.layout.lines(words))):
                paper.text(edge, self.top - LINE * (0.4 + number), line, anchor="end", color=MUTED)
        y += LINE * 1.1
        for line in (line for note in scene.notes for line in paper.wrapped(note, self.width - 2 * MARGIN)):
            y += LINE
            paper.text(MARGIN, y, line, color=MUTED)
        return y + LINE * 0.5

    def _reference_words(self, x: float, words: str) -> None:
        """At the reference's line; where the capacity's would run through them, before that, with the dash named."""
        at, end, width = self._capacity_x, x, text_width(words)
        if at is not None and x - width - 6 < at < x + 6:
            words = f"{'almost there too' if abs(x - at) < CAPACITY_CASING else 'dotted'}: {words}"
            end, width = at - 8, text_width(words)
        end = max(end, MARGIN + width)
        self.is_free_above = at is None or not end - width - 6 < at < end + 6
        self.paper.text(end, self.top - LINE * 0.4, words, anchor="end", color=MUTED)

    @property
    def _capacity_x(self) -> float | None:
        """Where the capacity's line stands; None where the axis does not reach it."""
        line = self.scene.capacity
        return None if line is None or line.budget_nbytes > self.scene.axis_max else self.x(line.budget_nbytes)

    def _capacity(self, line: CapacityLine) -> None:
        """The line across the bars, and the saw along what of them lies beyond; or an arrow to where it would be."""
        x, y = self._capacity_x, self.top - LINE * 1.5
        if x is None:
            self._arrow(line, y)
            return
        for mark in self.scene.beyond:
            self._saw(mark)
        top = y + LINE * 0.55 if self.is_free_above else self.top
        data = {"mark": "capacity", "nbytes": str(line.budget_nbytes)}
        stroke = ((x, top), (x, self.bottom + 4))
        self.paper.line(stroke, PAPER, CAPACITY_CASING)
        self.paper.add(Shape(stroke, line=CAPACITY_LINE, dash=CAPACITY_DASH, is_open=True, tip=line.note, data=data))
        half = text_width(line.words, weight="bold") / 2
        middle = max(MARGIN + half, min(self.width - MARGIN - half, x))
        self.paper.text(middle, y, line.words, anchor="middle", is_bold=True)

    def _arrow(self, line: CapacityLine, y: float) -> None:
        """Words and an arrow out of the axis, after the words where these are long."""
        words = f"{line.words}, beyond the axis"
        end = max(self.right - 40, MARGIN + text_width(words, weight="bold"))
        tip = end + 40
        self.paper.text(end, y, words, anchor="end", is_bold=True)
        self.paper.line(((end + 8, y), (tip - 10, y)), INK, CAPACITY_LINE)
        head = ((tip, y), (tip - 11, y - 6), (tip - 11, y + 6))
        data = {"mark": "capacity", "nbytes": str(line.budget_nbytes)}
        self.paper.add(Shape(head, fill=INK, tip=line.note, data=data))

    def _saw(self, mark: Beyond) -> None:
        """A saw along the upper edge of what lies beyond, shared by bars alike. It hides no outline's dash."""
        row, left, right = self.scene.rows[mark.row], self.x(mark.start), self.x(mark.start + mark.nbytes)
        if mark.nbytes not in self.saws:
            num_teeth = max(1, round((right - left) / TOOTH))
            step = (right - left) / num_teeth
            teeth = [(left + step * n / 2, TOOTH_DEPTH * (0.3 if n % 2 else 1)) for n in range(2 * num_teeth + 1)]
            self.saws[mark.nbytes] = (*teeth, (right, 0.0), (left, 0.0))
        tip = f"{row.rank_label}, {row.source_label}: {mark.nbytes:,} B beyond what the GPU has"
        data = _data(mark.id, row, "beyond", Moment.PEAK, mark.nbytes)
        self.paper.add(Shape(self.saws[mark.nbytes], fill=INK, tip=tip, data=data, down=self.y(row) + INSET))

    def _bars(self) -> None:
        """Segments, what of them is padding, and outlines."""
        scene = self.scene
        for segment in sorted(scene.segments, key=lambda segment: segment.is_given_back):  # a strip lies over its bar
            self._segment(segment)
        for padding in scene.paddings:
            row, x = scene.rows[padding.row], self.x(padding.start)
            data = _data(padding.id, row, "padding", Moment.REST, padding.nbytes)
            self.paper.rectangle(
                x, self.y(row) + INSET, self.x(padding.start + padding.nbytes) - x, self.bar - 2 * INSET,
                PADDING.color, PADDING.hatch, edge=PAPER, tip=_tip(row, "padding", Moment.REST, padding.nbytes),
                data=data,
            )  # fmt: skip
        for row in scene.rows:
            self._row(row)

    def _row(self, row: Row) -> None:
        y, predicted = self.y(row), row.origin is Origin.PREDICTED
        middle = y + self.bar / 2
        end, short = self.x(row.rest_nbytes), self.x(row.peak_nbytes) - self.left < SHORT_BAR
        self.paper.rectangle(
            self.left, y + INSET, self.x(row.peak_nbytes) - self.left, self.bar - 2 * INSET, line=1 if short else 2,
            dash=OUTLINE_DASH if predicted and not short else (), tip=_tooltip(row),
            data=_data(row.id, row, "outline", Moment.PEAK, row.peak_nbytes),
        )  # fmt: skip
        thickness = 4 if end - self.left > SHORT_BAR else 1.2
        self.paper.line(((end, y), (end, y + self.bar)), INK, thickness)
        is_first = self.scene.rows[max(0, row.index - 1)].group != row.group or not row.index
        if is_first and not self.layout.above:
            self.paper.text(MARGIN, middle, row.rank_label, is_bold=True)
        self.paper.text(self.layout.source_edge, middle, row.source_label)
        for edge, figure in zip(self.layout.edges, figures_of(self.scene, row), strict=True):
            lines = self.layout.lines(figure)
            for number, line in enumerate(lines):
                self.paper.text(edge, middle + LINE * (number - (len(lines) - 1) / 2), line, anchor="end")

    def _segment(self, segment: Segment) -> None:
        paint, row = PAINT[segment.category], self.scene.rows[segment.row]
        x, stop = self.x(segment.start), self.x(segment.start + segment.nbytes)
        label = label_of(segment.category, self.scene.spec)
        line, color, edge, hatch = 0.8 if stop - x > 4 else 0.0, paint.color, INK, None
        if segment.is_given_back:
            line, color, edge = 2.2, PAPER, paint.color
        elif segment.moment is Moment.PEAK:
            hatch = paint.hatch
        y, height = self._lane(segment)
        self.paper.rectangle(
            x, y, stop - x, height, color, hatch, line=line, edge=edge,
            tip=_tip(row, label, segment.moment, segment.nbytes, is_given_back=segment.is_given_back),
            data=_data(segment.id, row, segment.category.value, segment.moment, segment.nbytes),
        )  # fmt: skip

    def _lane(self, segment: Segment) -> tuple[float, float]:
        """Upper edge and height of a segment: the bar's, or a strip of it."""
        height = self.bar - 2 * INSET
        return self.y(self.scene.rows[segment.row]) + INSET, height * STRIP if segment.is_given_back else height

    def _room(self, segment: Segment) -> tuple[float, float, float, float]:
        """Left, right, upper edge and height of what neither a strip nor the mark at rest covers."""
        y, height = self._lane(segment)
        start, stop = segment.start, segment.start + segment.nbytes
        is_covered = not segment.is_given_back and any(
            other.start < stop and start < other.start + other.nbytes for other in self._given_back[segment.row]
        )
        if is_covered:
            y, height = y + height * STRIP, height * (1 - STRIP)
            mark = self.scene.rows[segment.row].rest_nbytes
            start, stop = _wider(start, mark, stop)
        if (line := self.scene.capacity) is not None:
            start, stop = _wider(start, line.budget_nbytes, stop)
            if segment.is_given_back and start >= line.budget_nbytes:
                y, height = y + TOOTH_DEPTH, height - TOOTH_DEPTH
        return self.x(start), self.x(stop), y, height

    def _label(self, segment: Segment) -> None:
        """What fits of its name and its bytes, in the middle of the segment."""
        paint = PAINT[segment.category]
        x, stop, y, height = self._room(segment)
        is_hatched = segment.moment is Moment.PEAK
        lines = _label_lines(
            short_of(segment.category, self.scene.spec), self.scene.amount(segment.nbytes), stop - x - 6, height
        )
        is_on_paint = not is_hatched and not segment.is_given_back
        ink = (PAPER if paint.color == BLUE else ON_PAINT) if is_on_paint else INK
        for number, line in enumerate(lines):
            middle = y + height / 2 + LINE * 0.9 * (number - (len(lines) - 1) / 2)
            self.paper.text((x + stop) / 2, middle, line, anchor="middle", color=ink, is_backed=is_hatched)


def _wider(start: int, mark: int, stop: int) -> tuple[int, int]:
    """Of the two sides of a mark between start and stop the wider one; all where it is not between them."""
    if not start < mark < stop:
        return start, stop
    return (start, mark) if mark - start > stop - mark else (mark, stop)


def _data(ident: str, row: Row, name: str, moment: Moment, nbytes: int) -> dict[str, str]:
    """What a program reads off a mark. data-mark, not id: a page may hold two pictures of one scene."""
    return {
        "mark": ident,
        "ranks": f"{row.ranks[0]}-{row.ranks[0]}" if len(row.ranks) == 1 else ranks_words(row.ranks)[len("ranks ") :],
        "origin": row.origin.value,
        "moment": moment.value,
        "category": name,
        "nbytes": str(nbytes),
    }


def _tip(row: Row, label: str, moment: Moment, nbytes: int, *, is_given_back: bool = False) -> str:
    when = "at rest" if moment is Moment.REST else "added at the peak"
    when += ", given back before the peak" if is_given_back else ""
    return f"{row.rank_label}, {row.source_label}: {label} {when}, {nbytes:,} B"


def _tooltip(row: Row) -> str:
    return (
        f"{row.rank_label}, {row.source_label}: {row.rest_nbytes:,} B at rest, peak {row.peak_nbytes:,} B "
        f"in {row.peak_place}"
    )


def _label_lines(name: str, value: str, room: float, height: float) -> tuple[str, ...]:
    """What fits into a segment: name over value, name and value, one of them, or nothing."""
    if height < 0.9 * FONT_POINTS:
        return ()
    if height + 2 * INSET >= 2.2 * LINE:
        if max(text_width(name), text_width(value)) <= room:
            return name, value
    elif text_width(f"{name} {value}") <= room:
        return (f"{name} {value}",)
    for text in (name, value):
        if text_width(text) <= room:
            return (text,)
    return ()
