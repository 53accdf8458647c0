"""The meter on real ranks: nothing is dropped, the books close at every event, and every byte is predicted.

`raw_totals` reads the profiler's tree once more by itself and keeps only what the allocator said after each of its
events; the running sum of the trace's events has to pass through those figures, one after the other.
"""

from __future__ import annotations

from typing import Any

import pytest

import cluster.allocator
from cluster.rank import RankJob, run_rank
from cluster.record_events import EventRecorder
from tests.dist.ranks import RankPool
from tests.every import exists, settings_of
from zeroviz.causes import BF16_SCRATCH, MOVED_BY_SCRATCH, OVERLAPPED_COPIES
from zeroviz.compare import Comparison, Moment, compare, machine_maxima
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Checkpointing, Optimizer, Precision, RunSpec, Strategy, UnitPolicy, Zero1Form
from zeroviz.trace import Category, Origin, RankTrace, Trace, merge, rank_from_dict

TINY = {"model": PRESETS["tiny"], "seq": 17, "steps": 2}


def live(rank_pool: RankPool, spec: RunSpec) -> Trace:
    results = rank_pool.run(run_rank, spec)
    environment = {"backend": "gloo", "devices": ["cpu"] * spec.ranks, "ranks": [r["environment"] for r in results]}
    return merge(Origin.LIVE, spec, map(rank_from_dict, results), environment)


def compared(rank_pool: RankPool, spec: RunSpec) -> tuple[Trace, Comparison]:
    measured = live(rank_pool, spec)
    return measured, compare(predict(spec), measured)


def raw_totals(tree: list[Any]) -> list[int]:
    """What the allocator said after each of its events, in the order of the events' times."""
    found, stack = [], list(tree)
    while stack:
        node = stack.pop()
        if node.name == "[memory]":
            found.append((node.start_time_ns, node.extra_fields.total_allocated))
        stack += node.children
    return [total for _, total in sorted(found)]


def with_raw_totals(job: RankJob) -> dict[str, Any]:
    """`run_rank`, with the allocator's own totals over the rest beside the result."""
    recorders: list[EventRecorder] = []
    with pytest.MonkeyPatch.context() as patch:
        init = EventRecorder.__init__

        def remember(self: EventRecorder) -> None:
            init(self)
            recorders.append(self)

        patch.setattr(EventRecorder, "__init__", remember)
        result = run_rank(job)
    (recorder,) = recorders
    results: Any = recorder._profile.kineto_results
    totals = raw_totals(results.experimental_event_tree())
    return {**result, "raw_totals": [total - recorder.chain.start_nbytes for total in totals]}


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_running_sum_is_the_allocators_total_at_every_event(
    rank_pool: RankPool, ranks: int, precision: Precision
) -> None:
    for strategy in (each for each in Strategy if exists(each, precision)):
        spec = RunSpec(ranks=ranks, precision=precision, **settings_of(strategy, ranks), **TINY)
        for result in rank_pool.run(with_raw_totals, spec):
            rank = rank_from_dict(result)
            assert rank.allocator is not None
            sums, total = [], 0
            for event in rank.events:
                total += event.delta_nbytes
                sums.append(total)
            assert total == 0
            # Every event of the allocator's is there; what is there besides are the frees that had none.
            assert len(rank.events) == rank.allocator.num_events + rank.allocator.num_hidden_frees
            assert rank.allocator.num_events == len(result["raw_totals"])
            ahead = iter(sorted(sums))
            assert all(raw in ahead for raw in sorted(result["raw_totals"]))  # each its own sum
            assert rank.allocator.unattributed_nbytes == 0
            assert rank.allocator.num_given_up == 0
            # And so the largest total is the allocator's.
            assert rank.machine_peak().total == rank.allocator.peak_nbytes
            assert max(result["raw_totals"]) == rank.allocator.peak_nbytes - rank.allocator.rest_nbytes


