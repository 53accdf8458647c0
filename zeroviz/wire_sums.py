"""What ranks send in one step, summed for a picture: which ranks send the same, how much by phase, counted in what.

[Note: kinds] Ranks that send the same are of one kind. Ranks that are alike share their calls as well, so a kind is
found by its calls' identity and only then by its sums: a million ranks cost as much as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zeroviz.axis import amount
from zeroviz.collectives import CollectiveOp, Group, ring_sent_nbytes
from zeroviz.errors import TraceError
from zeroviz.quantity import format_nbytes
from zeroviz.rank_trace import RankTrace, alike
from zeroviz.recall import recall
from zeroviz.spec import DType, RunSpec, Strategy
from zeroviz.trace import Trace
from zeroviz.wire import WireTotal

MAX_RANGES = 3
"""Stretches of ranks in a label; of more the first are named."""
FEW = 0.0005
"""Of the model's parameters: so few elements are said by their number."""

Key = tuple[CollectiveOp, str, Group, int]
"""What tells collectives apart: op, dtype, group and how many ranks take part."""


# ---- what is counted ----


@dataclass(frozen=True, slots=True)
class Measure:
    """What an axis counts, and how an amount of it is said.

    Bytes are what a ring makes a rank send. Elements are a payload's, as often as a ring passes them on: what is moved,
    as in the ZeRO paper's section 7, where DDP costs 2P and ZeRO-3 3P; a ring sends (n-1)/n of it. unit: the axis's.
    """

    in_elements: bool
    num_params: int
    unit: str = "P"

    def of(self, total: WireTotal) -> int:
        """What the axis counts of it."""
        return self.count(total.op, total.dtype, total.num_ranks, total.payload_nbytes)

    def count(self, op: CollectiveOp, dtype: str, num_ranks: int, payload_nbytes: int) -> int:
        """0 where one rank is by itself."""
        if num_ranks <= 1:
            return 0
        if self.in_elements:
            return op.ring_passes * numel_of(payload_nbytes, dtype)
        return ring_sent_nbytes(op, payload_nbytes, num_ranks)

    def amount(self, length: int) -> str:
        """`1.198 MB`; elements in parameters of the model, `3P`."""
        return self._params(length) if self.in_elements else amount(length, self.unit)

    def difference(self, length: int) -> str:
        """`0 B`, `+1.024 kB`; `0`, `+256 elements`."""
        if self.in_elements:
            return f"{length:+,} {plural('element', length)}" if length else "0"
        return f"{'+' * (length > 0)}{format_nbytes(length)}"

    def exactly(self, length: int) -> str:
        """`1,198,044 B`, `399,348 elements`."""
        return f"{length:,} {plural('element', length) if self.in_elements else 'B'}"

    def _params(self, numel: int) -> str:
        """Three digits: `3P`, `P`, `0.5P`; a few elements by their number."""
        value = numel / self.num_params
        if numel and value < FEW:
            return f"{numel:,} {plural('element', numel)}"
        words = short(value)
        return {"0": "0", "1": "P"}.get(words, f"{words}P")


def short(value: float) -> str:
    """Three digits, and never an exponent: `1.5`, `0.25`, `1,230`."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def plural(word: str, number: int) -> str:
    return word + "s" * (abs(number) != 1)


def numel_of(nbytes: int, dtype: str) -> int:
    """Elements in so many bytes. Raises TraceError for a dtype that is none of ours."""
    try:
        return nbytes // DType(dtype).itemsize
    except ValueError:
        known = ", ".join(member.value for member in DType)
        raise TraceError(f"A collective of the trace is of dtype {dtype!r}; known are {known}.") from None


@dataclass(frozen=True, slots=True)
class WireReference:
    """What DDP sends: one all-reduce of the gradient among all ranks, 2(N-1)/N P. at: where it lies on the axis."""

    label: str
    detail: str
    at: int
    sent_nbytes: int
    volume_numel: int


def reference_of(spec: RunSpec, measure: Measure) -> WireReference:
    """In the dtype in which gradients are kept, as DDP reduces them."""
    op, dtype = CollectiveOp.ALL_REDUCE, spec.recipe.grad
    nbytes = spec.model.num_params * dtype.itemsize
    return WireReference(
        label=Strategy.DDP.label,
        detail=f"one {collective_words(op)} of the {dtype.value} gradient",
        at=measure.count(op, dtype.value, spec.ranks, nbytes),
        sent_nbytes=ring_sent_nbytes(op, nbytes, spec.ranks),
        volume_numel=op.ring_passes * spec.model.num_params,
    )


# ---- words ----


def collective_words(op: CollectiveOp, dtype: str = "") -> str:
    """`all-gather fp32`."""
    return f"{op.value.replace('_', '-')} {dtype}".rstrip()


def lane_words(lane: Group, lanes: Sequence[Group]) -> str:
    """`in group`; nothing where every rank takes part in everything."""
    return lane.words or "among all" * (len(lanes) > 1)


def listed(*words: str) -> str:
    """With commas, what is empty left out."""
    return ", ".join(filter(None, words))


# ---- sums of one rank ----


def key_of(total: WireTotal) -> Key:
    return total.op, total.dtype, total.group, total.num_ranks


def by_key(rank: RankTrace) -> dict[Key, WireTotal]:
    """In the order of the first call of each."""
    return {key_of(total): total for total in rank.wire()}


def in_lane(totals: Mapping[Key, WireTotal], lane: Group) -> list[WireTotal]:
    """Those of one group of ranks."""
    return [total for total in totals.values() if total.group is lane]


def by_phase(rank: RankTrace) -> dict[Key, dict[str, tuple[int, int]]]:
    """(calls, payload bytes) of each collective in each phase: one walk over a rank's calls, remembered."""

    def walk() -> dict[Key, dict[str, tuple[int, int]]]:
        found: dict[Key, dict[str, tuple[int, int]]] = {}
        for call in rank.collectives:
            phases = found.setdefault((call.op, call.dtype, call.group, call.num_ranks), {})
            calls, nbytes = phases.get(call.phase, (0, 0))
            phases[call.phase] = calls + 1, nbytes + call.payload_nbytes
        return found

    return recall("wire by phase", (rank.collectives,), walk)


