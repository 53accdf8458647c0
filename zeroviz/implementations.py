"""What an implementation can do of what a spec can ask: the rest is refused, never left out quietly.

`PAIRS` is the table of all pairs; each implementation's own restrictions are a function below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zeroviz.errors import SpecError
from zeroviz.models import Family
from zeroviz.precision import OWN_PRECISIONS, Optimizer, Precision
from zeroviz.settings import check_settings
from zeroviz.strategy import Implementation, Strategy

if TYPE_CHECKING:
    from zeroviz.spec import RunSpec

PAIRS: Mapping[Implementation, tuple[Strategy, ...]] = {
    Implementation.OWN: tuple(Strategy),
    Implementation.DDP: (Strategy.DDP,),
    Implementation.ZERO_REDUNDANCY: (Strategy.ZERO1,),
    Implementation.FSDP1: (Strategy.ZERO3, Strategy.SHARD_GRAD_OP, Strategy.DDP, Strategy.HYBRID_SHARD),
    Implementation.FSDP2: (Strategy.ZERO3, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD),
    Implementation.DEEPSPEED: (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3),
    Implementation.MEGATRON: (Strategy.MEGATRON_OPTIM,),
}
PRECISIONS: Mapping[Implementation, tuple[Precision, ...]] = {
    Implementation.OWN: OWN_PRECISIONS,
    Implementation.DDP: (Precision.FP32, Precision.BF16),
    Implementation.ZERO_REDUNDANCY: (Precision.FP32, Precision.BF16),
    Implementation.FSDP1: (Precision.FP32, Precision.BF16, Precision.FSDP_MIXED),
    Implementation.FSDP2: (Precision.FP32, Precision.BF16, Precision.FSDP_MIXED),
    Implementation.DEEPSPEED: (Precision.FP32, Precision.BF16_MIXED, Precision.BF16_FP32GRAD),
    Implementation.MEGATRON: (Precision.FP32, Precision.BF16_FP32GRAD),
}
WITHOUT_UNITS = (
    Implementation.DDP, Implementation.ZERO_REDUNDANCY, Implementation.DEEPSPEED, Implementation.MEGATRON,
)  # fmt: skip
"""Those that work in buckets, parameters or one buffer, whatever the spec's units are."""
_BARE = (Implementation.OWN, Implementation.FSDP1)
"""Those that are worked out for a bare parameter count: they need no order of layers."""
_HAD: Mapping[Implementation, tuple[str, ...]] = {
    Implementation.DDP: ("accumulation",),
    Implementation.DEEPSPEED: ("accumulation",),
    Implementation.FSDP2: ("accumulation",),
    Implementation.MEGATRON: ("accumulation", "clip_norm"),
    Implementation.ZERO_REDUNDANCY: ("accumulation",),
}
"""Options of our own that it has too: see `_check_plain`."""


_OWN_OPTIONS = (
    "grad_dtype", "checkpointing", "region", "offload", "accumulation", "clip_norm", "prefetch", "async_reduce",
    "zero1_form",
)  # fmt: skip


def has_option(impl: Implementation, name: str) -> bool:
    """Whether `impl` has an option of a step that our own code has; true of what every code has."""
    return impl is Implementation.OWN or name not in _OWN_OPTIONS or name in _HAD.get(impl, ())


def can_rehearse(impl: Implementation) -> bool:
    """Whether its code runs on tensors without memory: `zeroviz rehearse`."""
    return impl in (Implementation.OWN, Implementation.FSDP2)


def implementations_of(strategy: Strategy) -> tuple[Implementation, ...]:
    """Those that have `strategy`."""
    return tuple(impl for impl, strategies in PAIRS.items() if strategy in strategies)


def check_implementation(spec: RunSpec) -> None:
    """Raise SpecError where `spec.impl` has not got what the spec asks for."""
    check_settings(spec.settings, spec.impl)
    if spec.strategy not in PAIRS[spec.impl]:
        has = " and ".join(strategy.value for strategy in PAIRS[spec.impl]) or "nothing yet"
        others = " or ".join(impl.value for impl in implementations_of(spec.strategy))
        raise SpecError(
            f"impl is {spec.impl.value!r} with strategy {spec.strategy.value}, but {spec.impl.label} has {has} here; "
            f"for {spec.strategy.value} use impl {others}."
        )
    if spec.impl is Implementation.OWN:
        _check_held_as_computed(spec)
        return
    if spec.model.family is Family.BARE and spec.impl not in _BARE:
        raise SpecError(
            f"impl is {spec.impl.value!r} with a bare parameter count, of whose layers nothing is known; name a model, "
            "or use impl own."
        )
    if spec.model.layers and not spec.model.family.runs:
        raise SpecError(
            f"impl is {spec.impl.value!r} with {spec.model.name}, a {spec.model.family.label} model; that family is "
            "worked out for our own code only, so use impl own."
        )
    _check_precision(spec)
    if spec.impl is Implementation.FSDP2:
        _check_reshard_ranks(spec)
    elif spec.impl is Implementation.MEGATRON:
        _check_optimizer(spec, Optimizer.ADAMW, Optimizer.ADAMW_FOREACH)
    elif spec.impl is Implementation.DEEPSPEED:
        _check_stage(spec)
    elif spec.impl is Implementation.FSDP1:
        _check_shard_group(spec)
    _check_plain(spec, *_HAD.get(spec.impl, ()))


