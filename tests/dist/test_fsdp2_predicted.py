"""FSDP2 by arithmetic against torch's own code: every event of a rehearsed step, in order, and rest, wire and padding.

A rehearsal needs no ranks, so a grid is quick; that it is the live run is tests/dist/test_fsdp2.py and
tests/dist/test_fsdp2_options.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.rehearse import rehearse
from tests.dist.test_rehearse import assert_same_events
from tests.every import crossed
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import DType, Implementation, Optimizer, Precision, RunSpec, Settings, Strategy, UnitPolicy

MODELS = {
    "tiny": PRESETS["tiny"],
    "tiny-llama": PRESETS["tiny-llama"],
    "untied, no biases": replace(
        PRESETS["tiny"], heads=1, kv_heads=1, head_dim=55, attention_bias=False, mlp_bias=False, tied=False
    ),
    "llama, tied": replace(PRESETS["tiny-llama"], tied=True),
    "llama, grouped, biases": replace(
        PRESETS["tiny-llama"], heads=4, kv_heads=2, head_dim=14, attention_bias=True, mlp_bias=True
    ),
}
UNITS = ["model", "block", "block:2", "layer"]
RANKS = (1, 2, 3, 4, 5, 8)
OPTIMIZERS = [optimizer for optimizer in Optimizer if optimizer.runs]
FP32_SUMS, BF16_SUMS = Settings(reduce_dtype=DType.FP32), Settings(reduce_dtype=DType.BF16)
MIXED = Precision.FSDP_MIXED
HYBRID = {"strategy": Strategy.HYBRID_SHARD}

OPTIONS: list[dict[str, Any]] = [
    {"precision": MIXED, "ranks": 1},
    {"precision": MIXED, "ranks": 1, "settings": FP32_SUMS},
    {"precision": MIXED, "ranks": 3},
    {"precision": MIXED, "ranks": 3, "settings": FP32_SUMS},
    {"precision": MIXED, "ranks": 5, "settings": BF16_SUMS, "strategy": Strategy.SHARD_GRAD_OP},
    {"precision": Precision.BF16, "ranks": 3, "settings": FP32_SUMS},
    {"ranks": 3, "settings": BF16_SUMS},
    {"ranks": 4, "settings": Settings(reshard_ranks=2)},
    {"ranks": 6, "settings": Settings(reshard_ranks=3, reduce_dtype=DType.FP32), "precision": MIXED},
    {"ranks": 4, "shard_ranks": 2, **HYBRID},
    {"ranks": 6, "shard_ranks": 3, "precision": MIXED, "settings": FP32_SUMS, **HYBRID},
    {"ranks": 6, "shard_ranks": 2, "precision": MIXED, **HYBRID},
    {"ranks": 3, "shard_ranks": 1, **HYBRID},
    {"ranks": 3, "shard_ranks": 3, **HYBRID},
    {"ranks": 2, "accumulation": 2},
    {"ranks": 3, "accumulation": 3, "no_sync": True},
    {"ranks": 1, "accumulation": 2, "no_sync": True},
    {"ranks": 3, "accumulation": 2, "precision": MIXED, "settings": FP32_SUMS},
    {"ranks": 3, "accumulation": 3, "precision": MIXED, "settings": FP32_SUMS, "no_sync": True},
    {"ranks": 3, "accumulation": 2, "precision": MIXED, "no_sync": True, "strategy": Strategy.SHARD_GRAD_OP},
    {"ranks": 4, "accumulation": 2, "shard_ranks": 2, **HYBRID},
    {"ranks": 4, "accumulation": 2, "shard_ranks": 2, "precision": MIXED, **HYBRID},
    {"ranks": 4, "accumulation": 2, "settings": Settings(reshard_ranks=2)},
]


def assert_as_rehearsed(spec: RunSpec) -> None:
    predicted, rehearsed = predict(spec).ranks, rehearse(spec).ranks
    assert len(predicted) == len(rehearsed) == spec.ranks
    for got, want in zip(predicted, rehearsed, strict=True):
        assert_same_events(got, want, (spec, got.rank))
        assert dict(got.rest) == dict(want.rest)
        assert got.collectives == want.collectives


@pytest.mark.parametrize("strategy", [Strategy.ZERO3, Strategy.SHARD_GRAD_OP])
@pytest.mark.parametrize(("name", "precision"), crossed(list(MODELS), [Precision.FP32, Precision.BF16]))
def test_every_event_is_as_predicted(name: str, strategy: Strategy, precision: Precision) -> None:
    """All units; numbers of ranks, shapes of batches and optimizers go round so that all of them meet."""
    place = list(MODELS).index(name) + 2 * (strategy is Strategy.ZERO3) + (precision is Precision.FP32)
    for turn, unit in enumerate(UNITS):
        assert_as_rehearsed(
            RunSpec(
                model=MODELS[name],
                impl=Implementation.FSDP2,
                strategy=strategy,
                precision=precision,
                unit=UnitPolicy.parse(unit),
                ranks=RANKS[(place + turn) % len(RANKS)],
                optimizer=OPTIMIZERS[(place + turn) % len(OPTIMIZERS)],
                batch=1 + turn % 2,
                seq=(17, 3, 40)[(place + turn) % 3],
            )
        )


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_every_option_is_as_predicted(number: int) -> None:
    for turn in range(2 if number % 2 else 1):
        assert_as_rehearsed(
            RunSpec(
                model=list(MODELS.values())[(number + 3 * turn) % len(MODELS)],
                impl=Implementation.FSDP2,
                unit=UnitPolicy.parse(UNITS[(number + 2 * turn) % len(UNITS)]),
                optimizer=OPTIMIZERS[(number + turn) % len(OPTIMIZERS)],
                seq=17,
                **OPTIONS[number],
            )
        )


def test_a_large_model_on_many_ranks_is_as_predicted() -> None:
    """llama3-8b over 1,024 ranks, hybrid in groups of 8."""
    spec = RunSpec(
        model=PRESETS["llama3-8b"],
        impl=Implementation.FSDP2,
        strategy=Strategy.HYBRID_SHARD,
        shard_ranks=8,
        ranks=1024,
        precision=Precision.FSDP_MIXED,
        seq=64,
    )
    got, want = predict(spec).ranks[1023], rehearse(spec).ranks[1023]
    assert_same_events(got, want, spec)
    assert got.collectives == want.collectives
