"""The plot of one part of a timeline: from bytes to points, and where in an area its name has room. Pure geometry."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zeroviz.timeline_part import Part

STEP_POINTS = 6.0
"""How far apart the places are that a name is tried at."""


@dataclass(frozen=True, slots=True)
class Name:
    """An area's name: its middle, y counted from the plot's top. `crosses`: an upright line may run behind it."""

    x: float
    y: float
    words: str
    crosses: bool


class Plot:
    """A part's plot area: from bytes to points."""

    def __init__(self, part: Part, top: float, height: float) -> None:
        self.part, self.top, self.bottom = part, top, top + height

    def y(self, nbytes: int) -> float:
        part = self.part
        share = (nbytes - part.axis_min) / max(1, part.axis_max - part.axis_min)
        return self.bottom - (self.bottom - self.top) * min(1.0, max(0.0, share))

    def staircase(self, edges: Sequence[float], series: Sequence[int]) -> list[tuple[float, float]]:
        """Level in each column, upright between them; columns as high as the one before add no corner."""
        points = [(edges[0], self.y(series[0]))]
        for x, nbytes in zip(edges[1:-1], series[1:], strict=True):
            y = self.y(nbytes)
            if abs(y - points[-1][1]) >= 0.05:
                points += [(x, points[-1][1]), (x, y)]
        return [*points, (edges[-1], points[-1][1])]


def tops_of(part: Part) -> list[list[int]]:
    """The upper edge of each area in bytes, by column; the first is the axis."""
    stacks = [tuple(accumulate(column.held, initial=0)) for column in part.columns]
    return [list(level) for level in zip(*stacks, strict=True)]


def roomiest(
    edges: Sequence[float], uppers: Sequence[float], lowers: Sequence[float], width: float, off: Sequence[float]
) -> tuple[float, float, float] | None:
    """(height, x of the middle, y of the middle) of the highest box of this width within an area."""
    best: tuple[float, float, float] | None = None
    last = -1e9
    for first, left in enumerate(edges[:-1]):
        if left - last < STEP_POINTS:
            continue
        last = left
        right = left + width
        if right > edges[-1]:
            break
        if any(left - 4 < x < right + 4 for x in off):
            continue
        stop = bisect_left(edges, right)
        top, bottom = max(uppers[first:stop]), min(lowers[first:stop])
        if best is None or bottom - top > best[0] + 0.5:
            best = bottom - top, (left + right) / 2, (top + bottom) / 2
    return best
