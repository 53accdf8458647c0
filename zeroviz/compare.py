"""Predicted beside measured: what differs, by how much, and the name of the cause.

Nothing is rounded and nothing is dropped: a row is there for every category that either side holds, and a difference
of 0 is a row like any other. A difference without a known cause says "unexplained".

Two figures are compared. "As on NCCL" is what the device holds for the step, whatever it runs on. "As here" is what
this machine's allocator gave out: the same, the host's part, kernels' scratch and the backend's copies. Causes are
looked for op by op (`zeroviz.compare_ops`), so a byte too much is named with its op even where the peak stands
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeroviz.artefacts import ring_scratch_nbytes
from zeroviz.causes import (
    AWAITING,
    BF16_SCRATCH,
    CUDA_KERNELS,
    GLOO_COPIES,
    KERNEL_SCRATCH,
    MOVED_BY_SCRATCH,
    OVERLAPPED_COPIES,
    STEP_COUNTERS,
    UNEXPLAINED,
    WORKSPACES,
    is_unexplained,
)
from zeroviz.collectives import CollectiveOp
from zeroviz.compare_ops import BY_KERNELS, Circumstances, Figure, LeakRow, OpRow, leak_rows, op_rows, where_text
from zeroviz.errors import TraceError
from zeroviz.link import Copies, Direction, sum_copies
from zeroviz.maxima import machine_maxima, maxima
from zeroviz.spec import DType, Implementation
from zeroviz.trace import CATEGORY_ORDER, Category, Origin, Peak, RankTrace, Trace, WireTotal

__all__ = [
    "BF16_SCRATCH",
    "CUDA_KERNELS",
    "GLOO_COPIES",
    "KERNEL_SCRATCH",
    "MOVED_BY_SCRATCH",
    "OVERLAPPED_COPIES",
    "STEP_COUNTERS",
    "UNEXPLAINED",
    "AllocatorRow",
    "Comparison",
    "Figure",
    "LeakRow",
    "MemoryRow",
    "Moment",
    "OpRow",
    "WireRow",
    "compare",
    "is_unexplained",
    "machine_maxima",
    "maxima",
    "outside_words",
    "place_text",
    "where_text",
]


class Moment(Enum):
    """When a rank's bytes are read."""

    REST = "at rest"
    """Between two steps."""
    PEAK = "peak"
    """Where the device holds most during the step: as on NCCL."""
    MACHINE_PEAK = "machine peak"
    """Where this machine's allocator has given out most: as here. Compared where its own events were read."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One category of one rank at one moment; `category` None is the sum. `cause` is empty when nothing differs.

    The sum at the machine's peak has the step counters in it, which are in no category and the same on both sides.
    """

    rank: int
    moment: Moment
    category: Category | None
    predicted: int
    measured: int
    cause: str

    @property
    def difference(self) -> int:
        """measured - predicted."""
        return self.measured - self.predicted


@dataclass(frozen=True, slots=True)
class WireRow:
    """All collectives of one op, dtype and group of one rank; a side that made none has zeros."""

    rank: int
    predicted: WireTotal
    measured: WireTotal
    cause: str

    @property
    def op(self) -> CollectiveOp:
        return self.predicted.op

    @property
    def dtype(self) -> str:
        return self.predicted.dtype

    @property
    def difference(self) -> int:
        """measured - predicted, in bytes this rank sends."""
        return self.measured.sent_nbytes - self.predicted.sent_nbytes


@dataclass(frozen=True, slots=True)
class LinkRow:
    """All copies of one direction and dtype between a rank's device and its host; a side that made none has zeros."""

    rank: int
    direction: Direction
    dtype: str
    predicted: Copies
    measured: Copies
    cause: str


@dataclass(frozen=True, slots=True)
class AllocatorRow:
    """The measured categories against the allocator, which knows nothing of them.

    categories_growth_nbytes: how far the step rises above rest by the categories: all of them where the allocator's own
    events were read, else the device's. device_growth_nbytes: by the device's alone, "as on NCCL".
    allocator_growth_nbytes: by the allocator.
    outside_nbytes: what the allocator holds at rest beyond the categories: step counters, or something without a name.
    unattributed_nbytes: jumps of the allocator's total that no block explains.
    cause explains the difference in growth, outside_cause what is outside; empty for 0.
    """

    rank: int
    categories_growth_nbytes: int
    device_growth_nbytes: int
    allocator_growth_nbytes: int
    outside_nbytes: int
    unattributed_nbytes: int
    source: str
    cause: str
    outside_cause: str

    @property
    def difference(self) -> int:
        """allocator - categories, of the growth."""
        return self.allocator_growth_nbytes - self.categories_growth_nbytes


