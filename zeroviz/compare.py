"""Predicted beside measured: what differs, by how much, and the name of the cause.

Nothing is rounded and nothing is dropped: a row is there for every category that either side holds, and a difference
of 0 is a row like any other. A difference without a known cause says "unexplained".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from zeroviz.collectives import CollectiveOp
from zeroviz.errors import TraceError
from zeroviz.trace import CATEGORY_ORDER, Category, Peak, RankTrace, Trace, WireTotal

UNEXPLAINED = "unexplained"
STEP_COUNTERS = "the optimizer's step counters, one scalar a unit, which the categories leave out"
KERNEL_SCRATCH = "scratch inside kernels, which no category counts"
GLOO_COPIES = (
    "gloo's working copies of what it gathers and reduces, and scratch inside kernels: no category counts them"
)

CUDA_KERNELS = "CUDA's kernels keep and borrow other tensors than the CPU's, which the prediction counts"
# Of a step in progress, these two depend on kernels; model states and the batch do not.
_BY_KERNELS = (Category.ACTIVATION, Category.TEMPORARY)


class Moment(Enum):
    """When a rank's bytes are read."""

    REST = "at rest"
    """Between two steps."""
    PEAK = "peak"
    """Where the sum over the categories is largest during the step."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One category of one rank at one moment; `category` None is the sum. `cause` is empty when nothing differs."""

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
    """All collectives of one op and dtype of one rank; a side that made none has zeros."""

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
class AllocatorRow:
    """The measured categories against the allocator, which knows nothing of them.

    growth: how far the step rises above rest, by the categories and by the allocator.
    outside_nbytes: what the allocator holds at rest beyond the categories: step counters, or something without a name.
    cause explains the difference in growth, outside_cause what is outside; empty for 0.
    """

    rank: int
    categories_growth_nbytes: int
    allocator_growth_nbytes: int
    outside_nbytes: int
    source: str
    cause: str
    outside_cause: str

    @property
    def difference(self) -> int:
        """allocator - categories, of the growth."""
        return self.allocator_growth_nbytes - self.categories_growth_nbytes


@dataclass(frozen=True)
class Comparison:
    """Every difference between a predicted and a measured trace of one spec."""

    memory: tuple[MemoryRow, ...]
    wire: tuple[WireRow, ...]
    allocator: tuple[AllocatorRow, ...]

    def totals(self, moment: Moment) -> tuple[MemoryRow, ...]:
        """The sum of each rank at `moment`."""
        return tuple(row for row in self.memory if row.moment is moment and row.category is None)

    def of_rank(self, rank: int, moment: Moment) -> tuple[MemoryRow, ...]:
        """One rank's rows at `moment`: categories in their order, then the sum."""
        return tuple(row for row in self.memory if row.rank == rank and row.moment is moment)

    @property
    def unexplained(self) -> tuple[MemoryRow | WireRow | AllocatorRow, ...]:
        """The rows whose difference has no known cause; sums are left out, their categories are in."""
        return (
            *(row for row in self.memory if row.category and row.cause == UNEXPLAINED),
            *(row for row in self.wire if row.cause == UNEXPLAINED),
            *(row for row in self.allocator if UNEXPLAINED in (row.cause, row.outside_cause)),
        )


def compare(predicted: Trace, measured: Trace) -> Comparison:
    """Rows of `measured` beside `predicted`. Raises TraceError unless both are of the same spec."""
    if predicted.spec != measured.spec:
        ours, theirs = predicted.spec.to_dict(), measured.spec.to_dict()
        differ = [f"{name} ({ours[name]} and {theirs[name]})" for name in ours if ours[name] != theirs[name]]
        raise TraceError(f"Only traces of one spec can be compared; these differ in {', '.join(differ)}.")
    memory: list[MemoryRow] = []
    wire: list[WireRow] = []
    allocator: list[AllocatorRow] = []
    environment = measured.environment or {}
    gloo = environment.get("backend") == "gloo" and measured.spec.ranks > 1
    devices = [str(device) for device in environment.get("devices", ())] or [""] * measured.spec.ranks
    for left, right in zip(predicted.ranks, measured.ranks, strict=True):
        by_kernels = CUDA_KERNELS if devices[left.rank].startswith("cuda") else ""
        rest, peak = (left.at_rest, right.at_rest), (left.peak().by_category, right.peak().by_category)
        memory += _moment_rows(left, right, Moment.REST, *rest, by_kernels)
        memory += _moment_rows(left, right, Moment.PEAK, *peak, by_kernels)
        wire += _wire_rows(left, right)
        if right.allocator is not None:
            allocator.append(_allocator_row(right, gloo=gloo))
    return Comparison(tuple(memory), tuple(wire), tuple(allocator))


