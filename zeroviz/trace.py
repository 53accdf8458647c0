"""Trace: what every rank held and sent during one training step, as plain data.

One schema for predicted and live traces (and for rehearsed and recorded ones), and so one way to the picture. A rank's
step is a list of events; at rest, peak and wire totals are derived from it here and nowhere else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from math import isfinite, nan
from typing import Any

from zeroviz.category import CATEGORY_ORDER as CATEGORY_ORDER
from zeroviz.category import DEVICE_CATEGORIES as DEVICE_CATEGORIES
from zeroviz.category import Category as Category
from zeroviz.collectives import CollectiveOp
from zeroviz.device_lines import DeviceLines
from zeroviz.errors import TraceError
from zeroviz.events import Event as Event
from zeroviz.events import as_events
from zeroviz.link import Direction, Transfer
from zeroviz.recall import recall
from zeroviz.spec import RunSpec
from zeroviz.wire import Collective as Collective
from zeroviz.wire import WireTotal as WireTotal
from zeroviz.wire import sum_by_op

TRACE_SCHEMA = "zeroviz.trace/1"
REPORT_SCHEMA = "zeroviz.report/1"


class Origin(Enum):
    """Where a trace's numbers come from; shown on every picture."""

    PREDICTED = "predicted"
    REHEARSED = "rehearsed"
    LIVE = "live"
    RECORDED = "recorded"


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
        """Raise TraceError unless no category ever goes negative and the step ends where it began.

        may_leak: a measured step may hold more (or less) at its end; `zeroviz.compare` then names it.
        """
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
            raise TraceError(f"Rank {self.rank}: the step does not end at rest; left over {_named(left)}.")


@dataclass(frozen=True)
class Trace:
    """All ranks of one step of one spec. `environment` says what it ran on; None for arithmetic."""

    origin: Origin
    spec: RunSpec
    ranks: tuple[RankTrace, ...]
    environment: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Raise TraceError unless ranks are 0..N-1 and each rank's step checks.

        What a measured step leaks is a finding and no nonsense: `zeroviz.compare` shows it.
        """
        if [rank.rank for rank in self.ranks] != list(range(self.spec.ranks)):
            raise TraceError(f"A trace of {self.spec.ranks} ranks holds ranks {[rank.rank for rank in self.ranks]}.")
        for rank in self.ranks:
            rank.check(may_leak=self.origin in (Origin.LIVE, Origin.RECORDED))

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
    origin: Origin,
    spec: RunSpec,
    ranks: Iterable[RankTrace],
    environment: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> Trace:
    """One trace from the ranks' parts, in rank order and checked; a note that several ranks make stands once."""
    notes = tuple(dict.fromkeys(notes))
    trace = Trace(origin, spec, tuple(sorted(ranks, key=lambda rank: rank.rank)), environment, notes)
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
        "transfers": [[t.direction.value, t.dtype, t.nbytes, t.phase, t.unit] for t in rank.transfers],
        "padding_nbytes": rank.padding_nbytes,
        "step_counter_nbytes": rank.step_counter_nbytes,
        "allocator": None if rank.allocator is None else asdict(rank.allocator),
        "device_lines": None if rank.device_lines is None else rank.device_lines.to_dict(),
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


def _reading_from(data: Any) -> AllocatorReading | None:
    """A reading as `rank_to_dict` gave it, or as older files hold it: [rest, peak, source]."""
    if not data:
        return None
    return AllocatorReading(*data) if isinstance(data, list) else AllocatorReading(**data)


def _peak_report(peak: Peak) -> dict[str, Any]:
    return {
        "total": peak.total,
        "phase": peak.phase,
        "op": peak.op,
        "unit": peak.unit,
        "by_category": _named(peak.by_category),
    }


def _rank_report(rank: RankTrace) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "at_rest": {
            "by_category": _named(rank.at_rest),
            "total": rank.rest_nbytes,
            "on_host": _named(rank.at_rest_on_host),
            "padding_nbytes": rank.padding_nbytes,
            "step_counter_nbytes": rank.step_counter_nbytes,
        },
        "peak": _peak_report(rank.peak()),
        "machine_peak": _peak_report(rank.machine_peak()),
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
        "link": {
            direction.value: sum(t.nbytes for t in rank.transfers if t.direction is direction)
            for direction in Direction
        },
        "allocator": None if rank.allocator is None else asdict(rank.allocator),
        "device_lines": None if rank.device_lines is None else rank.device_lines.to_dict(),
        "losses": _json_numbers(rank.losses),
        "step_time_ns": list(rank.step_time_ns),
    }


def _json_numbers(values: Iterable[float]) -> list[float | None]:
    """JSON has no infinity and no NaN: a loss that is none becomes null."""
    return [value if isfinite(value) else None for value in values]


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


def _named(counts: Mapping[Category, int]) -> dict[str, int]:
    return {category.value: nbytes for category, nbytes in counts.items()}


def _difference(left: Mapping[Category, int], right: Mapping[Category, int]) -> dict[Category, int]:
    return _nonzero({category: left.get(category, 0) - right.get(category, 0) for category in {*left, *right}})
