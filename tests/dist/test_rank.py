"""What a rank holds: measured from live storages, predicted in closed form, and given out by the allocator.

At rest the three agree to the byte: predicted = measured per category, and the allocator's live bytes are those plus
the optimizer's step counters (4 bytes a unit), which are named apart. At the peak predicted and measured agree in
total, moment and categories. The allocator's peak has kernels' scratch and gloo's copies in it too: test_meter.py.
"""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from cluster.engine import give_back
from cluster.rank import check_precision, run_rank
from tests.dist.ranks import RankPool
from tests.every import exists, settings_of
from zeroviz.compare import maxima
from zeroviz.errors import SpecError
from zeroviz.models import PRESETS
from zeroviz.precision import OWN_PRECISIONS
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.trace import Category, Origin, RankTrace, merge, rank_from_dict


def live_ranks(rank_pool: RankPool, spec: RunSpec) -> tuple[RankTrace, ...]:
    """The checked trace of a real run, by rank."""
    results = rank_pool.run(run_rank, spec)
    return merge(Origin.LIVE, spec, [rank_from_dict(result) for result in results]).ranks


def assert_rest_is_as_predicted(spec: RunSpec, ranks: tuple[RankTrace, ...]) -> None:
    for measured, predicted in zip(ranks, predict(spec).ranks, strict=True):
        assert measured.at_rest == predicted.at_rest, (spec.strategy, measured.rank)
        assert measured.step_counter_nbytes == predicted.step_counter_nbytes
        assert measured.allocator is not None
        assert measured.allocator.rest_nbytes == measured.rest_nbytes + measured.step_counter_nbytes


