"""The explorer's toggles: what each means in a RunSpec, when it applies, and what follows when another one moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any

from zeroviz.implementations import PAIRS, PRECISIONS, has_option
from zeroviz.models import Family, ModelShape
from zeroviz.partition import plan_for
from zeroviz.precision import WHOLE_BUFFER_PRECISIONS
from zeroviz.settings import SETTINGS, Settings
from zeroviz.spec import (
    Checkpointing,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitKind,
    UnitPolicy,
    Zero1Form,
)

TOGGLES = (
    "model", "impl", "strategy", "ranks", "shard_ranks", "precision", "unit", "blocks", "batch", "seq", "optimizer",
    "grad_dtype", "checkpointing", "region", "offload", "accumulation", "no_sync", "clip_norm", "zero1_form",
    "prefetch", "async_reduce", *SETTINGS,
)  # fmt: skip
"""blocks: transformer blocks a unit when `unit` is BLOCK, else 1. checkpointing: whether blocks are recomputed in
backward, and region how many of them together, else 1. Those of SETTINGS are an implementation's own; None is its
default. All others are fields of RunSpec."""
MAX_ACCUMULATION = 64
_CALLED = {
    "impl": "the implementation",
    "region": "what is recomputed together",
    "no_sync": "when gradients are reduced",
    "shard_ranks": "a shard group",
    "grad_dtype": "the gradient's dtype",
    "async_reduce": "overlap of reduction and compute",
    "clip_norm": "clipping",
}


def spec_of(toggles: Mapping[str, Any]) -> RunSpec:
    """The RunSpec that the toggles ask for. Raises SpecError for what does not go together."""
    apart = ("unit", "blocks", "checkpointing", "region", *SETTINGS)
    fields = {name: toggles[name] for name in TOGGLES if name not in apart}
    unit = UnitPolicy(toggles["unit"], toggles["blocks"])
    checkpointing = Checkpointing(toggles["region"] if toggles["checkpointing"] else 0)
    settings = Settings(**{name: toggles[name] for name in SETTINGS})
    return RunSpec(unit=unit, checkpointing=checkpointing, settings=settings, **fields)


def toggles_of(spec: RunSpec) -> dict[str, Any]:
    """The toggles that ask for `spec`: the inverse of `spec_of`, its steps and its seed apart, which move no byte."""
    toggles = {name: getattr(spec, name) for name in TOGGLES if hasattr(spec, name)}
    apart = {
        "unit": spec.unit.kind,
        "blocks": spec.unit.count,
        "checkpointing": spec.checkpointing.blocks > 0,
        "region": max(1, spec.checkpointing.blocks),
    }
    return {**toggles, **apart, **{name: getattr(spec.settings, name) for name in SETTINGS}}


def applies(name: str, toggles: Mapping[str, Any]) -> bool:
    """Whether a toggle means anything as the others stand."""
    strategy: Strategy = toggles["strategy"]
    impl: Implementation = toggles["impl"]
    if name in SETTINGS:
        of_stage_3 = name in ("persistence_numel", "reshard_ranks")
        return impl in SETTINGS[name].library and (strategy is Strategy.ZERO3 or not of_stage_3)
    if not has_option(impl, name):
        return False
    meaning: dict[str, bool] = {
        "blocks": toggles["unit"] is UnitKind.BLOCK,
        "region": toggles["checkpointing"],
        "no_sync": toggles["accumulation"] > 1,
        "shard_ranks": strategy.replicates,
        "zero1_form": strategy is Strategy.ZERO1,
        "prefetch": strategy.shards_param,
        "async_reduce": not strategy.has_whole_buffer,
    }
    return meaning.get(name, True)


def group_choices(ranks: int) -> tuple[int, ...]:
    """How many of `ranks` ranks can shard together: its divisors."""
    small = [number for number in range(1, isqrt(max(0, ranks)) + 1) if ranks % number == 0]
    return (*small, *(ranks // number for number in reversed(small) if number * number != ranks))


def usual_shard_ranks(ranks: int) -> int:
    """A shard group to begin with: half the ranks, or what is next to it; all where they are prime or one."""
    return max((number for number in group_choices(ranks) if 1 < number < ranks), default=ranks)


def largest(name: str, spec: RunSpec) -> int:
    """The largest value of a toggle that counts something, as far as the model and the units leave room for it."""
    if name in ("blocks", "region"):
        return max(1, spec.model.layers)
    if name == "prefetch":
        return max(1, len(plan_for(spec).units) - 1)
    return MAX_ACCUMULATION if name == "accumulation" else spec.model.positions


def coming_back(chosen: Mapping[str, Any], now: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Of what was `chosen` what others overrule `now` and may leave be once `given` is set: a shard group, which the
    ranks may not be divisible by; and the units, of which a bare count has one, as soon as the model has blocks."""
    has_blocks = not now["model"].layers and bool(given.get("model", now["model"]).layers)
    names = ("shard_ranks", *(("unit", "blocks") if has_blocks else ()))
    return {name: chosen[name] for name in names}


