"""The explorer as widgets: `explorer(backend)` in a notebook cell shows it.

from cluster.live import LiveBackend
from zeroviz.panel import explorer

explorer(LiveBackend())
"""

from __future__ import annotations

import asyncio
from typing import Any

from IPython.display import display

from zeroviz.backend import Backend
from zeroviz.errors import RunError, SpecError
from zeroviz.panel.fit import FitPanel
from zeroviz.panel.held import held, losses
from zeroviz.panel.look import ACCESS_JS
from zeroviz.panel.panel import ExplorerPanel
from zeroviz.panel.still import keep_still
from zeroviz.state import Explorer

__all__ = ["ExplorerPanel", "FitPanel", "explorer", "fit", "held", "losses"]


def explorer(backend: Backend) -> ExplorerPanel:
    """The explorer, to be shown by the cell. Call it in a notebook: runs live on the loop that executes the cell.

    `.state` of the result is the Explorer: `panel.state.ranks = 8` moves the picture. What a notebook keeps of it is in
    another output of the cell, see `zeroviz.panel.still`.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RunError("explorer() needs a running event loop; call it in a notebook cell.") from None
    _mend_page()
    panel = ExplorerPanel(Explorer(backend, loop))
    keep_still(panel, loop)
    return panel


def fit(**toggles: Any) -> FitPanel:
    """The map of what fits a GPU, to be shown by the cell; it runs nothing. `toggles` are set first, if they can be.

    `.state` of the result is the Explorer: `panel.state.gpu = "24GB"` draws the map of another device.
    """
    state = Explorer()
    if toggles and not state.choose(**toggles):
        raise SpecError(state.error)
    _mend_page()
    return FitPanel(state)


def _mend_page() -> None:
    """Send what plain widgets lack. Without a text, which a viewer that runs no scripts would show in its place."""
    display({"application/javascript": ACCESS_JS, "text/plain": ""}, raw=True)  # type: ignore[no-untyped-call]
