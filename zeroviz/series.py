"""Series: bytes at each moment of a step, kept in pieces that repeat; spelt out only for whoever looks at each moment.

See [Note: shared changes] in events.py: of the half million moments of a long step a few hundred are different pieces.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import overload

SPELT_OUT = 50_000
"""Moments. Of a longer step the pieces are asked."""


class Series(Sequence[int]):
    """Moment 0 holds `first`; from `starts[i]` on moments hold `levels[i]` more than each of `pieces[i]` says.

    Pieces are not empty and follow one another without a gap. Equal to any sequence of the same figures.
    """

    def __init__(
        self, first: int, starts: Sequence[int], levels: Sequence[int], pieces: Sequence[tuple[int, ...]]
    ) -> None:
        self.first, self.starts, self.levels, self.pieces = first, starts, levels, pieces
        self._length = starts[-1] + len(pieces[-1]) if pieces else 1

    @cached_property
    def spelt_out(self) -> tuple[int, ...]:
        rest = (level + more for level, piece in zip(self.levels, self.pieces, strict=True) for more in piece)
        return (self.first, *rest)

    def tops(self, edges: Sequence[int]) -> list[int]:
        """Between neighbours of `edges`, which go from 0 to the end, the first moment of the most."""
        if len(self) > SPELT_OUT:
            return [self.most(low, high)[1] for low, high in pairwise(edges)]
        figures = self.spelt_out
        return [figures.index(max(figures[low:high]), low) for low, high in pairwise(edges)]

    @cached_property
    def _tops(self) -> list[int]:
        """The most in each piece."""
        most: dict[int, int] = {}  # by identity: hashing a piece would cost as much as its maximum
        for piece in self.pieces:
            if id(piece) not in most:
                most[id(piece)] = max(piece)
        return [level + most[id(piece)] for level, piece in zip(self.levels, self.pieces, strict=True)]

    def most(self, low: int = 0, high: int | None = None) -> tuple[int, int]:
        """(bytes, moment) of the most in low..high, all by default: the first of equals. The range is not empty."""
        high = len(self) if high is None else high
        if low == 0:
            first = (self.first, 0)
            if high == 1:
                return first
            later = self.most(1, high)
            return later if later[0] > first[0] else first
        start, stop = bisect_right(self.starts, low) - 1, bisect_right(self.starts, high - 1)
        whole = range(start + (self.starts[start] < low), stop - (self._end(stop - 1) > high))
        found: list[tuple[int, int]] = []
        if start < whole.start:
            found.append(self._within(start, low, high))
        if whole:
            number = max(whole, key=self._tops.__getitem__)
            found.append((self._tops[number], self.starts[number] + self._place(number)))
        if whole.stop < stop and stop - 1 >= whole.start:
            found.append(self._within(stop - 1, low, high))
        return max(found, key=lambda pair: pair[0])

    def _end(self, number: int) -> int:
        return self.starts[number] + len(self.pieces[number])

    def _place(self, number: int) -> int:
        return self.pieces[number].index(self._tops[number] - self.levels[number])

    def _within(self, number: int, low: int, high: int) -> tuple[int, int]:
        """The most of a piece within low..high."""
        start, piece = self.starts[number], self.pieces[number]
        places = range(max(low - start, 0), min(high - start, len(piece)))
        place = max(places, key=piece.__getitem__)
        return self.levels[number] + piece[place], start + place

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self.spelt_out)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return self.spelt_out[index]
        moment = range(len(self))[index]  # also what is out of range, and what counts from the end
        if not moment:
            return self.first
        number = bisect_right(self.starts, moment) - 1
        return self.levels[number] + self.pieces[number][moment - self.starts[number]]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Series):
            return self is other or self.spelt_out == other.spelt_out
        return self.spelt_out == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.spelt_out)

    def __repr__(self) -> str:
        return f"Series of {len(self)} moments in {len(self.pieces)} pieces"
