"""Which implementation lays which parameter where, and what of it each rank holds: the rules behind a shard map.

[Note: slots] The map's axis counts elements. All parameters lie on it unit by unit, each in a slot of its own that
begins with the parameter's elements and ends with the padding that follows it in memory, if there is any. A library's
buffer is a row of slots in the library's own order, which need not be the axis': Megatron's runs from the last
parameter to the first, DeepSpeed's puts a tied root's norm at the end. So a rank's part of a buffer is a stretch of
memory and, on the axis, one or more pieces.

What is cut how is said where each implementation is worked out: `zeroviz.partition` (our own), `zeroviz.witness.flat`
(FSDP1), `fsdp2_groups`, `deepspeed_parts`, `megatron_buffer` and `zero_redundancy`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import NamedTuple

from zeroviz.category import Category
from zeroviz.memory import rest_places
from zeroviz.models import NamedShape
from zeroviz.partition import Unit, buffer_numel, buffers_for, chunk_rows, is_sharded, plan_for, shard_numel
from zeroviz.settings import value_of
from zeroviz.spec import DType, Implementation, RunSpec, Strategy
from zeroviz.witness import deepspeed_parts
from zeroviz.witness.flat import flat_units, keeps_whole
from zeroviz.witness.megatron_buffer import buckets
from zeroviz.witness.zero_redundancy import owners


class TensorClass(Enum):
    """What a panel of the map is about."""

    PARAM = "param"
    KEPT = "kept"
    """Parameters that DeepSpeed's stage 3 keeps whole beside their shards."""
    GRAD = "grad"
    MASTER = "master"
    MOMENTS = "moments"


class Hold(Enum):
    """How a rank holds a piece."""

    OWNED = "owned"
    """Its own part: of all ranks, or of those of its shard group, it alone holds it."""
    WHOLE = "whole"
    """Part of a whole copy that every rank holds."""
    PADDING = "padding"
    """Elements of no parameter, which make parts equal or bring the next parameter to a round place."""


class Piece(NamedTuple):
    """Elements [start, stop) of the axis, within one unit."""

    start: int
    stop: int
    unit: int
    hold: Hold

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Slot(NamedTuple):
    """A parameter's place on the axis: `numel` elements from `start`, then its padding. See [Note: slots]."""

    unit: int
    start: int
    numel: int
    padding: int

    @property
    def stop(self) -> int:
        return self.start + self.numel + self.padding


@dataclass(frozen=True)
class Buffer:
    """Slots one after another in memory, in `num_parts` equal parts: rank r has part r % num_parts."""

    slots: tuple[Slot, ...]
    num_parts: int = 1

    @cached_property
    def _starts(self) -> list[int]:
        """Where each slot begins in memory; the last is the buffer's length."""
        return list(accumulate((slot.numel + slot.padding for slot in self.slots), initial=0))

    @cached_property
    def numel(self) -> int:
        """Padding included."""
        return self._starts[-1]

    def whole(self) -> Iterable[Piece]:
        """All of it on the axis."""
        return self._pieces(0, self.numel, Hold.WHOLE)

    def part(self, rank: int) -> Iterable[Piece]:
        """The rank's part on the axis."""
        part_numel = self.numel // self.num_parts
        first = rank % self.num_parts * part_numel
        return self._pieces(first, first + part_numel, Hold.OWNED)

    def _pieces(self, first: int, stop: int, hold: Hold) -> Iterable[Piece]:
        """Elements [first, stop) of the memory."""
        if len(self.slots) > 1:
            return self._over_slots(first, stop, hold)
        unit, start, numel, _ = self.slots[0]
        first, stop, end = start + first, start + stop, start + numel
        if stop <= end:
            return (Piece(first, stop, unit, hold),)
        padding = Piece(max(first, end), stop, unit, Hold.PADDING)
        return (Piece(first, end, unit, hold), padding) if first < end else (padding,)

    def _over_slots(self, first: int, stop: int, hold: Hold) -> Iterator[Piece]:
        for number in range(bisect_right(self._starts, first) - 1, len(self.slots)):
            slot, at = self.slots[number], self._starts[number]
            if at >= stop:
                break
            low, high = slot.start + max(0, first - at), min(slot.stop, slot.start + stop - at)
            end = slot.start + slot.numel
            if low < min(high, end):
                yield Piece(low, min(high, end), slot.unit, hold)
            if max(low, end) < high:
                yield Piece(max(low, end), high, slot.unit, Hold.PADDING)


