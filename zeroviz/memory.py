"""Closed forms, as an interviewer would derive them: what one rank holds at rest and, of model states, at the peak.

At rest,
with P parameters, N ranks and the recipe's widths p (parameter), g (gradient), k (master and both moments):

    ddp    (p + g + k) P            zero1  (p + g) P + k P/N
    zero2  p P + (g + k) P/N        zero3  (p + g + k) P/N
    hybrid_shard  (p + g + k) P/G in shard groups of G ranks, whatever N
    megatron_optim  (p + g) P + k P/N: zero1's, with shards of one buffer over all units

(ZeRO, Rajbhandari et al., arXiv 1910.02054, section 5 and Figure 1, with p = g = 2 and k = 12.) P is counted with each
unit's padding, or with Megatron's the one buffer's, so the figure is what is really allocated; padding is also given
apart.

A step frees the gradient first ([Note: gradients] in `zeroviz.schedule`), so at the peak a rank holds the rest without
it, plus the largest window of the step. With u the unit in use, of P_u parameters, s_u of them owned and l_u updated at
a time, and P_D and s_D those of the units whose backward is done:

    forward of u       p P_u (ZeRO-3, HYBRID_SHARD)
    backward of u      p P_u + g P_u + g s_D (ZeRO-3, HYBRID_SHARD)
                       g P_u + g s_D (ZeRO-2)    g P_u + g P_D (DDP, ZeRO-1)
    reduction of u     g P_u + g s_u + g s_D (where gradients are sharded)
    update of u        the whole gradient again, and t m l_u for the optimizer's t temporaries (AdamW's plain loop 2,
                       foreach 1, fused 0), m the moments' width; + l_u at the update's width to cast another gradient

Megatron's one buffer, and gradients on the host, stay: their windows hold none. A unit that embraces others (a tied
root) stays gathered around them; prefetch adds the next units' p P, an asynchronous reduction the g P of the unit
before. SHARD_GRAD_OP keeps p P of all units from the end of forward. Foreach updates all units together, so its l_u is
the sum of all s. Whole gradients held over micro-batches (no_sync) are g P of all. Clipping borrows a few numbers.
Activations come on top: `zeroviz.activations` has those, and `zeroviz.predict` walks both together.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroviz.partition import (
    Unit,
    alike_buffers,
    buffer_numel,
    buffers_for,
    plan_for,
    shard_numel,
    shard_padding_numel,
    slice_numel,
    update_numels,
)
from zeroviz.schedule import Op, OpKind, last_wait, schedule
from zeroviz.spec import Offload, Recipe, RunSpec, Strategy
from zeroviz.trace import Category

# torch.optim keeps one fp32 scalar step counter for every tensor it updates; ours is a slice (`update_numels`).
STEP_COUNTER_NBYTES_PER_SLICE = 4


def rest_by_category(spec: RunSpec) -> dict[Category, int]:
    """Bytes every rank holds between steps, padding included; the same on each rank. What is offloaded is HOST_..."""
    buffers = alike_buffers(spec)
    whole = sum(count * buffer_numel(buffer, spec) for buffer, count in buffers)
    shard = sum(count * shard_numel(buffer, spec) for buffer, count in buffers)
    place = rest_places(spec)
    recipe, strategy = spec.recipe, spec.strategy
    rest = {
        place.param: (shard if strategy.shards_param else whole) * recipe.param.itemsize,
        place.grad: (shard if strategy.shards_grad else whole) * recipe.grad.itemsize,
        place.moments: sum(count * recipe.moments_nbytes(shard_numel(buffer, spec)) for buffer, count in buffers),
    }
    if place.master:
        rest[place.master] = shard * recipe.update.itemsize
    return rest


@dataclass(frozen=True, slots=True)
class RestPlaces:
    """Under which category each state is held between steps; `master` None where the parameter itself is updated.

    An optimizer on the host updates a copy there, so offloading makes a master of the parameters' own dtype in recipes
    without one. Parameters that are offloaded themselves are that copy.
    """

    param: Category
    grad: Category
    master: Category | None
    moments: Category

    @classmethod
    def of(cls, strategy: Strategy, offload: Offload, recipe: Recipe) -> RestPlaces:
        param = Category.SHARDED_PARAM if strategy.shards_param else Category.UNSHARDED_PARAM
        grad = Category.SHARDED_GRAD if strategy.shards_grad else Category.UNSHARDED_GRAD
        has_master = recipe.master is not None
        if not offload.moves_optimizer:
            return cls(param, grad, Category.MASTER_PARAM if has_master else None, Category.OPTIMIZER_STATE)
        if not offload.moves_params:
            return cls(param, grad, Category.HOST_MASTER_PARAM, Category.HOST_OPTIMIZER_STATE)
        master = Category.HOST_MASTER_PARAM if has_master else None
        return cls(Category.HOST_PARAM, Category.HOST_GRAD, master, Category.HOST_OPTIMIZER_STATE)


def rest_places(spec: RunSpec) -> RestPlaces:
    return RestPlaces.of(spec.strategy, spec.offload, spec.recipe)


def rest_padding_nbytes(spec: RunSpec, rank: int) -> int:
    """How many bytes of `rest_by_category` are padding on this rank, the host's included.

    A whole buffer carries all of the unit's padding on every rank; a shard carries what falls into it.
    """
    recipe, strategy = spec.recipe, spec.strategy
    whole = shard = 0
    for buffer, count in alike_buffers(spec):
        whole += count * (buffer_numel(buffer, spec) - buffer.numel)
        shard += count * shard_padding_numel(buffer, spec, rank)
    master = recipe.update.itemsize if rest_places(spec).master else 0
    return (
        (shard if strategy.shards_param else whole) * recipe.param.itemsize
        + (shard if strategy.shards_grad else whole) * recipe.grad.itemsize
        + shard * (master + recipe.num_moments * recipe.moments.itemsize)
    )


def step_counter_nbytes(spec: RunSpec) -> int:
    """Bytes of the optimizer's step counters, named apart: no published formula counts them."""
    if not spec.optimizer.counts_steps:
        return 0
    num_slices = sum(count * len(update_numels(buffer, spec)) for buffer, count in alike_buffers(spec))
    return STEP_COUNTER_NBYTES_PER_SLICE * num_slices


