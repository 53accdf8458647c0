"""A part of the page that opens and closes. What is closed is not drawn, and so costs a toggle nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.errors import ZerovizError
from zeroviz.labels import Say
from zeroviz.state import Explorer


class Choice:
    """What a widget is chosen among, in the page's language. Called otherwise, the same value stays chosen: `chosen` is
    called for a choice of the reader's alone."""

    def __init__(self, widget: Any, labels: Sequence[tuple[str, Any]], chosen: Callable[[Any], None]) -> None:
        self._widget, self._labels, self._chosen, self._naming = widget, labels, chosen, False
        widget.observe(self._moved, "value")

    def name_it(self, say: Say) -> None:
        """Call all that is offered by its label."""
        said = tuple((say(label), value) for label, value in self._labels)
        if self._widget.options != said:
            value, self._naming = self._widget.value, True
            self._widget.options = said
            self._widget.value, self._naming = value, False

    def _moved(self, change: Any) -> None:
        if not self._naming:
            self._chosen(change.new)


class Section(widgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """A heading to press, a row of controls, and a picture. A subclass says what the picture is."""

    def __init__(self, state: Explorer, name: str, heading: str, controls: Sequence[Any], *, is_open: bool) -> None:
        self._state, self._heading = state, heading
        self.button = widgets.ToggleButton(value=is_open, tooltip=f"Show or hide: {heading}")
        self.button.add_class("zeroviz-heading")
        self.row = widgets.Box(list(controls))
        self.row.add_class("zeroviz-row")
        self.picture = widgets.HTML()
        self.picture.add_class("zeroviz-picture-card")
        super().__init__([self.button])
        self.add_class("zeroviz-section")
        self.add_class(f"zeroviz-{name}-section")
        self.button.observe(lambda _: self._toggled(), "value")
        self._toggled()
        state.observe(lambda _: self._renamed(), "language")

    @property
    def is_open(self) -> bool:
        return bool(self.button.value)

    def name_it(self) -> None:
        """Put the heading as the language has it."""
        self.button.description = f"{'▾' if self.is_open else '▸'} {self._state.say(self._heading)}"

    def svg(self) -> str:
        """The picture, as it is now."""
        raise NotImplementedError

    def draw(self) -> None:
        """Draw the picture anew if it can be seen. What cannot be drawn is said in its place."""
        if not self.is_open:
            return
        try:
            self.picture.value = self.svg()
        except ZerovizError as error:
            self.picture.value = f'<p class="zeroviz-section-error">{escape(str(error))}</p>'

    def _renamed(self) -> None:
        self.name_it()
        self.draw()

    def _toggled(self) -> None:
        self.name_it()
        self.children = [self.button, self.row, self.picture] if self.is_open else [self.button]
        self.draw()
