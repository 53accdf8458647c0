"""A JupyterLab of one's own with the explorer open in Chromium: for the tests here and for docs/screenshot.py."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from playwright.sync_api import Browser, Locator, Page, Playwright

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = "notebooks/explorer.ipynb"
CHROMIUM = Path(os.environ.get("ZEROVIZ_CHROMIUM", "/usr/bin/chromium"))
CHROMIUM_ARGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
LAB_START_S = 90.0
STOP_S = 15.0


class Lab:
    """JupyterLab on a copy of the notebooks, or, `by_make`, on the checkout's own through `make explore`.

    Its configuration, its workspaces and, for the copy, its files live under `home`: nothing of the user's is read or
    changed. It is started without a browser.
    """

    alive = "/api/status"
    """What answers as soon as the server is there."""

    def __init__(self, home: Path, *, by_make: bool = False, is_dark: bool = False) -> None:
        self.home, self.is_dark = home, is_dark
        self.by_make = by_make
        self.root = ROOT if by_make else home
        self.token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def __enter__(self) -> Self:
        if not self.by_make:
            ignored = shutil.ignore_patterns(".ipynb_checkpoints")
            shutil.copytree(ROOT / "notebooks", self.root / "notebooks", ignore=ignored)
        settings = self.home / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        (settings / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false"}))
        theme = "JupyterLab Dark" if self.is_dark else "JupyterLab Light"
        (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
        places = {
            "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython",
        }  # fmt: skip
        environment = {**os.environ, **{name: str(self.home / folder) for name, folder in places.items()}}
        options = [
            "--no-browser", f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self.token}",
        ]  # fmt: skip
        command = self._command(options)
        self.log = self.home / "lab.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def _command(self, options: list[str]) -> list[str]:
        if self.by_make:
            return ["make", "explore", f"VENV={sys.prefix}", f"JUPYTER_ARGS={shlex.join(options)}"]
        root_user = ["--allow-root"] if os.geteuid() == 0 else []
        place = f"--ServerApp.root_dir={self.root}"  # which `zeroviz explore` names itself
        return [sys.executable, "-m", "jupyterlab", str(self.root / NOTEBOOK), place, *options, *root_user]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def url(self, workspace: str, notebook: str = NOTEBOOK) -> str:
        """A notebook's address, the explorer's by default, in a workspace of its own."""
        return f"http://127.0.0.1:{self.port}/lab/workspaces/{workspace}/tree/{notebook}?token={self.token}"

    def end_kernels(self) -> None:
        """Shut every kernel down, or the next page would meet the old one."""
        for kernel in json.loads(self._request("/api/kernels")):
            self._request(f"/api/kernels/{kernel['id']}", "DELETE")

    def _request(self, path: str, method: str = "GET") -> bytes:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def _wait(self) -> None:
        deadline = time.monotonic() + LAB_START_S
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"JupyterLab ended with {self._process.returncode}:\n{self.log.read_text()[-2000:]}")
            try:
                self._request(self.alive)
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if time.monotonic() > deadline:
                    message = f"JupyterLab did not answer within {LAB_START_S:.0f} s:\n{self.log.read_text()[-2000:]}"
                    raise RuntimeError(message) from None
                time.sleep(0.2)

    def _stop(self) -> None:
        """Lab ends its kernels on SIGTERM, and each kernel its engines. The signal goes to make's children too."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


class App(Lab):
    """The explorer as a page of its own: `zeroviz explore --app`."""

    alive = "/voila/static/voila.js"  # any page of the notebook would start a kernel

    def _command(self, options: list[str]) -> list[str]:
        return [sys.executable, "-m", "zeroviz.cli", "explore", "--app", f"--port={self.port}"]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


