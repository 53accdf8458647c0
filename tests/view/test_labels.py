"""Labels in Chinese: every label of the page has one, and no figure is changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from html import unescape
from typing import Any

import ipywidgets as widgets
import pytest

from zeroviz import draw, draw_guess, draw_heatmap
from zeroviz.dtypes_apart import Copy
from zeroviz.errors import SpecError
from zeroviz.examples import EXAMPLES
from zeroviz.guess import Asked, answer, build_question
from zeroviz.guess_figure import state_words
from zeroviz.heatmap import HeatMap, Upward
from zeroviz.labels import Language, say
from zeroviz.labels_chinese import IN_PICTURES
from zeroviz.models import PRESETS
from zeroviz.panel.controls import _CHOICES, DESCRIPTIONS, OVERLAP
from zeroviz.panel.dtypes import LABEL, PER
from zeroviz.panel.panel import ExplorerPanel
from zeroviz.panel.pictures import PICTURES
from zeroviz.panel.stage import HEADINGS, LABELS, Stage
from zeroviz.panel.take import drawings
from zeroviz.paper import Paper, Piece, Words, text_width
from zeroviz.scene import Scene
from zeroviz.shard_map import build_shard_map
from zeroviz.spec import Implementation, Offload, Optimizer, Precision, RunSpec, Strategy, UnitKind
from zeroviz.state import Explorer
from zeroviz.style import PAINT, label_of
from zeroviz.trace import Origin

CHINESE = Language.CHINESE
SAME = {"", "GPU", "batch", "fp32", "bf16", "0.1", "1", "10"}
"""What is called so in Chinese texts too."""
NAMES = {kind.value for kind in Optimizer}


@pytest.mark.parametrize(
    "label",
    sorted({
        *(label for label, _ in DESCRIPTIONS.values()), *HEADINGS.values(), *LABELS,
        LABEL, PER, *(copy.value for copy in Copy),
        OVERLAP, *(label for choices in _CHOICES.values() for label, _ in choices if label not in NAMES),
        *(label_of(category, RunSpec(model=PRESETS["tiny"], strategy=strategy, optimizer=optimizer))
          for category in PAINT for strategy in (Strategy.DDP, Strategy.ZERO3)
          for optimizer in (Optimizer.ADAMW, Optimizer.SGD_MOMENTUM)),
        "at rest", "at peak", "predicted", "measured", "recorded", "forward", "backward", "optimizer", "not held",
    } - SAME),
)  # fmt: skip
def test_every_label_has_a_chinese_one(label: str) -> None:
    assert say(label, Language.ENGLISH) == label
    assert re.search("[\u4e00-\u9fff]", say(label, CHINESE)), label


@pytest.mark.parametrize("label", sorted(IN_PICTURES))
def test_a_chinese_label_has_room_where_the_english_one_has(label: str) -> None:
    """Pictures are laid out for the English ones."""
    assert text_width(say(label, CHINESE)) <= text_width(label) + 6


def test_amounts_and_ranks_stay_and_sentences_do() -> None:
    assert say("Adam m and v, own shard 266.2 kB", CHINESE) == "Adam 矩 m、v，本地分片 266.2 kB"
    assert say("activations up to 1,390 MB", CHINESE) == "激活 至多 1,390 MB"
    assert say("ranks 7 to 62", CHINESE) == "rank 7 至 62"
    assert say("rank 5, group 1, shard 1", CHINESE) == "rank 5，第 1 组，shard 1"
    for same in ("rank 5", "ZeRO-3 on 4 ranks, fp32", "12.38 GB", "block 3", "8,030,261,248 B"):
        assert say(same, CHINESE) == same
    assert text_width("激活") == 2 * text_width("激") == 28.0


def test_of_a_sentence_no_line_is_taken_for_a_label() -> None:
    """However it is broken; a label that is wrapped by the way is one as long as it stays in one line."""
    paper = Paper(200.0)
    paper.height = 100.0
    for line in paper.wrapped("each rank holds a block", text_width("each rank")):
        paper.text(0, 10, line)
    for line in paper.wrapped("each rank", text_width("each rank")):
        paper.text(0, 90, line)
    said = re.findall(r">([^<>]+)</text>", paper.svg("words", "", say=lambda label: say(label, CHINESE)))
    assert said == ["each rank", "holds a", "block", "每个 rank"]


KEPT = re.compile(
    r"""
    [-+±\d.,()/x÷∈⌈⌉·Σ=−|:▾▸\ \u202f]*                                   # figures
    | \(?[-+]?[\d.,]+\ ?([kMGTPE]?i?B|k|P)\)?(,?\ \(?[\d.,]+\ [kKMGTPE]?i?B\)?)? | [-+]?[\d,]+\ elements?
    | P | ranks? | rank\ [\d,]+ | GPU | batch | DDP | ZeRO-[123] | SHARD_GRAD_OP | HYBRID_SHARD | Megatron\ optim
    | \S+:\ .+                                                            # whose code
    | fp32 | bf16 | int8 | (bf16|fsdp)-\w+ | adamw[\w-]* | sgd[\w-]*
    | ((all|reduce)[-_](gather|scatter|reduce)|broadcast|scatter|gather|Adam)(\ \w+)?(\ [\d.,]+\ [kMGTPE]?B)?
    | (root|embed|head|blocks?)(\ [\d-]+)?                                  # units
    | [A-Za-z] | seq                                                          # symbols
    | English | .+\.                                                   # sentences
    | \S+-\d+gb
    """,
    re.VERBOSE,
)
"""What a Chinese page says as it is, besides sentences: figures, the field's names, names of units, symbols."""
VARIETY: dict[str, dict[str, Any]] = {
    "opening": {},
    **EXAMPLES,
    "offload": {"offload": Offload.PARAMS, "precision": Precision.BF16_MIXED},
    "fsdp2": {"impl": Implementation.FSDP2, "precision": Precision.FSDP_MIXED},
    "deepspeed": {"impl": Implementation.DEEPSPEED, "precision": Precision.BF16_MIXED},
    "megatron": {"impl": Implementation.MEGATRON, "strategy": Strategy.MEGATRON_OPTIM, "ranks": 3},
    "a library's": {"impl": Implementation.ZERO_REDUNDANCY, "strategy": Strategy.ZERO1, "ranks": 3},
    "one rank": {"ranks": 1, "strategy": Strategy.DDP},
    "no moments": {"optimizer": Optimizer.SGD, "strategy": Strategy.ZERO1, "ranks": 40},
    "in turns": {"accumulation": 2, "region": 2, "checkpointing": True, "strategy": Strategy.ZERO2, "batch": 4},
}


