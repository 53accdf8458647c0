"""The fast peak against the walk over the schedule: every field, for every kind of spec."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.every import exists, pairs, settings_of
from zeroviz import outline as outline_module
from zeroviz import peak as peak_module
from zeroviz.models import PRESETS, ModelShape, bare
from zeroviz.outline import outline
from zeroviz.peak import floor_of, moments_of, peak_of
from zeroviz.precision import OWN_PRECISIONS, WHOLE_BUFFER_PRECISIONS
from zeroviz.predict import predict
from zeroviz.schedule import Order
from zeroviz.spec import (
    Checkpointing,
    DType,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitKind,
    UnitPolicy,
)
from zeroviz.toggles import group_choices

TINY, TINY_LLAMA = PRESETS["tiny"], PRESETS["tiny-llama"]
# Both families, tied and untied; one block, where first and last are the same, and enough blocks to jump over some.
MODELS = {
    "gpt2 tied": TINY,
    "gpt2 untied": replace(TINY, tied=False, layers=6),
    "gpt2 without biases": replace(TINY, attention_bias=False, mlp_bias=False, layers=1),
    "llama untied": TINY_LLAMA,
    "llama tied": replace(TINY_LLAMA, tied=True, layers=6),
    "llama of one block": replace(TINY_LLAMA, layers=1, attention_bias=True),
}
UNITS = ("model", "block", "block:2", "layer", "numel:1", "numel:3e4")
SETTINGS: list[dict[str, Any]] = [
    *(
        {"strategy": strategy, "async_reduce": overlap}
        for strategy in Strategy
        for overlap in ((False,) if strategy.has_whole_buffer else (False, True))
    ),
    # 100 units ahead is all of them: nothing is left to gather in the middle of a pass.
    *(
        {"strategy": Strategy.ZERO3, "async_reduce": overlap, "prefetch": ahead}
        for ahead in (1, 2, 100)
        for overlap in (False, True)
    ),
    {"strategy": Strategy.HYBRID_SHARD, "prefetch": 2, "async_reduce": True},
    *({"strategy": strategy, "clip_norm": 1.0, "optimizer": Optimizer.SGD} for strategy in Strategy),
]


def assert_same(spec: RunSpec) -> None:
    """Every field, and the categories in the same order: tables print them as they come."""
    fast, walked = peak_of(spec), predict(spec).ranks[0].peak()
    assert fast == walked, spec
    assert list(fast.by_category) == list(walked.by_category), spec


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_peak_is_the_walks(model: ModelShape, unit: str) -> None:
    """Sizes differ from one setting to the next, so the same outline is asked for more than one of them."""
    if unit == "block:2" and model.layers < 2:
        unit = "block:1"
    sizes = itertools.cycle([(1, 1, 1), (2, 3, 17), (7, 2, 32), (16, 1, 96), (3, 40, 5)])  # ranks, batch, seq
    for settings, precision, _ in itertools.product(SETTINGS, OWN_PRECISIONS, range(2)):
        ranks, batch, seq = next(sizes)
        settings = {**settings, **settings_of(settings["strategy"], ranks)}
        if not exists(settings["strategy"], precision):
            continue
        policy = UnitPolicy.parse(unit)
        assert_same(
            RunSpec(model=model, unit=policy, precision=precision, ranks=ranks, batch=batch, seq=seq, **settings)
        )


def random_specs(seed: int, count: int) -> Iterator[RunSpec]:
    """Models of any proportions, so that each kind of moment gets its turn at being the peak."""
    draw = random.Random(seed)
    for _ in range(count):
        heads, kv_groups, head_dim = draw.randint(1, 4), draw.randint(1, 3), 2 * draw.randint(1, 40)
        sizes = {
            "vocab": draw.choice((3, 100, 5000)),
            "layers": draw.randint(1, 9),
            "ffn": draw.choice((1, 64, 900)),
            "positions": draw.choice((64, 4000)),
            "heads": heads * kv_groups,
            "head_dim": head_dim,
            "tied": draw.random() < 0.5,
            "attention_bias": draw.random() < 0.5,
            "mlp_bias": draw.random() < 0.5,
        }
        if draw.random() < 0.5:
            hidden = heads * kv_groups * head_dim
            model = replace(TINY, name="drawn", hidden=hidden, kv_heads=sizes["heads"], **sizes)
        else:
            model = replace(TINY_LLAMA, name="drawn", hidden=draw.randint(1, 200), kv_heads=heads, **sizes)
        kind = draw.choice(list(UnitKind))
        most = {UnitKind.BLOCK: model.layers, UnitKind.NUMEL: model.num_params}.get(kind, 1)
        strategy = draw.choice(list(Strategy))
        optimizer = draw.choice(list(Optimizer))
        accumulation = draw.choice((1, 1, 2, 3, 5))
        whole, ranks = strategy.has_whole_buffer, draw.randint(1, 20)
        offload = draw.choice(offloads(strategy, optimizer))
        yield RunSpec(
            model=model,
            strategy=strategy,
            shard_ranks=draw.choice(group_choices(ranks)) if strategy.replicates else None,
            unit=UnitPolicy(kind, draw.randint(1, most)),
            precision=draw.choice(WHOLE_BUFFER_PRECISIONS if whole else OWN_PRECISIONS),
            ranks=ranks,
            batch=draw.choice((1, 2, 50)),
            seq=draw.randint(1, 64),
            prefetch=draw.randint(0, 4) if strategy.shards_param else 0,
            async_reduce=draw.random() < 0.5 and not whole,
            optimizer=optimizer,
            grad_dtype=None if whole else draw.choice((None, DType.FP32, DType.BF16)),
            clip_norm=None if offload.moves_params else draw.choice((None, 0.5)),
            checkpointing=Checkpointing(draw.choice((0, 1, draw.randint(1, model.layers)))),
            offload=offload,
            accumulation=accumulation,
            no_sync=draw.choice((None, True)) if accumulation > 1 else None,
        )


def offloads(strategy: Strategy, optimizer: Optimizer) -> list[Offload]:
    """What can be offloaded."""
    if optimizer is Optimizer.ADAMW_8BIT or strategy.has_whole_buffer:
        return [Offload.NONE]
    return list(Offload) if strategy.shards_param else [Offload.NONE, Offload.OPTIMIZER]


@pytest.mark.parametrize("seed", range(10))
def test_peak_is_the_walks_for_any_proportions(seed: int) -> None:
    for spec in random_specs(seed, 80):
        assert_same(spec)


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("tiny")])
def test_peak_is_the_walks_for_large_models(name: str) -> None:
    for strategy, unit in itertools.product(Strategy, ("model", "block", "block:5", "layer", "numel:3e8")):
        if unit == "numel:3e8":
            unit = next(f"numel:{size}" for size in ("3e8", "1e8", "1e6") if PRESETS[name].num_params > float(size))
        if unit == "block:5" and PRESETS[name].layers < 5:
            unit = "block:3"
        assert_same(
            RunSpec(
                model=PRESETS[name],
                unit=UnitPolicy.parse(unit),
                ranks=9,
                batch=2,
                seq=min(1000, PRESETS[name].positions),
                **settings_of(strategy, 9),
            )
        )


def test_bare_counts() -> None:
    for num_params, (strategy, precision), ranks in itertools.product((1, 10, 7 * 10**9), pairs(), (1, 3, 8)):
        for unit in ("model", "numel:1"):
            assert_same(
                RunSpec(
                    model=bare(num_params),
                    **settings_of(strategy, ranks),
                    precision=precision,
                    ranks=ranks,
                    unit=UnitPolicy.parse(unit),
                )
            )


def test_absurd_sizes_stay_exact() -> None:
    """10**15 fp32 parameters on 10**6 ranks under ZeRO-3: 12P/N without the gradient, and 4P + 4P for the one unit in
    backward."""
    spec = RunSpec(model=bare(10**15), ranks=10**6, unit=UnitPolicy.parse("model"))
    peak = peak_of(spec)
    assert peak.total == 12 * 10**9 + 8 * 10**15
    assert (peak.phase, peak.op, peak.unit) == ("backward", "backward", "model")


def test_of_equal_moments_the_first_is_the_peak() -> None:
    """ZeRO-2 with bf16-mixed on 6 ranks ties two moments: the gradient 2P beside its shard, as it is reduced, and the
    update's temporaries 12P/6."""
    spec = RunSpec(
        model=bare(6000),
        strategy=Strategy.ZERO2,
        precision=Precision.BF16_MIXED,
        ranks=6,
        unit=UnitPolicy.parse("model"),
    )
    assert peak_of(spec).total == 2 * 6000 + 14 * 1000 + 2 * 6000
    assert (peak_of(spec).phase, peak_of(spec).op) == ("backward", "reduce grad")
    assert predict(spec).ranks[0].peak() == peak_of(spec)
    assert peak_of(replace(spec, ranks=5)).phase == "optimizer"  # 12P/5 > 2P
    assert peak_of(replace(spec, ranks=7)).phase == "backward"  # 12P/7 < 2P


