"""What a rank's training is held against: one process on the global batch, with each implementation's own casts.

The distance is |p - ref| / |ref - init|, norms over all parameters: an error is measured against how far training
moved, not against how large the weights are.

[Note: tolerances] At N=2 the sum of two numbers has one order, and only the batch's split changes the order of
additions inside a kernel: 1e-6. At N=3 and 4 the ring adds in its own order, rounding differently in the last bit of
fp32, and Adam's division by a small root amplifies it in the first steps: 1e-4.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cluster.dtypes import TORCH_DTYPE
from cluster.model import Reference, initial_value
from cluster.own.optimizer import make_optimizer
from cluster.text import load_batch
from tests.dist.trained import CPU, NUM_STEPS
from zeroviz.settings import Settings, value_of
from zeroviz.spec import DType, Implementation, Precision, RunSpec, Strategy, UnitPolicy, Zero1Form
from zeroviz.witness.deepspeed_parts import keeps_whole_gradients

BOUND = {1: 1e-6, 2: 1e-6, 3: 1e-4, 4: 1e-4}

# A bf16 number has 8 bits, so a sum in another order differs by 2**-9 of itself in about a third of the elements; in
# its first steps Adam turns a gradient into a step of the learning rate whatever its scale, so the smallest, noisiest
# gradients weigh as much as the others. With one order (N=2) or fp32 sums there is no such freedom.
BF16_SUM_BOUND = 5e-2


def distance(got: dict[str, Tensor], want: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """|got - want| / |want - start| over all parameters."""
    assert got.keys() == want.keys()
    error = sum(((got[name] - want[name]).double() ** 2).sum() for name in want)
    moved = sum(((want[name] - start[name]).double() ** 2).sum() for name in want)
    return float((error / moved) ** 0.5)


def moved(parameters: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """|parameters - start|."""
    return float(sum(((parameters[name] - start[name]).double() ** 2).sum() for name in start) ** 0.5)


def reference(
    spec: RunSpec, num_steps: int = NUM_STEPS, model_type: type[Reference] = Reference
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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
            by_rank: list[dict[str, Tensor]] = []
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


def mixed_reference(spec: RunSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(trained, initial) parameters of one process with FSDP's casts: fp32 masters, bf16 copies that are computed with,
    each rank's bf16 gradient cast to the dtype of the reduction, summed in rank order, divided, and cast to fp32."""
    torch.set_num_threads(1)
    wire = TORCH_DTYPE[value_of(spec.settings, "reduce_dtype", spec.impl) or spec.recipe.compute]
    model = Reference(spec.model, spec.seed, TORCH_DTYPE[spec.recipe.compute])
    named = dict(model.named_parameters())
    start = {shape.name: initial_value(spec.model, shape, spec.seed) for shape in spec.model.params}
    masters = {name: torch.nn.Parameter(start[name].clone()) for name in named}
    optimizer = make_optimizer(spec.optimizer, list(masters.values()))
    for step in range(NUM_STEPS):
        total = {name: torch.zeros((), dtype=wire) for name in named}
        for rank in range(spec.ranks):
            model(load_batch(spec, rank, step, CPU)).backward()
            for name, parameter in named.items():
                assert parameter.grad is not None and parameter.grad.dtype is torch.bfloat16
                total[name] = total[name] + parameter.grad.to(wire)
            model.zero_grad()
        for name, master in masters.items():
            master.grad = (total[name] / spec.ranks).float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}, start


# ---- DeepSpeed ----


class NodesAtModules(Reference):
    """The model with an autograd node at each module's input, as stage 3 puts its own there.

    An RMSNorm uses its input x twice and the residual connection a third time. Autograd adds three gradients as they
    come, (residual + a) + b. With a node before the norm it is residual + (a + b): another last bit, which Adam's first
    step, the gradient by its own root, makes 1e-6 of the way trained.
    """

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        for sublayer in self.chain:
            for module in sublayer.modules():
                module.register_forward_pre_hook(_with_nodes)


