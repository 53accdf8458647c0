"""Amounts that the page says by itself are the pictures' own."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser

import zeroviz.panel
from zeroviz.axis import amount

COUNTS = (0, 1, 10, 999, 1_088, 12_345, -931_812, 999_999, 99_999_999, 10**8, 14 * 10**9, 1_137 * 10**9)
UNITS = ("B", "kB", "MB", "GB", "TB")
_SAY = """async ({source, cases}) => {
  const url = URL.createObjectURL(new Blob([source], {type: "text/javascript"}));
  const {amount} = await import(url);
  return cases.map(([nbytes, unit]) => amount(nbytes, unit));
}"""


def test_the_page_says_amounts_as_the_pictures_do(browser: Browser) -> None:
    """stage.js says what is held at a moment without asking: its own `amount` is run as it stands, in every unit."""
    source = (Path(zeroviz.panel.__file__).parent / "stage.js").read_text()
    cases = [(nbytes, unit) for nbytes in COUNTS for unit in UNITS]
    page = browser.new_page()
    try:
        said = page.evaluate(_SAY, {"source": source, "cases": cases})
    finally:
        page.close()
    assert said == [amount(nbytes, unit) for nbytes, unit in cases]