@dataclass(frozen=True)
class Comparison:
    """Every difference between a predicted and a measured trace of one spec.

    ops: the ops that are not as predicted, in order, by rank; leaks: what is still held when the step is over.
    """

    memory: tuple[MemoryRow, ...]
    wire: tuple[WireRow, ...]
    allocator: tuple[AllocatorRow, ...]
    ops: tuple[OpRow, ...] = ()
    leaks: tuple[LeakRow, ...] = ()
    link: tuple[LinkRow, ...] = ()

    def totals(self, moment: Moment) -> tuple[MemoryRow, ...]:
        """The sum of each rank at `moment`."""
        return tuple(row for row in self.memory if row.moment is moment and row.category is None)

    def of_rank(self, rank: int, moment: Moment) -> tuple[MemoryRow, ...]:
        """One rank's rows at `moment`: categories in their order, then the sum."""
        return tuple(row for row in self.memory if row.rank == rank and row.moment is moment)

    def ops_of(self, rank: int) -> tuple[OpRow, ...]:
        """One rank's ops that differ, in order; the first of them is where it began."""
        return tuple(row for row in self.ops if row.rank == rank)

    def unexplained_nbytes(self, rank: int, moment: Moment) -> int:
        """How many bytes of a rank at `moment` differ without a known cause, whichever way: a line of its own."""
        rows = (row for row in self.of_rank(rank, moment) if row.category)
        return sum(abs(row.difference) for row in rows if is_unexplained(row.cause))

    @property
    def unexplained(self) -> tuple[MemoryRow | WireRow | LinkRow | AllocatorRow | OpRow | LeakRow, ...]:
        """The rows whose difference has no known cause; sums are left out, their categories are in."""
        return (
            *(row for row in self.memory if row.category and is_unexplained(row.cause)),
            *(row for row in self.wire if is_unexplained(row.cause)),
            *(row for row in self.link if is_unexplained(row.cause)),
            *(row for row in self.allocator if is_unexplained(row.cause) or is_unexplained(row.outside_cause)),
            *(row for row in self.ops if is_unexplained(row.cause)),
            *self.leaks,
        )


def compare(predicted: Trace, measured: Trace) -> Comparison:
    """Rows of `measured` beside `predicted`. Raises TraceError unless both are of the same spec."""
    if predicted.spec != measured.spec:
        ours, theirs = predicted.spec.to_dict(), measured.spec.to_dict()
        differ = [f"{name} ({ours[name]} and {theirs[name]})" for name in ours if ours[name] != theirs[name]]
        raise TraceError(f"Only traces of one spec can be compared; these differ in {', '.join(differ)}.")
    memory: list[MemoryRow] = []
    wire: list[WireRow] = []
    link: list[LinkRow] = []
    allocator: list[AllocatorRow] = []
    ops: list[OpRow] = []
    leaks: list[LeakRow] = []
    gloo = (measured.environment or {}).get("backend") == "gloo" and measured.spec.ranks > 1
    for left, right in zip(predicted.ranks, measured.ranks, strict=True):
        known = _circumstances(predicted, measured, right)
        rows = op_rows(left, right, known)
        ops += rows
        leaks += leak_rows(right, rows)
        rest = _moment_rows(left, right, Moment.REST, known, clean=True)
        # What is held before the step is in every op, each of which may then be as predicted.
        clean = not any(map(is_unexplained, (*(row.cause for row in rest), *(row.cause for row in rows))))
        memory += rest
        memory += _moment_rows(left, right, Moment.PEAK, known, clean=clean)
        if known.compares_machines:
            memory += _moment_rows(left, right, Moment.MACHINE_PEAK, known, clean=clean)
        wire += _wire_rows(left, right)
        link += link_rows(left, right)
        if right.allocator is not None:
            allocator.append(_allocator_row(right, known, gloo=gloo))
    return Comparison(tuple(memory), tuple(wire), tuple(allocator), tuple(ops), tuple(leaks), tuple(link))


