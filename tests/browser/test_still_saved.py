"""The still copy in a real notebook: out of sight beside the live explorer, of the last state once it is at rest, in
its own cell, and there where no kernel is: in the saved file, as HTML, and in JupyterLab before anything is run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from base64 import b64decode
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.expect import assert_shows, wait_until
from tests.browser.lab import NOTEBOOK, ExplorerPage, Lab
from zeroviz.command import command_line
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy
from zeroviz.wording import title

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
OPENING = RunSpec(model=PRESETS["tiny"], ranks=4)
LAST = replace(OPENING, strategy=Strategy.ZERO1)
COPY = ".zeroviz-still-copy"
FILE_S, CONVERT_S = 30.0, 120.0
BUSY = """import asyncio, pathlib
while not pathlib.Path("go").exists(): await asyncio.sleep(0.05)
print("over")"""


def shows(page: Page, spec: RunSpec) -> bool:
    """Whether the one copy in the page is of `spec`; it need not be in sight."""
    return page.locator(f"{COPY} code").all_text_contents() == [command_line("predict", spec)]


def heights(page: Page) -> list[float]:
    """Of the copies, and of the outputs that hold them."""
    found: list[list[float]] = page.locator(COPY).evaluate_all(
        "copies => copies.map(copy => [copy, copy.closest('.jp-OutputArea-child')].map(e => e.offsetHeight))"
    )
    return [height for pair in found for height in pair]


def assert_in_sight(page: Page, spec: RunSpec) -> None:
    """The copy is of `spec`, and each of its pictures was painted."""
    page.locator(f"{COPY} img").first.wait_for(timeout=60_000)
    assert shows(page, spec) and page.locator(COPY).is_visible()
    page.wait_for_function(
        f"[...document.querySelectorAll('{COPY} img')].every(image => image.complete)", timeout=30_000
    )
    painted: list[bool] = page.locator(f"{COPY} img").evaluate_all(
        "images => images.map(image => image.naturalWidth > 0 && image.offsetHeight > 200 && image.offsetWidth > 600)"
    )
    assert painted == [True] * 4


def saved(explorer: ExplorerPage, lab: Lab) -> dict[str, Any]:
    """The notebook as Lab writes it, once it holds the last state."""
    path = lab.root / NOTEBOOK
    explorer.page.locator('[data-command="docmanager:save"]:visible').first.click()
    deadline = time.monotonic() + FILE_S
    while command_line("predict", LAST) not in path.read_text():
        assert time.monotonic() < deadline, "Lab did not write the copy into the file"
        explorer.page.wait_for_timeout(100)
    written: dict[str, Any] = json.loads(path.read_text())
    return written


def test_the_copy_is_out_of_sight_and_follows_at_rest(explorer: ExplorerPage) -> None:
    page = explorer.page
    wait_until(explorer, lambda: shows(page, OPENING))
    assert heights(page) == [0, 0]
    page.evaluate("document.querySelector('.zeroviz-stage').isTheSame = true")
    highest = page.evaluate_handle(
        """copy => {
          const highest = { height: 0 };
          const note = () => {
            highest.height = Math.max(highest.height, document.querySelector(copy)?.offsetHeight ?? 0);
          };
          new MutationObserver(note).observe(document.body, { childList: true, subtree: true });
          return highest;
        }""",
        COPY,
    )
    explorer.slide("ranks", "ArrowRight", times=4)
    explorer.press("strategy", "ZeRO-2")
    wait_until(explorer, lambda: shows(page, replace(OPENING, ranks=8, strategy=Strategy.ZERO2)))
    assert highest.evaluate("highest => highest.height") == 0
    assert page.evaluate("document.querySelector('.zeroviz-stage').isTheSame")
    assert_shows(explorer, predict(replace(OPENING, ranks=8, strategy=Strategy.ZERO2)))


def test_it_is_in_sight_where_the_pictures_could_not_be_made(explorer: ExplorerPage) -> None:
    """As where Lab has no anywidget: there are controls then, and nothing that draws."""
    page = explorer.page
    page.evaluate("window.stage = document.querySelector('.zeroviz-stage'); stage.classList.remove('zeroviz-stage')")
    page.locator(COPY).wait_for(timeout=10_000)
    page.evaluate("stage.classList.add('zeroviz-stage')")
    assert heights(page) == [0, 0]


def test_a_cell_that_runs_meanwhile_gets_nothing_of_it(explorer: ExplorerPage, lab: Lab) -> None:
    page = explorer.page
    other = page.locator(".jp-CodeCell").nth(1)
    other.locator(".cm-content").click()
    page.keyboard.insert_text(BUSY)
    page.keyboard.press("Control+Enter")
    prompt = other.locator(".jp-InputPrompt")
    wait_until(explorer, lambda: "*" in (prompt.text_content() or ""))
    explorer.control("reset").click()
    wait_until(explorer, lambda: shows(page, OPENING))
    assert "*" in (prompt.text_content() or "")
    (lab.root / "notebooks" / "go").touch()
    wait_until(explorer, lambda: "over" in (other.locator(".jp-OutputArea").text_content() or ""))
    assert [words.strip() for words in other.locator(".jp-OutputArea-output").all_text_contents()] == ["over"]
    assert page.locator(COPY).count() == 1 and heights(page) == [0, 0]


def test_a_saved_notebook_has_the_last_state(
    explorer: ExplorerPage, lab: Lab, browser: Browser, tmp_path: Path
) -> None:
    explorer.press("strategy", "ZeRO-1")
    wait_until(explorer, lambda: shows(explorer.page, LAST))
    notebook = saved(explorer, lab)
    outputs = [output.get("data", {}) for cell in notebook["cells"] for output in cell.get("outputs", ())]
    (html,) = ("".join(data["text/html"]) for data in outputs if "text/html" in data)
    found = re.findall(r'<img alt="([^"]*)"[^>]* src="data:image/svg\+xml;base64,([^"]*)">', html)
    assert len(found) == 4 and all(unescape(alt).startswith(title(LAST)) for alt, _ in found)
    peak = predict(LAST).ranks[0].peak().total
    assert f"peak {peak / 1e6:.3f} MB in " in b64decode(found[0][1]).decode()
    file, converted = tmp_path / "kept.ipynb", tmp_path / "kept.html"
    file.write_text(json.dumps(notebook))
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "html", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=CONVERT_S)
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(converted.as_uri())
    assert_in_sight(page, LAST)
    page.screenshot(path=tmp_path / "converted.png", full_page=True)
    page.close()


def test_it_is_in_sight_where_nothing_was_run(explorer: ExplorerPage, lab: Lab, browser: Browser) -> None:
    """Also where the notebook is not trusted: as one that somebody sent."""
    notebook = saved(explorer, lab)
    notebook["cells"][0]["source"] = ["from elsewhere"]  # so that Lab does not know it as its own
    (lab.root / "notebooks" / "sent.ipynb").write_text(json.dumps(notebook))
    for name in (NOTEBOOK, "notebooks/sent.ipynb"):
        if name == NOTEBOOK:
            lab.end_kernels()
        page = browser.new_page(viewport={"width": 1400, "height": 1300})
        page.goto(lab.url(Path(name).stem, name))
        assert_in_sight(page, LAST)
        assert page.locator(".zeroviz-explorer").count() == 0
        page.close()
