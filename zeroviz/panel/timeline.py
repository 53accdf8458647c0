"""The timeline under the bars: the whole step of one rank."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.draw_timeline import timeline_svg
from zeroviz.panel.section import Section
from zeroviz.state import Explorer


class TimelineSection(Section):
    """The step of `state.rank`. The rank is a choice where measured ranks differ; predicted ones never do."""

    def __init__(self, state: Explorer, *, is_open: bool = True) -> None:
        self._state = state
        self.start = widgets.ToggleButtons(
            options=[("from zero", False), ("from what is held at rest", True)], description="axis"
        )
        self.start.tooltip = "Where the axis begins: at zero, to see the whole, or at rest, to see what the step adds"
        self.start.add_class("zeroviz-from-rest")
        self.rank = widgets.Dropdown(options=[("every rank", 0)], description="rank")
        self.rank.tooltip = "Whose step is shown; ranks that are alike to the byte share a line"
        self.rank.add_class("zeroviz-rank")
        self._showing = False
        super().__init__("timeline", "The whole step, change by change", [self.start, self.rank], is_open=is_open)
        self.start.observe(self._asker("from_rest"), "value")
        self.rank.observe(self._asker("rank"), "value")
        state.observe(lambda _: self.draw(), ["predicted", "measured", "rank", "from_rest"])

    def _asker(self, name: str) -> Any:
        def ask(change: Any) -> None:
            if not self._showing:
                setattr(self._state, name, change.new)

        return ask

    def draw(self) -> None:
        if not self.is_open:  # which ranks differ is not known for nothing
            return
        with self._state.lock:
            self._show()
            super().draw()

    def svg(self) -> str:
        return timeline_svg(self._state.timeline())

    def _show(self) -> None:
        """Bring the controls to the state: ranks that differ from the others can be chosen."""
        state = self._state
        apart = state.ranks_apart
        words = [("each rank" if len(apart) == 1 else f"rank {rank}", rank) for rank in sorted({*apart, state.rank})]
        if len(apart) == 1:
            words = [("each rank", state.rank)]
        self._showing = True
        try:
            if list(self.rank.options) != words:
                self.rank.options = words
            self.rank.value, self.start.value = state.rank, state.from_rest
            self.rank.disabled = len(apart) == 1
        finally:
            self._showing = False
