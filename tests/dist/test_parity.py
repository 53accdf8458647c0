"""Training parity: N ranks on N local batches end where one process on the global batch ends.

The distance is |p - ref| / |ref - init|, norms over all parameters: an error is measured against how far training
moved, not against how large the weights are.

[Note: tolerances] At N=2 the sum of two numbers has one order, and only the batch's split changes the order of
additions inside a kernel: 1e-6. At N=3 and 4 the ring adds in its own order, rounding differently in the last bit of
fp32, and Adam's division by a small root amplifies it in the first steps: 1e-4.
"""

from __future__ import annotations

import pytest
import torch

from cluster.collectives import Collectives
from cluster.dtypes import TORCH_DTYPE
from cluster.meter import Meter
from cluster.model import Reference, initial_value
from cluster.text import load_batch
from cluster.own.ddp import LEARNING_RATE, WEIGHT_DECAY
from cluster.own.step import Executor
from cluster.rank import RankJob, joined_group
from tests.dist.ranks import RankPool
from zeroviz.models import PRESETS
from zeroviz.partition import plan_for
from zeroviz.spec import Precision, RunSpec, Strategy, UnitPolicy, Zero1Form

NUM_STEPS = 5
BOUND = {1: 1e-6, 2: 1e-6, 3: 1e-4, 4: 1e-4}
CPU = torch.device("cpu")


def train(job: RankJob) -> list[torch.Tensor]:
    """Train as one rank; return the owned elements of every unit (the master's where there is one)."""
    torch.set_num_threads(1)
    with joined_group(job) as comm:
        executor = Executor(job.spec, comm, Meter(), CPU)
        for _ in range(NUM_STEPS):
            executor.step()
        return [unit.owned.detach().clone() for unit in executor.units]


def assemble(spec: RunSpec, owned: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Every parameter by name, fp32, from the ranks' shards: concatenated in rank order, padding cut off."""
    result = {}
    for unit in plan_for(spec).units:
        shards = [rank[unit.index] for rank in owned]
        flat = torch.cat(shards if spec.strategy.shards_optimizer else shards[:1]).float()
        start = 0
        for shape in unit.params:
            result[shape.name] = flat[start : start + shape.numel].view(shape.shape)
            start += shape.numel
    return result


def reference(spec: RunSpec) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(trained, initial) parameters of one process with the same casts, written with plain autograd and AdamW.

    fp32: one backward of the mean over all ranks' batches. bf16 recipes: each rank's gradient apart, rounded to the
    gradient's dtype, summed in rank order in that dtype and divided by N, as the ranks do.
    """
    recipe = spec.precision
    torch.set_num_threads(1)  # as the ranks do: with more, kernels add in another order
    model = Reference(spec.model, spec.seed, TORCH_DTYPE[recipe.param])
    named = dict(model.named_parameters())
    start = {shape.name: initial_value(spec.model, shape, spec.seed) for shape in spec.model.params}
    masters = {
        name: torch.nn.Parameter(start[name].clone().to(TORCH_DTYPE[recipe.master or recipe.param])) for name in named
    }
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=False)
    for step in range(NUM_STEPS):
        total: dict[str, torch.Tensor] = {}
        for rank in range(spec.ranks):
            model(load_batch(spec, rank, step, CPU)).backward()
            for name, parameter in named.items():
                assert parameter.grad is not None
                grad = parameter.grad.to(TORCH_DTYPE[recipe.grad])
                total[name] = grad if rank == 0 else total[name] + grad
                parameter.grad = None
        for name, master in masters.items():
            master.grad = (total[name] / spec.ranks).to(master.dtype)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
    return {name: master.detach().float() for name, master in masters.items()}, start


def distance(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """|got - want| / |want - start| over all parameters."""
    assert got.keys() == want.keys()
    error = sum(((got[name] - want[name]).double() ** 2).sum() for name in want)
    moved = sum(((want[name] - start[name]).double() ** 2).sum() for name in want)
    return float((error / moved) ** 0.5)


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_strategy_trains_as_one_process_does_fp32(rank_pool: RankPool, model: str, ranks: int) -> None:
    base = RunSpec(model=PRESETS[model], ranks=ranks, batch=2, seq=17)
    want, start = reference(base)
    for strategy in Strategy:
        spec = RunSpec(model=base.model, ranks=ranks, batch=2, seq=17, strategy=strategy)
        got = assemble(spec, rank_pool.run(train, spec))
        assert distance(got, want, start) <= BOUND[ranks], strategy
