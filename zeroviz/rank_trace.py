"""RankTrace: one rank's step as plain data, what follows from it, and many ranks that are alike.

At rest, peak and wire totals are derived from the events here and nowhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isfinite, nan
from operator import eq
from typing import Any, overload

from zeroviz.category import CATEGORY_ORDER, Category
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.device_lines import DeviceLines
from zeroviz.errors import TraceError
from zeroviz.events import Event, as_events
from zeroviz.link import Direction, Transfer
from zeroviz.recall import recall
from zeroviz.wire import Collective, WireTotal, sum_by_op


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest sum during the step, where it stands, and what it is made of."""

    total: int
    phase: str
    op: str
    unit: str
    by_category: Mapping[Category, int]


@dataclass(frozen=True, slots=True)
class AllocatorReading:
    """The allocator's own figures for the step, whatever our bookkeeping says.

    rest_nbytes: live bytes just before the metered step. peak_nbytes: the largest live total inside it.
    num_events: how many events the allocator gave; 0 where it gives none, and then nothing below was read.
    num_hidden_frees: frees without an event (the backend's threads make them), rebuilt from the running total.
    unattributed_nbytes: sum of the jumps of the running total that no event and no block explains; see
        `Category.UNATTRIBUTED`.
    num_late, late_ns: how often and how long the step waited for the backend to let go of its copies.
    num_given_up: how many of these waits ended at their bound.
    """

    rest_nbytes: int
    peak_nbytes: int
    source: str
    num_events: int = 0
    num_hidden_frees: int = 0
    unattributed_nbytes: int = 0
    num_late: int = 0
    late_ns: int = 0
    num_given_up: int = 0


