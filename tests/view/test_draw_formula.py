"""The formulas as HTML: every term can be pointed at and carries what it is; nothing is loaded; and plain text."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest

from tests.every import settings_of
from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.derivation import WIRE, build_formula
from zeroviz.derivation_terms import LEVELS, Formula, Term
from zeroviz.draw_formula import CSS, WIDTH, formula_html, formula_text, paint_of
from zeroviz.draw_wire import paper_of
from zeroviz.examples import EXAMPLES
from zeroviz.implementations import PAIRS
from zeroviz.models import PRESETS, bare
from zeroviz.notation import Num
from zeroviz.paper import Shape
from zeroviz.predict import predict
from zeroviz.spec import Checkpointing, Implementation, Offload, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.state import Explorer
from zeroviz.style import PAINT, WIRE_PAINT

MAX_NBYTES = 60_000
MINUS = "\N{MINUS SIGN}"


def formula_of(*, ranks: int = 4, strategy: Strategy = Strategy.ZERO3, rank: int = 0, **fields: Any) -> Formula:
    given = {"model": PRESETS["tiny"], **settings_of(strategy, ranks), **fields}
    return build_formula(predict(RunSpec(ranks=ranks, **given)), rank)


FORMULAS = {
    **{strategy.value: formula_of(strategy=strategy) for strategy in Strategy},
    "bf16-mixed": formula_of(precision=Precision.BF16_MIXED),
    "offload": formula_of(offload=Offload.PARAMS, precision=Precision.BF16_MIXED),
    "one rank": formula_of(ranks=1),
    "4,096 ranks": formula_of(model=PRESETS["llama3-8b"], ranks=4096, seq=4096),
    "bare": formula_of(model=bare(7 * 10**9), unit=UnitPolicy.parse("model"), ranks=8),
    "recomputed": formula_of(checkpointing=Checkpointing(2), clip_norm=1.0, prefetch=1, async_reduce=True),
    **{impl.value: formula_of(impl=impl, strategy=PAIRS[impl][-1], ranks=3) for impl in PAIRS},
}

WIRES: list[dict[str, Any]] = [
    {"strategy": Strategy.DDP, "clip_norm": 1.0},
    {"strategy": Strategy.HYBRID_SHARD, "ranks": 6, "shard_ranks": 3, "precision": Precision.BF16_MIXED},
    {"strategy": Strategy.ZERO1, "impl": Implementation.ZERO_REDUNDANCY, "ranks": 3},
    {"impl": Implementation.MEGATRON, "strategy": PAIRS[Implementation.MEGATRON][-1], "ranks": 3},
]
"""Each collective there is, and ranks that do not divide what is sent."""


def tree_of(formula: Formula) -> Element:
    return fromstring(formula_html(formula).replace("<br>", "<br/>"))


def of_class(element: Element, name: str) -> list[Element]:
    return [each for each in element.iter() if name in each.get("class", "").split()]


@pytest.mark.parametrize("name", FORMULAS)
def test_each_line_is_a_chain_of_equations(name: str) -> None:
    """A row a level and one for the figure; each with its sign of equality in a cell of its own, so that they align."""
    formula = FORMULAS[name]
    blocks = of_class(tree_of(formula), "zeroviz-formula-line")
    assert [block.get("data-line") for block in blocks] == [line.name for line in formula.lines]
    for block, line in zip(blocks, formula.lines, strict=True):
        rows = list(block.iter("tr"))
        assert [len(row) for row in rows] == [4] * len(rows)
        assert all(of_class(row, "zeroviz-equals")[0].text == "=" for row in rows)
        heads = [head.text for row in rows for head in row.iter("th")]
        assert heads == [*(LEVELS if line.levels[0].parts else ()), "bytes"]
        assert rows[-1].get("data-nbytes") == str(line.nbytes)
        assert f"{line.nbytes:,} B" in "".join(rows[-1].itertext())
        assert block.get("data-closed") == str(line.is_closed).lower()


@pytest.mark.parametrize("name", FORMULAS)
def test_every_term_can_be_pointed_at(name: str) -> None:
    """By pointer and by key; it says its category, its bytes and what it is, and the bytes of a row are the figure."""
    formula = FORMULAS[name]
    root = tree_of(formula)
    for block, line in zip(of_class(root, "zeroviz-formula-line"), formula.lines, strict=True):
        rows = [row for row in block.iter("tr") if row.get("data-level")]
        for row, expression in zip(rows, line.levels, strict=bool(rows)):
            terms = of_class(row, "zeroviz-term")
            assert len(terms) == len(expression.terms)
            assert sum(int(term.get("data-nbytes", "")) for term in terms) == line.nbytes
            for drawn, term in zip(terms, expression.terms, strict=True):
                names = [Category(each) for each in drawn.get("data-category", "").split()]
                assert tuple(names) == term.categories
                assert (drawn.get("tabindex"), drawn.get("title")) == ("0", term.tip)
                assert drawn.get("role") == "img" and drawn.get("aria-label", "").endswith(term.tip)
                paints = [WIRE_PAINT[op] for op in term.ops] or [PAINT[each] for each in names]
                assert all(paint.color in drawn.get("style", "") for paint in paints)


def test_figures_stand_as_they_are() -> None:
    """The third level's words are the numbers, with signs between figures; minus is a minus."""
    formula = FORMULAS["zero3"]
    (rest, *_) = of_class(tree_of(formula), "zeroviz-formula-line")
    sides = ["".join(side.itertext()) for side in of_class(rest, "zeroviz-side")]
    assert sides[2] == "(4 + 4 + 2 · 4) · 33,279"
    wire = of_class(tree_of(formula), "zeroviz-formula-line")[-1]
    assert f"N {MINUS} 1" in "".join(wire.itertext())


