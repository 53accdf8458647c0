"""RunSpec -> ShardMap: who holds what between two steps, as data. In the manner of the ZeRO paper's figure: the states
along an axis, a row for every rank, and lit what the rank holds. (Rajbhandari et al., arXiv 1910.02054, Figure 1.)

The axis counts elements, unit by unit, padding at its place ([Note: slots] in `zeroviz.shard_rules`). There is a panel
for each class of tensors that is held at rest. Bytes follow from the pieces, and are those of the predicted trace.

[Note: folded] Of more than `MAX_ROWS` ranks the first are drawn, the last, where padding falls, and one row for all
between. Nothing is worked out for those, so that a million ranks cost as much as sixteen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zeroviz.category import Category
from zeroviz.partition import plan_for
from zeroviz.precision import Recipe
from zeroviz.quantity import format_nbytes
from zeroviz.shard_rules import Hold, Holder, Piece, Rules, Slot, TensorClass, columns_of, rules_of
from zeroviz.spec import DType, Implementation, RunSpec, Strategy
from zeroviz.wording import title, what_text

MAX_ROWS = 16
"""Of ranks; above it the ranks in the middle share a row."""
NUM_FIRST, MAX_LAST = 7, 4
"""Ranks drawn one by one before that row, and at most after it."""

_Known = dict[tuple[object, ...], tuple[tuple[Piece, ...], int]]
"""Pieces and their elements in all, by what they follow from: classes that are cut alike share them."""


@dataclass(frozen=True, slots=True)
class Column:
    """A unit on the axis: elements [start, stop), padding included; `numel` of them are its parameters'."""

    index: int
    name: str
    start: int
    stop: int
    numel: int


@dataclass(frozen=True, slots=True)
class Row:
    """One rank or, `is_folded`, all those between the ones drawn. group, shard: of hybrid_shard, the shard group, which
    is a replica, and which shard of it the rank holds. parts: of folded ranks, what each has of what is sharded."""

    ranks: range
    is_folded: bool = False
    group: int | None = None
    shard: int | None = None
    parts: str = ""

    @property
    def rank_label(self) -> str:
        return f"ranks {self.ranks[0]:,} to {self.ranks[-1]:,}" if self.is_folded else f"rank {self.ranks[0]:,}"

    @property
    def label(self) -> str:
        """`rank 5`, `rank 5, group 1, shard 1`, `ranks 7 to 62`."""
        return self.rank_label + ("" if self.group is None else f", group {self.group:,}, shard {self.shard:,}")


@dataclass(frozen=True, slots=True)
class Lane:
    """What a row holds of a panel's class. nbytes: padding and scales included; None of a folded row whose ranks each
    hold something else."""

    row: int
    pieces: tuple[Piece, ...]
    scales_nbytes: int
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Panel:
    """A class of tensors. manner: how it is held; detail: its dtype; words: who holds what, and how many bytes.

    itemsize: bytes of an element of one copy; copies: 2 for Adam's moments.
    """

    tensors: TensorClass
    category: Category
    name: str
    manner: str
    detail: str
    words: str
    itemsize: int
    copies: int
    is_whole: bool
    lanes: tuple[Lane, ...]

    @property
    def label(self) -> str:
        """`Parameters, own shard`."""
        return f"{self.name}, {self.manner}"

    def nbytes_of(self, numel: int) -> int:
        """Bytes of so many elements of this class, scales apart."""
        return numel * self.itemsize * self.copies


