"""How FSDP2 groups and cuts parameters, and which ranks are alike.

[Note: groups] A unit that is one segment is a group of fully_shard's; a tied root, or the whole model under unit
`model`, is the root's own. FSDP2 cuts every parameter by rows, among the ranks of a shard group, and pads each piece to
the first rank's, so padding is a parameter's; a moment is made of a rank's rows alone and has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from zeroviz.models import NamedShape
from zeroviz.partition import Unit, chunk_rows, local_rows, plan_for
from zeroviz.spec import RunSpec


@dataclass(frozen=True)
class FSDPGroup:
    """Parameters that fully_shard gathers together. numels, padded_numels: of each, without and with padding.

    is_root: held by the root's module, around all others. num_shards: ranks among which it is cut.
    """

    unit: Unit
    is_root: bool
    numels: tuple[int, ...]
    padded_numels: tuple[int, ...]
    num_shards: int

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def key(self) -> int:
        return self.unit.index

    @property
    def whole_numel(self) -> int:
        """Of what is gathered or reduced."""
        return sum(self.padded_numels)

    @property
    def shard_numel(self) -> int:
        return self.whole_numel // self.num_shards


def groups_of(spec: RunSpec) -> tuple[FSDPGroup, ...]:
    """One for each unit of the plan. See [Note: groups]."""
    plan, num_shards = plan_for(spec), spec.num_shards
    uses = [segment.unit for segment in plan.segments]
    return tuple(
        FSDPGroup(
            unit,
            is_root=len(plan.units) == 1 or uses.count(unit.index) > 1,
            numels=tuple(shape.numel for shape in unit.params),
            padded_numels=tuple(
                chunk_rows(shape.shape[0], num_shards) * num_shards * (shape.numel // shape.shape[0])
                for shape in unit.params
            ),
            num_shards=num_shards,
        )
        for unit in plan.units
    )


def parameter_order(spec: RunSpec) -> tuple[NamedShape, ...]:
    """The parameters as FSDP2's optimizer has them: in order of first use."""
    shapes = (
        shape for segment in plan_for(spec).segments for sublayer in segment.sublayers for shape in sublayer.params
    )
    return tuple({shape.name: shape for shape in shapes}.values())


def local_numels(spec: RunSpec, rank: int) -> tuple[int, ...]:
    """Elements the rank holds of each parameter, padding left out, in `parameter_order`."""
    num_shards = spec.num_shards
    return tuple(
        shape.numel // shape.shape[0] * local_rows(shape.shape[0], num_shards, rank % num_shards)
        for shape in parameter_order(spec)
    )


@lru_cache(maxsize=64)
def alike(spec: RunSpec) -> tuple[range, ...]:
    """The ranks in stretches of equal shapes. Of a parameter the first ranks hold whole chunks, then one the rest.
    Shard groups are copies of the first."""
    num_shards, borders = spec.num_shards, {0}
    for num_rows in {shape.shape[0] for shape in spec.model.params}:
        whole, rest = divmod(num_rows, chunk_rows(num_rows, num_shards))
        borders |= {whole, whole + (rest > 0)}
    starts = sorted(border for border in borders if border < num_shards)
    if len(starts) == 1:
        return (range(spec.ranks),)
    every = [first + start for first in range(0, spec.ranks, num_shards) for start in starts]
    return tuple(range(start, stop) for start, stop in pairwise([*every, spec.ranks]))
