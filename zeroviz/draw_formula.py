"""Formula -> HTML: a block of lines, each a chain of equations that stand under one another at their equality signs.

Every term can be pointed at and reached by the Tab key. It carries its category as `data-category`, so that a page can
light the bar it is drawn as, a stroke of that bar's colour below it, or of its collective's where it crosses the wire,
and in words what it is. Nothing is loaded and nothing runs: fractions and sums are plain HTML. `formula_text` is the
same for a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

from zeroviz.category import Category
from zeroviz.derivation_terms import LEVELS, Expression, Formula, Line, Part, Term
from zeroviz.labels import Say, say_html
from zeroviz.notation import (
    Ceil,
    Frac,
    Node,
    Num,
    Product,
    Sigma,
    Sum,
    Sym,
    Word,
    is_figure,
    is_numeric,
    signed,
    text,
)
from zeroviz.quantity import format_binary_nbytes, format_decimal_nbytes
from zeroviz.style import PAINT, WIRE_PAINT

WIDTH = 80
"""Columns of a terminal."""
CSS = """
.zeroviz-formula { font-size: 24px; line-height: 1.45; color: var(--jp-ui-font-color1, #1a1a1a); margin: 0; }
.zeroviz-formula h4 { font-size: 19px; font-weight: 700; margin: 20px 0 2px; color: inherit; }
.zeroviz-formula h4 small { font-size: 16px; font-weight: 400; margin-left: 10px;
  color: var(--jp-ui-font-color2, #555); }
.zeroviz-formula table { border-collapse: collapse; margin: 0; width: auto; font-size: inherit;
  color: inherit; }
.zeroviz-formula tr, .zeroviz-formula tr:hover { background: none; }
.zeroviz-formula th, .zeroviz-formula td { text-align: left; vertical-align: baseline; padding: 5px 0; border: 0; }
.zeroviz-formula th { font-size: 14px; font-weight: 400; white-space: nowrap; padding-right: 16px; width: 92px;
  color: var(--jp-ui-font-color2, #555); }
.zeroviz-formula td, .zeroviz-meanings dt { font-family: "STIX Two Text", "Cambria", "Times New Roman",
  "Liberation Serif", serif; }
.zeroviz-formula td.zeroviz-equals { padding: 5px 12px; white-space: nowrap; text-align: right; }
.zeroviz-formula td.zeroviz-left { white-space: nowrap; text-align: right; min-width: 56px; }
.zeroviz-formula td.zeroviz-side { font-variant-numeric: tabular-nums; }
.zeroviz-formula tr.zeroviz-result td { font-weight: 700; font-size: 26px; }
.zeroviz-formula tr.zeroviz-result small { font-size: 17px; font-weight: 400; margin-left: 12px; }
.zeroviz-formula > h4 { margin-left: 4px; }
.zeroviz-formula-line { overflow: auto hidden; padding: 0 4px 4px; }
.zeroviz-part { white-space: nowrap; }
.zeroviz-term { display: inline-block; padding: 0 3px 7px; margin: 0 -1px; border-radius: 3px; cursor: help;
  background: var(--paint) no-repeat center bottom / calc(100% - 4px) 5px; }
.zeroviz-term:hover, .zeroviz-term:focus-visible, .zeroviz-term.zeroviz-lit { background-color: rgba(0, 114, 178, 0.14);
  outline: 2px solid #0072B2; outline-offset: 1px; }
.zeroviz-formula b { font-weight: inherit; font-style: normal; }
.zeroviz-formula .zeroviz-up { font-style: normal; font-size: 0.84em;
  font-family: var(--jp-ui-font-family, sans-serif); }
.zeroviz-formula sub { font-size: 0.68em; line-height: 0; font-style: normal; vertical-align: -0.32em; }
.zeroviz-formula sub.zeroviz-long { font-family: var(--jp-ui-font-family, sans-serif); font-size: 0.58em; }
.zeroviz-frac { display: inline-flex; flex-direction: column; vertical-align: middle; text-align: center;
  font-size: 0.86em; line-height: 1.2; margin: 0 3px; }
.zeroviz-frac > :first-child { border-bottom: 1.6px solid currentColor; padding: 0 3px 1px; }
.zeroviz-frac > :last-child { padding: 1px 3px 0; }
.zeroviz-sum { font-size: 1.25em; line-height: 0.9; margin-right: 1px; }
.zeroviz-notes { font-size: 15px; margin: 4px 0 0 108px; padding: 0; list-style: none; line-height: 1.4;
  color: var(--jp-ui-font-color2, #444); max-width: 110ch; }
.zeroviz-meanings { columns: 2 400px; column-gap: 36px; font-size: 16px; margin: 4px 0 0 60px; line-height: 1.4; }
.zeroviz-meanings div { display: grid; grid-template-columns: 62px 1fr; gap: 0 12px; break-inside: avoid;
  padding: 1px 0; align-items: baseline; }
.zeroviz-meanings dt { text-align: right; font-size: 18px; }
.zeroviz-meanings dd { margin: 0; }
.zeroviz-formula details { margin: 14px 0 0 108px; font-size: 14px; }
.zeroviz-formula pre { font-size: 13px; line-height: 1.4; overflow-x: auto; }
"""
"""For the page that shows the block, once."""


def formula_html(formula: Formula, say: Say = str) -> str:
    """The whole block. say: what each label is put as."""
    lines = "".join(_line(line, formula.rank, formula.resting) for line in formula.lines)
    html = (
        f'<section class="zeroviz-formula" aria-label="{escape(formula.title)}" data-rank="{formula.rank}">{lines}'
        f"{_meanings(formula)}<details><summary>As plain text</summary>"
        f"<pre>{escape(formula_text(formula))}</pre></details></section>"
    )
    return say_html(html, say)


def _line(line: Line, rank: int, resting: frozenset[Category]) -> str:
    place = f"<small>{escape(line.place)}</small>" if line.place else ""
    notes = "".join(f"<li>{_noted(note)}</li>" for note in line.notes)
    data = f'data-line="{escape(line.name)}" data-closed="{str(line.is_closed).lower()}"'
    return (
        f'<div class="zeroviz-formula-line" {data}><h4>{escape(line.name)}, rank {rank:,}{place}</h4>'
        f'<table aria-label="{escape(line.name)}">{"".join(_rows(line, resting))}</table>'
        + (f'<ul class="zeroviz-notes">{notes}</ul>' if notes else "")
        + "</div>"
    )


def _rows(line: Line, resting: frozenset[Category]) -> Iterator[str]:
    """Level by level, then the figure. Of nothing there is nothing to derive."""
    left = _node(line.left)
    if line.levels[0].parts:
        for number, (name, expression) in enumerate(zip(LEVELS, line.levels, strict=True)):
            yield _row(f'data-level="{number + 1}"', name, left, _side(expression, resting))
            left = ""
    nbytes = f"{line.nbytes:,} B{_rounded(line.nbytes)}"
    yield _row(f'class="zeroviz-result" data-nbytes="{line.nbytes}"', "bytes", left, nbytes)


def _row(data: str, name: str, left: str, right: str) -> str:
    return (
        f'<tr {data}><th scope="row">{name}</th><td class="zeroviz-left">{left}</td><td class="zeroviz-equals">=</td>'
        f'<td class="zeroviz-side">{right}</td></tr>'
    )


def _noted(words: str) -> str:
    """A sentence with its symbols as they are in the formulas."""
    return re.sub(r"\b([A-Za-z])_([a-z]+(?:,[a-z])?)\b", r"<i>\1</i><sub>\2</sub>", escape(words))


def _rounded(nbytes: int) -> str:
    if abs(nbytes) < 1000:
        return ""
    return f"<small>{format_decimal_nbytes(nbytes)}, {format_binary_nbytes(nbytes)}</small>"


def _side(expression: Expression, resting: frozenset[Category]) -> str:
    """The parts of a sum; between them a line may break, before the sign."""
    return " ".join(
        f'<span class="zeroviz-part">{"+ " if number else ""}{_part(part, resting)}</span>'
        for number, part in enumerate(expression.parts)
    )


def _part(part: Part, resting: frozenset[Category]) -> str:
    if part.is_alone:
        (term,) = part.terms
        node = part.whole_term
        words = _term(term, node, resting)
        words = f"({words})" if part.prefix is not None and isinstance(node, Sum) else words
    else:
        words = f"({' + '.join(_term(term, term.node, resting) for term in part.terms)})"
        if part.factor is not None:
            words += (_TIMES if is_numeric(part.factor) else _THIN) + _node(part.factor)
    if part.prefix is not None:
        words = _node(part.prefix) + (_TIMES if is_figure(part.prefix) else _THIN) + words
    return f"⌈{words}⌉" if part.is_rounded else words


def _term(term: Term, node: Node, resting: frozenset[Category]) -> str:
    names = " ".join(category.value for category in term.categories)
    tip = escape(term.tip)
    return (
        f'<span class="zeroviz-term" data-category="{names}" data-nbytes="{term.nbytes}" tabindex="0" role="img" '
        f'aria-label="{escape(text(node))}: {tip}" title="{tip}" style="--paint:{paint_of(term, resting)}">'
        f"{_node(node)}</span>"
    )


def paint_of(term: Term, resting: frozenset[Category]) -> str:
    """The stroke below a term, in the colour of its collective in the wire picture, or of its category in the others:
    whole where it is held at rest, dashed where it lives within the step only; two halves where it stands for two."""
    paints = [WIRE_PAINT[op] for op in term.ops] or [PAINT[category] for category in term.categories]
    colors = [paint.color for paint in paints] or ["transparent"]
    if len(colors) > 1:
        share = 100 // len(colors)
        halves = (f"{color} {number * share}% {(number + 1) * share}%" for number, color in enumerate(colors))
        return f"linear-gradient(90deg,{','.join(halves)})"
    if not term.ops and resting.issuperset(term.categories):
        return f"linear-gradient({colors[0]},{colors[0]})"
    return f"repeating-linear-gradient(90deg,{colors[0]} 0 5px,#0000 5px 7px)"


def _meanings(formula: Formula) -> str:
    rows = "".join(
        f"<div><dt>{_node(each.symbol)}</dt><dd>{_noted(each.words)}</dd></div>" for each in formula.meanings
    )
    return f'<h4>Where</h4><dl class="zeroviz-meanings">{rows}</dl>'


# ---- trees ----

_TIMES, _THIN = " · ", "&#8239;"


def _node(node: Node) -> str:
    return _HTML[type(node)](node)


def _below(sub: str) -> str:
    if not sub:
        return ""
    kind = ' class="zeroviz-long"' if len(sub) > 1 and sub not in ("act", "temp", "in", "AG", "RS", "AR") else ""
    return f"<sub{kind}>{escape(sub).replace(' in ', ' ∈ ')}</sub>"


def _atom(node: Node) -> str:
    return f"({_node(node)})" if type(node) is Sum else _node(node)


def _product(node: Product) -> str:
    words = _atom(node.factors[0])
    for factor in node.factors[1:]:
        words += (_TIMES if is_numeric(factor) else _THIN) + _atom(factor)
    return words


def _sum(node: Sum) -> str:
    words = _node(node.addends[0])
    for addend in node.addends[1:]:
        sign, rest = signed(addend)
        words += f" {'&#8722;' if sign == '-' else sign} {_node(rest)}"
    return words


def _frac(node: Frac) -> str:
    if node.is_inline:
        below = f"({_node(node.bottom)})" if type(node.bottom) in (Product, Sum) else _node(node.bottom)
        return f"{_atom(node.top)}/{below}"
    return f'<span class="zeroviz-frac"><span>{_node(node.top)}</span><span>{_node(node.bottom)}</span></span>'


_HTML: Mapping[type, Callable[[Any], str]] = {
    Sym: lambda node: (f"<i>{node.name}</i>" if len(node.name) == 1 else f"<b>{node.name}</b>") + _below(node.sub),
    Word: lambda node: f'<span class="zeroviz-up">{escape(node.text)}</span>{_below(node.sub)}',
    Num: lambda node: f"{node.value:,}".replace("-", "&#8722;"),
    Product: _product,
    Sum: _sum,
    Frac: _frac,
    Ceil: lambda node: f"⌈{_node(node.body)}⌉",
    Sigma: lambda node: f'<span class="zeroviz-sum">Σ</span>{_below(node.over)}{_THIN}{_atom(node.body)}',
}


# ---- plain text ----


def formula_text(formula: Formula) -> str:
    """The lines for a terminal of 80 columns, and for who reads them aloud."""
    words = [f"{formula.title}, rank {formula.rank:,}"]
    for line in formula.lines:
        words += ["", *_text_line(line)]
    words += ["", "Where"]
    for each in formula.meanings:
        words += _wrapped(f"  {text(each.symbol):<8} ", each.words.split(), " " * 11)
    return "\n".join(words)


def _text_line(line: Line) -> Iterator[str]:
    yield f"{line.name}{f', {line.place}' if line.place else ''}"
    for name, expression in zip(LEVELS, line.levels, strict=True) if line.levels[0].parts else ():
        parts = [f"{'+ ' if number else ''}{part.text}" for number, part in enumerate(expression.parts)]
        yield from _wrapped(f"  {name:<12} = ", parts, " " * 17)
    yield f"  {'bytes':<12} = {line.nbytes:,} B, {format_decimal_nbytes(line.nbytes)}"
    for note in line.notes:
        yield from _wrapped("  ", note.split(), "  ")


def _wrapped(first: str, pieces: list[str], indent: str) -> Iterator[str]:
    """Pieces in as many lines as they need; a piece is never broken."""
    line, is_empty = first, True
    for piece in pieces:
        if not is_empty and len(line) + 1 + len(piece) > WIDTH:
            yield line
            line, is_empty = indent, True
        line, is_empty = line + ("" if is_empty else " ") + piece, False
    yield line
