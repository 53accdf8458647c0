"""Op by op: the op to blame, its shadow, what is left, and names for what a machine adds.

A step by hand, in bytes: 300 at rest, a unit of 200 gathered, 50 saved, an update that borrows 12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from zeroviz.causes import BF16_SCRATCH, HELD_BEFORE, OVERLAPPED_COPIES, STEP_COUNTERS, UNEXPLAINED, WATCHED_SUMS
from zeroviz.collectives import CollectiveOp
from zeroviz.compare import Comparison, Figure, Moment, compare, outside_words
from zeroviz.maxima import machine_maxima, maxima
from zeroviz.models import PRESETS
from zeroviz.spec import Precision, RunSpec
from zeroviz.trace import AllocatorReading, Category, Collective, Event, Origin, RankTrace, Trace

PARAM, GRAD, KEPT, BRIEF = (
    Category.UNSHARDED_PARAM,
    Category.UNSHARDED_GRAD,
    Category.ACTIVATION,
    Category.TEMPORARY,
)
SCRATCH, COPY = Category.KERNEL_SCRATCH, Category.BACKEND_COPY


def events(*rows: tuple[str, str, Category, int]) -> tuple[Event, ...]:
    return tuple(Event(phase, op, "block 0", category, nbytes) for phase, op, category, nbytes in rows)


STEP = events(
    ("forward", "unshard", PARAM, 200),
    ("forward", "unshard", COPY, 200),
    ("forward", "unshard", COPY, -200),
    ("forward", "unshard", COPY, 200),
    ("forward", "unshard", COPY, -200),
    ("forward", "forward", KEPT, 50),
    ("forward", "reshard", PARAM, -200),
    ("backward", "unshard", PARAM, 200),
    ("backward", "zero grad", GRAD, 200),
    ("backward", "backward", KEPT, -50),
    ("backward", "reshard", PARAM, -200),
    ("backward", "reduce grad", COPY, 200),
    ("backward", "wait reduce", COPY, -200),
    ("backward", "wait reduce", GRAD, -200),
    ("optimizer", "optimizer step", BRIEF, 100),
    ("optimizer", "optimizer step", SCRATCH, 12),
    ("optimizer", "optimizer step", SCRATCH, -12),
    ("optimizer", "optimizer step", BRIEF, -100),
)
RANK = RankTrace(
    rank=0, rest={Category.SHARDED_PARAM: 100, Category.OPTIMIZER_STATE: 200}, events=STEP, step_counter_nbytes=8
)


def compared(changed: RankTrace, *, method: str = "allocator events", **settings: object) -> Comparison:
    """The step above against `changed`, on one of two CPU ranks; its reading agrees with its events."""
    spec = RunSpec(model=PRESETS["tiny"], **settings)  # type: ignore[arg-type]
    peak = changed.machine_peak().total
    reading = AllocatorReading(sum(changed.rest.values()) + 8, peak, "the allocator", num_events=len(changed.events))
    measured = replace(changed, allocator=reading)
    environment = {"backend": "gloo", "devices": ["cpu", "cpu"], "ranks": [{"meter": method}] * 2}
    ours = tuple(replace(RANK, rank=rank) for rank in range(2))
    theirs = (measured, replace(RANK, rank=1, allocator=None))
    return compare(Trace(Origin.PREDICTED, spec, ours), Trace(Origin.LIVE, spec, theirs, environment))


def with_events(change: Callable[[list[Event]], None]) -> RankTrace:
    changed = list(STEP)
    change(changed)
    return replace(RANK, events=tuple(changed))


def insert(position: int, *new: Event) -> RankTrace:
    return with_events(lambda changed: changed.__setitem__(slice(position, position), new))


def test_maxima_as_on_nccl_and_as_here() -> None:
    """As here a wait is part of its start, since gloo's thread may copy in either of the two."""
    assert [(phase, op, most, last) for phase, op, _, most, last in maxima(RANK)] == [
        ("forward", "unshard", 500, 500),
        ("forward", "forward", 550, 550),
        ("forward", "reshard", 550, 350),
        ("backward", "unshard", 550, 550),
        ("backward", "zero grad", 750, 750),
        ("backward", "backward", 750, 700),
        ("backward", "reshard", 700, 500),
        ("backward", "wait reduce", 500, 300),
        ("optimizer", "optimizer step", 400, 300),
    ]
    here = {(phase, op): (most, last) for phase, op, _, most, last in machine_maxima(RANK)}
    assert here["forward", "unshard"] == (708, 508)  # 8 of step counters in every sum
    assert here["backward", "reduce grad"] == (708, 308) and ("backward", "wait reduce") not in here
    assert here["optimizer", "optimizer step"] == (420, 308)
    bare = {(phase, op): most for phase, op, _, most, _ in machine_maxima(RANK, scratch=False)}
    assert bare["optimizer", "optimizer step"] == 408 and bare["forward", "unshard"] == 708