@dataclass(frozen=True)
class ShardMap:
    """The whole map as data."""

    spec: RunSpec
    title: str
    subtitle: tuple[str, ...]
    columns: tuple[Column, ...]
    slots: tuple[Slot, ...]
    rows: tuple[Row, ...]
    panels: tuple[Panel, ...]
    left_out: Mapping[Category, int]
    notes: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Of the axis, padding included."""
        return self.columns[-1].stop

    @property
    def has_padding(self) -> bool:
        return any(slot.padding for slot in self.slots)

    @property
    def sentence(self) -> str:
        """The map in words, for those who do not see it."""
        held = (f"{panel.name}: {panel.words}" for panel in self.panels)
        return " ".join(f"{line}." for line in (self.title, *self.subtitle, *held))


def build_shard_map(spec: RunSpec) -> ShardMap:
    """Who holds what under `spec` between two steps. See [Note: folded]."""
    rules, units = rules_of(spec), plan_for(spec).units
    known: _Known = {}
    rows = tuple(_rows(spec, rules, known))
    panels = tuple(_panel(spec, holder, rows, known) for holder in rules.holders)
    bounds = columns_of(units, rules.slots)
    return ShardMap(
        spec=spec,
        title=f"{title(spec)}: who holds what",
        subtitle=(what_text(spec), _total_line(spec, rows, panels)),
        columns=tuple(
            Column(unit.index, unit.name, start, stop, unit.numel)
            for unit, (start, stop) in zip(units, bounds, strict=True)
        ),
        slots=rules.slots,
        rows=rows,
        panels=panels,
        left_out=rules.left_out,
        notes=tuple(_notes(spec, rules, rows, panels)),
    )


# ---- rows ----


def _rows(spec: RunSpec, rules: Rules, known: _Known) -> Iterator[Row]:
    """Every rank's or, of many, the first ones', one for those between, and the last ones'."""
    num_ranks = spec.ranks
    first, last = (num_ranks, 0) if num_ranks <= MAX_ROWS else _drawn(spec, rules, known)
    yield from (_row(spec, rank) for rank in range(first))
    if first + last < num_ranks:
        yield Row(range(first, num_ranks - last), is_folded=True, parts=_parts(spec, first))
    yield from (_row(spec, rank) for rank in range(num_ranks - last, num_ranks))


def _parts(spec: RunSpec, first: int) -> str:
    """What the ranks from `first` on hold of what is sharded: a group that is drawn whole is the whole of it."""
    if spec.num_replicas == 1 or not spec.strategy.replicates:
        return "each its own part"
    if first < spec.num_shards:
        return "each its own part of its group"
    return f"replicas of {f'ranks 0 to {spec.num_shards - 1:,}' if spec.num_shards > 1 else 'rank 0'}"


def _drawn(spec: RunSpec, rules: Rules, known: _Known) -> tuple[int, int]:
    """How many ranks are drawn one by one before and after the folded row: whole shard groups, if they are small; at
    the end those with padding."""
    group = spec.num_shards if spec.strategy.replicates else spec.ranks
    if group <= NUM_FIRST:
        return NUM_FIRST // group * group, min(group, MAX_LAST)
    cut = [holder for holder in rules.holders if holder.pads and not holder.is_whole]
    last = 1
    for number in range(2, MAX_LAST + 1):
        rank = (spec.ranks - number) % group
        if any(piece.hold is Hold.PADDING for holder in cut for piece in _pieces_of(holder, rank, known)[0]):
            last = number
    return min(group, NUM_FIRST + 1) if spec.strategy.replicates else NUM_FIRST, last


def _row(spec: RunSpec, rank: int) -> Row:
    ranks = range(rank, rank + 1)
    if not spec.strategy.replicates:
        return Row(ranks)
    group, shard = divmod(rank, spec.num_shards)
    return Row(ranks, group=group, shard=shard)


# ---- panels ----


def _panel(spec: RunSpec, holder: Holder, rows: Sequence[Row], known: _Known) -> Panel:
    manner, words = _held_words(spec, holder)
    width = f"{holder.copies} x {holder.dtype.itemsize} B" if holder.copies > 1 else f"{holder.dtype.itemsize} B"
    lanes = tuple(_lanes(spec.recipe, holder, rows, known))
    return Panel(
        tensors=holder.tensors,
        category=holder.category,
        name=_name(holder),
        manner=manner,
        detail=f"{holder.dtype.value}, {width} an element" + ("; in the host's memory" * holder.category.on_host),
        words=f"{words}, {_nbytes_words(rows, lanes)}" + (" in the host's memory" * holder.category.on_host),
        itemsize=holder.dtype.itemsize,
        copies=holder.copies,
        is_whole=holder.is_whole,
        lanes=lanes,
    )


