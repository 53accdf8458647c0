"""What crosses the wire: predicted, recorded by our seam, and recorded by torch's profiler, all three alike.

Ring bytes a rank sends, times (N-1)/N, with P padded parameters a unit: DDP's all-reduce 2P; ZeRO-1 and ZeRO-2
reduce-scatter + all-gather P + P; ZeRO-1's naive form all-reduce + all-gather 2P + P; ZeRO-3 gathers twice and
reduce-scatters once, 3P (ZeRO, arXiv 1910.02054, section 7). HYBRID_SHARD: ZeRO-3's 3P times (G-1)/G in the group, and
an all-reduce of P/G across R groups, 2 (R-1)/R of it. Megatron's optimizer: ZeRO-1's P + P, in two calls.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.meter import Meter
from cluster.own.step import Executor
from cluster.rank import RankJob, joined_group
from tests.dist.ranks import RankPool
from tests.dist.test_parity import strategies
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.models import PRESETS
from zeroviz.partition import plan_for
from zeroviz.predict import predict
from zeroviz.spec import DType, Precision, RunSpec, Strategy, Zero1Form
from zeroviz.trace import Collective

OP_OF = {
    "c10d::allreduce_": CollectiveOp.ALL_REDUCE,
    "c10d::_allgather_base_": CollectiveOp.ALL_GATHER,
    "c10d::_reduce_scatter_base_": CollectiveOp.REDUCE_SCATTER,
}
# Which of the op's recorded arguments is the whole array.
WHOLE_ARGUMENT = {"c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}
DTYPE_OF = {"float": DType.FP32, "c10::BFloat16": DType.BF16}


def profiled_step(job: RankJob) -> tuple[list[Collective], list[tuple[str, str, int]]]:
    """(what the seam recorded, what torch recorded as (op, dtype, payload bytes)) of the second step."""
    with joined_group(job) as comm:
        executor = Executor(job.spec, comm, Meter(), torch.device("cpu"))
        executor.step()
        comm.start_record()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profile:
            executor.step()
        return comm.calls, torch_record(profile)


def torch_record(profile: torch.profiler.profile) -> list[tuple[str, str, int]]:
    """The collectives of a profile as (op, dtype, whole array's bytes), in order, from its exported trace."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if "Input Dims" in e.get("args", {})]
    result = []
    events.sort(key=lambda event: event["ts"])
    for position, event in enumerate(events):
        if event["name"] not in OP_OF:
            continue
        if event["name"] == "c10d::allreduce_":
            # It takes a list of tensors, whose shapes torch does not record; the backend's own entry has them.
            event = next(e for e in events[position:] if e["name"] == "gloo:all_reduce")
            op, index = CollectiveOp.ALL_REDUCE, 0
        else:
            op, index = OP_OF[event["name"]], WHOLE_ARGUMENT[event["name"]]
        shape, dtype = event["args"]["Input Dims"][index], DTYPE_OF[event["args"]["Input type"][index]]
        result.append((op.value, dtype.value, prod(shape) * dtype.itemsize))
    return result


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED, Precision.BF16_FP32GRAD])
@pytest.mark.parametrize("ranks", [2, 3])
def test_predicted_seam_and_torch_agree(rank_pool: RankPool, model: str, precision: Precision, ranks: int) -> None:
    for spec in strategies(model, ranks, precision=precision):
        predicted = predict(spec)
        for rank, (seam, torch_calls) in enumerate(rank_pool.run(profiled_step, spec)):
            assert tuple(seam) == predicted.ranks[rank].collectives
            # The same calls in the same order: nothing more was sent, nothing less.
            assert [(c.op.value, c.dtype, c.payload_nbytes) for c in seam] == torch_calls, (rank, spec.strategy)


@pytest.mark.parametrize("settings", [{}, {"accumulation": 2}, {"async_reduce": True, "prefetch": 1}], ids=str)
def test_hybrid_sends_in_its_group_and_across_groups(rank_pool: RankPool, settings: dict[str, Any]) -> None:
    """Four ranks in two groups: as torch saw them, two gathers and a reduce-scatter of a unit, then its half summed.

    W padded elements of a unit: payloads 4 W, 4 W, 4 W and 4 W / 2, in groups of two ranks each.
    """
    spec = RunSpec(
        model=PRESETS["tiny"], strategy=Strategy.HYBRID_SHARD, ranks=4, shard_ranks=2, clip_norm=0.5, **settings
    )
    micro_batches = spec.accumulation
    expected: Counter[tuple[str, str, int]] = Counter({("all_reduce", "fp32", 4): 1})  # the norm
    for unit in plan_for(spec).units:
        whole = 4 * (unit.numel + unit.numel % 2)
        expected["all_gather", "fp32", whole] += 2 * micro_batches
        expected["reduce_scatter", "fp32", whole] += micro_batches
        expected["all_reduce", "fp32", whole // 2] += micro_batches
    predicted = predict(spec)
    for rank, (seam, torch_calls) in enumerate(rank_pool.run(profiled_step, spec)):
        assert tuple(seam) == predicted.ranks[rank].collectives
        assert Counter(torch_calls) == expected
        assert [(c.op.value, c.dtype, c.payload_nbytes) for c in seam] == torch_calls
        across = {c.payload_nbytes for c in seam if c.group is Group.REPLICA}
        assert across == {2 * (unit.numel + unit.numel % 2) for unit in plan_for(spec).units}


PASSES: list[tuple[dict[str, Any], int]] = [
    ({"strategy": Strategy.DDP}, 2),
    ({"strategy": Strategy.ZERO1}, 2),
    ({"strategy": Strategy.ZERO1, "zero1_form": Zero1Form.ALL_REDUCE}, 3),
    ({"strategy": Strategy.ZERO2}, 2),
    ({"strategy": Strategy.ZERO3}, 3),
]


@pytest.mark.parametrize(("settings", "passes"), PASSES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_ring_bytes_are_the_textbook_factor_times_the_padded_payload(
    settings: dict[str, Any], passes: int, ranks: int
) -> None:
    spec = RunSpec(model=PRESETS["tiny"], ranks=ranks, **settings)
    pads = spec.strategy is not Strategy.DDP
    padded = [unit.numel + (-unit.numel % ranks if pads else 0) for unit in plan_for(spec).units]
    exact = Fraction(passes * (ranks - 1), ranks) * sum(padded) * 4
    # Each op's total is rounded up to a whole byte once; at most two ops.
    assert 0 <= predict(spec).ranks[0].sent_nbytes - exact < 2
    if spec.strategy is not Strategy.DDP:
        assert predict(spec).ranks[0].sent_nbytes == exact