def test_a_copy_made_by_the_thread_a_little_later_changes_nothing() -> None:
    late = with_events(
        lambda changed: changed.__setitem__(
            slice(3, 5), events(("forward", "wait unshard", COPY, 200), ("forward", "wait unshard", COPY, -200))
        )
    )
    assert machine_maxima(late) == machine_maxima(RANK)
    assert not compared(late).ops


def test_the_same_step_has_no_rows() -> None:
    comparison = compared(RANK)
    assert not comparison.ops and not comparison.leaks and not comparison.unexplained
    rows = comparison.of_rank(0, Moment.MACHINE_PEAK)
    # The peak as here is that of the device here too: 300 + 200 + 200 + 50, and the counters.
    assert (rows[-1].predicted, rows[-1].measured) == (758, 758)
    assert comparison.unexplained_nbytes(0, Moment.MACHINE_PEAK) == 0
    assert comparison.allocator[0].difference == 0


def test_an_op_that_leaves_bytes_is_blamed_and_the_rest_is_its_shadow() -> None:
    """7 bytes kept by the first reshard: every later op holds 7 more, and says for whom."""
    comparison = compared(insert(7, *events(("forward", "reshard", BRIEF, 7))))
    first, *later = comparison.ops_of(0)
    assert (first.figure, first.op, first.left, first.cause) == (Figure.DEVICE, "reshard", {BRIEF: 7}, UNEXPLAINED)
    assert {(row.difference, row.cause) for row in later} == {(7, "left by forward, block 0 (reshard)")}
    assert next(row.op for row in later if row.figure is Figure.DEVICE) == "unshard"
    (leak,) = comparison.leaks
    assert (leak.category, leak.nbytes, leak.place) == (BRIEF, 7, "forward, block 0 (reshard)")
    assert comparison.unexplained_nbytes(0, Moment.PEAK) == 7
    # A finding is in the list once as an op, once as a leak, and in the rows of the moments it reaches.
    assert [type(row).__name__ for row in comparison.unexplained] == ["MemoryRow", "MemoryRow", "OpRow", "LeakRow"]


def test_what_is_freed_late_is_named_where_it_should_have_been() -> None:
    def late(changed: list[Event]) -> None:
        freed = changed.pop(13)
        assert (freed.category, freed.delta_nbytes) == (GRAD, -200)
        changed.append(freed._replace(phase="optimizer", op="optimizer step"))

    comparison = compared(with_events(late))
    rows = [row for row in comparison.ops_of(0) if row.figure is Figure.DEVICE]
    assert [(row.op, row.left_nbytes, row.cause) for row in rows] == [
        ("wait reduce", 200, UNEXPLAINED),
        ("optimizer step", -200, "freed here and not in backward, block 0 (wait reduce)"),
    ]
    assert not comparison.leaks


def test_more_inside_an_op_than_predicted_is_found_though_nothing_is_left() -> None:
    brief = events(("optimizer", "optimizer step", BRIEF, 30), ("optimizer", "optimizer step", BRIEF, -30))
    comparison = compared(insert(15, *brief))
    (row,) = [row for row in comparison.ops_of(0) if row.figure is Figure.DEVICE]
    assert (row.op, row.predicted, row.measured, dict(row.left), row.cause) == (
        "optimizer step",
        400,
        430,
        {},
        UNEXPLAINED,
    )
    # The peak stands elsewhere and does not show it.
    assert all(row.difference == 0 for row in comparison.memory)


def test_an_op_that_one_side_lacks_is_missed() -> None:
    comparison = compared(with_events(lambda changed: changed.pop(10)))  # the last reshard
    first = comparison.ops_of(0)[0]
    assert (first.op, dict(first.left), first.cause) == ("reshard", {PARAM: 200}, UNEXPLAINED)
    assert comparison.leaks[0].nbytes == 200


def test_what_lies_at_rest_already_is_no_ops_fault() -> None:
    comparison = compared(replace(RANK, rest={**RANK.rest, Category.UNATTRIBUTED: 64}))
    assert {row.cause for row in comparison.ops} == {HELD_BEFORE}
    assert comparison.unexplained_nbytes(0, Moment.REST) == 64
    assert comparison.allocator[0].outside_nbytes == 72 and comparison.allocator[0].outside_cause == UNEXPLAINED


SCRATCH_IN_BACKWARD = events(("backward", "backward", SCRATCH, 90), ("backward", "backward", SCRATCH, -90))


