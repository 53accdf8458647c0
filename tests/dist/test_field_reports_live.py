"""Field reports proved on real ranks: see tests/pure/test_field_reports.py, where each is derived."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import pytest
import torch

from cluster.allocator import live_nbytes
from cluster.meter import Meter, held_by_category
from cluster.own.step import Executor
from cluster.rank import RankJob, joined_group, run_rank
from tests.dist.ranks import RankPool
from tests.every import settings_of
from zeroviz.memory import step_counter_nbytes
from zeroviz.models import PRESETS
from zeroviz.partition import padded_numel, plan_for, shard_numel, update_numels
from zeroviz.predict import predict
from zeroviz.spec import Optimizer, RunSpec, Strategy, UnitPolicy
from zeroviz.trace import Category, RankTrace, rank_from_dict

TINY, LLAMA = PRESETS["tiny"], PRESETS["tiny-llama"]
CPU = torch.device("cpu")
SETTLE_S = 5.0


def ranks_of(rank_pool: RankPool, spec: RunSpec) -> list[RankTrace]:
    """The measured ranks; their peak, its place and its categories are the predicted ones."""
    measured = [rank_from_dict(result) for result in rank_pool.run(run_rank, spec)]
    for rank, predicted in zip(measured, predict(spec).ranks, strict=True):
        assert (rank.at_rest, rank.peak()) == (predicted.at_rest, predicted.peak())
        assert rank.allocator is not None
        assert rank.machine_peak().total == rank.allocator.peak_nbytes
    return measured


# So long that backward holds more than the states at rest, and so short that it holds less than the copy besides.
SEQ_02 = {Strategy.DDP: 48, Strategy.ZERO1: 40}


@pytest.mark.parametrize("strategy", SEQ_02)
def test_02_foreach_needs_a_copy_of_what_a_rank_owns(rank_pool: RankPool, strategy: Strategy) -> None:
    """With it the peak is in the update, rest + 4 s bytes, s owned elements; without it in backward, lower by less than
    that copy."""
    spec = RunSpec(model=TINY, strategy=strategy, ranks=2, seq=SEQ_02[strategy], steps=2)
    copy = 4 * sum(shard_numel(unit, spec) for unit in plan_for(spec).units)
    with_copy = ranks_of(rank_pool, replace(spec, optimizer=Optimizer.ADAMW_FOREACH))
    without = ranks_of(rank_pool, replace(spec, optimizer=Optimizer.ADAMW_FUSED))
    for more, less in zip(with_copy, without, strict=True):
        assert (more.peak().phase, more.peak().total) == ("optimizer", more.rest_nbytes + copy)
        assert less.peak().phase == "backward"
        assert 0 < more.peak().total - less.peak().total < copy


def test_08_one_unit_gathers_the_whole_model(rank_pool: RankPool) -> None:
    spec = RunSpec(model=LLAMA, ranks=3, seq=7, steps=2, unit=UnitPolicy.parse("model"))
    for rank in ranks_of(rank_pool, spec):
        assert rank.peak().by_category[Category.UNSHARDED_PARAM] == 4 * padded_numel(LLAMA.num_params, 3)


def test_09_without_sync_whole_gradients_are_held(rank_pool: RankPool) -> None:
    spec = RunSpec(model=TINY, ranks=3, seq=7, steps=2, accumulation=2)
    whole = 4 * sum(padded_numel(unit.numel, 3) for unit in plan_for(spec).units)
    for no_sync, between in ((False, 0), (True, whole)):
        for rank in ranks_of(rank_pool, replace(spec, no_sync=no_sync)):
            held, at_loads = 0, []
            for event in rank.events:
                if event.category is Category.INPUT and event.delta_nbytes > 0 and event.op == "load batch":
                    at_loads.append(held)
                held += event.delta_nbytes if event.category is Category.UNSHARDED_GRAD else 0
            assert (at_loads[0], at_loads[-1]) == (0, between)  # tokens of the first, targets of the last micro-batch


def readings(job: RankJob) -> list[dict[str, int]]:
    """Of each step: what the allocator had given out as it began, its peak, and the optimizer's state after it."""
    torch.set_num_threads(1)
    found = []
    with joined_group(job) as comm:
        gc.collect()
        before = live_nbytes(CPU)
        assert before is not None
        meter = Meter()
        executor = Executor(job.spec, comm, meter, CPU)

        def named() -> int:
            counters = ((counter, Category.OPTIMIZER_STATE) for counter in executor.step_counters())
            return sum(held_by_category(chain(executor.held_tensors(), counters)).values())

        for _ in range(job.spec.steps):
            gc.collect()
            comm.barrier()
            deadline = time.monotonic() + SETTLE_S
            while live_nbytes(CPU) != before + named() and time.monotonic() < deadline:
                time.sleep(0.001)  # gloo's threads let go of the last copies
            rest = live_nbytes(CPU)
            assert rest is not None
            held = chain(executor.held_tensors(), ((counter, None) for counter in executor.step_counters()))
            with meter.recording(held, CPU) as recording, comm.settled_by(recording.settling):
                executor.step()
            assert recording.peak_nbytes is not None
            state = held_by_category(executor.held_tensors())[Category.OPTIMIZER_STATE]
            found.append({"rest": rest - before, "peak": recording.peak_nbytes - before, "state": state})
    return found


