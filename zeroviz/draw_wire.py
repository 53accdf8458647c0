"""WireScene -> picture: a lane for each group of ranks, its collectives end to end, DDP's bar above and its line down.

A collective has a colour and a hatch of its own, its name where there is room, and a line in the table below. Broken
lines within it part the phases in which it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from zeroviz.head import LINE, MARGIN, WIDTH, headed
from zeroviz.paper import Paper, Say, text_width
from zeroviz.style import FONT_POINTS, INK, MUTED, PAPER, RULE, WIRE_PAINT
from zeroviz.trace import Origin
from zeroviz.wire_scene import Part, WireEntry, WireRow, WireScene, WireSegment
from zeroviz.wire_sums import collective_words

NAME = "zeroviz-wire"
PLOT_HEIGHT = 260.0
"""Height that many rows share, as long as they stay legible."""
MIN_BAR, MAX_BAR = 21.0, 46.0
TWO_LINES = 2.2 * LINE
"""From this height on a bar has two lines of words in it and beside it."""
REFERENCE_BAR = 24.0
GAP, GROUP_GAP, INSET = 3.0, 11.0, 1.5
SHORT_BAR = 24.0
"""Below this length in points an outline would be most of a bar, so it is thin."""
OUTLINE_DASH, REFERENCE_DASH, PART_DASH = (10.0, 4.0), (2.0, 3.5), (3.0, 2.5)
SEEN_POINTS = 1.0
"""What is shorter cannot be seen."""
SMALL_POINTS = 12.0
"""Of a name that has no room otherwise; the smallest in the picture."""
TABLE_POINTS = (FONT_POINTS, 13.0, SMALL_POINTS)
ROOM = 6.0
"""Left and right of words in a segment, together."""
SWATCH, LABEL_LEFT, COLUMN_GAP = 25.0, 33.0, 18.0


def paper_of(scene: WireScene) -> Paper:
    """The picture laid out."""
    return _Sheet(scene).paper


def wire_svg(scene: WireScene) -> str:
    """The picture as one `<svg>` element."""
    return paper_of(scene).svg(NAME, scene.sentence)


def save_wire(scene: WireScene, path: Path) -> None:
    """Write the picture as .svg, .png or .pdf."""
    paper_of(scene).save(path, NAME, scene.sentence)


def placed_wire(scene: WireScene, say: Say = str) -> dict[str, Any]:
    """The picture, and where collectives lie in it, for marks that move over it without being asked for: the svg,
    `left` and `right` of the axis, its `most` bytes or elements, and (x, width, upper edge, height) of `segments` and
    of their `parts` by id. Points, as in the svg's viewBox."""
    sheet = _Sheet(scene)
    return {
        "svg": sheet.paper.svg(NAME, scene.sentence, on_page=True, say=say),
        "left": sheet.left,
        "right": sheet.right,
        "most": scene.axis_max,
        "segments": {segment.id: sheet.place(segment, segment.row) for segment in scene.segments},
        "parts": {part.id: sheet.place(part, segment.row) for segment in scene.segments for part in segment.parts},
    }


