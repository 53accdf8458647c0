"""Which implementations are worked out by arithmetic: for each what every rank holds, does and sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zeroviz.rank_trace import RankTrace
from zeroviz.spec import Implementation, RunSpec
from zeroviz.witness import ddp, deepspeed, fsdp1, fsdp2, megatron, zero_redundancy

PREDICTED: Mapping[Implementation, Callable[[RunSpec], Sequence[RankTrace]]] = {
    Implementation.DDP: ddp.predicted,
    Implementation.ZERO_REDUNDANCY: zero_redundancy.predicted,
    Implementation.DEEPSPEED: deepspeed.predicted,
    Implementation.MEGATRON: megatron.predicted,
    Implementation.FSDP1: fsdp1.predicted,
    Implementation.FSDP2: fsdp2.predicted,
}
"""The ranks of a spec, rank by rank or in stretches of alike ones (`AlikeRanks`)."""
