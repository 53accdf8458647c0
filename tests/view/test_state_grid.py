"""Every state that the toggles can ask for: the page draws all of it, with the prediction's figures, or says why not.

The grid is implementation x strategy x precision x unit x ranks x shard group. It is gone through with both model
families that run and with a bare count, and with fewer ranks with a family that is worked out and not run: 21,140
states are asked for, of which 3,627 exist.

[Note: what is drawn] Of every state that exists bars, formula and wire are built as data, and their figures are
compared with the prediction's. To draw a page takes ten times as long, so the page's own widgets, with every part open,
draw about ten states of each pair of implementation and strategy: each unit with every second number of ranks, for the
next strategy the others. Model, precision and shard group come in turns there: they change how much is drawn and not
what. For code that has no units of its own (`WITHOUT_UNITS`) the units come in turns too. With ZEROVIZ_WHOLE_GRID set
every state is drawn.
"""

from __future__ import annotations

import csv
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape, unescape
from io import StringIO
from itertools import product
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.view.test_panel import figures
from zeroviz import export_ledger
from zeroviz.capacities import DEFAULT_RESERVE_NBYTES
from zeroviz.command import command_line
from zeroviz.compare import Moment
from zeroviz.derivation import build_formula
from zeroviz.derivation_terms import Formula
from zeroviz.draw_advice import verdict_words
from zeroviz.draw_formula import formula_html
from zeroviz.draw_timeline import placed_timeline
from zeroviz.draw_wire import placed_wire
from zeroviz.film import Film, build_film
from zeroviz.guess import Asked, answer, build_question
from zeroviz.implementations import PAIRS, PRECISIONS, WITHOUT_UNITS
from zeroviz.models import PRESETS, Family, ModelShape, bare
from zeroviz.panel.panel import ExplorerPanel
from zeroviz.panel.pictures import frames_of
from zeroviz.precision import WHOLE_BUFFER_PRECISIONS
from zeroviz.predict import predict
from zeroviz.shard_map import build_shard_map
from zeroviz.side_by_side import highest
from zeroviz.spec import Implementation, Precision, Strategy, UnitKind
from zeroviz.state import Explorer
from zeroviz.timeline import build_timeline
from zeroviz.toggles import group_choices, spec_of, usual_shard_ranks
from zeroviz.trace import Trace
from zeroviz.wire_scene import WireScene, build_wire_scene

SVG = "{http://www.w3.org/2000/svg}"
TINY, LLAMA = PRESETS["tiny"], PRESETS["tiny-llama"]
BARE = bare(1_000_003)
COUNTED = replace(LLAMA, name="tiny-mixtral", family=Family.MIXTRAL, experts=5, experts_per_token=3)
MODELS = (TINY, LLAMA, BARE, COUNTED)
UNITS = ((UnitKind.MODEL, 1), (UnitKind.BLOCK, 1), (UnitKind.BLOCK, 2), (UnitKind.LAYER, 1))
RANKS = (1, 2, 3, 4, 64)
SAMPLED_RANKS = (1, 3, 64)
EVERY_PAIR = list(product(Implementation, Strategy))
GPU = str(DEFAULT_RESERVE_NBYTES + 3 * 10**6)
"""Of its bytes 3 MB are left to a step: most of these states fit, and some do not."""
STRIDE = 11
"""From cell to cell, among the states of a cell: prime, and no divisor of their number, so that few go through all."""
REMEDY = re.compile(r"\b(use|allowed are|name a model|must|leave|of \d+: )\b")

Toggles = dict[str, Any]


def grid(impl: Implementation, strategy: Strategy, model: ModelShape) -> Iterator[Toggles]:
    """All states of one model, as they are asked for."""
    for precision, (unit, blocks), ranks in product(Precision, UNITS, RANKS if model is not COUNTED else SAMPLED_RANKS):
        for group in groups_of(ranks) if strategy.replicates else (None,):
            yield {
                "model": model, "impl": impl, "strategy": strategy, "precision": precision, "unit": unit,
                "blocks": blocks, "ranks": ranks, "shard_ranks": group,
            }  # fmt: skip


def groups_of(ranks: int) -> tuple[int, ...]:
    """Every shard group; of 64 ranks those of one, of a node, the usual one and all."""
    return group_choices(ranks) if ranks < 64 else (1, 8, usual_shard_ranks(ranks), ranks)


