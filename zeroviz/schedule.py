"""RunSpec -> tuple[Op, ...]: one training step, planned once and walked twice.

`zeroviz.predict` walks the list with numbers and `cluster.own` walks the same list with tensors, so the two can differ
in bytes but never in order. Nothing here computes a size.

[Note: spans] A unit is in use from its first segment to its last, once in forward and once in backward. ZeRO-3 gathers
it for each of the two spans and frees it after each: two gathers and one reduce-scatter, 3P on the wire. A block's
span is one segment. The root unit of a tied model holds embedding and head, so its span is the whole pass: tying
saves parameters and costs gathered bytes. A checkpointed region of several units is first recomputed as a whole: a
unit of it is gathered for that, freed, and gathered once more for its backward, unless its backward follows at once.

[Note: overlap] Communication is two ops, start and wait. With `prefetch` 0 and `async_reduce` off the wait follows the
start at once. Otherwise compute ops stand between them; the bytes they hold meanwhile are the price of overlap.

[Note: two groups] HYBRID_SHARD is ZeRO-3 within a shard group, and one op more: when a unit's gradient has been
reduce-scattered in the group, the shard that is left of it, 1/G, is all-reduced among the ranks that hold the same
shard. That follows the first reduction's wait at once, with or without `async_reduce`.

[Note: gradients] A gradient is there from its unit's first backward to the beginning of the next step, as under
`zero_grad(set_to_none=True)` called first: it is held at rest, so that it counts in "16 bytes a parameter", and is
gone while forward fills the memory with activations.

[Note: one buffer] Megatron's optimizer keeps parameters and gradients in one buffer over the whole model. Its ops name
no unit: the buffer is zeroed before the first backward, reduced after the last, updated and gathered as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from zeroviz.members import Members
from zeroviz.models import ModelShape
from zeroviz.partition import Plan, plan_for
from zeroviz.spec import Checkpointing, Offload, Optimizer, RunSpec, Strategy, UnitPolicy


class Phase(Members):
    """The part of the step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"

    def __init__(self, label: str) -> None:
        self.label = label
        """As `value`, which is a call into Python: walks ask thousands of times."""


class OpKind(Members):
    """One action of a rank. `u` is the op's unit, `s` its segment."""

    DROP_GRAD = "drop grad"
    """Free the gradients of the step before, of all units. See [Note: gradients]."""
    LOAD_BATCH = "load batch"
    """Take this rank's tokens and targets."""
    UNSHARD = "unshard"
    """Allocate u's full parameters and start the all-gather that fills them."""
    WAIT_UNSHARD = "wait unshard"
    """Wait until u's full parameters are there."""
    FORWARD = "forward"
    """Run s on its detached input; keep the pair (input, output edge) for backward."""
    RECOMPUTE = "recompute"
    """Checkpointing: run s once more, now keeping what backward needs; in forward only its region's input was kept."""
    RESHARD = "reshard"
    """Free u's full parameters; only the shard stays."""
    ZERO_GRAD = "zero grad"
    """Zero the whole gradient buffer, where it stays from step to step (Megatron)."""
    BACKWARD = "backward"
    """Run backward of s from its stored pair; gradients add up in u's full gradient buffer, which is allocated and
    zeroed when the first of them comes."""
    REDUCE_GRAD = "reduce grad"
    """Start the reduction of u's gradient: all-reduce, or reduce-scatter to the owners; strategies that shard gradients
    allocate the shard here, in the first micro-batch."""
    WAIT_REDUCE = "wait reduce"
    """Wait for it, divide by N, and (where gradients are sharded) free the full gradient buffer; HYBRID_SHARD only
    waits."""
    REDUCE_REPLICAS = "reduce replicas"
    """Start the all-reduce of u's gradient shard across the shard groups."""
    WAIT_REPLICAS = "wait replicas"
    """Wait for it, divide by N and free the full gradient buffer."""
    DROP_BATCH = "drop batch"
    """Free tokens and targets."""
    CLIP_GRAD = "clip grad"
    """Find the norm of the mean gradient over all parameters, across shards, and scale every owned gradient by it."""
    OPTIMIZER_STEP = "optimizer step"
    """Update the owned part of u slice by slice (of every unit at once, where the optimizer steps all together); with a
    master copy, cast it back into the parameters."""
    HOST_STEP = "optimizer step on host"
    """The same where the states are offloaded: the gradient goes down, the updated parameters come up."""
    SYNC_PARAM = "sync param"
    """Start the all-gather that brings every rank the updated shards of u (ZeRO-1, ZeRO-2)."""
    WAIT_SYNC = "wait sync"
    """Wait for it."""

    def __init__(self, label: str) -> None:
        self.label = label


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the schedule; `unit` and `segment` index the plan. Without a unit it is of all of them."""

    kind: OpKind
    phase: Phase
    unit: int | None = None
    segment: int | None = None


class Order(NamedTuple):
    """What fixes the ops of a step: everything but its sizes, its dtypes and what a collective is called."""

    model: ModelShape
    unit: UnitPolicy
    strategy: Strategy
    prefetch: int
    async_reduce: bool
    optimizer: Optimizer
    checkpointing: Checkpointing
    offload: Offload
    accumulation: int
    no_sync: bool | None
    clips: bool

    @classmethod
    def of(cls, spec: RunSpec) -> Order:
        return cls(
            spec.model,
            spec.unit,
            spec.strategy,
            spec.prefetch,
            spec.async_reduce,
            spec.optimizer,
            spec.checkpointing,
            spec.offload,
            spec.accumulation,
            spec.no_sync,
            spec.clip_norm is not None,
        )

    @property
    def spec(self) -> RunSpec:
        """A spec of this order."""
        fields = self._asdict()
        clips = fields.pop("clips")
        shard_ranks = 1 if self.strategy.replicates else None
        return RunSpec(**fields, shard_ranks=shard_ranks, clip_norm=1.0 if clips else None, batch=1, seq=1)


@dataclass(frozen=True, slots=True)
class Use:
    """One computation of a pass."""

    kind: OpKind
    segment: int
    unit: int


@dataclass(slots=True)
class Span:
    """A stretch of a pass, positions start to stop, both inside, in which a unit's full parameters are needed."""

    unit: int
    start: int
    stop: int


