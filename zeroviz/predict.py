"""walk(schedule) -> Trace: the step as arithmetic, without a tensor.

The walk visits the ops that `cluster.own` executes, in the same order, and books what each allocates and frees.
"""

from __future__ import annotations

from functools import lru_cache

from zeroviz import activations
from zeroviz.collectives import CollectiveOp
from zeroviz.ledger import Ledger
from zeroviz.memory import rest_by_category, rest_padding_nbytes, step_counter_nbytes
from zeroviz.models import Family
from zeroviz.partition import Plan, Unit, buffer_numel, plan_for, shard_numel
from zeroviz.schedule import Op, OpKind, schedule
from zeroviz.spec import DType, RunSpec, Strategy, Zero1Form
from zeroviz.trace import Category, Collective, Event, Origin, RankTrace, Trace

NBYTES_PER_TOKEN_ID = 8  # torch indexes embeddings and targets with int64

BARE_NOTE = (
    "A bare parameter count says nothing of layers, so the peak counts parameters, gradients and optimizer only; "
    "name a model to see activations."
)


@lru_cache(maxsize=512)
def predict(spec: RunSpec) -> Trace:
    """The predicted trace of one step: every rank's rest, events and collectives.

    Ranks differ in padding only, so they share one list of events.
    """
    events, collectives = _walk(spec)
    rest = rest_by_category(spec)
    ranks = tuple(
        RankTrace(
            rank=rank,
            rest=rest,
            events=events,
            collectives=collectives,
            padding_nbytes=rest_padding_nbytes(spec, rank),
            step_counter_nbytes=step_counter_nbytes(spec),
        )
        for rank in range(spec.ranks)
    )
    notes = (BARE_NOTE,) if spec.model.family is Family.BARE else ()
    return Trace(Origin.PREDICTED, spec, ranks, notes=notes)


def input_nbytes(spec: RunSpec) -> int:
    """Bytes of one rank's batch: tokens and targets, and for rotary models the (seq, head_dim/2) cos and sin tables."""
    model = spec.model
    if model.family is Family.BARE:
        return 0
    tables = 2 * spec.seq * (model.head_dim // 2) * spec.precision.param.itemsize
    return 2 * NBYTES_PER_TOKEN_ID * spec.num_tokens_per_rank + (tables if model.family is Family.LLAMA else 0)


def gradient_op(spec: RunSpec) -> CollectiveOp:
    """The collective that reduces a unit's gradient."""
    naive = spec.strategy is Strategy.ZERO1 and spec.zero1_form is Zero1Form.ALL_REDUCE
    return CollectiveOp.ALL_REDUCE if naive or spec.strategy is Strategy.DDP else CollectiveOp.REDUCE_SCATTER


def _walk(spec: RunSpec) -> tuple[tuple[Event, ...], tuple[Collective, ...]]:
    walk = _Walk(spec, plan_for(spec))
    for op in schedule(spec):
        walk.visit(op)
    return tuple(walk.ledger.events), tuple(walk.collectives)


class _Walk:
    """The state of one walk: the ledger and the collectives so far."""

    def __init__(self, spec: RunSpec, plan: Plan) -> None:
        self.spec, self.plan = spec, plan
        self.ledger = Ledger()
        self.collectives: list[Collective] = []

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
                activations.forward(ledger, spec, segment)
            case OpKind.BACKWARD:
                assert segment is not None
                activations.backward(ledger, spec, segment)
            case _:
                assert unit is not None
                self._visit_unit(op, unit)

    def _visit_unit(self, op: Op, unit: Unit) -> None:
        spec, ledger, recipe = self.spec, self.ledger, self.spec.precision
        numel = buffer_numel(unit, spec)
        match op.kind:
            case OpKind.UNSHARD:
                ledger.alloc(("param", unit.index), numel * recipe.param.itemsize, Category.UNSHARDED_PARAM)
                self._send(CollectiveOp.ALL_GATHER, recipe.param, numel, op, unit)
            case OpKind.RESHARD:
                ledger.free(("param", unit.index))
            case OpKind.PREPARE_GRAD if spec.strategy.shards_grad:
                ledger.alloc(("grad", unit.index), numel * recipe.grad.itemsize, Category.UNSHARDED_GRAD)
            case OpKind.REDUCE_GRAD:
                self._send(gradient_op(spec), recipe.grad, numel, op, unit)
            case OpKind.WAIT_REDUCE if spec.strategy.shards_grad:
                ledger.free(("grad", unit.index))
            case OpKind.OPTIMIZER_STEP:
                self._optimizer_step(shard_numel(unit, spec))
            case OpKind.SYNC_PARAM:
                self._send(CollectiveOp.ALL_GATHER, recipe.param, numel, op, unit)
            case _:
                pass  # waits, and zeroing what is held anyway, neither allocate nor free

    def _optimizer_step(self, numel: int) -> None:
        """AdamW's plain loop makes sqrt(v) and the denominator out of it; both are as large as the shard.

        A master is updated with a gradient of its own dtype, so a narrower one is cast first, one unit at a time.
        """
        ledger, recipe = self.ledger, self.spec.precision
        casts = recipe.master is not None and recipe.grad is not recipe.master
        if recipe.master and casts:
            ledger.alloc("cast grad", numel * recipe.master.itemsize, Category.TEMPORARY)
        ledger.alloc("sqrt", numel * recipe.moments.itemsize, Category.TEMPORARY)
        ledger.alloc("denominator", numel * recipe.moments.itemsize, Category.TEMPORARY)
        ledger.free("sqrt", "denominator")
        if casts:
            ledger.free("cast grad")

    def _send(self, op: CollectiveOp, dtype: DType, numel: int, at: Op, unit: Unit) -> None:
        if self.spec.ranks > 1:
            payload = numel * dtype.itemsize
            self.collectives.append(Collective(op, dtype.value, self.spec.ranks, payload, at.phase.value, unit.name))
