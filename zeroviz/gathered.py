"""How much of the model is whole at once, by unit policy, tying and prefetch; and what of a peak more ranks divide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroviz.models import Family, SublayerKind
from zeroviz.partition import Unit, plan_for
from zeroviz.schedule import OpKind, Phase, schedule
from zeroviz.spec import RunSpec, UnitKind
from zeroviz.trace import Category, Peak


@dataclass(frozen=True, slots=True)
class Gathered:
    """The moment of a step at which most parameters are whole: how many elements, padding left out, and whose."""

    numel: int
    units: tuple[Unit, ...]


def most_gathered(spec: RunSpec) -> Gathered | None:
    """The first such moment; None where parameters are not sharded and so nothing is gathered."""
    if not spec.strategy.shards_param:
        return None
    units = plan_for(spec).units
    held: dict[int, None] = {}
    numel, most, whose = 0, 0, tuple(held)
    # Micro-batches are alike, so one is enough.
    for op in schedule(replace(spec, accumulation=1, no_sync=None)):
        if op.kind is OpKind.UNSHARD:
            assert op.unit is not None
            held[op.unit] = None
            numel += units[op.unit].numel
            if numel > most:
                most, whose = numel, tuple(held)
        elif op.kind is OpKind.RESHARD:
            assert op.unit is not None
            del held[op.unit]
            numel -= units[op.unit].numel
    return Gathered(most, tuple(units[index] for index in sorted(whose)))


def fsdp_root_numel(spec: RunSpec) -> int:
    """Elements of the unit that FSDP makes of what no wrapped block holds: embedding, last norm and head.

    0 where no block is wrapped, and then the whole model is that unit. Tied or not, it is one unit there; here an
    embedding and a head that share nothing are two.
    """
    if spec.model.family is Family.BARE or spec.unit.kind is UnitKind.MODEL:
        return 0
    outside = [sublayer for sublayer in spec.model.sublayers if sublayer.block is None]
    assert [sublayer.kind for sublayer in outside] == [SublayerKind.EMBED, SublayerKind.HEAD]
    return sum({shape.name: shape.numel for sublayer in outside for shape in sublayer.params}.values())


def divided_nbytes(spec: RunSpec, peak: Peak) -> int:
    """How much of `peak` is a rank's 1/N, and so falls with N; padding apart, the rest does not depend on N. Of
    HYBRID_SHARD it is 1/G, and nothing falls with N.

    The optimizer's temporaries are as large as what a rank owns; all other temporaries are as in one process.
    """
    if not spec.strategy.shards_optimizer:
        return 0
    owned = [Category.SHARDED_PARAM, Category.SHARDED_GRAD, Category.MASTER_PARAM, Category.OPTIMIZER_STATE]
    if peak.phase == Phase.OPTIMIZER.value:
        owned.append(Category.TEMPORARY)
    return sum(peak.by_category.get(category, 0) for category in owned)


def names(units: Sequence[Unit]) -> str:
    """`root and block 2`; of many, their number."""
    if len(units) > 3:
        return f"{len(units)} units"
    return " and ".join(filter(None, (", ".join(unit.name for unit in units[:-1]), units[-1].name)))
