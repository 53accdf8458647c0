"""Labels in Chinese: every label of the page has one, and no figure is changed."""

from __future__ import annotations

import re

import pytest

from zeroviz.dtypes_apart import Copy
from zeroviz.labels import _CHINESE, Language, say
from zeroviz.models import PRESETS
from zeroviz.panel.controls import _CHOICES, _DESCRIPTIONS, OVERLAP
from zeroviz.panel.dtypes import LABEL, PER
from zeroviz.panel.panel import ExplorerPanel
from zeroviz.panel.stage import HEADINGS, LABELS
from zeroviz.paper import text_width
from zeroviz.spec import Implementation, Optimizer, Precision, RunSpec, Strategy, UnitKind
from zeroviz.state import Explorer
from zeroviz.style import PAINT, label_of

CHINESE = Language.CHINESE
SAME = {"", "GPU", "batch", "fp32", "bf16", "0.1", "1", "10"}
"""What is called so in Chinese texts too."""


@pytest.mark.parametrize(
    "label",
    sorted({
        *(label for label, _ in _DESCRIPTIONS.values()), *HEADINGS.values(), *LABELS,
        LABEL, PER, *(copy.value for copy in Copy),
        OVERLAP, *(label for choices in _CHOICES.values() for label, _ in choices),
        *(label_of(category, RunSpec(model=PRESETS["tiny"], strategy=strategy, optimizer=optimizer))
          for category in PAINT for strategy in (Strategy.DDP, Strategy.ZERO3)
          for optimizer in (Optimizer.ADAMW, Optimizer.SGD_MOMENTUM)),
        "at rest", "at peak", "predicted", "measured", "recorded", "forward", "backward", "optimizer", "not held",
    } - SAME),
)  # fmt: skip
def test_every_label_has_a_chinese_one(label: str) -> None:
    assert say(label, Language.ENGLISH) == label
    assert re.search("[\u4e00-\u9fff]", say(label, CHINESE)), label


@pytest.mark.parametrize("label", sorted(_CHINESE.keys() - {label for label, _ in _DESCRIPTIONS.values()}))
def test_a_chinese_label_has_room_where_the_english_one_has(label: str) -> None:
    """Pictures are laid out for the English ones; a heading or a control has room."""
    if label not in (*HEADINGS.values(), *LABELS, "file"):
        assert text_width(say(label, CHINESE)) <= text_width(label) + 6


def test_amounts_and_ranks_stay_and_sentences_do() -> None:
    assert say("Adam m and v, own shard 266.2 kB", CHINESE) == "Adam 矩 m、v，本地分片 266.2 kB"
    assert say("activations up to 1,390 MB", CHINESE) == "激活 至多 1,390 MB"
    assert say("ranks 7 to 62", CHINESE) == "rank 7 至 62"
    assert say("rank 5, group 1, shard 1", CHINESE) == "rank 5，第 1 组，shard 1"
    for same in ("rank 5", "ZeRO-3 on 4 ranks, fp32", "12.38 GB", "block 3", "8,030,261,248 B"):
        assert say(same, CHINESE) == same
    assert text_width("激活") == 2 * text_width("激") == 28.0


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