def assert_peak_is_as_predicted(spec: RunSpec, ranks: tuple[RankTrace, ...]) -> None:
    for measured, predicted in zip(ranks, predict(spec).ranks, strict=True):
        assert measured.peak() == predicted.peak(), (spec.strategy, measured.rank)
        assert measured.allocator is not None
        assert measured.allocator.peak_nbytes == measured.machine_peak().total


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("precision", OWN_PRECISIONS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_predicted_measured_and_allocated_agree(
    rank_pool: RankPool, model: str, precision: Precision, ranks: int
) -> None:
    for strategy in (each for each in Strategy if exists(each, precision)):
        settings = settings_of(strategy, ranks)
        spec = RunSpec(model=PRESETS[model], ranks=ranks, precision=precision, seq=17, steps=2, **settings)
        measured = live_ranks(rank_pool, spec)
        assert_rest_is_as_predicted(spec, measured)
        assert_peak_is_as_predicted(spec, measured)
        for rank in measured:
            assert maxima(rank) == maxima(predict(spec).ranks[0]), (strategy, rank.rank)


@pytest.mark.parametrize("unit", ["model", "block:2", "layer", "numel:3e4"])
def test_units_change_padding_and_nothing_else_at_rest(rank_pool: RankPool, unit: str) -> None:
    for strategy in Strategy:
        settings = {"unit": UnitPolicy.parse(unit), **settings_of(strategy, 4)}
        spec = RunSpec(model=PRESETS["tiny"], ranks=4, seq=17, steps=2, **settings)
        ranks = live_ranks(rank_pool, spec)
        assert_rest_is_as_predicted(spec, ranks)
        assert_peak_is_as_predicted(spec, ranks)
        # P = 133106 parameters of 16 bytes; what is held beyond P's own share is padding.
        share = {
            Strategy.DDP: 16 * 133106 * 4,
            Strategy.ZERO1: 8 * 133106 * 4 + 8 * 133106,
            Strategy.ZERO2: 4 * 133106 * 4 + 12 * 133106,
            Strategy.ZERO3: 16 * 133106,
            Strategy.SHARD_GRAD_OP: 16 * 133106,
            Strategy.HYBRID_SHARD: 16 * 133106 * 2,  # two groups of two
            Strategy.MEGATRON_OPTIM: 8 * 133106 * 4 + 8 * 133106,
        }[strategy]
        assert sum(rank.rest_nbytes - rank.padding_nbytes for rank in ranks) == share


def test_one_rank_holds_the_same_under_every_strategy_and_sends_nothing(rank_pool: RankPool) -> None:
    for strategy in Strategy:
        spec = RunSpec(model=PRESETS["tiny"], ranks=1, seq=17, **settings_of(strategy, 1))
        (rank,) = live_ranks(rank_pool, spec)
        assert rank.rest_nbytes == 16 * 133106
        assert rank.sent_nbytes == 0 and not rank.collectives


def test_the_loss_goes_down(rank_pool: RankPool) -> None:
    for model in ("tiny", "tiny-llama"):
        spec = RunSpec(model=PRESETS[model], ranks=2, steps=20, precision=Precision.BF16_MIXED)
        for rank in live_ranks(rank_pool, spec):
            assert len(rank.losses) == 20
            assert rank.losses[-1] < rank.losses[0] - 0.5


@pytest.mark.parametrize("strategy", [Strategy.ZERO3, Strategy.ZERO1])
def test_gpt2_counts_its_parameters_and_its_bytes(rank_pool: RankPool, strategy: Strategy) -> None:
    """The real thing, in bf16-mixed on two ranks: 124,439,808 parameters (as published), at rest to the byte."""
    spec = RunSpec(
        model=PRESETS["gpt2"], ranks=2, strategy=strategy, precision=Precision.BF16_MIXED, batch=1, seq=17, steps=2
    )
    assert spec.model.num_params == 124439808
    measured = live_ranks(rank_pool, spec)
    assert_rest_is_as_predicted(spec, measured)
    assert_peak_is_as_predicted(spec, measured)


def test_a_gpu_without_bf16_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such GPU is at hand: torch's two answers are replaced, the decision is ours."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    cuda = torch.device("cuda", 0)
    check_precision(RunSpec(model=PRESETS["tiny"], precision=Precision.FP32), cuda)
    for precision in (Precision.BF16, Precision.BF16_MIXED, Precision.BF16_FP32GRAD):
        spec = RunSpec(model=PRESETS["tiny"], precision=precision)
        with pytest.raises(SpecError, match=f"'{precision.value}'.*Tesla V100 has no bf16; use precision fp32"):
            check_precision(spec, cuda)
        check_precision(spec, torch.device("cpu"))


def test_overlap_costs_bytes_and_they_are_seen(rank_pool: RankPool) -> None:
    """A prefetched unit stands beside the one in use: the most ever gathered is two blocks (or root and two)."""

    def most_gathered(**settings: Any) -> int:
        spec = RunSpec(model=PRESETS["tiny"], ranks=2, strategy=Strategy.ZERO3, seq=17, **settings)
        measured = live_ranks(rank_pool, spec)
        assert_peak_is_as_predicted(spec, measured)
        live = best = 0
        for event in measured[0].events:
            if event.category is Category.UNSHARDED_PARAM:
                live += event.delta_nbytes
                best = max(best, live)
        return best

    root, block = 21396 * 4, 37238 * 4
    assert most_gathered() == root + block
    assert most_gathered(prefetch=1) == root + 2 * block
    assert most_gathered(prefetch=9) == root + 3 * block


def test_what_is_freed_goes_back_to_the_machine() -> None:
    """100 tensors of 4 MB, each with a smaller one after it that stays: the heap keeps their pages when they are gone.

    A larger one freed before lets glibc take such blocks from its heap and not from the system, as in a run.
    """
    process = psutil.Process()
    torch.ones(7_000_000)
    before = process.memory_info().rss
    large, small = [], []
    for _ in range(100):
        large.append(torch.ones(1_000_000))
        small.append(torch.ones(40_000))
    held = process.memory_info().rss - before
    del large
    assert process.memory_info().rss - before > held / 2
    give_back()
    assert process.memory_info().rss - before < held / 4
    assert len(small) == 100
