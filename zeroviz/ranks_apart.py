"""Which ranks of a prediction hold the same at each moment, found without the whole course of any.

Each of a thousand ranks may have a step of its own, thousands of stretches long, that differs from the others' in a
handful: where a parameter was cut. What all steps have in common at their beginning and at their end is shared, so it
is found by identity; only what lies between is worked out.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroviz.events import Changes, as_events
from zeroviz.rank_trace import RankTrace


def first_of_each(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """The first of those that hold as many bytes on the device as it at every moment, for each that has another."""
    events = [as_events(rank.events).stretches for rank in ranks]
    before, after = _shared_ends([list(map(id, stretches)) for stretches in events])
    seen: dict[tuple[int, tuple[int, ...]], RankTrace] = {}
    for rank, stretches in zip(ranks, events, strict=True):
        key = rank.rest_nbytes, _device(stretches[before : len(stretches) - after])
        seen.setdefault(key, rank)
    return list(seen.values())


def _shared_ends(rows: Sequence[list[int]]) -> tuple[int, int]:
    """How many figures all rows have in common at the beginning, and at the end of what is left of them."""
    before = _num_shared(rows)
    return before, _num_shared([row[before:][::-1] for row in rows])


def _num_shared(rows: Sequence[list[int]]) -> int:
    """At the beginning: what the first and the last in order have in common, all between them have."""
    first, last = min(rows), max(rows)
    return next(
        (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first)
    )


def _device(stretches: Sequence[Changes]) -> tuple[int, ...]:
    """Bytes on the device at each moment of some stretches, counted from their start."""
    level = 0
    found: list[int] = []
    for changes in stretches:
        found += [level + more for more in changes.moments.device]
        level += changes.moments.net_device
    return tuple(found)
