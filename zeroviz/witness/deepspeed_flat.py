"""DeepSpeed's stages 0, 1 and 2 by arithmetic: a step, op by op.

[Note: the bucket] `reduce_bucket_size` elements, whatever the model, from the first gradient to the end of backward.
Under stage 2 a gradient is copied into it as soon as it is there, and dropped; under stage 1 all of them stay until
backward is over, over all micro-batches, and are then copied in the order of the parameters. When the next one would
not fit, what is in the bucket is divided by N, put together once more, all-reduced, and what falls into the rank's part
copied back. So both stages all-reduce (2P, not the P of a reduce-scatter), and a bucket of 5e8 elements (2 GB in fp32,
1 GB in bf16) outweighs what stage 2 saves on a model of fewer parameters. A gradient larger than the bucket goes by
itself, cut where parts begin. (stage_1_and_2.py: `reduce_independent_p_g_buckets_and_remove_grads`, `average_tensor`.)

[Note: the owner's gradients] The rank keeps the gradients of all parameters its part touches, whole, in one buffer made
with the first bucket that has one of them, and later puts its part of them together. fp32 gradients of bf16 parameters
go into a buffer of exactly the part instead, and are summed there, but they are all-reduced in bf16.

[Note: one optimizer of its own] Stage 1 of bf16 parameters with fp32 gradients is another class: the fp32 gradients of
the whole model are held for good, bf16 ones besides till the update is over, and all are reduced at once, in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from zeroviz import artefacts
from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.models import NamedShape
from zeroviz.settings import value_of
from zeroviz.spec import DType, RunSpec, Strategy
from zeroviz.witness.deepspeed_parts import NORM_NBYTES, flat_numel, parameter_order, part_numel
from zeroviz.witness.deepspeed_walk import FP32, Walk

STAGE_0_NUMEL = 500_000_000  # MEMORY_OPT_ALLREDUCE_SIZE: elements after which stage 0 begins another all-reduce


class Kept(Walk):
    """Gradients stay whole till the step is over."""

    keeps_gradients = True

    def ready(self, shape: NamedShape) -> None:
        if self.number:  # added to the one that is there
            self.drop(self.graph.nbytes(shape))


class Stage0(Kept):
    """Whole gradients, put together and all-reduced when backward is over."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        super().__init__(spec, rank)
        self._order = parameter_order(spec)

    def finish(self) -> None:
        if not self.is_last:
            return
        grad = self.spec.recipe.grad
        for numel in self._calls():
            self.make(numel * grad.itemsize)
            self.send(CollectiveOp.ALL_REDUCE, grad, numel)
            if self.spec.ranks > 1:
                self.divide(grad)
            self.drop(numel * grad.itemsize)

    def _calls(self) -> Iterator[int]:
        numel = 0
        for shape in self._order:
            numel += shape.numel
            if numel > STAGE_0_NUMEL:
                yield numel
                numel = 0
        if numel:
            yield numel

    def update(self) -> None:
        recipe = self.spec.recipe
        numels = tuple(shape.numel for shape in self._order)
        wide = [numel * FP32 for numel in numels] if recipe.master else []
        for nbytes in wide:  # the norm, of one gradient after the other
            self.make(nbytes)
            self.drop(nbytes)
        for nbytes in wide:
            self.make(nbytes)
        self.ledger.replay(artefacts.update_of(self.spec.optimizer, numels, recipe.moments, Category.TEMPORARY))
        for nbytes in wide:
            self.drop(nbytes)
        self.drop(sum(numels) * recipe.grad.itemsize, Category.UNSHARDED_GRAD)


class WholeGradients(Kept):
    """See [Note: one optimizer of its own]."""

    def finish(self) -> None:
        """The bf16 gradients are added to the fp32 ones; these are reduced, as bf16, with the last micro-batch."""
        for shape in parameter_order(self.spec):
            self.make(shape.numel * FP32)
            self.drop(shape.numel * FP32)
        if self.is_last:
            sent = flat_numel(self.spec)
            self.make(sent * DType.BF16.itemsize)
            self.send(CollectiveOp.ALL_REDUCE, DType.BF16, sent)
            self.divide(DType.BF16)
            self.drop(sent * DType.BF16.itemsize)

    def update(self) -> None:
        spec = self.spec
        self.make(NORM_NBYTES)
        update = artefacts.update_of(spec.optimizer, (part_numel(spec),), DType.FP32, Category.TEMPORARY)
        self.ledger.replay(update)
        _gather(self)
        self.drop(NORM_NBYTES)
        self.drop(spec.model.num_params * spec.recipe.param.itemsize, Category.UNSHARDED_GRAD)


