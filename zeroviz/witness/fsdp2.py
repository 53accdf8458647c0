"""torch's `fully_shard` (FSDP2) by arithmetic: what every rank holds, in which order, and what it sends.

[Note: groups] A unit that is one segment is a group of fully_shard's; a tied root, or the whole model under unit
`model`, is the root's own. FSDP2 cuts every parameter by rows and pads each piece to the first rank's, so padding is a
parameter's; a moment is made of a rank's rows alone and has none. That is all in which ranks differ.

[Note: gathered twice] An all-gather fills one buffer, which is then copied out into a tensor a parameter: with both a
group is held twice. In forward a buffer outlives its copy-out: it goes when the next group's has been made, so
that this group's copy-out may overlap the next one's gather. In backward it goes at once, and then the group before is
gathered ahead (torch 2.13, _fsdp_param_group.py: `wait_for_unshard`, `_backward_prefetch`).

[Note: reduced twice] A group's gradients are copied into the input of a reduce-scatter; its output becomes the sharded
gradient. The input is held until the group before comes to its own, or backward ends (`post_backward`). Across replicas
the output is all-reduced in place. Gradients reduced in another dtype than the parameters' are cast once more.

A single rank has neither buffer for gathering: it copies its shard out. What fully_shard calls on the way is in
`cluster.witness.fsdp2`, and tests compare every event of a rehearsal with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise

from zeroviz import artefacts
from zeroviz.activations import input_nbytes
from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.events import Change, Changes, Events
from zeroviz.kernels import norm_saves_input
from zeroviz.ledger import Ledger
from zeroviz.models import NamedShape, SublayerKind
from zeroviz.partition import Place, Segment, Unit, chunk_rows, local_rows, plan_for
from zeroviz.rank_trace import AlikeRanks, RankTrace
from zeroviz.schedule import OpKind, Phase
from zeroviz.settings import value_of
from zeroviz.spec import DType, Optimizer, RunSpec, Strategy
from zeroviz.sublayers import passes_with_grads
from zeroviz.tape import FP32_NBYTES, Sizes
from zeroviz.wire import Collective
from zeroviz.witness.graph import ZERO_GRAD, Graph

NBYTES_PER_TOKEN_ID = 8


def predicted(spec: RunSpec) -> Sequence[RankTrace]:
    """Every rank's step, in stretches of ranks that hold equal rows."""
    walk = _Walk(spec)
    walk.step()
    before = walk.ledger.events
    itemsize = spec.recipe.param.itemsize
    padded = sum(group.shard_numel for group in walk.groups)
    counters = len(spec.model.params) if spec.optimizer.counts_steps else 0
    first = RankTrace(
        rank=0,
        rest={Category.SHARDED_PARAM: padded * itemsize, Category.SHARDED_GRAD: padded * itemsize},
        collectives=tuple(walk.collectives),
        step_counter_nbytes=counters * DType.FP32.itemsize,
    )
    stretches = []
    for stretch in alike(spec):
        numels = local_numels(spec, stretch.start)
        moments = spec.recipe.moments_nbytes(sum(numels))
        ledger = Ledger()
        ledger.at(Phase.OPTIMIZER.label, OpKind.OPTIMIZER_STEP.label, "")
        ledger.replay(_update(spec.optimizer, numels, spec.recipe.moments))
        trace = replace(
            first,
            rank=stretch.start,
            rest={**first.rest, **({Category.OPTIMIZER_STATE: moments} if moments else {})},
            events=_joined(before, ledger.events),
            padding_nbytes=2 * itemsize * (padded - sum(numels)),
        )
        stretches.append((stretch, trace))
    return AlikeRanks(stretches)


def alike(spec: RunSpec) -> list[range]:
    """The ranks in stretches of equal shapes. Of a parameter the first ranks hold whole chunks, then one the rest.
    Shard groups are copies of the first."""
    num_shards, borders = spec.num_shards, {0}
    for num_rows in {shape.shape[0] for shape in spec.model.params}:
        whole, rest = divmod(num_rows, chunk_rows(num_rows, num_shards))
        borders |= {whole, whole + (rest > 0)}
    starts = sorted(border for border in borders if border < num_shards)
    if len(starts) == 1:
        return [range(spec.ranks)]
    every = [first + start for first in range(0, spec.ranks, num_shards) for start in starts]
    return [range(start, stop) for start, stop in pairwise([*every, spec.ranks])]


