"""What other people's implementations hold, derived as far as there is a rule: between steps, each by its own.

Which elements a rank holds of what is worked out in `zeroviz.witness`; here it is said in symbols. The figures are the
trace's, divided by the width of an element, and tests work them out from the rules. A peak is where the walk through
the library's step finds it: no closed form, and the line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.derivation_own import word_of
from zeroviz.derivation_terms import Extent, Held, Item, Loose, Width, Widths, in_order, times_of
from zeroviz.notation import Ceil, Frac, Node, Num, Sigma, Sym, Word, product
from zeroviz.precision import Recipe
from zeroviz.rank_trace import Peak, RankTrace
from zeroviz.settings import value_of
from zeroviz.spec import DType, Implementation, RunSpec, Strategy
from zeroviz.style import label_of
from zeroviz.wire import WireTotal
from zeroviz.witness.deepspeed_parts import ALIGNMENT, keeps_whole_gradients
from zeroviz.witness.flat import keeps_whole

N, G, P, I = Sym("N"), Sym("G"), Sym("P"), "i"  # noqa: E741, an index
MAX_TIMES = 256
"""As how many times all parameters a payload is said: each of 64 micro-batches gathers them up to three times."""
NUMEL, BUCKET = Sym("P", I), Sym("b")
AT_REST = {
    Category.TEMPORARY: "norm and flags",
    Category.OPTIMIZER_STATE: "moments and scales",
}
"""What is held at rest without a rule in symbols: DeepSpeed's numbers, quantized moments with their scales."""


class Rule(NamedTuple):
    """Elements on the first level, on the second, and in words."""

    first: Node
    second: Node
    words: str


@dataclass(frozen=True)
class Rules:
    """How an implementation holds each category at rest, and the rule in a sentence.

    widths: which of the recipe's goes with a category, where it is not the usual one.
    """

    extents: Mapping[Category, Rule]
    sentence: str
    widths: Mapping[Category, Width]


def rest_of(spec: RunSpec, rank: RankTrace) -> tuple[dict[Category, list[Item]], str]:
    """What the rank holds between steps, by category; and the rule in words."""
    rules = _RULES[spec.impl](spec)
    found: dict[Category, list[Item]] = {}
    extents: dict[tuple[int, int], Extent] = {}
    for category, nbytes in in_order(rank.rest):
        width, rule = rules.widths.get(category), rules.extents.get(category)
        has_scales = category is Category.OPTIMIZER_STATE and spec.recipe.moments is DType.INT8
        if width is None or rule is None or has_scales or nbytes % width.nbytes:
            found[category] = [apart(spec, category, nbytes, words=AT_REST.get(category, ""))]
            continue
        numel = nbytes // width.nbytes
        # States of the same elements share brackets, so they share the extent.
        extent = extents.setdefault((id(rule), numel), Extent(rule.first, rule.second, numel, rule.words))
        found[category] = [Held(width, extent, (category,), label_of(category, spec))]
    return found, rules.sentence


def apart(spec: RunSpec, category: Category, nbytes: int, sub: str = "", words: str = "") -> Loose:
    """A category's bytes as they are. sub: of which moment. words: what it is, unless that is the category's name."""
    word = words or word_of(category)
    tip = f"{words or label_of(category, spec)}{', as the walk has it' * bool(sub)}: {nbytes:,} B"
    return Loose((Word(word), Word(word, sub), Num(nbytes)), (category,), tip, nbytes)


def peak_of(spec: RunSpec, peak: Peak, rest: Mapping[Category, list[Item]]) -> dict[Category, list[Item]]:
    """What stands at the peak, by category: what is as at rest by its rule, the rest of it as the walk has it."""
    found: dict[Category, list[Item]] = {}
    for category, nbytes in in_order(dict(peak.by_category)):
        items = list(rest.get(category, ()))
        beyond = nbytes - sum(item.nbytes for item in items)
        sub = peak.unit or peak.op or peak.phase
        if beyond < 0:
            items, beyond = [], nbytes
        found[category] = [*items, apart(spec, category, beyond, sub)] if beyond else items
    return found


