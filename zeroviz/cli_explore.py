"""`zeroviz explore`: the explorer in JupyterLab or, with --app, as a page of its own through Voila."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroviz.errors import SpecError

NOTEBOOKS = Path("notebooks")
EXPLORER, APP = NOTEBOOKS / "explorer.ipynb", NOTEBOOKS / "app.ipynb"
# A failing cell says why on the page; the address is printed, as Lab's is, and no browser is opened. The extension that
# is left out needs a Lab around it and, without one, is a fault in the browser's console.
_VOILA = (
    "--show_tracebacks=True",
    "--Voila.open_browser=False",
    "--VoilaConfiguration.extension_denylist=ipyparallel-labextension",
)


def answer_explore(server_args: Sequence[str], *, as_app: bool) -> int:
    """Become the server, so that its Ctrl-C and its exit code are its own; further words go to it."""
    checkout = Path(__file__).resolve().parent.parent
    notebook = checkout / (APP if as_app else EXPLORER)
    if not notebook.is_file():
        raise SpecError(f"{notebook} does not exist; `zeroviz explore` needs a checkout installed with pip install -e.")
    command = [sys.executable, "-m", *(_voila(notebook) if as_app else _lab(checkout)), *server_args]
    if not as_app and os.geteuid() == 0 and "--allow-root" not in server_args:
        # In a container everybody is root, and Jupyter would refuse; it still listens on this machine only.
        print("zeroviz: you are root, so JupyterLab is started with --allow-root.", file=sys.stderr)
        command.append("--allow-root")
    os.chdir(checkout)
    sys.stderr.flush()
    os.execv(sys.executable, command)


def _lab(checkout: Path) -> list[str]:
    # As the default address and not as a file to open: without a browser of its own, Lab then prints the notebook's.
    address = f"/lab/tree/{EXPLORER.as_posix()}"
    return ["jupyterlab", f"--ServerApp.root_dir={checkout}", f"--LabApp.default_url={address}"]


def _voila(notebook: Path) -> list[str]:
    return ["voila", str(notebook), *_VOILA]
