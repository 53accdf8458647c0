"""compare: every row there, nothing rounded, and a name for each difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.every import settings_of
from zeroviz.collectives import CollectiveOp
from zeroviz.compare import (
    CUDA_KERNELS,
    GLOO_COPIES,
    KERNEL_SCRATCH,
    STEP_COUNTERS,
    UNEXPLAINED,
    Moment,
    compare,
    place_text,
)
from zeroviz.errors import TraceError
from zeroviz.link import Direction
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Offload, Precision, RunSpec, Strategy
from zeroviz.trace import AllocatorReading, Category, Collective, Event, Origin, RankTrace, Trace

SPEC = RunSpec(model=PRESETS["tiny"], ranks=2)
STEP = (
    Event("forward", "unshard", "block 0", Category.UNSHARDED_PARAM, 200),
    Event("forward", "forward", "block 0", Category.ACTIVATION, 50),
    Event("backward", "backward", "block 0", Category.ACTIVATION, -50),
    Event("backward", "reshard", "block 0", Category.UNSHARDED_PARAM, -200),
)
CALL = Collective(CollectiveOp.ALL_GATHER, "fp32", 2, 200, "forward", "block 0")
RANK = RankTrace(
    rank=0,
    rest={Category.SHARDED_PARAM: 100, Category.OPTIMIZER_STATE: 200},
    events=STEP,
    collectives=(CALL,),
    step_counter_nbytes=8,
)


def trace(*ranks: RankTrace, origin: Origin = Origin.PREDICTED, **environment: str) -> Trace:
    return Trace(origin, SPEC, tuple(replace(rank, rank=number) for number, rank in enumerate(ranks)), environment)


def measured(*ranks: RankTrace) -> Trace:
    return trace(*ranks, origin=Origin.LIVE, backend="gloo")


@pytest.mark.parametrize("strategy", Strategy)
def test_a_trace_equals_itself_row_by_row(strategy: Strategy) -> None:
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=3, **settings_of(strategy, 3)))
    comparison = compare(predicted, replace(predicted, origin=Origin.LIVE))
    for rank in predicted.ranks:
        rows = comparison.of_rank(rank.rank, Moment.REST)
        assert {row.category: row.measured for row in rows if row.category} == rank.at_rest
        assert rows[-1].category is None and rows[-1].predicted == rank.rest_nbytes
        rows = comparison.of_rank(rank.rank, Moment.PEAK)
        assert {row.category: row.predicted for row in rows if row.category} == rank.peak().by_category
        assert rows[-1].measured == rank.peak().total
    assert all(row.difference == 0 and row.cause == "" for row in (*comparison.memory, *comparison.wire))
    assert not comparison.unexplained
    assert len(comparison.totals(Moment.REST)) == len(predicted.ranks)


def test_a_difference_is_never_hidden_and_its_cause_never_guessed() -> None:
    more = replace(RANK, rest={Category.SHARDED_PARAM: 101, Category.OPTIMIZER_STATE: 200})
    comparison = compare(trace(RANK, RANK), measured(RANK, more))
    rows = {(row.rank, row.moment, row.category): row for row in comparison.memory}
    row = rows[1, Moment.REST, Category.SHARDED_PARAM]
    assert (row.predicted, row.measured, row.difference, row.cause) == (100, 101, 1, UNEXPLAINED)
    assert rows[1, Moment.REST, None].difference == 1 and rows[1, Moment.REST, None].cause == UNEXPLAINED
    assert rows[0, Moment.REST, Category.SHARDED_PARAM].cause == ""
    # At rest and at the peak; the sums repeat them and are left out.
    assert {(row.rank, row.moment, row.category) for row in comparison.unexplained} == {
        (1, Moment.REST, Category.SHARDED_PARAM),
        (1, Moment.PEAK, Category.SHARDED_PARAM),
    }


def test_what_cuda_kernels_do_otherwise_has_a_name_and_model_states_have_none() -> None:
    """On a GPU activations may differ; a parameter that does is as unexplained as anywhere."""
    more = tuple(event._replace(delta_nbytes=event.delta_nbytes * 2) for event in STEP)
    live = replace(measured(RANK, replace(RANK, events=more)), environment={"devices": ["cuda:0", "cuda:1"]})
    comparison = compare(trace(RANK, RANK), live)
    causes = {(row.rank, row.category): row.cause for row in comparison.memory if row.moment is Moment.PEAK}
    assert causes[1, Category.ACTIVATION] == CUDA_KERNELS
    assert causes[1, Category.UNSHARDED_PARAM] == UNEXPLAINED
    assert causes[0, Category.ACTIVATION] == ""


def test_what_is_held_at_rest_and_not_predicted_is_no_scratch_of_kernels_at_the_peak() -> None:
    """Every op is as predicted, and in bf16 a peak that moves has a name: bytes that are in all of them have none."""
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=2, precision=Precision.BF16_MIXED))
    second = {Category.OPTIMIZER_STATE: 2 * predicted.ranks[0].rest[Category.OPTIMIZER_STATE]}
    reading = AllocatorReading(rest_nbytes=0, peak_nbytes=0, source="events", num_events=1)
    ranks = tuple(replace(rank, rest={**rank.rest, **second}, allocator=reading) for rank in predicted.ranks)
    comparison = compare(predicted, Trace(Origin.LIVE, predicted.spec, ranks, {"backend": "gloo"}))
    for moment in Moment:
        (row,) = [row for row in comparison.of_rank(0, moment) if row.category and row.difference]
        assert row.category is Category.OPTIMIZER_STATE and row.cause == UNEXPLAINED
        assert comparison.unexplained_nbytes(0, moment) == row.difference == second[row.category] // 2


def test_a_category_that_only_one_side_holds_has_a_row() -> None:
    bucket = replace(RANK, rest={**RANK.rest, Category.BUCKET: 7})
    rows = compare(trace(RANK, RANK), measured(bucket, RANK)).of_rank(0, Moment.REST)
    assert [(row.predicted, row.measured) for row in rows if row.category is Category.BUCKET] == [(0, 7)]


def test_step_counters_are_named() -> None:
    counted = replace(RANK, rest={**RANK.rest, Category.OPTIMIZER_STATE: 208})
    rows = compare(trace(RANK, RANK), measured(counted, RANK)).of_rank(0, Moment.REST)
    assert [row.cause for row in rows if row.category is Category.OPTIMIZER_STATE] == [STEP_COUNTERS]


def test_peaks_at_two_moments_say_so() -> None:
    late = (*STEP[:2], Event("backward", "backward", "block 1", Category.TEMPORARY, 30), *STEP[2:])
    late = (*late, Event("backward", "backward", "block 1", Category.TEMPORARY, -30))
    rows = compare(trace(RANK, RANK), measured(replace(RANK, events=late), RANK)).of_rank(0, Moment.PEAK)
    cause = next(row.cause for row in rows if row.category is Category.TEMPORARY)
    assert "predicted in forward of block 0" in cause and "measured in backward of block 1" in cause


def test_wire_rows_pair_by_operation_and_dtype() -> None:
    twice = replace(RANK, collectives=(CALL, CALL))
    other = replace(RANK, collectives=(CALL._replace(dtype="bf16"),))
    comparison = compare(trace(RANK, RANK), measured(twice, other))
    first, gone, new = comparison.wire
    # A ring of 2 sends half of the payload: 100 predicted, 200 measured.
    assert (first.predicted.count, first.measured.count, first.difference) == (1, 2, 100)
    assert (gone.dtype, gone.measured.count, new.dtype, new.predicted.count) == ("fp32", 0, "bf16", 0)
    assert {row.cause for row in comparison.wire} == {UNEXPLAINED}


@pytest.mark.parametrize(
    ("peak", "cause"),
    [(308 + 250, ""), (308 + 300, GLOO_COPIES), (308 + 240, UNEXPLAINED)],
)
def test_allocator_growth_beside_the_categories(peak: int, cause: str) -> None:
    read = replace(RANK, allocator=AllocatorReading(308, peak, "the allocator"))
    row = compare(trace(RANK, RANK), measured(read, RANK)).allocator[0]
    assert row.categories_growth_nbytes == 250  # 200 gathered + 50 saved
    assert (row.allocator_growth_nbytes, row.cause) == (peak - 308, cause)
    assert (row.outside_nbytes, row.outside_cause) == (8, STEP_COUNTERS)


def test_without_gloo_only_kernels_are_named() -> None:
    read = replace(RANK, allocator=AllocatorReading(300, 600, "the allocator"))
    comparison = compare(trace(RANK, RANK), trace(read, RANK, origin=Origin.LIVE, backend="nccl"))
    assert comparison.allocator[0].cause == KERNEL_SCRATCH
    assert comparison.allocator[0].outside_cause == ""


def test_traces_of_two_specs_are_refused_by_name() -> None:
    other = predict(replace(SPEC, batch=4))
    with pytest.raises(TraceError, match=r"batch \(1 and 4\)"):
        compare(predict(SPEC), other)


def test_place_text_names_phase_unit_and_op() -> None:
    peak = RANK.peak()
    assert place_text(peak) == "forward of block 0"
    assert place_text(replace(peak, phase="optimizer", op="optimizer step")) == "optimizer step of block 0"
    assert place_text(replace(peak, op="unshard")) == "forward, block 0 (unshard)"
    assert place_text(replace(peak, phase="at rest", op="", unit="")) == "at rest"
    assert place_text(replace(peak, op="load batch", unit="")) == "forward (load batch)"


def test_copies_over_the_link_are_compared_by_direction_and_dtype() -> None:
    """A rank that takes one gradient down twice: one copy more, its bytes, and no cause."""
    spec = RunSpec(model=PRESETS["tiny"], ranks=1, offload=Offload.PARAMS)
    predicted = predict(spec)
    (rank,) = predicted.ranks
    down = next(transfer for transfer in rank.transfers if transfer.direction is Direction.TO_HOST)
    twice = replace(predicted, origin=Origin.LIVE, ranks=(replace(rank, transfers=(*rank.transfers, down)),))
    (row,) = [row for row in compare(predicted, twice).link if row.cause]
    assert (row.direction, row.dtype, row.cause) == (Direction.TO_HOST, "fp32", UNEXPLAINED)
    assert row.measured.count - row.predicted.count == 1
    assert row.measured.nbytes - row.predicted.nbytes == down.nbytes
    assert row in compare(predicted, twice).unexplained
    assert not [row for row in compare(predicted, replace(predicted, origin=Origin.LIVE)).link if row.cause]
