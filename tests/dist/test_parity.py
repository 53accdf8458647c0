"""Training parity: N ranks on N local batches end where one process on the global batch ends.

The distance is |p - ref| / |ref - init|, norms over all parameters: an error is measured against how far training
moved, not against how large the weights are.

[Note: tolerances] At N=2 the sum of two numbers has one order, and only the batch's split changes the order of
additions inside a kernel: 1e-6. At N=3 and 4 the ring adds in its own order, rounding differently in the last bit of
fp32, and Adam's division by a small root amplifies it in the first steps: 1e-4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.dtypes import TORCH_DTYPE
from cluster.meter import Meter
from cluster.model import Reference, initial_value
from cluster.own.optimizer import make_optimizer
from cluster.own.step import Executor
from cluster.rank import RankJob, joined_group
from cluster.text import load_batch
from tests.dist.ranks import RankPool
from tests.every import exists, settings_of
from zeroviz.models import PRESETS
from zeroviz.partition import buffers_for
from zeroviz.spec import (
    Checkpointing,
    DType,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitPolicy,
    Zero1Form,
)
from zeroviz.toggles import group_choices

NUM_STEPS = 5
BOUND = {1: 1e-6, 2: 1e-6, 3: 1e-4, 4: 1e-4}
CPU = torch.device("cpu")


def train(job: RankJob, num_steps: int = NUM_STEPS) -> list[torch.Tensor]:
    """Train as one rank; return the owned elements of every unit (the master's where there is one)."""
    torch.set_num_threads(1)
    with joined_group(job) as comm:
        executor = Executor(job.spec, comm, Meter(), CPU)
        for _ in range(num_steps):
            executor.step()
        return [unit.owned.detach().clone() for unit in executor.units]


def train_once(job: RankJob) -> list[torch.Tensor]:
    """The same, one step long."""
    return train(job, 1)


def assemble(spec: RunSpec, owned: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Every parameter by name, fp32, from the ranks' shards: concatenated in rank order, padding cut off."""
    result = {}
    for buffer in buffers_for(spec):
        shards = [rank[buffer.index] for rank in owned]
        num_shards = spec.num_shards if spec.strategy.shards_optimizer else 1
        for rank, shard in enumerate(shards[num_shards:], num_shards):  # copies hold the same, to the bit
            assert torch.equal(shard, shards[rank % num_shards]), (spec.strategy, rank)
        flat = torch.cat(shards[:num_shards]).float()
        start = 0
        for shape in buffer.params:
            result[shape.name] = flat[start : start + shape.numel].view(shape.shape)
            start += shape.numel
    return result


def reference(
    spec: RunSpec, num_steps: int = NUM_STEPS, model_type: type[Reference] = Reference
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(trained, initial) parameters of one process with the same casts, written with plain autograd and one optimizer.

    fp32: one backward of the mean over all ranks' batches. bf16 recipes: each rank's gradient apart, rounded to the
    gradient's dtype, summed in rank order in that dtype and divided by N, as the ranks do.
    """
    recipe = spec.recipe
    torch.set_num_threads(1)  # as the ranks do: with more, kernels add in another order
    model = model_type(spec.model, spec.seed, TORCH_DTYPE[recipe.param])
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.grad_dtype = TORCH_DTYPE[recipe.grad]  # a parameter used twice adds up in this dtype
    start = {shape.name: initial_value(spec.model, shape, spec.seed) for shape in spec.model.params}
    masters = {name: torch.nn.Parameter(start[name].clone().to(TORCH_DTYPE[recipe.update])) for name in named}
    optimizer = make_optimizer(spec.optimizer, list(masters.values()))
    for step in range(num_steps):
        # Micro-batches add up on each rank before the ranks do, or after, as the gradient is reduced once or each time.
        rounds = [[micro] for micro in range(spec.accumulation)] if spec.reduces_each else [range(spec.accumulation)]
        total = {name: torch.zeros((), dtype=TORCH_DTYPE[recipe.grad]) for name in named}
        for micro_batches in rounds:
            by_rank: list[dict[str, torch.Tensor]] = []
            for rank in range(spec.ranks):
                for micro_batch in micro_batches:
                    loss = model(load_batch(spec, rank, step * spec.accumulation + micro_batch, CPU))
                    (loss / spec.accumulation).backward()
                by_rank.append(
                    {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
                )
                model.zero_grad()
            for name in named:
                total[name] = total[name] + sum(grads[name] for grads in by_rank) / spec.ranks
        if spec.clip_norm is not None:
            squares = sum(torch.linalg.vector_norm(grad, dtype=torch.float32) ** 2 for grad in total.values())
            scale = (spec.clip_norm / (torch.sqrt(torch.as_tensor(squares)) + 1e-6)).clamp(max=1.0)
            total = {name: grad.mul_(scale) for name, grad in total.items()}
        for name, master in masters.items():
            master.grad = total[name].to(master.dtype)
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


def moved(parameters: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """|parameters - start|."""
    return float(sum(((parameters[name] - start[name]).double() ** 2).sum() for name in start) ** 0.5)


def spec_of(model: str, ranks: int, **settings: Any) -> RunSpec:
    """17 tokens in each of two sequences: nothing is divisible by anything."""
    return RunSpec(model=PRESETS[model], ranks=ranks, batch=2, seq=17, **settings)


def strategies(model: str, ranks: int, **settings: Any) -> list[RunSpec]:
    """Every strategy, ZeRO-1 in its naive form too, and shard groups of every size that there is."""
    precision = settings.get("precision", Precision.FP32)
    specs = [
        spec_of(model, ranks, strategy=strategy, shard_ranks=shard_ranks, **settings)
        for strategy in Strategy
        if exists(strategy, precision)
        for shard_ranks in (group_choices(ranks) if strategy.replicates else (None,))
    ]
    naive = spec_of(model, ranks, strategy=Strategy.ZERO1, zero1_form=Zero1Form.ALL_REDUCE, **settings)
    return [*specs, naive]


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_strategy_trains_as_one_process_does_in_fp32(rank_pool: RankPool, model: str, ranks: int) -> None:
    want, start = reference(spec_of(model, ranks))
    for spec in strategies(model, ranks):
        got = assemble(spec, rank_pool.run(train, spec))
        assert distance(got, want, start) <= BOUND[ranks], spec.strategy


# A bf16 number has 8 bits, so a sum in another order differs by 2**-9 of itself in about a third of the elements; in
# its first steps Adam turns a gradient into a step of the learning rate whatever its scale, so the smallest, noisiest
# gradients weigh as much as the others. With one order (N=2) or fp32 sums there is no such freedom.
BF16_SUM_BOUND = 5e-2


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16_FP32GRAD, Precision.BF16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bf16_recipes_train_as_one_process_with_the_same_casts(
    rank_pool: RankPool, model: str, precision: Precision, ranks: int
) -> None:
    want, start = reference(spec_of(model, ranks, precision=precision))
    sums_in_bf16 = precision.grad is DType.BF16 and ranks > 2
    for spec in strategies(model, ranks, precision=precision):
        got = assemble(spec, rank_pool.run(train, spec))
        assert distance(got, want, start) <= (BF16_SUM_BOUND if sums_in_bf16 else BOUND[ranks]), spec.strategy


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
def test_units_and_overlap_change_no_number(rank_pool: RankPool, model: str) -> None:
    """With two ranks a sum has one order, so grouping and overlap may not change a single bit."""

    def trained(**settings: Any) -> dict[str, torch.Tensor]:
        spec = spec_of(model, 2, **settings)
        return assemble(spec, rank_pool.run(train, spec))

    want = trained(strategy=Strategy.DDP, unit=UnitPolicy.parse("model"))
    for unit in ("model", "block", "block:2", "layer", "numel:3e4"):
        for settings in (
            {"strategy": Strategy.DDP, "async_reduce": True},
            {"strategy": Strategy.ZERO1},
            {"strategy": Strategy.ZERO2, "async_reduce": True},
            {"strategy": Strategy.ZERO3},
            {"strategy": Strategy.ZERO3, "prefetch": 1, "async_reduce": True},
            {"strategy": Strategy.ZERO3, "prefetch": 5},
            {"strategy": Strategy.SHARD_GRAD_OP, "prefetch": 1},
            {"strategy": Strategy.DDP, "checkpointing": Checkpointing(1)},
            {"strategy": Strategy.ZERO3, "checkpointing": Checkpointing(2), "prefetch": 1},
            {"strategy": Strategy.ZERO3, "checkpointing": Checkpointing(3), "offload": Offload.PARAMS},
            {"strategy": Strategy.ZERO2, "offload": Offload.OPTIMIZER},
            {"strategy": Strategy.ZERO3, "optimizer": Optimizer.ADAMW_FOREACH},
            {"strategy": Strategy.HYBRID_SHARD, "shard_ranks": 1, "prefetch": 1, "async_reduce": True},
            {"strategy": Strategy.HYBRID_SHARD, "shard_ranks": 2, "checkpointing": Checkpointing(2)},
            {"strategy": Strategy.MEGATRON_OPTIM},
            {"strategy": Strategy.MEGATRON_OPTIM, "optimizer": Optimizer.ADAMW_FOREACH},
        ):
            got = trained(unit=UnitPolicy.parse(unit), **settings)
            assert all(torch.equal(got[name], want[name]) for name in want), (unit, settings)


OPTIONS: list[dict[str, Any]] = [
    {"strategy": Strategy.ZERO3, "accumulation": 3},
    {"strategy": Strategy.ZERO3, "accumulation": 3, "no_sync": True},
    {"strategy": Strategy.ZERO3, "accumulation": 3, "offload": Offload.PARAMS, "checkpointing": Checkpointing(1)},
    {"strategy": Strategy.ZERO2, "accumulation": 2, "offload": Offload.OPTIMIZER},
    {"strategy": Strategy.ZERO1, "accumulation": 2},
    {"strategy": Strategy.DDP, "accumulation": 3},
    {"strategy": Strategy.DDP, "accumulation": 3, "no_sync": False},
    {"strategy": Strategy.SHARD_GRAD_OP, "optimizer": Optimizer.SGD, "checkpointing": Checkpointing(2)},
    {"strategy": Strategy.ZERO2, "optimizer": Optimizer.SGD_MOMENTUM},
    {"strategy": Strategy.ZERO1, "optimizer": Optimizer.ADAMW_FOREACH},
    {"strategy": Strategy.HYBRID_SHARD, "shard_ranks": 1, "accumulation": 2, "offload": Offload.PARAMS},
    {"strategy": Strategy.HYBRID_SHARD, "shard_ranks": 1, "accumulation": 3, "no_sync": True},
    {"strategy": Strategy.MEGATRON_OPTIM, "accumulation": 3, "checkpointing": Checkpointing(1)},
]


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_option_trains_as_one_process_does(rank_pool: RankPool, model: str, ranks: int) -> None:
    for settings in OPTIONS:
        spec = spec_of(model, ranks, **settings)
        want, start = reference(spec)
        got = assemble(spec, rank_pool.run(train, spec))
        # Two more orders of additions. Whole gradients of a tied weight take head and embedding of each micro-batch in
        # turn, where autograd adds the two first; DDP that reduces each time adds to the mean of those before.
        accumulates_whole = spec.accumulation > 1 and not spec.reduces_each
        other_order = (accumulates_whole and spec.model.tied) or settings.get("no_sync") is False
        bound = BOUND[3] if other_order else BOUND[ranks]
        assert distance(got, want, start) <= bound, settings


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAMW])
def test_clipped_gradients_train_as_one_process_clips(
    rank_pool: RankPool, model: str, ranks: int, optimizer: Optimizer
) -> None:
    """Under every strategy and group: a norm of less than all shards, or of one shard twice, would be another step.

    0.2 is below the norm of every step here: clipping shortens each, and plain descent then moves less.
    """
    settings: dict[str, Any] = {"clip_norm": 0.2, "optimizer": optimizer}
    want, start = reference(spec_of(model, ranks, **settings))
    for spec in strategies(model, ranks, **settings):
        got = assemble(spec, rank_pool.run(train, spec))
        assert distance(got, want, start) <= BOUND[3], spec.strategy  # norms are added up in another order
    if optimizer is Optimizer.SGD:
        free, _ = reference(spec_of(model, ranks, optimizer=optimizer))
        assert moved(want, start) < 0.9 * moved(free, start)


@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16_FP32GRAD])
def test_bf16_gradients_are_clipped_by_a_norm_in_fp32(rank_pool: RankPool, precision: Precision) -> None:
    """In bf16 the scale is rounded to 8 bits, and where two sums of squares differ in the last bit of fp32 that can go
    either way: a gradient then differs by 2**-8 of itself. One step: the parameters that the next would compute with
    are masters rounded to 8 bits, and a master that differs in its last bit can be rounded either way as well."""
    settings: dict[str, Any] = {"clip_norm": 0.2, "optimizer": Optimizer.SGD, "precision": precision}
    want, start = reference(spec_of("tiny", 2, **settings), 1)
    for spec in strategies("tiny", 2, **settings):
        got = assemble(spec, rank_pool.run(train_once, spec))
        assert distance(got, want, start) <= (2**-8 if precision.grad is DType.BF16 else BOUND[3]), spec.strategy


def test_a_norm_below_the_bound_changes_nothing(rank_pool: RankPool) -> None:
    """The scale is 1 then, to the bit, and a product with it is the gradient itself."""
    for settings in ({"strategy": Strategy.ZERO2}, {"strategy": Strategy.HYBRID_SHARD, "shard_ranks": 1}):
        free, clipped = (
            assemble(spec, rank_pool.run(train, spec))
            for spec in (spec_of("tiny", 2, clip_norm=norm, **settings) for norm in (None, 1e9))
        )
        assert all(torch.equal(free[name], clipped[name]) for name in free)


# The fused kernel computes the last few elements of a tensor, those that do not fill a vector, by another code path,
# and so rounds them otherwise; which elements these are depends on where a shard is cut.
FUSED_BOUND = 1e-5


def test_the_fused_optimizer_rounds_where_a_shard_is_cut(rank_pool: RankPool) -> None:
    spec = spec_of("tiny", 2, optimizer=Optimizer.ADAMW_FUSED)
    want, start = reference(spec)
    assert 0 < distance(assemble(spec, rank_pool.run(train, spec)), want, start) <= FUSED_BOUND


def test_gradients_in_another_dtype_than_the_parameters(rank_pool: RankPool) -> None:
    """fp32 parameters with bf16 gradients, bf16 parameters with fp32 ones: the casts are the reference's."""
    for precision, grad in ((Precision.FP32, DType.BF16), (Precision.BF16, DType.FP32)):
        spec = spec_of("tiny-llama", 2, precision=precision, grad_dtype=grad)
        want, start = reference(spec)
        assert distance(assemble(spec, rank_pool.run(train, spec)), want, start) <= BOUND[2], spec


def test_tied_biased_llama_trains_as_one_process_does(rank_pool: RankPool) -> None:
    """The options the presets leave out: a tied Llama with biases, grouped-query heads, head_dim not hidden / heads."""
    model = replace(PRESETS["tiny-llama"], tied=True, attention_bias=True, mlp_bias=True, heads=4, kv_heads=2)
    base = RunSpec(model=model, ranks=3, batch=1, seq=13)
    want, start = reference(base)
    for strategy in Strategy:
        spec = replace(base, **settings_of(strategy, 3))
        assert distance(assemble(spec, rank_pool.run(train, spec)), want, start) <= BOUND[3]


def test_the_distance_notices_a_missing_average() -> None:
    """The measure can fail: gradients twice too large after one step of plain descent are a distance of 1."""
    start = {"w": torch.zeros(3)}
    assert distance({"w": torch.full((3,), 2.0)}, {"w": torch.ones(3)}, start) == pytest.approx(1.0)
