"""Trace -> Timeline: one rank's whole step as stacked areas of bytes over its events. Pure: a picture as data.

The x axis counts moments, one a change of what is held, in their order; it is not time. A measured step of the same
spec is laid over it as a line, op by op: its moments of an op share that op's stretch of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from zeroviz.compare import place_text
from zeroviz.course import Course, OpSpan, align, changing, columns, course_of, edges_of
from zeroviz.errors import TraceError
from zeroviz.rank_trace import alike
from zeroviz.ranks_apart import first_of_each
from zeroviz.recall import recall
from zeroviz.scene import Reference
from zeroviz.spec import RunSpec
from zeroviz.timeline_part import Overlay, Part, device_part, host_part, reaching
from zeroviz.trace import Origin, RankTrace, Trace
from zeroviz.wording import title, what_text

MAX_COLUMNS = 640
"""About one a point of the drawing's width: a longer step is folded, and no column's largest moment is lost."""
LITTLE = 5
"""Where the peak is less than rest by one part in so many, an axis from zero leaves the step too flat to be read."""


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of moments with a name: a phase, or a unit in use."""

    label: str
    start: int
    stop: int


class OpMark(NamedTuple):
    """One op, drawn and measured: the most held in it. None where that source has no such op."""

    span: OpSpan
    measured_max: int | None


@dataclass(frozen=True, slots=True)
class PeakMark:
    """Where the largest sum stands."""

    moment: int
    nbytes: int
    place: str


@dataclass(frozen=True)
class Timeline:
    """The whole picture as data."""

    spec: RunSpec
    rank: int
    origin: Origin
    measured: Origin | None
    num_moments: int
    parts: tuple[Part, ...]
    ops: tuple[OpMark, ...]
    phases: tuple[Band, ...]
    units: tuple[Band, ...]
    peak: PeakMark
    title: str
    subtitle: tuple[str, ...]
    axis_words: str
    reference: Reference | None
    notes: tuple[str, ...]

    @property
    def overlaid(self) -> str:
        """What the line over the areas is called: measured, rehearsed. Empty without one."""
        return self.measured.label if self.measured else ""

    @property
    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        return " ".join(f"{line}." for line in (self.title, *self.subtitle))


def build_timeline(
    drawn: Trace,
    measured: Trace | None = None,
    *,
    rank: int = 0,
    reference: Reference | None = None,
    from_rest: bool | None = None,
    most: int = MAX_COLUMNS,
) -> Timeline:
    """The timeline of a rank of `drawn`, with a measured trace of the same spec laid over it.

    reference: what the axis reaches at least. from_rest: begin the device's axis at what is held at rest; None does so
    where the step adds little to it. Raises TraceError for another spec and for a rank that is not there.
    """
    if measured is not None and measured.spec != drawn.spec:
        raise TraceError("The measured trace is of another spec than the other one; they cannot share a timeline.")
    if not 0 <= rank < len(drawn.ranks):
        raise TraceError(f"Rank {rank} was asked for; the trace has ranks 0 to {len(drawn.ranks) - 1}.")
    ours = drawn.ranks[rank]
    theirs = None if measured is None else measured.ranks[rank]
    course, other = course_of(ours), None if theirs is None else course_of(theirs)
    pairs = [] if other is None else align(course, other)
    overlay = None if other is None else Overlay.of(other, pairs)
    phases = _phases(course)
    stretches = _stretches(course, phases, most)
    if from_rest is None:
        from_rest = adds_little(drawn)
        reference = None if from_rest else reference
    is_own = overlay is None and drawn.origin in (Origin.LIVE, Origin.RECORDED)
    device = device_part(course, stretches, overlay, from_rest=from_rest, is_own=is_own)
    if reference is not None:
        device = reaching(device, reference.nbytes)
    host = host_part(course, stretches, overlay)
    seen_max = [seen.max_nbytes for _, seen in pairs] if pairs else [None] * len(course.ops)
    spans = [span for span, _ in pairs] if pairs else course.ops
    return Timeline(
        spec=drawn.spec,
        rank=rank,
        origin=drawn.origin,
        measured=None if measured is None else measured.origin,
        num_moments=len(course.device),
        parts=(device,) if host is None else (device, host),
        ops=tuple(map(OpMark, spans, seen_max)),
        phases=phases,
        units=_units(course),
        peak=_peak_mark(ours, course),
        title=f"{title(drawn.spec)}: the step of {_whose(drawn, measured, rank)}",
        subtitle=_subtitle(drawn, measured, rank, device, pairs, other),
        axis_words="changes of what is held, in their order; not to scale in time",
        reference=reference,
        notes=_notes(drawn, measured, course, device),
    )


def adds_little(trace: Trace) -> bool:
    """Whether the step rises so little above rest that an axis from zero would show a flat line."""
    device = course_of(trace.ranks[0]).device
    most, _ = device.most()
    return (most - device[0]) * LITTLE < most


