"""Make the pictures of the explorer in docs/: five states of it, as headless Chromium shows them in JupyterLab.

    explorer.png            after a real run of four ranks: predicted and measured beside each other
    explorer-dark.png       JupyterLab's dark theme: the step as a film, at its peak, and what crosses the wire
    explorer-presenter.png  one picture over the whole window, for a lecture
    explorer-chinese.png    labels in Chinese, which takes a font that has them
    explorer-hybrid.png     shard groups: who holds what, and the wire in group and across

Usage: python docs/screenshot.py [name ...], such as `explorer-dark`; all of them by default.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser.lab import ExplorerPage, Lab, launch  # noqa: E402

RUN_S = 180.0
SETTLE_MS = 1200


def light(explorer: ExplorerPage) -> None:
    """Four ranks under ZeRO-3, bf16-mixed, measured."""
    explorer.press("precision", "bf16-mixed")
    explorer.press("zoom", "to the longest bar")
    explorer.control("run").click()
    explorer.wait_run("done", "failed", timeout_s=RUN_S)
    if explorer.run_state() == "failed":
        raise SystemExit(f"The run failed: {explorer.error()}")
    explorer.root.locator("svg [data-origin=live]").first.wait_for()
    show(explorer, ".zeroviz-desk")


def dark(explorer: ExplorerPage) -> None:
    """The film at its peak."""
    explorer.root.get_by_role("button", name="to the op that holds the peak").click()
    show(explorer, ".zeroviz-timeline-section")


def presenter(explorer: ExplorerPage) -> None:
    """The film over the whole window, at its peak."""
    explorer.control("present").click()
    for key in ("3", "p"):
        explorer.page.keyboard.press(key)
    explorer.page.wait_for_timeout(SETTLE_MS)


def chinese(explorer: ExplorerPage) -> None:
    """Controls and bars."""
    explorer.press("language", "中文")
    show(explorer, ".zeroviz-desk")


def hybrid(explorer: ExplorerPage) -> None:
    """Eight ranks in two shard groups."""
    explorer.slide("ranks", "ArrowRight", 4)
    explorer.press("strategy", "HYBRID_SHARD")
    show(explorer, ".zeroviz-map-section")


def show(explorer: ExplorerPage, part: str) -> None:
    """Bring a part of the page to the window's upper edge, and let it settle."""
    explorer.page.wait_for_timeout(SETTLE_MS)
    explorer.root.locator(part).evaluate("part => part.scrollIntoView({ block: 'start' })")
    explorer.root.locator(".zeroviz-desk").evaluate("desk => desk.scrollTo(0, 0)")
    explorer.page.wait_for_timeout(SETTLE_MS)


STATES: dict[str, Callable[[ExplorerPage], None]] = {
    "explorer": light,
    "explorer-dark": dark,
    "explorer-presenter": presenter,
    "explorer-chinese": chinese,
    "explorer-hybrid": hybrid,
}


def main() -> None:
    wanted = sys.argv[1:] or list(STATES)
    if unknown := set(wanted) - set(STATES):
        sys.exit(f"{', '.join(sorted(unknown))} was asked for; there are {', '.join(STATES)}.")
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for name in wanted:
            with tempfile.TemporaryDirectory() as home, Lab(Path(home), is_dark=name == "explorer-dark") as lab:
                page = opened(browser, lab, name)
                STATES[name](ExplorerPage(page))
                page.screenshot(path=ROOT / "docs" / f"{name}.png")
                page.close()
        browser.close()


def opened(browser: Browser, lab: Lab, name: str) -> Page:
    """The explorer without Lab's side bar. A projector's window for the presenter, else a tall one."""
    size = {"width": 1920, "height": 1080} if name == "explorer-presenter" else {"width": 1400, "height": 1600}
    page = browser.new_page(viewport=size, device_scale_factor=1.5)
    ExplorerPage.open(page, lab.url(name))
    page.keyboard.press("Control+b")
    page.wait_for_timeout(SETTLE_MS)
    return page


if __name__ == "__main__":
    main()