def _with_nodes(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """`view_as` makes a node; token numbers have none."""
    return tuple(
        each.view_as(each) if isinstance(each, Tensor) and each.is_floating_point() else each for each in inputs
    )


def deepspeed_reference(spec: RunSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(trained, initial) masters of one process with DeepSpeed's casts.

    The master begins as what the bf16 parameter is. All that is sent is bf16: divided by N before the sum, but by stage
    0 and the optimizer with whole fp32 gradients after it. Stages 2 and 3 send every micro-batch's and add up the sums,
    in the gradient's dtype; the others add up first. Stage 0's optimizer makes a step without gradients as it begins,
    which counts as Adam's first and decays the weights.
    """
    torch.set_num_threads(1)
    bf16, grad_dtype, ranks = torch.bfloat16, TORCH_DTYPE[spec.recipe.grad], range(spec.ranks)
    model = Reference(spec.model, spec.seed, bf16)
    named = dict(model.named_parameters())
    start = {shape.name: initial_value(spec.model, shape, spec.seed).to(bf16).float() for shape in spec.model.params}
    masters = {name: torch.nn.Parameter(start[name].clone()) for name in named}
    optimizer = make_optimizer(spec.optimizer, list(masters.values()))

    def step_with(gradients: dict[str, Tensor]) -> None:
        for name, master in masters.items():
            master.grad = gradients[name].float()
        optimizer.step()

    def gradient(rank: int, number: int) -> dict[str, Tensor]:
        model.zero_grad()
        (model(load_batch(spec, rank, number, CPU)) / spec.accumulation).backward()
        return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}

    if spec.strategy is Strategy.DDP:
        step_with({name: torch.zeros_like(master) for name, master in masters.items()})
    divides_after = spec.strategy is Strategy.DDP or keeps_whole_gradients(spec)
    for step in range(NUM_STEPS):
        numbers = range(step * spec.accumulation, (step + 1) * spec.accumulation)
        rounds = [[number] for number in numbers] if spec.reduces_each else [numbers]
        total: dict[str, Tensor] = {}
        for micro_batches in rounds:
            sums: dict[str, Tensor] = {}
            for rank in ranks:
                mine: dict[str, Tensor] = {}
                for number in micro_batches:
                    fresh = gradient(rank, number)
                    kept = grad_dtype if keeps_whole_gradients(spec) else bf16
                    mine = {name: mine[name] + fresh[name].to(kept) if mine else fresh[name].to(kept) for name in fresh}
                sent = {name: value.to(bf16) / (1 if divides_after else spec.ranks) for name, value in mine.items()}
                sums = {name: sums[name] + sent[name] if sums else sent[name] for name in sent}
            if divides_after:
                sums = {name: value * (1 / spec.ranks) for name, value in sums.items()}
            total = {
                name: total[name] + sums[name].to(grad_dtype) if total else sums[name].to(grad_dtype) for name in sums
            }
        step_with(total)
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}, start


# ---- Megatron ----


def ring_sum(by_rank: list[Tensor], owner: Tensor) -> Tensor:
    """The sum as gloo's ring adds it: from the rank before an element's owner down and round to the owner. With thirds,
    which round, three terms in another order are another fp32 number, and a bf16 parameter may round to its other
    neighbour."""
    total = torch.zeros_like(by_rank[0])
    for last in range(len(by_rank)):
        around = [by_rank[last - distance] for distance in range(1, len(by_rank) + 1)]
        total = torch.where(owner == last, sum(around[1:], around[0]), total)
    return total


def megatron_reference(spec: RunSpec, owner: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(trained, initial) of one process with Megatron's casts: a micro-batch's gradient is rounded to the parameter's
    dtype before it is added in fp32, and the master begins as what the rounded parameter is."""
    torch.set_num_threads(1)
    dtype = TORCH_DTYPE[spec.recipe.param]
    model = Reference(spec.model, spec.seed, dtype)
    named = dict(model.named_parameters())
    start = {shape.name: initial_value(spec.model, shape, spec.seed).to(dtype).float() for shape in spec.model.params}
    masters = {name: torch.nn.Parameter(start[name].clone()) for name in named}
    optimizer = make_optimizer(spec.optimizer, list(masters.values()))
    for step in range(NUM_STEPS):
        by_rank: dict[str, list[Tensor]] = {name: [] for name in masters}
        for rank in range(spec.ranks):
            mean = {name: torch.zeros_like(master) for name, master in masters.items()}
            for micro_batch in range(spec.accumulation):
                loss = model(load_batch(spec, rank, step * spec.accumulation + micro_batch, CPU))
                (loss / spec.accumulation).backward()
                for name, parameter in named.items():
                    assert parameter.grad is not None
                    mean[name] += parameter.grad
                model.zero_grad()
            for name, grads in by_rank.items():
                grads.append(mean[name] * (1 / spec.ranks))
        for name, master in masters.items():
            master.grad = ring_sum(by_rank[name], owner[name])
        if spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(masters.values()), spec.clip_norm)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}, start


# ---- whichever it is ----


def one_process(spec: RunSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(trained, initial) with the casts of the spec's implementation, but for Megatron's: see `megatron_reference`.
    Worked out once for all that one process does alike; units are the ranks' affair."""
    alike: dict[str, Any] = {
        "unit": UnitPolicy.parse("model"),
        "shard_ranks": None,
        "zero1_form": Zero1Form.REDUCE_SCATTER,
    }
    if spec.impl is not Implementation.DEEPSPEED:
        alike |= {"strategy": Strategy.ZERO3}
        if spec.precision is not Precision.FSDP_MIXED:
            alike |= {"impl": Implementation.OWN, "settings": Settings()}
    return _one_process(replace(spec, **alike))


@lru_cache(maxsize=64)
def _one_process(spec: RunSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if spec.precision is Precision.FSDP_MIXED:
        return mixed_reference(spec)
    if spec.impl is not Implementation.DEEPSPEED:
        return reference(spec)
    if spec.precision is not Precision.FP32:
        return deepspeed_reference(spec)
    return reference(spec, model_type=NodesAtModules if spec.strategy is Strategy.ZERO3 else Reference)


def bound(spec: RunSpec) -> float:
    """Of the distance. Megatron's reference adds in gloo's own order; DeepSpeed sends what it computes in, and keeps it
    in fp32 afterwards."""
    if spec.impl is Implementation.MEGATRON:
        return 0.0
    sent = spec.recipe.compute if spec.impl is Implementation.DEEPSPEED else spec.recipe.grad
    if spec.precision is Precision.FSDP_MIXED:
        sent = value_of(spec.settings, "reduce_dtype", spec.impl) or spec.recipe.compute
    return BF16_SUM_BOUND if sent is DType.BF16 and spec.ranks > 2 else BOUND[spec.ranks]
