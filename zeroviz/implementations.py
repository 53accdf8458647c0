"""What an implementation can do of what a spec can ask: the rest is refused, never left out quietly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroviz.errors import SpecError
from zeroviz.precision import Precision
from zeroviz.strategy import Implementation, Strategy

if TYPE_CHECKING:
    from zeroviz.spec import RunSpec

_FSDP2_STRATEGIES = (Strategy.ZERO3, Strategy.SHARD_GRAD_OP)
_FSDP2_PRECISIONS = (Precision.FP32, Precision.BF16)


def check_implementation(spec: RunSpec) -> None:
    """Raise SpecError where `spec.impl` has not got what the spec asks for."""
    if spec.impl is Implementation.FSDP2:
        _check_fsdp2(spec)


def check_predictable(spec: RunSpec) -> None:
    """Raise SpecError for an implementation whose step is not worked out by arithmetic."""
    if spec.impl is not Implementation.OWN:
        raise SpecError(
            f"impl is {spec.impl.value!r}, whose order is its own and not worked out by arithmetic; use "
            f"`zeroviz rehearse --impl {spec.impl.value}`, which runs its code on tensors without memory, or impl own."
        )


def _check_fsdp2(spec: RunSpec) -> None:
    if spec.strategy not in _FSDP2_STRATEGIES:
        raise SpecError(
            f"impl is 'fsdp2' with strategy {spec.strategy.value}, but FSDP2 shards parameters, gradients and "
            "optimizer state together; use zero3 or shard_grad_op, or impl own."
        )
    if spec.precision not in _FSDP2_PRECISIONS:
        raise SpecError(
            f"precision is {spec.precision.value!r} with impl fsdp2, which keeps no master beside its shard, and fp32 "
            "shards gathered as bf16 (its MixedPrecisionPolicy) are not built here yet; use fp32 or bf16, or impl own."
        )
    for name, given, only in (
        ("grad_dtype", spec.grad_dtype.value if spec.grad_dtype else None, None),
        ("checkpointing", str(spec.checkpointing), "none"),
        ("offload", spec.offload.value, "none"),
        ("accumulation", spec.accumulation, 1),
        ("prefetch", spec.prefetch, 0),
        ("async_reduce", spec.async_reduce, False),
    ):
        if given != only:
            raise SpecError(
                f"{name} is {given!r}, which is not built here yet for impl fsdp2; leave it out, or use own."
            )
