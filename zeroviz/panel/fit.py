"""What fits a GPU: the map of ranks and batch, or ranks and sequence, around the present state."""

from __future__ import annotations

from html import escape

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.draw_heatmap import heatmap_svg
from zeroviz.heatmap import Upward
from zeroviz.panel.controls import VIEWS, Controls, gpu_control
from zeroviz.panel.look import CSS
from zeroviz.panel.refusal import page_words
from zeroviz.panel.section import Choice, Section
from zeroviz.state import Explorer


class FitPanel(widgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """The map alone, with the controls of the step: for whoever asks what fits and has no need to run it."""

    def __init__(self, state: Explorer) -> None:
        self.state = state
        self.controls = Controls(state, leave_out=VIEWS)
        self.news = widgets.HTML()
        self.news.add_class("zeroviz-live")
        self.fit = FitSection(state, is_open=True, asks_gpu=True)
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
            f'<div class="zeroviz-news"><div class="zeroviz-error">{escape(page_words(state.error))}</div>'
            f'<div class="zeroviz-notice">{escape(state.notice)}</div></div>'
        )


class FitSection(Section):
    """The map of `state`. asks_gpu: whether the GPU is chosen here, where no other control has it."""

    def __init__(self, state: Explorer, *, is_open: bool = False, asks_gpu: bool = False) -> None:
        self._state = state
        self.gpu = gpu_control(state) if asks_gpu else None
        labels = [(f"ranks x {upward.value}", upward) for upward in Upward]
        self.upward = widgets.ToggleButtons(options=labels, description="map")
        self._upwards = Choice(self.upward, labels, lambda upward: setattr(state, "upward", upward))
        self.upward.tooltip = "What grows from bottom to top of the map"
        self.upward.add_class("zeroviz-upward")
        super().__init__(
            state, "fit", "Does it fit a GPU?", [*([self.gpu] if self.gpu else []), self.upward], is_open=is_open
        )
        state.observe(lambda _: self.draw(), ["predicted", "gpu", "upward"])

    def name_it(self) -> None:
        super().name_it()
        self._upwards.name_it(self._state.say)

    def draw(self) -> None:
        with self._state.lock:
            self.upward.value = self._state.upward
            super().draw()

    def svg(self) -> str:
        return heatmap_svg(self._state.heatmap(), on_page=True, say=self._state.say)
