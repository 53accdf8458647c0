"""What the doctor asks of an engine: every collective the product uses, beside the same sum made in one process.

[Note: exact in bf16] The inputs are small whole numbers: the sums stay below 256, up to which bf16 holds every whole
number. A wrong collective can therefore not hide behind rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cluster.collectives import Collectives
from cluster.dtypes import TORCH_DTYPE
from cluster.rank import RankJob, joined_group
from zeroviz.collectives import CollectiveOp

SHARD_NUMEL = 5


def probe(job: RankJob) -> dict[str, Any]:
    """Try each (op, dtype) on the job's group. `failures` maps `op dtype` to a sentence, empty where all is well."""
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    failures: dict[str, str] = {}
    with joined_group(job) as comm:
        for op in CollectiveOp:
            for dtype, torch_dtype in TORCH_DTYPE.items():  # those that are sent: quantized moments are not
                failures[f"{op.value} {dtype.value}"] = _failure(op, comm, torch_dtype, device)
    return {"failures": failures}


def rank_input(rank: int, num_ranks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(num_ranks * SHARD_NUMEL,): 1 + 10 * rank, 2 + 10 * rank, ... so that every element tells rank and place."""
    numel = num_ranks * SHARD_NUMEL
    return (torch.arange(numel, device=device) % 9 + 1 + 10 * rank).to(dtype)


def expected(op: CollectiveOp, rank: int, num_ranks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What `op` must leave on `rank`, made in this one process from all ranks' inputs."""
    inputs = [rank_input(other, num_ranks, dtype, device) for other in range(num_ranks)]
    if op is CollectiveOp.ALL_GATHER:
        return torch.cat([inputs[other].chunk(num_ranks)[other] for other in range(num_ranks)])
    total = torch.stack(inputs).sum(0)
    return total if op is CollectiveOp.ALL_REDUCE else total.chunk(num_ranks)[rank]


def _failure(op: CollectiveOp, comm: Collectives, dtype: torch.dtype, device: torch.device) -> str:
    try:
        got = _RUN[op](comm, rank_input(comm.rank, comm.num_ranks, dtype, device))
    except Exception as error:  # whatever a backend raises for what it cannot do is the finding
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    want = expected(op, comm.rank, comm.num_ranks, dtype, device)
    if torch.equal(got, want):
        return ""
    return f"rank {comm.rank} got {got.tolist()} where one process gets {want.tolist()}"


def _all_reduce(comm: Collectives, mine: torch.Tensor) -> torch.Tensor:
    comm.all_reduce(mine).wait()
    return mine


def _all_gather(comm: Collectives, mine: torch.Tensor) -> torch.Tensor:
    full = torch.zeros_like(mine)
    comm.all_gather(full, mine.chunk(comm.num_ranks)[comm.rank].clone()).wait()
    return full


def _reduce_scatter(comm: Collectives, mine: torch.Tensor) -> torch.Tensor:
    shard = torch.zeros_like(mine.chunk(comm.num_ranks)[comm.rank])
    comm.reduce_scatter(shard, mine).wait()
    return shard


_RUN: dict[CollectiveOp, Callable[[Collectives, torch.Tensor], torch.Tensor]] = {
    CollectiveOp.ALL_REDUCE: _all_reduce,
    CollectiveOp.ALL_GATHER: _all_gather,
    CollectiveOp.REDUCE_SCATTER: _reduce_scatter,
}