def page_of(toggles: dict[str, Any]) -> ExplorerPanel:
    """A page with everything open, in Chinese: two states pinned, a guess made, and a run that is as predicted."""
    page = ExplorerPanel(Explorer())
    state = page.state
    state.start_from({"precision": Precision.BF16_MIXED})
    state.pin()
    assert state.start_from(toggles), state.error
    page.stage.is_open = dict.fromkeys(page.stage.is_open, True)
    for section in (page.pinned, page.take, page.fit):
        section.button.value = True
    page.advice.is_open = page.controls.dtypes.button.value = True
    state.language = CHINESE
    state.guessing, state.guess_nbytes = True, state.predicted.ranks[0].peak().total * 3
    return page


def texts_of(widget: Any) -> Iterator[str]:
    """Every text that a widget and what is in it show: descriptions, choices, HTML, SVG; but for sentences in HTML."""
    if widget.layout.display == "none":
        return
    yield from (str(getattr(widget, name, "")) for name in ("description", "heading", "use"))
    if not isinstance(widget, widgets.Combobox | widgets.SelectionSlider):
        yield from (str(label) for label, *_ in map(tuple, getattr(widget, "options", ())))
    if isinstance(widget, Stage):
        yield from (*widget.headings.values(), *widget.labels.values(), *widget.frames.get("categories", ()))
    markup = [getattr(widget, "html", ""), widget.value if isinstance(widget, widgets.HTML) else ""]
    markup += [getattr(widget, name).get("svg", "") for name in PICTURES] if isinstance(widget, Stage) else []
    for html in markup:
        shown = re.sub(r"<(style|pre|title|p|li|dd|sub)\b.*?</\1>", "", html, flags=re.DOTALL)
        yield from (unescape(text).strip() for text in re.findall(r">([^<>]+)<", shown))
    for child in getattr(widget, "children", ()):
        yield from texts_of(child)


