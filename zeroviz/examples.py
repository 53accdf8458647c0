"""Named states of the explorer: the classic questions, each as the toggles that ask it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroviz.models import PRESETS, bare
from zeroviz.precision import Precision
from zeroviz.spec import Strategy, UnitKind

_MIXED: Mapping[str, Any] = {"precision": Precision.BF16_MIXED}

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "four ranks, to run here": {},
    "the same without sharding": {"strategy": Strategy.DDP},
    "GPT-2 on this machine": {"model": PRESETS["gpt2"], "ranks": 2, "seq": 128},
    "7.5B on 64 GPUs (ZeRO paper)": {
        **_MIXED, "model": bare(7_500_000_000), "unit": UnitKind.MODEL, "ranks": 64,
    },
    "7B on 8 GPUs": {**_MIXED, "model": PRESETS["llama2-7b"], "ranks": 8, "seq": 4096},
    "70B on 8 GPUs": {**_MIXED, "model": PRESETS["llama3-70b"], "ranks": 8, "seq": 4096, "checkpointing": True},
    "70B on 1,024 GPUs": {**_MIXED, "model": PRESETS["llama3-70b"], "ranks": 1024, "seq": 4096, "checkpointing": True},
    "70B in groups of 8": {
        **_MIXED, "model": PRESETS["llama3-70b"], "strategy": Strategy.HYBRID_SHARD, "ranks": 64, "shard_ranks": 8,
        "seq": 4096, "checkpointing": True,
    },
}  # fmt: skip
"""What differs from a new explorer's toggles. Rajbhandari et al., arXiv 1910.02054, Figure 1, has 7.5B on 64."""
