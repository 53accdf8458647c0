"""Trace -> WireScene: what a rank sends in one step, collective by collective, beside DDP's one all-reduce. As data.

The axis counts bytes or elements (`zeroviz.wire_sums.Measure`). Ranks that send the same share a row.

[Note: lanes] A row is one lane: what goes through one group of ranks. hybrid_shard has two, and they may be wires of
different speeds. The second begins where the first ends, so that both are apart and their sum is read off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zeroviz.axis import NUM_TICKS, axis_unit, axis_words, ticks
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.errors import TraceError
from zeroviz.rank_trace import RankTrace
from zeroviz.scene import SOURCE_LABEL
from zeroviz.spec import RunSpec
from zeroviz.trace import Origin, Trace
from zeroviz.wire import WireTotal
from zeroviz.wire_sums import (
    Key,
    Kind,
    Measure,
    WireReference,
    by_key,
    by_phase,
    collective_words,
    in_lane,
    key_of,
    kinds_of,
    lane_words,
    listed,
    numel_of,
    reference_of,
)
from zeroviz.wire_words import MAX_KINDS, notes_of, subtitle_of, times_words
from zeroviz.wording import title


@dataclass(frozen=True, slots=True)
class WireTick:
    """A mark on the axis, at so many bytes or elements."""

    at: int
    label: str


@dataclass(frozen=True, slots=True)
class Part:
    """The calls of a segment that are made in one phase. start, length: on the axis, as the segment's."""

    id: str
    phase: str
    calls: int
    payload_nbytes: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class WireSegment:
    """All collectives of one op, dtype and group of ranks, by one rank in one step.

    num_ranks: that take part. payload_nbytes: of whole arrays, padding included. sent_nbytes: by this rank, in a ring;
    the trace's figure. volume_numel: elements of the payload, as often as a ring passes them on. start, length: on the
    axis, in its bytes or elements. difference: length less the predicted one; None of what is predicted.
    """

    id: str
    row: int
    op: CollectiveOp
    dtype: str
    group: Group
    num_ranks: int
    calls: int
    payload_nbytes: int
    sent_nbytes: int
    volume_numel: int
    start: int
    length: int
    difference: int | None
    parts: tuple[Part, ...]

    @property
    def label(self) -> str:
        return collective_words(self.op, self.dtype)


@dataclass(frozen=True, slots=True)
class WireRow:
    """One lane of ranks that send the same, as one source sees it. See [Note: lanes].

    lane: its words, empty where it is the only one. start, length: on the axis. in_all: of all its lanes, on the last
    of them.
    """

    id: str
    index: int
    ranks: tuple[range, ...]
    rank_label: str
    origin: Origin
    group: Group
    lane: str
    start: int
    length: int
    difference: int | None
    in_all: int | None

    @property
    def source_label(self) -> str:
        return SOURCE_LABEL[self.origin]

    @property
    def words(self) -> str:
        """`each rank, predicted, in group`."""
        return listed(self.rank_label, self.source_label, self.lane)


@dataclass(frozen=True, slots=True)
class WireEntry:
    """A line of the table: a collective as the first row's ranks make it. payload, predicted, measured: bytes or
    elements, as the axis; measured is None where there is no second trace."""

    op: CollectiveOp
    label: str
    calls: int
    payload: int
    predicted: int
    measured_calls: int | None
    measured: int | None


@dataclass(frozen=True)
class WireScene:
    """The whole picture as data. Without rows where nothing is sent."""

    spec: RunSpec
    measure: Measure
    title: str
    subtitle: tuple[str, ...]
    rows: tuple[WireRow, ...]
    segments: tuple[WireSegment, ...]
    entries: tuple[WireEntry, ...]
    ticks: tuple[WireTick, ...]
    axis_label: str
    axis_max: int
    reference: WireReference | None
    notes: tuple[str, ...]

    def amount(self, length: int) -> str:
        """In the axis's unit, so that figures of one picture compare digit by digit."""
        return self.measure.amount(length)

    def times_words(self, row: WireRow) -> str:
        """`1.5 x DDP's`, once for all lanes; elements, in P, say it themselves."""
        if self.reference is None or row.in_all is None or self.measure.in_elements:
            return ""
        return times_words(self.spec, row.in_all, self.reference)

    @property
    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        lines = [self.title, *self.subtitle]
        for row in self.rows:
            sent = (f"{s.label} {self.amount(s.length)}" for s in self.segments if s.row == row.index)
            lines.append(f"{row.words.capitalize()}: {', '.join(sent) or 'nothing'}")
        if self.reference is not None:
            lines.append(f"{self.reference.label}, {self.reference.detail}: {self.amount(self.reference.at)}")
        return " ".join(f"{line}." for line in lines)


def build_wire_scene(predicted: Trace, measured: Trace | None = None, *, in_elements: bool = False) -> WireScene:
    """What each rank sends, with a second trace of the same spec beside it. Raises TraceError for another spec."""
    if measured is not None and measured.spec != predicted.spec:
        raise TraceError("The measured trace is of another spec than the predicted one; they cannot share a picture.")
    spec = predicted.spec
    measure = Measure(in_elements, spec.model.num_params)
    kinds = kinds_of(predicted, measured) if spec.ranks > 1 else []
    rows: list[WireRow] = []
    segments: list[WireSegment] = []
    for kind in kinds[:MAX_KINDS]:
        _add_rows(rows, segments, kind, predicted, measure)
        if measured is not None:
            _add_rows(rows, segments, kind, measured, measure, is_second=True)
    reference = reference_of(spec, measure) if kinds else None
    axis_max = max([reference.at if reference else 1, *(row.start + row.length for row in rows)])
    if not in_elements:
        measure = Measure(in_elements, spec.model.num_params, axis_unit(axis_max)[0])
    return WireScene(
        spec=spec,
        measure=measure,
        title=f"{title(spec)}: what each rank sends",
        subtitle=tuple(subtitle_of(predicted, measured, kinds, measure, reference)),
        rows=tuple(rows),
        segments=tuple(segments),
        entries=tuple(_entries(kinds, measure)),
        ticks=_ticks(axis_max, measure),
        axis_label=_axis_label(axis_max, measure),
        axis_max=axis_max,
        reference=reference,
        notes=tuple(notes_of(predicted, measured, kinds, measure)),
    )


