"""The README's first command, typed as it stands there, up to measured numbers on the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.browser.expect import assert_shows, expected, wait_until
from tests.browser.lab import ExplorerPage, Lab
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

COLD_RUN_S = 120.0


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("made"), by_make=True) as lab:
        yield lab


def test_from_make_explore_to_measured_numbers(browser: Browser, made: Lab) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1300})
    explorer = ExplorerPage.open(page, made.url("make"))
    explorer.press("strategy", "ZeRO-2")
    explorer.slide("ranks", "Home")
    explorer.slide("ranks", "ArrowRight", 2)
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=3, strategy=Strategy.ZERO2))
    assert_shows(explorer, predicted)

    explorer.control("run").click()
    explorer.wait_run("done", "failed", timeout_s=COLD_RUN_S)
    assert explorer.run_state() == "done", explorer.error()
    wait_until(explorer, lambda: len(explorer.bars("live")) == 3)
    cells = expected(predicted)

    def measured_as_predicted() -> bool:
        figures = explorer.figures("measured")  # and the machine's own peak, which the arithmetic has in another table
        return {key: figures.get(key) for key in cells} == cells

    wait_until(explorer, measured_as_predicted)
    page.close()
