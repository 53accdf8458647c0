"""Chromium and JupyterLab for the browser tests; without Chromium they are skipped, or fail where that is asked."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.lab import CHROMIUM, App, ExplorerPage, Lab, launch, opened


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
    with opened(browser, lab, tmp_path_factory.mktemp("screenshots")) as page:
        yield page


@pytest.fixture(scope="module")
def app(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExplorerPage]:
    """The same as a page of its own, through Voila."""
    screenshots = tmp_path_factory.mktemp("screenshots")
    with App(tmp_path_factory.mktemp("app")) as server, opened(browser, server, screenshots) as page:
        yield page
