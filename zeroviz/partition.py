"""Who holds which elements: units, their flat buffers, padding, and the shard of each rank.

A unit's parameters lie one after another in a flat buffer. A sharded strategy pads the buffer with (-numel) % N
elements at its end, so that rank r owns [r * shard, (r+1) * shard) with shard = padded / N, as ZeRO's
implementations do; the padding therefore falls to the last ranks. HYBRID_SHARD cuts by its group's G ranks instead of
N: rank r owns what r % G says. Megatron's optimizer has one buffer, in which the units lie one after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby, pairwise

from zeroviz.models import ModelShape, NamedShape, Sublayer, SublayerKind
from zeroviz.policies import KEEP_ALL
from zeroviz.spec import Checkpointing, Implementation, RunSpec, Strategy, UnitKind, UnitPolicy


@dataclass(frozen=True, slots=True)
class Unit:
    """A group of parameters gathered and freed together."""

    index: int
    name: str
    params: tuple[NamedShape, ...]
    numel: int
    num_slices: int = field(init=False)
    """How many times its largest parameter it is, rounded up. See `update_numels`."""

    def __post_init__(self) -> None:
        largest = max((shape.numel for shape in self.params), default=self.numel)
        object.__setattr__(self, "num_slices", -(-self.numel // largest) if largest else 1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sublayer stands in its segment.

    first, last: its input or its output crosses the segment's border, and so the caller holds it in forward.
    tied: embedding and head of a tied model are both in the segment.
    dropped: its output ends a recomputed region, where nobody takes it.
    in_graph: the whole model is one graph, so that in backward nobody holds what crosses the border.
    """

    first: bool
    last: bool
    tied: bool
    dropped: bool = False
    in_graph: bool = False

    @property
    def input_held(self) -> bool:
        """Whether the caller holds the input until backward is over."""
        return self.first and not self.in_graph

    @property
    def output_held(self) -> bool:
        """Whether the caller holds the output's gradient while backward runs."""
        return self.last and not self.in_graph


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive sublayers of one unit, executed in one go: one forward call and one backward call.

    A unit has one segment, or two when it holds both the tied embedding (first) and the head (last). Checkpointing
    cuts further: a segment then lies in one region, the blocks that are recomputed together, or in none (`region`
    None: embedding and head). A region of several units has as many segments.
    """

    index: int
    unit: int
    name: str
    sublayers: tuple[Sublayer, ...]
    region: int | None = None
    starts_region: bool = False
    ends_region: bool = False
    places: tuple[tuple[SublayerKind, Place], ...] = field(init=False)
    """The sublayers, each with its place; none for a bare count."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", _places(self.sublayers, dropped=self.ends_region))


@dataclass(frozen=True)
class Plan:
    """Units and segments of one model under one policy; segments are in forward order."""

    units: tuple[Unit, ...]
    segments: tuple[Segment, ...]

    @cached_property
    def whole_buffer(self) -> Unit:
        """One buffer without a name over all units."""
        params = tuple(shape for unit in self.units for shape in unit.params)
        return Unit(0, "", params, sum(unit.numel for unit in self.units))

    @cached_property
    def alike(self) -> tuple[tuple[Unit, int], ...]:
        """A unit of each size, and how many there are: what sums over units need, however many blocks there are."""
        first: dict[tuple[int, int], Unit] = {}
        for unit in self.units:
            first.setdefault((unit.numel, unit.num_slices), unit)
        counts = Counter((unit.numel, unit.num_slices) for unit in self.units)
        return tuple((unit, counts[size]) for size, unit in first.items())


@lru_cache(maxsize=256)
def plan_units(model: ModelShape, policy: UnitPolicy, checkpointing: Checkpointing = KEEP_ALL) -> Plan:
    """Group the model's sublayers into units by the policy, and cut these into segments where regions begin and end.

    A tied embedding is one parameter used at both ends, so embedding and head share a unit ("root").
    Under `model` everything is one unit, and without checkpointing one segment.
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
    for label, sublayers in runs:
        unit = unit_of.setdefault(label, len(unit_of))
        for region, part in groupby(sublayers, lambda sublayer: _region(sublayer, checkpointing)):
            piece = tuple(part)
            segments.append(Segment(len(segments), unit, _segment_name(label, sublayers, piece), piece, region))

    units = []
    for label, index in unit_of.items():
        shapes: dict[str, NamedShape] = {}
        for segment in segments:
            if segment.unit == index:
                for sublayer in segment.sublayers:
                    for shape in sublayer.params:
                        shapes.setdefault(shape.name, shape)
        units.append(Unit(index, label, tuple(shapes.values()), sum(shape.numel for shape in shapes.values())))
    return Plan(tuple(units), tuple(_finished(segments)))


def _finished(segments: list[Segment]) -> Iterator[Segment]:
    """Say of each segment whether it begins or ends a region."""
    regions = [None, *(segment.region for segment in segments), None]
    for segment, before, after in zip(segments, regions, regions[2:], strict=False):
        inside = segment.region is not None
        starts, ends = inside and before != segment.region, inside and after != segment.region
        yield replace(segment, starts_region=starts, ends_region=ends)


def _places(sublayers: tuple[Sublayer, ...], *, dropped: bool) -> tuple[tuple[SublayerKind, Place], ...]:
    if sublayers[0].kind is SublayerKind.BARE:
        return ()
    last = len(sublayers) - 1
    # A parameter in the segment's first and last sublayer is a tied embedding with the whole model between.
    tied = last > 0 and not {shape.name for shape in sublayers[0].params}.isdisjoint(
        shape.name for shape in sublayers[last].params
    )
    return tuple(
        (sublayer.kind, Place(i == 0, i == last, tied, dropped and i == last)) for i, sublayer in enumerate(sublayers)
    )


def _segment_name(label: str, run: list[Sublayer], piece: tuple[Sublayer, ...]) -> str:
    """The unit's, where the segment is all the unit does in a row; the root's are named after what they compute."""
    if len(piece) == len(run) and label != "root":
        return label
    return piece[0].name if len(piece) == 1 else f"{piece[0].name} to {piece[-1].name}"


def _region(sublayer: Sublayer, checkpointing: Checkpointing) -> int | None:
    """Which checkpointed region the sublayer is in, counted from 0; None where everything is kept."""
    return sublayer.block // checkpointing.blocks if checkpointing and sublayer.block is not None else None


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
    return plan_units(spec.model, spec.unit, spec.checkpointing)


def is_sharded(spec: RunSpec) -> bool:
    """Whether any state of this spec is cut into shards; DDP's buffers are whole and unpadded."""
    return spec.strategy is not Strategy.DDP