def test_scratch_in_bf16_is_named_and_in_fp32_unexplained() -> None:
    busy = insert(9, *SCRATCH_IN_BACKWARD)
    named = compared(busy, precision=Precision.BF16_MIXED)
    assert {row.cause for row in named.ops} == {BF16_SCRATCH}
    assert [row.cause for row in named.of_rank(0, Moment.MACHINE_PEAK) if row.category is SCRATCH] == [BF16_SCRATCH]
    assert not named.unexplained
    exact = compared(busy)
    assert [row.cause for row in exact.ops] == [UNEXPLAINED]
    assert exact.unexplained_nbytes(0, Moment.MACHINE_PEAK) == 90
    assert exact.unexplained_nbytes(0, Moment.PEAK) == 0  # as on NCCL it is no part of the step


def test_scratch_hides_no_leak_in_bf16() -> None:
    both = list(insert(9, *SCRATCH_IN_BACKWARD).events)
    both[7:7] = events(("forward", "reshard", BRIEF, 7))
    comparison = compared(replace(RANK, events=tuple(both)), precision=Precision.BF16_MIXED)
    blamed = [row for row in comparison.ops if row.cause == UNEXPLAINED]
    assert [(row.figure, row.op, dict(row.left)) for row in blamed] == [(Figure.DEVICE, "reshard", {BRIEF: 7})]
    assert comparison.leaks[0].nbytes == 7


def test_overlapped_copies_are_named_only_where_communication_overlaps() -> None:
    """The second copy of the gather comes while forward runs."""

    def later(changed: list[Event]) -> None:
        copies = [event._replace(op="forward") for event in changed[3:5]]
        del changed[3:5]
        changed[4:4] = copies

    shifted = with_events(later)
    named = compared(shifted, prefetch=1)
    assert {row.cause for row in named.ops} == {OVERLAPPED_COPIES} and not named.unexplained
    assert [row.cause for row in compared(shifted).ops] == [UNEXPLAINED]


def test_a_watched_step_has_its_own_name_for_sums() -> None:
    brief = events(("backward", "backward", BRIEF, 30), ("backward", "backward", BRIEF, -30))
    comparison = compared(insert(9, *brief), method="storages watched by a dispatch mode")
    assert {row.cause for row in comparison.ops if row.figure is Figure.DEVICE} == {WATCHED_SUMS}
    # Of a model state it says nothing.
    kept = compared(insert(7, *events(("forward", "reshard", PARAM, 7))), method="storages watched by a dispatch mode")
    assert UNEXPLAINED in {row.cause for row in kept.ops}


def test_an_allocator_that_disagrees_with_its_own_events_is_unexplained() -> None:
    comparison = compared(RANK)
    reading = AllocatorReading(308, 800, "the allocator", num_events=18)
    trace = Trace(
        Origin.LIVE, RunSpec(model=PRESETS["tiny"]), (replace(RANK, allocator=reading), replace(RANK, rank=1))
    )
    ours = Trace(Origin.PREDICTED, trace.spec, (RANK, replace(RANK, rank=1)))
    row = compare(ours, trace).allocator[0]
    assert (row.difference, row.cause, row.outside_cause) == (800 - 758, UNEXPLAINED, STEP_COUNTERS)
    jump = replace(reading, peak_nbytes=758, unattributed_nbytes=5)
    trace = replace(trace, ranks=(replace(RANK, allocator=jump), replace(RANK, rank=1)))
    assert compare(ours, trace).allocator[0].cause == UNEXPLAINED
    assert comparison.allocator[0].cause == ""


@pytest.mark.parametrize(
    ("op", "nbytes", "ring"),
    [
        (CollectiveOp.REDUCE_SCATTER, 1000, "250 B"),  # a quarter each on four ranks
        (CollectiveOp.ALL_REDUCE, 2**30, "2,097,152 B"),  # never more than 2 MiB
        (CollectiveOp.ALL_GATHER, 2**30, None),
    ],
)
def test_what_lies_outside_torch_is_said_below_the_sum(op: CollectiveOp, nbytes: int, ring: str | None) -> None:
    rank = replace(RANK, collectives=(Collective(op, "fp32", 4, nbytes, "backward", "block 0"),))
    words = outside_words(rank)
    assert "autograd engine's tables" in words
    assert (ring in words) if ring else ("ring" not in words)
    assert "ring" not in outside_words(RANK)


def test_a_buffer_nobody_predicted_has_a_row_in_both_figures() -> None:
    """A second gather buffer of 200 that nobody predicted: in both figures, under its own category."""
    comparison = compared(insert(8, *events(("backward", "unshard", Category.ALL_GATHER_BUFFER, 200))))
    for moment in (Moment.PEAK, Moment.MACHINE_PEAK):
        rows = {row.category: row for row in comparison.of_rank(0, moment)}
        assert rows[Category.ALL_GATHER_BUFFER].difference == 200
        assert rows[Category.ALL_GATHER_BUFFER].cause == UNEXPLAINED
        assert rows[None].difference == 200
