"""`zeroviz explore` becomes the server: which one, on which notebook, with which words handed on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from zeroviz import cli_explore
from zeroviz.cli import main

ROOT = Path(__file__).resolve().parents[2]


class Became(Exception):
    """What the process would have become."""


@pytest.fixture(autouse=True)
def _stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def become(path: str, command: list[str]) -> None:
        assert path == sys.executable == command[0] and Path.cwd() == ROOT
        raise Became(command[1:])

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(os, "execv", become)


def command(*words: str) -> list[str]:
    with pytest.raises(Became) as became:
        main(["explore", *words])
    found: list[str] = became.value.args[0]
    return found


def test_the_notebook_opens_in_lab() -> None:
    words = command("--no-browser", "--port", "8899")
    assert words[:2] == ["-m", "jupyterlab"] and "--LabApp.default_url=/lab/tree/notebooks/explorer.ipynb" in words
    assert f"--ServerApp.root_dir={ROOT}" in words and words[4:7] == ["--no-browser", "--port", "8899"]


@pytest.mark.parametrize(("user", "allowed"), [(0, True), (1000, False)])
def test_root_is_said_and_let_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], user: int, allowed: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert ("--allow-root" in command()) == allowed
    assert ("you are root" in capsys.readouterr().err) == allowed
    assert "--allow-root" not in command("--app")


def test_the_app_is_a_page_of_its_own_and_takes_further_words() -> None:
    words = command("--app", "--port=8866")
    assert words[:3] == ["-m", "voila", str(ROOT / "notebooks" / "app.ipynb")] and words[-1] == "--port=8866"
    assert "--VoilaConfiguration.extension_denylist=ipyparallel-labextension" in words  # it fails without a Lab


def test_an_installation_without_notebooks_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_explore, "APP", Path("notebooks") / "gone.ipynb")
    assert main(["explore", "--app"]) == 2
    assert "gone.ipynb does not exist; `zeroviz explore` needs a checkout" in capsys.readouterr().err
