"""DeepSpeed by arithmetic, stages 0 to 3: what every rank holds at rest, in each op of a step, and sends."""

from __future__ import annotations

from collections.abc import Sequence

from zeroviz.rank_trace import AlikeRanks, RankTrace
from zeroviz.spec import RunSpec, Strategy
from zeroviz.witness.deepspeed_flat import Bucketed, Stage0, WholeGradients
from zeroviz.witness.deepspeed_parts import (
    alike,
    keeps_whole_gradients,
    padding_nbytes,
    rest_of,
    step_counter_nbytes,
)
from zeroviz.witness.deepspeed_walk import Walk


def rank_trace(spec: RunSpec, rank: int) -> RankTrace:
    walk = _walk(spec, rank)
    walk.step()
    return RankTrace(
        rank=rank,
        rest={category: nbytes for category, nbytes in rest_of(spec).items() if nbytes},
        events=walk.ledger.events,
        collectives=tuple(walk.collectives),
        padding_nbytes=padding_nbytes(spec, rank),
        step_counter_nbytes=step_counter_nbytes(spec),
    )


def _walk(spec: RunSpec, rank: int) -> Walk:
    if spec.strategy is Strategy.DDP:
        return Stage0(spec, rank)
    if keeps_whole_gradients(spec):
        return WholeGradients(spec, rank)
    if spec.strategy is Strategy.ZERO3:
        raise NotImplementedError
    return Bucketed(spec, rank)