# ---- kinds of ranks ----


@dataclass
class Kind:
    """Ranks that send the same, in stretches. ours, theirs: the first of them as the two traces see it."""

    ranks: list[range]
    ours: RankTrace
    theirs: RankTrace | None

    def add(self, ranks: range) -> None:
        """Neighbours become one stretch."""
        if self.ranks and self.ranks[-1].stop == ranks.start:
            self.ranks[-1] = range(self.ranks[-1].start, ranks.stop)
        else:
            self.ranks.append(ranks)

    @property
    def sides(self) -> tuple[RankTrace, ...]:
        return (self.ours,) if self.theirs is None else (self.ours, self.theirs)

    @property
    def differs(self) -> bool:
        """Whether the second trace has other calls or other bytes."""
        return self.theirs is not None and by_key(self.ours) != by_key(self.theirs)

    def lanes(self) -> list[Group]:
        """The groups through which either side sends."""
        found = {total.group for side in self.sides for total in side.wire()}
        return [group for group in Group if group in found] or [Group.ALL]

    def label(self, num_ranks: int) -> str:
        """`each rank`, `rank 3`, `ranks 0-2, 4-7`."""
        if sum(map(len, self.ranks)) == num_ranks:
            return "each rank"
        names = [_span(ranks) for ranks in self.ranks[:MAX_RANGES]]
        is_one = len(self.ranks) == len(self.ranks[0]) == 1
        return f"{'rank' if is_one else 'ranks'} {', '.join(names)}" + ", ..." * (len(self.ranks) > MAX_RANGES)


def kinds_of(predicted: Trace, measured: Trace | None) -> list[Kind]:
    """In the order of their first ranks. See [Note: kinds]."""
    by_calls: dict[tuple[int, int], Kind] = {}
    by_sums: dict[object, Kind] = {}
    for ranks, ours, theirs in _side_by_side(predicted.ranks, None if measured is None else measured.ranks):
        calls = id(ours.collectives), id(None if theirs is None else theirs.collectives)
        kind = by_calls.get(calls)
        if kind is None:
            sums = ours.wire(), None if theirs is None else theirs.wire()
            kind = by_calls[calls] = by_sums.setdefault(sums, Kind([], ours, theirs))
        kind.add(ranks)
    return list(by_sums.values())


def _side_by_side(
    left: Sequence[RankTrace], right: Sequence[RankTrace] | None
) -> Iterator[tuple[range, RankTrace, RankTrace | None]]:
    """Stretches of ranks that are alike on both sides, each with its first rank of either."""
    ours = alike(left)
    if right is None:
        yield from ((ranks, first, None) for ranks, first in ours)
        return
    theirs = alike(right)
    start = here = there = 0
    while here < len(ours) and there < len(theirs):
        ends = ours[here][0].stop, theirs[there][0].stop
        stop = min(ends)
        yield range(start, stop), ours[here][1], theirs[there][1]
        start, here, there = stop, here + (ends[0] == stop), there + (ends[1] == stop)


def _span(ranks: range) -> str:
    return f"{ranks[0]:,}" if len(ranks) == 1 else f"{ranks[0]:,}-{ranks[-1]:,}"
