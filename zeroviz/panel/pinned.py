"""Compare: states that were pinned and the present one on one axis, and their differences as a table."""

from __future__ import annotations

from html import escape

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.draw import svg_text
from zeroviz.labels import say_html
from zeroviz.panel.section import Section
from zeroviz.pins import Comparison, Figures
from zeroviz.quantity import format_nbytes
from zeroviz.side_by_side import names_of
from zeroviz.state import Explorer

NOTHING = "Nothing is pinned yet. Pin this state, change something, and both stand here on one axis."
_HEADS = ("at rest", "at the peak", "sent in a step")


class Pinned(Section):
    """Pin, go back to a pin, take one out; the comparison under it."""

    def __init__(self, state: Explorer) -> None:
        self._state = state
        self.pin = _button("Pin this state", "Keep this state to compare others with", "pin")
        self.which = widgets.Dropdown(options=[("no pins", -1)], description="pinned")
        self.which.add_class("zeroviz-pins")
        self.go = _button("Go to it", "Set every control as it was in the pinned state", "go-to-pin")
        self.unpin = _button("Unpin it", "Take the pinned state out of the comparison", "unpin")
        super().__init__(state, "compare", "Compare", [self.pin, self.which, self.go, self.unpin], is_open=False)
        self.pin.on_click(lambda _: self._pinned())
        self.go.on_click(lambda _: state.go_to_pin(self.which.value))
        self.unpin.on_click(lambda _: state.unpin(self.which.value))
        state.observe(lambda _: self._offer(), "pins")
        state.observe(lambda _: self.draw(), ["pins", "predicted", "measured"])
        self._offer()

    def svg(self) -> str:
        """The bars, and under them the table."""
        with self._state.lock:
            comparison = self._state.comparison()
        if comparison is None:
            one = "One state is pinned, and it is this one. Change something, and both stand here on one axis."
            return f'<p class="zeroviz-hint">{one if self._state.pins else NOTHING}</p>'
        say = self._state.say
        bars = svg_text(comparison.scene, "zeroviz-compared", on_page=True, say=say)
        return bars + say_html(differences_html(comparison), say)

    def name_it(self) -> None:
        super().name_it()
        self._offer()

    def _pinned(self) -> None:
        if self._state.pin():
            self.button.value = True

    def _offer(self) -> None:
        pins = self._state.pins
        specs = [pin.predicted.spec for pin in pins]
        names = names_of(specs) if len(specs) > 1 else ["the pinned state"] * len(specs)
        before = self.which.value
        offered = [(self._state.say(name), number) for number, name in enumerate(names)]
        self.which.options = offered or [(self._state.say("no pins"), -1)]
        if before in range(len(pins)):
            self.which.value = before
        self.go.disabled = self.unpin.disabled = self.which.disabled = not pins


def differences_html(comparison: Comparison) -> str:
    """What each state holds and sends, and how much more that is than the present state's; exact bytes."""
    rows = "".join(
        f'<tr data-state="{number}"><th scope="row">{escape(line.name)}</th>'
        + "".join(
            f'<td data-figure="{name}">{figure:,} B<br><small>{_beyond(line.beyond, place)}</small></td>'
            for place, (name, figure) in enumerate(zip(Figures._fields, line.figures, strict=True))
        )
        + "</tr>"
        for number, line in enumerate(comparison.lines)
    )
    heads = "".join(f'<th scope="col">{head}</th>' for head in _HEADS)
    caption = "Of the rank that peaks highest; below each figure how much more it is than in the present state."
    return (
        '<div class="zeroviz-tables"><div class="zeroviz-scroll"><table class="zeroviz-differences">'
        f'<caption>{caption}</caption><tr><th scope="col">state</th>{heads}</tr>{rows}</table></div></div>'
    )


def _beyond(beyond: Figures | None, place: int) -> str:
    if beyond is None:
        return "the present state"
    difference = beyond[place]
    return f"{difference:+,} B ({format_nbytes(abs(difference))})" if difference else "the same"


def _button(words: str, tooltip: str, name: str) -> widgets.Button:
    button = widgets.Button(description=words, tooltip=tooltip)
    button.add_class(f"zeroviz-{name}")
    return button
