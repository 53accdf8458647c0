"""FSDP2's options on real ranks: each trains what one process trains, and holds and sends what was predicted.

Mixed precision, resharding to a group, a mesh of two dimensions, micro-batches with and without reduction.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from cluster.meter import Meter
from cluster.rank import RankJob, joined_group
from cluster.rehearse import CPU, rehearse
from cluster.steps import steps_of
from cluster.witness.counted import Counted
from tests.dist.ranks import RankPool
from tests.dist.references import BF16_SUM_BOUND, BOUND, distance, mixed_reference, reference
from tests.dist.test_fsdp2 import fsdp2
from tests.dist.test_rehearse import assert_same_events, live
from tests.dist.trained import trained
from tests.every import crossed
from zeroviz.collectives import Group
from zeroviz.compare import compare
from zeroviz.predict import predict
from zeroviz.spec import DType, Precision, Settings, Strategy, UnitPolicy
from zeroviz.trace import Origin, Trace
from zeroviz.wire import Collective

FP32_SUMS = Settings(reduce_dtype=DType.FP32)
MIXED = Precision.FSDP_MIXED


# ---- training ----


@pytest.mark.parametrize(("model", "ranks"), crossed(["tiny", "tiny-llama"], [2, 3, 4]))
def test_mixed_precision_trains_as_one_process_with_its_casts(rank_pool: RankPool, model: str, ranks: int) -> None:
    """Summed in fp32 to the bounds of fp32; summed in bf16 over more than two ranks the order of additions shows."""
    for settings, bound in ((FP32_SUMS, BOUND[ranks]), (Settings(), BOUND[2] if ranks == 2 else BF16_SUM_BOUND)):
        spec = fsdp2(model, ranks, batch=2, precision=MIXED, settings=settings)
        want, start = mixed_reference(spec)
        for got in trained(rank_pool, spec):
            assert distance(got, want, start) <= bound, settings


TRAINED: list[dict[str, Any]] = [
    {"ranks": 2, "accumulation": 2},
    {"ranks": 3, "accumulation": 3, "no_sync": True},
    {"ranks": 2, "accumulation": 2, "no_sync": True, "strategy": Strategy.SHARD_GRAD_OP},
    {"ranks": 4, "settings": Settings(reshard_ranks=2)},
    {"ranks": 4, "strategy": Strategy.HYBRID_SHARD, "shard_ranks": 2},
    {"ranks": 3, "strategy": Strategy.HYBRID_SHARD, "shard_ranks": 3, "accumulation": 2},
    {"ranks": 2, "strategy": Strategy.HYBRID_SHARD, "shard_ranks": 1},
]


@pytest.mark.parametrize(("model", "number"), crossed(["tiny", "tiny-llama"], range(len(TRAINED))))
def test_every_option_trains_as_one_process_does(rank_pool: RankPool, model: str, number: int) -> None:
    spec = fsdp2(model, **TRAINED[number])
    want, start = reference(spec)
    for got in trained(rank_pool, spec):
        assert distance(got, want, start) <= BOUND[spec.ranks]


# ---- what is held and sent ----

HELD: list[dict[str, Any]] = [
    {"ranks": 2},
    {"ranks": 3, "unit": UnitPolicy.parse("layer")},
    {"ranks": 3, "precision": MIXED, "settings": FP32_SUMS},
    {"ranks": 2, "precision": MIXED, "accumulation": 2},
    {"ranks": 4, "settings": Settings(reshard_ranks=2)},
    {"ranks": 4, "strategy": Strategy.HYBRID_SHARD, "shard_ranks": 2},
    {"ranks": 3, "strategy": Strategy.HYBRID_SHARD, "shard_ranks": 3},
    {"ranks": 2, "strategy": Strategy.HYBRID_SHARD, "shard_ranks": 1, "precision": MIXED, "settings": FP32_SUMS},
    {"ranks": 3, "accumulation": 2, "no_sync": True},
    {"ranks": 2, "accumulation": 2, "no_sync": True, "precision": MIXED, "settings": FP32_SUMS},
]


@pytest.mark.parametrize(("model", "number"), crossed(["tiny", "tiny-llama"], range(len(HELD))))
def test_real_ranks_hold_what_was_rehearsed_and_predicted(rank_pool: RankPool, model: str, number: int) -> None:
    """Event by event; and beside the prediction nothing on the machine is without a name, the backend's copies and
    kernels' scratch included."""
    spec = fsdp2(model, **HELD[number])
    ranks = live(rank_pool, spec)
    for got, rehearsed, predicted in zip(ranks, rehearse(spec).ranks, predict(spec).ranks, strict=True):
        assert_same_events(got, rehearsed, (spec, got.rank))
        assert_same_events(predicted, rehearsed, (spec, got.rank))
        assert got.collectives == rehearsed.collectives == predicted.collectives
        assert got.allocator is not None
        assert got.allocator.rest_nbytes == got.rest_nbytes + got.step_counter_nbytes
        assert (got.allocator.unattributed_nbytes, got.leftover()) == (0, {})
    measured = Trace(Origin.LIVE, spec, tuple(ranks), {"backend": "gloo", "devices": ["cpu"] * spec.ranks})
    assert compare(predict(spec), measured).unexplained == ()


# ---- counted twice ----


def counted_twice(job: RankJob) -> tuple[list[Collective], list[Collective]]:
    """A step's calls as our seam records them and as a dispatch mode sees them from outside."""
    torch.set_num_threads(1)
    with joined_group(job) as comm, pytest.MonkeyPatch.context() as patch:
        steps = steps_of(job.spec, comm, CPU)(Meter())
        steps.step()
        patch.setattr("cluster.collectives._disable_current_modes", nullcontext)  # a mode is to see the backend's calls
        comm.start_record()
        counted = Counted()
        with counted.counting():
            steps.step()
        return comm.calls, counted.calls


@pytest.mark.parametrize(
    "settings",
    [
        {"ranks": 2},
        {"ranks": 3, "strategy": Strategy.SHARD_GRAD_OP, "precision": MIXED, "settings": FP32_SUMS},
        {"ranks": 4, "strategy": Strategy.HYBRID_SHARD, "shard_ranks": 2},
        {"ranks": 4, "settings": Settings(reshard_ranks=2)},
    ],
)
def test_the_seam_and_the_count_from_outside_agree(rank_pool: RankPool, settings: dict[str, Any]) -> None:
    """Call by call: op, dtype, ranks of the group and bytes. The all-reduce across replicas is the library's own call,
    which the seam learns of by a hook."""
    spec = fsdp2("tiny", **settings)
    for seam, outside in rank_pool.run(counted_twice, spec):
        recorded, seen = (
            [(call.op, call.dtype, call.num_ranks, call.payload_nbytes) for call in calls] for calls in (seam, outside)
        )
        assert recorded == seen
        assert Counter(call.group for call in seam) == Counter(
            call.group for call in predict(spec).ranks[0].collectives
        )
        if spec.strategy is Strategy.HYBRID_SHARD:
            assert sum(call.group is Group.REPLICA for call in seam) == 4  # root and three blocks
