"""torch's DistributedDataParallel by arithmetic: what every rank holds at rest, in each op of a step, and sends.

[Note: buckets] From the third step on the reducer's buckets are in the order in which gradients become ready in
backward, and not before: they are made anew as the second step begins. A bucket takes parameters until it has as many
bytes as its limit, or more: it is closed by the parameter that fills it, which may be an embedding of any size. The
first one's limit is 1 MiB and the others' 25, so that the first all-reduce starts early; a size that was set holds for
all of them. Each is reduced when its last gradient has been copied into it. (torch 2.13, reducer.cpp:
`compute_bucket_assignment_by_size`, `rebuild_buckets`, `mark_bucket_ready`.)

[Note: the second copy] Without `gradient_as_bucket_view` a gradient stays beside its bucket, into which it is copied,
divided by N, as soon as it is there. With it, it is dropped after the copy, and the parameter's gradient is a view of
the bucket. gloo reduces a bucket in place.

[Note: no_sync] Of several micro-batches only the last is reduced, by default. The reducer's hooks then do nothing in
those before, so that even with `gradient_as_bucket_view` their gradients are tensors of their own, beside the buckets,
until the last backward brings each into its bucket: the second copy is back while the step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zeroviz import artefacts
from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.ledger import Ledger
from zeroviz.models import NamedShape
from zeroviz.rank_trace import AlikeRanks, RankTrace
from zeroviz.schedule import OpKind, Phase
from zeroviz.settings import MIB, value_of
from zeroviz.spec import DType, RunSpec
from zeroviz.wire import Collective
from zeroviz.witness.graph import ZERO_GRAD, Graph

FIRST_BUCKET_NBYTES = MIB


def predicted(spec: RunSpec) -> Sequence[RankTrace]:
    """Every rank's step: they are all alike."""
    walk = DDPWalk(spec)
    walk.gradients()
    walk.update(spec.model.params)
    counters = len(spec.model.params) if spec.optimizer.counts_steps else 0
    rank = RankTrace(
        rank=0,
        rest={**walk.rest, Category.OPTIMIZER_STATE: spec.recipe.moments_nbytes(spec.model.num_params)},
        events=walk.ledger.events,
        collectives=tuple(walk.collectives),
        step_counter_nbytes=counters * DType.FP32.itemsize,
    )
    return AlikeRanks([(range(spec.ranks), rank)])


def buckets(spec: RunSpec, ready_order: Sequence[NamedShape]) -> list[tuple[NamedShape, ...]]:
    """The parameters of each bucket, in the order in which they are reduced. See [Note: buckets]."""
    given = spec.settings.bucket_nbytes
    limit = value_of(spec.settings, "bucket_nbytes", spec.impl) if given is None else given
    full: list[tuple[NamedShape, ...]] = []
    bucket: list[NamedShape] = []
    for shape in ready_order:
        bucket.append(shape)
        at_most = FIRST_BUCKET_NBYTES if given is None and not full else limit
        if sum(each.numel for each in bucket) * spec.recipe.grad.itemsize >= at_most:
            full.append(tuple(bucket))
            bucket = []
    return [*full, tuple(bucket)] if bucket else full


class DDPWalk:
    """A step under DistributedDataParallel: `gradients`, then `update`. rest: all but the optimizer's states."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.views: bool = value_of(spec.settings, "bucket_view", spec.impl)
        # A fresh gradient stays, or lives until it is copied into its bucket or added to those before.
        self.staying = Graph(spec, fresh=Category.UNSHARDED_GRAD)
        self.passing = Graph(spec, fresh=Category.TEMPORARY)
        self.ledger = Ledger()
        self.collectives: list[Collective] = []
        whole = spec.model.num_params
        self.rest = {
            Category.UNSHARDED_PARAM: whole * spec.recipe.param.itemsize,
            Category.UNSHARDED_GRAD: whole * spec.recipe.grad.itemsize,
        }
        if not self.views:
            self.rest[Category.BUCKET] = whole * spec.recipe.grad.itemsize
        self._last_of = {bucket[-1]: bucket for bucket in buckets(spec, self.staying.ready_order)}

    def gradients(self) -> None:
        """Forward and backward of every micro-batch, gradients reduced."""
        ledger, num_micro_batches = self.ledger, self.spec.accumulation
        ledger.at(Phase.FORWARD.label, ZERO_GRAD, "")
        if not self.views:
            ledger.replay((Category.UNSHARDED_GRAD, -self.staying.nbytes(shape)) for shape in self.spec.model.params)
        stays = False  # whether gradients are there that are no views
        for number in range(num_micro_batches):
            reduces = self.spec.reduces_each or number == num_micro_batches - 1
            goes_into_bucket = self.views and reduces
            passes = number > 0 or goes_into_bucket
            done = [Category.TEMPORARY] if passes else []
            done += [Category.UNSHARDED_GRAD] if goes_into_bucket and stays else []
            graph = self.passing if passes else self.staying
            graph.load_batch(ledger)
            graph.forward(ledger)
            graph.backward(ledger, partial(self._ready, reduces=reduces, done=done))
            graph.drop_batch(ledger)
            stays = not goes_into_bucket

    def update(self, owned: Sequence[NamedShape]) -> None:
        """The optimizer's step over the parameters `owned`, in this order."""
        self.ledger.at(Phase.OPTIMIZER.label, OpKind.OPTIMIZER_STEP.label, "")
        numels = tuple(shape.numel for shape in owned)
        recipe, optimizer = self.spec.recipe, self.spec.optimizer
        self.ledger.replay(artefacts.update_of(optimizer, numels, recipe.moments, Category.TEMPORARY))

    def _ready(self, shape: NamedShape, *, reduces: bool, done: Sequence[Category]) -> None:
        """The reducer's hook: the gradient over N goes into the bucket, and the bucket out if it is full.

        done: what is not needed any more when the gradient is where it belongs.
        """
        if reduces:
            self.ledger.replay(artefacts.number(self.spec.recipe.grad.itemsize))
        self.ledger.replay((category, -self.staying.nbytes(shape)) for category in done)
        if reduces and self.spec.ranks > 1 and (bucket := self._last_of.get(shape)) is not None:
            grad = self.spec.recipe.grad
            payload = sum(each.numel for each in bucket) * grad.itemsize
            phase, _, unit = self.ledger.where
            self.collectives.append(
                Collective(CollectiveOp.ALL_REDUCE, grad.value, self.spec.ranks, payload, phase, unit)
            )
