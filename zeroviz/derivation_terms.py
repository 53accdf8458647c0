"""What a derivation is made of: terms that know their category and bytes, sums of them on three levels, lines.

[Note: three levels] One figure is written three times: in symbols, as a paper has it; with indices, where units,
ranks and padding show; and in numbers. On every level a term stands for the same bytes, and the terms add up to the
line's figure, which is the trace's own and not the formula's. What the formula should miss would be a term by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeroviz.category import CATEGORY_ORDER, Category
from zeroviz.collectives import CollectiveOp
from zeroviz.notation import Node, Num, Sum, Sym, Word, arithmetic, is_figure, is_numeric, product, text
from zeroviz.spec import DType, Recipe, RunSpec
from zeroviz.style import label_of

NUM_LEVELS = 3
LEVELS = ("symbols", "with indices", "numbers")
K = Sym("k")


class Term(NamedTuple):
    """A part of a sum that can be pointed at. categories: as which it is drawn, mostly one; none where it is no part of
    a bar. tip: what it is, in words. nbytes: what it stands for. ops: the collectives that send it, on the wire."""

    node: Node
    categories: tuple[Category, ...]
    tip: str
    nbytes: int
    ops: tuple[CollectiveOp, ...] = ()


class Part(NamedTuple):
    """prefix (term + term + ...) factor, rounded up to whole bytes where `is_rounded`."""

    terms: tuple[Term, ...]
    prefix: Node | None = None
    factor: Node | None = None
    is_rounded: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether there is one term, so that no brackets are needed and the factor can belong to it."""
        return len(self.terms) == 1

    @property
    def whole_term(self) -> Node:
        """The only term together with the factor."""
        (term,) = self.terms
        return term.node if self.factor is None else product(term.node, self.factor)

    @property
    def text(self) -> str:
        """As a terminal shows it: `(p + g) P/N`."""
        if self.is_alone:
            words = text(self.whole_term)
            words = f"({words})" if self.prefix is not None and isinstance(self.whole_term, Sum) else words
        else:
            words = f"({' + '.join(text(term.node) for term in self.terms)})"
            words += "" if self.factor is None else sign_before(self.factor) + text(self.factor)
        if self.prefix is not None:
            words = f"{text(self.prefix)}{'*' if is_figure(self.prefix) else ' '}{words}"
        return f"ceil({words})" if self.is_rounded else words

    @property
    def arithmetic(self) -> str:
        """As `zeroviz.formula.evaluate` reads it."""
        words = f"({' + '.join(arithmetic(term.node) for term in self.terms)})"
        for node in (self.prefix, self.factor):
            words += "" if node is None else f"*{arithmetic(node)}"
        return f"ceil({words})" if self.is_rounded else words


def sign_before(node: Node) -> str:
    """Between a factor and this one: a sign where two figures would meet."""
    return "*" if is_numeric(node) else " "


class Expression(NamedTuple):
    """A sum of parts."""

    parts: tuple[Part, ...]

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(term for part in self.parts for term in part.terms)

    @property
    def text(self) -> str:
        return " + ".join(part.text for part in self.parts) or "0"

    @property
    def arithmetic(self) -> str:
        return " + ".join(part.arithmetic for part in self.parts) or "0"


