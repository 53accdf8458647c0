"""`zeroviz explore --app`: the explorer as a page of its own, toggled, stepped through and run."""

from __future__ import annotations

import pytest

from tests.browser.expect import assert_shows, wait_until
from tests.browser.lab import ExplorerPage
from zeroviz.film import build_film
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
RUN_S = 90.0


def test_the_page_is_the_explorer_and_nothing_else(app: ExplorerPage) -> None:
    assert app.page.locator(".jp-CodeCell .cm-content, .jp-InputArea .cm-editor").count() == 0
    assert app.title().startswith("ZeRO-3 on 4 ranks, fp32")


def test_a_toggle_moves_bars_film_and_table(app: ExplorerPage) -> None:
    app.press("strategy", "ZeRO-2")
    app.slide("ranks", "Home")
    app.slide("ranks", "ArrowRight")
    predicted = predict(RunSpec(model=PRESETS["tiny"], strategy=Strategy.ZERO2, ranks=2))
    assert_shows(app, predicted)
    film = build_film(predicted)
    app.root.locator(".zeroviz-film-card").focus()
    app.page.keyboard.press("p")
    wait_until(app, lambda: app.root.locator(".zeroviz-now").inner_text().endswith(film.frames[film.peak].words))


def test_a_run_lands_on_the_same_picture(app: ExplorerPage) -> None:
    app.slide("ranks", "Home")
    app.slide("ranks", "ArrowRight")
    wait_until(app, lambda: len(app.bars()) == 2)
    app.control("run").click()
    app.wait_run("done", "failed", timeout_s=RUN_S)
    assert app.run_state() == "done", app.error()
    wait_until(app, lambda: len(app.bars("live")) == 2)
    assert app.bars("live") == app.bars()
    app.control("stop").click()
    app.wait_run("stopped", timeout_s=RUN_S)