# ---- the two ideas, each by itself ----


@pytest.mark.parametrize("unit", UNITS)
def test_runs_tile_the_step_and_repeat(unit: str) -> None:
    for layers, prefetch in itertools.product((1, 2, 3, 4, 30), (0, 2)):
        policy = UnitPolicy.parse("block" if unit == "block:2" and layers < 2 else unit)
        spec = RunSpec(model=replace(TINY, layers=layers), unit=policy, prefetch=prefetch, async_reduce=True)
        step = outline(Order.of(spec))
        position = 0
        for run in step.runs:
            assert run.start == position
            pattern = step.sequence[position : position + run.period]
            for _ in range(run.count):
                assert step.sequence[position : position + run.period] == pattern
                position += run.period
        assert position == len(step.sequence) == len(step.ops)


@pytest.mark.parametrize("unit", ["model", "block", "layer"])
def test_more_blocks_make_runs_longer_not_more(unit: str) -> None:
    """Why a model of 80 layers takes no longer than one of 10 once its outline is known."""
    shapes = []
    for layers in (10, 80):
        model = replace(TINY_LLAMA, layers=layers)
        step = outline(Order.of(RunSpec(model=model, unit=UnitPolicy.parse(unit), prefetch=1, async_reduce=True)))
        shapes.append([(run.period, run.count > 1) for run in step.runs])
    assert shapes[0] == shapes[1]


