"""Trace: what every rank held and sent during one training step, as plain data.

One schema for predicted and live traces (and for rehearsed and recorded ones), and so one way to the picture. A rank's
step is a list of events; at rest, peak and wire totals are derived from it in `zeroviz.rank_trace`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from zeroviz.category import CATEGORY_ORDER as CATEGORY_ORDER
from zeroviz.category import DEVICE_CATEGORIES as DEVICE_CATEGORIES
from zeroviz.category import Category as Category
from zeroviz.errors import TraceError
from zeroviz.events import Event as Event
from zeroviz.link import Direction
from zeroviz.rank_trace import AllocatorReading as AllocatorReading
from zeroviz.rank_trace import Peak as Peak
from zeroviz.rank_trace import RankTrace as RankTrace
from zeroviz.rank_trace import alike, by_name, json_numbers, ranks_from_list, ranks_to_list
from zeroviz.rank_trace import rank_from_dict as rank_from_dict
from zeroviz.rank_trace import rank_to_dict as rank_to_dict
from zeroviz.spec import RunSpec
from zeroviz.wire import Collective as Collective
from zeroviz.wire import WireTotal as WireTotal

TRACE_SCHEMA = "zeroviz.trace/1"
REPORT_SCHEMA = "zeroviz.report/1"
MAX_REPORTED = 4096  # ranks


class Origin(Enum):
    """Where a trace's numbers come from; shown on every picture."""

    PREDICTED = "predicted"
    REHEARSED = "rehearsed"
    LIVE = "live"
    RECORDED = "recorded"

    @property
    def label(self) -> str:
        """The column it heads: what is live was measured."""
        return "measured" if self is Origin.LIVE else self.value


@dataclass(frozen=True)
class Trace:
    """All ranks of one step of one spec. `environment` says what it ran on; None for arithmetic."""

    origin: Origin
    spec: RunSpec
    ranks: Sequence[RankTrace]
    environment: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Raise TraceError unless ranks are 0..N-1 and each rank's step checks.

        What a measured step leaks is a finding and no nonsense: `zeroviz.compare` shows it.
        """
        stretches = alike(self.ranks)
        starts = [0, *(ranks.stop for ranks, _ in stretches)]
        if [ranks.start for ranks, _ in stretches] != starts[:-1] or starts[-1] != self.spec.ranks:
            raise TraceError(f"A trace of {self.spec.ranks} ranks holds ranks {[rank.rank for rank in self.ranks]}.")
        for _, rank in stretches:
            rank.check(may_leak=self.origin in (Origin.LIVE, Origin.RECORDED))

    def report(self) -> dict[str, Any]:
        """The `zeroviz.report/1` dictionary: what `--json` prints. Of more than `MAX_REPORTED` ranks only those are
        listed that differ from the rank before them, and a note says so."""
        return {
            "schema": REPORT_SCHEMA,
            "origin": self.origin.value,
            "spec": self.spec.to_dict(),
            "model": {"name": self.spec.model.name, "num_params": self.spec.model.num_params},
            "ranks": [_rank_report(rank) for rank in self._reported()],
            "environment": dict(self.environment) if self.environment is not None else None,
            "notes": [*self.notes, *self._listing_note()],
        }

    def _listing_note(self) -> tuple[str, ...]:
        if self.spec.ranks <= MAX_REPORTED:
            return ()
        return (f"Of {self.spec.ranks:,} ranks those are listed that differ from the rank before them.",)

    def _reported(self) -> Iterable[RankTrace]:
        """Every rank; of very many, the first of each stretch of neighbours that differ in their number only."""
        return self.ranks if self.spec.ranks <= MAX_REPORTED else [first for _, first in alike(self.ranks)]

    def to_json(self) -> str:
        """The whole trace, events included; `from_json` reads it back unchanged."""
        return json.dumps(
            {
                "schema": TRACE_SCHEMA,
                "origin": self.origin.value,
                "spec": self.spec.to_dict(),
                "ranks": ranks_to_list(self.ranks),
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
                ranks=ranks_from_list(data["ranks"]),
                environment=data["environment"],
                notes=tuple(data["notes"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
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


def _peak_report(peak: Peak) -> dict[str, Any]:
    return {
        "total": peak.total,
        "phase": peak.phase,
        "op": peak.op,
        "unit": peak.unit,
        "by_category": by_name(peak.by_category),
    }


def _rank_report(rank: RankTrace) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "at_rest": {
            "by_category": by_name(rank.at_rest),
            "total": rank.rest_nbytes,
            "on_host": by_name(rank.at_rest_on_host),
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
                    "num_ranks": total.num_ranks,
                    "group": total.group.value,
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
        "losses": json_numbers(rank.losses),
        "step_time_ns": list(rank.step_time_ns),
    }
