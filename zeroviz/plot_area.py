"""The plot of one part of a timeline: from bytes to points, and where in an area its name has room. Pure geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zeroviz.timeline_part import Part

Floats = NDArray[np.float64]
Table = NDArray[Any]
"""Whole numbers; Python's own where they do not fit an int64."""

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

    def ys(self, figures: ArrayLike) -> Floats:
        """The same of many figures, of any shape."""
        part = self.part
        shares = (np.asarray(figures, dtype=float) - part.axis_min) / max(1, part.axis_max - part.axis_min)
        found: Floats = self.bottom - (self.bottom - self.top) * np.clip(shares, 0.0, 1.0)
        return found

    def staircase(self, edges: Floats, figures: ArrayLike) -> list[tuple[float, float]]:
        """Level in each column, upright between them; columns as high as the one before add no corner."""
        ys = np.round(self.ys(figures), 1)
        corners = np.flatnonzero(np.diff(ys)) + 1
        levels = ys[corners].tolist()
        points = [(float(edges[0]), float(ys[0]))]
        before = float(ys[0])
        for x, y in zip(edges[corners].tolist(), levels, strict=True):
            points += [(x, before), (x, y)]
            before = y
        return [*points, (float(edges[-1]), before)]


def tops_of(held: Table) -> Table:
    """The upper edge of each area in bytes, a row an area; the first is the axis. held: a row for each column."""
    tops = np.zeros((held.shape[1] + 1, held.shape[0]), dtype=held.dtype)
    np.cumsum(held.T, axis=0, out=tops[1:])
    return tops


class Rooms:
    """Where words have room within areas over `edges`, which are the columns'. Upright lines stand at `off`."""

    def __init__(self, edges: Floats, off: Sequence[float]) -> None:
        self.edges, self.off = edges, np.array(sorted(off))
        # A place every few points, at the beginning of a column.
        steps = np.floor((edges[:-1] - edges[0]) / STEP_POINTS)
        self._firsts = np.flatnonzero(np.diff(steps, prepend=-1.0))
        self._lefts = edges[self._firsts]

    def roomiest(
        self, uppers: Floats, lowers: Floats, width: float, *, crosses: bool
    ) -> tuple[float, float, float] | None:
        """(height, x of the middle, y of the middle) of the highest box of this width within an area, the first of
        those about as high. crosses: whether it may lie over an upright line."""
        rights = self._lefts + width
        fit = rights <= self.edges[-1]
        if not crosses:
            near = np.searchsorted(self.off, self._lefts - 4, side="right")
            fit &= near == np.searchsorted(self.off, rights + 4, side="left")
        if not fit.any():
            return None
        firsts, rights = self._firsts[fit], rights[fit]
        # reduceat works on what lies between neighbours: from a first to its stop, then from there to the next first.
        spans = np.empty(2 * len(firsts), dtype=np.int64)
        spans[::2], spans[1::2] = firsts, np.searchsorted(self.edges, rights)
        tops = np.maximum.reduceat(np.append(uppers, uppers[-1]), spans)[::2]
        bottoms = np.minimum.reduceat(np.append(lowers, lowers[-1]), spans)[::2]
        heights = bottoms - tops
        best = int(np.argmax(heights >= heights.max() - 0.5))
        middle = float(self.edges[firsts[best]] + rights[best]) / 2
        return float(heights[best]), middle, float(tops[best] + bottoms[best]) / 2