# After their calls a metered step waits until gloo has let go of its copies; other libraries call it when they like.
_WAIT_FOR_COPIES = (Implementation.OWN, Implementation.FSDP1, Implementation.FSDP2)


def _circumstances(predicted: Trace, measured: Trace, rank: RankTrace) -> Circumstances:
    spec, environment = measured.spec, measured.environment or {}
    devices, ranks = environment.get("devices", ()), environment.get("ranks", ())
    device = str(devices[rank.rank]) if rank.rank < len(devices) else ""
    method = str(ranks[rank.rank].get("meter", "")) if rank.rank < len(ranks) else ""
    return Circumstances(
        exact=rank.allocator is not None and rank.allocator.num_events > 0,
        on_cuda=device.startswith("cuda"),
        narrow=spec.recipe.compute is not DType.FP32,
        overlaps=spec.ranks > 1 and (spec.prefetch > 0 or spec.async_reduce or spec.impl not in _WAIT_FOR_COPIES),
        watched="watched" in method,
        rehearsed=predicted.origin is Origin.REHEARSED,
    )


def _moment_rows(
    ours: RankTrace, theirs: RankTrace, moment: Moment, known: Circumstances, *, clean: bool
) -> list[MemoryRow]:
    """The rows of one rank at one moment. clean: at rest and in its ops nothing differs without a known cause."""
    if moment is Moment.REST:
        here, there = dict(ours.rest), dict(theirs.rest)
        sums, moved = (sum(here.values()), sum(there.values())), ""
    else:
        mine, other = (
            (ours.peak(), theirs.peak()) if moment is Moment.PEAK else (ours.machine_peak(), theirs.machine_peak())
        )
        here, there, sums = dict(mine.by_category), dict(other.by_category), (mine.total, other.total)
        expected, got = place_text(mine), place_text(other)
        moved = "" if expected == got else f"the peaks stand at two moments, predicted in {expected}, measured in {got}"
    rows = []
    for category in CATEGORY_ORDER:
        if here.get(category) or there.get(category):
            predicted, measured = here.get(category, 0), there.get(category, 0)
            cause = ""
            if predicted != measured:
                cause = _cause(theirs, moment, category, measured - predicted, moved, known, clean=clean)
            rows.append(MemoryRow(ours.rank, moment, category, predicted, measured, cause))
    causes = list(dict.fromkeys(row.cause for row in rows if row.cause))  # each once, in the order of the rows
    return [*rows, MemoryRow(ours.rank, moment, None, *sums, "; ".join(causes))]


def _cause(
    theirs: RankTrace,
    moment: Moment,
    category: Category,
    difference: int,
    moved: str,
    known: Circumstances,
    *,
    clean: bool,
) -> str:
    if category is Category.OPTIMIZER_STATE and difference == theirs.step_counter_nbytes:
        return STEP_COUNTERS
    if moment is Moment.REST:
        return UNEXPLAINED
    if known.by_kernels and category in BY_KERNELS:
        return known.by_kernels
    if moment is Moment.MACHINE_PEAK and clean:
        # Every op is as predicted or has a name, so the peak differs by no more than these names.
        if known.narrow and category is Category.KERNEL_SCRATCH:
            return BF16_SCRATCH
        if known.overlaps and (category is Category.BACKEND_COPY or not known.narrow):
            return f"{OVERLAPPED_COPIES}: {moved}" if moved else OVERLAPPED_COPIES
        if known.narrow:
            return f"{MOVED_BY_SCRATCH}: {moved or 'to another moment of the same op'}"
    return f"{UNEXPLAINED}; {moved}" if moved else UNEXPLAINED


def place_text(peak: Peak) -> str:
    """Where a peak stands, for a person: `backward of block 2`, `backward, block 2 (reduce grad)`."""
    return where_text(peak.phase, peak.op, peak.unit)


