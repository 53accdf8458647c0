"""What every strategy needs and has, for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zeroviz.precision import OWN_PRECISIONS, WHOLE_BUFFER_PRECISIONS
from zeroviz.spec import Offload, Precision, Strategy
from zeroviz.toggles import usual_shard_ranks


def settings_of(strategy: Strategy, ranks: int) -> dict[str, Any]:
    """`strategy` for a RunSpec of `ranks` ranks; hybrid_shard in two or more groups, in one where N is prime or 1."""
    return {"strategy": strategy, "shard_ranks": usual_shard_ranks(ranks) if strategy.replicates else None}


def exists(
    strategy: Strategy, precision: Precision = Precision.FP32, settings: Mapping[str, Any] | None = None
) -> bool:
    """Whether our own implementation has it: a buffer for all gradients is fp32, on the device, reduced at the end."""
    given = settings or {}
    if not strategy.has_whole_buffer:
        return True
    plain = given.get("offload", Offload.NONE) is Offload.NONE and not given.get("grad_dtype")
    return precision in WHOLE_BUFFER_PRECISIONS and plain and not given.get("async_reduce")


def pairs(precisions: Iterable[Precision] = OWN_PRECISIONS) -> list[tuple[Strategy, Precision]]:
    """Every strategy with every recipe that it has."""
    return [(strategy, precision) for precision in precisions for strategy in Strategy if exists(strategy, precision)]
