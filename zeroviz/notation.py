"""How a formula is written: symbols, numbers, fractions, sums over units, as a small tree, and its plain text.

Nothing is worked out here. `arithmetic` spells a tree so that `zeroviz.formula.evaluate` can: this is how tests show
that what is written is what was computed. `zeroviz.draw_formula` draws the same tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, Union


class Sym(NamedTuple):
    """A letter, and what stands below it: `P`, `P_u`."""

    name: str
    sub: str = ""


class Num(NamedTuple):
    """A whole number. Bytes and counts are never rounded in a formula."""

    value: int


class Word(NamedTuple):
    """A quantity that has no letter: `activations`. sub: of which unit or which moment."""

    text: str
    sub: str = ""


class Product(NamedTuple):
    """Factors side by side."""

    factors: tuple[Node, ...]


class Sum(NamedTuple):
    """Addends; those that are a negative Num, or a Product that begins with one, are subtracted."""

    addends: tuple[Node, ...]


class Frac(NamedTuple):
    """One above the other or, `is_inline`, with a stroke between them."""

    top: Node
    bottom: Node
    is_inline: bool = False


class Ceil(NamedTuple):
    """Rounded up to a whole number."""

    body: Node


class Sigma(NamedTuple):
    """The sum of `body` over the units, parameters or calls named: `u`, `u in D`."""

    over: str
    body: Node


Node: TypeAlias = Union[Sym, Num, Word, Product, Sum, Frac, Ceil, Sigma]  # noqa: UP007, recursive: a string inside


def product(*factors: Node) -> Node:
    """Their product, without ones; a single factor is itself."""
    kept = tuple(factor for factor in factors if not (isinstance(factor, Num) and factor.value == 1))
    return Product(kept) if len(kept) > 1 else kept[0] if kept else Num(1)


def total(*addends: Node) -> Node:
    """Their sum; a single addend is itself."""
    return Sum(addends) if len(addends) > 1 else addends[0]


def is_numeric(node: Node) -> bool:
    """Whether it begins with a figure, so that a sign must stand between it and a figure before it."""
    match node:
        case Num():
            return True
        case Product(factors):
            return is_numeric(factors[0])
        case Frac(top, _):
            return is_numeric(top)
        case Ceil(body):
            return is_numeric(body)
        case Sum(addends):
            return is_numeric(addends[0])
        case _:
            return False


def is_figure(node: Node) -> bool:
    """Whether it is figures alone, without a letter."""
    return not isinstance(node, Word) and next(symbols(node), None) is None


def signed(node: Node) -> tuple[str, Node]:
    """The sign before an addend, and the addend without it."""
    match node:
        case Num(value) if value < 0:
            return "-", Num(-value)
        case Product((Num(value), *rest)) if value < 0:
            return "-", product(Num(-value), *rest)
    return "+", node


def symbols(node: Node) -> Iterator[Sym]:
    """Every letter in it, from left to right."""
    if type(node) is Sym:
        yield node
        return
    for part in node:
        if type(part) is tuple:  # factors or addends
            for each in part:
                yield from symbols(each)
        elif isinstance(part, tuple):
            yield from symbols(part)  # type: ignore[arg-type]  # a field that is a tuple is a Node


# ---- plain text ----


def text(node: Node) -> str:
    """For a terminal and a screen reader: `2 m sum_u ceil(P_u/N)`."""
    words: str = _TEXT[type(node)](node)
    return words


def _atom(node: Node) -> str:
    """In brackets where it is a sum."""
    return f"({text(node)})" if type(node) is Sum else text(node)


def _below(name: str, sub: str) -> str:
    if not sub:
        return name
    return f"{name}_{sub}" if sub.isalnum() else f"{name}[{sub}]"


def _product_text(node: Product) -> str:
    words = _atom(node.factors[0])
    for factor in node.factors[1:]:
        words += ("*" if is_numeric(factor) else " ") + _atom(factor)
    return words


def _sum_text(node: Sum) -> str:
    words = text(node.addends[0])
    for addend in node.addends[1:]:
        sign, rest = signed(addend)
        words += f" {sign} {text(rest)}"
    return words


def _frac_text(node: Frac) -> str:
    below = text(node.bottom)
    return f"{_atom(node.top)}/" + (f"({below})" if type(node.bottom) in (Product, Sum) else below)


def _sigma_text(node: Sigma) -> str:
    return f"{_below('sum', node.over)} {_atom(node.body)}"


_TEXT: Mapping[type, Any] = {
    Sym: lambda node: _below(node.name, node.sub),
    Word: lambda node: f"{node.text}[{node.sub}]" if node.sub else node.text,
    Num: lambda node: f"{node.value:,}",
    Product: _product_text,
    Sum: _sum_text,
    Frac: _frac_text,
    Ceil: lambda node: f"ceil({text(node.body)})",
    Sigma: _sigma_text,
}


# ---- arithmetic ----


def name_of(node: Sym | Word) -> str:
    """What a letter is called in `arithmetic`: `P_u`."""
    return re.sub(r"\W+", "_", f"{node[0]}_{node[1]}" if node[1] else node[0])


def arithmetic(node: Node) -> str:
    """As `zeroviz.formula.evaluate` reads it; a sum over units goes by a name, since no index is known there."""
    match node:
        case Num(value):
            return str(value)
        case Product(factors):
            return "*".join(map(arithmetic, factors))
        case Sum(addends):
            return f"({' + '.join(map(arithmetic, addends))})"
        case Frac(top, bottom, _):
            return f"(({arithmetic(top)})/({arithmetic(bottom)}))"
        case Ceil(body):
            return f"ceil({arithmetic(body)})"
        case Sigma(over, body):
            return re.sub(r"\W+", "_", f"sum_{over}_{arithmetic(body)}")
        case Sym() | Word():
            return name_of(node)