Levels = tuple[Expression, Expression, Expression]
"""See [Note: three levels]."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of one rank, derived. See [Note: three levels].

    name: what it is of, `At the peak`. place: where in the step. left: what stands before the first sign of equality.
    nbytes: the trace's figure. is_closed: whether it follows from the spec alone, by the first two levels; otherwise
    the walk was asked for some term. exact: whether no term had to be named for what the formula misses.
    notes: what else there is to know, in sentences.
    """

    name: str
    place: str
    left: Sym
    levels: Levels
    nbytes: int
    is_closed: bool
    exact: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a symbol stands for: `p`, `2 B, a parameter in bf16`."""

    symbol: Sym
    words: str


@dataclass(frozen=True, slots=True)
class Formula:
    """The lines of one rank of one spec, and the symbols in them."""

    title: str
    rank: int
    lines: tuple[Line, ...]
    meanings: tuple[Meaning, ...]
    resting: frozenset[Category]
    """What is held at rest, and so drawn solid."""


# ---- what lines are built from ----


class Width(NamedTuple):
    """Bytes an element of a state: its symbol, its figure. is_k: whether the first level counts it to k."""

    symbol: Node
    number: Node
    nbytes: int
    is_k: bool = False


class Widths(NamedTuple):
    """The recipe's p and g, w of a master and 2 m of the moments; ZeRO's K is w + 2 m.

    (Rajbhandari et al., arXiv 1910.02054, section 3.1, where K is 12 for mixed-precision Adam.)
    """

    param: Width
    grad: Width
    master: Width
    moments: Width

    @classmethod
    def of(cls, recipe: Recipe, master: DType | None = None) -> Widths:
        """master: where it is not the dtype that is updated."""
        count, item = recipe.num_moments, recipe.moments.itemsize
        update = (master or recipe.update).itemsize
        return cls(
            Width(Sym("p"), Num(recipe.param.itemsize), recipe.param.itemsize),
            Width(Sym("g"), Num(recipe.grad.itemsize), recipe.grad.itemsize),
            Width(Sym("w"), Num(update), update, is_k=True),
            Width(product(Num(count), Sym("m")), product(Num(count), Num(item)), count * item, is_k=True),
        )


class Extent(NamedTuple):
    """Elements that something is held of: on the first level, on the second, counted, and in words."""

    first: Node
    second: Node
    numel: int
    words: str


def times_of(width: Width, times: int) -> Width:
    """The width of something that is there, or is sent, so many times."""
    return Width(product(Num(times), width.symbol), product(Num(times), width.number), times * width.nbytes)


class Held(NamedTuple):
    """A state: so many bytes an element of so many elements."""

    width: Width
    extent: Extent
    categories: tuple[Category, ...]
    label: str

    @property
    def nbytes(self) -> int:
        return self.width.nbytes * self.extent.numel

    @property
    def tip(self) -> str:
        return (
            f"{self.label}: {text(self.width.number)} B an element, {self.extent.numel:,} elements "
            f"({self.extent.words}): {self.nbytes:,} B"
        )


class Loose(NamedTuple):
    """A term of its own on every level."""

    nodes: tuple[Node, Node, Node]
    categories: tuple[Category, ...]
    tip: str
    nbytes: int


Item = Held | Loose


def held(spec: RunSpec, width: Width, extent: Extent, category: Category) -> Held:
    return Held(width, extent, (category,), label_of(category, spec))


def parts_of(items: Sequence[Item], level: int, prefix: Node | None = None) -> list[Part]:
    """The parts of a sum: what is held of the same elements stands in one pair of brackets. On the first level the same
    elements are those of one symbol, whatever their padding."""
    groups: dict[object, list[Held]] = {}
    found: list[list[Held] | Loose] = []
    for item in items:
        if isinstance(item, Loose):
            found.append(item)
            continue
        key = (type(item.extent.first), item.extent.first) if level == 0 else id(item.extent)
        group = groups.setdefault(key, [])
        if not group:
            found.append(group)
        group.append(item)
    return [_loose(each, level, prefix) if isinstance(each, Loose) else _bracket(each, level, prefix) for each in found]


def _loose(item: Loose, level: int, prefix: Node | None) -> Part:
    return Part((Term(item.nodes[level], item.categories, item.tip, item.nbytes),), prefix)


def _bracket(group: list[Held], level: int, prefix: Node | None) -> Part:
    extent = group[0].extent
    factor = (extent.first, extent.second, Num(extent.numel))[level]
    ks = [item for item in group if item.width.is_k] if level == 0 else []
    terms = []
    for item in group:
        if item.width.is_k and ks:
            if item is ks[0]:
                terms.append(_k_term(ks))
            continue
        node = item.width.number if level == NUM_LEVELS - 1 else item.width.symbol
        terms.append(Term(node, item.categories, item.tip, item.nbytes))
    return Part(tuple(terms), prefix, factor)


def _k_term(ks: list[Held]) -> Term:
    """What the optimizer keeps, as one letter."""
    categories = tuple(dict.fromkeys(category for item in ks for category in item.categories))
    return Term(K, categories, "; ".join(item.tip for item in ks), sum(item.nbytes for item in ks))


def node_of(item: Item, level: int) -> Node:
    """An item by itself, without brackets shared with others."""
    if isinstance(item, Loose):
        return item.nodes[level]
    (part,) = parts_of([item], level)
    return part.whole_term


def levels_of(items: Sequence[Item]) -> Levels:
    """The three levels of a sum. Of nothing they are empty."""
    first, second, third = (Expression(tuple(parts_of(items, level))) for level in range(NUM_LEVELS))
    return first, second, third


def completed(items: Iterable[Item], nbytes: int) -> tuple[list[Item], bool]:
    """The items, with a term for what they miss of the trace's figure; and whether they miss nothing."""
    every = list(items)
    missed = nbytes - sum(item.nbytes for item in every)
    if missed:
        word = Word("not in the formula")
        every.append(
            Loose((word, word, Num(missed)), (), f"the trace holds {missed:+,} B that the formula misses", missed)
        )
    return every, not missed


def in_order(counts: Mapping[Category, int]) -> list[tuple[Category, int]]:
    """Categories that hold something, in the order of stacking."""
    return [(category, counts[category]) for category in CATEGORY_ORDER if counts.get(category)]