@lru_cache(maxsize=256)
def parameter_order(spec: RunSpec) -> tuple[NamedShape, ...]:
    """The parameters as FSDP2's optimizer has them: in order of first use."""
    shapes = (
        shape for segment in plan_for(spec).segments for sublayer in segment.sublayers for shape in sublayer.params
    )
    return tuple({shape.name: shape for shape in shapes}.values())


def local_numels(spec: RunSpec, rank: int) -> tuple[int, ...]:
    """Elements the rank holds of each parameter, padding left out, in `parameter_order`."""
    place = rank % spec.num_shards
    return tuple(
        shape.numel // shape.shape[0] * local_rows(shape.shape[0], spec.num_shards, place)
        for shape in parameter_order(spec)
    )


@dataclass(frozen=True)
class FSDPGroup:
    """Parameters that fully_shard gathers together. numels, padded_numels: of each, without and with padding.

    is_root: held by the root's module, around all others.
    """

    unit: Unit
    is_root: bool
    numels: tuple[int, ...]
    padded_numels: tuple[int, ...]
    num_shards: int

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def whole_numel(self) -> int:
        """Of what is gathered or reduced."""
        return sum(self.padded_numels)

    @property
    def shard_numel(self) -> int:
        return self.whole_numel // self.num_shards


def groups_of(spec: RunSpec) -> tuple[FSDPGroup, ...]:
    """One for each unit of the plan. See [Note: groups]."""
    plan, num_shards = plan_for(spec), spec.num_shards
    uses = [segment.unit for segment in plan.segments]
    return tuple(
        FSDPGroup(
            unit,
            is_root=len(plan.units) == 1 or uses.count(unit.index) > 1,
            numels=tuple(shape.numel for shape in unit.params),
            padded_numels=tuple(
                chunk_rows(shape.shape[0], num_shards) * num_shards * (shape.numel // shape.shape[0])
                for shape in unit.params
            ),
            num_shards=num_shards,
        )
        for unit in plan.units
    )


class _Walk:
    """A step up to the optimizer's. whole: groups whose parameters are whole; started: gathers not copied out yet.

    copied_out: the group whose buffer forward still holds. reduced: the one whose reduce-scatter's input is held.
    forward_order: groups in the order in which forward left them. summed: groups with a sharded gradient.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.graph = Graph(spec, fresh=Category.UNSHARDED_GRAD)
        self.groups = groups_of(spec)
        self.root = next((group for group in self.groups if group.is_root), None)
        self.ledger = Ledger()
        self.collectives: list[Collective] = []
        self.reshards = spec.strategy is not Strategy.SHARD_GRAD_OP
        self.reduce_dtype: DType = value_of(spec.settings, "reduce_dtype", spec.impl) or spec.recipe.compute
        self.whole: set[int] = set()
        self.started: set[int] = set()
        self.copied_out: FSDPGroup | None = None
        self.reduced: FSDPGroup | None = None
        self.forward_order: list[FSDPGroup] = []

    def at(self, phase: Phase, op: str, group: FSDPGroup | None = None) -> None:
        self.ledger.at(phase.label, op, group.name if group else "")

    def step(self) -> None:
        self._zero_grad()
        self._load_batch()
        self._forward()
        self._backward()
        self.at(Phase.BACKWARD, OpKind.DROP_BATCH.label)
        self.ledger.replay([(Category.ACTIVATION, -FP32_NBYTES)])  # the loss
        self.ledger.free(*(("batch", position) for position in range(len(_batch_nbytes(self.spec)))))

    def _zero_grad(self) -> None:
        """A group's shards share one storage, so it goes with the last of its parameters."""
        self.at(Phase.FORWARD, ZERO_GRAD)
        place = {shape.name: position for position, shape in enumerate(parameter_order(self.spec))}
        order = sorted(self.groups, key=lambda group: max(place[shape.name] for shape in group.unit.params))
        itemsize = self.spec.recipe.param.itemsize
        self.ledger.replay((Category.SHARDED_GRAD, -group.shard_numel * itemsize) for group in order)

    def _load_batch(self) -> None:
        self.at(Phase.FORWARD, OpKind.LOAD_BATCH.label)
        for position, nbytes in enumerate(_batch_nbytes(self.spec)):
            self.ledger.alloc(("batch", position), nbytes, Category.INPUT)

    # ---- forward ----

    def _forward(self) -> None:
        if self.root:
            self.at(Phase.FORWARD, OpKind.UNSHARD.label, self.root)
            self._unshard(self.root)
            self._copy_out(self.root, in_forward=True)
        for segment in self.graph.plan.segments:
            self._forward_of(segment)
        if self.root:
            self.at(Phase.FORWARD, OpKind.RESHARD.label, self.root)
            self._leave_forward(self.root)
        if self.copied_out:
            self.ledger.free(("gather", self.copied_out.unit.index))
            self.copied_out = None
        # The gradient of the loss, a one.
        self.ledger.alloc("seed", FP32_NBYTES, Category.TEMPORARY)

    def _forward_of(self, segment: Segment) -> None:
        group = self.groups[segment.unit]
        if not group.is_root:
            self.at(Phase.FORWARD, OpKind.UNSHARD.label, group)
            self._unshard(group)
            self._copy_out(group, in_forward=True)
        self.at(Phase.FORWARD, OpKind.FORWARD.label, group)
        for kind, place in self._places(segment):
            self.ledger.replay(passes_with_grads(self.graph.sizes, kind, place)[0])
        if not group.is_root:
            self.at(Phase.FORWARD, OpKind.RESHARD.label, group)
            self._leave_forward(group)
        if segment.sublayers[0].kind is not SublayerKind.EMBED and not norm_saves_input(self.graph.sizes):
            row = self.graph.sizes.rows(self.spec.model.hidden)
            self.ledger.replay([(Category.ACTIVATION, -row)])  # the caller held the input till here

    def _leave_forward(self, group: FSDPGroup) -> None:
        if self.reshards:
            self._reshard(group)
        self.forward_order.append(group)

    def _places(self, segment: Segment) -> Iterator[tuple[SublayerKind, Place]]:
        last = len(segment.sublayers) - 1
        for position, sublayer in enumerate(segment.sublayers):
            yield sublayer.kind, Place(position == 0, position == last, self.spec.model.tied, in_graph=True)

    # ---- backward ----

    def _backward(self) -> None:
        segments = self.graph.plan.segments
        if self.root:
            self.at(Phase.BACKWARD, OpKind.UNSHARD.label, self.root)
            if self.groups[segments[-1].unit].is_root:
                self._enter_backward(self.root)
        for segment in reversed(segments):
            group = self.groups[segment.unit]
            if not group.is_root:
                self.at(Phase.BACKWARD, OpKind.UNSHARD.label, group)
                self._enter_backward(group)
            self.at(Phase.BACKWARD, OpKind.BACKWARD.label, group)
            for kind, place in reversed(list(self._places(segment))):
                self.ledger.replay(_backward_pass(self.graph.sizes, kind, place))
            # What the input of the first segment is made of takes no gradient; the root's parameters are used again.
            if not group.is_root and segment is not segments[0]:
                self._reduce(group)
        self._reduce(self.root or self.groups[segments[0].unit])
        assert self.reduced is not None
        self.ledger.free(("reduce", self.reduced.unit.index))
        self.reduced = None
        self.forward_order.clear()
        self.ledger.free("seed")

    def _enter_backward(self, group: FSDPGroup) -> None:
        """Make the group whole, and start the gather of the group that forward left before it."""
        self._unshard(group)
        self._copy_out(group, in_forward=False)
        position = self.forward_order.index(group)
        if position:
            self._unshard(self.forward_order[position - 1])

    def _reduce(self, group: FSDPGroup) -> None:
        """Free the parameters, copy the gradients in, and let the reduced shard become the gradient."""
        ledger, param, wire = self.ledger, self.spec.recipe.param, self.reduce_dtype
        key = group.unit.index
        self.at(Phase.BACKWARD, OpKind.REDUCE_GRAD.label, group)
        self._reshard(group)
        if self.reduced:
            ledger.free(("reduce", self.reduced.unit.index))
        self.reduced = group
        ledger.alloc(("reduce", key), group.whole_numel * wire.itemsize, Category.REDUCE_SCATTER_BUFFER)
        fresh = [(Category.UNSHARDED_GRAD, -numel * self.graph.sizes.itemsize) for numel in reversed(group.numels)]
        # The list lets go from its end; the last of them is the loop variable's until the function returns.
        num_kept = 1 if self.spec.num_shards > 1 else 0
        ledger.replay(fresh[num_kept:])
        cast = wire is not param
        shard = group.shard_numel
        category = Category.REDUCE_SCATTER_BUFFER if cast else Category.SHARDED_GRAD
        ledger.replay([(category, shard * wire.itemsize)])
        self._send(CollectiveOp.REDUCE_SCATTER, wire, group.whole_numel, Phase.BACKWARD, group)
        artefacts.end_copies(ledger, key)
        if cast:
            ledger.replay([(Category.SHARDED_GRAD, shard * param.itemsize), (category, -shard * wire.itemsize)])
        ledger.replay(fresh[:num_kept])

    # ---- parameters ----

    def _unshard(self, group: FSDPGroup) -> None:
        """Start the gather, unless it is under way or over. One rank has nothing to gather."""
        key = group.unit.index
        if key in self.whole or key in self.started:
            return
        self.started.add(key)
        if self.spec.num_shards == 1:
            return
        ledger, compute = self.ledger, self.spec.recipe.compute
        casts = compute is not self.spec.recipe.param
        if casts:
            ledger.alloc("cast", group.shard_numel * compute.itemsize, Category.TEMPORARY)
        ledger.alloc(("gather", key), group.whole_numel * compute.itemsize, Category.ALL_GATHER_BUFFER)
        self._send(CollectiveOp.ALL_GATHER, compute, group.whole_numel, self.phase, group)
        if casts:
            ledger.free("cast")

    @property
    def phase(self) -> Phase:
        return Phase.FORWARD if self.ledger.where[0] == Phase.FORWARD.label else Phase.BACKWARD

    def _copy_out(self, group: FSDPGroup, *, in_forward: bool) -> None:
        """Out of the gathered buffer into a tensor a parameter. See [Note: gathered twice]."""
        key = group.unit.index
        if key not in self.started:
            return
        self.started.discard(key)
        self.whole.add(key)
        self.ledger.replay(
            _whole(group.padded_numels, self.spec.recipe.param, self.spec.recipe.compute, group.num_shards)
        )
        if self.spec.num_shards == 1:
            return
        if not in_forward:
            self.ledger.free(("gather", key))
            return
        if self.copied_out:
            self.ledger.free(("gather", self.copied_out.unit.index))
        self.copied_out = group

    def _reshard(self, group: FSDPGroup) -> None:
        self.whole.discard(group.unit.index)
        itemsize = self.spec.recipe.compute.itemsize
        self.ledger.replay((Category.UNSHARDED_PARAM, -numel * itemsize) for numel in group.padded_numels)

    # ---- the wire ----

    def _send(self, op: CollectiveOp, dtype: DType, numel: int, phase: Phase, group: FSDPGroup) -> None:
        if self.spec.num_shards == 1:
            return
        payload = numel * dtype.itemsize
        artefacts.start_copies(self.ledger, op, payload, group.unit.index)
        among = Group.SHARD if self.spec.strategy.replicates else Group.ALL
        where = self.ledger.where[2]
        self.collectives.append(Collective(op, dtype.value, self.spec.num_shards, payload, phase.label, where, among))


@lru_cache(maxsize=1024)
def _backward_pass(sizes: Sizes, kind: SublayerKind, place: Place) -> Changes:
    """One sublayer's backward in one stretch: fully_shard waits for all gradients of a group."""
    _, up_to_grads, rest = passes_with_grads(sizes, kind, place)
    return Changes(chain(*(changes for changes, _ in up_to_grads), rest))


@lru_cache(maxsize=1024)
def _whole(padded_numels: tuple[int, ...], param: DType, compute: DType, num_shards: int) -> Changes:
    """A tensor a parameter; a single rank casts each from its shard."""
    changes: list[Change] = []
    for numel in padded_numels:
        cast = [] if num_shards > 1 or compute is param else [(Category.TEMPORARY, numel * compute.itemsize)]
        changes += [*cast, (Category.UNSHARDED_PARAM, numel * compute.itemsize)]
        changes += [(category, -nbytes) for category, nbytes in cast]
    return Changes(changes)


@lru_cache(maxsize=64)
def _update(optimizer: Optimizer, numels: tuple[int, ...], moments: DType) -> Changes:
    """The optimizer's step; of an empty shard nothing is allocated."""
    changes = artefacts.update(optimizer, numels, moments, Category.TEMPORARY)
    return Changes((category, nbytes) for category, nbytes in changes if nbytes)


@lru_cache(maxsize=64)
def _batch_nbytes(spec: RunSpec) -> tuple[int, ...]:
    """Tokens, targets and, for rotary models, the two tables."""
    ids = NBYTES_PER_TOKEN_ID * spec.num_tokens_per_rank
    tables = (input_nbytes(spec) - 2 * ids) // 2
    return (ids, ids, *((tables, tables) if tables else ()))


def _joined(before: Events, after: Events) -> Events:
    return Events((*before.wheres, *after.wheres), (*before.stretches, *after.stretches))
