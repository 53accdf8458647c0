"""FSDP1's flat parameter: how the parameters of a unit lie in it, and what of them each rank owns.

They lie one after another, and shard r of N is [r * s, (r + 1) * s) with s = ceil(numel / N), so that the last ones are
padding: (-numel) % N elements of it in all.

[Note: alignment] With `use_orig_params` each parameter begins at a multiple of 16 bytes of the dtype computed with, and
the end is padded to a multiple of N in any case, NO_SHARD's whole one included (torch 2.13, _flat_param.py:
`_init_flat_param_and_metadata`). The optimizer then has the pieces of parameters that lie in the shard and no padding,
each with a step counter, and ranks differ in all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby

from zeroviz.partition import Unit, alike_stretches, plan_for
from zeroviz.settings import value_of
from zeroviz.spec import RunSpec, Strategy
from zeroviz.witness.fsdp2 import parameter_order

ALIGNMENT_NBYTES = 16


@dataclass(frozen=True)
class FlatUnit:
    """A unit's flat parameter. starts: where each of the unit's parameters begins in it. numel: of the flat parameter.

    gaps: elements of each stretch of padding inside it. num_shards: 1 where it is held whole.
    """

    unit: Unit
    starts: tuple[int, ...]
    numel: int
    gaps: tuple[int, ...]
    num_shards: int

    @property
    def shard_numel(self) -> int:
        """Elements of a shard, the same on every rank: ceil(numel / N)."""
        return -(-self.numel // self.num_shards)

    @property
    def gathered_numel(self) -> int:
        """Elements of the gathered buffer: numel + (-numel) % N."""
        return self.shard_numel * self.num_shards

    def pieces(self, place: int) -> tuple[int, ...]:
        """Elements of each of the unit's parameters in shard `place`, 0 where it has none."""
        first = place * self.shard_numel
        return _overlaps(self.starts, self.numels, first, first + self.shard_numel)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Of each of the unit's parameters."""
        return tuple(shape.numel for shape in self.unit.params)


@lru_cache(maxsize=2**14)
def _overlaps(starts: tuple[int, ...], numels: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    """Elements of each parameter in [first, last). Blocks of a model are alike."""
    pairs = zip(starts, numels, strict=True)
    return tuple(max(0, min(last, start + numel) - max(first, start)) for start, numel in pairs)


def keeps_whole(spec: RunSpec) -> bool:
    """Whether nothing is sharded: NO_SHARD, which torch also does in a shard group of one rank."""
    return spec.strategy is Strategy.DDP or spec.num_shards == 1


@lru_cache(maxsize=256)
def flat_units(spec: RunSpec) -> tuple[FlatUnit, ...]:
    """One for each unit of the plan, in its order."""
    aligned = 1
    if value_of(spec.settings, "use_orig_params", spec.impl):
        aligned = ALIGNMENT_NBYTES // spec.recipe.compute.itemsize
    num_shards = 1 if keeps_whole(spec) else spec.num_shards
    return tuple(
        _flat(unit, aligned, spec.num_shards if aligned > 1 else 1, num_shards) for unit in plan_for(spec).units
    )


def _flat(unit: Unit, aligned: int, multiple: int, num_shards: int) -> FlatUnit:
    """aligned: elements to a multiple of which each parameter is moved up; multiple: to which the end is."""
    starts: list[int] = []
    gaps: list[int] = []
    numel = 0

    def pad_to(step: int) -> None:
        nonlocal numel
        if gap := -numel % step:
            gaps.append(gap)
            numel += gap

    for shape in unit.params:
        pad_to(aligned)
        starts.append(numel)
        numel += shape.numel
    pad_to(multiple)
    return FlatUnit(unit, tuple(starts), numel, tuple(gaps), num_shards)


@dataclass(frozen=True)
class Owned:
    """What a rank owns. numels: elements of each tensor its optimizer updates, in the optimizer's order. padding_numel:
    elements of padding in its shards."""

    numels: tuple[int, ...]
    padding_numel: int


def owned_at(spec: RunSpec, place: int) -> Owned:
    """What the ranks own that are at `place` in their shard group."""
    units = flat_units(spec)
    pieces = [unit.pieces(place) for unit in units]
    padding = sum(unit.shard_numel for unit in units) - sum(map(sum, pieces))
    if not value_of(spec.settings, "use_orig_params", spec.impl):
        # A module's own parameters come before those of the modules in it.
        order = sorted(units, key=lambda unit: not is_root(spec, unit.unit))
        return Owned(tuple(unit.shard_numel for unit in order), padding)
    by_unit = list(chain.from_iterable(pieces))
    return Owned(tuple(by_unit[position] for position in _optimizer_order(spec) if by_unit[position]), padding)


@lru_cache(maxsize=256)
def _optimizer_order(spec: RunSpec) -> tuple[int, ...]:
    """Where the parameters stand, unit by unit, that the optimizer has in order of first use."""
    names = [shape.name for unit in flat_units(spec) for shape in unit.unit.params]
    position = {name: index for index, name in enumerate(names)}
    return tuple(position[shape.name] for shape in parameter_order(spec))


def is_root(spec: RunSpec, unit: Unit) -> bool:
    """Whether the unit is the root's own: what no instance inside it has."""
    plan = plan_for(spec)
    return len(plan.units) == 1 or sum(segment.unit == unit.index for segment in plan.segments) > 1


def alike(spec: RunSpec) -> list[tuple[range, Owned]]:
    """The ranks in stretches that own the same. Shard groups are copies of the first."""
    if not value_of(spec.settings, "use_orig_params", spec.impl):
        return [(ranks, owned_at(spec, ranks.start % spec.num_shards)) for ranks in alike_stretches(spec)]
    num_places = 1 if keeps_whole(spec) else spec.num_shards
    first = [(owned, len(list(same))) for owned, same in groupby(owned_at(spec, place) for place in range(num_places))]
    if len(first) == 1:
        return [(range(spec.ranks), first[0][0])]
    every = first * (spec.ranks // num_places)
    starts = accumulate((length for _, length in every), initial=0)
    return [(range(start, start + length), owned) for start, (owned, length) in zip(starts, every, strict=False)]
