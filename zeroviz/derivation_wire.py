"""What a rank sends in a step, and what offloading copies, derived.

A ring makes a rank send (n-1)/n of the payload for an all-gather or a reduce-scatter and twice that for an all-reduce
(nccl-tests, doc/PERFORMANCE.md), the payload being the whole array's bytes. Of our own code the payload is so many
times a unit; of other people's it is what their calls sum up to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.derivation_own import UNIT, Own
from zeroviz.derivation_terms import (
    Expression,
    Extent,
    Held,
    Item,
    Levels,
    Loose,
    Part,
    Width,
    levels_of,
    node_of,
    parts_of,
    times_of,
)
from zeroviz.link import Direction, Transfer
from zeroviz.notation import Frac, Num, Sigma, Sum, Sym, Word, product
from zeroviz.partition import Unit, buffer_numel, shard_numel
from zeroviz.rank_trace import RankTrace
from zeroviz.recall import recall
from zeroviz.spec import DType
from zeroviz.wire import WireTotal

Key = tuple[CollectiveOp, str, int, Group]
TIMES = Sym("x", UNIT)
LETTER = {Group.ALL: Sym("N"), Group.SHARD: Sym("G"), Group.REPLICA: Sym("R")}
SHORT = {
    CollectiveOp.ALL_REDUCE: "AR",
    CollectiveOp.ALL_GATHER: "AG",
    CollectiveOp.REDUCE_SCATTER: "RS",
    CollectiveOp.BROADCAST: "B",
}
_PARAMS = (Category.UNSHARDED_PARAM, Category.ALL_GATHER_BUFFER, Category.SHARDED_PARAM, Category.HOST_PARAM)
_GRADS = (
    Category.UNSHARDED_GRAD, Category.BUCKET, Category.REDUCE_SCATTER_BUFFER, Category.SHARDED_GRAD, Category.HOST_GRAD,
)  # fmt: skip
FILLS: Mapping[CollectiveOp, tuple[Category, ...]] = {
    CollectiveOp.ALL_GATHER: _PARAMS,
    CollectiveOp.BROADCAST: _PARAMS,
    CollectiveOp.ALL_REDUCE: _GRADS,
    CollectiveOp.REDUCE_SCATTER: _GRADS,
}
"""As what that is drawn which a collective fills or reads: the first of these that is drawn at all."""
_COPIED = {
    Direction.TO_HOST: (Category.HOST_GRAD, Category.SHARDED_GRAD, Category.UNSHARDED_GRAD),
    Direction.TO_DEVICE: (Category.HOST_PARAM, Category.SHARDED_PARAM, Category.UNSHARDED_PARAM),
}


Payload = Callable[[WireTotal, tuple[Category, ...]], Item | None]
"""Says a payload in parameters, if it can. The categories are those that it is drawn as."""


def wire_levels(rank: RankTrace, shown: Collection[Category], own: Own | None, theirs: Payload) -> tuple[Levels, bool]:
    """What the rank sends, on three levels; and whether all of it follows from the spec. shown: categories that are
    drawn at all. theirs: of other people's payloads."""
    calls: Mapping[Key, Counter[str]] = recall("calls by unit", (rank.collectives,), lambda: _by_unit(rank))
    shorts = Counter(total.op for total in rank.wire())
    rings: dict[tuple[int, int, Group, int], list[tuple[WireTotal, Item]]] = {}
    is_closed = True
    for number, total in enumerate(rank.wire()):
        key = total.op, total.dtype, total.num_ranks, total.group
        items = _own_payload(own, total, Counter(calls[key]), shown) if own else None
        is_closed = is_closed and items is not None
        # An all-gather and a reduce-scatter among the same ranks share their factor; what is rounded stands alone.
        alone = number + 1 if _is_rounded(total) else 0
        ring = rings.setdefault((total.op.ring_passes, total.num_ranks, total.group, alone), [])
        if items is None:
            categories = drawn(FILLS[total.op], shown)
            items = [theirs(total, categories) or _summed(total, categories, is_one=shorts[total.op] == 1)]
        ring += [(total, item) for item in items]
    if not rings:
        return levels_of([]), True
    first, second, third = (
        Expression(tuple(part for ring in rings.values() for part in _ring(ring, level))) for level in range(3)
    )
    return (first, second, third), is_closed


