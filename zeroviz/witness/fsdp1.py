"""torch's FullyShardedDataParallel (FSDP1) by arithmetic: what every rank holds, in which order, and what it sends.

[Note: order] A unit is gathered when its forward begins and freed when it is over, but for the root's own, which stays
to the end of its backward. In backward a unit is gathered before its own pass (`backward_prefetch` none), or while the
unit behind it is: before that one's pass (pre, the default), or after it, before its gradients are reduced (post). So
two units are whole at a time, or one beside another's gradients (torch 2.13, _runtime_utils.py: `_pre_backward_hook`,
`_post_backward_hook`, `_get_handle_to_prefetch`).

[Note: copies of a gradient] The gradients of a unit's parameters stay until the last one is there, and are copied into
a flat one; that is cast, if it is reduced in another dtype, and copied once more with padding, if N does not divide it.
The reduce-scatter's output becomes the gradient shard; across replicas it is all-reduced. Sums are divided in two
parts, before and after (`_get_gradient_predivide_factor`).

[Note: mixed precision] Computed in another dtype than held, a shard is cast before each gather, and the copy is
gathered. NO_SHARD has the whole cast and computes with that: it is made twice a step.

What FSDP1 calls on the way is in `cluster.witness.fsdp1`; tests compare every op of a live run with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

from zeroviz import artefacts
from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.events import Changes, Events
from zeroviz.kernels import norm_saves_input
from zeroviz.ledger import Ledger
from zeroviz.models import Family, SublayerKind
from zeroviz.partition import Place, Segment
from zeroviz.rank_trace import AlikeRanks, RankTrace
from zeroviz.schedule import OpKind, Phase
from zeroviz.settings import BackwardPrefetch, value_of
from zeroviz.spec import DType, RunSpec, Strategy
from zeroviz.sublayers import passes_with_grads
from zeroviz.tape import FP32_NBYTES, Sizes
from zeroviz.wire import Collective
from zeroviz.witness.flat import FlatUnit, alike, flat_units, is_root, keeps_whole
from zeroviz.witness.graph import ZERO_GRAD, Graph


def predicted(spec: RunSpec) -> Sequence[RankTrace]:
    """Every rank's step, in stretches of ranks that own the same."""
    walk = _Walk(spec)
    walk.step()
    before, rest, recipe = walk.ledger.events, walk.rest, spec.recipe
    orig = value_of(spec.settings, "use_orig_params", spec.impl)
    stretches = []
    for ranks, owned in alike(spec):
        ledger = Ledger()
        ledger.at(Phase.OPTIMIZER.label, OpKind.OPTIMIZER_STEP.label, "")
        ledger.replay(artefacts.update_of(spec.optimizer, owned.numels, recipe.moments, Category.TEMPORARY))
        per_element = 2 * recipe.param.itemsize + (0 if orig else recipe.moments_nbytes(1))
        trace = RankTrace(
            rank=ranks.start,
            rest={**rest, Category.OPTIMIZER_STATE: recipe.moments_nbytes(sum(owned.numels))},
            events=_joined(before, ledger.events),
            collectives=tuple(walk.collectives),
            padding_nbytes=owned.padding_numel * per_element,
            step_counter_nbytes=len(owned.numels) * DType.FP32.itemsize if spec.optimizer.counts_steps else 0,
        )
        stretches.append((ranks, trace))
    return AlikeRanks(stretches)


def divisors(num_ranks: int) -> tuple[int, float]:
    """By what FSDP1 divides a gradient before and after it is summed: powers of two near the root, and the rest."""
    before = 1
    while num_ranks % before == 0 and num_ranks / before > before:
        before *= 2
    return before, num_ranks / before


