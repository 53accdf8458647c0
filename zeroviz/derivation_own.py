"""What our own code holds, derived: at rest, on the host and at the peak, by the closed forms of `zeroviz.memory`.

At the peak stands one of the moments of `zeroviz.peak`, a linear form in tokens and units' sizes; its coefficients are
the figures shown. Which units are whole then, and whose gradients are there, the step's outline says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from operator import mul
from typing import NamedTuple

from zeroviz.category import CATEGORY_ORDER, Category
from zeroviz.derivation_terms import Extent, Held, Item, Loose, Width, Widths, held, in_order
from zeroviz.facts import QUANTIZED_BLOCK_NUMEL
from zeroviz.memory import rest_padding_nbytes, rest_places
from zeroviz.notation import Ceil, Frac, Node, Num, Product, Sigma, Sym, Word, product, total
from zeroviz.outline import outline
from zeroviz.partition import Unit, buffer_numel, buffers_for, is_sharded, plan_for, shard_numel, slice_numel
from zeroviz.peak import AT_REST, CONSTANT, NUM_FIXED, Form, Moment, moments_of
from zeroviz.schedule import OpKind, Order, last_wait
from zeroviz.spec import DType, RunSpec
from zeroviz.style import PAINT, label_of

MAX_NAMED = 3
"""Units of a set that are named one by one; a larger one goes by its letter."""
N, G, P, UNIT = Sym("N"), Sym("G"), Sym("P"), "u"
TOKENS, SEQ = Sym("n"), Sym("seq")
WORDS = {
    Category.ACTIVATION: "activations",
    Category.TEMPORARY: "temporaries",
    Category.INPUT: "input",
    Category.BUCKET: "buckets",
    Category.ALL_GATHER_BUFFER: "gather buffers",
    Category.REDUCE_SCATTER_BUFFER: "reduce buffers",
    Category.SHARDED_PARAM: "owned parameters",
    Category.UNSHARDED_PARAM: "whole parameters",
    Category.SHARDED_GRAD: "owned gradients",
    Category.UNSHARDED_GRAD: "whole gradients",
    Category.MASTER_PARAM: "master",
    Category.OPTIMIZER_STATE: "moments",
}
"""What a category is called where it has no symbol."""
SUBS = {Category.ACTIVATION: "act", Category.TEMPORARY: "temp", Category.INPUT: "in"}


class Alive(NamedTuple):
    """Units, by number, at a moment: gathered beyond what is at rest, with a whole gradient, with a gradient shard.
    The last two are None where all gradients are as at rest."""

    gathered: tuple[int, ...]
    whole: tuple[int, ...] | None
    reduced: tuple[int, ...] | None


class Own:
    """The extents of one spec of our own code: what there is so many bytes an element of."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.units = plan_for(spec).units
        self.buffers = buffers_for(spec)
        self.widths = Widths.of(spec.recipe)
        self.num_shards = G if spec.strategy.replicates else N
        self.sets: dict[str, Sequence[Unit]] = {}
        """Sets of units that go by a letter, for the legend."""
        self.turns = ""
        """How often units take part in a collective, where they differ."""
        self.has_read_off = False
        """Whether some category's bytes had to be taken as the walk has them."""
        self._extents: dict[tuple[str, frozenset[int]], Extent] = {}

    # ---- extents ----

    @cached_property
    def whole(self) -> Extent:
        """Every unit, padded."""
        return Extent(P, self._over(self.padded), self._sum(buffer_numel), "every unit, whole")

    @cached_property
    def shard(self) -> Extent:
        """The rank's part of every unit; DDP's is the whole."""
        if not is_sharded(self.spec):
            return self.whole
        share = f"this rank's 1/{self.spec.num_shards:,} of every unit"
        return Extent(Frac(P, self.num_shards), self._over(self.cut), self._sum(shard_numel), share)

    def of(self, kind: str, letter: str, numbers: Collection[int]) -> Extent:
        """Some units: `whole`, or the rank's `shard` of them. All of them are what is held at rest."""
        if len(numbers) == len(self.units) and not self.spec.strategy.has_whole_buffer:
            return self.whole if kind == "whole" else self.shard
        key = kind, frozenset(numbers)
        if key not in self._extents:
            self._extents[key] = self._some(kind, letter, sorted(numbers))
        return self._extents[key]

    def _some(self, kind: str, letter: str, numbers: Sequence[int]) -> Extent:
        units = [self.units[number] for number in numbers]
        is_whole = kind == "whole"
        numel = sum((buffer_numel if is_whole else shard_numel)(unit, self.spec) for unit in units)
        inner = self.padded if is_whole else self.cut
        words = f"{unit_words(units, self.units)}{', whole' if is_whole else ': the parts this rank owns'}"
        symbol = "P" if is_whole else "s"
        if len(units) == 1:
            return Extent(Sym(symbol, UNIT), inner(Sym("P", units[0].name)), numel, words)
        self.sets[letter] = units
        inside = "{" + ", ".join(unit.name for unit in units) + "}" if len(units) <= MAX_NAMED else letter
        return Extent(Sym(symbol, letter), Sigma(f"u in {inside}", inner(Sym("P", UNIT))), numel, words)

    def cut(self, numel: Node) -> Node:
        """The rank's part of a buffer of `numel`, as it is written."""
        return Ceil(Frac(numel, self.num_shards, is_inline=True)) if is_sharded(self.spec) else numel

    def padded(self, numel: Node) -> Node:
        return product(self.num_shards, self.cut(numel)) if is_sharded(self.spec) else numel

    def _over(self, write: Callable[[Node], Node]) -> Node:
        """The sum of what is written of each buffer."""
        return write(P) if len(self.buffers) == 1 else Sigma(UNIT, write(Sym("P", UNIT)))

    def _sum(self, numel_of: Callable[[Unit, RunSpec], int]) -> int:
        """Over all buffers; blocks are alike, so few sizes are asked for."""
        counts = Counter(buffer.numel for buffer in self.buffers)
        one_of = {buffer.numel: buffer for buffer in self.buffers}
        return sum(count * numel_of(one_of[numel], self.spec) for numel, count in counts.items())

    # ---- at rest ----

    def rest(self) -> dict[Category, list[Item]]:
        """What a rank holds between steps, by category, the host's included."""
        spec, recipe, place = self.spec, self.spec.recipe, rest_places(self.spec)
        found: dict[Category, list[Item]] = {
            place.param: [held(spec, self.widths.param, self._state(spec.strategy.shards_param), place.param)],
            place.grad: [held(spec, self.widths.grad, self._state(spec.strategy.shards_grad), place.grad)],
        }
        if place.master:
            found[place.master] = [held(spec, self.widths.master, self.shard, place.master)]
        if recipe.num_moments:
            found[place.moments] = [held(spec, self.widths.moments, self.shard, place.moments)]
        if recipe.moments is DType.INT8:
            found[place.moments].append(self._scales(place.moments))
        return {category: found[category] for category in CATEGORY_ORDER if category in found}

    def _state(self, sharded: bool) -> Extent:
        return self.shard if sharded else self.whole

    def _scales(self, category: Category) -> Loose:
        """An fp32 scale for each block of a quantized moment (Dettmers et al., arXiv 2110.02861, section 2.1)."""
        recipe = self.spec.recipe
        scales = self._sum(lambda unit, spec: recipe.num_scales(shard_numel(unit, spec)))
        count, item, block = Num(recipe.num_moments), Num(DType.FP32.itemsize), Num(QUANTIZED_BLOCK_NUMEL)
        cut = Ceil(Frac(Sym("s", UNIT), block, is_inline=True))
        over = cut if len(self.buffers) > 1 else Ceil(Frac(self.cut(P), block, is_inline=True))
        first = product(count, item, Frac(P, product(self.num_shards, block) if is_sharded(self.spec) else block))
        second = product(count, item, Sigma(UNIT, over) if len(self.buffers) > 1 else over)
        nbytes = recipe.num_moments * DType.FP32.itemsize * scales
        tip = f"scales of the quantized moments: {scales:,} of them a moment, {item.value} B each: {nbytes:,} B"
        return Loose((first, second, product(count, item, Num(scales))), (category,), tip, nbytes)

    def rest_notes(self, rank: int) -> Iterator[str]:
        """Padding, where there is some."""
        if padding := self.whole.numel - sum(unit.numel for unit in self.units):
            each = "every unit is" if len(self.buffers) > 1 else "the one buffer is"
            yield (
                f"Padding: {padding:,} elements, for {each} rounded up to a multiple of {self.spec.num_shards:,}; "
                f"{rest_padding_nbytes(self.spec, rank):,} B of what rank {rank:,} holds are padding."
            )

    # ---- at the peak ----

    def peak(self) -> dict[Category, list[Item]]:
        """What a rank holds at the largest moment of the step, by category."""
        moments = moments_of(self.spec)
        values = moments.values(self.spec)
        totals = moments.totals(values)
        moment = moments.candidates[totals.index(max(totals))]
        order = Order.of(self.spec)
        # As `moments_of` does: what comes after the third micro-batch is nothing new.
        alive = alive_at(order._replace(accumulation=min(order.accumulation, 3)), moment.position)
        rest = self.rest()
        counts = {category: sum(map(mul, form, values)) for category, form in moment.held.items()}
        return {category: self._at_peak(category, nbytes, moment, alive, rest) for category, nbytes in in_order(counts)}

    def _at_peak(
        self, category: Category, nbytes: int, moment: Moment, alive: Alive, rest: Mapping[Category, list[Item]]
    ) -> list[Item]:
        """The items of one category. What is held at rest is held as there, but for a gradient that was dropped."""
        spec = self.spec
        is_dropped = alive.whole is not None and category is rest_places(spec).grad
        if category in rest and not is_dropped:
            items = list(rest[category])
        elif category is Category.UNSHARDED_PARAM:
            items = [held(spec, self.widths.param, self.of("whole", "W", alive.gathered), category)]
        elif category is Category.UNSHARDED_GRAD:
            items = [held(spec, self.widths.grad, self.of("whole", "V", alive.whole or ()), category)]
        elif category is Category.SHARDED_GRAD:
            items = [held(spec, self.widths.grad, self.of("shard", "D", alive.reduced or ()), category)]
        elif any(moment.held[category][NUM_FIXED:]):
            items = list(self._update(moment, category))
        else:
            items = [self._linear(category, moment.held[category][:NUM_FIXED])]
        return items if sum(item.nbytes for item in items) == nbytes else [self.read_off(category, nbytes)]

    def _update(self, moment: Moment, category: Category) -> Iterator[Item]:
        """The optimizer's temporaries, and the cast of a gradient of another dtype."""
        spec, recipe = self.spec, self.spec.recipe
        count, item = spec.optimizer.num_temporaries, recipe.moments.itemsize
        extent = self.shard if spec.optimizer.steps_together else self._slice(moment)
        if count:
            width = Width(product(Num(count), Sym("m")), product(Num(count), Num(item)), count * item)
            yield Held(width, extent, (category,), "the optimizer's temporaries")
        if recipe.casts_grad:
            width = Width(Sym("w"), Num(recipe.update.itemsize), recipe.update.itemsize)
            yield Held(width, extent, (category,), f"the gradient, cast to {recipe.update.value} for the update")

    def _slice(self, moment: Moment) -> Extent:
        """What is updated at a time: the slice of the unit that stands at the peak."""
        op = moments_of(self.spec).step.ops[moment.position]
        unit = self.buffers[op.unit or 0]
        name = Sym("P", unit.name) if unit.name and len(self.buffers) > 1 else P
        cut = self.cut(name)
        second = Ceil(Frac(cut, Num(unit.num_slices), is_inline=True)) if unit.num_slices > 1 else cut
        words = f"a slice of {unit.name or 'the buffer'}, of {unit.num_slices:,}"
        return Extent(Sym("l", UNIT), second, slice_numel(unit, self.spec), words)

    def _linear(self, category: Category, form: Form) -> Loose:
        """a n + b seq + c: what is as large as the tokens, as one sequence, or always the same."""
        spec, sub = self.spec, SUBS.get(category, "")
        values = (spec.num_tokens_per_rank, spec.seq, 1)
        letters, units = ("a", "b", "c"), (TOKENS, SEQ, Num(1))
        kept = [number for number in range(NUM_FIXED) if form[number]]
        second = total(*(product(Sym(letters[number], sub), units[number]) for number in kept))
        third = total(
            *(
                Num(form[number]) if number == CONSTANT else Product((Num(form[number]), Num(values[number])))
                for number in kept
            )
        )
        nbytes = sum(map(mul, form, values))
        label = label_of(category, spec)
        spelt = [f"{form[number]:,} B {_PER[number]}" for number in kept]
        tip = f"{label}: {' + '.join(spelt)}: {nbytes:,} B"
        return Loose((Word(word_of(category)), second, third), (category,), tip, nbytes)

    def read_off(self, category: Category, nbytes: int) -> Loose:
        """A category's bytes as the walk has them."""
        self.has_read_off = True
        label, word = label_of(category, self.spec), Word(word_of(category))
        return Loose((word, word, Num(nbytes)), (category,), f"{label}, read off the walk: {nbytes:,} B", nbytes)


