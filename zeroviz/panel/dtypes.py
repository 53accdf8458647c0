"""A choice for the dtype of each copy of the model states, beside what a parameter then costs. Opened by its button."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.dtypes_apart import Copy, asides, dtypes_of, sum_words
from zeroviz.spec import DType
from zeroviz.state import Explorer

NONE = "none"
LABEL, PER = "dtypes", "bytes a parameter"
_TOOLTIPS = {
    Copy.PARAM: "Number format in which parameters are held between steps",
    Copy.GRAD: "Number format in which gradients are kept",
    Copy.MASTER: "The optimizer's own copy of the parameters; fp32 parameters need none",
    Copy.MOMENTS: "Adam's m and v: as what is updated, the master or the parameters, or quantized to int8",
}


class DtypesApart(widgets.Box):  # type: ignore[misc]  # ipywidgets ships no types
    """`choice` has one widget for each copy. Like every control it asks the Explorer, and shows what that says."""

    def __init__(self, state: Explorer) -> None:
        self._state = state
        self._showing = False
        self.button = widgets.ToggleButton(
            tooltip="Show or hide a choice for each copy's number format; the sum is a parameter's with nothing sharded"
        )
        self.button.add_class("zeroviz-dtypes-button")
        self.sum = widgets.HTML()
        self.sum.add_class("zeroviz-dtypes-sum")
        self.choice = {copy: widgets.Dropdown(options=self._offered(_options(copy))) for copy in Copy}
        for copy, control in self.choice.items():
            control.tooltip = _TOOLTIPS[copy]
            control.layout.width = "auto"
            control.add_class(f"zeroviz-{_css_name(copy)}")
        self.row = widgets.Box(list(self.choice.values()))
        self.row.add_class("zeroviz-dtypes-row")
        self.asides = widgets.HTML()
        self.asides.add_class("zeroviz-dtypes-asides")
        super().__init__([self.button, self.sum, self.row, self.asides])
        self.add_class("zeroviz-dtypes")
        self.show()
        self._name()
        self.button.observe(lambda _: self._name(), "value")
        for copy, control in self.choice.items():
            control.observe(self._asker(copy), "value")
        state.observe(lambda _: self.show(), "predicted")
        state.observe(lambda _: self._renamed(), "language")

    def _asker(self, copy: Copy) -> Any:
        def ask(change: Any) -> None:
            with self._state.lock:
                if self._showing:
                    return
                self._state.choose_dtype(copy, None if change.new == NONE else DType(change.new))
                self.show()  # after a refusal the old one

        return ask

    def show(self) -> None:
        """Bring every choice and the sum to the state."""
        with self._state.lock:
            spec = self._state.spec
            self._showing = True
            try:
                for copy, dtype in dtypes_of(spec).items():
                    control, value = self.choice[copy], dtype.value if dtype else NONE
                    values = _options(copy)
                    # Moments of an optimizer that keeps none.
                    options = self._offered(values if value in values else (value, *values))
                    if tuple(control.options) != options:
                        with control.hold_sync():  # one message
                            control.options, control.value = options, value
                    control.value = value
            finally:
                self._showing = False
            scales = ", and scales" if spec.recipe.moments is DType.INT8 else ""
            self.sum.value = f"{sum_words(spec)} {escape(self._state.say(PER))}{scales}"
            self.asides.value = escape(" ".join(asides(spec)))

    def words(self) -> dict[str, str]:
        """What each choice says on the page once the page has caught up with the Explorer."""
        dtypes = dtypes_of(self._state.spec)
        return {_css_name(copy): self._state.say(dtype.value if dtype else NONE) for copy, dtype in dtypes.items()}

    def _offered(self, values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        return tuple((self._state.say(value), value) for value in values)

    def _renamed(self) -> None:
        self._name()
        self.show()

    def _name(self) -> None:
        """Open or close, and call everything by its label. What is closed stays on the page, out of sight and reach."""
        self.button.description = f"{'▾' if self.button.value else '▸'} {self._state.say(LABEL)}"
        for part in (self.row, self.asides):
            part.layout.display = None if self.button.value else "none"
        for copy, control in self.choice.items():
            control.description = self._state.say(copy.value)


def _options(copy: Copy) -> tuple[str, ...]:
    return tuple(dtype.value if dtype else NONE for dtype in copy.choices)


def _css_name(copy: Copy) -> str:
    return f"dtype-{copy.value}"
