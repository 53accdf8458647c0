"""Trace: what every rank held and sent during one training step, as plain data.

One schema for predicted and live traces (and for rehearsed and recorded ones), and so one way to the picture. A rank's
step is a list of events; at rest, peak and wire totals are derived from it here and nowhere else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from math import isfinite, nan
from typing import Any, NamedTuple

from zeroviz.collectives import CollectiveOp, ring_sent_nbytes
from zeroviz.errors import TraceError
from zeroviz.recall import recall
from zeroviz.spec import RunSpec

TRACE_SCHEMA = "zeroviz.trace/1"
REPORT_SCHEMA = "zeroviz.report/1"


class Origin(Enum):
    """Where a trace's numbers come from; shown on every picture."""

    PREDICTED = "predicted"
    REHEARSED = "rehearsed"
    LIVE = "live"
    RECORDED = "recorded"


class Category(Enum):
    """What bytes are for. The docstring says when they come and go, and what they cost."""

    SHARDED_PARAM = "SHARDED_PARAM"
    """The owned 1/N of the parameters (ZeRO-3). Always held."""
    UNSHARDED_PARAM = "UNSHARDED_PARAM"
    """Whole parameters. Always held where they are replicated; under ZeRO-3 one unit from unshard to reshard."""
    SHARDED_GRAD = "SHARDED_GRAD"
    """The owned 1/N of the gradient (ZeRO-2, ZeRO-3). Always held; rewritten by each reduce-scatter."""
    UNSHARDED_GRAD = "UNSHARDED_GRAD"
    """Whole gradients. Always held under DDP and ZeRO-1; else one unit from its backward to its reduction."""
    MASTER_PARAM = "MASTER_PARAM"
    """fp32 copy of the owned parameters for the optimizer, in recipes that have one. Always held."""
    OPTIMIZER_STATE = "OPTIMIZER_STATE"
    """Adam's two moments of the owned parameters. Always held from step 1 on."""
    ACTIVATION = "ACTIVATION"
    """What autograd saved in forward for backward, unit boundaries included."""
    ALL_GATHER_BUFFER = "ALL_GATHER_BUFFER"
    """A separate buffer an all-gather fills. Our own implementation gathers in place and needs none."""
    REDUCE_SCATTER_BUFFER = "REDUCE_SCATTER_BUFFER"
    """A separate buffer a reduce-scatter reads. Our own implementation reduces in place and needs none."""
    BUCKET = "BUCKET"
    """Gradient buckets beside the gradients (torch DDP without gradient_as_bucket_view)."""
    TEMPORARY = "TEMPORARY"
    """Alive within one op of the schedule: results on their way, fresh gradients, optimizer scratch."""
    INPUT = "INPUT"
    """Tokens and targets, and rotary tables. Held from the start of the step to the end of backward."""


# The order of stacking and of tables: what is always held first.
CATEGORY_ORDER = tuple(Category)


class Event(NamedTuple):
    """A change of what a rank holds: `delta_nbytes` of `category`, positive when allocated, negative when freed.

    phase, op and unit say where in the step it happened: `backward`, `unshard`, `block 3`.
    """

    phase: str
    op: str
    unit: str
    category: Category
    delta_nbytes: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call as a rank made it, in a group of `num_ranks`.

    payload_nbytes: the whole array's, padding included. sent_nbytes: what a ring makes this rank send of it.
    """

    op: CollectiveOp
    dtype: str
    num_ranks: int
    payload_nbytes: int
    phase: str
    unit: str

    @property
    def sent_nbytes(self) -> int:
        return ring_sent_nbytes(self.op, self.payload_nbytes, self.num_ranks)


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
    """

    rest_nbytes: int
    peak_nbytes: int
    source: str