class Payloads:
    """Says what collectives are given in a step in parameters, where that is so many times all of them, or all that a
    rank owns. It is called with a total, and what that is drawn as."""

    def __init__(self, spec: RunSpec, rest: Mapping[Category, list[Item]]) -> None:
        self.spec, self.rest = spec, rest
        self._whole = tuple(_bases(spec, rest, is_part=False))

    def __call__(self, total: WireTotal, categories: tuple[Category, ...]) -> Held | None:
        """None where it is something else."""
        dtype = next((dtype for dtype in DType if dtype.value == total.dtype), None)
        if dtype is None or total.payload_nbytes % dtype.itemsize:
            return None
        width, numel = self._width(total.op, dtype), total.payload_nbytes // dtype.itemsize
        is_part = total.group is Group.REPLICA
        for extent in _bases(self.spec, self.rest, is_part=True) if is_part else self._whole:
            times, left = divmod(numel, extent.numel)
            if times and not left and times <= MAX_TIMES:
                return Held(times_of(width, times), extent, categories, total.label)
        return None

    def _width(self, op: CollectiveOp, dtype: DType) -> Width:
        """p or g where it is sent as it is held."""
        recipe, widths = self.spec.recipe, Widths.of(self.spec.recipe)
        is_gather = op in (CollectiveOp.ALL_GATHER, CollectiveOp.BROADCAST)
        usual, kept = (widths.param, recipe.param) if is_gather else (widths.grad, recipe.grad)
        return usual if kept is dtype else Width(Sym("e", dtype.value), Num(dtype.itemsize), dtype.itemsize)


def _bases(spec: RunSpec, rest: Mapping[Category, list[Item]], *, is_part: bool) -> Iterator[Extent]:
    """Of what a payload can be a multiple: parameters as they are held whole, as many shards, or without padding."""
    shards = _shards(spec)
    for category in (Category.UNSHARDED_PARAM, Category.UNSHARDED_GRAD, Category.SHARDED_PARAM):
        for item in rest.get(category, ()):
            if not isinstance(item, Held) or not item.extent.numel:
                continue
            extent = item.extent
            if is_part and isinstance(extent.first, Frac):
                yield extent
            elif not is_part and isinstance(extent.first, Frac):
                numel = extent.numel * spec.num_shards
                yield Extent(P, product(shards, extent.second), numel, "every parameter, padded")
            elif not is_part and extent.first == P:
                yield extent
    if not is_part:
        yield Extent(P, Sigma(I, NUMEL), spec.model.num_params, "every parameter")


# ---- the rules ----


def _ddp(spec: RunSpec) -> Rules:
    """`zeroviz.witness.ddp`."""
    whole = Rule(P, Sigma(I, NUMEL), "every parameter, whole")
    widths = _widths(spec.recipe)
    extents = {
        Category.UNSHARDED_PARAM: whole,
        Category.UNSHARDED_GRAD: whole,
        Category.BUCKET: whole,
        Category.OPTIMIZER_STATE: whole,
    }
    views = value_of(spec.settings, "bucket_view", spec.impl)
    bucket = "are views of the reducer's buckets" if views else "have a copy in the reducer's buckets"
    sentence = f"Every parameter i is a tensor of its own, whole on every rank. Gradients are too, and {bucket}."
    copy = Width(BUCKET, Num(spec.recipe.grad.itemsize), spec.recipe.grad.itemsize)
    return Rules(extents, sentence, widths | {Category.BUCKET: copy})


def _zero_redundancy(spec: RunSpec) -> Rules:
    """`zeroviz.witness.zero_redundancy`, [Note: greedy]."""
    rules = _ddp(spec)
    dealt = Rule(Sym("P", "r"), Sigma("i of r", NUMEL), "the parameters that this rank owns, each whole")
    sentence = (
        f"{rules.sentence} No parameter is cut for the optimizer either: the largest goes first, to the rank that owns "
        "least so far, so that rank r owns some whole parameters and not 1/N of all."
    )
    return Rules({**rules.extents, Category.OPTIMIZER_STATE: dealt}, sentence, rules.widths)


