"""From a slider's key to the new pictures painted: the explorer in JupyterLab and in Voila, beside the floor.

Needs Chromium. Each page has the same slider of ranks, moved by one key at a time with a pause between:

    floor       the slider updates one bare label: two hops over the websocket, the kernel's part, one frame
    next step   the explorer of a 32-layer model about N = 64: one step of its slider, to the pictures in the window
    jump        the same over five steps at once, which the page has not been sent before: through the kernel
    in view     one step, to the last change within the window: what follows in the controls too
    all         the same, and the pictures out of sight, which it draws when the page rests, after 150 ms
    matplotlib  three of its pictures, each drawn by matplotlib and sent as a PNG
    cursor      a step of the film, which asks no kernel

Before that, in JupyterLab, how long the explorer takes from the key that runs its cell, in a kernel that has imported
nothing yet, to its bars on the page.

The pages take turns, so that what else the machine does falls on all of them. A move begins with the key event's own
time stamp and ends one task after the frame that follows the last change under the page's root.

Usage: python benchmarks/explorer_latency.py [lab] [voila]
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from playwright.sync_api import Locator, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser.lab import App, Lab, launch, run_first_cell

NUM_MOVES, NUM_WARM = 36, 6
NUM_OPENED = 3
SETTLE_MS = {"floor": 300, "explorer": 1000, "matplotlib": 1500}
"""Between two moves; every change that a move makes comes within it."""
REST_MS = 140
"""What comes later than this after the pictures is drawn because the page rests (`REST_MS` of stage.js)."""
FIRST_RANKS = 44
"""So that the moves go from here to 86 or so by keys, around 64."""

_SETUP = """
import ipywidgets as widgets
from zeroviz.models import PRESETS
from zeroviz.panel.controls import RANKS
"""
CELLS = {
    "floor": _SETUP
    + f"""
slider = widgets.SelectionSlider(options=RANKS, value={FIRST_RANKS})
slider.add_class("zeroviz-ranks")
label = widgets.Label("")
slider.observe(lambda change: setattr(label, "value", str(change.new)), "value")
root = widgets.VBox([slider, label])
root.add_class("measured")
root
""",
    "explorer": _SETUP
    + f"""
from zeroviz.panel import ExplorerPanel
from zeroviz.state import Explorer
page = ExplorerPanel(Explorer())
page.state.choose(model=PRESETS["llama3-8b"], ranks={FIRST_RANKS}, seq=4096)
page.add_class("measured")
page
""",
    "matplotlib": _SETUP
    + f"""
from zeroviz import draw, draw_shard_map, draw_timeline
from zeroviz.shard_map import build_shard_map
from zeroviz.state import Explorer
state = Explorer()
state.choose(model=PRESETS["llama3-8b"], ranks={FIRST_RANKS}, seq=4096)
slider = widgets.SelectionSlider(options=RANKS, value={FIRST_RANKS})
slider.add_class("zeroviz-ranks")
images = [widgets.Image(format="png", width=900) for _ in range(3)]
def redraw(change):
    state.choose(ranks=change.new)
    papers = [
        draw.paper_of(state.scene()),
        draw_shard_map.paper_of(build_shard_map(state.spec)),
        draw_timeline.paper_of(state.timeline()),
    ]
    for image, paper in zip(images, papers):
        image.value = paper.file("png", "picture", "picture")