def chosen_after(chosen: Mapping[str, Any], now: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What counts as chosen once `given` was set and all toggles are as `now`: what was overruled stays."""
    keeps_group = "shard_ranks" not in given and chosen.get("shard_ranks") is not None
    names = (*(() if keeps_group else ("shard_ranks",)), *(("unit", "blocks") if now["model"].layers else ()))
    return {**chosen, **{name: now[name] for name in names}}


def settle(wanted: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Bring toggles that were not `given` in line with those that were; what changed, in sentences.

    A toggle that no longer applies goes back to its default; one that no longer fits goes to the nearest that does.
    What was given is left as it is: if it is wrong, RunSpec refuses it.
    """
    model: ModelShape = wanted["model"]
    notes: list[str] = []

    def follow(name: str, value: Any, why: str) -> None:
        if wanted[name] != value and name not in given:
            wanted[name] = value
            if why:
                shown = _shown(name, value)
                notes.append(f"{_CALLED.get(name, name)} is now {shown}: {why}.")

    _settle_implementation(wanted, given, follow)
    strategy: Strategy = wanted["strategy"]
    _settle_groups(wanted, follow)
    if strategy.has_whole_buffer:
        _settle_whole_buffer(wanted, follow)
    if strategy is not Strategy.ZERO1:
        follow("zero1_form", Zero1Form.REDUCE_SCATTER, "")
    if not strategy.shards_param:
        follow("prefetch", 0, f"{strategy.label} gathers nothing ahead")
        if wanted["offload"].moves_params:
            follow("offload", Offload.OPTIMIZER, f"{strategy.label} keeps its parameters whole on the device")
    if not model.layers:
        follow("unit", UnitKind.MODEL, f"{model.name} is a number of parameters, without blocks")
        follow("checkpointing", False, "there are no blocks to recompute")
    if wanted["unit"] is not UnitKind.BLOCK:
        follow("blocks", 1, "")
    elif wanted["blocks"] > max(1, model.layers):
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
    if wanted["no_sync"] is False and strategy in (Strategy.ZERO1, Strategy.MEGATRON_OPTIM):
        follow("no_sync", None, f"{strategy.label} reduces the whole gradient, once a step")
    if wanted["clip_norm"] is not None and wanted["offload"].moves_params:
        if "clip_norm" in given:
            follow("offload", Offload.OPTIMIZER, "gradients are clipped on the device")
        else:
            follow("clip_norm", None, "gradients that lie on the host are not clipped")
    if wanted["grad_dtype"] is wanted["precision"].grad:
        wanted["grad_dtype"] = None  # one way to say a thing: it is the precision's own
    if model.family is Family.GPT2 and wanted["seq"] > model.positions:
        follow("seq", model.positions, f"{model.name} has learned positions for {model.positions} tokens")
    return notes


Follow = Callable[[str, Any, str], None]
"""(toggle, its value, why): see `settle`."""


def _settle_groups(wanted: Mapping[str, Any], follow: Follow) -> None:
    """A shard group divides the ranks, and FSDP1's has two or more; no other strategy has one."""
    ranks, group, impl = wanted["ranks"], wanted["shard_ranks"], wanted["impl"]
    if not wanted["strategy"].replicates:
        follow("shard_ranks", None, "")
    elif group is None:
        follow("shard_ranks", usual_shard_ranks(ranks), "")
    elif ranks >= 1:
        divisors = group_choices(ranks)
        choices = divisors[1:] or divisors if impl is Implementation.FSDP1 else divisors
        if group not in choices:
            nearest = max((number for number in choices if number < group), default=choices[0])
            why = f"{ranks} ranks are not divisible by {group}"
            follow("shard_ranks", nearest, f"{impl.label} has no groups of one rank" if group in divisors else why)


def _settle_whole_buffer(wanted: Mapping[str, Any], follow: Follow) -> None:
    """Fp32 gradients in one buffer on the device, reduced when the backward is done."""
    label = wanted["strategy"].label
    if wanted["precision"] not in WHOLE_BUFFER_PRECISIONS:
        follow("precision", Precision.BF16_FP32GRAD, f"{label} reduces fp32 gradients")
    follow("grad_dtype", None, f"{label} reduces fp32 gradients")
    follow("offload", Offload.NONE, f"{label} keeps its states in one buffer on the device")
    follow("async_reduce", False, f"{label} reduces when the whole backward is done")


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return {"grad_dtype": "the precision's", "clip_norm": "off"}.get(name, "as usual")
    return str(getattr(value, "value", value))


_PLAIN: Mapping[str, Any] = {
    "grad_dtype": None, "checkpointing": False, "offload": Offload.NONE, "accumulation": 1, "clip_norm": None,
    "prefetch": 0, "async_reduce": False, "zero1_form": Zero1Form.REDUCE_SCATTER,
}  # fmt: skip
"""Options of our own code where they are not set."""


def _settle_implementation(wanted: dict[str, Any], given: Mapping[str, Any], follow: Follow) -> None:
    """Strategy and implementation follow each other, whichever was given; the rest follows the implementation."""
    impl: Implementation = wanted["impl"]
    if wanted["strategy"] not in PAIRS[impl]:
        if "impl" in given and PAIRS[impl]:
            follow("strategy", PAIRS[impl][0], f"{impl.label} has no {wanted['strategy'].label}")
        else:
            follow("impl", Implementation.OWN, f"{impl.label} has no {wanted['strategy'].label}")
            impl = wanted["impl"]
    if wanted["precision"] not in PRECISIONS[impl]:
        follow("precision", PRECISIONS[impl][0], f"{impl.label} has no {wanted['precision'].value} here")
    for name, plain in _PLAIN.items():
        if not has_option(impl, name):
            follow(name, plain, f"it is not built here for {impl.label}")
    for name in SETTINGS:
        if not applies(name, wanted):
            follow(name, None, "")
