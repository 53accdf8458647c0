"""What a step of our own code sends: its collectives between ranks, and its copies between a device and its host."""

from __future__ import annotations

from collections.abc import Iterator

from zeroviz.collectives import CollectiveOp, Group
from zeroviz.link import Direction, Transfer
from zeroviz.partition import Unit, buffer_numel, buffers_for, shard_numel
from zeroviz.schedule import Op, OpKind, last_wait, schedule
from zeroviz.spec import DType, RunSpec, Strategy, Zero1Form
from zeroviz.wire import Collective


def gradient_op(spec: RunSpec) -> CollectiveOp:
    """The collective that reduces a unit's gradient."""
    naive = spec.strategy is Strategy.ZERO1 and spec.zero1_form is Zero1Form.ALL_REDUCE
    return CollectiveOp.ALL_REDUCE if naive or spec.strategy is Strategy.DDP else CollectiveOp.REDUCE_SCATTER


def collectives_of(spec: RunSpec) -> tuple[Collective, ...]:
    """The collectives of one step, the same for every rank. A group of one rank sends nothing."""
    recipe, buffers = spec.recipe, buffers_for(spec)
    within = Group.SHARD if spec.strategy.replicates else Group.ALL
    # Of each kind of op: what it calls, in which dtype, and among whom.
    calls = {
        OpKind.UNSHARD: (CollectiveOp.ALL_GATHER, recipe.param, within),
        OpKind.REDUCE_GRAD: (gradient_op(spec), recipe.grad, within),
        OpKind.REDUCE_REPLICAS: (CollectiveOp.ALL_REDUCE, recipe.grad, Group.REPLICA),
        OpKind.SYNC_PARAM: (CollectiveOp.ALL_GATHER, recipe.param, within),
    }
    if spec.strategy.shards_optimizer:  # the norm of what a rank owns, of all that own other parts
        calls[OpKind.CLIP_GRAD] = (CollectiveOp.ALL_REDUCE, DType.FP32, within)
    num_in = {Group.ALL: spec.ranks, Group.SHARD: spec.num_shards, Group.REPLICA: spec.num_replicas}
    wholes = [buffer_numel(buffer, spec) for buffer in buffers]
    shards = [shard_numel(buffer, spec) for buffer in buffers] if spec.strategy.replicates else []
    calls = {kind: call for kind, call in calls.items() if num_in[call[2]] > 1}
    found: list[Collective] = []
    for op in schedule(spec):
        if op.kind in calls:
            what, dtype, group = calls[op.kind]
            index = op.unit or 0
            numel = 1 if op.kind is OpKind.CLIP_GRAD else (shards if group is Group.REPLICA else wholes)[index]
            name = "" if op.unit is None else buffers[index].name
            nbytes = numel * dtype.itemsize
            found.append(Collective(what, dtype.value, num_in[group], nbytes, op.phase.label, name, group))
    return tuple(found)


def transfers_of(spec: RunSpec) -> tuple[Transfer, ...]:
    """The copies between device and host of one step, the same for every rank; none without offloading."""
    return tuple(_transfers(spec)) if spec.offload.moves_optimizer else ()


def _transfers(spec: RunSpec) -> Iterator[Transfer]:
    recipe, buffers = spec.recipe, buffers_for(spec)
    brings_down = last_wait(spec.strategy)

    def copy(direction: Direction, dtype: DType, op: Op, unit: Unit) -> Transfer:
        nbytes = shard_numel(unit, spec) * dtype.itemsize
        return Transfer(direction, dtype.value, nbytes, op.phase.label, unit.name)

    for op in schedule(spec):
        units = buffers if op.unit is None else (buffers[op.unit],)
        if spec.offload.moves_params:
            if op.kind is OpKind.UNSHARD:  # the shard goes up into its slice of the full buffer
                yield copy(Direction.TO_DEVICE, recipe.param, op, units[0])
            elif op.kind is brings_down:  # the reduced slice goes into the host's shard
                yield copy(Direction.TO_HOST, recipe.grad, op, units[0])
        elif op.kind is OpKind.HOST_STEP:
            yield from (copy(Direction.TO_HOST, recipe.grad, op, unit) for unit in units)
            yield from (copy(Direction.TO_DEVICE, recipe.param, op, unit) for unit in units)
