"""A spec as the command line that asks for it: what a message offers can be pasted."""

from __future__ import annotations

from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

from zeroviz.models import PRESETS, ModelShape, bare
from zeroviz.spec import RunSpec

CONFIG = "CONFIG.json"
"""Stands for the file of a model that is no preset: a spec does not know where it was read from."""


def given(spec: RunSpec) -> dict[str, Any]:
    """The fields of `spec` that are not RunSpec's defaults, by name and in their order; the model always."""
    values = {each.name: (getattr(spec, each.name), each.default) for each in fields(spec)}
    return {name: value for name, (value, default) in values.items() if default is MISSING or value != default}


def is_preset(model: ModelShape) -> bool:
    """Whether its name says all of it."""
    return PRESETS.get(model.name) == model


def is_bare_count(model: ModelShape) -> bool:
    """Whether its parameter count says all of it."""
    return model.bare_num_params > 0 and model == bare(model.bare_num_params)


def command_line(verb: str, spec: RunSpec) -> str:
    """`zeroviz rehearse --model llama3-70b --strategy zero3 --ranks 1024`.

    Model, strategy and ranks always; of the rest what is not the default.
    """
    model, params = spec.model, is_bare_count(spec.model)
    options = {
        "params" if params else "model": str(model.bare_num_params) if params else _model_word(model),
        "strategy": spec.strategy.value,
        "ranks": str(spec.ranks),
    }
    for name, value in given(spec).items():
        if name == "settings":
            options |= {setting: _word(each) for setting, each in spec.settings.given.items()}
        elif name != "model":
            options[name] = _word(value)
    return " ".join(["zeroviz", verb, *(f"--{name.replace('_', '-')} {word}" for name, word in options.items())])


def _model_word(model: ModelShape) -> str:
    return model.name if is_preset(model) else CONFIG


def _word(value: object) -> str:
    """A value as it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, Enum) else value)
