"""A spec as the command line that asks for it: what a message offers can be pasted."""

from __future__ import annotations

from zeroviz.models import PRESETS
from zeroviz.spec import RunSpec, UnitPolicy

CONFIG = "CONFIG.json"
"""Stands for the file of a model that is no preset: a spec does not know where it was read from."""


def command_line(verb: str, spec: RunSpec) -> str:
    """`zeroviz rehearse --model llama3-70b --strategy zero3 --ranks 1024`.

    Model, strategy and ranks always; of the rest what is not the command line's default.
    """
    plain = RunSpec(model=spec.model, unit=UnitPolicy.parse("model"))
    options: dict[str, object] = {
        "model": spec.model.name if PRESETS.get(spec.model.name) == spec.model else CONFIG,
        "strategy": spec.strategy.value,
        "ranks": spec.ranks,
    }
    values: dict[str, tuple[object, object]] = {
        "shard-ranks": (spec.shard_ranks, None),
        "impl": (spec.impl.value, plain.impl.value),
        "precision": (spec.precision.value, plain.precision.value),
        "unit": (str(spec.unit), str(UnitPolicy())),
        "batch": (spec.batch, plain.batch),
        "seq": (spec.seq, plain.seq),
        "optimizer": (spec.optimizer.value, plain.optimizer.value),
        "grad-dtype": (spec.grad_dtype.value if spec.grad_dtype else None, None),
        "checkpointing": (str(spec.checkpointing), str(plain.checkpointing)),
        "offload": (spec.offload.value, plain.offload.value),
        "accumulation": (spec.accumulation, plain.accumulation),
        "no-sync": (spec.no_sync, None),
        "clip-norm": (spec.clip_norm, None),
        "zero1-form": (spec.zero1_form.value, plain.zero1_form.value),
        "prefetch": (spec.prefetch, plain.prefetch),
        "async-reduce": (spec.async_reduce, plain.async_reduce),
        "steps": (spec.steps, plain.steps),
        "seed": (spec.seed, plain.seed),
    }
    options |= {name: value for name, (value, default) in values.items() if value != default}
    options |= {name.replace("_", "-"): value for name, value in spec.settings.to_dict().items()}
    words = [f"--{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
    return " ".join(["zeroviz", verb, *words])