@dataclass(frozen=True)
class Holder:
    """Who holds what of one class of tensors.

    copies: 2 for Adam's moments. is_whole: every rank holds all of `buffers`; otherwise its part of each. pads: whether
    the padding is held too. dealt: whole buffers by the rank that owns them, where nothing is cut. quantized: elements
    of each tensor that has scales of its own; None where a rank's elements are counted in one.
    """

    tensors: TensorClass
    category: Category
    dtype: DType
    buffers: tuple[Buffer, ...]
    is_whole: bool
    copies: int = 1
    pads: bool = True
    dealt: Mapping[int, tuple[Buffer, ...]] | None = None
    quantized: tuple[int, ...] | None = None

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What the rank holds, from left to right; neighbours of a unit are one piece."""
        buffers = self.buffers if self.dealt is None else self.dealt.get(rank, ())
        found = chain.from_iterable(each.whole() if self.is_whole else each.part(rank) for each in buffers)
        return tuple(_joined(sorted(piece for piece in found if self.pads or piece.hold is not Hold.PADDING)))


@dataclass(frozen=True)
class Rules:
    """A spec's axis, as one row of slots, and who holds what on it. left_out: bytes at rest that belong to no parameter
    and so have no place on the axis."""

    slots: tuple[Slot, ...]
    holders: tuple[Holder, ...]
    left_out: Mapping[Category, int] = field(default_factory=dict)


def rules_of(spec: RunSpec) -> Rules:
    """Of every implementation: a few microseconds a parameter, whatever the number of ranks."""
    rules = _RULES[spec.impl](spec)
    held = tuple(holder for holder in rules.holders if holder.copies and holder.buffers)
    return replace(rules, holders=held, left_out={which: nbytes for which, nbytes in rules.left_out.items() if nbytes})


# ---- our own ----


def _own(spec: RunSpec) -> Rules:
    """A buffer for each unit, padded at its end, or one over all of them."""
    recipe, strategy, places = spec.recipe, spec.strategy, rest_places(spec)
    units = buffers_for(spec)
    slots = _laid_out(spec, {unit.params[-1].name: buffer_numel(unit, spec) - unit.numel for unit in units})
    num_parts = spec.num_shards if is_sharded(spec) else 1
    if strategy.has_whole_buffer:
        buffers = tuple(_buffer(slots, unit.params, num_parts) for unit in units)
    else:  # a unit's parameters lie one after another: in memory it is one slot
        ends = [(slots[unit.params[0].name], slots[unit.params[-1].name]) for unit in units]
        in_memory = [
            Slot(unit.index, first.start, unit.numel, last.padding)
            for unit, (first, last) in zip(units, ends, strict=True)
        ]
        buffers = tuple(Buffer((slot,), num_parts) for slot in in_memory)
    is_whole = not strategy.shards_optimizer
    holders = [
        Holder(TensorClass.PARAM, places.param, recipe.param, buffers, not strategy.shards_param),
        Holder(TensorClass.GRAD, places.grad, recipe.grad, buffers, not strategy.shards_grad),
    ]
    if places.master:
        holders.append(Holder(TensorClass.MASTER, places.master, recipe.update, buffers, is_whole))
    quantized = tuple(shard_numel(unit, spec) for unit in units)
    moments = _moments(spec, buffers, is_whole, quantized=quantized)
    return Rules(tuple(slots.values()), (*holders, replace(moments, category=places.moments)))


# ---- torch's ----


def _ddp(spec: RunSpec) -> Rules:
    """Every parameter a tensor of its own, whole. The reducer's buckets are a copy of the gradients."""
    recipe, slots = spec.recipe, _laid_out(spec, {})
    buffers = tuple(Buffer((slot,)) for slot in slots.values())
    holders = (
        Holder(TensorClass.PARAM, Category.UNSHARDED_PARAM, recipe.param, buffers, is_whole=True),
        Holder(TensorClass.GRAD, Category.UNSHARDED_GRAD, recipe.grad, buffers, is_whole=True),
        _moments(spec, buffers, is_whole=True),
    )
    copied = not value_of(spec.settings, "bucket_view", spec.impl)
    bucket_nbytes = spec.model.num_params * recipe.grad.itemsize * copied
    return Rules(tuple(slots.values()), holders, {Category.BUCKET: bucket_nbytes})