def exists(toggles: Toggles) -> bool:
    """Whether there is such a state, by the tables of what is built and by the rules that are no tables."""
    impl, strategy, precision, model = (toggles[name] for name in ("impl", "strategy", "precision", "model"))
    if strategy not in PAIRS[impl] or precision not in PRECISIONS[impl]:
        return False
    if strategy.has_whole_buffer and precision not in WHOLE_BUFFER_PRECISIONS:
        return False
    if model is BARE and (
        toggles["unit"] is not UnitKind.MODEL or impl not in (Implementation.OWN, Implementation.FSDP1)
    ):
        return False
    if model is COUNTED and impl is not Implementation.OWN:
        return False
    if impl is Implementation.FSDP1 and toggles["shard_ranks"] == 1 < toggles["ranks"]:
        return False  # the replicas would train apart
    # DeepSpeed's stage 0 has no fp32 gradients of bf16 parameters.
    return (impl, strategy, precision) != (Implementation.DEEPSPEED, Strategy.DDP, Precision.BF16_FP32GRAD)


@pytest.mark.parametrize(("impl", "strategy"), EVERY_PAIR, ids=lambda value: value.value)
def test_every_state_is_shown_with_the_predictions_figures_or_refused_in_a_sentence(
    impl: Implementation, strategy: Strategy, page: ExplorerPanel
) -> None:
    state, found = Explorer(), []
    for toggles in (toggles for model in MODELS for toggles in grid(impl, strategy, model)):
        before = state.toggles, state.predicted
        if state.choose(**toggles):
            assert exists(toggles), toggles
            assert {name: getattr(state, name) for name in toggles} == toggles and state.error == ""
            assert state.predicted == predict(spec_of(state.toggles))
            assert_figures(state, is_turn=len(found) % 2 == 1)
            found.append(toggles)
        else:
            assert not exists(toggles), state.error
            assert_refusal(state.error, toggles)
            assert (state.toggles, state.predicted) == before and state.notice == ""
    assert bool(found) == (strategy in PAIRS[impl])
    drawn = found if os.environ.get("ZEROVIZ_WHOLE_GRID") else list(drawn_of(found))
    for toggles in drawn:
        page.state.pins = ()
        assert page.state.pin() and page.state.choose(**toggles), page.state.error
        assert_page(page)
    for name in ("model", "precision", "unit", "ranks"):  # nothing is left out of the turns
        assert {toggles[name] for toggles in drawn} == {toggles[name] for toggles in found}, name


def drawn_of(found: Sequence[Toggles]) -> Iterator[Toggles]:
    """Of one pair: a state of every second cell, and of each model that does not run. See [Note: what is drawn]."""
    cells: dict[tuple[int, int], list[Toggles]] = defaultdict(list)
    others: dict[str, list[Toggles]] = defaultdict(list)
    for toggles in found:
        if toggles["model"].family.runs:
            unit = toggles["unit"], toggles["blocks"]
            cells[UNITS.index(unit), RANKS.index(toggles["ranks"])].append(toggles)
        else:
            others[toggles["model"].name].append(toggles)
    pair = EVERY_PAIR.index((found[0]["impl"], found[0]["strategy"])) if found else 0
    has_units = not found or found[0]["impl"] not in WITHOUT_UNITS
    turns = [cell for cell in cells if ((sum(cell) + pair) % 2 if has_units else cell[0] == cell[1] % len(UNITS))]
    for number, states in enumerate([*(cells[cell] for cell in turns), *others.values()]):
        assert len(states) % STRIDE
        yield states[number * STRIDE % len(states)]


@pytest.mark.parametrize(
    ("impl", "strategy"), [pair for pair in EVERY_PAIR if pair[1] in PAIRS[pair[0]]], ids=lambda value: value.value
)
def test_one_toggle_after_another_leads_to_a_state_or_to_a_sentence(impl: Implementation, strategy: Strategy) -> None:
    """As a person moves them: what was not touched follows, and says so; an undo takes all of it back."""
    state = Explorer()
    assert state.choose(impl=impl, strategy=strategy), state.error
    moves = [{"unit": unit, "blocks": blocks} for unit, blocks in UNITS]
    for name, values in (
        ("impl", Implementation), ("strategy", Strategy), ("precision", Precision), ("ranks", RANKS), ("model", MODELS),
    ):  # fmt: skip
        moves += [{name: value} for value in values]
    for move in moves:
        before = state.toggles
        if state.choose(**move):
            assert {name: getattr(state, name) for name in move} == move
            assert state.predicted == predict(spec_of(state.toggles)) and not state.error
            assert not state.notice or is_sentence(state.notice)
            assert_figures(state, is_turn=False)
        else:
            assert_refusal(state.error, before | move)
        if state.toggles != before:
            state.undo()
        assert state.toggles == before


