"""What the tests of exports share: a step by hand, and predictions of every implementation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

from tests.every import settings_of
from zeroviz.collectives import CollectiveOp
from zeroviz.implementations import PAIRS
from zeroviz.models import PRESETS, bare
from zeroviz.spec import Offload, RunSpec, Strategy, UnitKind, UnitPolicy
from zeroviz.trace import Category, Collective, Event, Origin, RankTrace, Trace

TINY, LLAMA = PRESETS["tiny"], PRESETS["tiny-llama"]
SPEC = RunSpec(model=TINY, ranks=3)
BARE = RunSpec(model=bare(7_000_000_001), unit=UnitPolicy(UnitKind.MODEL), ranks=3, strategy=Strategy.ZERO2)
HYBRID = RunSpec(model=LLAMA, strategy=Strategy.HYBRID_SHARD, ranks=6, shard_ranks=3)
OFFLOADED = RunSpec(model=TINY, ranks=3, offload=Offload.PARAMS)
MANY = 4096
CONFIG = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 46, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 10, "intermediate_size": 119, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""A config.json, with sizes that nothing divides."""

# A step by hand, of sizes that nothing divides: 101 + 203 at rest, 199 gathered, 57 kept.
STEP = (
    Event("forward", "unshard", "block 0", Category.UNSHARDED_PARAM, 199),
    Event("forward", "forward", "block 0", Category.ACTIVATION, 57),
    Event("backward", "backward", "block 0", Category.ACTIVATION, -57),
    Event("backward", "reshard", "block 0", Category.UNSHARDED_PARAM, -199),
)
CALL = Collective(CollectiveOp.ALL_GATHER, "fp32", 3, 199, "forward", "block 0")
RANK = RankTrace(
    rank=0, rest={Category.SHARDED_PARAM: 101, Category.OPTIMIZER_STATE: 203}, events=STEP, collectives=(CALL,),
    step_counter_nbytes=8,
)  # fmt: skip
MORE = replace(RANK, rest={**RANK.rest, Category.SHARDED_PARAM: 103})


def trace(*ranks: RankTrace, origin: Origin = Origin.PREDICTED, **environment: str) -> Trace:
    """Ranks 0, 1, ... of `SPEC`."""
    return Trace(origin, SPEC, tuple(replace(rank, rank=number) for number, rank in enumerate(ranks)), environment)


def live(*ranks: RankTrace) -> Trace:
    """The same, measured."""
    return trace(*ranks, origin=Origin.LIVE, backend="gloo")


def every_pair() -> Iterator[RunSpec]:
    """Each implementation with each of its strategies, on three ranks or two groups of two, the two models in turn."""
    models = cycle((TINY, LLAMA))
    for impl, strategies in PAIRS.items():
        for strategy in strategies:
            ranks = 4 if strategy.replicates else 3
            yield RunSpec(model=next(models), impl=impl, ranks=ranks, **settings_of(strategy, ranks))


PAIRED = [*every_pair(), BARE, HYBRID, OFFLOADED]


def name(spec: RunSpec) -> str:
    """For pytest."""
    return f"{spec.impl.value} {spec.strategy.value} {spec.model.name} {spec.offload.value}"