class _Sheet:
    """One drawing under construction, top to bottom."""

    def __init__(self, scene: WireScene) -> None:
        self.scene = scene
        self.paper = Paper(WIDTH)
        y = self._head()
        self.left, self.right = MARGIN, WIDTH - MARGIN
        self.tops: list[float] = []
        if scene.rows:
            y = self._plot(y + LINE * 0.6)
            y = self._table(y + LINE * 0.8)
        self.paper.height = self._notes(y) + MARGIN

    def x(self, length: int) -> float:
        """Where a number of bytes or elements lies on the axis."""
        return self.left + (self.right - self.left) * length / self.scene.axis_max

    def place(self, mark: WireSegment | Part, row: int) -> tuple[float, float, float, float]:
        """x, width, upper edge and height of a mark in its bar."""
        x, stop = self.x(mark.start), self.x(mark.start + mark.length)
        return round(x, 1), round(stop - x, 1), round(self.tops[row] + INSET, 1), round(self.bar - 2 * INSET, 1)

    def _head(self) -> float:
        """Title and what is drawn. Returns where they end."""
        return headed(self.paper, self.scene.title, self.scene.subtitle) + LINE * 0.5

    # ---- the bars ----

    def _plot(self, y: float) -> float:
        """DDP's bar, the rows, the axis. Returns where they end."""
        scene, paper = self.scene, self.paper
        num_groups = sum(map(self._begins_group, scene.rows))
        room = PLOT_HEIGHT - num_groups * GROUP_GAP - len(scene.rows) * GAP
        self.bar = max(MIN_BAR, min(MAX_BAR, room / len(scene.rows)))
        self._columns()
        top = y
        y += REFERENCE_BAR
        for row in scene.rows:
            y += GROUP_GAP if self._begins_group(row) else GAP
            self.tops.append(y)
            y += self.bar
        bottom = y + GAP
        for tick in scene.ticks:
            x = self.x(tick.at)
            paper.line(((x, top), (x, bottom)), RULE)
            paper.text(x, bottom + LINE * 0.6, tick.label, anchor="middle", color=MUTED)
        left = min(self.left, WIDTH - MARGIN - text_width(scene.axis_label))
        paper.text(left, bottom + LINE * 1.6, scene.axis_label, color=MUTED)
        self._reference(top)
        for row in scene.rows:
            self._bar(row)
        self._reference_line(top, bottom)
        for row in scene.rows:
            self._words(row)
        return bottom + LINE * 2.1

    def _columns(self) -> None:
        """Where names, bars and figures begin and end."""
        scene = self.scene
        reference = "" if scene.reference is None else scene.reference.label
        labels = [reference, *(row.rank_label for row in scene.rows)]
        self.source_edge = MARGIN + 14 + max(text_width(label, weight="bold") for label in labels)
        sources = [line for row in scene.rows for line in self._source_lines(row)]
        self.left = self.source_edge + 12 + max(map(text_width, sources))
        figures = [line for row in scene.rows for line in self._figure_lines(row)]
        if scene.reference is not None:
            figures.append(scene.amount(scene.reference.at))
        self.right = WIDTH - MARGIN - 14 - max(map(text_width, figures))

    def _begins_group(self, row: WireRow) -> bool:
        """Whether other ranks begin, or another source of the same."""
        before = self.scene.rows[row.index - 1]
        return not row.index or (before.ranks, before.origin) != (row.ranks, row.origin)

    def _source_lines(self, row: WireRow) -> list[str]:
        """`predicted`, and which lane."""
        words = [row.source_label if self._begins_group(row) else "", row.lane]
        lines = [line for line in words if line]
        return lines if self.bar >= TWO_LINES else [", ".join(lines)]

    def _figure_lines(self, row: WireRow) -> list[str]:
        """What the lane sends, and what of it is not as predicted, or all lanes, or beside DDP."""
        scene = self.scene
        lines = [scene.amount(row.length)]
        if row.difference is not None:
            lines.append(f"({scene.measure.difference(row.difference)})")
        elif row.in_all is not None:
            lines += [scene.times_words(row)] if row.in_all == row.length else [f"in all {scene.amount(row.in_all)}"]
        lines = [line for line in lines if line]
        return lines if self.bar >= TWO_LINES else [" ".join(lines[: 1 + (row.difference is not None)])]

    def _reference(self, top: float) -> None:
        """DDP's bar, hollow."""
        reference, paper = self.scene.reference, self.paper
        if reference is None:
            return
        x, middle = self.x(reference.at), top + REFERENCE_BAR / 2
        tip = f"{reference.label}: {reference.detail}, {_figures(reference.sent_nbytes, reference.volume_numel)}"
        data = {"mark": "reference", "nbytes": str(reference.sent_nbytes), "numel": str(reference.volume_numel)}
        paper.rectangle(
            self.left, top, x - self.left, REFERENCE_BAR, PAPER, line=1.6, dash=REFERENCE_DASH, tip=tip, data=data
        )
        paper.text(MARGIN, middle, reference.label, is_bold=True)
        width = text_width(reference.detail)
        if width + ROOM <= x - self.left:
            paper.text((self.left + x) / 2, middle, reference.detail, anchor="middle", color=MUTED)
        elif x + ROOM + width <= self.right:
            paper.text(x + ROOM, middle, reference.detail, color=MUTED, is_backed=True)
        paper.text(WIDTH - MARGIN, middle, self.scene.amount(reference.at), anchor="end")

    def _reference_line(self, top: float, bottom: float) -> None:
        """From the end of DDP's bar down, over the rows, on a strip of paper so that it is seen on every colour."""
        if self.scene.reference is None:
            return
        x = self.x(self.scene.reference.at)
        self.paper.line(((x, top + REFERENCE_BAR), (x, bottom)), PAPER, 3.6)
        self.paper.line(((x, top + REFERENCE_BAR), (x, bottom)), INK, 1.8, REFERENCE_DASH)

    def _bar(self, row: WireRow) -> None:
        """The row's segments end to end, and an outline, broken where they are predicted."""
        y = self.tops[row.index]
        for segment in self.scene.segments:
            if segment.row == row.index:
                self._segment(row, segment)
        x, stop = self.x(row.start), self.x(row.start + row.length)
        is_short = stop - x < SHORT_BAR
        self.paper.rectangle(
            x, y + INSET, stop - x, self.bar - 2 * INSET, line=1 if is_short else 2,
            dash=OUTLINE_DASH if row.origin is Origin.PREDICTED and not is_short else (),
        )  # fmt: skip
        if row.start:  # from where the lane above ends
            self.paper.line(((x, y - GAP - INSET), (x, y + INSET)), INK, 1.2)

    def _words(self, row: WireRow) -> None:
        """Names and figures of a row, and in its segments."""
        y = self.tops[row.index]
        for segment in self.scene.segments:
            if segment.row == row.index:
                self._label(segment)
        if self._begins_group(row) and row.origin is self.scene.rows[0].origin:
            self.paper.text(MARGIN, y + self.bar / 2, row.rank_label, is_bold=True)
        self._lines(self.source_edge, y, self._source_lines(row), anchor="start")
        self._lines(WIDTH - MARGIN, y, self._figure_lines(row), anchor="end")

    def _lines(self, x: float, y: float, lines: Sequence[str], anchor: str) -> None:
        """One line, or two, in the middle of a bar's height."""
        for number, line in enumerate(lines):
            middle = y + self.bar / 2 + LINE * 0.95 * (number - (len(lines) - 1) / 2)
            self.paper.text(x, middle, line, anchor=anchor)

    def _segment(self, row: WireRow, segment: WireSegment) -> None:
        x, width, y, height = self.place(segment, segment.row)
        paint = WIRE_PAINT[segment.op]
        self.paper.rectangle(
            x, y, width, height, paint.color, paint.hatch, line=0.8 if width > 4 else 0.0,
            tip=_tip(row, segment), data=_data(row, segment),
        )  # fmt: skip
        for part in segment.parts[1:]:
            at = self.x(part.start)
            if width > SHORT_BAR:
                self.paper.line(((at, y), (at, y + height)), INK, 1.2, PART_DASH)

    def _label(self, segment: WireSegment) -> None:
        """What fits of its name and its amount, and below, the phases, as far as each has room."""
        amount = self.scene.amount(segment.length)
        x, width, y, height = self.place(segment, segment.row)
        names = _names(segment, amount)
        fitting = ((w, points) for w, points in names if text_width(w, points) + ROOM <= width)
        name, points = next(fitting, ("", 0.0))
        if not name:
            return
        below = self._below(segment, is_amount_said=amount in name) if self.bar >= TWO_LINES else []
        middle, apart = y + height / 2, LINE * 0.48
        above = middle - apart if below else middle
        self.paper.text(x + width / 2, above, name, points, anchor="middle", is_backed=True)
        for at, words in below:
            self.paper.text(at, middle + apart, words, anchor="middle", is_backed=True)

    def _below(self, segment: WireSegment, *, is_amount_said: bool) -> list[tuple[float, str]]:
        """(middle, words) of each part that has room: its phase, with its amount where that is not said above."""
        parts = [part for part in segment.parts if part.length]
        places = [(self.x(part.start), self.x(part.start + part.length)) for part in parts]
        phases, amounts = [part.phase for part in parts], [self.scene.amount(part.length) for part in parts]
        both = [f"{phase} {words}" for phase, words in zip(phases, amounts, strict=True)]
        is_one = len(parts) == 1
        if not (is_one and is_amount_said) and len(fitting := _fitting(both, places)) == len(parts):
            return fitting
        return _fitting(phases, places) or (_fitting(amounts, places) if is_one and not is_amount_said else [])

    # ---- the table and the notes ----

    def _table(self, y: float) -> float:
        """A line for each collective of the first row's ranks, which is also the key. Returns where it ends."""
        paper = self.paper
        table, points, edges = self._fitting_table()
        for entry, line in zip((None, *self.scene.entries), table, strict=True):
            color = INK if entry else MUTED
            paper.text(MARGIN + (LABEL_LEFT if entry else 0), y, line[0], points, color=color)
            for edge, words in zip(edges, line[1:], strict=True):
                paper.text(edge, y, words, points, anchor="end", color=color)
            if entry:
                paint = WIRE_PAINT[entry.op]
                paper.rectangle(MARGIN, y - 8, SWATCH, 16, paint.color, paint.hatch, line=0.8)
            y += LINE * 1.2
        return y - LINE * 0.5

    def _fitting_table(self) -> tuple[list[list[str]], float, list[float]]:
        """Heads and lines, the size of their words, and where columns end: exact figures as large as they fit, or else
        in the axis's unit."""
        for say in (_exact, self.scene.amount):
            heads = _table_heads(self.scene, is_exact=say is _exact)
            table = [heads, *(_table_line(entry, say) for entry in self.scene.entries)]
            for points in TABLE_POINTS:
                labels, *columns = [
                    [text_width(words, points) for words in column] for column in zip(*table, strict=True)
                ]
                edge = MARGIN + max(labels[0], *(LABEL_LEFT + width for width in labels[1:]))
                edges = [edge := edge + COLUMN_GAP + max(widths) for widths in columns]
                if edge <= WIDTH - MARGIN:
                    return table, points, edges
        return table, points, edges

    def _notes(self, y: float) -> float:
        """Returns where they end."""
        notes = [*self.scene.notes]
        if any(s.length and self.place(s, s.row)[1] < SEEN_POINTS for s in self.scene.segments):
            notes.append("What is too short to be seen is in the table alone.")
        for note in notes:
            for line in self.paper.wrapped(note, WIDTH - 2 * MARGIN):
                y += LINE
                self.paper.text(MARGIN, y, line, color=MUTED)
        return y + LINE * 0.4