@dataclass(frozen=True)
class RankTrace:
    """One rank's step. `rest` is what it holds between steps by category, padding included; `events` start from it.

    padding_nbytes: how much of `rest` is padding. step_counter_nbytes: the optimizer's step counters, one scalar a
    unit, named apart because no published formula counts them. transfers: what offloading moves over the link between
    device and host. device_lines: what a GPU holds beside the step. step_time_ns: duration of each step of a live run.
    """

    rank: int
    rest: Mapping[Category, int]
    events: Sequence[Event] = ()
    collectives: tuple[Collective, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    padding_nbytes: int = 0
    step_counter_nbytes: int = 0
    allocator: AllocatorReading | None = None
    device_lines: DeviceLines | None = None
    losses: tuple[float, ...] = ()
    step_time_ns: tuple[int, ...] = ()

    @property
    def at_rest(self) -> dict[Category, int]:
        """What the device holds between steps."""
        return {category: nbytes for category, nbytes in _nonzero(self.rest).items() if category.on_device}

    @property
    def at_rest_on_host(self) -> dict[Category, int]:
        """What is offloaded to the host between steps."""
        return {category: nbytes for category, nbytes in _nonzero(self.rest).items() if category.on_host}

    @property
    def rest_nbytes(self) -> int:
        """On the device."""
        return sum(self.at_rest.values())

    @property
    def sent_nbytes(self) -> int:
        return sum(total.sent_nbytes for total in self.wire())

    def peak(self) -> Peak:
        """The first moment at which the device holds most, whatever kernels and backend borrow; at rest when the step
        allocates nothing. This is the figure "as on NCCL"."""
        return self._peak

    @cached_property
    def _peak(self) -> Peak:
        # Kept with the rank as well: a trace may have more ranks that differ than are remembered.
        return recall("peak", (self.events, self.rest), lambda: _find_peak(self))

    def machine_peak(self) -> Peak:
        """The first moment at which the sum over all categories is largest: device, host, kernels' scratch and the
        backend's copies. The step counters are in its total and in no category. This is the figure "as here": what
        the allocator of a rank on CPU sees."""
        made_of = (self.events, self.rest)
        return recall(f"machine peak, {self.step_counter_nbytes}", made_of, lambda: _find_machine_peak(self))

    def wire(self) -> tuple[WireTotal, ...]:
        """Collectives summed by (op, dtype); the ring figure is taken of the sum, so it is rounded once."""
        return recall("wire", (self.collectives,), lambda: sum_by_op(self.collectives))

    def leftover(self) -> dict[Category, int]:
        """What the step's end holds beyond its beginning, by category: empty for a step that ends at rest."""
        live: Counter[Category] = Counter(self.rest)
        for _, changes in as_events(self.events).parts:
            live.update(changes.net)
        return _difference(live, self.rest)

    def check(self, *, may_leak: bool = False) -> None:
        """Raise TraceError unless no category ever goes negative, nor what is sent, and the step ends where it began.

        may_leak: a measured step may hold more (or less) at its end; `zeroviz.compare` then names it.
        """
        for number, call in enumerate(self.collectives):
            if call.payload_nbytes < 0 or call.num_ranks < 1:
                raise TraceError(
                    f"Rank {self.rank}, collective {number} ({call.op.value}): {call.payload_nbytes:,} bytes among "
                    f"{call.num_ranks:,} ranks; there can be no fewer than 0 among 1."
                )
        live: Counter[Category] = Counter(self.rest)
        for position, event in enumerate(self.events):
            live[event.category] += event.delta_nbytes
            if live[event.category] < 0 and event.category is not Category.UNATTRIBUTED:
                raise TraceError(
                    f"Rank {self.rank}, event {position} ({event.phase}, {event.op}, {event.unit}): "
                    f"{event.category.value} falls to {live[event.category]} bytes; more was freed than allocated."
                )
        left = _difference(live, self.rest)
        if left and not may_leak:
            raise TraceError(f"Rank {self.rank}: the step does not end at rest; left over {by_name(left)}.")


class AlikeRanks(Sequence[RankTrace]):
    """Ranks 0 to N-1 in stretches of neighbours that differ in their number only: a million ranks cost as much as one.

    stretches: for each its ranks and the first one's trace; without a gap, in order.
    """

    def __init__(self, stretches: Sequence[tuple[range, RankTrace]]) -> None:
        self.stretches = tuple(stretches)
        self._starts = [ranks.start for ranks, _ in self.stretches]

    def __len__(self) -> int:
        return self.stretches[-1][0].stop

    @overload
    def __getitem__(self, index: int) -> RankTrace: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RankTrace, ...]: ...
    def __getitem__(self, index: int | slice) -> RankTrace | tuple[RankTrace, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        rank = range(len(self))[index]  # also what is out of range, and what counts from the end
        ranks, first = self.stretches[bisect_right(self._starts, rank) - 1]
        return first if rank == ranks.start else replace(first, rank=rank)

    def __iter__(self) -> Iterator[RankTrace]:
        for ranks, first in self.stretches:
            yield first
            yield from (replace(first, rank=rank) for rank in ranks[1:])

    def __eq__(self, other: object) -> bool:
        return len(self) == len(other) and all(map(eq, self, other)) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


def alike(ranks: Sequence[RankTrace]) -> tuple[tuple[range, RankTrace], ...]:
    """Stretches of neighbours known to differ in their number only, each with its first; otherwise rank by rank."""
    if isinstance(ranks, AlikeRanks):
        return ranks.stretches
    return tuple((range(rank.rank, rank.rank + 1), rank) for rank in ranks)


def rank_to_dict(rank: RankTrace) -> dict[str, Any]:
    """Plain data of one rank's trace: what an engine sends back."""
    return {
        "rank": rank.rank,
        "rest": {category.value: nbytes for category, nbytes in rank.rest.items()},
        "events": [[e.phase, e.op, e.unit, e.category.value, e.delta_nbytes] for e in rank.events],
        "collectives": [
            [c.op.value, c.dtype, c.num_ranks, c.payload_nbytes, c.phase, c.unit, *_group_of(c)]
            for c in rank.collectives
        ],
        "transfers": [[t.direction.value, t.dtype, t.nbytes, t.phase, t.unit] for t in rank.transfers],
        "padding_nbytes": rank.padding_nbytes,
        "step_counter_nbytes": rank.step_counter_nbytes,
        "allocator": None if rank.allocator is None else asdict(rank.allocator),
        "device_lines": None if rank.device_lines is None else rank.device_lines.to_dict(),
        "losses": json_numbers(rank.losses),
        "step_time_ns": list(rank.step_time_ns),
    }


def rank_from_dict(data: Mapping[str, Any]) -> RankTrace:
    """The inverse of `rank_to_dict`. Raises KeyError, TypeError or ValueError for other data."""
    return RankTrace(
        rank=data["rank"],
        rest={Category(name): int(nbytes) for name, nbytes in data["rest"].items()},
        events=tuple(Event(p, o, u, Category(c), int(n)) for p, o, u, c, n in data["events"]),
        collectives=tuple(
            Collective(CollectiveOp(op), dtype, int(n), int(payload), phase, unit, *map(Group, group))
            for op, dtype, n, payload, phase, unit, *group in data["collectives"]
        ),
        transfers=tuple(
            Transfer(Direction(direction), dtype, int(nbytes), phase, unit)
            for direction, dtype, nbytes, phase, unit in data["transfers"]
        ),
        padding_nbytes=int(data["padding_nbytes"]),
        step_counter_nbytes=int(data["step_counter_nbytes"]),
        allocator=_reading_from(data["allocator"]),
        device_lines=DeviceLines.from_dict(lines) if (lines := data.get("device_lines")) else None,
        losses=tuple(nan if loss is None else loss for loss in data["losses"]),
        step_time_ns=tuple(data["step_time_ns"]),
    )


def _group_of(call: Collective) -> list[str]:
    """Named where it is not every rank: files from before there were groups have none."""
    return [] if call.group is Group.ALL else [call.group.value]


def ranks_to_list(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Plain data of many ranks. A stretch of alike neighbours is its first with `num_ranks`; events that an earlier
    entry has as well are that entry's number, `{"as": 0}`."""
    entries: list[dict[str, Any]] = []
    entry_of: dict[int, int] = {}
    for stretch, first in alike(ranks):
        same = entry_of.setdefault(id(first.events), len(entries))
        shares = same < len(entries)
        entry = rank_to_dict(replace(first, events=()) if shares else first)
        if shares:
            entry["events"] = {"as": same}
        if len(stretch) > 1:
            entry["num_ranks"] = len(stretch)
        entries.append(entry)
    return entries


def ranks_from_list(data: Sequence[Mapping[str, Any]]) -> Sequence[RankTrace]:
    """The inverse of `ranks_to_list`. Raises KeyError, IndexError, TypeError or ValueError for other data."""
    stretches: list[tuple[range, RankTrace]] = []
    for entry in data:
        shares = isinstance(entry["events"], dict)
        first = rank_from_dict({**entry, "events": []} if shares else entry)
        if shares:
            first = replace(first, events=stretches[entry["events"]["as"]][1].events)
        stretches.append((range(first.rank, first.rank + int(entry.get("num_ranks", 1))), first))
    if all(len(stretch) == 1 for stretch, _ in stretches):
        return tuple(first for _, first in stretches)
    return AlikeRanks(stretches)


def _reading_from(data: Any) -> AllocatorReading | None:
    """A reading as `rank_to_dict` gave it, or as older files hold it: [rest, peak, source]."""
    if not data:
        return None
    named: dict[str, Any] = (
        dict(zip(("rest_nbytes", "peak_nbytes", "source"), data, strict=True)) if isinstance(data, list) else data
    )
    values: dict[str, Any] = {name: str(value) if name == "source" else int(value) for name, value in named.items()}
    return AllocatorReading(**values)


def _find_peak(rank: RankTrace) -> Peak:
    events, rest = as_events(rank.events), rank.at_rest
    total, part, num_changes = events.first_top(sum(rest.values()), here=False)
    live, where = events.held_at(rest, part, num_changes)
    return Peak(total, *where, {category: nbytes for category, nbytes in _nonzero(live).items() if category.on_device})


def _find_machine_peak(rank: RankTrace) -> Peak:
    events = as_events(rank.events)
    total, part, num_changes = events.first_top(sum(rank.rest.values()) + rank.step_counter_nbytes, here=True)
    live, where = events.held_at(rank.rest, part, num_changes)
    return Peak(total, *where, _nonzero(live))


def _nonzero(counts: Mapping[Category, int]) -> dict[Category, int]:
    return {category: counts[category] for category in CATEGORY_ORDER if counts.get(category)}


def _difference(left: Mapping[Category, int], right: Mapping[Category, int]) -> dict[Category, int]:
    return _nonzero({category: left.get(category, 0) - right.get(category, 0) for category in {*left, *right}})


def by_name(counts: Mapping[Category, int]) -> dict[str, int]:
    return {category.value: nbytes for category, nbytes in counts.items()}


def json_numbers(values: Iterable[float]) -> list[float | None]:
    """JSON has no infinity and no NaN: a loss that is none becomes null."""
    return [value if isfinite(value) else None for value in values]
