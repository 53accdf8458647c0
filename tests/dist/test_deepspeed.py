"""DeepSpeed as a witness: it trains what one process trains, its bytes are predicted, and it leaves nothing behind."""

from __future__ import annotations

import gc
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from cluster.allocator import live_nbytes
from cluster.model import Reference
from cluster.rank import RankJob, run_rank
from tests.dist.plain_steps import CPU, assert_same_figures, live, rest
from tests.dist.ranks import MAX_RANKS, RankPool
from tests.dist.references import BF16_SUM_BOUND, BOUND, NodesAtModules, deepspeed_reference, distance, reference
from tests.dist.trained import trained
from tests.every import crossed
from zeroviz.collectives import CollectiveOp
from zeroviz.compare import compare
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.settings import Settings
from zeroviz.spec import DType, Implementation, Optimizer, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.trace import Category, Trace, rank_from_dict
from zeroviz.witness import deepspeed_gathers
from zeroviz.witness.deepspeed_parts import keeps_whole_gradients

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install zeroviz[deepspeed]"),
    # The first run in a process imports it.
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module", autouse=True)
def imported(rank_pool: RankPool) -> None:
    """The library's import takes seconds a process, and the bound on a run is for the run."""
    futures = [rank_pool._pool.submit(_import) for _ in range(MAX_RANKS)]
    assert all(future.result(timeout=300) for future in futures)


def _import() -> bool:
    return bool(import_module("cluster.witness.deepspeed"))


STAGES = (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3)
RECIPES = (Precision.FP32, Precision.BF16_MIXED, Precision.BF16_FP32GRAD)


def deepspeed(strategy: Strategy, ranks: int = 2, model: str = "tiny", **settings: Any) -> RunSpec:
    """17 tokens; a bucket of a part of the model, and under stage 3 a threshold between two sizes of parameter."""
    fixed = {"impl": Implementation.DEEPSPEED, "strategy": strategy, "ranks": ranks, "model": PRESETS[model]}
    spec = RunSpec(**fixed, **{"seq": 17, "steps": 2, **settings})
    if "settings" in settings or strategy is Strategy.DDP or keeps_whole_gradients(spec):
        return spec
    own = Settings(bucket_numel=20_000, persistence_numel=1000 if strategy is Strategy.ZERO3 else None)
    return replace(spec, settings=own)


def pairs() -> list[tuple[Strategy, Precision]]:
    """Stage 0 has no fp32 gradients of bf16 parameters."""
    every = [(stage, precision) for precision in RECIPES for stage in STAGES]
    every.remove((Strategy.DDP, Precision.BF16_FP32GRAD))
    return every


# ---- it trains ----


@pytest.mark.parametrize(("model", "ranks"), crossed(["tiny", "tiny-llama"], [2, 3, 4]))
def test_every_stage_trains_as_one_process_does_in_fp32(rank_pool: RankPool, model: str, ranks: int) -> None:
    for stage in STAGES:
        model_type = NodesAtModules if stage is Strategy.ZERO3 else Reference
        want, start = reference(deepspeed(Strategy.DDP, ranks, model, batch=2), model_type=model_type)
        for got in trained(rank_pool, deepspeed(stage, ranks, model, batch=2)):
            assert distance(got, want, start) <= BOUND[ranks], stage


@pytest.mark.parametrize("unit", ["model", "layer"])
def test_units_and_micro_batches_change_nothing(rank_pool: RankPool, unit: str) -> None:
    for stage in STAGES:
        spec = deepspeed(stage, accumulation=2, unit=UnitPolicy.parse(unit))
        want, start = reference(spec)
        for got in trained(rank_pool, spec):
            # A tied parameter's two gradients are added up in another order than the reference's.
            assert distance(got, want, start) <= BOUND[3], stage


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_bf16_trains_as_one_process_with_the_same_casts(rank_pool: RankPool, ranks: int, accumulation: int) -> None:
    """Two ranks' sum has one order; three add up as the ring goes, in bf16 (see `BF16_SUM_BOUND`)."""
    model = "tiny" if ranks == 2 else "tiny-llama"
    for stage, precision in pairs():
        if precision is Precision.FP32:
            continue
        spec = deepspeed(stage, ranks, model, precision=precision, accumulation=accumulation)
        want, start = deepspeed_reference(spec)
        for got in trained(rank_pool, spec):
            assert distance(got, want, start) <= (BOUND[2] if ranks == 2 else BF16_SUM_BOUND), spec