def _by_unit(rank: RankTrace) -> dict[Key, Counter[str]]:
    """How often each unit takes part in collectives that `RankTrace.wire` sums up."""
    found: dict[Key, Counter[str]] = {}
    for call in rank.collectives:
        found.setdefault((call.op, call.dtype, call.num_ranks, call.group), Counter())[call.unit] += 1
    return found


def _is_rounded(total: WireTotal) -> bool:
    """Whether the ranks do not divide what is sent, so that some rank's chunk is longer."""
    return total.op.ring_passes * (total.num_ranks - 1) * total.payload_nbytes % total.num_ranks > 0


def _ring(ring: Sequence[tuple[WireTotal, Item]], level: int) -> list[Part]:
    """What is sent of payloads that go around one ring."""
    total = ring[0][0]
    letter, passes, num_ranks = LETTER[total.group], total.op.ring_passes, total.num_ranks
    factor = Frac(Num(num_ranks - 1), Num(num_ranks)) if level == 2 else Frac(Sum((letter, Num(-1))), letter)
    # What is gathered comes first, as in the ZeRO paper's 2 p + g.
    items = [item for total, item in sorted(ring, key=lambda pair: pair[0].op is not CollectiveOp.ALL_GATHER)]
    ops = {item.tip: (each.op,) for each, item in ring}
    is_rounded = _is_rounded(total)
    if is_rounded and len(items) > 1:
        items = [_joined(items)]
    parts = []
    for part in parts_of(items, level, product(Num(passes), factor)):
        terms = []
        for term in part.terms:
            sent = total.sent_nbytes if is_rounded else passes * (num_ranks - 1) * term.nbytes // num_ranks
            tip = f"{term.tip}; each rank sends {passes * (num_ranks - 1):,}/{num_ranks:,} of it, {sent:,} B"
            # Those that are rounded together are of one call, and so of one op.
            terms.append(term._replace(tip=tip, nbytes=sent, ops=ops.get(term.tip, (total.op,))))
        parts.append(part._replace(terms=tuple(terms), is_rounded=is_rounded and level > 0))
    return parts


def drawn(candidates: Iterable[Category], shown: Collection[Category]) -> tuple[Category, ...]:
    """The first of them that there is a bar of."""
    return next(((category,) for category in candidates if category in shown), ())


def _joined(items: Sequence[Item]) -> Loose:
    """Several items as one, since they are rounded together."""
    first, second, third = (Sum(tuple(node_of(item, level) for item in items)) for level in range(3))
    categories = tuple(dict.fromkeys(category for item in items for category in item.categories))
    tip = "; ".join(item.tip for item in items)
    return Loose((first, second, third), categories, tip, sum(item.nbytes for item in items))


def short_of(total: WireTotal, *, is_one: bool) -> str:
    """`AG`; `AG bf16 in group` where there are several of the op."""
    return SHORT[total.op] if is_one else f"{SHORT[total.op]} {total.dtype} {total.group.words}".rstrip()


def _summed(total: WireTotal, categories: tuple[Category, ...], *, is_one: bool) -> Loose:
    """A payload as the calls sum it up: bytes an element, times the elements of each."""
    sub = short_of(total, is_one=is_one)
    itemsize = next((dtype.itemsize for dtype in DType if dtype.value == total.dtype), 1)
    numel, rest = divmod(total.payload_nbytes, itemsize)
    number = Num(total.payload_nbytes) if rest else product(Num(itemsize), Num(numel))
    each = Sym("S", sub)
    second = Sigma(f"i=1..{total.count:,}", Sym("S", f"{sub}, i")) if total.count > 1 else each
    tip = f"{total.label}, the payload of {total.count:,} call{'s' * (total.count > 1)}: {total.payload_nbytes:,} B"
    return Loose((each, second, number), categories, tip, total.payload_nbytes)


# ---- our own code ----