def test_a_shard_group_that_gave_way_comes_back() -> None:
    """Along a slider of ranks there are primes, of which no group but one or all is a divisor."""
    state = Explorer()
    assert state.choose(strategy=Strategy.HYBRID_SHARD, ranks=8, shard_ranks=4)
    groups = []
    for ranks in (7, 6, 12, 4096, 5, 8):
        beside = state.beside(ranks=ranks)
        assert beside is not None and state.choose(ranks=ranks) and beside.toggles == state.toggles
        groups.append(state.shard_ranks)
    assert groups == [1, 3, 4, 4, 1, 4]
    assert not state.notice
    assert state.choose(strategy=Strategy.ZERO3) and state.shard_ranks is None
    assert state.choose(strategy=Strategy.HYBRID_SHARD) and state.shard_ranks == 4
    assert state.choose(ranks=7) and "a shard group is now 1: 7 ranks are not divisible by 4." in state.notice
    state.undo()
    assert (state.ranks, state.shard_ranks) == (8, 4)


def test_a_shard_group_follows_to_one_that_the_code_has() -> None:
    """FSDP1 has none of one rank: of three ranks only all are a group."""
    state = Explorer()
    fsdp1, hybrid = Implementation.FSDP1, Strategy.HYBRID_SHARD
    assert state.choose(impl=fsdp1, strategy=hybrid) and state.shard_ranks == 2
    assert state.choose(ranks=3) and state.shard_ranks == 3
    assert "a shard group is now 3: 3 ranks are not divisible by 2." in state.notice
    assert state.choose(impl=Implementation.OWN, strategy=hybrid, ranks=4, shard_ranks=1)
    assert state.choose(impl=fsdp1) and state.shard_ranks == 2
    assert f"a shard group is now 2: {fsdp1.label} has no groups of one rank." in state.notice
    assert state.choose(ranks=1) and state.shard_ranks == 1
    assert not state.choose(shard_ranks=0) and "from 1 to ranks, 1" in state.error  # asked for, so it does not follow


# ---- what is said ----


def assert_refusal(sentence: str, toggles: Toggles) -> None:
    """One sentence, which names what was given and what would do."""
    assert sentence.endswith(".") and "\n" not in sentence and sentence.count(". ") == 0
    unit = toggles["unit"].value + (f":{toggles['blocks']}" if toggles["blocks"] > 1 else "")
    given = {
        f"impl is {toggles['impl'].value!r}", f"precision is {toggles['precision'].value!r}", f"Unit is {unit!r}",
        f"shard_ranks is {toggles['shard_ranks']}",
    }  # fmt: skip
    assert any(words in sentence for words in given), sentence
    assert REMEDY.search(sentence), sentence


def assert_figures(state: Explorer, *, is_turn: bool) -> None:
    """Bars, formula and wire, as data, against the trace of each rank that stands for others. In turns: the formula of
    the first rank and the wire in bytes, that of the last one and the wire in elements."""
    trace, scene = state.predicted, state.scene()
    assert sorted(rank for row in scene.rows for rank in row.ranks) == list(range(trace.spec.ranks))
    for row in scene.rows:
        seen = trace.ranks[row.ranks[0]]
        parts = [segment for segment in scene.segments if segment.row == row.index]
        at_rest = sum(part.nbytes for part in parts if part.moment is Moment.REST)
        assert row.rest_nbytes == seen.rest_nbytes == at_rest
        assert row.peak_nbytes == seen.peak().total == sum(part.nbytes for part in parts if not part.is_given_back)
    most = max(row.peak_nbytes for row in scene.rows)
    assert f"peak {scene.amount(most)} in " in scene.sentence
    assert_formula(trace, trace.spec.ranks - 1 if is_turn else 0)
    assert_sent(build_wire_scene(trace, in_elements=is_turn), trace)


def assert_formula(trace: Trace, rank: int) -> Formula:
    """Each line has the trace's figure, and on every level its terms add up to it."""
    formula, seen = build_formula(trace, rank), trace.ranks[rank]
    assert [line.nbytes for line in formula.lines] == [seen.rest_nbytes, seen.peak().total, seen.sent_nbytes]
    for line in formula.lines:
        assert line.exact
        for level in line.levels:
            assert sum(term.nbytes for term in level.terms) == line.nbytes
    return formula


