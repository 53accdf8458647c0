"""What fits a GPU: the map of ranks and batch, or ranks and sequence, around the present state."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.draw_heatmap import heatmap_svg
from zeroviz.facts import GPU_CAPACITY_NBYTES
from zeroviz.heatmap import Upward
from zeroviz.panel.controls import VIEWS, Controls
from zeroviz.panel.look import CSS
from zeroviz.panel.section import Section
from zeroviz.state import Explorer


class FitPanel(widgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """The map alone, with the controls of the step: for whoever asks what fits and has no need to run it."""

    def __init__(self, state: Explorer) -> None:
        self.state = state
        self.controls = Controls(state, leave_out=VIEWS)
        self.news = widgets.HTML()
        self.news.add_class("zeroviz-live")
        self.fit = FitSection(state, is_open=True)
        desk = widgets.Box([self.controls.box, self.news])
        desk.add_class("zeroviz-desk")
        main = widgets.Box([desk, self.fit])
        main.add_class("zeroviz-main")
        super().__init__([widgets.HTML(CSS), main])
        self.add_class("zeroviz-explorer")
        self._tell()
        state.observe(lambda _: self._tell(), ["notice", "error"])

    def _tell(self) -> None:
        state = self.state
        self.news.value = (
            f'<div class="zeroviz-news"><div class="zeroviz-error">{escape(state.error)}</div>'
            f'<div class="zeroviz-notice">{escape(state.notice)}</div></div>'
        )


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