@pytest.mark.parametrize(("ranks", "strategy"), [(1, Strategy.DDP), (1, Strategy.ZERO3), (3, Strategy.ZERO3)])
def test_10_adams_state_is_made_in_the_first_step(rank_pool: RankPool, ranks: int, strategy: Strategy) -> None:
    """The allocator itself, step by step: from the second on it holds two moments of the owned elements more, a step
    counter a slice, and a gradient, which the first one finds at rest no more than the state; from then on nothing
    changes. The first step's peak is the larger of backward's without the state and the update's with it. On 3 ranks
    the state is small enough beside what backward holds that the peak rises by all of it from step 1 to 2; on one rank
    the first update hides a part of it."""
    spec = RunSpec(model=TINY, strategy=strategy, ranks=ranks, seq=32, steps=4)
    state = 2 * 4 * sum(shard_numel(unit, spec) for unit in plan_for(spec).units)
    counters = step_counter_nbytes(spec)
    gradient = 4 * sum(shard_numel(unit, spec) for unit in plan_for(spec).units)
    rank = predict(spec).ranks[0]
    before_update = [event.delta_nbytes for event in rank.events if event.phase != "optimizer"]
    growth = max(accumulate(before_update))  # on CPU, gloo's copies and scratch included
    for steps in rank_pool.run(readings, spec):
        first, second, third, fourth = steps
        assert first["state"] == state
        assert second["rest"] - first["rest"] == state + counters + gradient
        assert second == third == fourth
        assert rank.machine_peak().total == second["peak"]
        backward = second["rest"] + growth - state - counters
        # Each slice's state is made as it is updated; two temporaries of it, and beside one a number: 8 bytes and 4.
        slices = [numel for unit in plan_for(spec).units for numel in update_numels(unit, spec)]
        made = accumulate(2 * 4 * numel + 4 for numel in slices)
        updates = [so_far + 2 * 4 * numel + 12 for so_far, numel in zip(made, slices, strict=True)]
        assert first["peak"] == max(backward, first["rest"] + gradient + max(updates))
        assert (first["peak"] == backward) == (ranks == 3)


def test_11_logits_are_not_divided_by_n(rank_pool: RankPool) -> None:
    """Tokens x vocabulary x 4 bytes: log probabilities, logits, and in backward the gradients of both; on each rank."""
    nbytes = 13 * LLAMA.vocab * 4
    for ranks in (1, 3):
        for rank in ranks_of(rank_pool, RunSpec(model=LLAMA, ranks=ranks, seq=13, steps=2)):
            made = [event.category for event in rank.events if event.delta_nbytes == nbytes]
            assert sorted(category.value for category in made) == ["ACTIVATION", *["TEMPORARY"] * 3]


@pytest.mark.parametrize("optimizer", [Optimizer.SGD_MOMENTUM, Optimizer.ADAMW])
def test_15_what_zero1_saves_is_one_less_than_n_parts(rank_pool: RankPool, optimizer: Optimizer) -> None:
    """M (1 - 1/N) of M bytes of state, the state's own padding put back: 4 ranks keep a quarter each."""
    common: dict[str, Any] = {"model": LLAMA, "ranks": 4, "seq": 7, "steps": 2, "optimizer": optimizer}
    whole = [
        rank.rest[Category.OPTIMIZER_STATE] for rank in ranks_of(rank_pool, RunSpec(strategy=Strategy.DDP, **common))
    ]
    zero1 = RunSpec(strategy=Strategy.ZERO1, **common)
    parts = [rank.rest[Category.OPTIMIZER_STATE] for rank in ranks_of(rank_pool, zero1)]
    padding = 4 * optimizer.num_moments * sum(-unit.numel % 4 for unit in plan_for(zero1).units)
    assert set(whole) == {4 * optimizer.num_moments * LLAMA.num_params}
    assert sum(parts) - padding == whole[0]
    assert len(set(parts)) == 1


def test_16_shard_grad_op_rests_sharded_and_pays_at_the_peak(rank_pool: RankPool) -> None:
    full = RunSpec(model=TINY, strategy=Strategy.ZERO3, ranks=3, seq=16, steps=2)
    whole = 4 * sum(padded_numel(unit.numel, 3) for unit in plan_for(full).units)
    kept = ranks_of(rank_pool, replace(full, strategy=Strategy.SHARD_GRAD_OP))
    for ours, theirs in zip(kept, ranks_of(rank_pool, full), strict=True):
        assert ours.at_rest == theirs.at_rest
        assert ours.peak().by_category[Category.UNSHARDED_PARAM] == whole
        price = ours.peak().total - theirs.peak().total
        assert price == whole - theirs.peak().by_category[Category.UNSHARDED_PARAM] > 0
        assert ours.sent_nbytes * 3 == theirs.sent_nbytes * 2


def test_13_one_rank_holds_the_same_in_every_strategy_and_sends_nothing(rank_pool: RankPool) -> None:
    for strategy in Strategy:
        (rank,) = ranks_of(rank_pool, RunSpec(model=TINY, ranks=1, seq=7, steps=2, **settings_of(strategy, 1)))
        assert rank.rest_nbytes == 16 * TINY.num_params
        assert (rank.collectives, rank.padding_nbytes) == ((), 0)