def _check_precision(spec: RunSpec) -> None:
    if spec.precision not in PRECISIONS[spec.impl]:
        names = " or ".join(precision.value for precision in PRECISIONS[spec.impl])
        raise SpecError(
            f"precision is {spec.precision.value!r} with impl {spec.impl.value}, where it is not built here; use "
            f"{names}, or impl own."
        )


def _check_held_as_computed(spec: RunSpec) -> None:
    if spec.precision is Precision.FSDP_MIXED:
        raise SpecError(
            "precision is 'fsdp-mixed' with impl own, which holds parameters in the dtype that it computes with; use "
            "impl fsdp1 or fsdp2, or precision bf16-mixed, which keeps an fp32 master beside them."
        )


def _check_reshard_ranks(spec: RunSpec) -> None:
    given, ranks = spec.settings.reshard_ranks, spec.ranks
    if given is None:
        return
    if spec.strategy is not Strategy.ZERO3:
        raise SpecError(
            f"reshard_ranks is {given} with strategy {spec.strategy.value}; it says among how many ranks zero3 leaves "
            "a unit after its forward, and can be set for zero3 only."
        )
    inside = [number for number in range(2, ranks) if ranks % number == 0]
    if given not in inside:
        use = f"use {' or '.join(map(str, inside))}" if inside else "with these ranks there is none, leave it out"
        raise SpecError(
            f"reshard_ranks is {given} with ranks {ranks}; it must divide them and lie between: 1 is strategy "
            f"shard_grad_op, and {ranks} is zero3 without it; {use}."
        )


def _check_stage(spec: RunSpec) -> None:
    """What a stage of DeepSpeed's does not do, or does not look at."""
    if spec.strategy is Strategy.DDP and spec.precision is Precision.BF16_FP32GRAD:
        raise SpecError(
            "precision is 'bf16-fp32grad' with impl deepspeed and strategy ddp, its stage 0, which has no fp32 "
            "gradients of bf16 parameters; use zero1, zero2 or zero3, or precision bf16-mixed."
        )
    if spec.no_sync is not None and spec.no_sync is spec.strategy.shards_grad:
        when = "in every micro-batch" if spec.strategy.shards_grad else "in the last micro-batch"
        raise SpecError(
            f"no_sync is {str(spec.no_sync).lower()} with impl deepspeed and strategy {spec.strategy.value}, which "
            f"always reduces {when}; leave no_sync out."
        )
    for name, has in (
        ("bucket_numel", spec.strategy is not Strategy.DDP and not _reduces_whole(spec)),
        ("persistence_numel", spec.strategy is Strategy.ZERO3),
    ):
        if name in spec.settings.given and not has:
            raise SpecError(
                f"{name} is {getattr(spec.settings, name)} with impl deepspeed, strategy {spec.strategy.value} and "
                f"precision {spec.precision.value}, which does not look at it; leave it out, or use zero3."
            )


def _reduces_whole(spec: RunSpec) -> bool:
    """DeepSpeed's stage 1 of bf16 parameters with fp32 gradients, an optimizer of its own without buckets."""
    return spec.strategy is Strategy.ZERO1 and spec.precision is Precision.BF16_FP32GRAD


def _check_optimizer(spec: RunSpec, *allowed: Optimizer) -> None:
    if spec.optimizer not in allowed:
        names = " or ".join(optimizer.value for optimizer in allowed)
        raise SpecError(
            f"optimizer is {spec.optimizer.value!r} with impl {spec.impl.value}, which shards AdamW only; use {names}, "
            "or impl own."
        )


def _check_shard_group(spec: RunSpec) -> None:
    if spec.shard_ranks == 1 < spec.ranks:
        raise SpecError(
            "shard_ranks is 1 with impl fsdp1, which in a shard group of one rank leaves out the sum over the "
            "replicas, so that they train apart; use 2 or more, or strategy ddp."
        )


def _check_plain(spec: RunSpec, *had: str) -> None:
    """Refuse every option of our own that has no counterpart here, but those in `had`."""
    for name, given, only in (
        ("grad_dtype", spec.grad_dtype.value if spec.grad_dtype else None, None),
        ("checkpointing", str(spec.checkpointing), "none"),
        ("offload", spec.offload.value, "none"),
        ("accumulation", spec.accumulation, 1),
        ("clip_norm", spec.clip_norm, None),
        ("prefetch", spec.prefetch, 0),
        ("async_reduce", spec.async_reduce, False),
        ("zero1_form", spec.zero1_form.value, "reduce-scatter"),
    ):
        if given != only and name not in had:
            shown = repr(given).lower() if isinstance(given, bool) else repr(given)
            raise SpecError(
                f"{name} is {shown}, which is not built here yet for impl {spec.impl.value}; leave it out, or use own."
            )
