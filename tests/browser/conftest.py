"""Chromium and JupyterLab for the browser tests; without Chromium they are skipped, or fail where that is asked."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.lab import CHROMIUM, ExplorerPage, Lab, launch


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the whole session: while Playwright is on, its loop stands in the way of asyncio.run."""
    if not CHROMIUM.exists():
        reason = f"{CHROMIUM} is not there; install Chromium (apt-get install chromium) or set ZEROVIZ_CHROMIUM."
        if os.environ.get("ZEROVIZ_REQUIRE_BROWSER") == "1":
            pytest.fail(f"ZEROVIZ_REQUIRE_BROWSER is 1, but {reason}")
        pytest.skip(reason)
    with sync_playwright() as playwright:
        opened = launch(playwright)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as started:
        yield started


@pytest.fixture(scope="module")
def explorer(browser: Browser, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExplorerPage]:
    """The explorer, open for all tests of a module; each sets the toggles it needs. Ends with a picture of the page."""
    page = browser.new_page(viewport={"width": 1400, "height": 1300})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield ExplorerPage.open(page, lab.url("tests"))
    page.screenshot(path=tmp_path_factory.mktemp("screenshots") / "last.png")
    page.close()
    assert not faults
