"""Planted lies on real ranks: each is found, with the op that told it and its bytes, and none stops the run.

Two ranks, the tiny model, ZeRO-3 by blocks: unit 1 is block 0 with 37237 parameters, padded to 37238; in fp32 that is
148952 bytes whole and 74476 bytes a shard. Lies are told in the second of two steps, which is the metered one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster.own.ddp import DDPUnit
from cluster.own.step import Executor, Update
from cluster.own.zero2 import Zero2Unit
from cluster.own.zero3 import Zero3Unit
from cluster.rank import RankJob, run_rank
from tests.dist.ranks import RankPool
from zeroviz.causes import HELD_BEFORE, STEP_COUNTERS, UNEXPLAINED
from zeroviz.compare import Comparison, Figure, Moment, OpRow, compare
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy
from zeroviz.trace import Category, Origin, Trace, merge, rank_from_dict

SPEC = RunSpec(model=PRESETS["tiny"], ranks=2, strategy=Strategy.ZERO3, seq=17, steps=2)
UNIT, WHOLE, SHARD = 1, 37238 * 4, 37238 // 2 * 4


def lie(job: RankJob, owner: type, name: str, lying: Callable[[Callable[..., None], Any, int], None]) -> dict[str, Any]:
    """`run_rank` with the method `owner.name` replaced for unit 1: `lying(method, self, number of the call)`."""
    method = getattr(owner, name)
    num_calls = 0

    def instead(self: Any) -> None:
        nonlocal num_calls
        if self.unit.index != UNIT:
            method(self)
            return
        num_calls += 1
        lying(method, self, num_calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, instead)
        return run_rank(job)


def told(rank_pool: RankPool, liar: Callable[[RankJob], dict[str, Any]]) -> tuple[Trace, Comparison]:
    results = rank_pool.run(liar, SPEC)
    environment = {"backend": "gloo", "devices": ["cpu", "cpu"]}
    measured = merge(Origin.LIVE, SPEC, map(rank_from_dict, results), environment)
    assert Trace.from_json(measured.to_json()) == measured
    return measured, compare(predict(SPEC), measured)


def residual(measured: Trace, rank: int) -> int:
    """The allocator's peak beyond the predicted one."""
    reading = measured.ranks[rank].allocator
    assert reading is not None
    return reading.peak_nbytes - predict(SPEC).ranks[rank].machine_peak().total


def findings(comparison: Comparison, rank: int) -> list[OpRow]:
    """The ops that are to blame, on the device."""
    return [row for row in comparison.ops_of(rank) if row.cause == UNEXPLAINED and row.figure is Figure.DEVICE]


def keep_a_gathered_copy(job: RankJob) -> dict[str, Any]:
    def reshard(method: Callable[..., None], unit: Any, number: int) -> None:
        if number == 3:  # in forward of the second step
            unit.kept = unit.param.tensor.clone()
        method(unit)

    return lie(job, Zero3Unit, "reshard", reshard)


def test_a_leaked_gather_buffer(rank_pool: RankPool) -> None:
    measured, comparison = told(rank_pool, keep_a_gathered_copy)
    for rank in (0, 1):
        assert residual(measured, rank) == WHOLE
        (row,) = findings(comparison, rank)
        assert (row.phase, row.op, row.unit) == ("forward", "reshard", "block 0")
        assert row.left == {Category.TEMPORARY: WHOLE}
        # What comes after is named as its shadow and is no finding of its own.
        later = comparison.ops_of(rank)[comparison.ops_of(rank).index(row) + 1 :]
        assert later and {each.cause for each in later} == {"left by forward, block 0 (reshard)"}
        assert {each.difference for each in later} == {WHOLE}
        # It is still there when the step is over.
        (leak,) = (leak for leak in comparison.leaks if leak.rank == rank)
        assert (leak.category, leak.nbytes, leak.place) == (Category.TEMPORARY, WHOLE, "forward, block 0 (reshard)")
        for moment in (Moment.PEAK, Moment.MACHINE_PEAK):
            assert comparison.unexplained_nbytes(rank, moment) == WHOLE
    # Both meters agree that it is there: the books close, only the prediction does not.
    assert all(row.difference == 0 for row in comparison.allocator)


def forget_to_free(job: RankJob) -> dict[str, Any]:
    def reshard(method: Callable[..., None], unit: Any, number: int) -> None:
        if number != 4:  # not in backward of the second step
            method(unit)

    return lie(job, Zero3Unit, "reshard", reshard)


def test_a_unit_that_stays_gathered(rank_pool: RankPool) -> None:
    """An op that did nothing has no events, and is missed all the same."""
    measured, comparison = told(rank_pool, forget_to_free)
    for rank in (0, 1):
        (row,) = findings(comparison, rank)
        assert (row.phase, row.op, row.unit) == ("backward", "reshard", "block 0")
        assert row.left == {Category.UNSHARDED_PARAM: WHOLE}
        assert [leak.nbytes for leak in comparison.leaks if leak.rank == rank] == [WHOLE]
        assert measured.ranks[rank].leftover() == {Category.UNSHARDED_PARAM: WHOLE}