slider.observe(redraw, "value")
root = widgets.VBox([slider, *images])
root.add_class("measured")
root
""",
}

# Of each change: when it came, when it was painted (a frame after it, then one task, in which the frame is done), which
# attributes it changed, and whether a picture was changed by it.
_WATCH = """root => {
  const mark = (changes) => {
    const seen = [changes].flat().map(change => change.attributeName ?? "");
    const places = [changes].flat().map(({target}) => target?.nodeType === 1 ? target : target?.parentElement);
    const drawn = places.some(place => place?.closest(".zeroviz-drawing"));
    const came = performance.now();
    requestAnimationFrame(() => {
      const {port1, port2} = new MessageChannel();
      port1.onmessage = () => window.zerovizMarks.push({came, painted: performance.now(), seen, drawn});
      port2.postMessage(0);
    });
  };
  new MutationObserver(mark).observe(root, {subtree: true, childList: true, attributes: true, characterData: true});
  root.addEventListener("load", () => mark([]), true);
  document.addEventListener("keydown", event => {
    window.zerovizStart = event.timeStamp;
    window.zerovizMarks = [];
  }, true);
}"""


class Measured:
    """A page whose slider, or cursor, is moved and timed."""

    def __init__(self, page: Page, name: str) -> None:
        self.page, self.name, self.root = page, name, page.locator(".measured").last
        self.root.evaluate(_WATCH)

    def move(self, handle: Locator, key: str) -> tuple[float, list[dict[str, Any]]]:
        """Press one key: when it was pressed, and the marks of what followed."""
        handle.focus()
        self.page.wait_for_timeout(60)
        self.page.keyboard.press(key)
        self.page.wait_for_timeout(SETTLE_MS[self.name])
        start, marks = self.page.evaluate("[window.zerovizStart, window.zerovizMarks]")
        return float(start), marks

    def slide(self) -> dict[str, float]:
        """Milliseconds of a move of the slider, by what is waited for."""
        handle = self.root.locator(".zeroviz-ranks .noUi-handle")
        handle.focus()  # which may scroll the page: a move begins on one that has come to rest
        self.page.wait_for_timeout(SETTLE_MS[self.name])
        start, marks = self.move(handle, "ArrowRight")
        # That what is one step ahead has come shows nothing.
        last = max(mark["painted"] for mark in marks if mark["seen"] != ["data-ahead"]) - start
        if self.name != "explorer":
            return {self.name: last}
        taken = {"next step": self._pictures(start, marks), "in view": self._in_view(start, marks), "all": last}
        # There and back again, so that the slider goes on by one.
        taken["jump"] = self._pictures(*self.move(handle, "PageUp"))
        self.move(handle, "PageDown")
        return taken

    def _pictures(self, start: float, marks: list[dict[str, Any]]) -> float:
        """To the last change of a picture in the window."""
        return max(mark["painted"] for mark in self._before_rest(marks) if mark["drawn"]) - start

    def _in_view(self, start: float, marks: list[dict[str, Any]]) -> float:
        """To the last change of anything in the window."""
        return max(mark["painted"] for mark in self._before_rest(marks)) - start

    def _before_rest(self, marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What comes with the kernel's answer, or before: not what is drawn because the page rests."""
        answered = next(mark["came"] for mark in marks if "data-version" in mark["seen"])
        return [mark for mark in marks if mark["came"] < answered + REST_MS]

    def step(self) -> dict[str, float]:
        """The same of the film's cursor."""
        start, marks = self.move(self.root.locator(".zeroviz-cursor"), "ArrowRight")
        return {"cursor": next(mark["painted"] for mark in marks if "data-cursor" in mark["seen"]) - start}


_AWAIT_BARS = """() => new Promise(done => {
  let start;
  document.addEventListener("keydown", event => { start = event.timeStamp; }, true);
  const look = () => requestAnimationFrame(() => {
    if (start === undefined || !document.querySelector(".zeroviz-bars-card svg")) return look();
    const {port1, port2} = new MessageChannel();
    port1.onmessage = () => { window.zerovizOnScreen = performance.now() - start; };
    port2.postMessage(0);
  });
  look();
  done();
})"""


def on_screen_s(lab: Lab, home: Path, page: Page, number: int) -> float:
    """Seconds from running the explorer's cell to its bars painted; a notebook of its own has a kernel of its own."""
    name = f"opened-{number}.ipynb"
    shutil.copy(Path(__file__).resolve().parents[1] / "notebooks" / "explorer.ipynb", home / "notebooks" / name)
    page.goto(lab.url(f"opened-{number}", f"notebooks/{name}"))
    cell = page.locator(".jp-CodeCell .cm-content").first
    cell.wait_for(timeout=60_000)
    accept = page.locator(".jp-Dialog .jp-mod-accept")
    if accept.count():
        accept.first.click()
    page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for(timeout=60_000)
    page.wait_for_timeout(2000)
    cell.click()
    page.evaluate(_AWAIT_BARS)
    for _ in range(5):  # a key that comes before the kernel is ready is lost; the clock starts with the last one
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(1000)
        if page.locator(".jp-InputPrompt", has_text="[*]").count() or page.evaluate("window.zerovizOnScreen"):
            break
        cell.click()
    page.wait_for_function("window.zerovizOnScreen", timeout=60_000)
    return float(page.evaluate("window.zerovizOnScreen")) / 1000


