"""Above the controls: a classic question to begin with, undo, reset."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.examples import EXAMPLES
from zeroviz.state import Explorer

CHOOSE = "choose a question"


class Shortcuts(widgets.Box):  # type: ignore[misc]  # ipywidgets ships no types
    """`more` buttons follow. An example sets every toggle; undo goes back by one change, whatever made it."""

    def __init__(self, state: Explorer, *more: widgets.DOMWidget) -> None:
        self._state = state
        self._naming = False
        self.example = widgets.Dropdown(options=self._options(), description="example")
        self.example.tooltip = "A classic question, as a state of all controls"
        self.example.add_class("zeroviz-example")
        self.undo = _button("Undo", "Back to the state before the last change", "undo", state.undo)
        self.reset = _button("Reset", "Back to the state that the explorer opened with", "reset", state.reset)
        super().__init__([self.example, self.undo, self.reset, *more])
        self.add_class("zeroviz-shortcuts")
        self.example.observe(self._chosen, "value")
        state.observe(lambda _: self.show(), "predicted")
        self.show()

    def name_it(self) -> None:
        """Say in the page's language that there is something to choose. The examples are sentences, and stay."""
        if self.example.options != self._options():
            value, self._naming = self.example.value, True
            self.example.options = self._options()
            self.example.value, self._naming = value, False

    def _options(self) -> tuple[tuple[str, str], ...]:
        return ((self._state.say(CHOOSE), CHOOSE), *((name, name) for name in EXAMPLES))

    def _chosen(self, change: Any) -> None:
        if change.new != CHOOSE and not self._naming:
            self._state.start_from(EXAMPLES[change.new])

    def show(self) -> None:
        """No example's name beside another state; what there is to undo.

        A name is never put here from the state: the page may answer late with what it was told, and that would be a
        choice.
        """
        state, name = self._state, self.example.value
        if name != CHOOSE and state.toggles != {**state.opening, **EXAMPLES[name]}:
            self.example.value = CHOOSE
        self.undo.disabled = not state.can_undo


def _button(words: str, tooltip: str, name: str, act: Any) -> widgets.Button:
    button = widgets.Button(description=words, tooltip=tooltip)
    button.add_class(f"zeroviz-{name}")
    button.on_click(lambda _: act())
    return button