# ---- rows and segments ----


def _add_rows(
    rows: list[WireRow],
    segments: list[WireSegment],
    kind: Kind,
    trace: Trace,
    measure: Measure,
    *,
    is_second: bool = False,
) -> None:
    """The lanes of one kind as `trace` sees them. is_second: each is compared with what the first trace says."""
    seen = kind.sides[is_second]
    totals, expected = by_key(seen), by_key(kind.ours) if is_second else None
    lanes, label = kind.lanes(), kind.label(trace.spec.ranks)
    stop = 0
    for lane in lanes:
        ident = f"rank{kind.ranks[0][0]}-{SOURCE_LABEL[trace.origin]}-{lane.value}"
        start = stop
        for total in in_lane(totals, lane):
            segment = _segment(ident, len(rows), total, stop, seen, expected, measure)
            segments.append(segment)
            stop += segment.length
        ours = None if expected is None else sum(measure.of(total) for total in in_lane(expected, lane))
        rows.append(
            WireRow(
                id=ident,
                index=len(rows),
                ranks=tuple(kind.ranks),
                rank_label=label,
                origin=trace.origin,
                group=lane,
                lane=lane_words(lane, lanes),
                start=start,
                length=stop - start,
                difference=None if ours is None else stop - start - ours,
                in_all=stop if lane is lanes[-1] else None,
            )
        )


def _segment(
    row_id: str,
    row: int,
    total: WireTotal,
    start: int,
    seen: RankTrace,
    expected: Mapping[Key, WireTotal] | None,
    measure: Measure,
) -> WireSegment:
    ident = f"{row_id}-{total.op.value}-{total.dtype}-{total.num_ranks}"
    length = measure.of(total)
    ours = None if expected is None else expected.get(key_of(total))
    return WireSegment(
        id=ident,
        row=row,
        op=total.op,
        dtype=total.dtype,
        group=total.group,
        num_ranks=total.num_ranks,
        calls=total.count,
        payload_nbytes=total.payload_nbytes,
        sent_nbytes=total.sent_nbytes,
        volume_numel=Measure(True, measure.num_params).of(total),
        start=start,
        length=length,
        difference=None if expected is None else length - (measure.of(ours) if ours else 0),
        parts=tuple(_parts(ident, total, start, seen, measure)),
    )


def _parts(ident: str, total: WireTotal, start: int, seen: RankTrace, measure: Measure) -> Iterator[Part]:
    """By phase, in order. The ring figure is rounded once, of the sum, so a part's is the step from sum to sum."""
    payload = before = 0
    for phase, (calls, nbytes) in by_phase(seen)[key_of(total)].items():
        payload += nbytes
        after = measure.count(total.op, total.dtype, total.num_ranks, payload)
        yield Part(f"{ident}-{phase}", phase, calls, nbytes, start + before, after - before)
        before = after


def _entries(kinds: Sequence[Kind], measure: Measure) -> Iterator[WireEntry]:
    """Of the first kind, lane by lane; what only other ranks or the other side make is there as well, with zeros."""
    if not kinds:
        return
    sides = [by_key(side) for side in kinds[0].sides]
    every = {key_of(total) for kind in kinds[1:MAX_KINDS] for side in kind.sides for total in side.wire()}
    lanes = kinds[0].lanes()
    in_order = list(Group)
    keys = dict.fromkeys([*(key for side in sides for key in side), *sorted(every, key=str)])
    for key in sorted(keys, key=lambda key: in_order.index(key[2])):
        op, dtype, group, num_ranks = key
        found = [side.get(key) or WireTotal(op, dtype, 0, 0, 0, num_ranks, group) for side in sides]
        payload = found[0].payload_nbytes
        yield WireEntry(
            op=op,
            label=listed(collective_words(op, dtype), lane_words(group, lanes)),
            calls=found[0].count,
            payload=numel_of(payload, dtype) if measure.in_elements else payload,
            predicted=measure.of(found[0]),
            measured_calls=found[1].count if len(found) > 1 else None,
            measured=measure.of(found[1]) if len(found) > 1 else None,
        )


# ---- the axis ----


def _ticks(axis_max: int, measure: Measure) -> tuple[WireTick, ...]:
    if not measure.in_elements:
        return tuple(WireTick(tick.nbytes, tick.label) for tick in ticks(0, axis_max, axis_unit(axis_max)[1]))
    steps = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
    step = measure.num_params * next(step for step in steps if step * measure.num_params * NUM_TICKS >= axis_max)
    return tuple(WireTick(at, measure.amount(at)) for at in range(0, axis_max + 1, step))


def _axis_label(axis_max: int, measure: Measure) -> str:
    if measure.in_elements:
        return f"elements moved by a rank in one step (P = {measure.num_params:,} parameters)"
    return axis_words(*axis_unit(axis_max), "sent by a rank in one step, in a ring")