def assert_sent(wire: WireScene, trace: Trace) -> None:
    """What each rank that has a row sends, and nothing from one rank alone."""
    assert bool(wire.rows) == (trace.spec.ranks > 1)
    sent: dict[int, int] = defaultdict(int)
    for segment in wire.segments:
        sent[wire.rows[segment.row].ranks[0][0]] += segment.sent_nbytes
        assert segment.length == (segment.volume_numel if wire.measure.in_elements else segment.sent_nbytes)
    assert sent == {rank: trace.ranks[rank].sent_nbytes for rank in sent}


# ---- what is drawn ----


@pytest.fixture(scope="module")
def page() -> ExplorerPanel:
    """The page with every part of it open, and with a question before each state."""
    page = ExplorerPanel(Explorer())
    assert page.state.choose_gpu(GPU)
    page.stage.is_open = dict.fromkeys(page.stage.is_open, True)
    for section in (page.fit, page.pinned, page.take):
        section.button.value = True
    page.advice.is_open = True
    page.guessing.switch.value = True
    return page


def assert_page(page: ExplorerPanel) -> None:
    """All that stands on the page is of this state, and says the prediction's figures."""
    state = page.state
    page.stage.draw_rest()
    assert_bars(page)
    assert_step(page)
    assert_wire(page)
    assert ElementTree.fromstring(page.stage.map["svg"]).get("aria-label") == build_shard_map(state.spec).sentence
    assert_advice(page)
    assert_map_of_what_fits(page)
    assert_comparison(page)
    assert_ledger(page)
    for number, asked in enumerate(Asked):
        assert_question(page, asked, number)
    assert command_line("predict", state.spec) in unescape(page.take.picture.value)
    assert '<div class="zeroviz-error"></div>' in page.news.value
    last = state.spec.ranks - 1
    html = formula_html(assert_formula(state.predicted, last))
    assert f"{state.predicted.ranks[last].peak().total:,} B" in html
    if len(state.ranks_apart) > 1:  # another rank has another film
        assert_film(state.predicted, last)


def label_of(svg: str) -> str:
    """What a picture says to a screen reader; that it is whole, for it is parsed."""
    return str(ElementTree.fromstring(svg).get("aria-label"))


def assert_bars(page: ExplorerPanel) -> None:
    """The picture and the table under it."""
    scene, trace = page.state.scene(), page.state.predicted
    root = ElementTree.fromstring(page.stage.bars["svg"])
    assert root.get("aria-label") == scene.sentence
    marks = [dict(path.attrib) for path in root.iter(f"{SVG}path") if path.get("data-category") == "outline"]
    peaks = {row.ranks[0]: trace.ranks[row.ranks[0]].peak().total for row in scene.rows}
    drawn = {int(re.split("[-,]", mark["data-ranks"])[0]): int(mark["data-nbytes"]) for mark in marks}
    assert drawn == peaks
    table = figures(page.tables.value)
    for rank, peak in peaks.items():
        assert table[str(rank), "peak", "total", "predicted"] == peak
        assert table[str(rank), "at rest", "total", "predicted"] == trace.ranks[rank].rest_nbytes


def assert_step(page: ExplorerPanel) -> None:
    """Film and formula of the rank that is shown."""
    state = page.state
    seen, frames = state.predicted.ranks[state.rank], page.stage.frames
    assert label_of(page.stage.film["svg"]) == state.timeline().sentence
    film = assert_film(state.predicted, state.rank)
    assert frames == frames_of(film, is_each=len(state.ranks_apart) == 1) | {"of": page.stage.bars["of"]}
    assert_formula(state.predicted, state.rank)
    html = page.stage.formula["svg"]
    assert f'data-rank="{state.rank}"' in html
    for nbytes in (seen.rest_nbytes, seen.peak().total, seen.sent_nbytes):
        assert f"{nbytes:,} B" in html


def assert_film(trace: Trace, rank: int) -> Film:
    """From what is held at rest to the peak, of any rank; drawn as well."""
    seen, film = trace.ranks[rank], build_film(trace, rank)
    first, peak = film.frames[0], film.frames[film.peak]
    assert first.nbytes == seen.rest_nbytes == sum(first.held)
    assert peak.most == seen.peak().total == max(frame.most for frame in film.frames)
    for frame in film.frames:
        assert frame.nbytes == sum(frame.held) <= frame.most
    timeline = build_timeline(trace, rank=rank)
    moments = [frame.moment for frame in film.frames]
    assert timeline.peak.nbytes == seen.peak().total
    assert label_of(placed_timeline(timeline, moments)["svg"]) == timeline.sentence
    return film


