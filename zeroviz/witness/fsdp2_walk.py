"""One step of `fully_shard` up to the optimizer's, event by event.

[Note: gathered twice] An all-gather fills one buffer, which is then copied out into a tensor a parameter: with both a
group is held twice. In forward a buffer outlives its copy-out: it goes when the next group's has been made, so that
this group's copy-out may overlap the next one's gather. In backward it goes at once, and then the group before is
gathered ahead (torch 2.13, _fsdp_param_group.py: `wait_for_unshard`, `_backward_prefetch`). A single rank has no such
buffer: it copies its shard out.

[Note: reduced twice] A group's gradients are copied into the input of a reduce-scatter; its output becomes the sharded
gradient. The input is held until the group before comes to its own, or backward ends (`post_backward`). Across replicas
the output is all-reduced in place. An output in another dtype than the parameters' is cast, and goes; where it was
all-reduced it stays to the end of backward.

[Note: micro-batches] From the second micro-batch on the output is added to the sharded gradient that is there. Under
no_sync a micro-batch but the last ends with whole gradients: those that backward made, to which the next ones' are
added, or, where they are reduced in another dtype, a cast copy of each.

[Note: resharded] Under `reshard_ranks` G a parameter that is freed after forward leaves one part in G of itself, which
goes when it has been gathered again, among G ranks.

[Note: scratch] What fully_shard's operators borrow on CPU. A copy into the input of a reduce-scatter makes padded
copies of all gradients whose rows the ranks do not divide, and where it casts, one of each in turn. gloo averages by a
number ([Note: numbers] in zeroviz/artefacts.py).

[Note: who lets go last] What a function's variables hold goes when it returns. So the last gradient copied in goes
after its reduction, but for a single rank, which has no loop over gradients. And a single rank that casts its shard
casts the next parameter's before it lets go of this one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from zeroviz import artefacts
from zeroviz.activations import NBYTES_PER_TOKEN_ID, input_nbytes
from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.events import Change, Changes
from zeroviz.kernels import norm_saves_input
from zeroviz.ledger import Ledger
from zeroviz.models import SublayerKind
from zeroviz.partition import Place, Segment
from zeroviz.schedule import OpKind, Phase
from zeroviz.settings import value_of
from zeroviz.spec import DType, RunSpec, Strategy
from zeroviz.sublayers import passes, passes_with_grads
from zeroviz.tape import FP32_NBYTES, Sizes
from zeroviz.wire import Collective
from zeroviz.witness.fsdp2_groups import FSDPGroup, groups_of, parameter_order
from zeroviz.witness.graph import ZERO_GRAD, Graph


class Walk:
    """`gradients` books all. whole: groups whose parameters are whole; started: gathers not copied out yet; parted:
    groups that left forward in `reshard_ranks` parts.

    copied_out: the group whose buffer forward still holds. reduced: the one whose reduce-scatter's input is held.
    forward_order: groups in the order in which forward left them. kept: bytes of all-reduced outputs that are no
    gradients, by group.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.graph = Graph(spec, fresh=Category.UNSHARDED_GRAD)
        self.groups = groups_of(spec)
        self.root = next((group for group in self.groups if group.is_root), None)
        self.ledger = Ledger()
        self.collectives: list[Collective] = []
        self.param, self.compute = spec.recipe.param, spec.recipe.compute
        self.wire: DType = value_of(spec.settings, "reduce_dtype", spec.impl) or self.compute
        self.whole: set[int] = set()
        self.started: set[int] = set()
        self.parted: set[int] = set()
        self.copied_out: FSDPGroup | None = None
        self.reduced: FSDPGroup | None = None
        self.forward_order: list[FSDPGroup] = []
        self.kept: dict[int, int] = {}

    def gradients(self) -> None:
        """Zero the gradients, and make them anew in every micro-batch."""
        self._at(Phase.FORWARD, ZERO_GRAD)
        # A group's shards share one storage, which goes with the last of its parameters.
        place = {shape.name: position for position, shape in enumerate(parameter_order(self.spec))}
        order = sorted(self.groups, key=lambda group: max(place[shape.name] for shape in group.unit.params))
        self.ledger.replay((Category.SHARDED_GRAD, -group.shard_numel * self.param.itemsize) for group in order)
        for micro_batch in range(self.spec.accumulation):
            self.is_first = micro_batch == 0
            self.reduces = self.spec.reduces_each or micro_batch == self.spec.accumulation - 1
            self._micro_batch()

    def _micro_batch(self) -> None:
        batch = _batch_nbytes(self.spec)
        self._at(Phase.FORWARD, OpKind.LOAD_BATCH.label)
        self.ledger.replay([(Category.INPUT, nbytes) for nbytes in batch])
        self._forward()
        self._backward()
        self._at(Phase.BACKWARD, OpKind.DROP_BATCH.label)
        self.ledger.replay([(Category.ACTIVATION, -FP32_NBYTES), *((Category.INPUT, -nbytes) for nbytes in batch)])

    def _at(self, phase: Phase, op: str, group: FSDPGroup | None = None) -> None:
        self.ledger.at(phase.label, op, group.name if group else "")

    # ---- forward ----

    def _forward(self) -> None:
        if self.root:
            self._at(Phase.FORWARD, OpKind.UNSHARD.label, self.root)
            self._unshard(self.root)
            self._copy_out(self.root, in_forward=True)
        for segment in self.graph.plan.segments:
            self._forward_of(segment)
        if self.root:
            self._at(Phase.FORWARD, OpKind.RESHARD.label, self.root)
            self._leave_forward(self.root)
        if self.copied_out:
            self.ledger.free(("gather", self.copied_out.key))
            self.copied_out = None
        self.ledger.alloc("seed", FP32_NBYTES, Category.TEMPORARY)  # the gradient of the loss

    def _forward_of(self, segment: Segment) -> None:
        group = self.groups[segment.unit]
        if not group.is_root:
            self._at(Phase.FORWARD, OpKind.UNSHARD.label, group)
            self._unshard(group)
            self._copy_out(group, in_forward=True)
        self._at(Phase.FORWARD, OpKind.FORWARD.label, group)
        for kind, place in self._places(segment):
            self.ledger.replay(passes_with_grads(self.graph.sizes, kind, place)[0])
        if not group.is_root:
            self._at(Phase.FORWARD, OpKind.RESHARD.label, group)
            self._leave_forward(group)
        if segment.sublayers[0].kind is not SublayerKind.EMBED and not norm_saves_input(self.graph.sizes):
            row = self.graph.sizes.rows(self.spec.model.hidden)
            self.ledger.replay([(Category.ACTIVATION, -row)])  # the caller held the input till here

    def _leave_forward(self, group: FSDPGroup) -> None:
        self.forward_order.append(group)
        if self.spec.strategy is Strategy.SHARD_GRAD_OP:
            return
        if (num_parts := self.spec.settings.reshard_ranks) is None:
            self._reshard(group)
            return
        self.whole.discard(group.key)
        self.parted.add(group.key)
        for numel in group.padded_numels:
            nbytes = numel * self.compute.itemsize
            self.ledger.replay([(Category.SHARDED_PARAM, nbytes // num_parts), (Category.UNSHARDED_PARAM, -nbytes)])

    def _places(self, segment: Segment) -> Iterator[tuple[SublayerKind, Place]]:
        last = len(segment.sublayers) - 1
        for position, sublayer in enumerate(segment.sublayers):
            yield sublayer.kind, Place(position == 0, position == last, self.spec.model.tied, in_graph=True)

    # ---- backward ----

    def _backward(self) -> None:
        segments = self.graph.plan.segments
        # Under no_sync a gradient that is there already takes what is made; a cast one does not.
        adds = not self.spec.reduces_each and not self.is_first and self.wire is self.compute
        if self.root:
            self._at(Phase.BACKWARD, OpKind.UNSHARD.label, self.root)
            self._enter_backward(self.root)
        for segment in reversed(segments):
            group = self.groups[segment.unit]
            if not group.is_root:
                self._at(Phase.BACKWARD, OpKind.UNSHARD.label, group)
                self._enter_backward(group)
            self._at(Phase.BACKWARD, OpKind.BACKWARD.label, group)
            for kind, place in reversed(list(self._places(segment))):
                self.ledger.replay(_backward_pass(self.graph.sizes, kind, place, adds))
            # What the first segment reads takes no gradient, and the root is left last.
            if not group.is_root and segment is not segments[0]:
                self._leave_backward(group)
        self._leave_backward(self.root or self.groups[segments[0].unit])
        self._finish_backward()
        self.ledger.free("seed")

    def _enter_backward(self, group: FSDPGroup) -> None:
        """Make the group whole, and start the gather of the group that forward left before it."""
        self._unshard(group)
        self._copy_out(group, in_forward=False)
        position = self.forward_order.index(group)
        if position:
            self._unshard(self.forward_order[position - 1])

    def _leave_backward(self, group: FSDPGroup) -> None:
        self._at(Phase.BACKWARD, OpKind.REDUCE_GRAD.label, group)
        grads = [numel * self.compute.itemsize for numel in group.numels]
        held_cast = not self.spec.reduces_each and self.wire is not self.compute  # of earlier micro-batches
        if held_cast and not self.is_first:
            self.ledger.replay((Category.UNSHARDED_GRAD, -nbytes) for nbytes in grads)  # added to them
        self._reshard(group)
        if self.reduces:
            wide = [numel * self.wire.itemsize for numel in group.numels]
            self._reduce(group, wide if held_cast and not self.is_first else grads)
        elif held_cast and self.is_first:
            for numel, nbytes in zip(group.numels, grads, strict=True):
                cast = numel * self.wire.itemsize
                self.ledger.replay([(Category.UNSHARDED_GRAD, cast), (Category.UNSHARDED_GRAD, -nbytes)])

    def _reduce(self, group: FSDPGroup, grads: list[int]) -> None:
        """Copy the gradients in, and let the reduced shard become the gradient. See [Note: reduced twice]."""
        ledger, spec, wire, shard = self.ledger, self.spec, self.wire, group.shard_numel
        if self.reduced:
            ledger.free(("reduce", self.reduced.key))
        self.reduced = group
        ledger.alloc(("reduce", group.key), group.whole_numel * wire.itemsize, Category.REDUCE_SCATTER_BUFFER)
        width = grads[0] // group.numels[0]
        ledger.replay(_copy_in_scratch(group.numels, group.padded_numels, width, width != wire.itemsize))
        fresh = [(Category.UNSHARDED_GRAD, -nbytes) for nbytes in reversed(grads)]
        num_kept = 1 if group.num_shards > 1 else 0
        ledger.replay(fresh[num_kept:])
        casts, adds = wire is not self.param, spec.reduces_each and not self.is_first
        becomes_grad, nbytes = not casts and not adds, shard * wire.itemsize
        output = Category.SHARDED_GRAD if becomes_grad else Category.REDUCE_SCATTER_BUFFER
        ledger.replay([(output, nbytes)])
        self._send(CollectiveOp.REDUCE_SCATTER, wire, group.whole_numel, group)
        self._send_across(shard, group)
        goes = [] if becomes_grad or spec.strategy.replicates else [(output, -nbytes)]
        if not becomes_grad and spec.strategy.replicates:
            self.kept[group.key] = nbytes
        if casts:
            cast = shard * self.param.itemsize
            ledger.replay([(_CAST if adds else Category.SHARDED_GRAD, cast), *goes])
            goes = [(_CAST, -cast)] if adds else []
        ledger.replay([*fresh[:num_kept], *goes])

    def _finish_backward(self) -> None:
        """The root's callback: fully_shard lets go of what it held, the root's first."""
        for group in sorted(self.groups, key=lambda group: not group.is_root):
            if group.key in self.kept:
                self.ledger.replay([(Category.REDUCE_SCATTER_BUFFER, -self.kept.pop(group.key))])
        if self.reduced:
            self.ledger.free(("reduce", self.reduced.key))
            self.reduced = None
        self.forward_order.clear()

    # ---- parameters ----

    def _unshard(self, group: FSDPGroup) -> None:
        """Start the gather, unless it is under way or over. One rank has nothing to gather."""
        if group.key in self.whole or group.key in self.started:
            return
        self.started.add(group.key)
        if group.num_shards == 1:
            return
        among = self.spec.settings.reshard_ranks if group.key in self.parted else None
        casts = self.compute is not self.param
        if casts:
            self.ledger.alloc("cast", group.whole_numel // (among or group.num_shards) * self.compute.itemsize, _CAST)
        nbytes = group.whole_numel * self.compute.itemsize
        self.ledger.alloc(("gather", group.key), nbytes, Category.ALL_GATHER_BUFFER)
        self._send(CollectiveOp.ALL_GATHER, self.compute, group.whole_numel, group, among)
        if casts:
            self.ledger.free("cast")

    def _copy_out(self, group: FSDPGroup, *, in_forward: bool) -> None:
        """Out of the gathered buffer into a tensor a parameter. See [Note: gathered twice]."""
        if group.key not in self.started:
            return
        self.started.discard(group.key)
        self.whole.add(group.key)
        casts = group.num_shards == 1 and self.compute is not self.param
        self.ledger.replay(_whole(group.padded_numels, self.compute, casts))
        if group.key in self.parted:
            self.parted.discard(group.key)
            num_parts = self.spec.settings.reshard_ranks or 1
            parts = [numel * self.compute.itemsize // num_parts for numel in group.padded_numels]
            self.ledger.replay((Category.SHARDED_PARAM, -nbytes) for nbytes in parts)
        if group.num_shards == 1:
            return
        if not in_forward:
            self.ledger.free(("gather", group.key))
            return
        if self.copied_out:
            self.ledger.free(("gather", self.copied_out.key))
        self.copied_out = group

    def _reshard(self, group: FSDPGroup) -> None:
        self.whole.discard(group.key)
        itemsize = self.compute.itemsize
        self.ledger.replay((Category.UNSHARDED_PARAM, -numel * itemsize) for numel in group.padded_numels)

    # ---- the wire ----

    def _send(self, op: CollectiveOp, dtype: DType, numel: int, group: FSDPGroup, among: int | None = None) -> None:
        """among: how many ranks, if not all of the shard group."""
        if group.num_shards == 1:
            return
        payload = numel * dtype.itemsize
        artefacts.start_copies(self.ledger, op, payload, group.key)
        if op is CollectiveOp.REDUCE_SCATTER:
            self.ledger.replay(_average(dtype))
        artefacts.end_copies(self.ledger, group.key)
        name = Group.SHARD if among or self.spec.strategy.replicates else Group.ALL
        phase, _, unit = self.ledger.where
        self.collectives.append(Collective(op, dtype.value, among or group.num_shards, payload, phase, unit, name))

    def _send_across(self, numel: int, group: FSDPGroup) -> None:
        """All-reduce a gradient shard among the ranks that hold the same one."""
        if not self.spec.strategy.replicates or self.spec.ranks == 1:
            return
        self.ledger.replay(_average(self.wire))
        if (num_replicas := self.spec.num_replicas) == 1:
            return
        phase, _, unit = self.ledger.where
        payload = numel * self.wire.itemsize
        self.collectives.append(
            Collective(CollectiveOp.ALL_REDUCE, self.wire.value, num_replicas, payload, phase, unit, Group.REPLICA)
        )


_CAST = Category.TEMPORARY


@lru_cache(maxsize=1024)
def _backward_pass(sizes: Sizes, kind: SublayerKind, place: Place, adds: bool) -> Changes:
    """One sublayer's backward in one stretch: fully_shard waits for all gradients of a group.

    adds: gradients are there, and what is made is added to them.
    """
    if adds:
        return passes(replace(sizes, fresh=None), kind, place)[1]
    _, up_to_grads, rest = passes_with_grads(sizes, kind, place)
    return Changes(chain(*(changes for changes, _ in up_to_grads), rest))


@lru_cache(maxsize=1024)
def _whole(padded_numels: tuple[int, ...], compute: DType, casts: bool) -> Changes:
    """A tensor a parameter. casts: each from a copy of a single rank's shard; see [Note: who lets go last]."""
    changes: list[Change] = []
    before = 0
    for numel in padded_numels:
        nbytes = numel * compute.itemsize
        if casts:
            changes.append((_CAST, nbytes))
            changes += [(_CAST, -before)] if before else []
            before = nbytes
        changes.append((Category.UNSHARDED_PARAM, nbytes))
    return Changes([*changes, (_CAST, -before)] if before else changes)


@lru_cache(maxsize=1024)
def _copy_in_scratch(numels: tuple[int, ...], padded_numels: tuple[int, ...], width: int, casts: bool) -> Changes:
    """See [Note: scratch]. width: bytes of a gradient's element."""
    padded = [whole * width for numel, whole in zip(numels, padded_numels, strict=True) if whole != numel]
    scratch = Category.KERNEL_SCRATCH
    in_turn = [numel * width for numel in padded_numels] if casts else []
    return Changes(
        (
            *((scratch, nbytes) for nbytes in padded),
            *chain(*(((scratch, nbytes), (scratch, -nbytes)) for nbytes in in_turn)),
            *((scratch, -nbytes) for nbytes in padded),
        )
    )


@lru_cache
def _average(dtype: DType) -> Changes:
    """gloo divides a sum by how many it is of."""
    return Changes((Category.BACKEND_COPY, nbytes) for _, nbytes in artefacts.number(dtype.itemsize))


@lru_cache(maxsize=64)
def _batch_nbytes(spec: RunSpec) -> tuple[int, ...]:
    """Tokens, targets and, for rotary models, the two tables."""
    ids = NBYTES_PER_TOKEN_ID * spec.num_tokens_per_rank
    tables = (input_nbytes(spec) - 2 * ids) // 2
    return (ids, ids, *((tables, tables) if tables else ()))
