"""Closed forms, as an interviewer would derive them: what one rank holds at rest and, of model states, at the peak.

At rest,
with P parameters, N ranks and the recipe's widths p (parameter), g (gradient), k (master and both moments):

    ddp    (p + g + k) P            zero1  (p + g) P + k P/N
    zero2  p P + (g + k) P/N        zero3  (p + g + k) P/N

(ZeRO, Rajbhandari et al., arXiv 1910.02054, section 5 and Figure 1, with p = g = 2 and k = 12.) P is counted with each
unit's padding, so the figure is what is really allocated; padding is also given apart.

At the peak, rest plus the largest window of the step. With u the unit in use, of P_u parameters, s_u of them owned:

    backward of u      p P_u + g P_u (ZeRO-3)    g P_u (ZeRO-2)    nothing more (DDP, ZeRO-1)
    update of u        2 m s_u for AdamW's two temporaries, m the moments' width; + 4 s_u to cast a narrower gradient

A unit that embraces others (a tied root) stays gathered around them; prefetch adds the next units' p P, an
asynchronous reduction the g P of the unit before. Activations come on top: `zeroviz.activations` has those, and
`zeroviz.predict` walks both together.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroviz.partition import Unit, buffer_numel, plan_for, shard_numel, shard_padding_numel
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


@dataclass(frozen=True, slots=True)
class Window:
    """A moment of the step and the bytes of model states it holds beyond rest, by term."""

    phase: str
    unit: str
    unsharded_param: int = 0
    unsharded_grad: int = 0
    temporary: int = 0

    @property
    def nbytes(self) -> int:
        return self.unsharded_param + self.unsharded_grad + self.temporary


def windows(spec: RunSpec) -> tuple[Window, ...]:
    """The step's windows: backward of every unit, then the update of every unit.

    Forward holds no gradient, so its windows are never larger than backward's and are left out.
    """
    plan = plan_for(spec)
    return tuple(
        [_backward_window(spec, plan.units, unit) for unit in _backward_order(spec)]
        + [_update_window(spec, unit) for unit in plan.units]
    )


def largest_window(spec: RunSpec) -> Window:
    """Where the peak of the model states stands: `rest_by_category` plus this."""
    return max(windows(spec), key=lambda window: window.nbytes)


def _backward_order(spec: RunSpec) -> list[Unit]:
    """Units in order of first use in backward."""
    plan = plan_for(spec)
    return [plan.units[index] for index in dict.fromkeys(segment.unit for segment in reversed(plan.segments))]


def _embraces(spec: RunSpec, unit: Unit) -> bool:
    """Whether the unit is used at both ends of the pass, and so during all of it."""
    segments = plan_for(spec).segments
    return len(segments) > 1 and segments[0].unit == segments[-1].unit == unit.index


def _backward_window(spec: RunSpec, units: tuple[Unit, ...], unit: Unit) -> Window:
    order = _backward_order(spec)
    position = order.index(unit)
    around = [other for other in units if other is not unit and _embraces(spec, other)]
    gathered = [*around, *order[position : position + 1 + spec.prefetch]]
    reducing = [*around, unit]
    if spec.async_reduce and position and order[position - 1] not in around:
        reducing.append(order[position - 1])
    param, grad = spec.precision.param.itemsize, spec.precision.grad.itemsize
    return Window(
        phase="backward",
        unit=unit.name,
        unsharded_param=param * _numel(spec, gathered) if spec.strategy.shards_param else 0,
        unsharded_grad=grad * _numel(spec, reducing) if spec.strategy.shards_grad else 0,
    )


def _update_window(spec: RunSpec, unit: Unit) -> Window:
    recipe, numel = spec.precision, shard_numel(unit, spec)
    cast = recipe.master.itemsize if recipe.master and recipe.master is not recipe.grad else 0
    return Window(phase="optimizer", unit=unit.name, temporary=numel * (2 * recipe.moments.itemsize + cast))


def _numel(spec: RunSpec, units: list[Unit]) -> int:
    return sum(buffer_numel(unit, spec) for unit in units)