def _zero_redundancy(spec: RunSpec) -> Rules:
    """DDP's, but for the moments: those of whole parameters, dealt out. Ranks beyond the parameters get none."""
    rules, slots = _ddp(spec), _laid_out(spec, {})
    dealing = replace(spec, ranks=min(spec.ranks, len(spec.model.params)))
    dealt = {
        rank: tuple(Buffer((slots[shape.name],)) for shape in shapes) for rank, shapes in enumerate(owners(dealing))
    }
    *holders, moments = rules.holders
    return replace(rules, holders=(*holders, replace(moments, is_whole=False, dealt=dealt)))


def _fsdp1(spec: RunSpec) -> Rules:
    """A flat parameter for each unit, with padding at its end and, with `use_orig_params`, before its parameters. The
    gradient is held in the parameters' dtype; moments are the flat shard's, or those of the pieces in it."""
    recipe, units, is_whole = spec.recipe, flat_units(spec), keeps_whole(spec)
    padding = {}
    for flat in units:
        ends = [start + numel for start, numel in zip(flat.starts, flat.numels, strict=True)]
        for shape, end, following in zip(flat.unit.params, ends, (*flat.starts[1:], flat.gathered_numel), strict=True):
            padding[shape.name] = following - end
    slots = _laid_out(spec, padding)
    buffers = tuple(_buffer(slots, flat.unit.params, flat.num_shards) for flat in units)
    param, grad = (
        (Category.UNSHARDED_PARAM, Category.UNSHARDED_GRAD)
        if is_whole
        else (Category.SHARDED_PARAM, Category.SHARDED_GRAD)
    )
    pads = not value_of(spec.settings, "use_orig_params", spec.impl)
    holders = (
        Holder(TensorClass.PARAM, param, recipe.param, buffers, is_whole),
        Holder(TensorClass.GRAD, grad, recipe.param, buffers, is_whole),
        replace(_moments(spec, buffers, is_whole), pads=pads),
    )
    return Rules(tuple(slots.values()), holders)


