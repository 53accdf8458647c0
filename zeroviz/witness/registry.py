"""Which implementations are worked out by arithmetic: for each what every rank holds, does and sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zeroviz.rank_trace import RankTrace
from zeroviz.spec import Implementation, RunSpec

PREDICTED: Mapping[Implementation, Callable[[RunSpec], Sequence[RankTrace]]] = {}
"""The ranks of a spec, rank by rank or in stretches of alike ones (`AlikeRanks`)."""
