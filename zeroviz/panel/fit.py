"""What fits a GPU: the map of ranks and batch, or ranks and sequence, around the present state."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.draw_heatmap import heatmap_svg
from zeroviz.facts import GPU_CAPACITY_NBYTES
from zeroviz.heatmap import Upward
from zeroviz.panel.section import Section
from zeroviz.state import Explorer


class FitSection(Section):
    """The map of `state`, for a GPU by name or a capacity such as 24GB."""

    def __init__(self, state: Explorer, *, is_open: bool = False) -> None:
        self._state = state
        self.gpu = widgets.Combobox(
            value=state.gpu, options=list(GPU_CAPACITY_NBYTES), description="GPU", continuous_update=False
        )
        self.gpu.tooltip = "A GPU by name, or a capacity such as 24GB or 24GiB"
        self.gpu.add_class("zeroviz-gpu")
        self.upward = widgets.ToggleButtons(
            options=[(f"ranks x {upward.value}", upward) for upward in Upward], description="map"
        )
        self.upward.tooltip = "What grows from bottom to top of the map"
        self.upward.add_class("zeroviz-upward")
        super().__init__("fit", "Does it fit a GPU?", [self.gpu, self.upward], is_open=is_open)
        self.gpu.observe(self._asker("gpu"), "value")
        self.upward.observe(self._asker("upward"), "value")
        state.observe(lambda _: self.draw(), ["predicted", "gpu", "upward"])

    def _asker(self, name: str) -> Any:
        def ask(change: Any) -> None:
            setattr(self._state, name, change.new)

        return ask

    def draw(self) -> None:
        with self._state.lock:
            self.gpu.value, self.upward.value = self._state.gpu, self._state.upward
            super().draw()

    def svg(self) -> str:
        return heatmap_svg(self._state.heatmap())