def _fsdp1(spec: RunSpec) -> Rules:
    """`zeroviz.witness.flat`."""
    shards, flat = _shards(spec), Sym("F", "u")
    orig = value_of(spec.settings, "use_orig_params", spec.impl)
    if keeps_whole(spec):
        cut = Rule(P, Sigma("u", flat), "the flat parameter of every unit, whole")
    else:
        cut = Rule(
            Frac(P, shards), Sigma("u", Ceil(Frac(flat, shards, is_inline=True))), "this rank's part of every unit"
        )
    pieces = Rule(
        cut.first, Sigma("i of r", Sym("o", "i,r")), "the pieces of parameters in this rank's shards, no padding"
    )
    moments = pieces if orig else cut
    param, grad = Category.SHARDED_PARAM, Category.SHARDED_GRAD
    if keeps_whole(spec):
        param, grad = Category.UNSHARDED_PARAM, Category.UNSHARDED_GRAD
    widths = _widths(spec.recipe)
    sentence = "The parameters of a unit u lie one after another in a flat parameter of F_u elements"
    sentence += ", each at a multiple of 16 bytes" if orig else ""
    sentence += ", whole on every rank" if keeps_whole(spec) else f", which is cut into {shards.name} equal parts"
    sentence += ". The gradient has the parameters' dtype." + (" Moments hold no padding." if orig else "")
    return Rules({param: cut, grad: cut, Category.OPTIMIZER_STATE: moments}, sentence, widths)


def _fsdp2(spec: RunSpec) -> Rules:
    """`zeroviz.witness.fsdp2_groups`, [Note: groups]."""
    shards = _shards(spec)
    rows = Ceil(Frac(Sym("h", I), shards, is_inline=True))
    cut = Rule(Frac(P, shards), Sigma(I, product(rows, Sym("c", I))), "this rank's rows of every parameter, padded")
    own = Rule(Frac(P, shards), Sigma(I, product(Sym("h", "i,r"), Sym("c", I))), "this rank's rows, without padding")
    widths = _widths(spec.recipe)
    sentence = (
        f"Every parameter i, of h_i rows and c_i columns, is cut by rows into {shards.name} chunks, and a short one is "
        "padded. Moments are of a rank's h_i,r rows alone. The gradient has the parameters' dtype."
    )
    extents = {Category.SHARDED_PARAM: cut, Category.SHARDED_GRAD: cut, Category.OPTIMIZER_STATE: own}
    return Rules(extents, sentence, widths)


def _deepspeed(spec: RunSpec) -> Rules:
    """`zeroviz.witness.deepspeed_parts`."""
    states = (Category.MASTER_PARAM, Category.OPTIMIZER_STATE)
    if spec.strategy is Strategy.DDP:
        whole = Rule(P, Sigma(I, NUMEL), "every parameter, whole")
        extents = dict.fromkeys((Category.UNSHARDED_PARAM, *states), whole)
        return Rules(extents, "Nothing is cut; gradients are dropped with the step.", _widths(spec.recipe))
    widths = _widths(spec.recipe, DType.FP32)
    if spec.strategy is Strategy.ZERO3:
        return _deepspeed_chunks(spec, widths)
    flat = product(Num(ALIGNMENT), N, Ceil(Frac(P, product(Num(ALIGNMENT), N), is_inline=True)))
    part = product(Num(ALIGNMENT), Ceil(Frac(P, product(Num(ALIGNMENT), N), is_inline=True)))
    whole = Rule(P, flat, "one flat tensor of all parameters, whole, padded")
    cut = Rule(Frac(P, N), part, "this rank's part of the flat tensor, padded")
    kept = "Fp32 gradients of the whole model stay from step to step"
    gradients = kept if keeps_whole_gradients(spec) else "Gradients are dropped with the step"
    sentence = (
        f"All parameters lie in one flat tensor, its end padded to a multiple of {ALIGNMENT} N elements. Of one of N "
        f"equal parts a rank has the fp32 master and the moments. {gradients}, and the norm of the last one is kept."
    )
    extents = {Category.UNSHARDED_PARAM: whole, Category.UNSHARDED_GRAD: whole, **dict.fromkeys(states, cut)}
    return Rules(extents, sentence, widths)


