"""DeepSpeed by arithmetic, stages 0 to 3: what every rank holds at rest, in each op of a step, and sends.

[Note: ranks that differ] Under stages 1 and 2 a rank's part begins and ends inside parameters of its own, and backward
holds the gradients of these whole. Up to `MAX_RANKS` ranks the step of each is worked out. With more of them ranks of
equal padding share the step of the first, so that what one of the others holds in backward may differ by what its
part's parameters are larger or smaller; at rest, and on the wire, nothing is shared that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeroviz.rank_trace import AlikeRanks, RankTrace
from zeroviz.spec import RunSpec, Strategy
from zeroviz.witness.deepspeed_chunks import Stage3
from zeroviz.witness.deepspeed_flat import Bucketed, Stage0, WholeGradients
from zeroviz.witness.deepspeed_parts import (
    alike,
    keeps_whole_gradients,
    padding_nbytes,
    rest_of,
    step_counter_nbytes,
)
from zeroviz.witness.deepspeed_walk import Walk

MAX_RANKS = 16


def predicted(spec: RunSpec) -> Sequence[RankTrace]:
    """Every rank's step. See [Note: ranks that differ]."""
    kind = _kind(spec)
    stretches = alike(spec)
    if kind is Bucketed and spec.ranks <= MAX_RANKS:
        stretches = [range(rank, rank + 1) for rank in range(spec.ranks)]
    if kind is Bucketed or (kind is Stage3 and spec.recipe.grad is not spec.recipe.param):
        return AlikeRanks([(ranks, rank_trace(spec, ranks.start)) for ranks in stretches])
    first = rank_trace(spec, 0)
    return AlikeRanks(
        [
            (ranks, replace(first, rank=ranks.start, padding_nbytes=padding_nbytes(spec, ranks.start)))
            for ranks in stretches
        ]
    )


def rank_trace(spec: RunSpec, rank: int) -> RankTrace:
    """One rank's step."""
    walk = _kind(spec)(spec, rank)
    walk.step()
    return RankTrace(
        rank=rank,
        rest={category: nbytes for category, nbytes in rest_of(spec).items() if nbytes},
        events=walk.ledger.events,
        collectives=tuple(walk.collectives),
        padding_nbytes=padding_nbytes(spec, rank),
        step_counter_nbytes=step_counter_nbytes(spec),
    )


def _kind(spec: RunSpec) -> type[Walk]:
    if spec.strategy is Strategy.DDP:
        return Stage0
    if spec.strategy is Strategy.ZERO3:
        return Stage3
    return WholeGradients if keeps_whole_gradients(spec) else Bucketed