def assert_wire(page: ExplorerPanel) -> None:
    """What the first rank sends, mark by mark, in bytes; in elements it is drawn as well."""
    state = page.state
    root = ElementTree.fromstring(page.stage.wire["svg"])
    assert root.get("aria-label") == state.wire().sentence
    marks = [path for path in root.iter(f"{SVG}path") if path.get("data-op")]
    first = [int(str(mark.get("data-nbytes"))) for mark in marks if str(mark.get("data-ranks")).startswith("0")]
    assert sum(first) == state.predicted.ranks[0].sent_nbytes
    elements = build_wire_scene(state.predicted, in_elements=True)
    assert_sent(elements, state.predicted)
    assert label_of(placed_wire(elements)["svg"]) == elements.sentence


def assert_advice(page: ExplorerPanel) -> None:
    budget = int(GPU) - DEFAULT_RESERVE_NBYTES
    fits = highest(page.state.predicted).peak().total <= budget
    assert f'data-fits="{str(fits).lower()}"' in page.advice.html
    assert unescape(page.advice.html).count(verdict_words(page.state.advice(), page.state.gpu)) == 1


def assert_map_of_what_fits(page: ExplorerPanel) -> None:
    """The cell of this state has its peak; or a sentence is in the map's place."""
    state, html = page.state, page.fit.picture.value
    if state.impl is Implementation.OWN and state.model is not BARE:
        peak = state.predicted.ranks[0].peak().total
        assert f"{state.ranks:,} ranks, batch {state.batch}: peak {peak:,} B" in html
        assert label_of(html) == state.heatmap().sentence
    else:
        said = re.fullmatch(r'<p class="zeroviz-section-error">([^<]+)</p>', html)
        assert said and is_sentence(unescape(said[1]))


def assert_comparison(page: ExplorerPanel) -> None:
    """With the state before, which is pinned."""
    state, html = page.state, page.pinned.picture.value
    (pin,) = state.pins
    if pin.predicted.spec == state.spec:
        assert "it is this one" in html
        return
    for trace in (pin.predicted, state.predicted):
        top = highest(trace)
        for nbytes in (top.rest_nbytes, top.peak().total, top.sent_nbytes):
            assert f">{nbytes:,} B<br>" in html
    assert label_of(html.partition("<div")[0])


def assert_ledger(page: ExplorerPanel) -> None:
    """The files: their rows add up to what the rank holds and sends."""
    files, trace = page.take.files, page.state.predicted
    sums: dict[str, int] = defaultdict(int)
    for row in csv.DictReader(StringIO(files["ledger as CSV"]().content.decode())):
        if re.match(r"0\b", row["ranks"]):
            sums[row["moment"]] += int(row["nbytes"])
    first = trace.ranks[0]
    assert sums[export_ledger.REST] == first.rest_nbytes and sums[export_ledger.PEAK] == first.peak().total
    assert sums[export_ledger.WIRE] == first.sent_nbytes
    page_of_it = files["ledger as Markdown"]().content.decode()
    assert f"**{first.rest_nbytes:,}**" in page_of_it and f"**{first.peak().total:,}**" in page_of_it


def assert_question(page: ExplorerPanel, asked: Asked, turn: int) -> None:
    """Each figure is asked for and a choice is pressed; or there is nothing to guess, and that is said."""
    state, guessing = page.state, page.guessing
    guessing.asked.value = asked
    seen = state.predicted.ranks[state.rank]
    nbytes = {Asked.REST: seen.rest_nbytes, Asked.PEAK: seen.peak().total, Asked.SENT: seen.sent_nbytes}[asked]
    if not nbytes:
        said = re.fullmatch(r'<p class="zeroviz-section-error">([^<]+)</p>', guessing.words.value)
        assert said and is_sentence(unescape(said[1])) and not guessing.hides
        return
    question = build_question(state.predicted, asked, state.rank)
    assert question.model.nbytes == question.right.nbytes == nbytes and guessing.hides
    assert escape(question.words) in guessing.words.value
    number = turn % len(question.choices)
    guessing.choices[number].click()
    assert not guessing.hides
    found = answer(question, question.choices[number].nbytes)
    assert found.is_right == (question.choices[number] is question.right)
    assert label_of(guessing.result.value) == found.sentence


def is_sentence(text: str) -> bool:
    return text.endswith(".") and "\n" not in text