def _fitting(words: Sequence[str], places: Sequence[tuple[float, float]]) -> list[tuple[float, str]]:
    """(middle, words) of those that have room in their places."""
    return [
        ((x + stop) / 2, word) for word, (x, stop) in zip(words, places, strict=True)
        if text_width(word) + ROOM <= stop - x
    ]  # fmt: skip


def _names(segment: WireSegment, amount: str) -> Iterable[tuple[str, float]]:
    """Of a segment, and the size of the words; the longest first."""
    name = collective_words(segment.op)
    yield f"{segment.label} {amount}", FONT_POINTS
    yield f"{name} {amount}", FONT_POINTS
    yield name, FONT_POINTS
    yield name, SMALL_POINTS
    yield amount, FONT_POINTS
    yield amount, SMALL_POINTS


def _table_heads(scene: WireScene, *, is_exact: bool) -> list[str]:
    unit, verb = ("elements", "moved") if scene.measure.in_elements else ("bytes", "sent")
    heads = [scene.rows[0].rank_label + f", in {unit}" * is_exact, "calls", "payload"]
    if all(entry.measured is None for entry in scene.entries):
        return [*heads, verb]
    sources = dict.fromkeys(row.source_label for row in scene.rows)
    return [*heads, *(f"{verb}, {source}" for source in sources), "difference"]