_PER = ("a token", "a place of the sequence", "whatever the tokens")


def word_of(category: Category) -> str:
    return WORDS.get(category, PAINT[category].label)


def unit_words(units: Sequence[Unit], every: Sequence[Unit]) -> str:
    """`head and block 31`, `31 of 34 units, block 1 to head`."""
    if len(units) <= MAX_NAMED:
        return " and ".join(unit.name for unit in units) or "no unit"
    return f"{len(units):,} of {len(every):,} units, {units[0].name} to {units[-1].name}"


@lru_cache(maxsize=1024)
def alive_at(order: Order, position: int) -> Alive:
    """Which units' tensors are there at a position of the outline."""
    spec, step = order.spec, outline(order)
    if position == AT_REST:
        return Alive((), None, None)
    shards, drops, ends = spec.strategy.shards_grad, spec.drops_grad, last_wait(spec.strategy)
    gathered: set[int] = set()
    whole: set[int] = set()
    reduced: set[int] = set()
    for at in range(position + 1):
        op, is_now = step.ops[at], at == position
        if op.unit is None:
            continue
        if op.kind is OpKind.UNSHARD:
            gathered.add(op.unit)
        elif op.kind is OpKind.RESHARD and not is_now:
            gathered.discard(op.unit)
        elif op.kind is ends and shards and not is_now:
            whole.discard(op.unit)
        elif step.tokens[step.sequence[at]].begins:
            (whole if op.kind is OpKind.BACKWARD else reduced).add(op.unit)
    if not drops:  # what stays from step to step is as at rest
        return Alive(tuple(sorted(gathered)), tuple(sorted(whole)) if shards else None, None)
    return Alive(tuple(sorted(gathered)), tuple(sorted(whole)), tuple(sorted(reduced)))
