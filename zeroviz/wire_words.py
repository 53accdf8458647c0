"""The words of the wire's picture: who sends how much beside DDP, what a payload becomes, what is not as predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from zeroviz.causes import UNEXPLAINED
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.rank_trace import RankTrace
from zeroviz.scene import SOURCE_LABEL
from zeroviz.spec import RunSpec, Strategy
from zeroviz.trace import Trace
from zeroviz.wire import WireTotal
from zeroviz.wire_sums import (
    Kind,
    Measure,
    WireReference,
    by_key,
    collective_words,
    in_lane,
    lane_words,
    listed,
    plural,
    short,
)
from zeroviz.wording import what_text

MAX_KINDS = 4
"""How many kinds of ranks are drawn; the others are counted."""
MAX_NAMED = 4
"""How many differences are named; the others are counted."""


def subtitle_of(
    predicted: Trace, measured: Trace | None, kinds: Sequence[Kind], measure: Measure, reference: WireReference | None
) -> Iterator[str]:
    """What is drawn, and a line for each source."""
    spec = predicted.spec
    yield what_text(spec)
    if reference is None:
        yield "Nothing is sent: one rank has nobody to send to"
        return
    yield f"{_source(predicted)}: {_most_words(spec, [(kind, kind.ours) for kind in kinds], measure, reference)}"
    if measured is None:
        return
    if not any(kind.differs for kind in kinds):
        yield f"{_source(measured)}: the same, to the call and to the byte"
        return
    theirs = [(kind, kind.theirs) for kind in kinds if kind.theirs is not None]
    yield (
        f"{_source(measured)}: {_most_words(spec, theirs, measure, reference)}; not as {SOURCE_LABEL[predicted.origin]}"
    )


def times_words(spec: RunSpec, length: int, reference: WireReference) -> str:
    """`1.5 x DDP's`; nothing where it is DDP."""
    return "" if spec.strategy is Strategy.DDP else f"{short(length / reference.at)} x {reference.label}'s"


def notes_of(predicted: Trace, measured: Trace | None, kinds: Sequence[Kind], measure: Measure) -> Iterator[str]:
    """Sentences below the picture."""
    spec = predicted.spec
    if kinds:
        yield from _ring_notes([total for kind in kinds for side in kind.sides for total in side.wire()], measure)
        yield from _group_notes(kinds[0])
        yield from _kind_notes(spec, kinds)
        if spec.accumulation > 1:
            yield (
                f"The {Strategy.DDP.label} beside it reduces once a step, after the last of "
                f"{spec.accumulation:,} micro-batches."
            )
    if measured is not None:
        yield from _difference_notes(predicted, measured, kinds, measure)
    if predicted.ranks[0].transfers:
        yield "What goes over the link to the host is not drawn here."


def _source(trace: Trace) -> str:
    return SOURCE_LABEL[trace.origin].capitalize()


def _most_words(
    spec: RunSpec, seen: Sequence[tuple[Kind, RankTrace]], measure: Measure, reference: WireReference
) -> str:
    """What the rank that sends most sends: in all, by lane where there are several, and beside DDP."""
    kind, rank = max(seen, key=lambda pair: sum(map(measure.of, pair[1].wire())))
    lanes, totals = kind.lanes(), by_key(rank)
    sums = {lane: sum(map(measure.of, in_lane(totals, lane))) for lane in lanes}
    in_all = sum(sums.values())
    parts = listed(*(f"{measure.amount(sums[lane])} {lane_words(lane, lanes)}" for lane in lanes))
    words = measure.amount(in_all) + f" ({parts})" * (len(lanes) > 1) + (" moved" if measure.in_elements else " sent")
    if len({side.wire() for _, side in seen}) == 1:
        words += " by each rank in one step"
    else:
        words = f"at most {words} in one step, by {kind.label(spec.ranks)}"
    beside = times_words(spec, in_all, reference)
    if beside and measure.in_elements:
        beside = f"against {reference.label}'s {measure.amount(reference.at)}"
    return listed(words, beside)


def _ring_notes(totals: Sequence[WireTotal], measure: Measure) -> Iterator[str]:
    """How a payload becomes what is counted."""
    groups = {(total.group, total.num_ranks) for total in totals if total.num_ranks > 1}
    lanes = list({group for group, _ in groups})
    shares = sorted(groups, key=lambda pair: (list(Group).index(pair[0]), pair[1]))
    here = listed(*(f"{n - 1:,}/{n:,} {lane_words(group, lanes)}".rstrip() for group, n in shares))
    op = CollectiveOp.ALL_REDUCE
    double = f"an {collective_words(op)}'s {op.ring_passes} times"
    if measure.in_elements:
        yield f"A payload is moved once, {double}; a ring sends (n - 1)/n of it, {here} here. Padding is included."
    else:
        yield f"A ring sends (n - 1)/n of a payload, {here} here, of {double} that. Padding is included."
    if any(total.op is CollectiveOp.BROADCAST for total in totals):
        yield "A broadcast is passed on from rank to rank and not by the last: its figure is the mean of the ranks."


def _group_notes(kind: Kind) -> Iterator[str]:
    sizes = {total.group: total.num_ranks for total in kind.ours.wire()}
    inside, across = sizes.get(Group.SHARD), sizes.get(Group.REPLICA)
    if inside:
        yield f"In group: among {inside:,} neighbours, which hold one copy together."
    if across:
        yield f"Across groups: among the {across:,} ranks that hold the same shard."


def _kind_notes(spec: RunSpec, kinds: Sequence[Kind]) -> Iterator[str]:
    """Which ranks a row stands for."""
    if len(kinds) == 1:
        yield f"All {spec.ranks:,} ranks send the same and share a row."
    elif len(kinds) < spec.ranks:
        yield f"Ranks that send the same share a row: {len(kinds):,} for {spec.ranks:,} ranks."
    if (left := len(kinds) - MAX_KINDS) > 0:
        yield f"Not drawn: {left:,} more {plural('kind', left)} of ranks."


def _difference_notes(predicted: Trace, measured: Trace, kinds: Iterable[Kind], measure: Measure) -> Iterator[str]:
    """Each collective that is not as predicted, by name."""
    found = [
        f"{_source(measured)}, {kind.label(predicted.spec.ranks)}: {words}; {UNEXPLAINED}."
        for kind in kinds
        for words in _differences(kind, measure, SOURCE_LABEL[predicted.origin])
    ]
    yield from found[:MAX_NAMED]
    if (left := len(found) - MAX_NAMED) > 0:
        yield f"And {left:,} more {plural('difference', left)}."


def _differences(kind: Kind, measure: Measure, source: str) -> Iterator[str]:
    """`all-gather fp32, 1,024 B more than predicted, 9 calls, predicted 8`."""
    if kind.theirs is None:
        return
    ours, theirs, lanes = by_key(kind.ours), by_key(kind.theirs), kind.lanes()
    for key in dict.fromkeys([*ours, *theirs]):
        op, dtype, group, num_ranks = key
        nothing = WireTotal(op, dtype, 0, 0, 0, num_ranks, group)
        left, right = ours.get(key, nothing), theirs.get(key, nothing)
        if left != right:
            difference = measure.of(right) - measure.of(left)
            words = f"{measure.exactly(abs(difference))} {'less' if difference < 0 else 'more'} than {source}"
            calls = f"{right.count:,} {plural('call', right.count)}, {source} {left.count:,}"
            yield listed(collective_words(op, dtype), lane_words(group, lanes), words, calls)
