"""walk(schedule) -> Trace: the step as arithmetic, without a tensor.

The walk visits the ops that `cluster.own` executes, in the same order, and books what each allocates and frees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain

from zeroviz import activations, artefacts
from zeroviz.activations import NBYTES_PER_TOKEN_ID as NBYTES_PER_TOKEN_ID
from zeroviz.activations import input_nbytes as input_nbytes
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.ledger import Ledger
from zeroviz.link import Direction, Transfer
from zeroviz.memory import rest_by_category, rest_padding_nbytes, rest_places, step_counter_nbytes
from zeroviz.models import Family
from zeroviz.partition import (
    Plan,
    Unit,
    alike_stretches,
    buffer_numel,
    buffers_for,
    plan_for,
    shard_numel,
    update_numels,
)
from zeroviz.rank_trace import AlikeRanks
from zeroviz.schedule import Op, OpKind, last_wait, schedule
from zeroviz.spec import DType, Implementation, RunSpec, Strategy, Zero1Form
from zeroviz.tape import Sizes
from zeroviz.trace import Category, Collective, Origin, RankTrace, Trace
from zeroviz.witness.registry import PREDICTED

# Ops that neither allocate nor free.
_NOTHING = frozenset({OpKind.WAIT_UNSHARD, OpKind.WAIT_SYNC, OpKind.ZERO_GRAD})

BARE_NOTE = (
    "A bare parameter count says nothing of layers, so the peak counts parameters, gradients and optimizer only; "
    "name a model to see activations."
)


@lru_cache(maxsize=512)
def predict(spec: RunSpec) -> Trace:
    """The predicted trace of one step: every rank's rest, events and collectives.

    Our own ranks differ in padding only, so they share one list of events.
    """
    notes = (BARE_NOTE,) if spec.model.family is Family.BARE else activations.formula_notes(spec.model)
    if spec.impl is not Implementation.OWN:
        return Trace(Origin.PREDICTED, spec, PREDICTED[spec.impl](spec), notes=notes)
    walk = _Walk(spec, plan_for(spec))
    for op in schedule(spec):
        walk.visit(op)
    events, collectives, transfers = walk.ledger.events, tuple(walk.collectives), tuple(walk.transfers)
    rest = rest_by_category(spec)
    first = RankTrace(
        rank=0,
        rest=rest,
        events=events,
        collectives=collectives,
        transfers=transfers,
        step_counter_nbytes=step_counter_nbytes(spec),
    )
    ranks = AlikeRanks(
        [
            (stretch, replace(first, rank=stretch.start, padding_nbytes=rest_padding_nbytes(spec, stretch.start)))
            for stretch in alike_stretches(spec)
        ]
    )
    return Trace(Origin.PREDICTED, spec, ranks, notes=notes)


def gradient_op(spec: RunSpec) -> CollectiveOp:
    """The collective that reduces a unit's gradient."""
    naive = spec.strategy is Strategy.ZERO1 and spec.zero1_form is Zero1Form.ALL_REDUCE
    return CollectiveOp.ALL_REDUCE if naive or spec.strategy is Strategy.DDP else CollectiveOp.REDUCE_SCATTER


