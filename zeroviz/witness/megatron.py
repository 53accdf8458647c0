"""megatron-core's distributed optimizer by arithmetic: what every rank holds at rest, in each op of a step, and sends.

[Note: order] A gradient is added to its place in the buffer as soon as it is there, and dropped. With one bucket the
whole buffer is divided by N and reduce-scattered when backward is over; with `bucket_numel` each bucket is, as soon as
all its gradients are there. AdamW updates the rank's pieces one by one, they are copied into the parameters' buffer,
and that is gathered bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeroviz import artefacts
from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.events import Change, Changes, Events, Where
from zeroviz.ledger import Ledger
from zeroviz.models import NamedShape
from zeroviz.rank_trace import AlikeRanks, RankTrace
from zeroviz.schedule import OpKind, Phase
from zeroviz.settings import value_of
from zeroviz.spec import DType, RunSpec
from zeroviz.wire import Collective
from zeroviz.witness.graph import ZERO_GRAD, Graph
from zeroviz.witness.megatron_buffer import Bucket, alike_stretches, buckets, owned_pieces

NUMBER_NBYTES = 4  # a flag, a norm, a scale


def predicted(spec: RunSpec) -> Sequence[RankTrace]:
    """Every rank's step. Ranks differ in what they own: in states, step counters and the update's temporaries."""
    parts = buckets(spec)
    whole = parts[-1].stop
    gradients, sync = _Walk(spec, parts), _Walk(spec, parts)
    gradients.gradients()
    sync.sync_parameters()
    norm = Collective(CollectiveOp.ALL_REDUCE, DType.FP32.value, spec.ranks, NUMBER_NBYTES, Phase.OPTIMIZER.label, "")
    clips = (norm,) if spec.clip_norm is not None and spec.ranks > 1 else ()
    collectives = (*gradients.collectives, *clips, *sync.collectives)
    before, after = gradients.ledger.events, sync.ledger.events
    stretches = []
    for ranks in alike_stretches(parts, spec.ranks):
        pieces = owned_pieces(parts, spec.ranks, ranks.start)
        rank = RankTrace(
            rank=ranks.start,
            rest=rest_of(spec, whole, pieces),
            events=_joined(before, _update(spec, pieces), after),
            collectives=collectives,
            padding_nbytes=padding_nbytes(spec, whole),
            step_counter_nbytes=len(pieces) * DType.FP32.itemsize + flags_nbytes(spec),
        )
        stretches.append((ranks, rank))
    return AlikeRanks(stretches)


def rest_of(spec: RunSpec, whole: int, pieces: Sequence[int]) -> dict[Category, int]:
    """What a rank that owns `pieces` holds between steps, of buffers of `whole` elements. In fp32 the parameters are
    their own master."""
    recipe, owned = spec.recipe, sum(pieces)
    rest = {
        Category.UNSHARDED_PARAM: whole * recipe.param.itemsize,
        Category.UNSHARDED_GRAD: whole * recipe.grad.itemsize,
        Category.OPTIMIZER_STATE: recipe.moments_nbytes(owned),
    }
    if recipe.param is not recipe.update:
        rest[Category.MASTER_PARAM] = owned * recipe.update.itemsize
    return rest


def padding_nbytes(spec: RunSpec, whole: int) -> int:
    """Bytes of padding at rest: in both buffers, of `whole` elements, the same on every rank."""
    recipe = spec.recipe
    return (whole - spec.model.num_params) * (recipe.param.itemsize + recipe.grad.itemsize)


def flags_nbytes(spec: RunSpec) -> int:
    """Two numbers the library keeps beside the step counters: the loss's scale, and in fp32 an overflow flag."""
    return NUMBER_NBYTES * (1 if spec.recipe.param is DType.BF16 else 2)