def distinct_ranks(drawn: Trace, measured: Trace | None = None) -> tuple[int, ...]:
    """The first of the ranks that share one timeline, for each timeline there is."""
    return recall("distinct ranks", (drawn.ranks, measured), lambda: _distinct_ranks(drawn, measured), weigh=len)


def _distinct_ranks(drawn: Trace, measured: Trace | None) -> tuple[int, ...]:
    if measured is None:
        # Predicted ranks share their events: nothing is to be worked out to see that.
        apart = {(id(rank.events), id(rank.rest)): rank for _, rank in reversed(alike(drawn.ranks))}
        firsts = sorted(apart.values(), key=lambda rank: rank.rank)
        return tuple(rank.rank for rank in (firsts if len(firsts) == 1 else first_of_each(firsts)))
    seen: dict[object, int] = {}
    for ours, theirs in zip(drawn.ranks, measured.ranks, strict=True):
        # What is here beside goes by chance: gloo's thread may come before or after the next op has begun.
        seen.setdefault((course_of(ours).device, course_of(theirs).device), ours.rank)
    return tuple(seen.values())


def _stretches(course: Course, phases: Sequence[Band], most: int) -> list[tuple[int, int, int]]:
    """Columns within each phase, in proportion to its moments."""
    edges: list[int] = []
    for phase in phases:
        share = max(1, most * (phase.stop - phase.start) // len(course.device))
        edges += edges_of(phase.start, phase.stop, share)
    return columns(course, [*edges, len(course.device)])


def _phases(course: Course) -> tuple[Band, ...]:
    """Runs of ops of one phase; the moment at rest belongs to the first."""
    bands = [band for band in _bands(course.ops, lambda span: span.phase) if band.stop > band.start]
    if not bands:
        return (Band("at rest", 0, 1),)
    return (replace(bands[0], start=0), *bands[1:])


def _units(course: Course) -> tuple[Band, ...]:
    """Runs of ops on one unit, within a phase; ops without a unit have none."""
    by_phase = groupby(course.ops, key=lambda span: span.phase)
    bands = [band for _, spans in by_phase for band in _bands(tuple(spans), lambda span: span.unit)]
    return tuple(band for band in bands if band.label and band.stop > band.start)


def _bands(spans: Sequence[OpSpan], name: Callable[[OpSpan], str]) -> list[Band]:
    runs = [(label, list(run)) for label, run in groupby(spans, key=name)]
    return [Band(label, run[0].start, run[-1].stop) for label, run in runs]


def _peak_mark(rank: RankTrace, course: Course) -> PeakMark:
    largest, moment = course.device.most()
    return PeakMark(moment, largest, place_text(rank.peak()))


def _whose(drawn: Trace, measured: Trace | None, rank: int) -> str:
    if len(drawn.ranks) == 1:
        return "the only rank"
    return "each rank" if len(distinct_ranks(drawn, measured)) == 1 else f"rank {rank}"


def _subtitle(
    drawn: Trace,
    measured: Trace | None,
    rank: int,
    part: Part,
    pairs: Sequence[tuple[OpSpan, OpSpan]],
    other: Course | None,
) -> tuple[str, ...]:
    lines = [what_text(drawn.spec), _peak_line(drawn, rank, part)]
    if measured is not None and other is not None:
        counted = changing(pairs)
        num_equal = sum(ours.max_nbytes == theirs.max_nbytes for ours, theirs in counted)
        lines.append(f"{_peak_line(measured, rank, part)}; the line")
        reach = f"{num_equal:,} reach the {drawn.origin.label} maximum to the byte"
        lines.append(f"Of {len(counted):,} ops that change what is held, {reach}")
    elif drawn.origin in (Origin.LIVE, Origin.RECORDED):
        other = course_of(drawn.ranks[rank])
    if other is not None and other.has_artefacts:
        lines.append(
            f"As here, dotted: up to {part.amount(other.here.most()[0])}, with the backend's copies and the kernels' "
            "scratch of this machine"
        )
    return tuple(lines)


def _peak_line(trace: Trace, rank: int, part: Part) -> str:
    seen = trace.ranks[rank]
    device, peak = course_of(seen).device, seen.peak()
    return (
        f"{trace.origin.label.capitalize()}: {part.amount(device[0])} at rest, "
        f"peak {part.amount(device.most()[0])} in {place_text(peak)}"
    )


def _notes(drawn: Trace, measured: Trace | None, course: Course, part: Part) -> tuple[str, ...]:
    notes = list(drawn.notes)
    if part.num_columns < len(course.device):
        notes.append(
            f"{len(course.device):,} moments in {part.num_columns} columns; each shows the moment at which it holds "
            "most."
        )
    if measured is not None:
        notes += [note for note in measured.notes if note not in notes]
    return tuple(notes)