class ExplorerPage:
    """The explorer in a page, as a person uses it: by its visible controls."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.root = page.locator(".zeroviz-explorer")

    @classmethod
    def open(cls, page: Page, address: str) -> Self:
        """Open the notebook, accept the kernel if asked, run its cell, and wait for the picture."""
        explorer = cls(page)
        run_first_cell(page, address, explorer.root)
        explorer.root.locator("svg.zeroviz-picture").wait_for(timeout=30_000)
        return explorer

    @classmethod
    def open_app(cls, page: Page, address: str) -> Self:
        """Open the page that is the explorer and nothing else, and wait for the picture."""
        page.goto(address)
        explorer = cls(page)
        explorer.root.locator("svg.zeroviz-picture").wait_for(timeout=90_000)
        return explorer

    def control(self, name: str) -> Locator:
        """A control by its toggle's name."""
        return self.root.locator(f".zeroviz-{name}")

    def press(self, name: str, words: str) -> None:
        """Press one of a control's buttons."""
        self.control(name).get_by_role("button", name=words, exact=True).click()

    def slide(self, name: str, key: str, times: int = 1) -> None:
        """Move a slider by keys."""
        handle = self.control(name).locator(".noUi-handle")
        handle.focus()
        self.page.wait_for_timeout(150)  # a slider whose range is being changed loses a key
        for _ in range(times):
            self.page.keyboard.press(key)

    def figures(self, source: str = "predicted") -> dict[tuple[int, str, str], int]:
        """The memory table as (rank, moment, category) -> bytes, all read at one moment."""
        cells = self.root.locator(f'.zeroviz-memory td[data-source="{source}"]').evaluate_all(
            "cells => cells.map(({dataset: d, innerText}) => [d.rank, d.moment, d.category, innerText])"
        )
        return {
            (int(rank), moment, category): int(text.replace(",", "").replace("B", ""))
            for rank, moment, category, text in cells
        }

    def bars(self, origin: str = "predicted") -> list[int]:
        """How long the outline of each bar of the picture is, in bytes."""
        return self.root.locator(f'svg.zeroviz-picture [data-category="outline"][data-origin="{origin}"]').evaluate_all(
            "bars => bars.map(bar => Number(bar.dataset.nbytes))"
        )

    def title(self) -> str:
        """The picture in words."""
        return self.root.locator("svg.zeroviz-picture").get_attribute("aria-label") or ""

    def notice(self) -> str:
        return self.root.locator(".zeroviz-notice").inner_text()

    def error(self) -> str:
        return self.root.locator(".zeroviz-error").inner_text()

    def news(self) -> str:
        return self.root.locator(".zeroviz-progress").inner_text()

    def run_state(self) -> str:
        return self.root.locator(".zeroviz-news").get_attribute("data-state") or ""

    def wait_run(self, *states: str, timeout_s: float) -> None:
        """Wait until the run's state is one of `states`."""
        wanted = ", ".join(f'.zeroviz-news[data-state="{state}"]' for state in states)
        self.root.locator(wanted).wait_for(timeout=timeout_s * 1000)


@contextmanager
def opened(browser: Browser, server: Lab, screenshots: Path) -> Iterator[ExplorerPage]:
    """The explorer in a new page. It ends with a picture of the page, in which no script may have failed."""
    page = browser.new_page(viewport={"width": 1400, "height": 1300})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    if isinstance(server, App):
        yield ExplorerPage.open_app(page, server.address)
    else:
        yield ExplorerPage.open(page, server.url("tests"))
    page.screenshot(path=screenshots / "last.png")
    page.close()
    assert not faults


def run_first_cell(page: Page, address: str, awaited: Locator) -> None:
    """Open a notebook in Lab, accept the kernel if asked, and run its first cell until what is awaited is there."""
    page.goto(address)
    cell = page.locator(".jp-CodeCell .cm-content").first
    cell.wait_for(timeout=60_000)
    deadline = time.monotonic() + 90
    while not awaited.count():
        if time.monotonic() > deadline:
            raise RuntimeError("what the cell shows did not appear within 90 s of running it")
        accept = page.locator(".jp-Dialog .jp-mod-accept")
        if accept.count():
            accept.first.click()
        # A key that comes before the kernel is ready is lost; running the cell twice does no harm.
        page.wait_for_timeout(1000)
        if not awaited.count() and page.locator(".jp-InputPrompt", has_text="[*]").count() == 0:
            cell.click()
            page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(2000)


def launch(playwright: Playwright) -> Browser:
    """Headless Chromium, as installed by the system."""
    return playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(CHROMIUM_ARGS))