class _Walk:
    """The state of one walk: the ledger, the collectives and the transfers so far.

    buffers: the units, or the one buffer over all of them, which is what ops without a unit work on. numels: elements
    of each whole buffer and of its shard. slices: of each shard's, updated at a time. summed: units whose gradient
    shard holds an earlier micro-batch's already.
    """

    def __init__(self, spec: RunSpec, plan: Plan) -> None:
        self.spec, self.plan = spec, plan
        self.sizes = Sizes.of(spec)
        self.buffers = buffers_for(spec)
        self.numels = [(buffer_numel(buffer, spec), shard_numel(buffer, spec)) for buffer in self.buffers]
        self.slices = [update_numels(buffer, spec) for buffer in self.buffers]
        self.within = Group.SHARD if spec.strategy.replicates else Group.ALL
        self.num_in = {Group.ALL: spec.ranks, Group.SHARD: spec.num_shards, Group.REPLICA: spec.num_replicas}
        self.ledger = Ledger()
        self.collectives: list[Collective] = []
        self.transfers: list[Transfer] = []
        self.summed: set[int] = set()
        self.drops_grad, self.shards_grad = spec.drops_grad, spec.strategy.shards_grad
        self.moves_params = spec.offload.moves_params
        self.gradient_op, self.divisor = gradient_op(spec), artefacts.number(spec.recipe.grad.itemsize)
        self.compute = {
            OpKind.FORWARD: activations.forward,
            OpKind.RECOMPUTE: activations.recompute,
        }
        self.visits: dict[OpKind, Callable[[Op, Unit], None]] = {
            OpKind.UNSHARD: self._unshard,
            OpKind.RESHARD: self._reshard,
            OpKind.BACKWARD: self._backward,
            OpKind.REDUCE_GRAD: self._reduce_grad,
            OpKind.WAIT_REDUCE: self._wait_reduce,
            OpKind.REDUCE_REPLICAS: self._reduce_replicas,
            OpKind.WAIT_REPLICAS: self._finish_reduction,
            OpKind.SYNC_PARAM: self._sync_param,
        }

    def visit(self, op: Op) -> None:
        kind, buffers = op.kind, self.buffers
        unit = None if op.unit is None else self.plan.units[op.unit]
        self.ledger.at(op.phase.label, kind.label, unit.name if unit else "")
        if (compute := self.compute.get(kind)) is not None:
            assert op.segment is not None
            compute(self.ledger, self.sizes, self.plan.segments[op.segment])
        elif (visit := self.visits.get(kind)) is not None:
            visit(op, unit or buffers[0])
        elif kind is OpKind.DROP_GRAD:
            self._drop_grad()
        elif kind is OpKind.LOAD_BATCH:
            self.ledger.alloc("batch", input_nbytes(self.spec), Category.INPUT)
        elif kind is OpKind.DROP_BATCH:
            self.ledger.free("batch")
        elif kind is OpKind.CLIP_GRAD:
            self._clip(op)
        elif kind is OpKind.OPTIMIZER_STEP:
            self._update(buffers if unit is None else (unit,))
        elif kind is OpKind.HOST_STEP:
            self._update_on_host(op, buffers if unit is None else (unit,))
        else:
            assert kind in _NOTHING

    def _unshard(self, op: Op, unit: Unit) -> None:
        dtype, (numel, shard) = self.spec.recipe.param, self.numels[unit.index]
        self.ledger.alloc(("param", unit.index), numel * dtype.itemsize, Category.UNSHARDED_PARAM)
        if self.moves_params:  # the shard goes up into its slice of the full buffer
            self._transfer(Direction.TO_DEVICE, dtype, shard, op, unit)
        self._send(CollectiveOp.ALL_GATHER, dtype, numel, op, unit)

    def _reshard(self, op: Op, unit: Unit) -> None:
        self.ledger.free(("param", unit.index))

    def _drop_grad(self) -> None:
        category = rest_places(self.spec).grad
        width = self.spec.recipe.grad.itemsize
        self.ledger.replay((category, -numels[self.shards_grad] * width) for numels in self.numels)

    def _backward(self, op: Op, unit: Unit) -> None:
        assert op.segment is not None
        activations.backward(self.ledger, self.sizes, self.plan.segments[op.segment], partial(self._begin_grad, unit))

    def _begin_grad(self, unit: Unit) -> None:
        """A unit's first gradient needs the buffer, unless that one stays or is there from a micro-batch before."""
        if not self.spec.strategy.has_whole_buffer and not self.ledger.holds(("grad", unit.index)):
            nbytes = self.numels[unit.index][0] * self.spec.recipe.grad.itemsize
            self.ledger.alloc(("grad", unit.index), nbytes, Category.UNSHARDED_GRAD)

    def _reduce_grad(self, op: Op, unit: Unit) -> None:
        if self.drops_grad and self.shards_grad and unit.index not in self.summed:
            nbytes = self.numels[unit.index][1] * self.spec.recipe.grad.itemsize
            self.ledger.alloc(("grad shard", unit.index), nbytes, Category.SHARDED_GRAD)
            self.summed.add(unit.index)
        self._send(self.gradient_op, self.spec.recipe.grad, self.numels[unit.index][0], op, unit)

    def _wait_reduce(self, op: Op, unit: Unit) -> None:
        artefacts.end_copies(self.ledger, unit.index)
        if op.kind is last_wait(self.spec.strategy):
            self._finish_reduction(op, unit)

    def _reduce_replicas(self, op: Op, unit: Unit) -> None:
        shard = self.numels[unit.index][1]
        self._send(CollectiveOp.ALL_REDUCE, self.spec.recipe.grad, shard, op, unit, among=Group.REPLICA)

    def _finish_reduction(self, op: Op, unit: Unit) -> None:
        self.ledger.replay(self.divisor)  # divided by N
        if self.shards_grad:
            if self.moves_params:
                self._take_grad_down(op, unit)
            self.ledger.free(("grad", unit.index))

    def _sync_param(self, op: Op, unit: Unit) -> None:
        self._send(CollectiveOp.ALL_GATHER, self.spec.recipe.param, self.numels[unit.index][0], op, unit)

    def _take_grad_down(self, op: Op, unit: Unit) -> None:
        """The reduced slice goes into the host's shard; from the second micro-batch on it is a copy that is added."""
        ledger, recipe, shard = self.ledger, self.spec.recipe, shard_numel(unit, self.spec)
        self._transfer(Direction.TO_HOST, recipe.grad, shard, op, unit)
        if unit.index in self.summed:
            ledger.alloc("slice", shard * recipe.grad.itemsize, Category.HOST_TEMPORARY)
            ledger.free("slice")
        self.summed.add(unit.index)

    def _clip(self, op: Op) -> None:
        """The norm of what a rank owns, of all ranks that own other parts, and the scale."""
        grad = self.spec.recipe.grad
        before, after = artefacts.clip_of(tuple(shard for _, shard in self.numels), grad)
        self.ledger.replay(before)
        if self.spec.strategy.shards_optimizer:
            self._send(CollectiveOp.ALL_REDUCE, DType.FP32, 1, op)
        self.ledger.replay(after)

    def _update_on_host(self, op: Op, units: tuple[Unit, ...]) -> None:
        """Gradients down (unless they are there), the update among the host's copies, parameters up (likewise)."""
        ledger, recipe = self.ledger, self.spec.recipe
        if self.moves_params:
            self._update(units, Category.HOST_TEMPORARY)
            return
        for unit in units:
            shard = shard_numel(unit, self.spec)
            ledger.alloc(("host grad", unit.index), shard * recipe.grad.itemsize, Category.HOST_TEMPORARY)
            self._transfer(Direction.TO_HOST, recipe.grad, shard, op, unit)
        self._update(units, Category.HOST_TEMPORARY)
        ledger.free(*(("host grad", unit.index) for unit in units))
        for unit in units:
            shard = shard_numel(unit, self.spec)
            if recipe.update is not recipe.param:
                ledger.alloc("narrow", shard * recipe.param.itemsize, Category.HOST_TEMPORARY)
            self._transfer(Direction.TO_DEVICE, recipe.param, shard, op, unit)
            if recipe.update is not recipe.param:
                ledger.free("narrow")

    def _update(self, units: tuple[Unit, ...], category: Category = Category.TEMPORARY) -> None:
        """The update, slice by slice of each unit, or of all in one go. `Optimizer` says what it makes."""
        recipe = self.spec.recipe
        slices = tuple(chain.from_iterable(self.slices[unit.index] for unit in units))
        cast = recipe.update if recipe.casts_grad else None
        self.ledger.replay(artefacts.update_of_slices(self.spec.optimizer, slices, recipe.moments, cast, category))

    def _send(
        self, op: CollectiveOp, dtype: DType, numel: int, at: Op, unit: Unit | None = None, among: Group | None = None
    ) -> None:
        """Among the ranks that shard together, unless others are named. A group of one rank sends nothing."""
        group = among or self.within
        if (num_ranks := self.num_in[group]) > 1:
            payload, name = numel * dtype.itemsize, unit.name if unit else ""
            artefacts.start_copies(self.ledger, op, payload, unit.index if unit else None)
            self.collectives.append(Collective(op, dtype.value, num_ranks, payload, at.phase.label, name, group))

    def _transfer(self, direction: Direction, dtype: DType, numel: int, at: Op, unit: Unit) -> None:
        nbytes = numel * dtype.itemsize
        self.transfers.append(Transfer(direction, dtype.value, nbytes, at.phase.label, unit.name))
