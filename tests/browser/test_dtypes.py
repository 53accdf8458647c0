"""The dtype of each copy, chosen on the page: the figures are those that `zeroviz predict` gives for the same state."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.browser.expect import wait_until
from tests.browser.lab import ExplorerPage

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def explorer(app: ExplorerPage) -> ExplorerPage:
    return app


def predicted(*options: str) -> dict[tuple[int, str, str], int]:
    """At rest and at the peak as the command line has it, in a process of its own; a total for each."""
    command = [sys.executable, "-m", "zeroviz.cli", "predict", "--json", "--model", "tiny", "--ranks", "4", *options]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    cells: dict[tuple[int, str, str], int] = {}
    for rank in report["ranks"]:
        for moment, key in (("at rest", "at_rest"), ("peak", "peak")):
            for category, nbytes in {**rank[key]["by_category"], "total": rank[key]["total"]}.items():
                cells[rank["rank"], moment, category] = nbytes
    return cells


def choose(explorer: ExplorerPage, copy: str, words: str) -> None:
    explorer.control(f"dtype-{copy}").locator("select").select_option(label=words)


def assert_shows(explorer: ExplorerPage, cells: dict[tuple[int, str, str], int], words: str) -> None:
    """Wait until every figure of the command line is on the page, and `words` is what a parameter costs."""

    def shown() -> bool:
        figures = explorer.figures()
        cost = explorer.control("dtypes-sum").inner_text()
        return {key: figures.get(key) for key in cells} == cells and cost == words

    wait_until(explorer, shown)


def test_the_dtype_of_each_copy_is_chosen_by_itself(explorer: ExplorerPage) -> None:
    button = explorer.control("dtypes-button")
    choices = explorer.control("dtypes-row")
    assert not choices.is_visible() and button.get_attribute("aria-expanded") == "false"
    button.focus()
    explorer.page.keyboard.press("Enter")
    wait_until(explorer, choices.is_visible)
    wait_until(explorer, lambda: button.get_attribute("aria-expanded") == "true")
    assert_shows(explorer, predicted("--precision", "fp32"), "4 + 4 + 0 + 8 = 16 bytes a parameter")

    choose(explorer, "parameters", "bf16")
    cells = predicted("--precision", "bf16", "--grad-dtype", "fp32")
    assert_shows(explorer, cells, "2 + 4 + 0 + 4 = 10 bytes a parameter")
    wait_until(explorer, lambda: "moments are now bf16: they follow what is updated" in explorer.notice())

    choose(explorer, "gradients", "bf16")
    assert_shows(explorer, predicted("--precision", "bf16"), "2 + 2 + 0 + 4 = 8 bytes a parameter")
    choose(explorer, "gradients", "fp32")
    assert_shows(explorer, cells, "2 + 4 + 0 + 4 = 10 bytes a parameter")

    explorer.page.get_by_label("master", exact=True).select_option(label="fp32")
    cells = predicted("--precision", "bf16-fp32grad")
    assert_shows(explorer, cells, "2 + 4 + 4 + 8 = 18 bytes a parameter")
    pressed = explorer.control("precision").locator(".mod-active")
    wait_until(explorer, lambda: pressed.inner_text() == "bf16-fp32grad")


def test_what_a_code_has_not_got_is_said_and_the_choice_goes_back(explorer: ExplorerPage) -> None:
    explorer.control("reset").click()
    code = explorer.control("impl").locator("select")
    code.select_option(label="fsdp2: torch's fully_shard (FSDP2)")
    explorer.press("precision", "fsdp-mixed")
    cells = predicted("--impl", "fsdp2", "--precision", "fsdp-mixed")
    assert_shows(explorer, cells, "4 + 4 + 0 + 8 = 16 bytes a parameter")
    asides = explorer.control("dtypes-asides")
    wait_until(explorer, lambda: "fp32 at rest, gathered and computed with in bf16" in asides.inner_text())
    choose(explorer, "master", "fp32")
    wait_until(explorer, lambda: "master is fp32 with code fsdp2" in explorer.error())
    master = explorer.control("dtype-master").locator("select")
    wait_until(explorer, lambda: master.input_value() == "none")
    assert_shows(explorer, cells, "4 + 4 + 0 + 8 = 16 bytes a parameter")