class _Walk:
    """A step up to the optimizer's. whole: units whose parameters are whole. forward_order: units in the order in which
    forward left them. entered: those that backward has come to, which are not gathered ahead."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.graph = spec, Graph(spec, fresh=Category.UNSHARDED_GRAD)
        self.units = flat_units(spec)
        self.is_whole, self.is_bare = keeps_whole(spec), spec.model.family is Family.BARE
        self.root = next((unit for unit in self.units if is_root(spec, unit.unit)), None)
        self.ledger = Ledger()
        self.collectives: list[Collective] = []
        recipe = spec.recipe
        self.param, self.compute = recipe.param, recipe.compute
        self.reduce_dtype: DType = value_of(spec.settings, "reduce_dtype", spec.impl) or recipe.compute
        self.prefetch: BackwardPrefetch = value_of(spec.settings, "backward_prefetch", spec.impl)
        self.divisors = divisors(spec.ranks)
        self.grad = Category.UNSHARDED_GRAD if self.is_whole else Category.SHARDED_GRAD
        self.whole: set[int] = set()
        self.forward_order: list[FlatUnit] = []
        self.entered: list[FlatUnit] = []

    @property
    def rest(self) -> dict[Category, int]:
        """All but the optimizer's states."""
        nbytes = sum(unit.shard_numel for unit in self.units) * self.param.itemsize
        return {Category.UNSHARDED_PARAM if self.is_whole else Category.SHARDED_PARAM: nbytes, self.grad: nbytes}

    def at(self, phase: Phase, op: str, unit: FlatUnit | None = None) -> None:
        self.ledger.at(phase.label, op, unit.unit.name if unit else "")

    def step(self) -> None:
        orig = value_of(self.spec.settings, "use_orig_params", self.spec.impl)
        self.at(Phase.FORWARD, ZERO_GRAD)
        if not orig:
            self._drop_gradients()
        self.graph.load_batch(self.ledger)
        self.at(Phase.FORWARD, ZERO_GRAD)
        if self.root:
            self.at(Phase.FORWARD, OpKind.UNSHARD.label, self.root)
        if orig:  # not in zero_grad, but when the root's forward begins
            self._drop_gradients()
        if self.root:
            self._unshard(self.root)
        for segment in self.graph.plan.segments:
            self._forward_of(segment)
        if self.root:
            self._leave_forward(self.root)
        self.ledger.alloc("seed", FP32_NBYTES, Category.TEMPORARY)  # the gradient of the loss, a one
        self._backward()
        self.ledger.free("seed")
        if self.is_bare:
            self.ledger.free("batch")
        else:
            self.graph.drop_batch(self.ledger)

    def _drop_gradients(self) -> None:
        order = sorted(self.units, key=lambda unit: unit is not self.root)
        self.ledger.replay((self.grad, -unit.shard_numel * self.param.itemsize) for unit in order)

    # ---- forward ----

    def _forward_of(self, segment: Segment) -> None:
        unit = self.units[segment.unit]
        if unit is not self.root:
            self.at(Phase.FORWARD, OpKind.UNSHARD.label, unit)
            self._unshard(unit)
        self.at(Phase.FORWARD, OpKind.FORWARD.label, unit)
        for kind, place in self._places(segment):
            self.ledger.replay(passes_with_grads(self.graph.sizes, kind, place)[0])
        if unit is not self.root:
            self._leave_forward(unit)
        takes_rows = segment.sublayers[0].kind not in (SublayerKind.EMBED, SublayerKind.BARE)
        if takes_rows and not norm_saves_input(self.graph.sizes):
            row = self.graph.sizes.rows(self.spec.model.hidden)
            self.ledger.replay([(Category.ACTIVATION, -row)])  # the caller held the input till here

    def _leave_forward(self, unit: FlatUnit) -> None:
        self.at(Phase.FORWARD, OpKind.RESHARD.label, unit)
        frees = self.spec.strategy is not Strategy.SHARD_GRAD_OP and unit is not self.root
        if frees or self.is_whole:
            self._reshard(unit)
        self.forward_order.append(unit)

    def _places(self, segment: Segment) -> Iterator[tuple[SublayerKind, Place]]:
        if self.is_bare:
            return
        last = len(segment.sublayers) - 1
        for position, sublayer in enumerate(segment.sublayers):
            yield sublayer.kind, Place(position == 0, position == last, self.spec.model.tied, in_graph=True)

    # ---- backward ----

    def _backward(self) -> None:
        if self.root:
            self._enter_backward(self.root)
        for segment in reversed(self.graph.plan.segments):
            unit = self.units[segment.unit]
            if unit is not self.root:
                self._enter_backward(unit)
            self.at(Phase.BACKWARD, OpKind.BACKWARD.label, unit)
            for kind, place in reversed(list(self._places(segment))):
                self.ledger.replay(_backward_pass(self.graph.sizes, kind, place))
            if self.is_bare:
                self.ledger.replay([(Category.UNSHARDED_GRAD, unit.numel * self.compute.itemsize)])
            if unit is not self.root:
                self._finish(unit)
        if self.root:
            self._finish(self.root)

    def _enter_backward(self, unit: FlatUnit) -> None:
        self.at(Phase.BACKWARD, OpKind.UNSHARD.label, unit)
        self._unshard(unit)
        self.entered.append(unit)
        if self.prefetch is BackwardPrefetch.PRE:
            self._unshard_next(unit)

    def _unshard_next(self, unit: FlatUnit) -> None:
        position = self.forward_order.index(unit)
        if position and self.forward_order[position - 1] not in self.entered:
            self._unshard(self.forward_order[position - 1])

    def _finish(self, unit: FlatUnit) -> None:
        """All gradients into a flat one, and that one reduced. See [Note: copies of a gradient]."""
        ledger, compute, reduced = self.ledger, self.compute, self.reduce_dtype
        gaps = [(Category.TEMPORARY, gap * compute.itemsize) for gap in unit.gaps]
        ledger.replay(gaps)
        ledger.alloc("flat", unit.numel * compute.itemsize, Category.UNSHARDED_GRAD)
        ledger.replay((Category.UNSHARDED_GRAD, -shape.numel * compute.itemsize) for shape in unit.unit.params)
        ledger.replay((category, -nbytes) for category, nbytes in gaps)

        self.at(Phase.BACKWARD, OpKind.REDUCE_GRAD.label, unit)
        self._reshard(unit)
        if self.prefetch is BackwardPrefetch.POST:
            self._unshard_next(unit)
        if reduced is not compute:
            ledger.alloc("cast", unit.numel * reduced.itemsize, Category.UNSHARDED_GRAD)
        if self.is_whole:
            self._all_reduce(unit, "flat" if reduced is compute else "cast")
        else:
            self._reduce_scatter(unit)
        ledger.free(*(key for key in ("cast", "flat") if ledger.holds(key)))

    def _reduce_scatter(self, unit: FlatUnit) -> None:
        ledger, reduced = self.ledger, self.reduce_dtype
        if unit.gathered_numel != unit.numel:
            ledger.alloc("padded", unit.gathered_numel * reduced.itemsize, Category.REDUCE_SCATTER_BUFFER)
        ledger.alloc("shard", unit.shard_numel * reduced.itemsize, Category.SHARDED_GRAD)
        self._divide(self.divisors[0])
        self._send(CollectiveOp.REDUCE_SCATTER, reduced, unit.gathered_numel, unit)
        artefacts.end_copies(ledger, unit.unit.index)
        if self.spec.num_replicas > 1:
            self._send(CollectiveOp.ALL_REDUCE, reduced, unit.shard_numel, unit, Group.REPLICA)
        self._divide(self.divisors[1])
        self._keep("shard", unit.shard_numel)
        if ledger.holds("padded"):
            ledger.free("padded")

    def _all_reduce(self, unit: FlatUnit, grad: str) -> None:
        """In place, in `grad`."""
        self._divide(self.divisors[0])
        self._send(CollectiveOp.ALL_REDUCE, self.reduce_dtype, unit.numel, unit)
        self._divide(self.divisors[1])
        self._keep(grad, unit.numel)

    def _keep(self, key: str, numel: int) -> None:
        """`key` becomes the gradient that is held, in the parameters' dtype."""
        if self.reduce_dtype is self.param:
            self.ledger.rename(key, object())
        else:
            self.ledger.replay([(self.grad, numel * self.param.itemsize)])
            if key != "flat":
                self.ledger.free(key)

    def _divide(self, divisor: float) -> None:
        if divisor > 1:
            self.ledger.replay(artefacts.number(self.reduce_dtype.itemsize))

    # ---- parameters ----

    def _unshard(self, unit: FlatUnit) -> None:
        """Make the unit whole, unless it is. See [Note: mixed precision]."""
        key, compute = unit.unit.index, self.compute
        if key in self.whole:
            return
        self.whole.add(key)
        casts = compute is not self.param
        if self.is_whole:
            if casts:
                self.ledger.alloc(("param", key), unit.numel * compute.itemsize, Category.UNSHARDED_PARAM)
            return
        if casts:
            self.ledger.alloc("cast shard", unit.shard_numel * compute.itemsize, Category.ALL_GATHER_BUFFER)
        self.ledger.alloc(("param", key), unit.gathered_numel * compute.itemsize, Category.UNSHARDED_PARAM)
        self._send(CollectiveOp.ALL_GATHER, compute, unit.gathered_numel, unit)
        if casts:
            self.ledger.free("cast shard")

    def _reshard(self, unit: FlatUnit) -> None:
        self.whole.discard(unit.unit.index)
        if self.ledger.holds(key := ("param", unit.unit.index)):
            self.ledger.free(key)

    # ---- the wire ----

    def _send(self, op: CollectiveOp, dtype: DType, numel: int, unit: FlatUnit, among: Group = Group.ALL) -> None:
        """among: of hybrid_shard's groups; the shard group unless said."""
        spec, num_ranks = self.spec, self.spec.ranks
        if spec.strategy.replicates:
            among = Group.REPLICA if among is Group.REPLICA else Group.SHARD
            num_ranks = spec.num_replicas if among is Group.REPLICA else spec.num_shards
        if num_ranks == 1:
            return
        payload = numel * dtype.itemsize
        artefacts.start_copies(self.ledger, op, payload, unit.unit.index)
        phase, _, where = self.ledger.where
        self.collectives.append(Collective(op, dtype.value, num_ranks, payload, phase, where, among))


@lru_cache(maxsize=1024)
def _backward_pass(sizes: Sizes, kind: SublayerKind, place: Place) -> Changes:
    """One sublayer's backward in one stretch: the flat gradient waits for all of the unit's."""
    _, up_to_grads, rest = passes_with_grads(sizes, kind, place)
    return Changes(chain(*(changes for changes, _ in up_to_grads), rest))


def _joined(before: Events, after: Events) -> Events:
    return Events((*before.wheres, *after.wheres), (*before.stretches, *after.stretches))
