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

At the peak, rest plus the largest window of the step. With u the unit in use, of P_u parameters, s_u of them owned:

    backward of u      p P_u + g P_u (ZeRO-3, HYBRID_SHARD)    g P_u (ZeRO-2)    nothing more (DDP, ZeRO-1, Megatron)
    update of u        t m s_u for the optimizer's t temporaries (AdamW's plain loop 2, foreach 1, fused 0), m the
                       moments' width; + s_u at the width of the update to cast another gradient

A unit that embraces others (a tied root) stays gathered around them; prefetch adds the next units' p P, an
asynchronous reduction the g P of the unit before. SHARD_GRAD_OP keeps p P of all units from the end of forward. Foreach
updates all units together, so its s_u is the sum, and Megatron's one buffer is all units as well. Whole gradients held
over micro-batches (no_sync) are g P of all. Clipping borrows a few numbers.
Activations come on top: `zeroviz.activations` has those, and
`zeroviz.predict` walks both together.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroviz.partition import Unit, buffer_numel, buffers_for, plan_for, shard_numel, shard_padding_numel
from zeroviz.schedule import Op, OpKind, Phase, last_wait, schedule
from zeroviz.spec import Offload, Recipe, RunSpec, Strategy
from zeroviz.trace import Category

# torch.optim keeps one fp32 scalar step counter for every tensor it updates; ours is one tensor a unit, or a buffer.
STEP_COUNTER_NBYTES_PER_UNIT = 4


def rest_by_category(spec: RunSpec) -> dict[Category, int]:
    """Bytes every rank holds between steps, padding included; the same on each rank. What is offloaded is HOST_..."""
    buffers = buffers_for(spec)
    whole = sum(buffer_numel(buffer, spec) for buffer in buffers)
    shard = sum(shard_numel(buffer, spec) for buffer in buffers)
    place = rest_places(spec)
    recipe, strategy = spec.recipe, spec.strategy
    rest = {
        place.param: (shard if strategy.shards_param else whole) * recipe.param.itemsize,
        place.grad: (shard if strategy.shards_grad else whole) * recipe.grad.itemsize,
        place.moments: sum(recipe.moments_nbytes(shard_numel(buffer, spec)) for buffer in buffers),
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
    for buffer in buffers_for(spec):
        whole += buffer_numel(buffer, spec) - buffer.numel
        shard += shard_padding_numel(buffer, spec, rank)
    master = recipe.update.itemsize if rest_places(spec).master else 0
    return (
        (shard if strategy.shards_param else whole) * recipe.param.itemsize
        + (shard if strategy.shards_grad else whole) * recipe.grad.itemsize
        + shard * (master + recipe.num_moments * recipe.moments.itemsize)
    )


def step_counter_nbytes(spec: RunSpec) -> int:
    """Bytes of the optimizer's step counters, named apart: no published formula counts them."""
    return STEP_COUNTER_NBYTES_PER_UNIT * len(buffers_for(spec)) if spec.optimizer.counts_steps else 0


@dataclass(frozen=True, slots=True)
class Window:
    """A moment of the step and the bytes of model states the device holds beyond rest, by term."""

    phase: str
    unit: str
    unsharded_param: int = 0
    unsharded_grad: int = 0
    temporary: int = 0

    @property
    def nbytes(self) -> int:
        return self.unsharded_param + self.unsharded_grad + self.temporary


def windows(spec: RunSpec) -> tuple[Window, ...]:
    """The step's windows: every computation with the units that are gathered and being reduced, then every update."""
    units = plan_for(spec).units
    param, grad = spec.recipe.param.itemsize, spec.recipe.grad.itemsize
    found: dict[Window, None] = {}
    gathered: set[int] = set()
    reducing: set[int] = set()
    last = last_wait(spec.strategy)
    for op in schedule(spec):
        match op.kind:
            case OpKind.UNSHARD:
                gathered.add(_index(op))
            case OpKind.RESHARD:
                gathered.discard(_index(op))
            case OpKind.PREPARE_GRAD if spec.strategy.shards_grad:
                reducing.add(_index(op))
            case OpKind.WAIT_REDUCE | OpKind.WAIT_REPLICAS if op.kind is last and op.unit is not None:
                reducing.discard(op.unit)
            case OpKind.FORWARD | OpKind.RECOMPUTE | OpKind.BACKWARD:
                window = Window(
                    phase=op.phase.value,
                    unit=units[_index(op)].name,
                    unsharded_param=param * _numel(spec, units, gathered),
                    unsharded_grad=grad * _numel(spec, units, reducing),
                )
                found[window] = None
            case OpKind.OPTIMIZER_STEP:
                found[_update_window(spec, buffers_for(spec) if op.unit is None else (units[op.unit],))] = None
    return tuple(found)


def largest_window(spec: RunSpec) -> Window:
    """Where the peak of the model states stands: `rest_by_category` plus this."""
    return max(windows(spec), key=lambda window: window.nbytes)


def _update_window(spec: RunSpec, units: tuple[Unit, ...]) -> Window:
    recipe = spec.recipe
    width = spec.optimizer.num_temporaries * recipe.moments.itemsize
    cast = recipe.update.itemsize if recipe.casts_grad else 0
    name = units[0].name if len(units) == 1 else ""
    numel = sum(shard_numel(unit, spec) for unit in units)
    return Window(phase=Phase.OPTIMIZER.value, unit=name, temporary=numel * (width + cast))


def _index(op: Op) -> int:
    assert op.unit is not None
    return op.unit


def _numel(spec: RunSpec, units: tuple[Unit, ...], chosen: set[int]) -> int:
    return sum(buffer_numel(units[index], spec) for index in chosen)