def assert_exact(rank: RankTrace, predicted: RankTrace) -> None:
    """To the byte, here: the peak with its moment, and the most and the last of every op."""
    assert rank.allocator is not None
    assert rank.machine_peak() == predicted.machine_peak()
    assert predicted.machine_peak().total == rank.allocator.peak_nbytes
    assert machine_maxima(rank) == machine_maxima(predicted)


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize(("ranks", "units"), [(1, ["block"]), (2, ["model", "layer"]), (3, ["block"])])
def test_in_fp32_the_allocators_peak_is_predicted(
    rank_pool: RankPool, model: str, ranks: int, units: list[str]
) -> None:
    for strategy in Strategy:
        for unit in units:
            settings = {"unit": UnitPolicy.parse(unit), **settings_of(strategy, ranks)}
            spec = RunSpec(model=PRESETS[model], ranks=ranks, seq=17, steps=2, **settings)
            trace, comparison = compared(rank_pool, spec)
            for rank, predicted in zip(trace.ranks, predict(spec).ranks, strict=True):
                assert_exact(rank, predicted)
            assert not comparison.ops and not comparison.leaks and not comparison.unexplained
            for row in (*comparison.totals(Moment.MACHINE_PEAK), *comparison.allocator):
                assert row.difference == 0


@pytest.mark.parametrize("optimizer", [kind for kind in Optimizer if kind.runs])
def test_the_optimizers_numbers_are_predicted(rank_pool: RankPool, optimizer: Optimizer) -> None:
    """A number beside a tensor is 8 + 4 bytes, and under DDP the update is the peak, so they are seen there."""
    for strategy in (Strategy.DDP, Strategy.ZERO2):
        spec = RunSpec(strategy=strategy, optimizer=optimizer, **TINY)
        trace, _ = compared(rank_pool, spec)
        for rank, predicted in zip(trace.ranks, predict(spec).ranks, strict=True):
            assert_exact(rank, predicted)


def test_the_naive_form_and_recomputation_are_exact_here_too(rank_pool: RankPool) -> None:
    for settings in (
        {"strategy": Strategy.ZERO1, "zero1_form": Zero1Form.ALL_REDUCE},
        {"strategy": Strategy.ZERO3, "checkpointing": Checkpointing.parse("block")},
        {"strategy": Strategy.ZERO3, "accumulation": 2},
        {"strategy": Strategy.HYBRID_SHARD, "shard_ranks": 1, "accumulation": 2},
        {"strategy": Strategy.MEGATRON_OPTIM, "accumulation": 2, "clip_norm": 0.5},
        {"strategy": Strategy.ZERO2, "clip_norm": 0.5},
    ):
        spec = RunSpec(ranks=3, **settings, **TINY)
        trace, _ = compared(rank_pool, spec)
        for rank, predicted in zip(trace.ranks, predict(spec).ranks, strict=True):
            assert_exact(rank, predicted)


def test_as_on_nccl_and_as_here_are_two_figures(rank_pool: RankPool) -> None:
    """ZeRO-2 on two ranks: while gloo reduces the largest unit, 37238 elements with padding, it holds them twice.

    On NCCL the peak is one op earlier, where backward of the unit holds its last temporaries.
    """
    spec = RunSpec(ranks=2, strategy=Strategy.ZERO2, **TINY)
    trace, comparison = compared(rank_pool, spec)
    for rank, row in zip(trace.ranks, comparison.allocator, strict=True):
        copies, most = 0, 0
        for event in rank.events:
            copies += event.delta_nbytes if event.category is Category.BACKEND_COPY else 0
            most = max(most, copies)
        assert most == 37238 * 4
        assert rank.machine_peak().total == rank.allocator.peak_nbytes  # type: ignore[union-attr]
        assert row.device_growth_nbytes == rank.peak().total - rank.rest_nbytes < row.categories_growth_nbytes
        assert (rank.peak().op, rank.machine_peak().op) == ("backward", "reduce grad")
        assert not any(category.is_artefact for category in rank.peak().by_category)


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16_FP32GRAD, Precision.BF16])
def test_in_bf16_kernel_scratch_is_all_that_differs(rank_pool: RankPool, model: str, precision: Precision) -> None:
    for strategy in (each for each in Strategy if exists(each, precision)):
        settings = settings_of(strategy, 2)
        spec = RunSpec(model=PRESETS[model], ranks=2, precision=precision, seq=17, steps=2, **settings)
        trace, comparison = compared(rank_pool, spec)
        for rank, predicted in zip(trace.ranks, predict(spec).ranks, strict=True):
            assert machine_maxima(rank, scratch=False) == machine_maxima(predicted, scratch=False)
            assert rank.machine_peak().total == rank.allocator.peak_nbytes  # type: ignore[union-attr]
        assert not comparison.unexplained
        causes = {row.cause.partition(":")[0] for row in comparison.memory if row.difference and row.category}
        assert causes <= {BF16_SCRATCH.partition(":")[0], MOVED_BY_SCRATCH}
        # A processor without bf16 products of its own packs nothing in so small a model; then no op differs.
        packs = any(event.category is Category.KERNEL_SCRATCH for rank in trace.ranks for event in rank.events)
        assert {row.cause for row in comparison.ops} <= ({BF16_SCRATCH} if packs else set())