def free_the_gradient_late(job: RankJob) -> dict[str, Any]:
    """The full gradient of block 0 stays through the rest of backward; the update of its unit lets it go."""

    def wait_reduce(method: Callable[..., None], unit: Any, number: int) -> None:
        if number == 2:
            release, unit.grad.release = unit.grad.release, lambda: None
            method(unit)
            unit.grad.release = release
            hand_over_grad = unit.hand_over_grad

            def hand_over_grad_and_release() -> None:
                hand_over_grad()
                release()

            unit.hand_over_grad = hand_over_grad_and_release
        else:
            method(unit)

    return lie(job, Zero2Unit, "wait_reduce", wait_reduce)


def test_a_gradient_freed_one_phase_late(rank_pool: RankPool) -> None:
    _, comparison = told(rank_pool, free_the_gradient_late)
    for rank in (0, 1):
        (row,) = findings(comparison, rank)
        assert (row.phase, row.op, row.unit) == ("backward", "wait reduce", "block 0")
        assert row.left == {Category.UNSHARDED_GRAD: WHOLE}
        freed = [each for each in comparison.ops_of(rank) if each.left_nbytes < 0 and each.figure is Figure.DEVICE]
        assert [(each.op, each.unit, each.left_nbytes, each.cause) for each in freed] == [
            ("optimizer step", "block 0", -WHOLE, "freed here and not in backward, block 0 (wait reduce)")
        ]
        # Between the two every op holds that much more, in the allocator's figure as well.
        between = [each for each in comparison.ops_of(rank) if each.cause == "left by backward, block 0 (wait reduce)"]
        assert between and {each.difference for each in between} == {WHOLE}
    assert not comparison.leaks


def moments_of(updates: list[Update]) -> list[torch.Tensor]:
    """Copies of both moments, slice by slice."""
    states = [update.optimizer.state[part.owned] for update in updates for _, part in update.parts]
    return [state[name].clone() for state in states for name in ("exp_avg", "exp_avg_sq")]


def copy_the_moments(job: RankJob) -> dict[str, Any]:
    """A second copy of the optimizer's state of block 0, made when there is one for the first time."""
    update = Executor._update

    def update_and_copy(self: Executor, units: list[DDPUnit], updates: list[Update]) -> None:
        update(self, units, updates)
        if units[0].unit.index == UNIT and not hasattr(self, "kept"):
            self.kept = moments_of(updates)  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "_update", update_and_copy)
        return run_rank(job)


def test_a_second_copy_of_the_optimizer_state(rank_pool: RankPool) -> None:
    """It lies there at rest, and no name of ours covers it: two moments of a shard."""
    measured, comparison = told(rank_pool, copy_the_moments)
    for rank in (0, 1):
        assert residual(measured, rank) == 2 * SHARD
        rows = {row.category: row for row in comparison.of_rank(rank, Moment.REST)}
        assert rows[Category.UNATTRIBUTED].difference == 2 * SHARD
        assert rows[Category.UNATTRIBUTED].cause == UNEXPLAINED
        assert rows[Category.OPTIMIZER_STATE].cause == ""
        assert comparison.unexplained_nbytes(rank, Moment.REST) == 2 * SHARD
        allocator = comparison.allocator[rank]
        assert allocator.outside_nbytes == 2 * SHARD + measured.ranks[rank].step_counter_nbytes
        assert allocator.outside_cause == UNEXPLAINED != STEP_COUNTERS
        # From rest on every sum as here is that much higher, and says so.
        assert not findings(comparison, rank)
        assert {row.cause for row in comparison.ops_of(rank)} == {HELD_BEFORE}


def copy_the_moments_in_the_step(job: RankJob) -> dict[str, Any]:
    update = Executor._update
    num_updates = 0

    def update_and_copy(self: Executor, units: list[DDPUnit], updates: list[Update]) -> None:
        nonlocal num_updates
        update(self, units, updates)
        if units[0].unit.index == UNIT:
            num_updates += 1
            if num_updates == 2:
                self.kept = moments_of(updates)  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "_update", update_and_copy)
        return run_rank(job)


def test_a_second_copy_made_in_the_step_is_named_with_its_op(rank_pool: RankPool) -> None:
    _, comparison = told(rank_pool, copy_the_moments_in_the_step)
    for rank in (0, 1):
        (row,) = findings(comparison, rank)
        assert (row.op, row.unit, row.left) == ("optimizer step", "block 0", {Category.TEMPORARY: 2 * SHARD})
        leaks = [leak for leak in comparison.leaks if leak.rank == rank]
        assert [(leak.nbytes, leak.place) for leak in leaks] == [(2 * SHARD, "optimizer step of block 0")]


def test_the_truth_has_no_findings(rank_pool: RankPool) -> None:
    measured, comparison = told(rank_pool, run_rank)
    assert not comparison.unexplained and not comparison.ops and not comparison.leaks
    assert [residual(measured, rank) for rank in (0, 1)] == [0, 0]
