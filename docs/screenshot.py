"""Make docs/explorer.png: the explorer in JupyterLab after a real run, as headless Chromium shows it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser.lab import ExplorerPage, Lab, launch  # noqa: E402

RUN_S = 180.0


def main() -> None:
    """Four ranks under ZeRO-3, bf16-mixed, measured; the page without Lab's side bars."""
    with tempfile.TemporaryDirectory() as home, Lab(Path(home)) as lab, sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page(viewport={"width": 1400, "height": 1600}, device_scale_factor=1.5)
        explorer = ExplorerPage.open(page, lab.url("screenshot"))
        page.keyboard.press("Control+b")  # Lab's own: hide the file browser
        explorer.press("precision", "bf16-mixed")
        explorer.press("zoom", "to the longest bar")
        explorer.control("run").click()
        explorer.wait_run("done", "failed", timeout_s=RUN_S)
        if explorer.run_state() == "failed":
            raise SystemExit(f"The run failed: {explorer.error()}")
        explorer.root.locator("svg [data-origin=live]").first.wait_for()
        explorer.root.evaluate("root => root.scrollIntoView({ block: 'start' })")
        explorer.root.locator(".zeroviz-desk").evaluate("desk => desk.scrollTo(0, 0)")
        page.wait_for_timeout(1000)
        page.screenshot(path=ROOT / "docs" / "explorer.png")
        browser.close()


if __name__ == "__main__":
    main()
