"""DeepSpeed's stage 3 by arithmetic: a step, op by op.

[Note: the order] Parameters come and go as `deepspeed_gathers` says. A gradient is copied into the bucket as soon as it
is there, and dropped. When the next one would not fit, the bucket's are put together once more, rank by rank with the
padding of each, divided by N and reduce-scattered; what is the rank's goes into the buffer that is held for good. In
the update, the parameters that stay whole are freed as well, and gathered again one by one. (stage3.py.)

[Note: by sublayer] In backward a module's parameters are gathered, where that is needed at all, as its segment begins:
earlier than the library does. It takes a model of some 1e9 parameters to need it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import pairwise

from zeroviz import artefacts, sublayers
from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.events import Change
from zeroviz.kernels import norm_saves_input
from zeroviz.models import Family, NamedShape, SublayerKind
from zeroviz.partition import Place, Segment
from zeroviz.schedule import OpKind, Phase
from zeroviz.settings import value_of
from zeroviz.spec import DType, RunSpec
from zeroviz.tape import Sizes, Tape
from zeroviz.witness.deepspeed_gathers import Act, Deed, Spot, deeds_of, modules_of
from zeroviz.witness.deepspeed_parts import (
    WIDE_NORM_NBYTES,
    chunk_numel,
    is_persistent,
    owned_numel,
    parameter_order,
    sub_groups,
)
from zeroviz.witness.deepspeed_walk import FP32, Walk


class Stage3(Walk):
    """See the notes of the module."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        super().__init__(spec, rank)
        self.bucket_numel: int = value_of(spec.settings, "bucket_numel", spec.impl)
        self.param = spec.recipe.param
        self.deeds = deeds_of(spec)
        self._bucket: list[NamedShape] = []
        self._too_large: list[NamedShape] = []
        self._freed_after: dict[str, list[Deed]] = {}
        self._segment = -1

    # ---- parameters ----

    def gathered(self, shape: NamedShape) -> int:
        """Elements of the parameter gathered, padding included."""
        return chunk_numel(shape.numel, self.spec.ranks) * self.spec.ranks

    def do(self, deeds: Iterable[Deed]) -> None:
        if self.spec.ranks == 1:
            return  # a rank's chunk is the parameter, and is used as it is
        item = self.param.itemsize
        for deed in deeds:
            alone = len(deed.shapes) == 1
            match deed.act:
                case Act.GATHER:
                    numel = sum(map(self.gathered, deed.shapes))
                    self.make(numel * item, Category.UNSHARDED_PARAM if alone else Category.ALL_GATHER_BUFFER)
                    artefacts.start_copies(self.ledger, CollectiveOp.ALL_GATHER, numel * item, "parameters")
                    self.send(CollectiveOp.ALL_GATHER, self.param, numel)
                    self._alone |= {shape.name for shape in deed.shapes} if alone else set()
                case Act.COPY_OUT:
                    for shape in deed.shapes:
                        self.make(shape.numel * item, Category.UNSHARDED_PARAM)
                case Act.FREE_BUFFER:
                    self.drop(sum(map(self.gathered, deed.shapes)) * item, Category.ALL_GATHER_BUFFER)
                case Act.FREE:
                    for shape in deed.shapes:
                        numel = self.gathered(shape) if shape.name in self._alone else shape.numel
                        self._alone.discard(shape.name)
                        self.drop(numel * item, Category.UNSHARDED_PARAM)

    def forward(self) -> None:
        graph, ledger, deeds = self.graph, self.ledger, self.deeds.forward_begin
        self._alone: set[str] = set()
        self.do(deeds.get((-1, -1, -1), ()))
        for number, segment in enumerate(graph.plan.segments):
            self.do(deeds.get((number, -1, -1), ()))
            ledger.at(Phase.FORWARD.label, OpKind.FORWARD.label, graph.unit_name(segment))
            self._forward_of(number, segment)
            if segment.sublayers[0].kind is not SublayerKind.EMBED and not norm_saves_input(graph.sizes):
                ledger.replay([(Category.ACTIVATION, -graph.sizes.rows(graph.sizes.model.hidden))])

    def _forward_of(self, number: int, segment: Segment) -> None:
        last = len(segment.sublayers) - 1
        for position, sublayer in enumerate(segment.sublayers):
            place = Place(position == 0, position == last, self.spec.model.tied, in_graph=True)
            self.do(self.deeds.forward_begin.get((number, position, -1), ()))
            names = [name.rpartition(".")[2] for name, _ in modules_of(sublayer)]
            pieces = _pieces(self.graph.sizes, sublayer.kind, place, names)
            for index, piece in enumerate(pieces):
                spot: Spot = (number, position, index)
                self.do(self.deeds.forward_begin.get(spot, ()))
                self.ledger.replay(piece)
                self.do(self.deeds.forward_end.get(spot, ()))
            self.do(self.deeds.forward_end.get((number, position, -1), ()))

    def backward(self) -> None:
        graph, ledger, begin = self.graph, self.ledger, self.deeds.backward_begin
        self.do(begin.get((-1, -1, -1), ()))
        for number, segment in reversed(list(enumerate(graph.plan.segments))):
            self.do(begin.get((number, -1, -1), ()))
            ledger.at(Phase.BACKWARD.label, OpKind.BACKWARD.label, graph.unit_name(segment))
            if number == len(graph.plan.segments) - 1:
                ledger.replay([(Category.ACTIVATION, -FP32)])  # the head uses the gradient of the loss up
            self._freed_after = {}
            for position, sublayer in reversed(list(enumerate(segment.sublayers))):
                self.do(begin.get((number, position, -1), ()))
                for index, (_, shapes) in reversed(list(enumerate(modules_of(sublayer)))):
                    self.do(begin.get((number, position, index), ()))
                    freed = self.deeds.backward_end.get((number, position, index), ())
                    self._freed_after.setdefault(_last_ready(shapes).name, []).extend(freed)
            graph.backward_of(ledger, segment, self.ready)
            for freed in self._freed_after.values():  # a tied one's gradient is there later
                self.do(freed)

    # ---- gradients ----

    def ready(self, shape: NamedShape) -> None:
        numel = sum(each.numel for each in self._bucket)
        if numel and numel + shape.numel > self.bucket_numel:
            self._reduce()
        self._bucket.append(shape)
        if shape.numel <= self.bucket_numel:
            self.drop(self.graph.nbytes(shape))
        self.do(self._freed_after.pop(shape.name, ()))

    def finish(self) -> None:
        self._reduce()
        self.do(self.deeds.left)

    def _reduce(self) -> None:
        shapes, self._bucket = self._bucket, []
        if not shapes:
            return
        item, recipe = self.param.itemsize, self.spec.recipe
        numel = sum(map(self.gathered, shapes))
        padding = numel - sum(shape.numel for shape in shapes)
        in_place = len(shapes) == 1 and not padding
        self.make(padding * item)
        self.make(0 if in_place else numel * item)
        self.divide(self.param)
        artefacts.start_copies(self.ledger, CollectiveOp.REDUCE_SCATTER, numel * item, "bucket")
        artefacts.end_copies(self.ledger, "bucket")
        self.send(CollectiveOp.REDUCE_SCATTER, self.param, numel)
        self.drop(padding * item)
        owned = sum(owned_numel(self.spec, shape, self.rank) for shape in shapes)
        cast = 0 if recipe.grad is self.param else owned * recipe.grad.itemsize
        self.make(cast)
        self.drop(sum(self.graph.nbytes(shape) for shape in shapes if shape.numel > self.bucket_numel))
        self.drop(0 if in_place else numel * item)
        self.drop(cast)

    # ---- the update ----

    def update(self) -> None:
        spec, ledger, item = self.spec, self.ledger, self.param.itemsize
        order = parameter_order(spec)
        whole = [self.gathered(shape) for shape in order if is_persistent(spec, shape)]
        for numel in whole:
            self.drop(numel * item, Category.UNSHARDED_PARAM)
        self.norm([chunk_numel(shape.numel, spec.ranks) for shape in order])
        self.make(3 * WIDE_NORM_NBYTES)  # of the only group, in all, over the scale
        for numel in sub_groups(spec):
            if spec.recipe.grad is DType.FP32:
                self.make(numel * FP32)
            else:
                self.make(numel * spec.recipe.grad.itemsize)
                self.make(numel * FP32)
                self.drop(numel * spec.recipe.grad.itemsize)
            ledger.replay(artefacts.update_of(spec.optimizer, (numel,), DType.FP32, Category.TEMPORARY))
            self.drop(numel * FP32)
        for numel in whole:
            self.make(numel * item, Category.UNSHARDED_PARAM)
        for numel in whole:
            artefacts.start_copies(ledger, CollectiveOp.ALL_GATHER, numel * item, "parameters")
            self.send(CollectiveOp.ALL_GATHER, self.param, numel)
        self.drop(3 * WIDE_NORM_NBYTES)