def last_wait(strategy: Strategy) -> OpKind:
    """The op after which a unit's gradient is reduced. See [Note: two groups]."""
    return OpKind.WAIT_REPLICAS if strategy.replicates else OpKind.WAIT_REDUCE


def schedule(spec: RunSpec) -> tuple[Op, ...]:
    """The ops of one step of `spec`, in program order."""
    return _schedule(Order.of(spec))


@lru_cache(maxsize=256)
def _schedule(order: Order) -> tuple[Op, ...]:
    spec = order.spec
    plan = plan_for(spec)
    ops = [Op(OpKind.DROP_GRAD, Phase.FORWARD)] if spec.drops_grad else []
    for micro_batch in range(spec.accumulation):
        is_first, is_last = micro_batch == 0, micro_batch == spec.accumulation - 1
        is_whole = spec.strategy.has_whole_buffer
        ops.append(Op(OpKind.LOAD_BATCH, Phase.FORWARD))
        ops += _Pass(spec, Phase.FORWARD, _forward_uses(plan)).ops()
        if is_whole and is_first:
            ops.append(Op(OpKind.ZERO_GRAD, Phase.BACKWARD))
        reduces_grad = not is_whole and (is_last or spec.reduces_each)
        ops += _Pass(spec, Phase.BACKWARD, _backward_uses(plan), reduces_grad=reduces_grad).ops()
        if is_whole and is_last:
            ops += [Op(OpKind.REDUCE_GRAD, Phase.BACKWARD), Op(OpKind.WAIT_REDUCE, Phase.BACKWARD)]
        ops.append(Op(OpKind.DROP_BATCH, Phase.BACKWARD))
    ops += _optimizer_pass(spec, plan)
    return tuple(ops)


def _forward_uses(plan: Plan) -> list[Use]:
    return [Use(OpKind.FORWARD, segment.index, segment.unit) for segment in plan.segments]


def _backward_uses(plan: Plan) -> list[Use]:
    """The last segment first; a checkpointed region is recomputed as a whole, in forward order, just before."""
    uses: list[Use] = []
    position = len(plan.segments)
    while position:
        region = plan.segments[position - 1].region
        first = position - 1
        while region is not None and first and plan.segments[first - 1].region == region:
            first -= 1
        together = plan.segments[first:position]
        if region is not None:
            uses += [Use(OpKind.RECOMPUTE, segment.index, segment.unit) for segment in together]
        uses += [Use(OpKind.BACKWARD, segment.index, segment.unit) for segment in reversed(together)]
        position = first
    return uses


