"""What is written down while a step runs on a GPU, as plain data: `cluster.cuda_history` reads it afterwards.

A log goes to JSON and back, so a step recorded on one machine can be read again on any other, without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from zeroviz.errors import TraceError
from zeroviz.trace import Category

LOG_SCHEMA = "zeroviz.cuda-log/1"

Where = tuple[str, str, str]
"""Phase, op and unit of the schedule."""


class Counts(NamedTuple):
    """How many allocations and how many requests to free an allocator has served: a place in its history."""

    num_allocs: int
    num_frees: int


@dataclass(frozen=True, slots=True)
class Totals:
    """The allocator's own figures at one moment, from `torch.cuda.memory_stats`; peaks since their last reset.

    `requested` and `active` count a block until it can be used again, `allocated` until its tensor is gone.
    """

    counts: Counts
    requested_nbytes: int
    requested_peak_nbytes: int
    allocated_nbytes: int
    active_nbytes: int
    reserved_nbytes: int
    reserved_peak_nbytes: int

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Totals:
        """From the nested dictionary of `memory_stats_as_nested_dict`."""

        def now(name: str, metric: str = "current") -> int:
            return int(stats[name]["all"][metric])

        return cls(
            counts=Counts(now("allocation", "allocated"), now("allocation", "freed")),
            requested_nbytes=now("requested_bytes"),
            requested_peak_nbytes=now("requested_bytes", "peak"),
            allocated_nbytes=now("allocated_bytes"),
            active_nbytes=now("active_bytes"),
            reserved_nbytes=now("reserved_bytes"),
            reserved_peak_nbytes=now("reserved_bytes", "peak"),
        )


class OpMark(NamedTuple):
    """One op of the schedule, and the counts when it began and ended."""

    where: Where
    begin: Counts
    end: Counts


class TagMark(NamedTuple):
    """Whoever holds the block at `address` at this place says what it is for."""

    at: Counts
    address: int
    category: Category


class SpanMark(NamedTuple):
    """A stretch of the history."""

    begin: Counts
    end: Counts


class Block(NamedTuple):
    """A block that was there before the step. in_use: its tensor lives; otherwise it awaits another stream."""

    address: int
    requested_nbytes: int
    in_use: bool


class Holding(NamedTuple):
    """A tensor held between steps; category None is held but not counted."""

    address: int
    nbytes: int
    category: Category | None


@dataclass(kw_only=True)
class CudaLog:
    """One recorded step.

    start, end: the allocator's totals just before the step and just after it. final: its counts after cuBLAS has been
    asked for its workspaces back, which is the last thing recorded. device_used_nbytes: in use on the whole device at
    `start`. num_on_host: how often the step turned to the host's memory, of which this log has nothing.
    entries: `device_traces` of the device, from `start` (or later, if the history was too short) to `final`.
    """

    start: Totals
    end: Totals
    final: Counts
    device_used_nbytes: int
    max_entries: int
    blocks: Sequence[Block] = ()
    held: Sequence[Holding] = ()
    ops: list[OpMark] = field(default_factory=list)
    tags: list[TagMark] = field(default_factory=list)
    backend: list[SpanMark] = field(default_factory=list)
    num_on_host: int = 0
    entries: Sequence[Mapping[str, Any]] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema": LOG_SCHEMA,
            "note": self.note,
            "start": asdict(self.start),
            "end": asdict(self.end),
            "final": list(self.final),
            "device_used_nbytes": self.device_used_nbytes,
            "max_entries": self.max_entries,
            "blocks": [list(block) for block in self.blocks],
            "held": [[h.address, h.nbytes, h.category.value if h.category else None] for h in self.held],
            "ops": [[list(op.where), list(op.begin), list(op.end)] for op in self.ops],
            "tags": [[list(tag.at), tag.address, tag.category.value] for tag in self.tags],
            "backend": [[list(span.begin), list(span.end)] for span in self.backend],
            "num_on_host": self.num_on_host,
            "entries": [dict(entry) for entry in self.entries],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CudaLog:
        """The inverse of `to_dict`. Raises TraceError with one sentence for anything else."""
        if data.get("schema") != LOG_SCHEMA:
            raise TraceError(f"The log's schema is {data.get('schema')!r}; this version reads {LOG_SCHEMA!r}.")
        try:
            return cls(
                note=data["note"],
                start=Totals(**{**data["start"], "counts": Counts(*data["start"]["counts"])}),
                end=Totals(**{**data["end"], "counts": Counts(*data["end"]["counts"])}),
                final=Counts(*data["final"]),
                device_used_nbytes=data["device_used_nbytes"],
                max_entries=data["max_entries"],
                blocks=[Block(*block) for block in data["blocks"]],
                held=[Holding(a, n, None if c is None else Category(c)) for a, n, c in data["held"]],
                ops=[OpMark((p, o, u), Counts(*begin), Counts(*end)) for (p, o, u), begin, end in data["ops"]],
                tags=[TagMark(Counts(*at), address, Category(c)) for at, address, c in data["tags"]],
                backend=[SpanMark(Counts(*begin), Counts(*end)) for begin, end in data["backend"]],
                num_on_host=data["num_on_host"],
                entries=data["entries"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"The log lacks or garbles a field ({error}); give a file that zeroviz wrote.") from None
