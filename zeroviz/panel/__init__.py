"""The explorer as widgets: `explorer(backend)` in a notebook cell shows it.

from cluster.live import LiveBackend
from zeroviz.panel import explorer

explorer(LiveBackend())
"""

from __future__ import annotations

import asyncio

from IPython.display import Javascript, display

from zeroviz.backend import Backend
from zeroviz.errors import RunError
from zeroviz.panel.look import ACCESS_JS
from zeroviz.panel.panel import ExplorerPanel
from zeroviz.state import Explorer

__all__ = ["ExplorerPanel", "explorer"]


def explorer(backend: Backend) -> ExplorerPanel:
    """The explorer, to be shown by the cell. Call it in a notebook: runs live on the loop that executes the cell.

    `.state` of the result is the Explorer: `panel.state.ranks = 8` moves the picture.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RunError("explorer() needs a running event loop; call it in a notebook cell.") from None
    display(Javascript(ACCESS_JS))  # type: ignore[no-untyped-call]
    return ExplorerPanel(Explorer(backend, loop))
