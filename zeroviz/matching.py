"""The ops of two accounts of one step, side by side.

A step repeats its ops, a micro-batch like the one before. Where the two part, the nearest op that both have next is
where they meet again: an account has an op more or less here and there, and never a whole micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def side_by_side(left: Sequence[object], right: Sequence[object]) -> Iterator[tuple[int | None, int | None]]:
    """The places of equal items of both, in order; None on the side that lacks one. Between two meetings the left
    side's own come first."""
    i = j = 0
    while i < len(left) and j < len(right):
        meeting = _meeting(left, right, i, j)
        yield from ((place, None) for place in range(i, meeting[0]))
        yield from ((None, place) for place in range(j, meeting[1]))
        i, j = meeting
        if i < len(left) and j < len(right):
            yield i, j
            i, j = i + 1, j + 1
    yield from ((place, None) for place in range(i, len(left)))
    yield from ((None, place) for place in range(j, len(right)))


def _meeting(left: Sequence[object], right: Sequence[object], i: int, j: int) -> tuple[int, int]:
    """The first places from i and j on with the same item, fewest passed over in all; the ends if there are none."""
    num_left, num_right = len(left) - i, len(right) - j
    for distance in range(num_left + num_right - 1):
        for skip in range(max(0, distance - num_right + 1), min(distance + 1, num_left)):
            if left[i + skip] == right[j + distance - skip]:
                return i + skip, j + distance - skip
    return len(left), len(right)