@dataclass(frozen=True, slots=True)
class Window:
    """A moment of the step and the bytes of model states the device holds beyond what is held throughout, by term."""

    phase: str
    unit: str
    unsharded_param: int = 0
    unsharded_grad: int = 0
    sharded_grad: int = 0
    temporary: int = 0

    @property
    def nbytes(self) -> int:
        return self.unsharded_param + self.unsharded_grad + self.sharded_grad + self.temporary


def held_throughout(spec: RunSpec) -> dict[Category, int]:
    """What the device holds at every moment of the step: the rest, without a gradient that the step drops."""
    dropped = rest_places(spec).grad if spec.drops_grad else None
    return {
        category: nbytes
        for category, nbytes in rest_by_category(spec).items()
        if category.on_device and category is not dropped
    }


def windows(spec: RunSpec) -> tuple[Window, ...]:
    """The step's windows: at rest, every computation and reduction with the units that are gathered and whose gradients
    are there, then every update."""
    units = plan_for(spec).units
    param, grad = spec.recipe.param.itemsize, spec.recipe.grad.itemsize
    shards, drops = spec.strategy.shards_grad, spec.drops_grad
    gathered: set[int] = set()
    whole: set[int] = set()
    reduced: set[int] = set()
    last = last_wait(spec.strategy)

    def window(phase: str, unit: str, temporary: int = 0) -> Window:
        return Window(
            phase,
            unit,
            unsharded_param=param * _numel(spec, units, gathered),
            unsharded_grad=grad * _numel(spec, units, whole),
            sharded_grad=grad * sum(shard_numel(units[index], spec) for index in reduced),
            temporary=temporary,
        )

    everywhere = set(range(len(units))) if drops else set()
    whole, reduced = (set(), everywhere) if shards else (everywhere, set())
    found = {window("at rest", ""): None}
    whole, reduced = set(), set()
    for op in schedule(spec):
        name = "" if op.unit is None else units[op.unit].name
        match op.kind:
            case OpKind.UNSHARD:
                gathered.add(_index(op))
            case OpKind.RESHARD:
                gathered.discard(_index(op))
            case OpKind.REDUCE_GRAD if shards:
                reduced |= {_index(op)} if drops else set()
                found[window(op.phase.value, name)] = None
            case OpKind.WAIT_REDUCE | OpKind.WAIT_REPLICAS if shards and op.kind is last:
                whole.discard(_index(op))
            case OpKind.FORWARD | OpKind.RECOMPUTE | OpKind.BACKWARD:
                if op.kind is OpKind.BACKWARD and not spec.strategy.has_whole_buffer:
                    whole.add(_index(op))
                found[window(op.phase.value, name)] = None
            case OpKind.OPTIMIZER_STEP:
                updated = buffers_for(spec) if op.unit is None else (units[op.unit],)
                found[window(op.phase.value, name, _update_nbytes(spec, updated))] = None
    return tuple(found)


def largest_window(spec: RunSpec) -> Window:
    """Where the peak of the model states stands: `held_throughout` plus this."""
    return max(windows(spec), key=lambda window: window.nbytes)


def _update_nbytes(spec: RunSpec, units: tuple[Unit, ...]) -> int:
    recipe = spec.recipe
    width = spec.optimizer.num_temporaries * recipe.moments.itemsize
    cast = recipe.update.itemsize if recipe.casts_grad else 0
    return sum(slice_numel(unit, spec) for unit in units) * (width + cast)


def _index(op: Op) -> int:
    assert op.unit is not None
    return op.unit


def _numel(spec: RunSpec, units: tuple[Unit, ...], chosen: set[int]) -> int:
    return sum(buffer_numel(units[index], spec) for index in chosen)