def _wire_rows(ours: RankTrace, theirs: RankTrace) -> list[WireRow]:
    left = {(total.op, total.dtype, total.group): total for total in ours.wire()}
    right = {(total.op, total.dtype, total.group): total for total in theirs.wire()}
    rows = []
    for key in dict.fromkeys([*left, *right]):
        op, dtype, group = key
        nothing = WireTotal(op, dtype, 0, 0, 0, group=group)
        predicted, measured = left.get(key, nothing), right.get(key, nothing)
        rows.append(WireRow(ours.rank, predicted, measured, "" if predicted == measured else UNEXPLAINED))
    return rows


def link_rows(ours: RankTrace, theirs: RankTrace) -> list[LinkRow]:
    """What goes over the link, by direction and dtype; both may be the same trace."""
    left, right = sum_copies(ours.transfers), sum_copies(theirs.transfers)
    rows = []
    for key in dict.fromkeys([*left, *right]):
        predicted, measured = left.get(key, Copies()), right.get(key, Copies())
        rows.append(LinkRow(ours.rank, *key, predicted, measured, "" if predicted == measured else UNEXPLAINED))
    return rows


def _allocator_row(theirs: RankTrace, known: Circumstances, *, gloo: bool) -> AllocatorRow:
    reading = theirs.allocator
    assert reading is not None
    on_device = theirs.peak().total - theirs.rest_nbytes
    by_categories = on_device
    held_at_rest = theirs.rest_nbytes
    if known.exact:
        everything = sum(theirs.rest.values())
        known_at_rest = everything - theirs.rest.get(Category.UNATTRIBUTED, 0)
        by_categories = theirs.machine_peak().total - everything - theirs.step_counter_nbytes
        held_at_rest = theirs.rest_nbytes if known.on_cuda else known_at_rest
    by_allocator = reading.peak_nbytes - reading.rest_nbytes
    outside = reading.rest_nbytes - held_at_rest
    cause = ""
    if by_allocator != by_categories:
        # Without the allocator's events it sees one number, so the two sources cannot be told apart.
        read_apart = by_allocator > by_categories and not known.exact
        cause = (GLOO_COPIES if gloo else KERNEL_SCRATCH) if read_apart else UNEXPLAINED
        awaiting = theirs.device_lines.peak_awaiting_nbytes if theirs.device_lines else 0
        if 0 < by_allocator - by_categories <= awaiting:
            cause = AWAITING
    if reading.unattributed_nbytes:
        cause = UNEXPLAINED
    return AllocatorRow(
        rank=theirs.rank,
        categories_growth_nbytes=by_categories,
        device_growth_nbytes=on_device,
        allocator_growth_nbytes=by_allocator,
        outside_nbytes=outside,
        unattributed_nbytes=reading.unattributed_nbytes,
        source=reading.source,
        cause=cause,
        outside_cause=_outside_cause(theirs, outside),
    )


def _outside_cause(theirs: RankTrace, outside_nbytes: int) -> str:
    """Step counters, which CUDA's optimizers may keep on the host; on a GPU also what cuBLAS keeps."""
    counters = theirs.step_counter_nbytes
    workspaces = theirs.device_lines.workspace_nbytes if theirs.device_lines else 0
    known = ((0, ""), (counters, STEP_COUNTERS), (workspaces, WORKSPACES))
    both = (counters + workspaces, f"{WORKSPACES}; {STEP_COUNTERS}")
    return next((cause for nbytes, cause in (*known, both) if nbytes == outside_nbytes), UNEXPLAINED)


def outside_words(rank: RankTrace) -> str:
    """What the process holds besides, for a line below the sums: no figure here has it.

    The sizes are what a count of all malloc calls of a step gave beyond torch's allocator (tests/dist/referee.c): 32 kB
    a GPT-2 block and 61 kB a Llama block, whatever their widths.
    """
    words = (
        "Outside torch's allocator, and in no figure here: the objects of autograd's graph, some 30 to 60 kB a block; "
        "the autograd engine's tables, about 1 to 5 kB"
    )
    rings = [ring_scratch_nbytes(call.op, call.payload_nbytes, call.num_ranks) for call in rank.collectives]
    if any(rings):
        words += f"; gloo's ring buffers, up to {max(rings):,} B while it reduces"
    return f"{words}."