def test_the_first_step_of_stage_0_in_bf16_is_made_without_gradients(rank_pool: RankPool) -> None:
    """Without it in the reference the two are far apart: a trap for whoever takes stage 0 as the baseline."""
    spec = deepspeed(Strategy.DDP, precision=Precision.BF16_MIXED)
    want, start = deepspeed_reference(replace(spec, strategy=Strategy.ZERO1))
    assert distance(trained(rank_pool, spec)[0], want, start) > 0.05


# ---- what it holds and sends ----


def measured(rank_pool: RankPool, spec: RunSpec) -> Trace:
    """A live trace. A machine too busy to let gloo's thread finish within the bound says so, and is asked again."""
    for _ in range(4):
        trace = live(rank_pool, spec)
        readings = [rank.allocator for rank in trace.ranks]
        if not any(reading and (reading.num_given_up or reading.unattributed_nbytes) for reading in readings):
            break
    return trace


def assert_as_predicted(trace: Trace) -> None:
    """At rest, on the wire and at the peak to the byte on every rank; what differs beside that has a name."""
    spec, predicted = trace.spec, predict(trace.spec)
    for want, got in zip(predicted.ranks, trace.ranks, strict=True):
        assert_same_figures(want, got, spec, exact=spec.recipe.param is DType.FP32)
    assert compare(predicted, trace).unexplained == (), spec


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_stage_holds_and_sends_what_is_predicted(rank_pool: RankPool, ranks: int) -> None:
    for stage, precision in pairs():
        model = "tiny" if ranks != 3 else "tiny-llama"
        assert_as_predicted(measured(rank_pool, deepspeed(stage, ranks, model, precision=precision)))


@pytest.mark.parametrize("unit", ["model", "layer"])
def test_micro_batches_too(rank_pool: RankPool, unit: str) -> None:
    """Stage 1 holds whole gradients from one to the next, stages 2 and 3 their owners'."""
    for stage, precision in pairs():
        if precision is Precision.BF16_MIXED:
            continue
        spec = deepspeed(stage, 3, precision=precision, accumulation=2, unit=UnitPolicy.parse(unit))
        trace = measured(rank_pool, spec)
        assert_as_predicted(trace)
        whole = spec.model.num_params * 4
        between = held_between(trace.ranks[0].events, Category.UNSHARDED_GRAD)
        if stage is Strategy.ZERO1 and precision is Precision.FP32:
            assert between == whole
        if stage in (Strategy.ZERO2, Strategy.ZERO3):
            assert between == 0


def held_between(events: Any, category: Category) -> int:
    """What was made of `category` and is held as the second micro-batch is loaded."""
    held, num_loads, before = 0, 0, ""
    for event in events:
        num_loads += event.op == "load batch" != before
        before = event.op
        if num_loads == 2:
            return held
        held += event.delta_nbytes if event.category is category else 0
    raise AssertionError("there was one micro-batch")


@pytest.mark.parametrize("bucket_numel", [500_000_000, 3000])
def test_buckets_of_any_size(rank_pool: RankPool, bucket_numel: int) -> None:
    """The default, 2 GB for a model of half a megabyte, and one that is smaller than most parameters."""
    for stage in STAGES[1:]:
        default = bucket_numel == 500_000_000
        given = Settings() if default else Settings(bucket_numel=bucket_numel)
        trace = measured(rank_pool, deepspeed(stage, 2 if default else 4, settings=given))
        assert_as_predicted(trace)
        if default:
            made = [event.delta_nbytes for event in trace.ranks[0].events if event.category is Category.BUCKET]
            held = trace.ranks[0].rest.get(Category.BUCKET)
            assert held == 2 * 10**9 if stage is Strategy.ZERO3 else made == [2 * 10**9, -2 * 10**9]


@pytest.mark.parametrize("optimizer", [optimizer for optimizer in Optimizer if optimizer.runs])
def test_every_optimizer(rank_pool: RankPool, optimizer: Optimizer) -> None:
    number = list(Optimizer).index(optimizer)
    for stage in {STAGES[number % 4], Strategy.ZERO3}:
        assert_as_predicted(measured(rank_pool, deepspeed(stage, optimizer=optimizer)))


@pytest.mark.parametrize("threshold", [0, 60, 100_000])
def test_parameters_that_stay_whole(rank_pool: RankPool, threshold: int) -> None:
    given = Settings(bucket_numel=20_000, persistence_numel=threshold)
    assert_as_predicted(measured(rank_pool, deepspeed(Strategy.ZERO3, 3, settings=given)))


