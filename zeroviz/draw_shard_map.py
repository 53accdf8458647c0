"""ShardMap -> picture: a panel for each class of tensors, a lane for each rank, lit what the rank holds of it.

A block is the rank's own part. A whole copy is of a paler kind, with white strokes through it and the words. Padding is
dark and cross-hatched. The bare lane is what the rank does not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from math import ceil, floor
from pathlib import Path
from typing import Any, NamedTuple

from zeroviz.combs import Axis, Edge, Tooth, comb, teeth_of
from zeroviz.head import LINE, MARGIN, ROOM, WIDTH, headed
from zeroviz.paper import CLEAR, Paper, Say, Shape, text_width
from zeroviz.quantity import format_nbytes
from zeroviz.shard_map import Column, Lane, Panel, Row, ShardMap
from zeroviz.shard_rules import Hold, Piece, TensorClass
from zeroviz.style import GREY, INK, MUTED, PADDING, PAINT, PAPER, TRACK

NAME = "zeroviz-shard-map"
ROW_POINTS = 12.0
"""Of the words beside and in lanes; the smallest in the picture."""
PITCHES = ((4, 21), (9, 16), (12, 15), (16, 10))
"""Up to so many rows, how far apart lanes are: whole points, which keep the file small."""
NAMED_POINTS = 14.0
"""How far apart the names of rows are at least: where lanes are closer, every other rank is named."""
GROUP_GAP, LANE_GAP = 5, 3
HELD = "at rest"
COPY_HATCH, SHARED_HATCH = "\\\\", "//"
HATCHED_POINTS = 8.0
"""What is narrower shows no hatch, only dirt, and has none."""
LINE_POINTS, LINE_HALF, LINE_OVER = 3.0, 0.36, 3
"""Units narrower than the first are not marked off from one another; half of a line's width; how far it sticks out."""
DENSE_POINTS = 40.0
"""Between units narrower than this lines are grey, or there would be more of them to see than of shards."""
STRIDES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Of the blocks that are named where not all can be."""


def paper_of(shard_map: ShardMap) -> Paper:
    """The picture laid out."""
    return _Sheet(shard_map).paper


def shard_map_svg(shard_map: ShardMap) -> str:
    """The picture as one `<svg>` element."""
    return paper_of(shard_map).svg(NAME, shard_map.sentence)


def save_shard_map(shard_map: ShardMap, path: Path) -> None:
    """Write the picture as .svg, .png or .pdf."""
    paper_of(shard_map).save(path, NAME, shard_map.sentence)


def placed_map(shard_map: ShardMap, say: Say = str) -> dict[str, Any]:
    """The picture, and where units lie in its first panel, for marks that move over it without being asked for: the
    svg, and `columns` as (x, width, upper edge, height) by the unit's name. Points, as in the svg's viewBox."""
    sheet = _Sheet(shard_map)
    top, bottom = sheet.first_panel
    columns = {
        column.name: (round(x, 1), round(end - x, 1), top - LINE_OVER, bottom - top + 2 * LINE_OVER)
        for column, (x, end) in zip(shard_map.columns, sheet.edges, strict=True)
    }
    return {"svg": sheet.paper.svg(NAME, shard_map.sentence, on_page=True, say=say), "columns": columns}


class _Mark(NamedTuple):
    """Pieces as one shape, from the lane's upper edge down. units: those in which there is one."""

    corners: list[tuple[float, float]]
    numel: int
    units: str
    is_widened: bool
    is_narrow: bool


def _mark_of(pieces: Sequence[Piece], hold: Hold, axis: Axis, edges: Sequence[Edge], height: int) -> _Mark:
    teeth = teeth_of(pieces, hold, axis, edges)
    return _Mark(
        corners=comb(teeth, 0, height),
        numel=sum(piece.numel for piece in pieces),
        units=_units(pieces),
        is_widened=any(tooth.height < 1 for tooth in teeth),
        is_narrow=all(tooth.stop - tooth.x < HATCHED_POINTS for tooth in teeth),
    )