class _Walk:
    """Parts of a step that are alike on every rank."""

    def __init__(self, spec: RunSpec, parts: Sequence[Bucket]) -> None:
        self.spec, self.buckets = spec, parts
        self.ledger = Ledger()
        self.collectives: list[Collective] = []
        self._graph = Graph(spec, fresh=Category.TEMPORARY)
        self._overlaps = value_of(spec.settings, "bucket_numel", spec.impl) is not None
        # The bucket goes out with the last of its gradients.
        number_of = {extent.shape: number for number, bucket in enumerate(self.buckets) for extent in bucket.extents}
        last = {number_of[shape]: shape for shape in self._graph.ready_order} if self._overlaps else {}
        self._completes = {shape: number for number, shape in last.items()}
        self._reduces = True

    def gradients(self) -> None:
        """Forward and backward of every micro-batch; gradients are reduced in the last."""
        graph, ledger = self._graph, self.ledger
        ledger.at(Phase.FORWARD.label, ZERO_GRAD, "")
        for number in reversed(range(self.spec.accumulation)):
            self._reduces = number == 0
            graph.load_batch(ledger)
            graph.forward(ledger)
            graph.backward(ledger, self._ready)
            if self._reduces:
                self._finish()
            graph.drop_batch(ledger)

    def _finish(self) -> None:
        self.ledger.at(Phase.BACKWARD.label, OpKind.REDUCE_GRAD.label, "")
        for number in range(len(self.buckets)):
            if not self._overlaps:
                self._reduce(number)
            artefacts.end_copies(self.ledger, number)

    def sync_parameters(self) -> None:
        """Every bucket of parameters is gathered."""
        self.ledger.at(Phase.OPTIMIZER.label, OpKind.SYNC_PARAM.label, "")
        for number, bucket in enumerate(self.buckets):
            self._send(CollectiveOp.ALL_GATHER, self.spec.recipe.param, bucket, number)

    def _ready(self, shape: NamedShape) -> None:
        """The library's hook: the gradient is added to its place, and autograd drops it when the hook is over."""
        grad, fresh = self.spec.recipe.grad, self._graph.nbytes(shape)
        if grad is not self.spec.recipe.compute:
            cast = shape.numel * grad.itemsize
            self.ledger.replay([(Category.KERNEL_SCRATCH, cast), (Category.KERNEL_SCRATCH, -cast)])
        if self._reduces and (number := self._completes.get(shape)) is not None:
            self._reduce(number)
        self.ledger.replay([(Category.TEMPORARY, -fresh)])

    def _reduce(self, number: int) -> None:
        if self.spec.ranks > 1:
            self.ledger.replay(artefacts.number(self.spec.recipe.grad.itemsize))  # divided by N
        self._send(CollectiveOp.REDUCE_SCATTER, self.spec.recipe.grad, self.buckets[number], number)

    def _send(self, op: CollectiveOp, dtype: DType, bucket: Bucket, number: int) -> None:
        """The library calls the backend for one rank too, which then copies and sends nothing."""
        payload = bucket.numel * dtype.itemsize
        phase, _, unit = self.ledger.where
        if op is CollectiveOp.ALL_GATHER:  # coalesced, gloo copies what a rank sends, then receives in a copy
            for copy in (payload // self.spec.ranks, payload):
                self.ledger.replay([(Category.BACKEND_COPY, copy), (Category.BACKEND_COPY, -copy)])
        else:
            artefacts.start_copies(self.ledger, op, payload, number)
        if self.spec.ranks > 1:
            self.collectives.append(Collective(op, dtype.value, self.spec.ranks, payload, phase, unit))


def _update(spec: RunSpec, pieces: tuple[int, ...]) -> Events:
    """The optimizer's step over the rank's pieces."""
    ledger = Ledger()
    ledger.at(Phase.OPTIMIZER.label, OpKind.OPTIMIZER_STEP.label, "")
    if spec.clip_norm is not None:
        ledger.replay(_clip(pieces))
    ledger.replay(artefacts.update_of(spec.optimizer, pieces, spec.recipe.moments, Category.TEMPORARY))
    return ledger.events


def _clip(pieces: tuple[int, ...]) -> Iterator[Change]:
    """The norm of the mean gradient, and each piece scaled in a copy, as if the norm always exceeded the bound."""
    one, held = (Category.TEMPORARY, NUMBER_NBYTES), (Category.TEMPORARY, len(pieces) * NUMBER_NBYTES)
    dropped, given_back = (Category.TEMPORARY, -NUMBER_NBYTES), (Category.TEMPORARY, -held[1])
    yield one  # an overflow flag
    yield from (one for _ in pieces)  # each one's norm
    yield from (held, one, given_back)  # the norm of these, side by side
    yield one  # once more, on the device
    yield from (dropped for _ in pieces)
    yield dropped
    yield one  # squared, which is what ranks add up
    yield from (dropped, dropped, dropped)
    yield one
    for numel in pieces:
        taken = artefacts.number(DType.FP32.itemsize)
        yield from (*taken[:2], (Category.TEMPORARY, numel * DType.FP32.itemsize), *taken[2:])
        yield (Category.TEMPORARY, -numel * DType.FP32.itemsize)
    yield dropped


def _joined(*events: Events) -> Events:
    """One after the other. Sums of tuples: of hundreds of ranks each has thousands of parts, nearly all shared."""
    wheres: tuple[Where, ...] = ()
    stretches: tuple[Changes, ...] = ()
    for each in events:
        wheres += tuple(each.wheres)
        stretches += tuple(each.stretches)
    return Events(wheres, stretches)