@dataclass(frozen=True)
class RankTrace:
    """One rank's step. `rest` is what it holds between steps by category, padding included; `events` start from it.

    padding_nbytes: how much of `rest` is padding. step_counter_nbytes: the optimizer's step counters, one scalar a
    unit, named apart because no published formula counts them. step_time_ns: duration of each step of a live run.
    """

    rank: int
    rest: Mapping[Category, int]
    events: tuple[Event, ...] = ()
    collectives: tuple[Collective, ...] = ()
    padding_nbytes: int = 0
    step_counter_nbytes: int = 0
    allocator: AllocatorReading | None = None
    losses: tuple[float, ...] = ()
    step_time_ns: tuple[int, ...] = ()

    @property
    def at_rest(self) -> dict[Category, int]:
        return _nonzero(self.rest)

    @property
    def rest_nbytes(self) -> int:
        return sum(self.rest.values())

    @property
    def sent_nbytes(self) -> int:
        return sum(total.sent_nbytes for total in self.wire())

    def peak(self) -> Peak:
        """The first moment at which the sum is largest; at rest when the step allocates nothing."""
        return recall("peak", (self.events, self.rest), lambda: _find_peak(self))

    def wire(self) -> tuple[WireTotal, ...]:
        """Collectives summed by (op, dtype); the ring figure is taken of the sum, so it is rounded once."""
        return recall("wire", (self.collectives,), lambda: _sum_by_op(self.collectives))

    def check(self) -> None:
        """Raise TraceError unless no category ever goes negative and the step ends where it began."""
        live: Counter[Category] = Counter(self.rest)
        for position, event in enumerate(self.events):
            live[event.category] += event.delta_nbytes
            if live[event.category] < 0:
                raise TraceError(
                    f"Rank {self.rank}, event {position} ({event.phase}, {event.op}, {event.unit}): "
                    f"{event.category.value} falls to {live[event.category]} bytes; more was freed than allocated."
                )
        if _nonzero(live) != self.at_rest:
            raise TraceError(
                f"Rank {self.rank}: the step does not end at rest; left over {_difference(live, self.rest)}."
            )


@dataclass(frozen=True, slots=True)
class WireTotal:
    """All collectives of one op and dtype of a step: count, whole-array payload, and ring bytes this rank sends."""

    op: CollectiveOp
    dtype: str
    count: int
    payload_nbytes: int
    sent_nbytes: int