class _Pass:
    """Forward or backward: each use in turn, with its unit gathered, freed and reduced around its spans."""

    def __init__(self, spec: RunSpec, phase: Phase, uses: list[Use], *, reduces_grad: bool = False) -> None:
        self.spec, self.phase, self.uses, self.reduces_grad = spec, phase, uses, reduces_grad
        self.spans = _spans(uses)
        self.num_gathered = 0  # spans whose gather has been started
        self.gathered: set[int] = set()
        self.reducing: list[int] = []  # units whose reduction is under way
        self._ops: list[Op] = []

    def ops(self) -> list[Op]:
        strategy, uses = self.spec.strategy, self.uses
        is_backward = self.phase is Phase.BACKWARD
        gathers = strategy.shards_param and (strategy.reshards_after_forward or not is_backward)
        last_grad = {use.unit: position for position, use in enumerate(uses) if use.kind is OpKind.BACKWARD}
        start_of = {span.start: index for index, span in enumerate(self.spans)}
        # What a gather's span begins, the span's end frees; SHARD_GRAD_OP frees once, after a unit's last use of all.
        stops = {span.stop for span in self.spans} if strategy.reshards_after_forward else set(last_grad.values())
        for position, use in enumerate(uses):
            if gathers and position in start_of:
                self._gather(start_of[position])
            self._add(use.kind, use.unit, use.segment)
            if strategy.shards_param and position in stops:
                self.gathered.discard(use.unit)
                self._add(OpKind.RESHARD, use.unit)
            if self.reduces_grad and last_grad.get(use.unit) == position:
                self._reduce(use.unit)
        self._finish_reductions()
        return self._ops

    def _add(self, kind: OpKind, unit: int, segment: int | None = None) -> None:
        self._ops.append(Op(kind, self.phase, unit, segment))

    def _gather(self, due: int) -> None:
        """Gather what is due, and up to `prefetch` spans ahead. A unit is not gathered again before it was freed."""
        while self.num_gathered <= due:
            self._unshard_next()
        self._add(OpKind.WAIT_UNSHARD, self.spans[due].unit)
        upto = min(len(self.spans), due + 1 + self.spec.prefetch)
        while self.num_gathered < upto and self.spans[self.num_gathered].unit not in self.gathered:
            self._unshard_next()

    def _unshard_next(self) -> None:
        unit = self.spans[self.num_gathered].unit
        self.num_gathered += 1
        self.gathered.add(unit)
        self._add(OpKind.UNSHARD, unit)

    def _reduce(self, unit: int) -> None:
        """At most one reduction is in flight, so at most two units' full gradients are alive. DDP's may all be: its
        gradients are whole before and after, and an all-reduce is made in place."""
        if self.spec.strategy is not Strategy.DDP:
            self._finish_reductions()
        self._add(OpKind.REDUCE_GRAD, unit)
        self.reducing.append(unit)
        if not self.spec.async_reduce:
            self._finish_reductions()

    def _finish_reductions(self) -> None:
        for unit in self.reducing:
            self._add(OpKind.WAIT_REDUCE, unit)
            if self.spec.strategy.replicates:
                self._add(OpKind.REDUCE_REPLICAS, unit)
                self._add(OpKind.WAIT_REPLICAS, unit)
        self.reducing.clear()


def _spans(uses: list[Use]) -> list[Span]:
    """See [Note: spans], in order of their starts."""
    spans: list[Span] = []
    current: dict[int, Span] = {}
    for position, use in enumerate(uses):
        span = current.get(use.unit)
        recomputed_only = (
            span is not None
            and span.stop < position - 1
            and uses[span.stop].kind is OpKind.RECOMPUTE
            and use.kind is OpKind.BACKWARD
        )
        if span is None or recomputed_only:
            current[use.unit] = Span(use.unit, position, position)
            spans.append(current[use.unit])
        else:
            span.stop = position
    return spans


def _optimizer_pass(spec: RunSpec, plan: Plan) -> list[Op]:
    """Unit by unit, each slice by slice, so that temporaries are one slice's; then the updated parameters travel, where
    they are whole on every rank and updated in shards. Gradients are clipped before, for their norm is that of all.
    With `async_reduce` a unit's parameters travel while the next unit is updated, one unit's at a time."""
    ops: list[Op] = []
    step = OpKind.HOST_STEP if spec.offload.moves_optimizer else OpKind.OPTIMIZER_STEP
    together = spec.optimizer.steps_together
    if spec.clip_norm is not None:
        ops.append(Op(OpKind.CLIP_GRAD, Phase.OPTIMIZER))
    if together:
        ops.append(Op(step, Phase.OPTIMIZER))
    syncing: list[Op] = []  # the wait that is due
    for unit in (None,) if spec.strategy.has_whole_buffer else range(len(plan.units)):
        if not together:
            ops.append(Op(step, Phase.OPTIMIZER, unit))
        if spec.strategy.syncs_param:
            ops += syncing
            ops.append(Op(OpKind.SYNC_PARAM, Phase.OPTIMIZER, unit))
            syncing = [Op(OpKind.WAIT_SYNC, Phase.OPTIMIZER, unit)]
            if not spec.async_reduce:
                ops += syncing
                syncing = []
    return ops + syncing
