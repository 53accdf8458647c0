"""What is held by category at many moments of a step, from pieces that the step repeats.

A step has a few dozen different pieces and hundreds of each (see [Note: shared changes] in events.py). A piece is spelt
out once; what is held at a moment is what was held where its piece begins, and the piece's own row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from zeroviz.category import CATEGORY_ORDER, Category
from zeroviz.moments import Moments

Row = tuple[int, ...]


class Levels:
    """Bytes at each of `moments`, which ascend: a row each, of a figure for each of `categories`.

    starts: the first moment of each of `pieces`, ascending; before the first one stands `rest`. categories: those ever
    held, in CATEGORY_ORDER.
    """

    def __init__(
        self, rest: Mapping[Category, int], starts: Sequence[int], pieces: Sequence[Moments], moments: Sequence[int]
    ) -> None:
        kinds = {id(piece): piece for piece in pieces}
        seen = {category for piece in kinds.values() for category, _ in piece.changes} | rest.keys()
        self.categories = tuple(category for category in CATEGORY_ORDER if category in seen)
        self._place = {category: place for place, category in enumerate(self.categories)}
        self._spelt_out: dict[int, list[Row]] = {}
        self.rows = self._rows(rest, starts, pieces, moments)

    def _rows(
        self, rest: Mapping[Category, int], starts: Sequence[int], pieces: Sequence[Moments], moments: Sequence[int]
    ) -> list[Row]:
        place = self._place
        live = [rest.get(category, 0) for category in self.categories]
        rows: list[Row] = []
        done = 0  # how many pieces are in `live`
        for moment in moments:
            number = bisect_right(starts, moment) - 1
            for whole in pieces[done : max(number, 0)]:
                for category, nbytes in whole.net:
                    live[place[category]] += nbytes
            done = max(number, done)
            if number < 0:
                rows.append(tuple(live))
                continue
            more = self._of(pieces[number])[moment - starts[number]]
            rows.append(tuple([before + nbytes for before, nbytes in zip(live, more, strict=True)]))
        return rows

    def _of(self, piece: Moments) -> list[Row]:
        """A piece's moments, counted from its beginning."""
        found = self._spelt_out.get(id(piece))
        if found is None:
            live = [0] * len(self.categories)
            found = self._spelt_out[id(piece)] = []
            for category, nbytes in piece.changes:
                live[self._place[category]] += nbytes
                found.append(tuple(live))
        return found

    def column(self, category: Category) -> list[int]:
        """One category's bytes at each moment."""
        place = self._place.get(category)
        return [0] * len(self.rows) if place is None else [row[place] for row in self.rows]

    def of(self, categories: Sequence[Category]) -> list[Row]:
        """The rows for `categories` alone, in their order."""
        return list(zip(*map(self.column, categories), strict=True)) if categories else [()] * len(self.rows)

    @property
    def present(self) -> tuple[Category, ...]:
        """Categories of which anything is held at any of the moments."""
        is_held = map(any, zip(*self.rows, strict=True))
        return tuple(category for category, held in zip(self.categories, is_held, strict=True) if held)