class _Sheet:
    """One drawing under construction, top to bottom."""

    def __init__(self, shard_map: ShardMap) -> None:
        self.map = shard_map
        self.paper = Paper(WIDTH)
        self.widened = False
        self._marks_known: dict[tuple[int, Hold], _Mark | None] = {}
        self.pitch = next((pitch for most, pitch in PITCHES if len(shard_map.rows) <= most), PITCHES[-1][1])
        left = MARGIN + max(text_width(row.label, ROW_POINTS) for row in shard_map.rows) + 8
        figures = [_figure(lane) for panel in shard_map.panels for lane in panel.lanes]
        right = WIDTH - MARGIN - max(text_width(words, ROW_POINTS) for words in (*figures, HELD)) - 8
        self.left, self.right = ceil(left), floor(right)
        self.axis = Axis(shard_map.slots, self.left, self.right)
        self.edges = [(self.axis.x(column.start), self.axis.x(column.stop)) for column in shard_map.columns]
        y = self._head()
        for number, panel in enumerate(shard_map.panels):
            y = self._panel(panel, y, is_first=number == 0)
        self.paper.height = self._foot(y) + MARGIN

    # ---- the parts of the picture ----

    def _head(self) -> float:
        """Title, words, key. Returns where they end."""
        paper, shard_map = self.paper, self.map
        y = headed(paper, shard_map.title, shard_map.subtitle)
        return self._key(y + LINE * 1.3) + LINE * 0.9

    def _key(self, y: float) -> float:
        """What is lit how. Returns the key's last line."""
        paper, panels, x = self.paper, self.map.panels, MARGIN
        owned = next((panel for panel in panels if not panel.is_whole), None)
        whole = next((panel for panel in panels if panel.is_whole), None)
        entries: list[tuple[str, str, str | None, str]] = []
        if owned:
            alone = "held by this rank alone" + (", of its group" if self.map.spec.num_replicas > 1 else "")
            entries.append((alone, PAINT[owned.category].color, None, INK))
        if whole:
            copies = "a whole copy, the same on every rank"
            entries.append((copies, PAINT[whole.category].color, COPY_HATCH, PAPER))
        if self.map.has_padding:
            entries.append((PADDING.label, PADDING.color, PADDING.hatch, PAPER))
        if owned:
            entries.append(("not held", TRACK, None, INK))
        for words, fill, hatch, edge in entries:
            advance = 32 + text_width(words)
            if x + advance > WIDTH - MARGIN:
                x, y = MARGIN, y + LINE * 1.2
            paper.rectangle(x, y - 8, 25, 16, fill, hatch, edge=edge)
            paper.rectangle(x, y - 8, 25, 16, line=0.8)
            paper.text(x + 32, y, words)
            x += advance + 18
        return y

    def _panel(self, panel: Panel, y: float, *, is_first: bool) -> float:
        """Heading and lanes. Returns where they end."""
        paper, tops = self.paper, self._tops()
        y += LINE * 0.75
        paper.text(MARGIN, y, panel.label, is_bold=True)
        paper.text(MARGIN + text_width(panel.label, weight="bold") + 12, y, panel.detail, color=MUTED)
        top = round(y + LINE * 0.65)
        if is_first:
            paper.text(WIDTH - MARGIN, top + LINE * 0.4, HELD, ROW_POINTS, anchor="end", color=MUTED)
            self._unit_names(top + LINE * 0.4)
            top += round(LINE)
        bottom, height = top + tops[-1] + self.pitch - LANE_GAP, self.pitch - LANE_GAP
        lanes = [(x, top + at + down) for at in tops for x, down in self._corners(height)]
        paper.add(Shape(lanes, TRACK))
        if is_first:
            self.first_panel = top, bottom
            self._unit_columns(top, bottom)
        if not panel.is_whole:
            self._unit_lines(top, bottom)
        for lane, at in zip(panel.lanes, tops, strict=True):
            self._marks(panel, lane, top + at, height)
        if panel.is_whole:
            self._unit_lines(top, bottom)
        last = -NAMED_POINTS
        for lane, at in zip(panel.lanes, tops, strict=True):
            middle = top + at + height / 2
            self._words_in(panel, lane, middle)
            if at - last >= NAMED_POINTS:
                last = at
                paper.text(self.left - 8, middle, self.map.rows[lane.row].label, ROW_POINTS, anchor="end")
                paper.text(WIDTH - MARGIN, middle, _figure(lane), ROW_POINTS, anchor="end")
        return bottom + LINE * 0.35

    def _corners(self, height: int) -> tuple[tuple[int, int], ...]:
        """Of a lane, from its upper left, so that one closed line goes round all of them, along their left edges."""
        return (self.left, 0), (self.right, 0), (self.right, height), (self.left, height)

    def _tops(self) -> list[int]:
        """Where each lane begins, counted from the first; shard groups stand apart."""
        tops, y, group = [], 0, self.map.rows[0].group
        for row in self.map.rows:
            y += GROUP_GAP if row.group != group else 0
            group = row.group
            tops.append(y)
            y += self.pitch
        return tops

    def _unit_names(self, y: float) -> None:
        """`block 2` whole or, where that is tight, the numbers of every other block, or of every fifth. Names that are
        not a block's, such as embed and head, come first."""
        names = [column.name for column in self.map.columns]
        is_tight = any(
            text_width(name, ROW_POINTS) + 6 > end - x for name, (x, end) in zip(names, self.edges, strict=True)
        )
        words = [_short(name) if is_tight else name for name in names]
        boxes = []
        for word, (x, end) in zip(words, self.edges, strict=True):
            half = text_width(word, ROW_POINTS) / 2
            middle = min(max((x + end) / 2, self.left + half), self.right - half)
            boxes.append((middle - half, middle + half))
        blocks = [number for number, name in enumerate(names) if _short(name) != name]
        shown: list[int] = []
        for number in sorted(set(range(len(names))) - set(blocks)):
            if not any(_touch(boxes[number], boxes[other]) for other in shown):
                shown.append(number)
        for stride in STRIDES:
            free = [number for number in blocks[::stride] if not any(_touch(boxes[number], boxes[o]) for o in shown)]
            if not any(_touch(boxes[one], boxes[other]) for one, other in pairwise(free)):
                shown += free
                break
        for number in shown:
            self.paper.text(sum(boxes[number]) / 2, y, words[number], ROW_POINTS, anchor="middle")
        if is_tight and blocks:
            self.paper.text(self.left - 8, y, "block", ROW_POINTS, anchor="end", color=MUTED)

    def _unit_columns(self, top: float, bottom: float) -> None:
        """A column a unit that shows nothing, for a page to outline what is gathered; below the marks, so that the
        pointer finds these first."""
        for column, (x, end) in zip(self.map.columns, self.edges, strict=True):
            data = {"unit-column": str(column.index)}
            tip = _column_tip(column) if end - x >= LINE_POINTS else ""  # nobody can point at less
            self.paper.rectangle(x, top, end - x, bottom - top, CLEAR, tip=tip, data=data)

    def _unit_lines(self, top: float, bottom: float) -> None:
        """Where units meet: one comb, as long as they are not too many."""
        inner = [x for x, _ in self.edges[1:]]
        if inner and len(inner) * LINE_POINTS < self.right - self.left:
            few = len(inner) * DENSE_POINTS < self.right - self.left
            lines = [Tooth(x - LINE_HALF, x + LINE_HALF) for x in inner]
            self.paper.add(Shape(comb(lines, top - LINE_OVER, bottom + LINE_OVER), INK if few else GREY))

    # ---- marks ----

    def _marks(self, panel: Panel, lane: Lane, y: int, height: int) -> None:
        """One for each way of holding: the pieces as a comb. See [Note: combs] in `zeroviz.combs`."""
        row, paint = self.map.rows[lane.row], PAINT[panel.category]
        if row.is_folded and not panel.is_whole:
            tip = f"{row.label}: {panel.name}, {row.parts}"
            self.paper.rectangle(
                self.left, y, self.right - self.left, height, PAPER, SHARED_HATCH, edge=paint.color, tip=tip
            )
            return
        for hold, (fill, hatch, edge) in {
            Hold.WHOLE: (paint.color, COPY_HATCH, PAPER),
            Hold.OWNED: (paint.color, None, INK),
            Hold.PADDING: (PADDING.color, PADDING.hatch, PAPER),
        }.items():
            mark = self._mark(lane.pieces, hold, height)
            if mark is None:
                continue
            self.widened |= mark.is_widened
            nbytes = panel.nbytes_of(mark.numel) + (0 if hold is Hold.PADDING else lane.scales_nbytes)
            tip, data = _tip(row, panel, hold, mark.numel, nbytes), _data(row, panel, hold, mark.units, nbytes)
            self.paper.add(
                Shape(mark.corners, fill, None if mark.is_narrow else hatch, edge, tip=tip, data=data, down=y)
            )

    def _mark(self, pieces: tuple[Piece, ...], hold: Hold, height: int) -> _Mark | None:
        """That of the pieces that are held so: worked out once, since classes that are cut alike share their pieces."""
        key = (id(pieces), hold)
        if key not in self._marks_known:
            found = [piece for piece in pieces if piece.hold is hold]
            self._marks_known[key] = _mark_of(found, hold, self.axis, self.edges, height) if found else None
        return self._marks_known[key]

    def _words_in(self, panel: Panel, lane: Lane, middle: float) -> None:
        """What a lane says of itself: a copy that it is one, a folded row what its ranks hold, an empty one nothing."""
        if self.pitch < NAMED_POINTS:
            return
        row = self.map.rows[lane.row]
        if row.is_folded:
            parts = "a whole copy on each" if panel.is_whole else row.parts
            self._in_lane(f"{len(row.ranks):,} ranks, {parts}", middle)
        elif panel.is_whole and panel.tensors is not TensorClass.KEPT:
            self._in_lane("whole copy", middle)
        elif not lane.pieces:
            self._in_lane("nothing", middle)

    def _in_lane(self, words: str, middle: float) -> None:
        """In the widest unit, or where it has no room, in the middle."""
        x, end = max(self.edges, key=lambda edge: round(edge[1] - edge[0]))
        if text_width(words, ROW_POINTS) + 8 > end - x:
            x, end = self.left, self.right
        self.paper.text((x + end) / 2, middle, words, ROW_POINTS, anchor="middle", is_backed=True)

    def _foot(self, y: float) -> float:
        """Notes. Returns where they end."""
        paper = self.paper
        notes = [*self.map.notes]
        if self.widened:
            notes.append("What is too narrow to be seen is drawn wider, and lower in return.")
        if self.axis.padding_scale < 1:
            notes.append("Padding is drawn to a smaller scale than parameters.")
        for note in notes:
            for line in paper.wrapped(note, ROOM):
                y += LINE
                paper.text(MARGIN, y, line, color=MUTED)
        return y + LINE * 0.4


