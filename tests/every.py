"""What every strategy needs and has, for tests that go through all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

from zeroviz.precision import OWN_PRECISIONS, WHOLE_BUFFER_PRECISIONS
from zeroviz.spec import Offload, Precision, Strategy
from zeroviz.toggles import usual_shard_ranks

T = TypeVar("T")
U = TypeVar("U")


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


def crossed(first: Sequence[T], second: Sequence[U]) -> list[tuple[T, U]]:
    """Every value of each, in turns: (a0, b0), (a1, b1), (a0, b2), ... With ZEROVIZ_WHOLE_GRID set each with each."""
    if os.environ.get("ZEROVIZ_WHOLE_GRID"):
        return list(product(first, second))
    return [(first[i % len(first)], second[i % len(second)]) for i in range(max(len(first), len(second)))]
