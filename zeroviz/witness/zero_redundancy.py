"""torch's ZeroRedundancyOptimizer by arithmetic: DDP's gradients, and optimizer states of whole parameters.

[Note: greedy] Parameters are not cut. The largest goes first, each to the rank that owns the fewest elements so far,
the first of these where there are several; parameters of a size keep their order. So ranks are uneven: none can own
less than the largest parameter if it is more than P/N, and of more ranks than parameters the last own nothing. (torch
2.13, zero_redundancy_optimizer.py: `_partition_parameters`.)

[Note: 3P] The gradient is all-reduced (2P), and every parameter is then broadcast by its owner, one by one (P): the
naive form's 3P, times (N-1)/N. A reduce-scatter and an all-gather would be 2P.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.models import NamedShape
from zeroviz.rank_trace import AlikeRanks, RankTrace
from zeroviz.schedule import Phase
from zeroviz.spec import DType, RunSpec
from zeroviz.wire import Collective
from zeroviz.witness.ddp import DDPWalk


def predicted(spec: RunSpec) -> Sequence[RankTrace]:
    """Every rank's step. Neighbours that own parameters of the same sizes are alike."""
    owned = owners(spec)
    walk = DDPWalk(spec)
    walk.gradients()
    shared = walk.ledger.events
    collectives = (*walk.collectives, *_broadcasts(spec, owned))
    stretches: list[tuple[range, RankTrace]] = []
    numels_before: list[int] | None = None
    for number, shapes in enumerate(owned):
        numels = [shape.numel for shape in shapes]
        if numels == numels_before:
            ranks, first = stretches[-1]
            stretches[-1] = (range(ranks.start, number + 1), first)
            continue
        numels_before = numels
        walk.ledger.take()
        walk.update(shapes)
        counters = len(shapes) if spec.optimizer.counts_steps else 0
        rank = RankTrace(
            rank=number,
            rest={**walk.rest, Category.OPTIMIZER_STATE: spec.recipe.moments_nbytes(sum(numels))},
            events=shared.then(walk.ledger.events),
            collectives=collectives,
            step_counter_nbytes=counters * DType.FP32.itemsize,
        )
        stretches.append((range(number, number + 1), rank))
    return AlikeRanks(stretches)


def owners(spec: RunSpec) -> tuple[tuple[NamedShape, ...], ...]:
    """The parameters that each rank owns, in the order in which it updates and sends them. See [Note: greedy]."""
    owned: list[list[NamedShape]] = [[] for _ in range(spec.ranks)]
    smallest = [(0, rank) for rank in range(spec.ranks)]
    heapify(smallest)
    for shape in sorted(spec.model.params, key=lambda shape: shape.numel, reverse=True):
        numel, rank = smallest[0]
        owned[rank].append(shape)
        heapreplace(smallest, (numel + shape.numel, rank))
    return tuple(map(tuple, owned))


def _broadcasts(spec: RunSpec, owned: Sequence[Sequence[NamedShape]]) -> Sequence[Collective]:
    """Each parameter's, rank by rank."""
    dtype = spec.recipe.param
    if spec.ranks == 1:
        return ()
    return [
        Collective(
            CollectiveOp.BROADCAST, dtype.value, spec.ranks, shape.numel * dtype.itemsize, Phase.OPTIMIZER.label, ""
        )
        for shapes in owned
        for shape in shapes
    ]