@dataclass(frozen=True)
class Trace:
    """All ranks of one step of one spec. `environment` says what it ran on; None for arithmetic."""

    origin: Origin
    spec: RunSpec
    ranks: tuple[RankTrace, ...]
    environment: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Raise TraceError unless ranks are 0..N-1 and each rank's step checks."""
        if [rank.rank for rank in self.ranks] != list(range(self.spec.ranks)):
            raise TraceError(f"A trace of {self.spec.ranks} ranks holds ranks {[rank.rank for rank in self.ranks]}.")
        for rank in self.ranks:
            rank.check()

    def report(self) -> dict[str, Any]:
        """The `zeroviz.report/1` dictionary: what `--json` prints."""
        return {
            "schema": REPORT_SCHEMA,
            "origin": self.origin.value,
            "spec": self.spec.to_dict(),
            "model": {"name": self.spec.model.name, "num_params": self.spec.model.num_params},
            "ranks": [_rank_report(rank) for rank in self.ranks],
            "environment": dict(self.environment) if self.environment is not None else None,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The whole trace, events included; `from_json` reads it back unchanged."""
        return json.dumps(
            {
                "schema": TRACE_SCHEMA,
                "origin": self.origin.value,
                "spec": self.spec.to_dict(),
                "ranks": [rank_to_dict(rank) for rank in self.ranks],
                "environment": dict(self.environment) if self.environment is not None else None,
                "notes": list(self.notes),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read `to_json`'s text. Raises TraceError with one sentence for anything else, a newer version included."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"The text is not whole JSON ({error}); give a file that zeroviz wrote.") from None
        if not isinstance(data, dict) or data.get("schema") != TRACE_SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise TraceError(f"The file's schema is {found!r}; this version reads {TRACE_SCHEMA!r}.")
        try:
            return cls(
                origin=Origin(data["origin"]),
                spec=RunSpec.from_dict(data["spec"]),
                ranks=tuple(rank_from_dict(rank) for rank in data["ranks"]),
                environment=data["environment"],
                notes=tuple(data["notes"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"The trace lacks or garbles a field ({error}); give a file that zeroviz wrote.") from None


def merge(
    origin: Origin, spec: RunSpec, ranks: Iterable[RankTrace], environment: Mapping[str, Any] | None = None
) -> Trace:
    """One trace from the ranks' parts, in rank order and checked."""
    trace = Trace(origin, spec, tuple(sorted(ranks, key=lambda rank: rank.rank)), environment)
    trace.check()
    return trace


def rank_to_dict(rank: RankTrace) -> dict[str, Any]:
    """Plain data of one rank's trace: what an engine sends back."""
    return {
        "rank": rank.rank,
        "rest": {category.value: nbytes for category, nbytes in rank.rest.items()},
        "events": [[e.phase, e.op, e.unit, e.category.value, e.delta_nbytes] for e in rank.events],
        "collectives": [
            [c.op.value, c.dtype, c.num_ranks, c.payload_nbytes, c.phase, c.unit] for c in rank.collectives
        ],
        "padding_nbytes": rank.padding_nbytes,
        "step_counter_nbytes": rank.step_counter_nbytes,
        "allocator": None
        if rank.allocator is None
        else [rank.allocator.rest_nbytes, rank.allocator.peak_nbytes, rank.allocator.source],
        "losses": _json_numbers(rank.losses),
        "step_time_ns": list(rank.step_time_ns),
    }


def rank_from_dict(data: Mapping[str, Any]) -> RankTrace:
    """The inverse of `rank_to_dict`. Raises KeyError, TypeError or ValueError for other data."""
    return RankTrace(
        rank=data["rank"],
        rest={Category(name): int(nbytes) for name, nbytes in data["rest"].items()},
        events=tuple(Event(p, o, u, Category(c), int(n)) for p, o, u, c, n in data["events"]),
        collectives=tuple(
            Collective(CollectiveOp(op), dtype, int(n), int(payload), phase, unit)
            for op, dtype, n, payload, phase, unit in data["collectives"]
        ),
        padding_nbytes=int(data["padding_nbytes"]),
        step_counter_nbytes=int(data["step_counter_nbytes"]),
        allocator=AllocatorReading(*data["allocator"]) if data["allocator"] else None,
        losses=tuple(nan if loss is None else loss for loss in data["losses"]),
        step_time_ns=tuple(data["step_time_ns"]),
    )


def _rank_report(rank: RankTrace) -> dict[str, Any]:
    peak = rank.peak()
    return {
        "rank": rank.rank,
        "at_rest": {
            "by_category": _named(rank.at_rest),
            "total": rank.rest_nbytes,
            "padding_nbytes": rank.padding_nbytes,
            "step_counter_nbytes": rank.step_counter_nbytes,
        },
        "peak": {
            "total": peak.total,
            "phase": peak.phase,
            "op": peak.op,
            "unit": peak.unit,
            "by_category": _named(peak.by_category),
        },
        "wire": {
            "sent_nbytes": rank.sent_nbytes,
            "collectives": [
                {
                    "op": total.op.value,
                    "dtype": total.dtype,
                    "count": total.count,
                    "payload_nbytes": total.payload_nbytes,
                    "sent_nbytes": total.sent_nbytes,
                }
                for total in rank.wire()
            ],
        },
        "allocator": None
        if rank.allocator is None
        else {
            "rest_nbytes": rank.allocator.rest_nbytes,
            "peak_nbytes": rank.allocator.peak_nbytes,
            "source": rank.allocator.source,
        },
        "losses": _json_numbers(rank.losses),
        "step_time_ns": list(rank.step_time_ns),
    }


def _json_numbers(values: Iterable[float]) -> list[float | None]:
    """JSON has no infinity and no NaN: a loss that is none becomes null."""
    return [value if isfinite(value) else None for value in values]


def _sum_by_op(collectives: tuple[Collective, ...]) -> tuple[WireTotal, ...]:
    groups: dict[tuple[CollectiveOp, str, int], list[int]] = {}
    for call in collectives:
        groups.setdefault((call.op, call.dtype, call.num_ranks), []).append(call.payload_nbytes)
    return tuple(
        WireTotal(op, dtype, len(payloads), sum(payloads), ring_sent_nbytes(op, sum(payloads), num_ranks))
        for (op, dtype, num_ranks), payloads in groups.items()
    )


def _find_peak(rank: RankTrace) -> Peak:
    totals = list(accumulate((event.delta_nbytes for event in rank.events), initial=rank.rest_nbytes))
    best = max(totals)
    num_events = totals.index(best)  # up to the first such moment; 0 is at rest
    live: Counter[Category] = Counter(rank.rest)
    for event in rank.events[:num_events]:
        live[event.category] += event.delta_nbytes
    last = rank.events[num_events - 1] if num_events else None
    where = (last.phase, last.op, last.unit) if last else ("at rest", "", "")
    return Peak(best, *where, _nonzero(live))


def _nonzero(counts: Mapping[Category, int]) -> dict[Category, int]:
    return {category: counts[category] for category in CATEGORY_ORDER if counts.get(category)}


def _named(counts: Mapping[Category, int]) -> dict[str, int]:
    return {category.value: nbytes for category, nbytes in counts.items()}


def _difference(left: Mapping[Category, int], right: Mapping[Category, int]) -> dict[str, int]:
    names = {*left, *right}
    return {c.value: left.get(c, 0) - right.get(c, 0) for c in names if left.get(c, 0) != right.get(c, 0)}