def _fsdp2(spec: RunSpec) -> Rules:
    """Each parameter in equal chunks of rows, padded; moments are those of a rank's rows, without padding."""
    num_shards = spec.num_shards
    shapes = [shape for unit in plan_for(spec).units for shape in unit.params]
    rows = {shape.name: chunk_rows(shape.shape[0], num_shards) * num_shards for shape in shapes}
    slots = _laid_out(
        spec, {shape.name: (rows[shape.name] - shape.shape[0]) * (shape.numel // shape.shape[0]) for shape in shapes}
    )
    buffers = tuple(Buffer((slot,), num_shards) for slot in slots.values())
    holders = (
        Holder(TensorClass.PARAM, Category.SHARDED_PARAM, spec.recipe.param, buffers, is_whole=False),
        Holder(TensorClass.GRAD, Category.SHARDED_GRAD, spec.recipe.param, buffers, is_whole=False),
        replace(_moments(spec, buffers, is_whole=False), pads=False),
    )
    return Rules(tuple(slots.values()), holders)


# ---- DeepSpeed and Megatron ----


def _deepspeed(spec: RunSpec) -> Rules:
    """Stage 0 cuts nothing, stages 1 and 2 one flat tensor, stage 3 each parameter. What is neither a state nor of a
    parameter is left out: stage 3's bucket, the gradient's norm, a flag."""
    recipe, order = spec.recipe, deepspeed_parts.parameter_order(spec)
    is_cut, by_parameter = spec.strategy is not Strategy.DDP, spec.strategy is Strategy.ZERO3
    if by_parameter:
        slots = _laid_out(spec, {shape.name: -shape.numel % spec.ranks for shape in order})
    else:
        end = deepspeed_parts.flat_numel(spec) - spec.model.num_params if is_cut else 0
        slots = _laid_out(spec, {order[-1].name: end})
    num_parts = spec.ranks if is_cut else 1
    cut = [(shape,) for shape in order] if by_parameter or not is_cut else [order]
    buffers = tuple(_buffer(slots, shapes, num_parts) for shapes in cut)
    kept = tuple(_buffer(slots, (shape,), 1) for shape in order if deepspeed_parts.is_persistent(spec, shape))
    param = Category.SHARDED_PARAM if by_parameter else Category.UNSHARDED_PARAM
    holders = [Holder(TensorClass.PARAM, param, recipe.param, buffers, not by_parameter)]
    if by_parameter:
        holders += [
            Holder(TensorClass.KEPT, Category.UNSHARDED_PARAM, recipe.param, kept, is_whole=True),
            Holder(TensorClass.GRAD, Category.SHARDED_GRAD, recipe.grad, buffers, is_whole=False),
        ]
    elif deepspeed_parts.keeps_whole_gradients(spec):
        holders.append(Holder(TensorClass.GRAD, Category.UNSHARDED_GRAD, recipe.grad, buffers, is_whole=True))
    if is_cut or recipe.master:
        holders.append(Holder(TensorClass.MASTER, Category.MASTER_PARAM, DType.FP32, buffers, not is_cut))
    quantized = tuple(deepspeed_parts.updated_numels(spec))
    holders.append(_moments(spec, buffers, not is_cut, quantized=quantized))
    rest = deepspeed_parts.rest_of(spec)
    left_out = {which: rest.get(which, 0) for which in (Category.BUCKET, Category.TEMPORARY)}
    return Rules(tuple(slots.values()), tuple(holders), left_out)


def _megatron(spec: RunSpec) -> Rules:
    """Whole buffers in buckets; of each bucket a rank owns the master and the moments of its part, without padding."""
    recipe, padding = spec.recipe, {}
    parts = buckets(spec)
    for bucket in parts:
        starts = [extent.start for extent in bucket.extents[1:]]
        for extent, following in zip(bucket.extents, (*starts, bucket.stop), strict=True):
            padding[extent.shape.name] = following - extent.stop
    slots = _laid_out(spec, padding)
    buffers = tuple(_buffer(slots, [extent.shape for extent in bucket.extents], spec.ranks) for bucket in parts)
    holders = [
        Holder(TensorClass.PARAM, Category.UNSHARDED_PARAM, recipe.param, buffers, is_whole=True),
        Holder(TensorClass.GRAD, Category.UNSHARDED_GRAD, recipe.grad, buffers, is_whole=True),
    ]
    if recipe.param is not recipe.update:
        master = Holder(TensorClass.MASTER, Category.MASTER_PARAM, recipe.update, buffers, is_whole=False, pads=False)
        holders.append(master)
    return Rules(tuple(slots.values()), (*holders, replace(_moments(spec, buffers, is_whole=False), pads=False)))


_RULES: Mapping[Implementation, Callable[[RunSpec], Rules]] = {
    Implementation.OWN: _own,
    Implementation.DDP: _ddp,
    Implementation.ZERO_REDUNDANCY: _zero_redundancy,
    Implementation.FSDP1: _fsdp1,
    Implementation.FSDP2: _fsdp2,
    Implementation.DEEPSPEED: _deepspeed,
    Implementation.MEGATRON: _megatron,
}


# ---- shared ----


def _moments(
    spec: RunSpec, buffers: tuple[Buffer, ...], is_whole: bool, quantized: tuple[int, ...] | None = None
) -> Holder:
    make = partial(Holder, TensorClass.MOMENTS, Category.OPTIMIZER_STATE, spec.recipe.moments, buffers, is_whole)
    return make(copies=spec.recipe.num_moments, quantized=quantized)


def _laid_out(spec: RunSpec, padding: Mapping[str, int]) -> dict[str, Slot]:
    """Each parameter's slot by its name, unit by unit; `padding`: elements that follow a parameter."""
    slots: dict[str, Slot] = {}
    start = 0
    for unit in plan_for(spec).units:
        for shape in unit.params:
            slot = Slot(unit.index, start, shape.numel, padding.get(shape.name, 0))
            slots[shape.name] = slot
            start = slot.stop
    return slots


def _buffer(slots: Mapping[str, Slot], shapes: Iterable[NamedShape], num_parts: int) -> Buffer:
    return Buffer(tuple(slots[shape.name] for shape in shapes), num_parts)


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Neighbours that touch, are of one unit and held alike, as one."""
    now: Piece | None = None
    for piece in pieces:
        if now is not None and now.stop == piece.start and now.unit == piece.unit and now.hold is piece.hold:
            now = now._replace(stop=piece.stop)
            continue
        if now is not None:
            yield now
        now = piece
    if now is not None:
        yield now


def columns_of(units: Sequence[Unit], slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """[start, stop) of each unit on the axis, its padding included."""
    starts: dict[int, int] = {}
    stops: dict[int, int] = {}
    for slot in slots:
        starts.setdefault(slot.unit, slot.start)
        stops[slot.unit] = slot.stop
    return [(starts[unit.index], stops[unit.index]) for unit in units]