def _moment_rows(
    ours: RankTrace,
    theirs: RankTrace,
    moment: Moment,
    left: Mapping[Category, int],
    right: Mapping[Category, int],
    by_kernels: str,
) -> list[MemoryRow]:
    """The rows of one rank at one moment. by_kernels: the cause of what the device's kernels do otherwise, or empty."""
    rows = []
    for category in CATEGORY_ORDER:
        if category in left or category in right:
            predicted, measured = left.get(category, 0), right.get(category, 0)
            cause = _memory_cause(ours, theirs, moment, category, measured - predicted)
            if cause and by_kernels and moment is Moment.PEAK and category in _BY_KERNELS:
                cause = by_kernels
            rows.append(MemoryRow(ours.rank, moment, category, predicted, measured, cause))
    causes = list(dict.fromkeys(row.cause for row in rows if row.cause))  # each once, in the order of the rows
    rows.append(
        MemoryRow(ours.rank, moment, None, sum(left.values()), sum(right.values()), "; ".join(causes)),
    )
    return rows


def _memory_cause(ours: RankTrace, theirs: RankTrace, moment: Moment, category: Category, difference: int) -> str:
    if difference == 0:
        return ""
    if category is Category.OPTIMIZER_STATE and difference == theirs.step_counter_nbytes:
        return STEP_COUNTERS
    expected, got = place_text(ours.peak()), place_text(theirs.peak())
    if moment is Moment.PEAK and expected != got:
        return f"the peaks stand at two moments, predicted in {expected}, measured in {got}"
    return UNEXPLAINED


def place_text(peak: Peak) -> str:
    """Where a peak stands, for a person: `backward of block 2`, `backward, block 2 (prepare grad)`."""
    if not peak.op:
        return peak.phase
    if peak.op.startswith(peak.phase):  # `backward` in backward, `optimizer step` in the optimizer's
        return f"{peak.op} of {peak.unit}" if peak.unit else peak.op
    return f"{peak.phase}, {peak.unit} ({peak.op})" if peak.unit else f"{peak.phase} ({peak.op})"


def _wire_rows(ours: RankTrace, theirs: RankTrace) -> list[WireRow]:
    left = {(total.op, total.dtype): total for total in ours.wire()}
    right = {(total.op, total.dtype): total for total in theirs.wire()}
    rows = []
    for key in dict.fromkeys([*left, *right]):
        nothing = WireTotal(*key, 0, 0, 0)
        predicted, measured = left.get(key, nothing), right.get(key, nothing)
        rows.append(WireRow(ours.rank, predicted, measured, "" if predicted == measured else UNEXPLAINED))
    return rows


def _allocator_row(theirs: RankTrace, *, gloo: bool) -> AllocatorRow:
    reading = theirs.allocator
    assert reading is not None
    by_categories = theirs.peak().total - theirs.rest_nbytes
    by_allocator = reading.peak_nbytes - reading.rest_nbytes
    outside = reading.rest_nbytes - theirs.rest_nbytes
    cause = ""
    if by_allocator > by_categories:
        # The allocator sees one number, so the two sources cannot be told apart.
        cause = GLOO_COPIES if gloo else KERNEL_SCRATCH
    elif by_allocator < by_categories:
        cause = UNEXPLAINED
    return AllocatorRow(
        rank=theirs.rank,
        categories_growth_nbytes=by_categories,
        allocator_growth_nbytes=by_allocator,
        outside_nbytes=outside,
        source=reading.source,
        cause=cause,
        outside_cause="" if not outside else STEP_COUNTERS if outside == theirs.step_counter_nbytes else UNEXPLAINED,
    )


def maxima(rank: RankTrace) -> list[tuple[str, str, str, int, int]]:
    """(phase, op, unit, largest total inside, total at the end) of each op of the step that changes anything."""
    result: list[tuple[str, str, str, int, int]] = []
    total = rank.rest_nbytes
    for event in rank.events:
        where, before = (event.phase, event.op, event.unit), total
        total += event.delta_nbytes
        if result and result[-1][:3] == where:
            result[-1] = (*where, max(result[-1][3], total), total)
        else:
            result.append((*where, max(before, total), total))
    return result
