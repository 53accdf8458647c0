"""torch's `fully_shard` (FSDP2) by arithmetic: what every rank holds, in which order, and what it sends.

The step up to the optimizer's is the same on every rank (`zeroviz.witness.fsdp2_walk`). The optimizer sees a rank's
rows without padding (`zeroviz.witness.fsdp2_groups`): in its moments and temporaries ranks differ, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from zeroviz import artefacts
from zeroviz.category import Category
from zeroviz.events import Changes, Events
from zeroviz.ledger import Ledger
from zeroviz.rank_trace import AlikeRanks, RankTrace
from zeroviz.schedule import OpKind, Phase
from zeroviz.spec import DType, Optimizer, RunSpec
from zeroviz.witness.fsdp2_groups import alike, groups_of, local_numels
from zeroviz.witness.fsdp2_groups import parameter_order as parameter_order
from zeroviz.witness.fsdp2_walk import Walk


def predicted(spec: RunSpec) -> Sequence[RankTrace]:
    """Every rank's step, in stretches of ranks that hold equal rows."""
    walk = Walk(spec)
    walk.gradients()
    before, itemsize = walk.ledger.events, spec.recipe.param.itemsize
    padded = sum(group.shard_numel for group in groups_of(spec))
    first = RankTrace(
        rank=0,
        rest={Category.SHARDED_PARAM: padded * itemsize, Category.SHARDED_GRAD: padded * itemsize},
        collectives=tuple(walk.collectives),
        step_counter_nbytes=len(spec.model.params) * DType.FP32.itemsize if spec.optimizer.counts_steps else 0,
    )
    stretches = []
    for stretch in alike(spec):
        numels = local_numels(spec, stretch.start)
        moments_nbytes = spec.recipe.moments_nbytes(sum(numels))
        update = _update(spec.optimizer, numels, spec.recipe.moments)
        trace = replace(
            first,
            rank=stretch.start,
            rest={**first.rest, **({Category.OPTIMIZER_STATE: moments_nbytes} if moments_nbytes else {})},
            events=Events((*before.wheres, *update.wheres), (*before.stretches, *update.stretches)),
            padding_nbytes=2 * itemsize * (padded - sum(numels)),
        )
        stretches.append((stretch, trace))
    return AlikeRanks(stretches)


@lru_cache(maxsize=64)
def _update(optimizer: Optimizer, numels: tuple[int, ...], moments: DType) -> Events:
    """The optimizer's step; of an empty shard nothing is allocated."""
    ledger = Ledger()
    ledger.at(Phase.OPTIMIZER.label, OpKind.OPTIMIZER_STEP.label, "")
    changes = artefacts.update(optimizer, numels, moments, Category.TEMPORARY)
    ledger.replay(Changes((category, nbytes) for category, nbytes in changes if nbytes))
    return ledger.events
