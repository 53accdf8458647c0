"""RunSpec -> tuple[Op, ...]: one training step, planned once and walked twice.

`zeroviz.predict` walks the list with numbers and `cluster.own` walks the same list with tensors, so the two can differ
in bytes but never in order. Nothing here computes a size.

[Note: spans] A unit is in use from its first segment to its last, once in forward and once in backward. ZeRO-3 gathers
it for each of the two spans and frees it after each: two gathers and one reduce-scatter, 3P on the wire. A block's
span is one segment. The root unit of a tied model holds embedding and head, so its span is the whole pass: tying
saves parameters and costs gathered bytes.

[Note: overlap] Communication is two ops, start and wait. With `prefetch` 0 and `async_reduce` off the wait follows the
start at once. Otherwise compute ops stand between them; the bytes they hold meanwhile are the price of overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from zeroviz.partition import Plan, plan_for
from zeroviz.spec import RunSpec, Strategy


class Phase(Enum):
    """The part of the step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class OpKind(Enum):
    """One action of a rank. `u` is the op's unit, `s` its segment."""

    LOAD_BATCH = "load batch"
    """Take this rank's tokens and targets."""
    UNSHARD = "unshard"
    """Allocate u's full parameters and start the all-gather that fills them."""
    WAIT_UNSHARD = "wait unshard"
    """Wait until u's full parameters are there."""
    FORWARD = "forward"
    """Run s on its detached input; keep the pair (input, output edge) for backward."""
    RESHARD = "reshard"
    """Free u's full parameters; only the shard stays."""
    PREPARE_GRAD = "prepare grad"
    """Zero u's full gradient buffer; ZeRO-2 and ZeRO-3 allocate it here."""
    BACKWARD = "backward"
    """Run backward of s from its stored pair; gradients add up in u's full gradient buffer."""
    REDUCE_GRAD = "reduce grad"
    """Start the reduction of u's gradient: all-reduce, or reduce-scatter to the owners."""
    WAIT_REDUCE = "wait reduce"
    """Wait for it, divide by N, and (ZeRO-2, ZeRO-3) free the full gradient buffer."""
    DROP_BATCH = "drop batch"
    """Free tokens and targets."""
    OPTIMIZER_STEP = "optimizer step"
    """Update the owned part of u; with a master copy, cast it back into the parameters."""
    SYNC_PARAM = "sync param"
    """Start the all-gather that brings every rank the updated shards of u (ZeRO-1, ZeRO-2)."""
    WAIT_SYNC = "wait sync"
    """Wait for it."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the schedule; `unit` and `segment` index the plan."""

    kind: OpKind
    phase: Phase
    unit: int | None = None
    segment: int | None = None


@lru_cache(maxsize=256)
def schedule(spec: RunSpec) -> tuple[Op, ...]:
    """The ops of one step of `spec`, in program order."""
    plan = plan_for(spec)
    forward_order = [segment.index for segment in plan.segments]
    ops = [Op(OpKind.LOAD_BATCH, Phase.FORWARD)]
    ops += _compute_pass(spec, plan, Phase.FORWARD, forward_order)
    ops += _compute_pass(spec, plan, Phase.BACKWARD, forward_order[::-1])
    ops.append(Op(OpKind.DROP_BATCH, Phase.BACKWARD))
    ops += _optimizer_pass(spec, plan)
    return tuple(ops)


def _compute_pass(spec: RunSpec, plan: Plan, phase: Phase, order: list[int]) -> list[Op]:
    """Forward or backward: each segment in turn, with its unit gathered, reduced and freed around its span."""
    ops: list[Op] = []
    unit_at = [plan.segments[index].unit for index in order]
    first_use = {unit: unit_at.index(unit) for unit in unit_at}
    last_use = {unit: position for position, unit in enumerate(unit_at)}
    gather_order = list(first_use)  # insertion order: order of first use
    num_started = 0
    reducing: int | None = None

    for position, segment in enumerate(order):
        unit = unit_at[position]
        if spec.strategy.shards_param and first_use[unit] == position:
            due = gather_order.index(unit)
            for ahead in gather_order[num_started : due + 1]:
                ops.append(Op(OpKind.UNSHARD, phase, ahead))
            ops.append(Op(OpKind.WAIT_UNSHARD, phase, unit))
            num_started = max(num_started, due + 1)
            for ahead in gather_order[num_started : due + 1 + spec.prefetch]:
                ops.append(Op(OpKind.UNSHARD, phase, ahead))
            num_started = max(num_started, min(len(gather_order), due + 1 + spec.prefetch))
        if phase is Phase.BACKWARD and first_use[unit] == position:
            ops.append(Op(OpKind.PREPARE_GRAD, phase, unit))
        ops.append(Op(OpKind.FORWARD if phase is Phase.FORWARD else OpKind.BACKWARD, phase, unit, segment))
        if last_use[unit] != position:
            continue
        if spec.strategy.shards_param:
            ops.append(Op(OpKind.RESHARD, phase, unit))
        if phase is Phase.BACKWARD:
            # At most one reduction is in flight, so at most two units' full gradients are alive.
            if reducing is not None:
                ops.append(Op(OpKind.WAIT_REDUCE, phase, reducing))
            ops.append(Op(OpKind.REDUCE_GRAD, phase, unit))
            reducing = unit
            if not spec.async_reduce:
                ops.append(Op(OpKind.WAIT_REDUCE, phase, unit))
                reducing = None
    if reducing is not None:
        ops.append(Op(OpKind.WAIT_REDUCE, phase, reducing))
    return ops


def _optimizer_pass(spec: RunSpec, plan: Plan) -> list[Op]:
    """Unit by unit, so that temporaries are one unit's; then the updated parameters travel (ZeRO-1, ZeRO-2)."""
    ops: list[Op] = []
    syncs = spec.strategy in (Strategy.ZERO1, Strategy.ZERO2)
    for unit in plan.units:
        ops.append(Op(OpKind.OPTIMIZER_STEP, Phase.OPTIMIZER, unit.index))
        if syncs:
            ops.append(Op(OpKind.SYNC_PARAM, Phase.OPTIMIZER, unit.index))
            ops.append(Op(OpKind.WAIT_SYNC, Phase.OPTIMIZER, unit.index))
    return ops