class Run(NamedTuple):
    """Slices of as many elements each, of neighbouring owners: of a million parts nearly all are alike."""

    owner: int
    num: int
    numel: int

    @property
    def stop(self) -> int:
        """The owner after the last."""
        return self.owner + self.num


class Bucketed(Walk):
    """Stages 1 and 2. See the notes of the module."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        super().__init__(spec, rank)
        self.keeps_gradients = spec.strategy is Strategy.ZERO1
        self._kind = Category.UNSHARDED_GRAD if self.keeps_gradients else Category.TEMPORARY
        self.bucket_numel: int = value_of(spec.settings, "bucket_numel", spec.impl)
        self.param, self.part = spec.recipe.param, part_numel(spec)
        self.compact = spec.recipe.grad is not spec.recipe.param
        self._start = dict(_starts(spec))
        self._bucket: list[NamedShape] = []
        self._bucket_nbytes = 0
        self._is_first = True
        self._own_nbytes = 0  # of the owner's gradients, of this micro-batch
        self._summed_nbytes = 0  # of those before it
        self._whole_nbytes = 0  # of stage 1's gradients too large for the bucket

    def micro_batch(self) -> None:
        self._is_first = True
        super().micro_batch()

    def ready(self, shape: NamedShape) -> None:
        if self._is_first:  # a new bucket; under stage 1 that of the micro-batch before is still there
            self._is_first = False
            self.drop(self._bucket_nbytes, Category.BUCKET)
            self._bucket_nbytes = self.bucket_numel * self.param.itemsize
            self.make(self._bucket_nbytes, Category.BUCKET)
        if not self.keeps_gradients:
            self._put(shape)
        elif self.number:  # added to the one that is there
            self.drop(self.graph.nbytes(shape))

    def finish(self) -> None:
        if self.keeps_gradients:
            if not self.is_last:
                return
            for shape in parameter_order(self.spec):
                self._put(shape)
        self._reduce()
        self._keep()
        self.drop(self._whole_nbytes, self._kind)
        self.drop(self._bucket_nbytes, Category.BUCKET)
        self._whole_nbytes = self._bucket_nbytes = 0

    def _put(self, shape: NamedShape) -> None:
        """Copy the gradient into the bucket, after what would not leave room for it has gone out."""
        if sum(each.numel for each in self._bucket) + shape.numel > self.bucket_numel:
            self._reduce()
        self._bucket.append(shape)
        if shape.numel <= self.bucket_numel:
            self.drop(self.graph.nbytes(shape), self._kind)

    def _reduce(self) -> None:
        """All-reduce what is in the bucket, and keep what is the rank's."""
        shapes, self._bucket = self._bucket, []
        if not shapes:
            return
        owned = [shape for shape in shapes if self._touches(shape)]
        if self.compact and owned and not self._own_nbytes and not self._summed_nbytes:
            self._own_nbytes = self.part * FP32
            self.make(self._own_nbytes, Category.SHARDED_GRAD)
        self.divide(self.param)
        for slices in self._calls(self._slices(shapes)):
            numel = sum(run.num * run.numel for run in slices)
            copied = numel * self.param.itemsize if sum(run.num for run in slices) > 1 else 0
            self.make(copied)
            self.send(CollectiveOp.ALL_REDUCE, self.param, numel)
            for run in slices:
                if self.compact and run.owner <= self.rank < run.stop:
                    self.make(run.numel * FP32)
                    self.drop(run.numel * FP32)
            self.drop(copied)
        if owned and not self.compact and not self._own_nbytes:
            self._own_nbytes = self._touched_numel * self.param.itemsize
            self.make(self._own_nbytes, self._own)
        if shapes[0].numel > self.bucket_numel:
            nbytes = self.graph.nbytes(shapes[0])
            if (owned and not self.compact) or not (owned or self.keeps_gradients):
                self.drop(nbytes, self._kind)
            else:
                self._whole_nbytes += nbytes  # dropped with the bucket

    def _keep(self) -> None:
        """Sum up the owner's gradients of several micro-batches; with the last, the part is filled up."""
        if self.compact:
            self._summed_nbytes, self._own_nbytes = self._summed_nbytes or self._own_nbytes, 0
            return
        if self._summed_nbytes:
            self.drop(self._own_nbytes, self._own)
        else:
            self._summed_nbytes = self._own_nbytes
        self._own_nbytes = 0
        if self.is_last:
            self.make(self._filling * self.param.itemsize, Category.SHARDED_GRAD)

    @property
    def _own(self) -> Category:
        """What the owner's gradients of this micro-batch are: to be kept, or to be added to those that are."""
        return Category.TEMPORARY if self._summed_nbytes else Category.SHARDED_GRAD

    @cached_property
    def _filling(self) -> int:
        """Elements of the rank's part in which no parameter lies."""
        return self.part - sum(self._pieces)

    @cached_property
    def _pieces(self) -> list[int]:
        """Elements of each parameter in the rank's part, in order."""
        first, stop = self.rank * self.part, (self.rank + 1) * self.part
        overlaps = (min(start + shape.numel, stop) - max(start, first) for shape, start in self._start.items())
        return [numel for numel in overlaps if numel > 0]

    @cached_property
    def _touched_numel(self) -> int:
        """Elements of all parameters that the rank's part touches, whole."""
        return sum(shape.numel for shape in self._start if self._touches(shape))

    def _touches(self, shape: NamedShape) -> bool:
        start = self._start[shape]
        return start < (self.rank + 1) * self.part and start + shape.numel > self.rank * self.part

    def _slices(self, shapes: list[NamedShape]) -> list[Run]:
        """What is in the bucket, cut where parts begin; neighbours of an owner are one, unless they go into a buffer of
        this rank's by themselves."""
        runs: list[Run] = []
        for shape in shapes:
            first, *others = self._cut(self._start[shape], self._start[shape] + shape.numel)
            same = runs and runs[-1].stop - 1 == first.owner and not (self.compact and first.owner == self.rank)
            if same:
                before = runs.pop()
                runs += [before._replace(num=before.num - 1)] if before.num > 1 else []
                first = first._replace(numel=before.numel + first.numel)
            runs += [first, *others]
        return runs

    def _cut(self, start: int, stop: int) -> Iterator[Run]:
        """The first slice, whole parts, the last slice."""
        owner = start // self.part
        end = min(stop, (owner + 1) * self.part)
        yield Run(owner, 1, end - start)
        num_whole, rest = divmod(stop - end, self.part)
        if num_whole:
            yield Run(owner + 1, num_whole, self.part)
        if rest:
            yield Run(owner + 1 + num_whole, 1, rest)

    def _calls(self, runs: list[Run]) -> Iterator[list[Run]]:
        """The slices of each all-reduce: it goes out when it has more elements than the bucket."""
        call: list[Run] = []
        room = self.bucket_numel
        for run in runs:
            while run.num:
                taken = run._replace(num=min(run.num, room // run.numel + 1))
                call.append(taken)
                room -= taken.num * taken.numel
                run = run._replace(owner=taken.stop, num=run.num - taken.num)
                if room < 0:
                    yield call
                    call, room = [], self.bucket_numel
        if call:
            yield call

    def update(self) -> None:
        spec, ledger = self.spec, self.ledger
        held, self._summed_nbytes = self._summed_nbytes, 0
        self.norm(self._pieces)
        self.send(CollectiveOp.ALL_REDUCE, DType.FP32, 1)
        self.make(2 * NORM_NBYTES)  # as it is, and over the scale
        if not self.compact:
            filling = self._filling * self.param.itemsize
            held += filling
            # Put together, and cast for the master; a part that is one piece is taken as it is.
            alone = len(self._pieces) + (filling > 0) == 1
            together = 0 if alone else self.part * self.param.itemsize
            self.make(together)
            if self.param is not DType.FP32:
                self.make(self.part * FP32)
                self.drop(together)
                together = self.part * FP32
            elif alone:
                together, held = held, 0
                self.drop(together, Category.SHARDED_GRAD)
                self.make(together)
            self.drop(held, Category.SHARDED_GRAD)
            held = 0
        update = artefacts.update_of(spec.optimizer, (self.part,), DType.FP32, Category.TEMPORARY)
        ledger.replay(update)
        if self.compact:
            self.drop(held, Category.SHARDED_GRAD)
        else:
            self.drop(together)
        _gather(self)
        self.drop(2 * NORM_NBYTES)


def _gather(walk: Walk) -> None:
    """The parts of the parameters are gathered in place."""
    param, numel = walk.spec.recipe.param, flat_numel(walk.spec)
    if walk.spec.ranks > 1:
        artefacts.start_copies(walk.ledger, CollectiveOp.ALL_GATHER, numel * param.itemsize, "parameters")
    walk.send(CollectiveOp.ALL_GATHER, param, numel)


def _starts(spec: RunSpec) -> Iterator[tuple[NamedShape, int]]:
    """Where each parameter begins in the flat tensor."""
    start = 0
    for shape in parameter_order(spec):
        yield shape, start
        start += shape.numel
