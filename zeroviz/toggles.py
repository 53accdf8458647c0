"""The explorer's toggles: what each means in a RunSpec, when it applies, and what follows when another one moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroviz.models import Family, ModelShape
from zeroviz.partition import plan_for
from zeroviz.spec import Checkpointing, Offload, Optimizer, RunSpec, Strategy, UnitKind, UnitPolicy, Zero1Form

TOGGLES = (
    "model", "strategy", "ranks", "precision", "unit", "blocks", "batch", "seq", "optimizer", "grad_dtype",
    "checkpointing", "region", "offload", "accumulation", "no_sync", "zero1_form", "prefetch", "async_reduce",
)  # fmt: skip
"""blocks: transformer blocks a unit when `unit` is BLOCK, else 1. checkpointing: whether blocks are recomputed in
backward, and region how many of them together, else 1. All others are fields of RunSpec."""
MAX_ACCUMULATION = 64
_CALLED = {"region": "what is recomputed together", "no_sync": "when gradients are reduced"}


def spec_of(toggles: Mapping[str, Any]) -> RunSpec:
    """The RunSpec that the toggles ask for. Raises SpecError for what does not go together."""
    fields = {name: toggles[name] for name in TOGGLES if name not in ("unit", "blocks", "checkpointing", "region")}
    unit = UnitPolicy(toggles["unit"], toggles["blocks"])
    checkpointing = Checkpointing(toggles["region"] if toggles["checkpointing"] else 0)
    return RunSpec(unit=unit, checkpointing=checkpointing, **fields)


def applies(name: str, toggles: Mapping[str, Any]) -> bool:
    """Whether a toggle means anything as the others stand."""
    strategy: Strategy = toggles["strategy"]
    meaning: dict[str, bool] = {
        "blocks": toggles["unit"] is UnitKind.BLOCK,
        "region": toggles["checkpointing"],
        "no_sync": toggles["accumulation"] > 1,
        "zero1_form": strategy is Strategy.ZERO1,
        "prefetch": strategy.shards_param,
    }
    return meaning.get(name, True)


def largest(name: str, spec: RunSpec) -> int:
    """The largest value of a toggle that counts something, as far as the model and the units leave room for it."""
    if name in ("blocks", "region"):
        return max(1, spec.model.layers)
    if name == "prefetch":
        return max(1, len(plan_for(spec).units) - 1)
    return MAX_ACCUMULATION if name == "accumulation" else spec.model.positions


def settle(wanted: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Bring toggles that were not `given` in line with those that were; what changed, in sentences.

    A toggle that no longer applies goes back to its default; one that no longer fits goes to the nearest that does.
    What was given is left as it is: if it is wrong, RunSpec refuses it.
    """
    model: ModelShape = wanted["model"]
    strategy: Strategy = wanted["strategy"]
    notes: list[str] = []

    def follow(name: str, value: Any, why: str) -> None:
        if wanted[name] != value and name not in given:
            wanted[name] = value
            if why:
                shown = "as usual" if value is None else getattr(value, "value", value)
                notes.append(f"{_CALLED.get(name, name)} is now {shown}: {why}.")

    if strategy is not Strategy.ZERO1:
        follow("zero1_form", Zero1Form.REDUCE_SCATTER, "")
    if not strategy.shards_param:
        follow("prefetch", 0, f"{strategy.label} gathers nothing ahead")
        if wanted["offload"].moves_params:
            follow("offload", Offload.OPTIMIZER, f"{strategy.label} keeps its parameters whole on the device")
    if wanted["unit"] is not UnitKind.BLOCK:
        follow("blocks", 1, "")
    elif wanted["blocks"] > model.layers:
        follow("blocks", model.layers, f"{model.name} has {model.layers} blocks")
    if not wanted["checkpointing"]:
        follow("region", 1, "")
    elif wanted["region"] > model.layers:
        follow("region", max(1, model.layers), f"{model.name} has {model.layers} blocks")
    if wanted["optimizer"] is Optimizer.ADAMW_8BIT and wanted["offload"].moves_optimizer:
        if "optimizer" in given:
            follow("offload", Offload.NONE, "the update of 8-bit moments is a GPU kernel")
        else:
            follow("optimizer", Optimizer.ADAMW, "the update of 8-bit moments is a GPU kernel and cannot be offloaded")
    if wanted["accumulation"] == 1:
        follow("no_sync", None, "")
    if wanted["no_sync"] is False and strategy is Strategy.ZERO1:
        follow("no_sync", None, "ZeRO-1 reduces the whole gradient, once a step")
    if wanted["grad_dtype"] is wanted["precision"].grad:
        wanted["grad_dtype"] = None  # one way to say a thing: it is the precision's own
    if model.family is Family.GPT2 and wanted["seq"] > model.positions:
        follow("seq", model.positions, f"{model.name} has learned positions for {model.positions} tokens")
    return notes