def _touch(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two words of a line have no gap between them."""
    return one[0] < other[1] + 4 and other[0] < one[1] + 4


def _short(name: str) -> str:
    """A block's number."""
    return name.removeprefix("blocks ").removeprefix("block ")


def _figure(lane: Lane) -> str:
    """What a row holds of the class, at the right of its lane."""
    return "" if lane.nbytes is None else format_nbytes(lane.nbytes)


def _data(row: Row, panel: Panel, hold: Hold, units: str, nbytes: int) -> dict[str, str]:
    """What a program reads off a mark. unit: those in which it has a piece, `0-33`."""
    data = {
        "rank": _span(row.ranks[0], row.ranks[-1]),
        "class": panel.tensors.value,
        "unit": units,
        "nbytes": str(nbytes),
        "kind": hold.value,
    }
    return data if row.group is None else {**data, "group": str(row.group), "shard": str(row.shard)}


def _units(pieces: Iterable[Piece]) -> str:
    """`0-2 5`: the units, neighbours as one."""
    found = sorted({piece.unit for piece in pieces})
    runs = [[unit for _, unit in run] for _, run in groupby(enumerate(found), key=lambda pair: pair[1] - pair[0])]
    return " ".join(_span(run[0], run[-1]) for run in runs)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _tip(row: Row, panel: Panel, hold: Hold, numel: int, nbytes: int) -> str:
    how = {Hold.OWNED: "own part", Hold.WHOLE: "whole copy", Hold.PADDING: "padding"}[hold]
    each = " on each" if row.is_folded else ""
    return f"{row.label}: {panel.name}, {how}, {numel:,} elements, {nbytes:,} B{each}"


def _column_tip(column: Column) -> str:
    padding = column.stop - column.start - column.numel
    return f"{column.name}: {column.numel:,} elements" + (f" and {padding:,} of padding" if padding else "")
