"""Closed forms, as an interviewer would derive them: what one rank holds at rest, by category.

With P parameters, N ranks and the recipe's widths p (parameter), g (gradient), k (master and both moments):

    ddp    (p + g + k) P            zero1  (p + g) P + k P/N
    zero2  p P + (g + k) P/N        zero3  (p + g + k) P/N

(ZeRO, Rajbhandari et al., arXiv 1910.02054, section 5 and Figure 1, with p = g = 2 and k = 12.) P is counted with each
unit's padding, so the figure is what is really allocated; padding is also given apart.
"""

from __future__ import annotations

from zeroviz.partition import buffer_numel, plan_for, shard_numel, shard_padding_numel
from zeroviz.spec import RunSpec
from zeroviz.trace import Category

# torch.optim keeps one fp32 scalar step counter for every tensor it updates; ours is one tensor a unit.
STEP_COUNTER_NBYTES_PER_UNIT = 4


def rest_by_category(spec: RunSpec) -> dict[Category, int]:
    """Bytes every rank holds between steps, padding included; the same on each rank."""
    units = plan_for(spec).units
    whole = sum(buffer_numel(unit, spec) for unit in units)
    shard = sum(shard_numel(unit, spec) for unit in units)
    recipe, strategy = spec.precision, spec.strategy
    rest = {
        Category.SHARDED_PARAM if strategy.shards_param else Category.UNSHARDED_PARAM: (
            (shard if strategy.shards_param else whole) * recipe.param.itemsize
        ),
        Category.SHARDED_GRAD if strategy.shards_grad else Category.UNSHARDED_GRAD: (
            (shard if strategy.shards_grad else whole) * recipe.grad.itemsize
        ),
        Category.OPTIMIZER_STATE: shard * 2 * recipe.moments.itemsize,
    }
    if recipe.master:
        rest[Category.MASTER_PARAM] = shard * recipe.master.itemsize
    return rest


def rest_padding_nbytes(spec: RunSpec, rank: int) -> int:
    """How many bytes of `rest_by_category` are padding on this rank.

    A whole buffer carries all of the unit's padding on every rank; a shard carries what falls into it.
    """
    recipe, strategy = spec.precision, spec.strategy
    whole = shard = 0
    for unit in plan_for(spec).units:
        whole += buffer_numel(unit, spec) - unit.numel
        shard += shard_padding_numel(unit, spec, rank)
    master = recipe.master.itemsize if recipe.master else 0
    return (
        (shard if strategy.shards_param else whole) * recipe.param.itemsize
        + (shard if strategy.shards_grad else whole) * recipe.grad.itemsize
        + shard * (master + 2 * recipe.moments.itemsize)
    )


def step_counter_nbytes(spec: RunSpec) -> int:
    """Bytes of the optimizer's step counters, named apart: no published formula counts them."""
    return STEP_COUNTER_NBYTES_PER_UNIT * len(plan_for(spec).units)
