"""The spec options of the command line: the same for every command, one sentence for every refusal."""

from __future__ import annotations

import argparse
import os.path
from enum import Enum
from pathlib import Path
from typing import Any

from zeroviz.errors import SpecError
from zeroviz.hf_config import read_config_notes
from zeroviz.models import PRESETS, Family, ModelShape, bare
from zeroviz.quantity import parse_count
from zeroviz.settings import SETTINGS, Settings
from zeroviz.spec import (
    Checkpointing,
    DType,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitKind,
    UnitPolicy,
    Zero1Form,
    parse_enum,
    preset,
)

DEFAULT_MODEL = "tiny"
_METAVAR = {bool: "BOOL", int: "K", DType: "D"}


def add_spec_options(parser: argparse.ArgumentParser) -> None:
    """Add every spec option to `parser`. Values stay text; `spec_from_args` turns them into a RunSpec."""
    group = parser.add_argument_group("the training step")

    def option(name: str, metavar: str, text: str) -> None:
        group.add_argument(name, metavar=metavar, help=text)

    option("--model", "NAME|FILE", f"{', '.join(PRESETS)}, or the path of a config.json (default {DEFAULT_MODEL})")
    option("--params", "COUNT", "a bare parameter count instead of a model, such as 7e9 or 7B; arithmetic only")
    option("--strategy", "S", f"{_values(Strategy)} (default zero3)")
    option("--impl", "I", f"{_values(Implementation)} (default own)")
    option("--ranks", "N", "number of ranks (default 2)")
    option("--shard-ranks", "G", "ranks of a shard group; hybrid_shard only, which needs it")
    option("--precision", "P", f"{_values(Precision)} (default fp32)")
    option(
        "--unit",
        "U",
        "model, block, block:K (K blocks), layer, or numel:K (whole layers until a unit has K elements); default "
        "block, or model with --params",
    )
    option("--batch", "B", f"sequences on each rank (default {RunSpec.batch})")
    option("--seq", "T", f"tokens in a sequence (default {RunSpec.seq})")
    option("--optimizer", "O", f"{_values(Optimizer)} (default adamw)")
    option("--grad-dtype", "D", "fp32 or bf16: the gradient's dtype, instead of the precision's own")
    option("--checkpointing", "C", "none, block or block:K: recompute each K blocks in backward (default none)")
    option("--offload", "O", f"{_values(Offload)}: what lies in the host's memory (default none)")
    option("--accumulation", "K", "micro-batches a step, each of --batch sequences (default 1)")
    option("--no-sync", "BOOL", "reduce gradients in the last micro-batch only (default: what the strategy does)")
    option("--clip-norm", "X", "scale the mean gradient down where its norm exceeds this (default: it is left alone)")
    option("--reshard-after-forward", "BOOL", "true frees a unit after its forward; false is shard_grad_op")
    option("--prefetch", "K", "units gathered ahead of the one in use, where parameters are sharded (default 0)")
    option(
        "--async-reduce",
        "BOOL",
        "reduce a gradient during the next backward, gather updated parameters during the next update (default false)",
    )
    option("--zero1-form", "F", f"{_values(Zero1Form)}; zero1 only (default reduce-scatter)")
    option("--steps", "K", "training steps of a live run, at least 2 (default 3)")
    option("--seed", "K", "seed of a live run's weights and data (default 0)")
    others = parser.add_argument_group("settings of other implementations")
    for name, setting in SETTINGS.items():
        where = ", ".join(f"{impl.value}'s {library}" for impl, library in setting.library.items())
        others.add_argument(_flag(name), metavar=_METAVAR.get(setting.kind, "X"), help=f"{setting.text}: {where}")


def spec_options() -> list[str]:
    """The names that `add_spec_options` gives to what it adds."""
    parser = argparse.ArgumentParser(add_help=False)
    add_spec_options(parser)
    return list(vars(parser.parse_args([])))