def test_fractions_and_indices() -> None:
    root = tree_of(FORMULAS["zero3"])
    fractions = {"/".join("".join(part.itertext()) for part in each) for each in of_class(root, "zeroviz-frac")}
    assert fractions == {"P/N", f"N {MINUS} 1/N", "3/4"}
    assert {"u", "act", "temp", "in", "u ∈ {root, block 2}"} <= {"".join(sub.itertext()) for sub in root.iter("sub")}


def test_strokes_are_whole_at_rest_dashed_within_the_step_and_two_for_two() -> None:
    resting = frozenset({Category.MASTER_PARAM, Category.OPTIMIZER_STATE})

    def stroke(*categories: Category, ops: tuple[CollectiveOp, ...] = ()) -> str:
        return paint_of(Term(Num(1), categories, "", 1, ops), resting)

    assert stroke(Category.MASTER_PARAM).startswith("linear-gradient(")
    assert stroke(Category.ACTIVATION).startswith("repeating-linear-gradient(")
    both = stroke(Category.MASTER_PARAM, Category.OPTIMIZER_STATE)
    assert PAINT[Category.MASTER_PARAM].color in both and PAINT[Category.OPTIMIZER_STATE].color in both
    assert "transparent" in stroke()
    # Nothing of the wire is held at rest, whatever it is drawn as there.
    sent = stroke(Category.MASTER_PARAM, ops=(CollectiveOp.REDUCE_SCATTER,))
    assert (
        sent == f"repeating-linear-gradient(90deg,{WIRE_PAINT[CollectiveOp.REDUCE_SCATTER].color} 0 5px,#0000 5px 7px)"
    )


@pytest.mark.parametrize("toggles", [*EXAMPLES.values(), *WIRES], ids=str)
def test_the_wire_has_the_colours_of_the_wire_picture(toggles: dict[str, Any]) -> None:
    """Term by term: those of one line are the collectives of the picture, by one rule for both."""
    state = Explorer()
    assert state.choose(**toggles), state.error
    line = next(line for line in state.formula().lines if line.name == WIRE)
    picture = paper_of(state.wire())
    painted = {shape.fill for shape in picture.shapes if isinstance(shape, Shape) and shape.hatch}
    for expression in line.levels:
        strokes = {paint_of(term, state.formula().resting) for term in expression.terms}
        assert all(stroke.startswith("repeating-linear-gradient(90deg,#") for stroke in strokes), strokes
        assert {stroke.partition("90deg,")[2][:7] for stroke in strokes} == painted


@pytest.mark.parametrize("name", FORMULAS)
def test_nothing_is_loaded_and_nothing_runs(name: str) -> None:
    markup = formula_html(FORMULAS[name])
    assert len(markup.encode()) < MAX_NBYTES
    assert not re.search(r"<(script|link|img|iframe|style)|\bon\w+=|https?:|url\(", markup)
    assert not re.search(r"@import|url\(|https?:", CSS)
    assert markup == formula_html(FORMULAS[name])


def test_names_are_escaped() -> None:
    formula = FORMULAS["zero3"]
    line = replace(formula.lines[0], name="<script>", place="<b>", notes=("<i>",))
    markup = formula_html(replace(formula, title='"><script>', lines=(line,)))
    assert "<script" not in markup and "&lt;script&gt;" in markup
    assert "<small>&lt;b&gt;</small>" in markup and "<li>&lt;i&gt;</li>" in markup


@pytest.mark.parametrize("name", FORMULAS)
def test_the_plain_text_has_every_level_and_fits_a_terminal(name: str) -> None:
    formula = FORMULAS[name]
    words = formula_text(formula)
    assert words in "".join(tree_of(formula).itertext())
    for line in formula.lines:
        assert line.name in words and f"= {line.nbytes:,} B" in words
        for expression in line.levels if line.levels[0].parts else ():
            squeezed = re.sub(r"\s+", " ", words)
            assert expression.text in squeezed
        assert all(note in re.sub(r"\s+", " ", words) for note in line.notes)
    longest = max(part.text for line in formula.lines for level in line.levels for part in level.parts)
    assert max(map(len, words.splitlines())) <= max(WIDTH, len(longest) + 20)


def test_what_is_read_off_a_walk_is_marked() -> None:
    for impl in PAIRS:
        blocks = of_class(tree_of(FORMULAS[impl.value]), "zeroviz-formula-line")
        closed = {block.get("data-line"): block.get("data-closed") for block in blocks}
        assert closed["At rest"] == "true"
        assert closed["At the peak"] == ("true" if impl is Implementation.OWN else "false")