def _lanes(recipe: Recipe, holder: Holder, rows: Sequence[Row], known: _Known) -> Iterator[Lane]:
    scales_of = recipe.num_scales if holder.tensors is TensorClass.MOMENTS else lambda _: 0
    for number, row in enumerate(rows):
        if row.is_folded and not holder.is_whole:
            yield Lane(number, (), 0, None)
            continue
        # Every rank holds the same whole, and every group the same shards.
        rank = 0 if holder.is_whole else row.ranks[0] if row.shard is None else row.shard
        pieces, numel = _pieces_of(holder, rank, known)
        tensors = (numel,) if holder.quantized is None else holder.quantized
        scales_nbytes = holder.copies * sum(map(scales_of, tensors)) * DType.FP32.itemsize
        yield Lane(number, pieces, scales_nbytes, numel * holder.dtype.itemsize * holder.copies + scales_nbytes)


def _pieces_of(holder: Holder, rank: int, known: _Known) -> tuple[tuple[Piece, ...], int]:
    key = (id(holder.buffers), holder.is_whole, holder.pads, holder.dealt is None, rank)
    found = known.get(key)
    if found is None:
        pieces = holder.pieces(rank)
        found = known[key] = pieces, sum(piece.stop - piece.start for piece in pieces)
    return found


def _name(holder: Holder) -> str:
    if holder.tensors is TensorClass.MOMENTS:
        return "Adam m and v" if holder.copies == 2 else "Momentum"
    return {
        TensorClass.PARAM: "Parameters",
        TensorClass.KEPT: "Small parameters",
        TensorClass.GRAD: "Gradients",
        TensorClass.MASTER: "Master copy",
    }[holder.tensors]


def _held_words(spec: RunSpec, holder: Holder) -> tuple[str, str]:
    """(on the panel, in the sentence)"""
    if holder.tensors is TensorClass.KEPT:
        return "whole beside their shards", "a whole copy on every rank, beside its shards"
    if holder.dealt is not None:
        return "of own parameters", "those of whole parameters, dealt out to the ranks"
    if holder.is_whole:
        return "whole copy", "a whole copy on every rank" if spec.ranks > 1 else "a whole copy on the only rank"
    if spec.strategy.replicates:
        return "own shard", "each rank its own shard, the same ones in every group"
    return "own shard", "each rank its own shard"


def _nbytes_words(rows: Sequence[Row], lanes: Sequence[Lane]) -> str:
    """`133,116 B`, or the least and the most with the first rank that holds so much."""
    held = [(lane.nbytes, rows[lane.row].ranks[0]) for lane in lanes if lane.nbytes is not None]
    (least, low), (most, high) = min(held), max(held, key=lambda pair: (pair[0], -pair[1]))
    if least == most:
        return f"{most:,} B" + (" each" if len(rows) > 1 else "")
    drawn = " of those drawn" if any(row.is_folded for row in rows) else ""
    return f"{least:,} B on rank {low:,} to {most:,} B on rank {high:,}{drawn}"


# ---- words ----