def buffers_for(spec: RunSpec) -> tuple[Unit, ...]:
    """What is cut into shards, reduced and updated in one go: each unit, or one buffer without a name over all."""
    plan = plan_for(spec)
    return (plan.whole_buffer,) if spec.strategy.has_whole_buffer else plan.units


def alike_buffers(spec: RunSpec) -> tuple[tuple[Unit, int], ...]:
    """One of `buffers_for` of each size, and how many of it there are."""
    plan = plan_for(spec)
    return ((plan.whole_buffer, 1),) if spec.strategy.has_whole_buffer else plan.alike


def padded_numel(numel: int, num_ranks: int) -> int:
    """The next multiple of num_ranks: numel + (-numel) % num_ranks. 72 over 7 is 77: 5 added, not 2."""
    return numel + (-numel) % num_ranks


def buffer_numel(unit: Unit, spec: RunSpec) -> int:
    """Elements of the unit's flat buffer on every rank: padded when the strategy shards anything."""
    return padded_numel(unit.numel, spec.num_shards) if is_sharded(spec) else unit.numel


def shard_numel(unit: Unit, spec: RunSpec) -> int:
    """Elements one rank owns of the unit, padding included: the same on every rank. The whole unit under DDP."""
    return -(-unit.numel // spec.num_shards) if is_sharded(spec) else unit.numel


def update_numels(unit: Unit, spec: RunSpec) -> tuple[int, ...]:
    """Elements of the shard that are updated at a time: slices, even but for the last.

    There are as many as the unit is larger than its largest parameter, so that a slice, and what the optimizer makes
    for it, is no larger than a shard of that parameter, however large the unit. An optimizer that updates everything
    together gains nothing by slices and gets one.
    """
    shard = shard_numel(unit, spec)
    if spec.optimizer.steps_together:
        return (shard,)
    length = slice_numel(unit, spec)
    return tuple(min(length, shard - start) for start in range(0, shard, length))


def slice_numel(unit: Unit, spec: RunSpec) -> int:
    """Elements of the longest slice of `update_numels`."""
    return -(-shard_numel(unit, spec) // (1 if spec.optimizer.steps_together else unit.num_slices))


def shard_bounds(unit: Unit, spec: RunSpec, rank: int) -> tuple[int, int]:
    """[start, stop) of the rank's shard inside the padded flat buffer."""
    shard = shard_numel(unit, spec)
    part = rank % spec.num_shards if is_sharded(spec) else 0
    return part * shard, (part + 1) * shard


def shard_padding_numel(unit: Unit, spec: RunSpec, rank: int) -> int:
    """How many of the rank's shard elements are padding."""
    start, stop = shard_bounds(unit, spec, rank)
    return (stop - start) - max(0, min(stop, unit.numel) - min(start, unit.numel))


def padding_numel(unit: Unit, spec: RunSpec) -> int:
    """Elements of padding in the gathered unit, of our own code's or FSDP2's (`zeroviz.witness.flat` has FSDP1's).

    FSDP2 cuts each parameter by rows and pads each to N equal chunks.
    """
    if spec.impl is Implementation.OWN:
        return buffer_numel(unit, spec) - unit.numel
    num_shards = spec.num_shards
    padded_rows = [(shape, chunk_rows(shape.shape[0], num_shards) * num_shards) for shape in unit.params]
    return sum((rows - shape.shape[0]) * (shape.numel // shape.shape[0]) for shape, rows in padded_rows)


def chunk_rows(num_rows: int, num_ranks: int) -> int:
    """Rows of each of FSDP2's chunks, padding included: 5 rows over 3 ranks are 2 a rank."""
    return -(-num_rows // num_ranks)


def local_rows(num_rows: int, num_ranks: int, rank: int) -> int:
    """Rows of the rank's chunk, padding left out: 5 rows over 3 ranks are 2, 2 and 1."""
    chunk = chunk_rows(num_rows, num_ranks)
    return max(0, min(chunk, num_rows - rank * chunk))


def alike_stretches(spec: RunSpec) -> tuple[range, ...]:
    """Stretches of neighbouring ranks whose shards have equal padding in every buffer; all ranks are one where none
    pads. Shard groups are copies of the first.

    A buffer's shards are full up to the rank in which it ends, that one is partly padding, those after are all of it.
    """
    size = spec.num_shards
    borders = {0}
    if is_sharded(spec):
        for buffer, _ in alike_buffers(spec):
            whole, rest = divmod(buffer.numel, shard_numel(buffer, spec))
            borders |= {whole, whole + (rest > 0)}
    starts = sorted(border for border in borders if border < size)
    if len(starts) == 1:
        return (range(spec.ranks),)
    ordered = [group + start for group in range(0, spec.ranks, size) for start in starts]
    return tuple(range(start, stop) for start, stop in pairwise([*ordered, spec.ranks]))