LIMITS = {"PREFETCH_NUMEL": 15_000, "LIVE_NUMEL": 60_000, "REUSE_NUMEL": 30_000}


def with_small_limits(job: RankJob) -> dict[str, Any]:
    """A run in which a model as small as tiny is gathered as one of more than 1e9 parameters is."""
    from cluster.witness import deepspeed_engine

    config_of = deepspeed_engine.config_of

    def limited(spec: RunSpec) -> dict[str, Any]:
        config = config_of(spec)
        config["zero_optimization"] |= {
            "stage3_prefetch_bucket_size": LIMITS["PREFETCH_NUMEL"],
            "stage3_max_live_parameters": LIMITS["LIVE_NUMEL"],
            "stage3_max_reuse_distance": LIMITS["REUSE_NUMEL"],
        }
        return config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_engine, "config_of", limited)
        return run_rank(job)


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
def test_its_gathers_are_those_of_the_coordinator(
    rank_pool: RankPool, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other limits, the same in the library and in the arithmetic: what is gathered when, again and again."""
    spec = deepspeed(Strategy.ZERO3, 2, model, settings=Settings(bucket_numel=20_000, persistence_numel=60))
    for name, limit in LIMITS.items():
        monkeypatch.setattr(deepspeed_gathers, name, limit)
    predict.cache_clear()
    want = predict(spec).ranks
    predict.cache_clear()
    got = [rank_from_dict(result) for result in rank_pool.run(with_small_limits, spec)]
    for ours, theirs in zip(want, got, strict=True):
        ours.check()
        for op in CollectiveOp:  # a gather in backward is booked before the gradients of its segment
            calls = [(call.payload_nbytes, call.phase) for call in theirs.collectives if call.op is op]
            assert calls == [(call.payload_nbytes, call.phase) for call in ours.collectives if call.op is op], op
        gathered = sum(call.payload_nbytes for call in theirs.collectives if call.op.value == "all_gather")
        assert gathered > 1.3 * 4 * spec.model.num_params  # more than once
        assert rest(ours) == rest(theirs)


# ---- what it leaves ----


def what_a_run_leaves(job: RankJob) -> tuple[int, bool]:
    """Bytes still held after a run, over those after the one before, and whether F.linear is torch's."""
    linear = torch.nn.functional.linear
    held = []
    for number in range(3):
        run_rank(replace(job, store_path=f"{job.store_path}-{number}"))
        gc.collect()
        held.append(live_nbytes(CPU) or 0)
    assert held[2] == held[1]
    return held[1] - held[0], torch.nn.functional.linear is linear


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_FP32GRAD])
def test_a_run_leaves_nothing(rank_pool: RankPool, stage: Strategy, precision: Precision) -> None:
    """Stage 3 keeps 8P and F.linear of its own where it is not told otherwise."""
    if (stage, precision) in pairs():
        assert rank_pool.run(what_a_run_leaves, deepspeed(stage, precision=precision)) == [(0, True)] * 2


def before_and_after(job: RankJob) -> list[list[Any]]:
    """Events, rest and losses of our own run, before and after one of DeepSpeed's in the same process."""
    own = replace(job.spec, impl=Implementation.OWN, settings=Settings())
    found = []
    for number, spec in enumerate((own, job.spec, own)):
        result = run_rank(replace(job, spec=spec, store_path=f"{job.store_path}-{number}"))
        if spec is own:
            rank = rank_from_dict(result)
            found.append(
                [rank.peak(), rank.rest, rank.losses, rank.collectives, rank.allocator and rank.allocator.rest_nbytes]
            )
    return found


@pytest.mark.parametrize("stage", [Strategy.ZERO2, Strategy.ZERO3])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED])
def test_the_next_run_in_the_process_is_as_the_one_before(
    rank_pool: RankPool, stage: Strategy, precision: Precision
) -> None:
    for before, after in rank_pool.run(before_and_after, deepspeed(stage, precision=precision)):
        assert before == after


def test_engines_that_had_runs_join_those_that_had_none(rank_pool: RankPool) -> None:
    """The library numbers modules and parameters on from run to run and compares the numbers between ranks: after a run
    of two ranks, two of these four processes have numbered nothing yet."""
    fresh = RankPool()
    try:
        for ranks in (2, 4, 3):
            trace = live(fresh, deepspeed(Strategy.ZERO3, ranks))
            assert len(trace.ranks) == ranks
    finally:
        fresh.close()