def spec_from_args(args: argparse.Namespace) -> RunSpec:
    """The RunSpec the options ask for. Raises SpecError with one sentence for the first option that is wrong.

    What a config.json did not say is left in `args.notes`, in sentences.
    """
    model = _model(args)
    default_unit = UnitKind.MODEL if model.family is Family.BARE else UnitKind.BLOCK
    return RunSpec(
        model=model,
        strategy=_strategy(args),
        impl=parse_enum(Implementation, _text(args, "impl", Implementation.OWN), "--impl"),
        ranks=_whole(args, "ranks", 2),
        shard_ranks=None if args.shard_ranks is None else _whole(args, "shard_ranks", 1),
        precision=parse_enum(Precision, _text(args, "precision", Precision.FP32), "--precision"),
        unit=UnitPolicy.parse(_text(args, "unit", default_unit)),
        batch=_whole(args, "batch", RunSpec.batch),
        seq=_whole(args, "seq", RunSpec.seq),
        optimizer=parse_enum(Optimizer, _text(args, "optimizer", Optimizer.ADAMW), "--optimizer"),
        grad_dtype=None if args.grad_dtype is None else _member(DType, args.grad_dtype, "grad_dtype"),
        checkpointing=Checkpointing.parse(args.checkpointing or "none"),
        offload=parse_enum(Offload, _text(args, "offload", Offload.NONE), "--offload"),
        accumulation=_whole(args, "accumulation", 1),
        no_sync=None if args.no_sync is None else _boolean(args, "no_sync"),
        clip_norm=_number(args, "clip_norm"),
        zero1_form=parse_enum(Zero1Form, _text(args, "zero1_form", Zero1Form.REDUCE_SCATTER), "--zero1-form"),
        prefetch=_whole(args, "prefetch", 0),
        async_reduce=_boolean(args, "async_reduce"),
        settings=_settings(args),
        steps=_whole(args, "steps", 3),
        seed=_whole(args, "seed", 0),
    )


def _strategy(args: argparse.Namespace) -> Strategy:
    """--reshard-after-forward is FSDP's name for the difference between two strategies."""
    strategy = parse_enum(Strategy, _text(args, "strategy", Strategy.ZERO3), "--strategy")
    if args.reshard_after_forward is None:
        return strategy
    reshards = _boolean(args, "reshard_after_forward")
    if not strategy.shards_param:
        raise SpecError(
            f"--reshard-after-forward is {args.reshard_after_forward} with strategy {strategy.value}, which keeps its "
            "parameters whole; it can be set for zero3 and shard_grad_op only."
        )
    if strategy.replicates:
        raise SpecError(
            f"--reshard-after-forward is {args.reshard_after_forward} with strategy {strategy.value}, which always "
            "does; it can be set for zero3 and shard_grad_op only."
        )
    if args.strategy is not None and reshards is not strategy.reshards_after_forward:
        other = Strategy.ZERO3 if reshards else Strategy.SHARD_GRAD_OP
        raise SpecError(
            f"--reshard-after-forward is {args.reshard_after_forward} with --strategy {strategy.value}; "
            f"that is --strategy {other.value}."
        )
    return Strategy.ZERO3 if reshards else Strategy.SHARD_GRAD_OP


def _settings(args: argparse.Namespace) -> Settings:
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if (text := getattr(args, name)) is None:
            continue
        if setting.kind is bool:
            values[name] = _boolean(args, name)
        else:
            values[name] = _whole(args, name, 1) if setting.kind is int else _member(setting.kind, text, name)
    return Settings(**values)


def _member(kind: type[Enum], text: str, name: str) -> Any:
    """A member of `kind`; of dtypes those that a gradient may have."""
    if kind is DType and text not in (allowed := [DType.FP32.value, DType.BF16.value]):
        raise SpecError(f"{_flag(name)} is {text!r}; allowed are {' and '.join(allowed)}.")
    return parse_enum(kind, text, _flag(name))


def _model(args: argparse.Namespace) -> ModelShape:
    if args.params is not None:
        if args.model is not None:
            raise SpecError(f"Both --model {args.model} and --params {args.params} were given; give one of the two.")
        return bare(parse_count(args.params, "--params"))
    name: str = DEFAULT_MODEL if args.model is None else args.model
    if name not in PRESETS and ("/" in name or name.endswith(".json") or os.path.exists(name)):
        model, args.notes = read_config_notes(Path(name))
        return model
    return preset(name)


def _text(args: argparse.Namespace, name: str, default: Enum) -> str:
    given: str | None = getattr(args, name)
    return str(default.value) if given is None else given


def _whole(args: argparse.Namespace, name: str, default: int) -> int:
    """A whole number; its range is RunSpec's to check."""
    text: str | None = getattr(args, name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"{_flag(name)} is {text!r}; it must be a whole number, such as {default or 1}.") from None


def _number(args: argparse.Namespace, name: str) -> float | None:
    """A number, if it was given; its range is RunSpec's to check."""
    text: str | None = getattr(args, name)
    try:
        return None if text is None else float(text)
    except ValueError:
        raise SpecError(f"{_flag(name)} is {text!r}; it must be a number, such as 1.0.") from None


def _boolean(args: argparse.Namespace, name: str) -> bool:
    text: str | None = getattr(args, name)
    if text not in (None, "true", "false"):
        raise SpecError(f"{_flag(name)} is {text!r}; it must be true or false.")
    return text == "true"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _values(kind: type[Enum]) -> str:
    return ", ".join(str(member.value) for member in kind)
