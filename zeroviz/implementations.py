"""What an implementation can do of what a spec can ask: the rest is refused, never left out quietly.

`PAIRS` is the table of all pairs; each implementation's own restrictions are a function below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zeroviz.errors import SpecError
from zeroviz.precision import Precision
from zeroviz.settings import check_settings
from zeroviz.strategy import Implementation, Strategy

if TYPE_CHECKING:
    from zeroviz.spec import RunSpec

PAIRS: Mapping[Implementation, tuple[Strategy, ...]] = {
    Implementation.OWN: tuple(Strategy),
    Implementation.DDP: (Strategy.DDP,),
    Implementation.ZERO_REDUNDANCY: (Strategy.ZERO1,),
    Implementation.FSDP1: (Strategy.ZERO3, Strategy.SHARD_GRAD_OP, Strategy.DDP),
    Implementation.FSDP2: (Strategy.ZERO3, Strategy.SHARD_GRAD_OP),
    Implementation.DEEPSPEED: (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3),
    Implementation.MEGATRON: (),
}
_FSDP2_PRECISIONS = (Precision.FP32, Precision.BF16)
_TORCH_PRECISIONS = (Precision.FP32, Precision.BF16)


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
        return
    if spec.impl is Implementation.FSDP2:
        _check_precision(spec, _FSDP2_PRECISIONS)
    else:
        _check_precision(spec, _TORCH_PRECISIONS)
    _check_plain(spec)


def not_predicted(spec: RunSpec) -> str:
    """Why a step is not worked out by arithmetic, and what to do."""
    instead = "zeroviz rehearse" if spec.impl is Implementation.FSDP2 else "zeroviz run"
    return (
        f"impl is {spec.impl.value!r}, whose order is its own and not worked out by arithmetic; use "
        f"`{instead} --impl {spec.impl.value}`, or impl own."
    )


def _check_precision(spec: RunSpec, allowed: tuple[Precision, ...]) -> None:
    if spec.precision not in allowed:
        names = " or ".join(precision.value for precision in allowed)
        raise SpecError(
            f"precision is {spec.precision.value!r} with impl {spec.impl.value}, where it is not built here; use "
            f"{names}, or impl own."
        )


def _check_plain(spec: RunSpec, *had: str) -> None:
    """Refuse every option of our own that has no counterpart here, but those in `had`."""
    for name, given, only in (
        ("grad_dtype", spec.grad_dtype.value if spec.grad_dtype else None, None),
        ("checkpointing", str(spec.checkpointing), "none"),
        ("offload", spec.offload.value, "none"),
        ("accumulation", spec.accumulation, 1),
        ("prefetch", spec.prefetch, 0),
        ("async_reduce", spec.async_reduce, False),
    ):
        if given != only and name not in had:
            raise SpecError(
                f"{name} is {given!r}, which is not built here yet for impl {spec.impl.value}; leave it out, or use "
                "own."
            )
