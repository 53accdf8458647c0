"""walk(schedule) -> Trace: the step as arithmetic, without a tensor.

The walk visits the ops that `cluster.own` executes, in the same order, and books what each allocates and frees.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zeroviz import activations, artefacts
from zeroviz.collectives import CollectiveOp
from zeroviz.implementations import check_predictable
from zeroviz.ledger import Ledger
from zeroviz.link import Direction, Transfer
from zeroviz.memory import rest_by_category, rest_padding_nbytes, step_counter_nbytes
from zeroviz.models import Family
from zeroviz.partition import Plan, Unit, alike_stretches, buffer_numel, plan_for, shard_numel
from zeroviz.rank_trace import AlikeRanks
from zeroviz.schedule import Op, OpKind, schedule
from zeroviz.spec import DType, RunSpec, Strategy, Zero1Form
from zeroviz.tape import Sizes
from zeroviz.trace import Category, Collective, Origin, RankTrace, Trace

NBYTES_PER_TOKEN_ID = 8  # torch indexes embeddings and targets with int64

BARE_NOTE = (
    "A bare parameter count says nothing of layers, so the peak counts parameters, gradients and optimizer only; "
    "name a model to see activations."
)


@lru_cache(maxsize=512)
def predict(spec: RunSpec) -> Trace:
    """The predicted trace of one step: every rank's rest, events and collectives.

    Ranks differ in padding only, so they share one list of events. SpecError for an implementation that is not our own.
    """
    check_predictable(spec)
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
    notes = (BARE_NOTE,) if spec.model.family is Family.BARE else ()
    return Trace(Origin.PREDICTED, spec, ranks, notes=notes)


def input_nbytes(spec: RunSpec) -> int:
    """Bytes of one rank's batch: tokens and targets, and for rotary models the (seq, head_dim/2) cos and sin tables."""
    model = spec.model
    if model.family is Family.BARE:
        return 0
    tables = 2 * spec.seq * (model.head_dim // 2) * spec.recipe.param.itemsize
    return 2 * NBYTES_PER_TOKEN_ID * spec.num_tokens_per_rank + (tables if model.family is Family.LLAMA else 0)


def gradient_op(spec: RunSpec) -> CollectiveOp:
    """The collective that reduces a unit's gradient."""
    naive = spec.strategy is Strategy.ZERO1 and spec.zero1_form is Zero1Form.ALL_REDUCE
    return CollectiveOp.ALL_REDUCE if naive or spec.strategy is Strategy.DDP else CollectiveOp.REDUCE_SCATTER


class _Walk:
    """The state of one walk: the ledger, the collectives and the transfers so far.

    numels: elements of each unit's whole buffer and of a shard. summed: units whose gradient shard already holds an
    earlier micro-batch's.
    """

    def __init__(self, spec: RunSpec, plan: Plan) -> None:
        self.spec, self.plan = spec, plan
        self.sizes = Sizes.of(spec)
        self.numels = [(buffer_numel(unit, spec), shard_numel(unit, spec)) for unit in plan.units]
        self.ledger = Ledger()
        self.collectives: list[Collective] = []
        self.transfers: list[Transfer] = []
        self.summed: set[int] = set()

    def visit(self, op: Op) -> None:
        spec, ledger = self.spec, self.ledger
        unit = None if op.unit is None else self.plan.units[op.unit]
        segment = None if op.segment is None else self.plan.segments[op.segment]
        ledger.at(op.phase.value, op.kind.value, unit.name if unit else "")
        match op.kind:
            case OpKind.LOAD_BATCH:
                ledger.alloc("batch", input_nbytes(spec), Category.INPUT)
            case OpKind.DROP_BATCH:
                ledger.free("batch")
            case OpKind.FORWARD:
                assert segment is not None
                activations.forward(ledger, self.sizes, segment)
            case OpKind.RECOMPUTE:
                assert segment is not None
                activations.recompute(ledger, self.sizes, segment)
            case OpKind.BACKWARD:
                assert segment is not None
                activations.backward(ledger, self.sizes, segment)
            case OpKind.OPTIMIZER_STEP:
                self._update(self.plan.units if unit is None else (unit,))
            case OpKind.HOST_STEP:
                self._update_on_host(op, self.plan.units if unit is None else (unit,))
            case _:
                assert unit is not None
                self._visit_unit(op, unit)

    def _visit_unit(self, op: Op, unit: Unit) -> None:
        spec, ledger, recipe = self.spec, self.ledger, self.spec.recipe
        numel, shard = self.numels[unit.index]
        match op.kind:
            case OpKind.UNSHARD:
                ledger.alloc(("param", unit.index), numel * recipe.param.itemsize, Category.UNSHARDED_PARAM)
                if spec.offload.moves_params:  # the shard goes up into its slice of the full buffer
                    self._transfer(Direction.TO_DEVICE, recipe.param, shard, op, unit)
                self._send(CollectiveOp.ALL_GATHER, recipe.param, numel, op, unit)
            case OpKind.RESHARD:
                ledger.free(("param", unit.index))
            case OpKind.PREPARE_GRAD if spec.strategy.shards_grad:
                ledger.alloc(("grad", unit.index), numel * recipe.grad.itemsize, Category.UNSHARDED_GRAD)
            case OpKind.REDUCE_GRAD:
                self._send(gradient_op(spec), recipe.grad, numel, op, unit)
            case OpKind.WAIT_REDUCE:
                artefacts.end_copies(ledger, unit.index)
                ledger.replay(artefacts.number(recipe.grad.itemsize))  # divided by N
                if spec.strategy.shards_grad:
                    if spec.offload.moves_params:
                        self._take_grad_down(op, unit)
                    ledger.free(("grad", unit.index))
            case OpKind.SYNC_PARAM:
                self._send(CollectiveOp.ALL_GATHER, recipe.param, numel, op, unit)
            case _:
                pass  # waits, and zeroing what is held anyway, neither allocate nor free

    def _take_grad_down(self, op: Op, unit: Unit) -> None:
        """The reduced slice goes into the host's shard; from the second micro-batch on it is a copy that is added."""
        ledger, recipe, shard = self.ledger, self.spec.recipe, shard_numel(unit, self.spec)
        self._transfer(Direction.TO_HOST, recipe.grad, shard, op, unit)
        if unit.index in self.summed:
            ledger.alloc("slice", shard * recipe.grad.itemsize, Category.HOST_TEMPORARY)
            ledger.free("slice")
        self.summed.add(unit.index)

    def _update(self, units: tuple[Unit, ...]) -> None:
        """The optimizer on the device. `Optimizer` says what it makes; all of `units` at the same time.

        A gradient of another dtype than the update's is cast first.
        """
        ledger, recipe = self.ledger, self.spec.recipe
        casts = [("cast grad", unit.index) for unit in units] if recipe.casts_grad else []
        for unit, key in zip(units, casts, strict=False):
            ledger.alloc(key, shard_numel(unit, self.spec) * recipe.update.itemsize, Category.TEMPORARY)
        self._update_temporaries(units, Category.TEMPORARY)
        ledger.free(*casts)

    def _update_on_host(self, op: Op, units: tuple[Unit, ...]) -> None:
        """Gradients down (unless they are there), the update among the host's copies, parameters up (likewise)."""
        ledger, recipe = self.ledger, self.spec.recipe
        moves_params = self.spec.offload.moves_params
        grads = []
        for unit in units:
            shard, key = shard_numel(unit, self.spec), ("host grad", unit.index)
            if not moves_params:
                ledger.alloc(key, shard * recipe.grad.itemsize, Category.HOST_TEMPORARY)
                self._transfer(Direction.TO_HOST, recipe.grad, shard, op, unit)
            if recipe.casts_grad:
                ledger.alloc(("cast grad", unit.index), shard * recipe.update.itemsize, Category.HOST_TEMPORARY)
                if not moves_params:
                    ledger.free(key)
                key = ("cast grad", unit.index)
            if recipe.casts_grad or not moves_params:
                grads.append(key)
        self._update_temporaries(units, Category.HOST_TEMPORARY)
        ledger.free(*grads)
        if moves_params:
            return
        for unit in units:
            shard = shard_numel(unit, self.spec)
            if recipe.update is not recipe.param:
                ledger.alloc("narrow", shard * recipe.param.itemsize, Category.HOST_TEMPORARY)
            self._transfer(Direction.TO_DEVICE, recipe.param, shard, op, unit)
            if recipe.update is not recipe.param:
                ledger.free("narrow")

    def _update_temporaries(self, units: tuple[Unit, ...], category: Category) -> None:
        """AdamW's plain loop makes sqrt(v) and the denominator out of it; foreach makes sqrt(v) of all units."""
        numels = tuple(self.numels[unit.index][1] for unit in units)
        self.ledger.replay(artefacts.update_of(self.spec.optimizer, numels, self.spec.recipe.moments, category))

    def _send(self, op: CollectiveOp, dtype: DType, numel: int, at: Op, unit: Unit) -> None:
        if self.spec.ranks > 1:
            payload = numel * dtype.itemsize
            artefacts.start_copies(self.ledger, op, payload, unit.index)
            self.collectives.append(Collective(op, dtype.value, self.spec.ranks, payload, at.phase.value, unit.name))

    def _transfer(self, direction: Direction, dtype: DType, numel: int, at: Op, unit: Unit) -> None:
        nbytes = numel * dtype.itemsize
        self.transfers.append(Transfer(direction, dtype.value, nbytes, at.phase.value, unit.name))