def _own_payload(own: Own, total: WireTotal, counts: Counter[str], shown: Collection[Category]) -> list[Item] | None:
    """The payload as so many times every unit; None where it is something else."""
    is_across = total.group is Group.REPLICA
    width = own.widths.param if total.op is CollectiveOp.ALL_GATHER else own.widths.grad
    categories = drawn(_GRADS[-2:] if is_across else FILLS[total.op], shown)
    norm = _norm(own, total, counts)
    items = _repeated(own, counts, width, total.label, categories, is_part=is_across)
    found = [*items, *norm]
    return found if sum(item.nbytes for item in found) == total.payload_nbytes else None


def _norm(own: Own, total: WireTotal, counts: Counter[str]) -> list[Item]:
    """The number that clipping sums up over all ranks; it is taken out of the counts."""
    is_sum = total.op is CollectiveOp.ALL_REDUCE and total.group is not Group.REPLICA
    if own.spec.clip_norm is None or not is_sum or total.dtype != DType.FP32.value or not counts[""]:
        return []
    counts[""] -= 1
    nbytes = DType.FP32.itemsize
    tip = f"the sum of squares of the gradient, for its norm: {nbytes:,} B"
    return [Loose((Word("norm"), Word("norm"), Num(nbytes)), (), tip, nbytes)]


def _repeated(
    own: Own,
    counts: Counter[str],
    width: Width,
    label: str,
    categories: tuple[Category, ...],
    *,
    is_part: bool,
) -> list[Item]:
    """So many times the whole of every unit, or the rank's part; each as often as it takes part, where they differ."""
    turns = [counts[unit.name] for unit in own.buffers]
    if not any(turns):
        return []
    times, extent = turns[0], own.shard if is_part else own.whole
    if len(set(turns)) > 1:
        times, extent = 1, _by_turns(own, turns, is_part=is_part)
    return [Held(times_of(width, times), extent, categories, label)]


def _by_turns(own: Own, turns: Sequence[int], *, is_part: bool) -> Extent:
    numel_of, write = (shard_numel, own.cut) if is_part else (buffer_numel, own.padded)
    numel = sum(times * numel_of(unit, own.spec) for times, unit in zip(turns, own.buffers, strict=True))
    unit = Sym("P", UNIT)
    first = Sigma(UNIT, product(TIMES, Frac(unit, own.num_shards) if is_part else unit))
    second = Sigma(UNIT, product(TIMES, write(unit)))
    own.turns = turn_words(own.buffers, turns)
    return Extent(first, second, numel, f"each unit as often as it takes part, {own.turns}")


def turn_words(units: Sequence[Unit], turns: Sequence[int]) -> str:
    """`2 for head, 3 for 32 units`."""
    by_turns: dict[int, list[str]] = {}
    for unit, times in zip(units, turns, strict=True):
        by_turns.setdefault(times, []).append(unit.name)
    named = ((times, names[0] if len(names) == 1 else f"{len(names):,} units") for times, names in by_turns.items())
    return ", ".join(f"{times:,} for {name}" for times, name in sorted(named))


# ---- the link ----


def link_levels(rank: RankTrace, own: Own, shown: Collection[Category]) -> Levels:
    """What offloading copies between device and host, on three levels."""
    by_way: dict[tuple[Direction, str], list[Transfer]] = {}
    for transfer in rank.transfers:
        by_way.setdefault((transfer.direction, transfer.dtype), []).append(transfer)
    items: list[Item] = []
    for (direction, dtype), transfers in by_way.items():
        nbytes = sum(transfer.nbytes for transfer in transfers)
        width = own.widths.grad if direction is Direction.TO_HOST else own.widths.param
        counts = Counter(transfer.unit for transfer in transfers)
        label = f"{direction.value}, {dtype}"
        found = _repeated(own, counts, width, label, drawn(_COPIED[direction], shown), is_part=True)
        if sum(item.nbytes for item in found) != nbytes:
            word = Word(direction.value)
            found = [Loose((word, word, Num(nbytes)), (), f"{label}: {nbytes:,} B", nbytes)]
        items += found
    return levels_of(items)
