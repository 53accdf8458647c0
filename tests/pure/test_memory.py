"""Closed forms against the published tables and against the walk over the schedule."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.every import exists, pairs, settings_of
from zeroviz.memory import held_throughout, largest_window, rest_by_category, rest_padding_nbytes, step_counter_nbytes
from zeroviz.models import PRESETS, bare
from zeroviz.partition import plan_for
from zeroviz.precision import OWN_PRECISIONS
from zeroviz.predict import predict
from zeroviz.spec import Checkpointing, DType, Optimizer, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.trace import Category

GB = 10**9

PAPER = (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3)  # as ZeRO (arXiv 1910.02054) has them


def rest_nbytes(num_params: int, ranks: int, strategy: Strategy, precision: Precision) -> int:
    spec = RunSpec(
        model=bare(num_params), ranks=ranks, strategy=strategy, precision=precision, unit=UnitPolicy.parse("model")
    )
    return sum(rest_by_category(spec).values())


@pytest.mark.parametrize(
    ("ranks", "printed"),
    [
        # Rajbhandari et al., ZeRO, arXiv 1910.02054, Table 1, 7.5B: GB of ZeRO-1, 2, 3, rounded as printed.
        (1, (120, 120, 120)),
        (4, (52.5, 41.3, 30)),
        (16, (35.6, 21.6, 7.5)),
        (64, (31.4, 16.6, 1.88)),
        (256, (30.4, 15.4, 0.47)),
        (1024, (30.1, 15.1, 0.12)),
    ],
)
def test_zero_table_1(ranks: int, printed: tuple[float, ...]) -> None:
    """4P + 12P/N, 2P + 14P/N, 16P/N with P = 7.5e9. Compared to less than one unit of the last printed place."""
    for strategy, value in zip((Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3), printed, strict=True):
        places = len(str(value).partition(".")[2])
        got = rest_nbytes(7_500_000_000, ranks, strategy, Precision.BF16_MIXED) / GB
        assert abs(got - value) < 10**-places


def test_zero_figure_1() -> None:
    """The same paper's Figure 1: 7.5B on 64 ranks, 120 GB under data parallelism, 31.4, 16.6 and 1.9 with ZeRO."""
    got = [rest_nbytes(7_500_000_000, 64, strategy, Precision.BF16_MIXED) / GB for strategy in PAPER]
    assert [round(value, 1) for value in got] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize(
    ("precision", "bytes_per_param"),
    [
        # N = 8. 2+2+12: 16; 4+12/8; 2+14/8; 16/8.   2+4+12: 18; 6+12/8; 2+16/8; 18/8.   4+4+8: 16; 8+8/8; 4+12/8; 2.
        (Precision.BF16_MIXED, (16, 5.5, 3.75, 2)),
        (Precision.BF16_FP32GRAD, (18, 7.5, 4, 2.25)),
        (Precision.FP32, (16, 9, 5.5, 2)),
        (Precision.BF16, (8, 4.5, 2.75, 1)),
    ],
)
def test_bytes_a_parameter_of_every_recipe(precision: Precision, bytes_per_param: tuple[float, ...]) -> None:
    for strategy, value in zip(PAPER, bytes_per_param, strict=True):
        assert rest_nbytes(7 * GB, 8, strategy, precision) == value * 7 * GB
    assert precision.bytes_per_param == bytes_per_param[0]
    # SHARD_GRAD_OP rests as ZeRO-3 does, and not as the paper's ZeRO-2.
    assert rest_nbytes(7 * GB, 8, Strategy.SHARD_GRAD_OP, precision) == bytes_per_param[3] * 7 * GB


def test_absurd_sizes_stay_exact() -> None:
    """10**15 parameters on 10**6 ranks: Python's integers have no largest one, and nothing grows with N."""
    assert rest_nbytes(10**15, 10**6, Strategy.ZERO3, Precision.BF16_MIXED) == 16 * 10**9


def test_one_rank_has_no_padding_and_every_strategy_alike() -> None:
    for strategy in Strategy:
        spec = RunSpec(model=PRESETS["tiny"], ranks=1, **settings_of(strategy, 1))
        assert sum(rest_by_category(spec).values()) == 16 * spec.model.num_params
        assert rest_padding_nbytes(spec, 0) == 0


def test_padding_is_the_difference_to_the_unpadded_model() -> None:
    """Sum over ranks of what is held, less padding, is what the formula gives for P itself."""
    for (strategy, precision), ranks in itertools.product(pairs(), (2, 3, 4, 7)):
        spec = RunSpec(model=PRESETS["tiny"], ranks=ranks, precision=precision, **settings_of(strategy, ranks))
        held = sum(sum(rest_by_category(spec).values()) - rest_padding_nbytes(spec, rank) for rank in range(ranks))
        p, g = precision.param.itemsize, precision.grad.itemsize
        k = precision.bytes_per_param - p - g
        copies = {
            Strategy.DDP: (p + g + k) * ranks,
            Strategy.ZERO1: (p + g) * ranks + k,
            Strategy.ZERO2: p * ranks + g + k,
            Strategy.ZERO3: p + g + k,
            Strategy.SHARD_GRAD_OP: p + g + k,
            Strategy.HYBRID_SHARD: (p + g + k) * spec.num_replicas,
            Strategy.MEGATRON_OPTIM: (p + g) * ranks + k,
        }[strategy]
        assert held == copies * spec.model.num_params


