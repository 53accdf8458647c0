"""Our own step beside other implementations' steps of the same spec: which pairs, what was measured, and the ratios.

A ratio is worked out in each round, of two steps that followed one another, and the median of the rounds' ratios is
shown: what else the machine does weighs on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median, quantiles
from typing import Any

from zeroviz.errors import SpecError
from zeroviz.implementations import PAIRS
from zeroviz.settings import LIBRARY_DEFAULTS, Settings
from zeroviz.spec import Implementation, RunSpec, Strategy

SCHEMA = "zeroviz.bench/1"
# Those an aim is set for come first; see `docs/decisions.md`.
_FIRST = (Implementation.FSDP2, Implementation.DDP, Implementation.ZERO_REDUNDANCY)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation's figures: bytes of the rank with the largest peak, times of the slowest rank in each round.

    cpu_time_ns: what all ranks' processes worked for a round's step, the backend's threads included: other programs on
    the machine lengthen it little. peak_nbytes: as on NCCL. here_nbytes: what this machine's allocator gave out at
    most. sent_nbytes: in a ring. loss: of the last round's step, the mean of the ranks.
    """

    step_time_ns: tuple[int, ...]
    cpu_time_ns: tuple[int, ...]
    rest_nbytes: int
    peak_nbytes: int
    here_nbytes: int
    sent_nbytes: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Our own code and another's under one strategy. absent: why there is nothing to compare, if there is not; failed:
    it was tried, and broke."""

    strategy: Strategy
    impl: Implementation
    own: Side | None = None
    other: Side | None = None
    absent: str = ""
    failed: bool = False

    @property
    def time_ratios(self) -> tuple[float, ...]:
        """Own over other, a round each."""
        assert self.own is not None and self.other is not None
        return _ratios(self.own.step_time_ns, self.other.step_time_ns)

    @property
    def cpu_ratios(self) -> tuple[float, ...]:
        assert self.own is not None and self.other is not None
        return _ratios(self.own.cpu_time_ns, self.other.cpu_time_ns)


def _ratios(own: Sequence[int], other: Sequence[int]) -> tuple[float, ...]:
    return tuple(ours / theirs for ours, theirs in zip(own, other, strict=True))


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of a pair's ratios, and the quarters on either side of it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError for fewer than two values."""
        if len(values) < 2:
            raise ValueError(f"{len(values)} values have no spread; two or more have.")
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(low, median(values), high)


def pairs_of(
    base: RunSpec,
    impl: Implementation | None = None,
    strategy: Strategy | None = None,
    settings: Settings = LIBRARY_DEFAULTS,
) -> list[tuple[RunSpec, RunSpec] | Pair]:
    """(own, other) for each pair that is wanted and can be; a Pair with its reason for one that cannot.

    base: the step, our own code's; its strategy is not looked at. settings: the other's. SpecError if no pair is left.
    """
    if impl is Implementation.OWN:
        raise SpecError("--impl is 'own', which is one side of every pair; name the other, or leave it out.")
    wanted = [each for each in (*_FIRST, *PAIRS) if each is not Implementation.OWN and impl in (None, each)]
    found: list[tuple[RunSpec, RunSpec] | Pair] = []
    for each in dict.fromkeys(wanted):
        for its in PAIRS[each]:
            if strategy in (None, its):
                found.append(_pair(base, each, its, settings))
    if not found:
        assert impl is not None or strategy is not None
        others = [each for each in PAIRS if each is not Implementation.OWN and strategy in PAIRS[each]]
        has = ", ".join(f"{each.value} {strategy.value}" for each in others) if strategy else ""
        asked = f"{impl.value if impl else 'any'} with strategy {strategy.value if strategy else 'any'}"
        raise SpecError(
            f"impl is {asked}, which is no pair to set beside our own; "
            f"{'there is ' + has if has else 'leave out --strategy'}."
        )
    return found


def _pair(
    base: RunSpec, impl: Implementation, strategy: Strategy, settings: Settings
) -> tuple[RunSpec, RunSpec] | Pair:
    try:
        groups = base.shard_ranks if strategy.replicates else None
        prefetch = base.prefetch if strategy.shards_param else 0
        own = replace(base, strategy=strategy, shard_ranks=groups, prefetch=prefetch)
        other = replace(own, impl=impl, prefetch=0, async_reduce=False, settings=settings)
        # When our own code sends is its own affair. Where gradients are whole anyway, reducing them beside compute, as
        # the libraries do, costs no byte.
        return replace(own, async_reduce=base.async_reduce or strategy in (Strategy.DDP, Strategy.ZERO1)), other
    except SpecError as error:
        return Pair(strategy=strategy, impl=impl, absent=str(error))


def report(spec: RunSpec, num_rounds: int, pairs: Sequence[Pair], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of a whole bench."""
    return {
        "schema": SCHEMA,
        "spec": spec.to_dict(),
        "model": {"name": spec.model.name, "num_params": spec.model.num_params},
        "rounds": num_rounds,
        "environment": dict(environment),
        "pairs": [_pair_to_dict(pair) for pair in pairs],
    }


def _pair_to_dict(pair: Pair) -> dict[str, Any]:
    entry: dict[str, Any] = {"strategy": pair.strategy.value, "own": "own", "other": pair.impl.value}
    if pair.own is None or pair.other is None:
        return entry | {"absent": pair.absent, "failed": pair.failed}
    own, other = pair.own, pair.other
    ratios = {
        "step_time": asdict(Spread.of(pair.time_ratios)),
        "cpu_time": asdict(Spread.of(pair.cpu_ratios)),
        "peak": own.peak_nbytes / other.peak_nbytes,
        "here": own.here_nbytes / other.here_nbytes,
        "sent": own.sent_nbytes / other.sent_nbytes if other.sent_nbytes else None,
    }
    return entry | {"figures": {"own": asdict(own), "other": asdict(other)}, "own_over_other": ratios}
