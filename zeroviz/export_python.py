"""A spec as Python that makes it again: a script for the arithmetic, and the explorer's lines for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import Enum
from math import isfinite
from typing import Any

from zeroviz.command import command_line, given, is_bare_count, is_preset
from zeroviz.models import ModelShape
from zeroviz.settings import Settings
from zeroviz.spec import Checkpointing, RunSpec, UnitPolicy
from zeroviz.spec import __all__ as SPEC_NAMES
from zeroviz.wording import title

LONG = 10_000
"""Whole numbers from here on are written with underscores: 7_000_000_000."""
NO_TOGGLES = ("steps", "seed")
"""Fields of a spec that the explorer does not ask for."""
_TOGGLES: Mapping[str, Mapping[str, str]] = {
    "unit": {"unit": "spec.unit.kind", "blocks": "spec.unit.count"},
    "checkpointing": {"checkpointing": "True", "region": "spec.checkpointing.blocks"},
}
"""The toggles of a field that are not the field itself: see `zeroviz.toggles.spec_of`."""


def as_python(spec: RunSpec) -> str:
    """A script that makes `spec` and predicts it: imports, the fields that are not the defaults, `predict(spec)`.

    Its last lines are a comment: without their `# ` they open the explorer on this state, at the end of a notebook's
    cell. They need the live half and the notebook's event loop; the script itself needs zeroviz alone.
    """
    writer = _Writer()
    lines = []
    if not is_preset(spec.model) and not is_bare_count(spec.model):
        lines = [*_call("model = ModelShape", writer.shape(spec.model)), ""]
    arguments = {name: writer.expression(value) for name, value in given(spec).items()}
    lines += [*_call("spec = RunSpec", arguments), "trace = predict(spec)", "", *_notebook(spec)]
    writer.names |= {("spec", "RunSpec"), ("predict", "predict")}
    head = [f"# {title(spec)}", f"# in a shell: {command_line('predict', spec)}", *writer.imports(), ""]
    return "\n".join([*head, *lines, ""])


def toggles_in_words(spec: RunSpec) -> dict[str, str]:
    """What a new explorer has to be told to stand at `spec`: toggles as expressions of `spec`.

    Its ranks are named always, for it begins with others than a RunSpec does.
    """
    words: dict[str, str] = {}
    for name in dict.fromkeys(("model", "ranks", *given(spec))):
        if name == "settings":
            words |= {setting: f"spec.settings.{setting}" for setting in spec.settings.given}
        elif name not in NO_TOGGLES:
            words |= _TOGGLES.get(name, {name: f"spec.{name}"})
    return words


def _notebook(spec: RunSpec) -> list[str]:
    apart = [name for name in given(spec) if name in NO_TOGGLES]
    but = f", all but {' and '.join(apart)}, which it does not ask for" if apart else ""
    lines = [
        "from cluster.live import LiveBackend",
        "from zeroviz.panel import explorer",
        "",
        "panel = explorer(LiveBackend())",
        *_call("panel.state.choose", toggles_in_words(spec)),
        "panel",
    ]
    return [f"# In a notebook, the explorer on this state{but}:", *(f"# {line}".rstrip() for line in lines)]


def _call(function: str, arguments: Mapping[str, str]) -> list[str]:
    return [f"{function}(", *(f"    {name}={words}," for name, words in arguments.items()), ")"]


class _Writer:
    """Values as expressions. names: what these need, each as (module of zeroviz, name)."""

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()

    def imports(self) -> Iterable[str]:
        """One line a module, in alphabetical order."""
        for module in sorted({module for module, _ in self.names}):
            yield f"from zeroviz.{module} import {', '.join(sorted(name for of, name in self.names if of == module))}"

    def expression(self, value: Any) -> str:
        """`value` as Python. TypeError for a kind that no spec has."""
        if isinstance(value, ModelShape):
            return self._model(value)
        if isinstance(value, UnitPolicy | Checkpointing):
            return f"{self._name(type(value))}({', '.join(self._changed(value).values())})"
        if isinstance(value, Settings):
            words = (f"{name}={each}" for name, each in self._changed(value).items())
            return f"{self._name(type(value))}({', '.join(words)})"
        if isinstance(value, Enum):
            return f"{self._name(type(value))}.{value.name}"
        if isinstance(value, str):
            plain = value.isascii() and value.isprintable() and not set(value) & set('"\\')
            return f'"{value}"' if plain else repr(value)
        if isinstance(value, bool):
            return repr(value)
        if isinstance(value, int):
            return f"{value:_}" if abs(value) >= LONG else str(value)
        if isinstance(value, float):
            return repr(value) if isfinite(value) else f'float("{value}")'
        raise TypeError(f"{value!r} is of type {type(value).__name__}, for which there is no expression.")

    def shape(self, model: ModelShape) -> dict[str, str]:
        """What `ModelShape(...)` is to be given."""
        self._name(ModelShape)
        return self._changed(model)

    def _model(self, model: ModelShape) -> str:
        """A model that has a name of its own is one; any other is called `model`: see `shape`."""
        if is_preset(model):
            self.names.add(("models", "PRESETS"))
            return f"PRESETS[{self.expression(model.name)}]"
        if is_bare_count(model):
            self.names.add(("models", "bare"))
            return f"bare({self.expression(model.bare_num_params)})"
        return "model"

    def _changed(self, value: Any) -> dict[str, str]:
        """Its fields that are not the defaults; but a unit's kind always, whose count may follow."""
        kept = {each.name: getattr(value, each.name) for each in fields(value)}
        default = {each.name: each.default for each in fields(value)}
        return {
            name: self.expression(each)
            for name, each in kept.items()
            if each != default[name] or (isinstance(value, UnitPolicy) and name == "kind")
        }

    def _name(self, kind: type) -> str:
        """Where it is to be had: `zeroviz.spec` hands on what a spec is made of; the rest is where it was defined."""
        module = "spec" if kind.__name__ in SPEC_NAMES else kind.__module__.removeprefix("zeroviz.")
        self.names.add((module, kind.__name__))
        return kind.__name__
