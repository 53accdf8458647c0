"""The ops of a step whose bytes are not the predicted ones, each with what it leaves behind and a cause.

[Note: a leak and its shadow] An op that leaves more than predicted shifts every op after it by as much. That op is the
finding; the ops after it say who they carry the bytes for, and the one that frees them says that it frees them late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from zeroviz.category import Category
from zeroviz.causes import (
    BF16_SCRATCH,
    CUDA_KERNELS,
    HELD_BEFORE,
    OVERLAPPED_COPIES,
    UNEXPLAINED,
    WATCHED_SUMS,
    is_unexplained,
)
from zeroviz.maxima import Pair, everything, pairs, spans
from zeroviz.trace import RankTrace

# Of a step in progress, these two depend on kernels; model states and the batch do not.
BY_KERNELS = frozenset({Category.ACTIVATION, Category.TEMPORARY})


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of a measured rank besides its bytes.

    exact: its events are the allocator's own, all of them. narrow: it computes in bf16. overlaps: communication runs
    beside compute. watched: a dispatch mode read the step. rehearsed: what it is compared with is a rehearsal, which
    has no scratch of kernels and no copies of a backend.
    """

    exact: bool = False
    on_cuda: bool = False
    narrow: bool = False
    overlaps: bool = False
    watched: bool = False
    rehearsed: bool = False

    @property
    def compares_machines(self) -> bool:
        """Whether all that the machine's allocator gave out is on both sides."""
        return self.exact and not self.on_cuda and not self.rehearsed

    @property
    def by_kernels(self) -> str:
        """The cause of another activation or temporary than predicted, or empty."""
        return CUDA_KERNELS if self.on_cuda else WATCHED_SUMS if self.watched else ""


class Figure(Enum):
    """Which sum is compared."""

    DEVICE = "as on NCCL"
    """What the device holds for the step, on whatever machine."""
    MACHINE = "as here"
    """Everything this machine's allocator gave out."""


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op of one rank that is not as predicted: the most it holds, and what it leaves that was not predicted."""

    rank: int
    figure: Figure
    phase: str
    op: str
    unit: str
    predicted: int
    measured: int
    left: Mapping[Category, int]
    cause: str

    @property
    def difference(self) -> int:
        """measured - predicted, of the most."""
        return self.measured - self.predicted

    @property
    def left_nbytes(self) -> int:
        """Negative where the op frees what was not predicted to be there."""
        return sum(self.left.values())


@dataclass(frozen=True, slots=True)
class LeakRow:
    """What a rank still holds when the step is over, beyond rest; `place` is the op that left it."""

    rank: int
    category: Category
    nbytes: int
    place: str
    cause: str = UNEXPLAINED


def where_text(phase: str, op: str, unit: str) -> str:
    """Where in the step, for a person: `backward of block 2`, `backward, block 2 (reduce grad)`."""
    if not op:
        return phase
    if op.startswith(phase):  # `backward` in backward, `optimizer step` in the optimizer's
        return f"{op} of {unit}" if unit else op
    return f"{phase}, {unit} ({op})" if unit else f"{phase} ({op})"


def op_rows(ours: RankTrace, theirs: RankTrace, known: Circumstances) -> list[OpRow]:
    """The ops of one rank that differ, those of the device first, then what differs here only."""
    rest = ours.rest_nbytes, theirs.rest_nbytes
    device = pairs(spans(ours), spans(theirs), rest)
    rows = _rows(device, theirs.rank, Figure.DEVICE, lambda pair: _device_cause(pair, known))
    if not known.compares_machines:
        return rows
    in_device = {(row.phase, row.op, row.unit, row.difference, row.left_nbytes) for row in rows}
    sums = sum(ours.rest.values()) + ours.step_counter_nbytes, sum(theirs.rest.values()) + theirs.step_counter_nbytes
    machine = pairs(spans(ours, everything), spans(theirs, everything), sums)
    clean = not rows
    here = _rows(machine, theirs.rank, Figure.MACHINE, lambda pair: _machine_cause(pair, known, clean=clean))
    rows += [row for row in here if (row.phase, row.op, row.unit, row.difference, row.left_nbytes) not in in_device]
    return rows


def leak_rows(theirs: RankTrace, rows: list[OpRow]) -> list[LeakRow]:
    """What the step leaves behind, each category with the first op that left some of it."""
    found = []
    for category, nbytes in theirs.leftover().items():
        places = [where_text(row.phase, row.op, row.unit) for row in rows if row.left.get(category, 0) * nbytes > 0]
        found.append(LeakRow(theirs.rank, category, nbytes, places[0] if places else "the step"))
    return found


def _rows(found: Iterable[Pair], rank: int, figure: Figure, cause_of: Callable[[Pair], str]) -> list[OpRow]:
    rows: list[OpRow] = []
    culprit = ""  # until an op is found, it was there before the step
    for pair in found:
        if not pair.difference and not pair.left:
            continue
        left = sum(pair.left.values())
        cause = cause_of(pair)
        if is_unexplained(cause):
            if pair.carried and left == -pair.carried:
                cause = f"freed here and not in {culprit or 'time'}"
            elif not left and pair.difference == pair.carried:
                cause = f"left by {culprit}" if culprit else HELD_BEFORE
            elif left:
                culprit = where_text(*pair.where)
        rows.append(OpRow(rank, figure, *pair.where, pair.predicted_most, pair.measured_most, pair.left, cause))
    return rows


def _device_cause(pair: Pair, known: Circumstances) -> str:
    return known.by_kernels if known.by_kernels and BY_KERNELS.issuperset(pair.left) else UNEXPLAINED


def _machine_cause(pair: Pair, known: Circumstances, *, clean: bool) -> str:
    """clean: the device holds what was predicted in every op."""
    if known.narrow and not pair.left and pair.bare_difference == pair.carried:
        return BF16_SCRATCH
    # A copy of gloo's that comes between an op's start and its wait takes part of the op to another row; with the
    # device's ops as predicted, a device category in the row is no more than that.
    if known.overlaps and clean and all(each.on_device or each is Category.BACKEND_COPY for each in pair.left):
        return OVERLAPPED_COPIES
    return UNEXPLAINED