def _deepspeed_chunks(spec: RunSpec, widths: Mapping[Category, Width]) -> Rules:
    """[Note: chunks] in `zeroviz.witness.deepspeed_parts`."""
    chunk = Ceil(Frac(NUMEL, N, is_inline=True))
    cut = Rule(Frac(P, N), Sigma(I, chunk), "this rank's chunk of every parameter, padded")
    small = Rule(
        Sym("P", "small"), Sigma("i small", product(N, chunk)), "parameters that stay whole, for they are small"
    )
    bucket = Rule(Sym("B"), Sym("B"), "the bucket in which gradients are reduced")
    states = (Category.SHARDED_PARAM, Category.SHARDED_GRAD, Category.MASTER_PARAM, Category.OPTIMIZER_STATE)
    limit: int = value_of(spec.settings, "persistence_numel", spec.impl)
    besides = f"Those of at most {limit:,} elements are whole besides" if spec.ranks > 1 else "One rank's is the whole"
    sentence = (
        f"Every parameter i is cut by itself into N chunks. {besides}. A bucket of B elements is held for good, "
        "whatever the model, and so are the gradient's norm and a flag."
    )
    extents = {**dict.fromkeys(states, cut), Category.UNSHARDED_PARAM: small, Category.BUCKET: bucket}
    return Rules(extents, sentence, {**widths, Category.BUCKET: Widths.of(spec.recipe).param})


def _megatron(spec: RunSpec) -> Rules:
    """`zeroviz.witness.megatron_buffer`, [Note: padding]."""
    whole = Rule(P, Sigma("b", Sym("B", "b")), "every bucket, whole, padded")
    own = Rule(
        Frac(P, N), Sigma("i of r", Sym("o", "i,r")), "the pieces of parameters in this rank's parts, no padding"
    )
    extents = {
        Category.UNSHARDED_PARAM: whole,
        Category.UNSHARDED_GRAD: whole,
        Category.MASTER_PARAM: own,
        Category.OPTIMIZER_STATE: own,
    }
    sentence = (
        "Parameters and gradients lie in one buffer each, in buckets b of B_b elements, with padding between them. "
        "Of every bucket a rank owns 1/N: master and moments are of the o_i,r elements of parameters i in it."
    )
    return Rules(extents, sentence, _widths(spec.recipe))


def _shards(spec: RunSpec) -> Sym:
    return G if spec.strategy.replicates else N


def _widths(recipe: Recipe, master: DType | None = None) -> dict[Category, Width]:
    widths = Widths.of(recipe, master)
    found = {
        Category.SHARDED_PARAM: widths.param,
        Category.UNSHARDED_PARAM: widths.param,
        Category.SHARDED_GRAD: widths.grad,
        Category.UNSHARDED_GRAD: widths.grad,
        Category.MASTER_PARAM: widths.master,
    }
    return found | ({Category.OPTIMIZER_STATE: widths.moments} if recipe.num_moments else {})


_RULES: Mapping[Implementation, Callable[[RunSpec], Rules]] = {
    Implementation.DDP: _ddp,
    Implementation.ZERO_REDUNDANCY: _zero_redundancy,
    Implementation.FSDP1: _fsdp1,
    Implementation.FSDP2: _fsdp2,
    Implementation.DEEPSPEED: _deepspeed,
    Implementation.MEGATRON: _megatron,
}


def symbols_of(spec: RunSpec) -> Iterator[tuple[Sym, str]]:
    """What the rules' own symbols stand for."""
    shards = _shards(spec).name
    yield NUMEL, "elements of parameter i"
    for dtype in DType:
        yield Sym("e", dtype.value), f"{dtype.itemsize} B, an element as it is sent, in {dtype.value}"
    yield Sym("P", "r"), "elements of the parameters that rank r owns"
    yield BUCKET, f"{spec.recipe.grad.itemsize} B, a gradient once more, in its bucket"
    yield Sym("F", "u"), "elements of unit u's flat parameter, alignment included"
    yield Sym("h", I), "rows of parameter i"
    yield Sym("h", "i,r"), f"of them those that rank r holds, at most the rows over {shards}, rounded up"
    yield Sym("c", I), "elements of each of its rows"
    yield Sym("o", "i,r"), "elements of parameter i that rank r owns"
    yield Sym("B", "b"), "elements of bucket b, padding included"
    yield Sym("P", "small"), "elements of parameters that stay whole"
    if spec.impl is Implementation.DEEPSPEED and spec.strategy is Strategy.ZERO3:
        yield Sym("B"), f"{value_of(spec.settings, 'bucket_numel', spec.impl):,} elements of the bucket"