def _total_line(spec: RunSpec, rows: Sequence[Row], panels: Sequence[Panel]) -> str:
    """What a rank holds of all panels, beside what it would if everything were whole and nothing padded."""
    totals = [
        (sum(panel.lanes[number].nbytes or 0 for panel in panels), row.ranks[0])
        for number, row in enumerate(rows)
        if not row.is_folded
    ]
    whole = sum(
        panel.itemsize * panel.copies * spec.model.num_params
        for panel in panels
        if panel.tensors is not TensorClass.KEPT
    )
    (least, low), (most, high) = min(totals), max(totals, key=lambda pair: (pair[0], -pair[1]))
    held = f"{'each rank' if spec.ranks > 1 else 'the only rank'} holds {format_nbytes(most)} of these states"
    if format_nbytes(least) == format_nbytes(most) and least != most:
        held += f", within {most - least:,} B"
    elif least != most:
        held = f"rank {low:,} holds {format_nbytes(least)} of these states, rank {high:,} {format_nbytes(most)}"
    if any(panel.category.on_host for panel in panels):
        held += ", the host's memory included"
    return f"Between two steps {held}; whole, they are {format_nbytes(whole)}"


def _notes(spec: RunSpec, rules: Rules, rows: Sequence[Row], panels: Sequence[Panel]) -> Iterator[str]:
    if spec.strategy.replicates and spec.num_replicas > 1:
        size = spec.num_shards
        yield (
            f"Ranks 0 to {size - 1:,} are shard group 0, the next {size:,} are group 1, and so on: "
            f"{spec.num_replicas:,} groups, each a replica of the others."
        )
    if folded := next((row for row in rows if row.is_folded), None):
        end = "; padding falls to the last ranks" if any(slot.padding for slot in rules.slots) else ""
        yield f"{len(folded.ranks):,} ranks share one row, {folded.rank_label}{end}."
    yield from _LIBRARY_NOTES.get(spec.impl, lambda _: ())(spec)
    drawn = {panel.tensors for panel in panels}
    if TensorClass.GRAD not in drawn:
        yield "No gradient is held between two steps."
    if TensorClass.MOMENTS not in drawn:
        yield "Plain SGD holds no state."
    scales = {lane.scales_nbytes for panel in panels for lane in panel.lanes if lane.scales_nbytes}
    if scales:
        yield f"Counted, but not drawn: up to {format_nbytes(max(scales))} of scales of the quantized moments."
    if padding := sum(slot.padding for slot in rules.slots):
        yield f"Padding: {padding:,} elements beside {spec.model.num_params:,} of parameters."
    if rules.left_out:
        parts = " and ".join(f"{format_nbytes(nbytes)} {_LEFT_OUT[which]}" for which, nbytes in rules.left_out.items())
        yield f"At rest as well, but along no parameter and so not drawn: {parts}, each rank."


_LEFT_OUT = {Category.BUCKET: "of gradient buckets", Category.TEMPORARY: "of norms and flags"}


def _note_of_zero_redundancy(spec: RunSpec) -> Iterator[str]:
    yield "No parameter is cut: the largest goes first, to the rank that owns least so far."
    if (num_params := len(spec.model.params)) < spec.ranks:
        yield f"There are {num_params:,} parameters, so that ranks from {num_params:,} on own nothing."


def _note_of_fsdp2(spec: RunSpec) -> Iterator[str]:
    yield "Each parameter is cut by rows. A short or an empty piece is padded, but not its moments."


def _note_of_deepspeed(spec: RunSpec) -> Iterator[str]:
    if spec.strategy is Strategy.ZERO3:
        yield "Each parameter is cut by itself, whatever its rows, and small ones are kept whole besides."
    elif spec.strategy is not Strategy.DDP:
        yield "All parameters lie in one flat tensor in order of use, cut into N equal parts."


def _note_of_megatron(spec: RunSpec) -> Iterator[str]:
    yield (
        "In memory the buffers run from the last parameter to the first, so rank 0's part is at the right; each "
        "parameter begins at a multiple of 64 elements. Master and moments hold no padding."
    )


_LIBRARY_NOTES = {
    Implementation.ZERO_REDUNDANCY: _note_of_zero_redundancy,
    Implementation.FSDP2: _note_of_fsdp2,
    Implementation.DEEPSPEED: _note_of_deepspeed,
    Implementation.MEGATRON: _note_of_megatron,
}
