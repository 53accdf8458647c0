"""Units, flat buffers, padding and shards."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from zeroviz.models import PRESETS, bare
from zeroviz.partition import (
    Unit,
    buffer_numel,
    padded_numel,
    plan_for,
    plan_units,
    shard_bounds,
    shard_numel,
    shard_padding_numel,
)
from zeroviz.spec import RunSpec, Strategy, UnitKind, UnitPolicy

TINY = PRESETS["tiny"]


def spec_of(numel: int, num_ranks: int, strategy: Strategy = Strategy.ZERO3) -> tuple[Unit, RunSpec]:
    spec = RunSpec(model=bare(numel), unit=UnitPolicy(UnitKind.MODEL), ranks=num_ranks, strategy=strategy)
    return plan_for(spec).units[0], spec


def test_seventy_two_over_seven_pads_five() -> None:
    # (-72) % 7 = 5, so 77 = 7 * 11. The classic mistake is 72 % 7 = 2, and 74 is no multiple of 7.
    assert padded_numel(72, 7) == 77
    unit, spec = spec_of(72, 7)
    assert shard_numel(unit, spec) == 11
    # The padding falls to the last rank: it owns 66..77, of which 66..72 are real.
    assert [shard_padding_numel(unit, spec, rank) for rank in range(7)] == [0, 0, 0, 0, 0, 0, 5]


def test_padding_may_fill_several_ranks() -> None:
    # 3 elements over 5 ranks: 5 = 5 * 1, ranks 3 and 4 own nothing real.
    unit, spec = spec_of(3, 5)
    assert [shard_padding_numel(unit, spec, rank) for rank in range(5)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("numel", [1, 2, 71, 72, 73, 1000])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 8, 64])
def test_shards_tile_the_buffer(numel: int, num_ranks: int) -> None:
    unit, spec = spec_of(numel, num_ranks)
    bounds = [shard_bounds(unit, spec, rank) for rank in range(num_ranks)]
    assert bounds[0][0] == 0
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    assert bounds[-1][1] == buffer_numel(unit, spec) == num_ranks * shard_numel(unit, spec)
    padding = sum(shard_padding_numel(unit, spec, rank) for rank in range(num_ranks))
    assert padding == buffer_numel(unit, spec) - numel == -numel % num_ranks


def test_one_rank_pads_nothing() -> None:
    unit, spec = spec_of(73, 1)
    assert (buffer_numel(unit, spec), shard_numel(unit, spec), shard_bounds(unit, spec, 0)) == (73, 73, (0, 73))


def test_ddp_shards_and_pads_nothing() -> None:
    unit, spec = spec_of(73, 8, Strategy.DDP)
    assert buffer_numel(unit, spec) == shard_numel(unit, spec) == 73
    assert shard_padding_numel(unit, spec, 7) == 0


POLICIES = [
    UnitPolicy(UnitKind.MODEL),
    UnitPolicy(UnitKind.BLOCK),
    UnitPolicy(UnitKind.BLOCK, 2),
    UnitPolicy(UnitKind.LAYER),
    UnitPolicy(UnitKind.NUMEL, 1),
    UnitPolicy(UnitKind.NUMEL, 30_000),
]


@pytest.mark.parametrize("name", ["tiny", "tiny-llama", "gpt2", "llama3-8b"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_units_hold_every_parameter_once_in_every_policy(name: str, policy: UnitPolicy) -> None:
    model = PRESETS[name]
    plan = plan_units(model, policy)
    names = [shape.name for unit in plan.units for shape in unit.params]
    assert sorted(names) == sorted(shape.name for shape in model.params)
    assert sum(unit.numel for unit in plan.units) == model.num_params
    # Segments walk the whole forward chain once, in order.
    assert [sub.name for segment in plan.segments for sub in segment.sublayers] == [s.name for s in model.sublayers]


def unit_names(name: str, policy: str) -> list[str]:
    return [unit.name for unit in plan_units(PRESETS[name], UnitPolicy.parse(policy)).units]


def test_names_of_units() -> None:
    assert unit_names("tiny", "model") == ["model"]
    assert unit_names("tiny", "block") == ["root", "block 0", "block 1", "block 2"]
    assert unit_names("tiny", "block:2") == ["root", "blocks 0-1", "block 2"]
    assert unit_names("tiny-llama", "block") == ["embed", "block 0", "block 1", "block 2", "head"]
    assert unit_names("tiny", "layer")[:3] == ["root", "block 0 attn", "block 0 mlp"]


def test_a_tied_root_has_two_segments() -> None:
    plan = plan_units(TINY, UnitPolicy())
    assert [(segment.name, segment.unit) for segment in plan.segments] == [
        ("embed", 0),
        ("block 0", 1),
        ("block 1", 2),
        ("block 2", 3),
        ("head", 0),
    ]


def test_numel_policy_fills_units_up_to_the_count() -> None:
    # An attention layer of tiny has 4 d^2 + 4 d biases + 2 d norm = 12,430 elements for d = 55; an MLP
    # 2 * 55 * 222 + 222 + 55 + 110 = 24,807. The embedding and the head never join a block's unit.
    plan = plan_units(TINY, UnitPolicy(UnitKind.NUMEL, 30_000))
    numel = {unit.name: unit.numel for unit in plan.units}
    assert numel["block 0 attn to block 0 mlp"] == 12_430 + 24_807 == 37_237
    assert plan.units[0].name == "root"


def test_the_plan_does_not_depend_on_ranks() -> None:
    spec = RunSpec(model=TINY)
    assert plan_for(spec) is plan_for(replace(spec, ranks=4))