def sentences_of(page: ExplorerPanel) -> set[str]:
    """The lines of the pictures that are sentences, or pieces of one."""
    state = page.state
    lines: list[str] = []
    scenes: list[Any] = [state.scene(), build_shard_map(state.spec), state.timeline(), state.wire()]
    if (comparison := state.comparison()) is not None:
        scenes.append(comparison.scene)
        lines += [line.name for line in comparison.lines]
    with suppress(SpecError):
        scenes.append(state.heatmap())
    for scene in scenes:
        lines += [scene.title, getattr(scene, "recipe", ""), *scene.subtitle, *scene.notes]
    guess = answer(build_question(state.predicted, state.asked, state.rank), state.guess_nbytes or 0, state.measured)
    lines += [guess.words.removesuffix("."), guess.why, guess.measured_words, state_words(state.spec)]
    papers = [draw_guess.paper_of(guess)]
    papers += [drawing.paper_of(drawing.scene_of()) for drawing in drawings(state).values()]
    papers += [draw.paper_of(scene) for scene in scenes if isinstance(scene, Scene)]
    papers += [draw_heatmap.paper_of(scene) for scene in scenes if isinstance(scene, HeatMap)]
    lines += [
        each.text
        for paper in papers
        for each in paper.shapes
        if isinstance(each, Words) and isinstance(each.text, Piece)
    ]
    lines = [line for line in lines if not re.fullmatch(r"[\d,]+ parameters", line)]  # a label, wherever it stands
    return {*lines, *EXAMPLES, draw.KEY, *(f"{line}." for line in lines)}


@pytest.mark.parametrize("name", VARIETY)
@pytest.mark.parametrize("run", [False, True])
def test_no_label_of_the_page_is_left_in_english(name: str, run: bool) -> None:
    page = page_of(VARIETY[name])
    if run and page.state.ranks <= 8:
        page.state.measured = replace(page.state.predicted, origin=Origin.LIVE)
    sentences = sentences_of(page)
    assert [line for line in sentences if not isinstance(line, Piece) and say(line, CHINESE) != line] == []
    left = [
        text
        for text in texts_of(page)
        if not re.search("[\u4e00-\u9fff]", text) and text not in sentences and not KEPT.fullmatch(text)
    ]
    assert sorted(set(left)) == []


def test_the_switch_chooses_nothing() -> None:
    """What is offered by another label is offered anew, and what was chosen is still chosen."""
    page = ExplorerPanel(Explorer())
    state = page.state
    state.choose(optimizer=Optimizer.SGD, precision=Precision.BF16_MIXED)
    state.pin()
    state.choose(optimizer=Optimizer.ADAMW)
    state.pin()
    page.take.what.value, state.upward, state.asked = "state as Python", Upward.SEQ, Asked.SENT
    page.pinned.which.value = 1
    state.guessing, state.guess_nbytes = True, 1000
    before = state.toggles, state.upward, state.asked, state.guess_nbytes
    for language in (CHINESE, Language.ENGLISH):
        state.language = language
        assert (state.toggles, state.upward, state.asked, state.guess_nbytes) == before
        assert (page.take.what.value, page.pinned.which.value) == ("state as Python", 1)
        assert (page.fit.upward.value, page.guessing.asked.value) == (Upward.SEQ, Asked.SENT)
    page.guessing.asked.value, page.fit.upward.value = Asked.REST, Upward.BATCH
    assert (state.asked, state.upward) == (Asked.REST, Upward.BATCH)


def test_the_switch_moves_labels_and_no_figure() -> None:
    page = ExplorerPanel(Explorer())
    page.state.choose(precision=Precision.BF16_MIXED, ranks=3)
    before = {name: getattr(page.stage, name)["svg"] for name in ("bars", "map", "film", "wire")}
    page.controls.widget["language"].value = CHINESE
    for name, svg in before.items():
        now = getattr(page.stage, name)["svg"]
        assert re.findall(r'data-(?:nbytes|most)="\d+"', now) == re.findall(r'data-(?:nbytes|most)="\d+"', svg) != []
        assert re.search("[\u4e00-\u9fff]", now), name
    assert page.controls.widget["strategy"].description == "策略"
    assert (page.run_button.description, page.stage.headings["map"]) == ("在集群上运行", "谁持有什么")
    assert page.take.button.description == "▸ 带走" and page.advice.heading == "先减什么"
    assert "激活" in page.stage.frames["categories"]
    unit = page.controls.widget["unit"]
    assert [label for label, _ in unit.options] == ["整个模型", "块", "层"] and unit.value is page.state.unit
    assert page.controls.widget["async_reduce"].description == "归约与计算重叠"
    assert page.shortcuts.example.label == "选择一个问题" and page.fit.upward.description == "图"
    assert page.controls.words()["unit"] == "块"  # as the page says it: the Run button waits for these words
    page.state.choose(unit=UnitKind.LAYER, impl=Implementation.FSDP1)
    assert unit.label == "层" and page.controls.widget["backward_prefetch"].label.endswith("默认")
    page.state.choose(unit=UnitKind.BLOCK, impl=Implementation.OWN, precision=Precision.BF16_MIXED)
    page.controls.widget["language"].value = Language.ENGLISH
    assert {name: getattr(page.stage, name)["svg"] for name in before} == before
    assert page.run_button.description == "Run on cluster" and page.take.button.description == "▸ Take it away"