class VoilaCell(App):
    """A notebook of one cell in Voila."""

    def __init__(self, home: Path, notebook: Path) -> None:
        super().__init__(home)
        self.notebook = notebook

    def _command(self, options: list[str]) -> list[str]:
        return [sys.executable, "-m", "voila", str(self.notebook), "--no-browser", f"--port={self.port}"]


def written(folder: Path, name: str) -> Path:
    """A notebook of one cell that names its kernel, so that Lab does not ask."""
    source = [f"{line}\n" for line in CELLS[name].strip().split("\n")]
    cell = {"cell_type": "code", "id": name, "metadata": {}, "outputs": [], "execution_count": None, "source": source}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path = folder / f"{name}.ipynb"
    path.write_text(
        json.dumps({"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


def in_lab(stack: ExitStack, home: Path, new_page: Callable[[], Page]) -> dict[str, Measured]:
    lab = stack.enter_context(Lab(home))
    opened = [on_screen_s(lab, home, new_page(), number) for number in range(NUM_OPENED)]
    print(f"on screen after {', '.join(f'{seconds:.1f}' for seconds in opened)} s, in {NUM_OPENED} new kernels")
    pages: dict[str, Measured] = {}
    for name in CELLS:
        notebook = written(home / "notebooks", name)
        page = new_page()
        awaited = page.locator(".measured .noUi-handle")
        run_first_cell(page, lab.url(name, f"notebooks/{notebook.name}"), awaited)
        pages[name] = Measured(page, name)
    return pages


def in_voila(stack: ExitStack, home: Path, new_page: Callable[[], Page]) -> dict[str, Measured]:
    pages: dict[str, Measured] = {}
    for name in CELLS:
        folder = home / name
        folder.mkdir()
        voila = stack.enter_context(VoilaCell(folder, written(home, name)))
        page = new_page()
        page.goto(voila.address)
        page.locator(".measured .noUi-handle").first.wait_for(timeout=90_000)
        pages[name] = Measured(page, name)
    return pages


def measure(pages: dict[str, Measured]) -> dict[str, list[float]]:
    """Milliseconds a move, page by page in turn; the explorer's cursor is moved in its own turn."""
    times: dict[str, list[float]] = {}
    for number in range(NUM_WARM + NUM_MOVES):
        for name, page in pages.items():
            page.page.bring_to_front()
            taken = page.slide() | (page.step() if name == "explorer" else {})
            if number >= NUM_WARM:
                for what, milliseconds in taken.items():
                    times.setdefault(what, []).append(milliseconds)
    return times


def report(where: str, times: dict[str, list[float]]) -> None:
    floor = median(times["floor"]), p95(times["floor"])
    print(f"\n{where}: {NUM_MOVES} moves each, one at a time")
    print(f"{'':12}{'median':>11}{'p95':>11}{'of the floor: median':>23}{'p95':>7}")
    for name, taken in times.items():
        middle, high = median(taken), p95(taken)
        print(f"{name:12}{middle:8.1f} ms{high:8.1f} ms{middle / floor[0]:23.2f}{high / floor[1]:7.2f}")


def p95(taken: list[float]) -> float:
    return quantiles(taken, n=20)[-1]


def main() -> None:
    wanted = sys.argv[1:] or ["lab", "voila"]
    places = {"lab": in_lab, "voila": in_voila}
    if unknown := set(wanted) - set(places):
        sys.exit(f"{', '.join(sorted(unknown))} was asked for; there are lab and voila.")
    with sync_playwright() as playwright:
        browser = launch(playwright)
        print(f"{platform.machine()}, Python {platform.python_version()}, Chromium {browser.version}")
        for where in wanted:
            home = Path(tempfile.mkdtemp(prefix="zeroviz-latency-"))
            try:
                with ExitStack() as stack:
                    new_page = lambda: browser.new_page(viewport={"width": 1400, "height": 1300})  # noqa: E731
                    report(where, measure(places[where](stack, home, new_page)))
            finally:
                shutil.rmtree(home, ignore_errors=True)
        browser.close()


if __name__ == "__main__":
    main()
