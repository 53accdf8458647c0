"""The choice of each copy's dtype on the page: it asks the Explorer and shows what that says, what else changed too."""

from __future__ import annotations

import json
import re
from html import unescape

import pytest

from tests.view.backends import FakeBackend
from zeroviz.dtypes_apart import Copy, dtypes_of
from zeroviz.labels import Language
from zeroviz.panel import ExplorerPanel
from zeroviz.panel.refusal import page_words
from zeroviz.predict import predict
from zeroviz.spec import DType, Implementation, Optimizer, Precision, RunSpec, Strategy
from zeroviz.state import Explorer


def panel() -> ExplorerPanel:
    return ExplorerPanel(Explorer(FakeBackend()))


def shown(page: ExplorerPanel) -> tuple[str, ...]:
    return tuple(control.value for control in page.controls.dtypes.choice.values())


def test_a_choice_moves_the_state_and_says_what_else_changed() -> None:
    page = panel()
    choice = page.controls.dtypes.choice
    choice[Copy.PARAM].value = "bf16"
    assert page.state.spec == RunSpec(model=page.state.model, ranks=4, precision=Precision.BF16, grad_dtype=DType.FP32)
    assert page.state.predicted == predict(page.state.spec)
    assert shown(page) == ("bf16", "fp32", "none", "bf16")
    assert page.controls.dtypes.sum.value == "2 + 4 + 0 + 4 = 10 bytes a parameter"
    assert "moments are now bf16: they follow what is updated, the parameters." in page.news.value
    assert page.controls.widget["precision"].value is Precision.BF16
    assert page.controls.widget["grad_dtype"].value is DType.FP32
    choice[Copy.MASTER].value = "fp32"
    assert page.state.precision is Precision.BF16_FP32GRAD and shown(page) == ("bf16", "fp32", "fp32", "fp32")
    page.state.undo()
    assert shown(page) == ("bf16", "fp32", "none", "bf16")


def test_the_state_moves_the_choices() -> None:
    page = panel()
    for precision in (Precision.BF16_MIXED, Precision.BF16, Precision.FP32):
        for optimizer in Optimizer:
            assert page.state.choose(precision=precision, optimizer=optimizer)
            dtypes = dtypes_of(page.state.spec).values()
            assert shown(page) == tuple(dtype.value if dtype else "none" for dtype in dtypes)
            assert f"= {page.state.spec.recipe.bytes_per_param} bytes" in page.controls.dtypes.sum.value
    page.state.choose(optimizer=Optimizer.SGD)
    assert page.controls.dtypes.choice[Copy.MOMENTS].options == tuple(
        (name, name) for name in ("none", "fp32", "bf16", "int8")
    )
    page.state.choose(optimizer=Optimizer.ADAMW_8BIT)
    assert page.controls.dtypes.choice[Copy.MOMENTS].options == tuple((name, name) for name in ("fp32", "bf16", "int8"))
    assert page.controls.dtypes.sum.value.endswith("bytes a parameter, and scales")


def test_a_refused_choice_goes_back_and_the_page_says_why() -> None:
    page = panel()
    page.state.choose(impl=Implementation.FSDP2, precision=Precision.FSDP_MIXED)
    before, picture = page.state.toggles, page.stage.bars["svg"]
    page.controls.dtypes.choice[Copy.MASTER].value = "fp32"
    assert page.controls.dtypes.choice[Copy.MASTER].value == "none"
    assert "master is fp32 with impl fsdp2 and strategy zero3, where there is none" in page.state.error
    assert page_words(page.state.error) in unescape(page.news.value) and page.state.notice == ""
    assert page.state.toggles == before and page.stage.bars["svg"] == picture
    assert "Parameters are fp32 at rest, gathered and computed with in bf16." in page.controls.dtypes.asides.value
    page.controls.dtypes.choice[Copy.GRAD].value = "bf16"
    assert page.state.error == "" and page.state.precision is Precision.BF16


@pytest.mark.parametrize("strategy", Strategy)
def test_a_dtype_that_is_there_already_is_no_change(strategy: Strategy) -> None:
    state = Explorer()
    state.choose(strategy=strategy)
    before, spec = state.toggles, state.spec
    for copy, dtype in dtypes_of(spec).items():
        assert state.choose_dtype(copy, dtype) and state.notice == ""
    assert state.toggles == before and state.spec == spec


def test_it_is_closed_at_first_and_named_for_keys_and_screen_readers() -> None:
    page = panel()
    row = page.controls.dtypes
    assert row.button.description == "▸ dtypes" and row.row.layout.display == "none" == row.asides.layout.display
    row.button.value = True
    assert row.button.description == "▾ dtypes" and row.row.layout.display is None
    for copy, control in row.choice.items():
        assert control.description == copy.value and control.tooltip
    place = page.controls.box.children.index(row)
    assert page.controls.box.children[place - 1] is page.controls.widget["precision"]
    page.state.language = Language.CHINESE
    assert row.button.description == "▾ 各精度" and row.choice[Copy.MASTER].description == "主参数"
    assert row.sum.value == "4 + 4 + 0 + 8 = 16 字节/参数"


def test_run_waits_for_these_choices_too() -> None:
    """The script that holds a press of Run compares these words with the visible ones."""
    page = panel()
    page.controls.dtypes.choice[Copy.GRAD].value = "bf16"
    match = re.search(r'data-controls="([^"]+)"', page.news.value)
    assert match
    said = json.loads(unescape(match[1]))
    assert [said[f"dtype-{copy.value}"] for copy in Copy] == ["fp32", "bf16", "none", "fp32"]
    for copy, control in page.controls.dtypes.choice.items():
        assert f"zeroviz-dtype-{copy.value}" in control._dom_classes
