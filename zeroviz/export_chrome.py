"""A step in the Trace Event Format, for chrome://tracing and ui.perfetto.dev: bytes as counters, ops as slices.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

[Note: two viewers] A counter with several series is a stack in chrome://tracing; Perfetto draws a track for each series
(google/perfetto, issue 768), so a counter of the sum stands beside it. chrome://tracing takes the series of a counter
from its first sample, and one that a later sample leaves out as 0; Perfetto takes it as unchanged. So the first sample
names every series, and a later one leaves out only what is 0 and was.

[Note: bounded] Ranks whose steps are one and the same are one process. Of a step with more moments than there is room
for some are left out, and of more ops neighbours are one slice; never the moment that holds most.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from zeroviz.category import CATEGORY_ORDER, Category
from zeroviz.course import OpSpan, course_of
from zeroviz.events import as_events
from zeroviz.export_calls import Call, kind_of, moments_of, nbytes_of
from zeroviz.rank_trace import RankTrace, alike
from zeroviz.series import Series
from zeroviz.tables import stretch_label
from zeroviz.trace import Trace
from zeroviz.wording import recipe_sum, title, what_text

MAX_PROCESSES = 16
MAX_SAMPLES = 3000
MAX_SLICES = 2000
MAX_CALLS = 1000
"""In a file, shared by its processes: moments of counters, ops, collectives and copies. A moment is some 300 bytes of
text and the others are some 170, so a file stays under 2 MB."""
MAX_SPANS = 8  # of ranks, in a process's name

CLOCK = (
    "No trace has a clock: one microsecond is one change of what a rank holds, in their order. The length of an op is "
    "how many changes it makes, and says nothing of time."
)
COUNTERS = (
    "held: bytes on the device by category, as on NCCL; on the host: what is offloaded. chrome://tracing stacks the "
    "series of a counter; Perfetto draws a track for each, and 'held, sum' is their sum."
)
CALLS = (
    "Collectives and copies stand at the op that starts them, several of one op spread over it. sent_nbytes is what a "
    "ring makes the rank send, payload_nbytes the whole array's."
)

PIDS_APART = 10  # processes are 10, 20, ..., and their threads count on from there: no two threads have one number
OPS, WIRE, LINK = range(3)
Record = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Steps:
    """The ranks that share one step, and the first of them."""

    stretches: tuple[range, ...]
    first: RankTrace

    @property
    def label(self) -> str:
        """`ranks 0-2, 5`."""
        spans = stretch_label(self.stretches).split(", ")
        more = f" and {len(spans) - MAX_SPANS:,} stretches more" if len(spans) > MAX_SPANS else ""
        return ", ".join(spans[:MAX_SPANS]) + more


def chrome_trace(trace: Trace) -> str:
    """`trace` as a JSON object with displayTimeUnit, otherData and traceEvents.

    A process for each step that differs; in it counters of what is held, a thread of phases with their ops in them, and
    threads of what is sent and what is copied to and from the host. otherData says what it is of, how it is to be read
    and what is left out.
    """
    found = distinct_steps(trace)
    shown = _shown(found)
    events: list[Record] = []
    notes = list(trace.notes)
    for number, steps in enumerate(shown, 1):
        process = _Process(PIDS_APART * number, steps, len(shown))
        events += process.records()
        notes += process.notes
    if len(shown) < len(found):
        notes.append(
            f"Of {len(found):,} steps that differ {len(shown)} are here, the one that peaks highest among them; the "
            "names of the processes say whose they are."
        )
    spec = trace.spec
    other = {
        "title": title(spec),
        "origin": trace.origin.value,
        "what": what_text(spec),
        "recipe": recipe_sum(spec, "bytes a parameter"),
        "clock": CLOCK,
        "counters": COUNTERS,
        "calls": CALLS,
        "notes": notes,
        "spec": spec.to_dict(),
    }
    return json.dumps({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}, separators=(",", ":"))


def distinct_steps(trace: Trace) -> tuple[Steps, ...]:
    """The steps that differ in what is held, sent or copied, each with its ranks. Padding and losses make none."""
    numbers: dict[object, int] = {}
    seen: dict[tuple[int, ...], int] = {}
    groups: dict[int, list[tuple[range, RankTrace]]] = {}
    for ranks, rank in alike(trace.ranks):
        # Predicted ranks share their lists: what is one object needs no look at its thousands of events.
        same = (id(rank.rest), id(rank.events), id(rank.collectives), id(rank.transfers))
        if same not in seen:
            events = as_events(rank.events)
            rest = frozenset((category, nbytes) for category, nbytes in rank.rest.items() if nbytes)
            key = (rest, tuple(events.wheres), tuple(events.stretches), rank.collectives, rank.transfers)
            seen[same] = numbers.setdefault(key, len(numbers))
        groups.setdefault(seen[same], []).append((ranks, rank))
    return tuple(Steps(tuple(ranks for ranks, _ in group), group[0][1]) for group in groups.values())


def _shown(found: Sequence[Steps]) -> Sequence[Steps]:
    """All of them; of very many the one that peaks highest, and others evenly from the first to the last."""
    if len(found) <= MAX_PROCESSES:
        return found
    highest = max(range(len(found)), key=lambda number: found[number].first.peak().total)
    evenly = (number * (len(found) - 1) // (MAX_PROCESSES - 2) for number in range(MAX_PROCESSES - 1))
    return [found[number] for number in sorted({highest, *evenly})]


def kept(series: Series, most: int) -> list[int]:
    """Every moment, or at most `most` (3 or more) of them: the first, the last, and of each stretch the one that holds
    most, the first of equals."""
    length = len(series)
    if length <= most:
        return list(range(length))
    edges = [length * number // (most - 2) for number in range(most - 1)]
    return sorted({0, length - 1, *(series.most(low, high)[1] for low, high in pairwise(edges))})


class _Process:
    """One rank's step as records of the format, for it and all that share it.

    notes: what is not in the records, in sentences. num_processes: how many share the file.
    """

    def __init__(self, pid: int, steps: Steps, num_processes: int) -> None:
        self.pid, self.label, self.rank = pid, steps.label, steps.first
        self.course = course_of(steps.first)
        self.max_samples = MAX_SAMPLES // num_processes
        self.max_slices = MAX_SLICES // num_processes
        self.max_calls = MAX_CALLS // num_processes
        self.notes: list[str] = []

    def records(self) -> Iterator[Record]:
        yield self._record("M", "process_name", args={"name": self.label})
        yield self._record("M", "process_sort_index", args={"sort_index": self.pid})
        yield self._record("M", "thread_name", args={"name": "ops"})
        yield from self._counters()
        yield from self._slices()
        yield from self._calls(WIRE, "wire", self.rank.collectives)
        yield from self._calls(LINK, "link to the host", self.rank.transfers)

    def _record(self, kind: str, name: str, thread: int = OPS, **more: Any) -> Record:
        return {"ph": kind, "name": name, "pid": self.pid, "tid": self.pid + thread, **more}

    def _counters(self) -> Iterator[Record]:
        device = [category for category in CATEGORY_ORDER if category.on_device]
        if not self.course.uses_host:
            yield from self._stack("held", self.course.device, device, self.max_samples)
            return
        host = [category for category in CATEGORY_ORDER if category.on_host]
        yield from self._stack("held", self.course.device, device, self.max_samples // 2)
        yield from self._stack("on the host", self.course.host, host, self.max_samples // 2)

    def _stack(self, name: str, series: Series, categories: Sequence[Category], most: int) -> Iterator[Record]:
        """A sample at each moment that changes it, and one when all is over: see [Note: two viewers]."""
        moments = kept(series, most)
        if len(moments) < len(series):
            self.notes.append(
                f"{self.label}, {name}: {len(moments):,} of {len(series):,} moments, of each stretch the one that "
                "holds most."
            )
        held = self.course.held(moments)
        used = [category for category in categories if any(now[category] for now in held)]
        before: dict[Category, int] = {}
        for moment, now in [*zip(moments, held, strict=True), (len(series), held[-1])]:
            is_end = moment == len(series)
            values = {category: now[category] for category in used}
            if values != before or is_end:
                said = {c.value: nbytes for c, nbytes in values.items() if is_end or nbytes or before.get(c) != 0}
                yield self._record("C", name, ts=moment, args=said)
                yield self._record("C", f"{name}, sum", ts=moment, args={"bytes": sum(values.values())})
            before = values

    def _slices(self) -> Iterator[Record]:
        """Phases, and in each its ops; of very many ops neighbours together."""
        ops = self.course.ops
        together = max(1, -(-len(ops) // self.max_slices))
        if together > 1:
            self.notes.append(f"{self.label}: {len(ops):,} ops, up to {together:,} neighbours in a slice.")
        for phase, run in groupby(ops, key=lambda span: span.phase):
            spans = list(run)
            yield self._slice(phase, "phase", spans)
            for start in range(0, len(spans), together):
                some = spans[start : start + together]
                top = _highest(some)
                name = f"{top.op} {top.unit}".rstrip()
                yield self._slice(name if len(some) == 1 else f"{name} and {len(some) - 1:,} more", "op", some)

    def _slice(self, name: str, category: str, spans: Sequence[OpSpan]) -> Record:
        """Neighbours from the first's start to the last's end, and the place where they hold most."""
        start, stop = spans[0].start, spans[-1].stop
        top, here = _highest(spans), max(span.max_here_nbytes for span in spans)
        args: Record = {"phase": top.phase, "op": top.op, "unit": top.unit, "most_nbytes": top.max_nbytes}
        if here != top.max_nbytes:
            args["most_as_here_nbytes"] = here
        args["end_nbytes"] = spans[-1].end_nbytes
        if len(spans) > 1:
            args["ops"] = len(spans)
        return self._record("X", name, cat=category, ts=start, dur=stop - start, args=args)

    def _calls(self, thread: int, name: str, calls: Sequence[Call]) -> Iterator[Record]:
        """Instants; of very many calls those of one kind that are neighbours together, where the first stands."""
        if not calls:
            return
        yield self._record("M", "thread_name", thread, args={"name": name})
        together = -(-len(calls) // self.max_calls)
        if together > 1:
            self.notes.append(f"{self.label}, {name}: {len(calls):,} calls, up to {together:,} of one kind together.")
        groups: dict[tuple[int, str], list[tuple[int, Call]]] = {}
        for number, pair in enumerate(zip(moments_of(calls, self.course.ops), calls, strict=True)):
            groups.setdefault((number // together, kind_of(pair[1])), []).append(pair)
        for (_, kind), group in groups.items():
            moment, first = group[0]
            args: Record = {"phase": first.phase, "unit": first.unit, **nbytes_of(call for _, call in group)}
            if len(group) > 1:
                args["calls"] = len(group)
            yield self._record("i", kind, thread, s="t", ts=moment, args=args)


def _highest(spans: Sequence[OpSpan]) -> OpSpan:
    return max(spans, key=lambda span: span.max_nbytes)