def test_beside_compute_the_copies_are_named(rank_pool: RankPool) -> None:
    """gloo's thread copies when it gets to it, so as here the moment is chance; as on NCCL nothing differs."""
    spec = RunSpec(strategy=Strategy.ZERO3, ranks=3, prefetch=2, async_reduce=True, **TINY)
    for _ in range(3):
        trace, comparison = compared(rank_pool, spec)
        assert not comparison.unexplained
        assert {row.cause for row in comparison.ops} <= {OVERLAPPED_COPIES} | {
            row.cause for row in comparison.ops if row.cause.startswith(("left by", "freed here"))
        }
        for rank, predicted in zip(trace.ranks, predict(spec).ranks, strict=True):
            assert rank.peak() == predicted.peak()
            assert rank.allocator is not None and rank.allocator.unattributed_nbytes == 0
            assert rank.machine_peak().total == rank.allocator.peak_nbytes


# What a run says when the counter cannot be trusted.


def without_the_counter(job: RankJob) -> dict[str, Any]:
    """Run as on a torch build in which no counter follows known allocations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.allocator, "_counts", lambda word: False)
        cluster.allocator._probe.cache_clear()
        try:
            return run_rank(job)
        finally:
            cluster.allocator._probe.cache_clear()


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
def test_watched_storages_give_the_same_but_for_sums_out_of_place(rank_pool: RankPool, model: str) -> None:
    """The other way to read a step. At rest nothing differs; watched, a gradient sum holds one (n, hidden) more."""
    spec = RunSpec(model=PRESETS[model], ranks=2, strategy=Strategy.ZERO3, seq=17)
    results = rank_pool.run(without_the_counter, spec)
    environment = {"backend": "gloo", "ranks": [result["environment"] for result in results]}
    notes = [note for result in results for note in result["notes"]]
    trace = merge(Origin.LIVE, spec, [rank_from_dict(result) for result in results], environment, notes)
    row_nbytes = spec.num_tokens_per_rank * spec.model.hidden * 4
    for result, measured, predicted in zip(results, trace.ranks, predict(spec).ranks, strict=True):
        assert result["environment"]["meter"].startswith("storages watched by a dispatch mode; not the allocator's")
        assert measured.allocator is None
        assert measured.at_rest == predicted.at_rest
        assert measured.peak().total - predicted.peak().total in (0, row_nbytes)
    # Both ranks say it, it stands once, and it says which figures nobody confirms.
    (note,) = trace.notes
    assert "follows known allocations to the byte" in note
    assert "at rest, the peak and its categories" in note and "no independent figure" in note
    assert trace.report()["notes"] == [note]
    assert all(rank["allocator"] is None for rank in trace.report()["ranks"])
    assert not compare(predict(spec), trace).unexplained


def test_with_the_counter_there_is_nothing_to_say(rank_pool: RankPool) -> None:
    for result in rank_pool.run(run_rank, RunSpec(ranks=2, **TINY)):
        assert result["notes"] == []