def test_step_counters_are_four_bytes_a_slice() -> None:
    """tiny in blocks: a root of 21,395 elements, the largest parameter 14,135 of them, and three blocks of 37,237, of
    them 12,210. In one buffer over all of them 133,106 are a little less than ten times 14,135."""
    units = plan_for(RunSpec(model=PRESETS["tiny"])).units
    assert [unit.numel for unit in units] == [21395, 37237, 37237, 37237]
    assert [max(shape.numel for shape in unit.params) for unit in units] == [14135, 12210, 12210, 12210]
    assert step_counter_nbytes(RunSpec(model=PRESETS["tiny"])) == 4 * (2 + 3 * 4)
    assert step_counter_nbytes(RunSpec(model=PRESETS["tiny"], strategy=Strategy.MEGATRON_OPTIM)) == 4 * 10
    together = RunSpec(model=PRESETS["tiny"], optimizer=Optimizer.ADAMW_FOREACH)
    assert step_counter_nbytes(together) == 4 * 4


SETTINGS: list[dict[str, Any]] = [
    {"strategy": Strategy.DDP},
    {"strategy": Strategy.ZERO1},
    {"strategy": Strategy.ZERO2},
    {"strategy": Strategy.ZERO2, "async_reduce": True},
    {"strategy": Strategy.ZERO3},
    {"strategy": Strategy.ZERO3, "prefetch": 1},
    {"strategy": Strategy.ZERO3, "prefetch": 2, "async_reduce": True},
    {"strategy": Strategy.SHARD_GRAD_OP},
    {"strategy": Strategy.ZERO3, "checkpointing": Checkpointing(2), "prefetch": 1},
    {"strategy": Strategy.ZERO3, "accumulation": 2, "no_sync": True},
    {"strategy": Strategy.ZERO2, "accumulation": 3, "optimizer": Optimizer.ADAMW_FOREACH},
    {"strategy": Strategy.ZERO1, "grad_dtype": DType.BF16, "optimizer": Optimizer.SGD_MOMENTUM},
    {"strategy": Strategy.DDP, "optimizer": Optimizer.ADAMW_8BIT, "checkpointing": Checkpointing(1)},
    {"strategy": Strategy.HYBRID_SHARD},
    {"strategy": Strategy.HYBRID_SHARD, "prefetch": 1, "async_reduce": True},
    {"strategy": Strategy.HYBRID_SHARD, "accumulation": 2, "checkpointing": Checkpointing(2)},
    {"strategy": Strategy.MEGATRON_OPTIM},
    {"strategy": Strategy.MEGATRON_OPTIM, "accumulation": 2, "checkpointing": Checkpointing(1)},
    {"strategy": Strategy.MEGATRON_OPTIM, "optimizer": Optimizer.ADAMW_FOREACH},
]


def states_peak_of_the_walk(spec: RunSpec) -> int:
    """The largest sum of model states during the walk: activations and what surrounds them left out.

    In the optimizer all is model state; before it, temporaries are gradients on their way and belong to compute.
    """
    rank = predict(spec).ranks[0]
    total = best = rank.rest_nbytes
    for event in rank.events:
        compute = event.category in (Category.ACTIVATION, Category.INPUT) or (
            event.category is Category.TEMPORARY and event.phase != "optimizer"
        )
        if not compute and event.category.on_device:
            total += event.delta_nbytes
            best = max(best, total)
    return best


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("precision", OWN_PRECISIONS)
@pytest.mark.parametrize("unit", ["model", "block", "block:2", "layer", "numel:3e4"])
def test_closed_form_peak_is_the_walks(settings: dict[str, Any], precision: Precision, unit: str) -> None:
    if not exists(settings["strategy"], precision):
        return
    for model, ranks in itertools.product(("tiny", "tiny-llama"), (1, 3, 6)):
        settings = {**settings, **settings_of(settings["strategy"], ranks)}
        spec = RunSpec(model=PRESETS[model], ranks=ranks, precision=precision, unit=UnitPolicy.parse(unit), **settings)
        assert sum(held_throughout(spec).values()) + largest_window(spec).nbytes == states_peak_of_the_walk(spec)


@pytest.mark.parametrize(("strategy", "precision"), pairs())
def test_a_bare_counts_peak_is_the_closed_form(strategy: Strategy, precision: Precision) -> None:
    """Without layers there are no activations: what is held throughout and the largest window are all there is."""
    for ranks in (1, 8):
        settings = settings_of(strategy, ranks)
        spec = RunSpec(model=bare(7 * GB), ranks=ranks, precision=precision, unit=UnitPolicy.parse("model"), **settings)
        rank = predict(spec).ranks[0]
        assert rank.peak().total == sum(held_throughout(spec).values()) + largest_window(spec).nbytes