def _table_line(entry: WireEntry, say: Callable[[int], str]) -> list[str]:
    calls = [entry.calls] if entry.measured_calls in (None, entry.calls) else [entry.calls, entry.measured_calls]
    line = [entry.label, "/".join(f"{number:,}" for number in calls), say(entry.payload), say(entry.predicted)]
    if entry.measured is None:
        return line
    difference = entry.measured - entry.predicted
    return [*line, say(entry.measured), f"{difference:+,}" if difference else "0"]


def _exact(length: int) -> str:
    return f"{length:,}"


def _figures(sent_nbytes: int, volume_numel: int) -> str:
    return f"{sent_nbytes:,} B sent in a ring, {volume_numel:,} elements moved"


def _tip(row: WireRow, segment: WireSegment) -> str:
    calls = f"{segment.calls:,} call" + "s" * (segment.calls != 1)
    phases = " and ".join(f"{part.calls:,} in {part.phase}" for part in segment.parts)
    return (
        f"{row.words}: {segment.label}, {calls} ({phases}), payload {segment.payload_nbytes:,} B, "
        f"{_figures(segment.sent_nbytes, segment.volume_numel)}"
    )


def _data(row: WireRow, segment: WireSegment) -> dict[str, str]:
    """What a program reads off a mark. data-mark, not id: a page may hold two pictures of one scene."""
    first, last = row.ranks[0][0], row.ranks[-1][-1]
    return {
        "mark": segment.id,
        "ranks": f"{first}-{last}",
        "origin": row.origin.value,
        "op": segment.op.value,
        "dtype": segment.dtype,
        "group": segment.group.value,
        "calls": str(segment.calls),
        "payload": str(segment.payload_nbytes),
        "nbytes": str(segment.sent_nbytes),
        "numel": str(segment.volume_numel),
    }