def _last_ready(shapes: tuple[NamedShape, ...]) -> NamedShape:
    """Of a module's gradients the last that is there: a linear layer's weight, a norm's bias."""
    return shapes[-1] if len(shapes[0].shape) == 1 else shapes[0]


# What the forward of a sublayer's module makes first, by the name it has on the tape; a norm comes first of all.
_FIRST = {
    (Family.GPT2, SublayerKind.ATTENTION): {"c_attn": "qkv", "c_proj": "branch"},
    (Family.GPT2, SublayerKind.MLP): {"c_fc": "up", "c_proj": "branch"},
    (Family.LLAMA, SublayerKind.ATTENTION): {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "branch"},
    (Family.LLAMA, SublayerKind.MLP): {"gate_proj": "gate", "up_proj": "up", "down_proj": "branch"},
}


class _NamingTape(Tape):
    """Remembers before how many changes each name was made first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_before: dict[str, int] = {}
        self.num_changes = 0

    def alloc(self, key: Hashable, nbytes: int, category: Category) -> None:
        self.num_before.setdefault(str(key), self.num_changes)
        self.num_changes += 1
        super().alloc(key, nbytes, category)

    def free(self, *keys: Hashable) -> None:
        self.num_changes += len(keys)
        super().free(*keys)


def _pieces(sizes: Sizes, kind: SublayerKind, place: Place, names: list[str]) -> list[list[Change]]:
    """A sublayer's forward, cut where its modules begin."""
    tape = _NamingTape()
    changes = list(sublayers._pass_forward(tape, sizes, kind, place))
    offset = tape.num_changes - len(changes)  # what was booked before the pass: its input
    first = _FIRST.get((sizes.model.family, kind), {})
    if kind is SublayerKind.HEAD:
        first = {names[-1]: "logits"}
    cuts = [0, *(tape.num_before[first[name]] - offset for name in names[1:]), len(changes)]
    return [changes[start:stop] for start, stop in pairwise(cuts)]
