"""Pieces of a shard map as marks on paper: from elements to points, and the comb that draws many pieces as one mark.
Pure geometry.

[Note: combs] What a rank holds of a class is one mark, however many pieces it has: a closed line that runs along the
lane's lower edge and up around each piece, so that a model of hundreds of parameters stays a light picture and both
pens draw it. It has no outline, or the lower edge would be one.

[Note: narrow] What is narrower than can be seen is drawn wider, and lower in return, but not lower than `LEAST` says:
many slivers of a lane do not look like much of it, and padding hides no shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from zeroviz.shard_rules import Hold, Piece, Slot

LEAST = {Hold.WHOLE: (2.0, 0.5), Hold.OWNED: (2.0, 0.5), Hold.PADDING: (3.0, 0.3)}
"""Points in width, and share of the lane's height. See [Note: narrow]."""
NEARLY = 0.6
"""Of a tooth's width that are truly its pieces': from here on it is as high as the lane."""
MERGED_GAP, COPY_GAP = 0.4, 3.5
"""Points. Pieces that are closer are one; in a whole copy, where only narrow padding comes between, sooner."""
MAX_TEETH, COARSE_GAP = 60, 2.0
"""A part of more pieces is drawn on whole points, counted from where each unit begins so that alike units look alike,
and pieces of a unit that are closer than so many points are one."""
MOST_PADDING = 0.5
"""Of the width that the parameters have: where padding is more, it is drawn to a smaller scale."""

Edge = tuple[float, float]


class Tooth(NamedTuple):
    """A piece on paper: from x to stop, of the lane's height the `height`-th part."""

    x: float
    stop: float
    height: float = 1.0


class Axis:
    """From elements to points: parameters to scale and, where there is too much padding, padding to a smaller one."""

    def __init__(self, slots: Sequence[Slot], left: float, right: float) -> None:
        numel, padding = sum(slot.numel for slot in slots), sum(slot.padding for slot in slots)
        self.left, self.padding_scale = left, min(1.0, MOST_PADDING * numel / padding) if padding else 1.0
        lengths = [slot.numel + slot.padding * self.padding_scale for slot in slots]
        self._slots, self._starts = slots, [slot.start for slot in slots]
        self._before = list(accumulate(lengths, initial=0.0))
        self._points = (right - left) / self._before[-1]

    def x(self, element: int) -> float:
        """Where an element begins."""
        if self.padding_scale == 1.0:
            return self.left + self._points * element
        number = max(0, bisect_right(self._starts, element) - 1)
        slot = self._slots[number]
        inside = element - slot.start
        length = min(inside, slot.numel) + max(0, inside - slot.numel) * self.padding_scale
        return self.left + self._points * (self._before[number] + length)


def teeth_of(pieces: Sequence[Piece], hold: Hold, axis: Axis, edges: Sequence[Edge]) -> list[Tooth]:
    """From left to right; `edges`: where each unit begins and ends on paper. See [Note: narrow]."""
    width, height = LEAST[hold]
    is_coarse = hold is not Hold.WHOLE and len(pieces) > MAX_TEETH
    gap = COPY_GAP if hold is Hold.WHOLE else COARSE_GAP if is_coarse else MERGED_GAP
    found: list[tuple[float, float, float]] = []
    unit = -1
    for piece in pieces:
        left, right = edges[piece.unit]
        x, stop = axis.x(piece.start), axis.x(piece.stop)
        true = stop - x
        if true < width:
            x = max(left, min((x + stop - width) / 2, right - width))
            stop = x + width
        if is_coarse:
            offset = int(x - left)
            x = float(round(left) + offset)
            stop = x + max(2, int(stop - left) - offset)
        if found and is_coarse and piece.unit != unit:
            x = max(x, found[-1][1])  # neighbours do not lie over one another
        elif found and x - found[-1][1] < gap:
            x, stop, true = found[-1][0], max(stop, found[-1][1]), found[-1][2] + true
            found.pop()
        if x < stop:
            found.append((x, stop, true))
        unit = piece.unit
    shares = [true / (stop - x) for x, stop, true in found]
    return [
        Tooth(x, stop, 1.0 if share >= NEARLY else max(height, share))
        for (x, stop, _), share in zip(found, shares, strict=True)
    ]


def comb(teeth: Sequence[Tooth], top: float, bottom: float) -> list[tuple[float, float]]:
    """The corners. See [Note: combs]."""
    points: list[tuple[float, float]] = []
    for x, stop, height in teeth:
        up = top if height == 1 else round(bottom - (bottom - top) * height)
        points += [(x, bottom), (x, up), (stop, up), (stop, bottom)]
    return points
