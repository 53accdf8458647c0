"""What every strategy needs, for tests that go through all of them."""

from __future__ import annotations

from typing import Any

from zeroviz.precision import WHOLE_BUFFER_PRECISIONS
from zeroviz.spec import Precision, Strategy
from zeroviz.toggles import usual_shard_ranks


def settings_of(strategy: Strategy, ranks: int) -> dict[str, Any]:
    """`strategy` for a RunSpec of `ranks` ranks; hybrid_shard in two groups, or in one where N is prime or 1."""
    return {"strategy": strategy, "shard_ranks": usual_shard_ranks(ranks) if strategy.replicates else None}


def exists(strategy: Strategy, precision: Precision) -> bool:
    """Whether our own implementation has the pair: one buffer for all gradients is of fp32."""
    return not strategy.has_whole_buffer or precision in WHOLE_BUFFER_PRECISIONS
