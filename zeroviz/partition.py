"""Who holds which elements: units, their flat buffers, padding, and the shard of each rank.

A unit's parameters lie one after another in a flat buffer. A sharded strategy pads the buffer with (-numel) % N
elements at its end, so that rank r owns [r * shard, (r+1) * shard) with shard = padded / N, as ZeRO's
implementations do; the padding therefore falls to the last ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from zeroviz.models import ModelShape, NamedShape, Sublayer, SublayerKind
from zeroviz.spec import RunSpec, Strategy, UnitKind, UnitPolicy


@dataclass(frozen=True, slots=True)
class Unit:
    """A group of parameters gathered and freed together."""

    index: int
    name: str
    params: tuple[NamedShape, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive sublayers of one unit, executed in one go: one forward call and one backward call.

    A unit has one segment, or two when it holds both the tied embedding (first) and the head (last).
    """

    index: int
    unit: int
    name: str
    sublayers: tuple[Sublayer, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Units and segments of one model under one policy; segments are in forward order."""

    units: tuple[Unit, ...]
    segments: tuple[Segment, ...]


@lru_cache(maxsize=256)
def plan_units(model: ModelShape, policy: UnitPolicy) -> Plan:
    """Group the model's sublayers into units by the policy.

    A tied embedding is one parameter used at both ends, so embedding and head share a unit ("root").
    Under `model` everything is one unit and one segment.
    """
    runs: list[tuple[str, list[Sublayer]]] = []
    numel = 0
    for sublayer in model.sublayers:
        label = _label(sublayer, policy, model)
        if policy.kind is UnitKind.NUMEL and sublayer.kind not in (SublayerKind.EMBED, SublayerKind.HEAD):
            start_new = not runs or numel >= policy.count or runs[-1][1][-1].kind is SublayerKind.EMBED
            numel = (0 if start_new else numel) + sum(shape.numel for shape in sublayer.params)
            if start_new:
                runs.append((sublayer.name, [sublayer]))
            else:
                first = runs[-1][1][0].name
                runs[-1] = (f"{first} to {sublayer.name}", [*runs[-1][1], sublayer])
        elif runs and runs[-1][0] == label:
            runs[-1][1].append(sublayer)
        else:
            runs.append((label, [sublayer]))

    unit_of: dict[str, int] = {}
    segments: list[Segment] = []
    for index, (label, sublayers) in enumerate(runs):
        unit = unit_of.setdefault(label, len(unit_of))
        # The root unit has two segments; each is named after what it computes.
        name = sublayers[0].name if label == "root" else label
        segments.append(Segment(index, unit, name, tuple(sublayers)))

    units = []
    for label, index in unit_of.items():
        shapes: dict[str, NamedShape] = {}
        for segment in segments:
            if segment.unit == index:
                for sublayer in segment.sublayers:
                    for shape in sublayer.params:
                        shapes.setdefault(shape.name, shape)
        units.append(Unit(index, label, tuple(shapes.values()), sum(shape.numel for shape in shapes.values())))
    return Plan(tuple(units), tuple(segments))


def _label(sublayer: Sublayer, policy: UnitPolicy, model: ModelShape) -> str:
    if policy.kind is UnitKind.MODEL:
        return "model"
    if sublayer.block is None:
        return "root" if model.tied and sublayer.kind is not SublayerKind.BARE else sublayer.name
    if policy.kind is UnitKind.BLOCK:
        first = sublayer.block // policy.count * policy.count
        last = min(first + policy.count, model.layers) - 1
        return f"block {first}" if first == last else f"blocks {first}-{last}"
    return sublayer.name


def plan_for(spec: RunSpec) -> Plan:
    return plan_units(spec.model, spec.unit)


def is_sharded(spec: RunSpec) -> bool:
    """Whether any state of this spec is cut into shards; DDP's buffers are whole and unpadded."""
    return spec.strategy is not Strategy.DDP


def padded_numel(numel: int, num_ranks: int) -> int:
    """The next multiple of num_ranks: numel + (-numel) % num_ranks. 72 over 7 is 77: 5 added, not 2."""
    return numel + (-numel) % num_ranks


def buffer_numel(unit: Unit, spec: RunSpec) -> int:
    """Elements of the unit's flat buffer on every rank: padded when the strategy shards anything."""
    return padded_numel(unit.numel, spec.ranks) if is_sharded(spec) else unit.numel


def shard_numel(unit: Unit, spec: RunSpec) -> int:
    """Elements one rank owns of the unit, padding included: the same on every rank. The whole unit under DDP."""
    return padded_numel(unit.numel, spec.ranks) // spec.ranks if is_sharded(spec) else unit.numel


def shard_bounds(unit: Unit, spec: RunSpec, rank: int) -> tuple[int, int]:
    """[start, stop) of the rank's shard inside the padded flat buffer."""
    shard = shard_numel(unit, spec)
    return (rank * shard, (rank + 1) * shard) if is_sharded(spec) else (0, shard)


def shard_padding_numel(unit: Unit, spec: RunSpec, rank: int) -> int:
    """How many of the rank's shard elements are padding."""
    start, stop = shard_bounds(unit, spec, rank)
    return (stop - start) - max(0, min(stop, unit.numel) - min(start, unit.numel))