def test_jumping_over_repeats_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same peaks when no repetition is recognised, and so every token of the step is visited."""

    def forget() -> None:
        outline_module.outline.cache_clear()
        peak_module._moments.cache_clear()

    specs = list(random_specs(99, 100))
    forget()
    jumped = [peak_of(spec) for spec in specs]
    monkeypatch.setattr(outline_module, "MAX_PERIOD", 0)
    forget()
    assert all(run.count == 1 for run in moments_of(specs[0]).step.runs)
    assert [peak_of(spec) for spec in specs] == jumped
    forget()


def test_few_moments_can_be_the_peak() -> None:
    """Out of the 16,246 events of llama3-70b in blocks, at most 25, and no more for any other model."""
    for model, (strategy, precision), unit in itertools.product(PRESETS.values(), pairs(), ("model", "block", "layer")):
        spec = RunSpec(model=model, precision=precision, unit=UnitPolicy.parse(unit), **settings_of(strategy, 2))
        assert 1 <= len(moments_of(spec).candidates) <= 25
    events = predict(RunSpec(model=PRESETS["llama3-70b"])).ranks[0].events
    assert sum(event.category.on_device for event in events) == 16_246


def test_of_moments_that_tie_at_one_number_of_ranks_alone_both_are_kept() -> None:
    """A later moment with a whole buffer w in the place of the shard s is never below the earlier one, and equal at
    N = 1, where the earlier is the peak: so neither rules the other out. A larger coefficient of s always counts."""
    w, s = (0, 0, 0, 4, 0, 0, 0), (0, 0, 0, 0, 4, 0, 0)
    steps = peak_module._Steps((0,))
    for first, second, kept in ((s, w, 2), (w, s, 1), (s, (0, 0, 0, 0, 8, 0, 0), 1), (s, s, 1)):
        walk = peak_module._Walk({}, steps)
        for position, form in enumerate((first, second)):
            walk.consider({}, steps.of(form), position)
        # The moment at rest, which holds nothing, is ruled out by either.
        assert len(walk.candidates) == kept


def test_floor_is_below_the_peak_and_never_rises() -> None:
    """What the search for N stands on. The peak itself does rise, by padding, once N is large.

    A shard of ceil(37237 / N) elements is often the same for N and N + 1 when N is near 193, the square root; the
    gathered buffer, N times as long, then grows by one shard.
    """
    rises = 0
    for settings, precision in itertools.product(SETTINGS, OWN_PRECISIONS):
        if not exists(settings["strategy"], precision):
            continue
        floors, peaks = [], []
        for ranks in range(1, 300):
            group = {"shard_ranks": ranks} if settings["strategy"].replicates else {}
            spec = RunSpec(model=TINY, precision=precision, ranks=ranks, **group, **settings)
            floors.append(floor_of(spec))
            peaks.append(peak_of(spec).total)
        assert all(floor <= peak for floor, peak in zip(floors, peaks, strict=True))
        assert floors == sorted(floors, reverse=True)
        rises += sum(after > before for before, after in itertools.pairwise(peaks))
    assert rises > 0
