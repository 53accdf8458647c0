"""What to cut first: every peak the walk's, every change legal, every verdict the budget's, and figures by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.every import pairs, settings_of
from tests.work import num_calls
from zeroviz import budget
from zeroviz.advice import MAX_TOGETHER, Advice, Change, advise, largest_batch
from zeroviz.capacities import DEFAULT_RESERVE_NBYTES, parse_capacity
from zeroviz.changes import as_plain, from_plain
from zeroviz.errors import SpecError
from zeroviz.heatmap import Upward, build_heatmap
from zeroviz.implementations import PAIRS, PRECISIONS
from zeroviz.models import PRESETS, Family, bare
from zeroviz.peak import peak_of
from zeroviz.predict import predict
from zeroviz.rank_trace import alike
from zeroviz.spec import (
    Checkpointing,
    DType,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitKind,
    UnitPolicy,
)
from zeroviz.toggles import settle, spec_of, toggles_of

H100 = parse_capacity("h100-80gb")


def walked(spec: RunSpec) -> int:
    """The highest peak of all ranks by the walk, which the advice does not use."""
    return max(rank.peak().total for _, rank in alike(predict(spec).ranks))


def tiny(model: str = "tiny", **fields: Any) -> RunSpec:
    return RunSpec(**{"model": PRESETS[model], "ranks": 4, "batch": 4, **fields})


SPECS = {
    **{
        f"{strategy.value} {precision.value} {ranks}": tiny(
            ("tiny", "tiny-llama")[ranks % 2], ranks=ranks, precision=precision, unit=UnitPolicy.parse(unit),
            **settings_of(strategy, ranks),
        )
        for (strategy, precision), ranks, unit in zip(
            pairs(), (1, 4, 3, 8, 7, 2) * 9, ("model", "block", "block:2", "layer", "numel:3e4") * 9, strict=False
        )
    },
    "ahead and overlapping": tiny(prefetch=2, async_reduce=True, optimizer=Optimizer.ADAMW_FOREACH),
    "whole gradients over micro-batches": tiny(strategy=Strategy.ZERO2, accumulation=4, no_sync=True),
    "recomputed together": tiny(checkpointing=Checkpointing(3), seq=64),
    "gradients of another dtype": tiny(precision=Precision.BF16_MIXED, grad_dtype=DType.FP32),
    "8-bit": tiny(optimizer=Optimizer.ADAMW_8BIT),
    "clipped": tiny(clip_norm=1.0, steps=7, seed=3),
    "optimizer on the host": tiny(offload=Offload.OPTIMIZER),
    "all on the host": tiny(offload=Offload.PARAMS, batch=1, seq=1),
    "groups": tiny(strategy=Strategy.HYBRID_SHARD, ranks=24, shard_ranks=2),
    "one group": tiny(strategy=Strategy.HYBRID_SHARD, ranks=3, shard_ranks=3),
    "4096 ranks": tiny(ranks=4096),
    "4096 in groups": tiny(strategy=Strategy.HYBRID_SHARD, ranks=4096, shard_ranks=2),
    "one rank": tiny(strategy=Strategy.DDP, ranks=1),
    "bare": RunSpec(model=bare(10**9 + 7), ranks=3, unit=UnitPolicy.parse("model")),
    "bare in units": RunSpec(model=bare(10**9 + 7), ranks=1, unit=UnitPolicy.parse("numel:1e6")),
    "gpt2": RunSpec(model=PRESETS["gpt2"], ranks=3, seq=1024, batch=8),
    "gemma": RunSpec(model=PRESETS["gemma2-9b"], ranks=2, seq=64),
    "mixtral": RunSpec(model=PRESETS["mixtral-8x7b"], ranks=8, seq=64, precision=Precision.BF16),
    "8b": RunSpec(model=PRESETS["llama3-8b"], ranks=8, seq=4096, precision=Precision.BF16_MIXED),
}  # fmt: skip
SHARES = (0.95, 0.4, 0.02)
"""Of the peak, as capacities: a little too small, much, and such that hardly anything is enough."""


def advices(spec: RunSpec) -> Iterator[Advice]:
    for share in SHARES:
        yield advise(spec, max(1, int(peak_of(spec).total * share)), 0)


def made(spec: RunSpec, toggles: dict[str, Any]) -> RunSpec:
    """As the explorer makes it; a unit of so many elements is no state of the page, and its count is kept."""
    wanted = {**toggles_of(spec), **toggles}
    count = {"blocks": wanted["blocks"]} if wanted["unit"] is UnitKind.NUMEL else {}
    settle(wanted, given={**toggles, **count})
    return replace(spec_of(wanted), steps=spec.steps, seed=spec.seed)


def assert_change(change: Change, advice: Advice, before: RunSpec, toggles: dict[str, Any]) -> None:
    """`toggles` are those of all changes up to this one, which came upon `before`."""
    spec = change.spec
    assert spec == made(advice.spec, toggles) != before
    assert RunSpec.from_dict(spec.to_dict()) == spec  # RunSpec makes it anew, and so allows it
    assert change.peak_nbytes == walked(spec) < walked(before)
    assert change.spare_nbytes == advice.budget_nbytes - change.peak_nbytes
    assert change.fits == (change.peak_nbytes <= advice.budget_nbytes)
    held, now = (predict(each).ranks[0].peak().by_category for each in (before, spec))
    falls = {category: nbytes - now.get(category, 0) for category, nbytes in held.items()}
    first, *second = change.cuts
    assert first[1] == max(falls.values()) > 0
    for category, nbytes in change.cuts:
        assert falls[category] == nbytes and nbytes * 4 >= first[1]
    assert len(second) <= 1 and change.words and change.costs and change.reason


@pytest.mark.parametrize("name", SPECS)
def test_every_change_is_legal_and_its_peak_the_walks(name: str) -> None:
    spec = SPECS[name]
    for advice in advices(spec):
        assert advice.peak_nbytes == walked(spec) and not advice.fits and not advice.why_not
        peaks = [change.peak_nbytes for change in advice.changes]
        assert peaks == sorted(peaks)
        specs = [change.spec for change in advice.changes]
        assert len(set(specs)) == len(specs) or spec.strategy is Strategy.HYBRID_SHARD  # all ranks as one group: ZeRO-3
        for change in advice.changes:
            assert_change(change, advice, spec, dict(change.toggles))


@pytest.mark.parametrize("name", SPECS)
def test_what_is_found_together_adds_up_change_by_change(name: str) -> None:
    spec = SPECS[name]
    for advice in advices(spec):
        if not advice.changes or advice.changes[0].fits:
            assert advice.together == ()
            continue
        assert advice.together[0] == advice.changes[0]
        before, toggles = spec, {}
        for change in advice.together:
            assert not toggles.keys() & change.toggles.keys()
            toggles |= change.toggles
            assert_change(change, advice, before, toggles)
            before = change.spec
        assert toggles == advice.toggles_together and len(advice.together) <= MAX_TOGETHER
        assert not any(change.fits for change in advice.together[:-1])
        if advice.together[-1].fits or len(advice.together) == MAX_TOGETHER:
            continue
        # It ended early, so no other toggle helps.
        again = advise(before, advice.capacity_nbytes, 0)
        assert all(change.toggles.keys() & toggles.keys() for change in again.changes)


@pytest.mark.parametrize("name", SPECS)
def test_what_fits_is_the_budgets(name: str) -> None:
    spec = SPECS[name]
    peak = walked(spec)
    for capacity in (peak - 1, peak, peak + 1, 3 * peak):
        advice = advise(spec, capacity + 5, 5)
        assert advice.spare_nbytes == capacity - peak and advice.fits == (capacity >= peak)
        if spec.model.family is Family.BARE:
            assert advice.largest_batch is None
            continue
        answer = budget.largest_batch(spec, capacity)
        assert largest_batch(spec, capacity) == (answer.value or 0)
        assert advice.fits == ((answer.value or 0) >= spec.batch)
        if advice.fits:
            assert (advice.largest_batch, advice.largest_batch_peak_nbytes) == (answer.value, answer.peak.total)
            assert advice.changes == advice.together == ()


def test_what_fits_is_the_maps() -> None:
    spec = SPECS["8b"]
    for name in ("a100-40gb", "a100-80gb"):
        capacity = parse_capacity(name)
        cell = build_heatmap(spec, Upward.BATCH, capacity, DEFAULT_RESERVE_NBYTES).current
        advice = advise(spec, capacity.nbytes)
        assert (advice.fits, advice.spare_nbytes) == (cell.fits, cell.spare_nbytes)
        for change in advice.changes:
            assert change.fits == build_heatmap(change.spec, Upward.SEQ, capacity, DEFAULT_RESERVE_NBYTES).current.fits


@pytest.mark.parametrize(("impl", "strategy"), [(i, s) for i, strategies in PAIRS.items() for s in strategies])
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_implementation_gets_a_verdict_or_a_sentence(
    impl: Implementation, strategy: Strategy, ranks: int
) -> None:
    spec = tiny(impl=impl, ranks=ranks, precision=PRECISIONS[impl][0], **settings_of(strategy, ranks))
    for capacity in (-1, 0, 1, 1000, walked(spec), 10**15):
        advice = advise(spec, capacity, 0)
        assert advice.peak_nbytes == walked(spec) and advice.fits == (capacity >= walked(spec))
        if impl is not Implementation.OWN or capacity <= 0:
            assert advice.why_not.endswith(".") and not advice.changes and advice.largest_batch is None
        else:
            assert not advice.why_not and bool(advice.changes) != advice.fits


def test_a_reserve_that_leaves_nothing_is_a_sentence() -> None:
    spec = tiny()
    assert "leaves nothing" in advise(spec, 10**9).why_not  # less 2 GiB
    assert "0 or more" in advise(spec, 10**9, -1).why_not
    assert not advise(spec, 10**9, 0).why_not


def of(advice: Advice, **toggles: Any) -> Change:
    (change,) = (change for change in advice.changes if change.toggles == toggles)
    return change


def test_seven_billion_by_hand() -> None:
    """P = 7e9, 2 + 2 + 12 bytes, on 64 ranks, one unit; an update makes 12 bytes an owned element. DDP 16P + 12P =
    196e9. ZeRO-1 4P + 12P/N + 12P/N, ZeRO-2 2P + 14P/N + 2P, ZeRO-3 14P/N + 2P + 2P while a unit's gradient is
    reduced. In GB: 30.6, 29.5, 29.5. Offloaded, moments and master are gone, and so is the update: 4P."""
    spec = RunSpec(
        model=bare(7 * 10**9), strategy=Strategy.DDP, ranks=64, precision=Precision.BF16_MIXED,
        unit=UnitPolicy.parse("model"),
    )  # fmt: skip
    advice = advise(spec, H100.nbytes)
    assert advice.peak_nbytes == 196 * 10**9 and not advice.fits
    for strategy, gigabytes in (
        (Strategy.ZERO1, 28 + 24 * 7 / 64), (Strategy.ZERO2, 28 + 14 * 7 / 64), (Strategy.ZERO3, 28 + 14 * 7 / 64),
    ):  # fmt: skip
        change = of(advice, strategy=strategy)
        assert change.peak_nbytes == pytest.approx(gigabytes * 1e9, abs=1000) and change.fits
    offloaded = of(advice, offload=Offload.OPTIMIZER)
    assert offloaded.peak_nbytes == 28 * 10**9 and "84 GB more on the host" in offloaded.reason
    # 8 bytes a parameter, and 4 for the update's temporaries.
    assert of(advice, precision=Precision.BF16).peak_nbytes == 84 * 10**9
    # More ranks are copies.
    assert not any("ranks" in change.toggles for change in advice.changes)


def test_eight_billion_on_40_gib_recomputes_first() -> None:
    advice = advise(SPECS["8b"], parse_capacity("a100-40gb").nbytes)
    first = advice.changes[0]
    assert first.toggles == {"checkpointing": True} and first.fits and first.reason.startswith("activations 28.47 GB")
    # The mildest that fits: 16 ranks are not enough, and half the sequence is.
    assert of(advice, ranks=32).fits and walked(replace(advice.spec, ranks=16)) > advice.budget_nbytes
    assert of(advice, seq=2048).fits
    assert advice.together == ()


@pytest.mark.parametrize("batch", [8, 9])
def test_a_batch_is_cut_no_further_than_it_must_be(batch: int) -> None:
    spec = tiny(batch=batch, seq=64)
    capacity = walked(replace(spec, batch=5)) + 1
    assert of(advise(spec, capacity, 0), batch=5).fits
    assert not of(advise(spec, walked(replace(spec, batch=1)) - 1, 0), batch=1).fits


def test_on_one_rank_sharding_and_ranks_are_one_change() -> None:
    """Alone neither does anything: one rank's share is all of it, and DDP's ranks are copies."""
    spec = RunSpec(model=PRESETS["llama3-8b"], strategy=Strategy.DDP, ranks=1, precision=Precision.BF16_MIXED, seq=64)
    advice = advise(spec, H100.nbytes)
    assert not any(change.toggles.keys() in ({"strategy"}, {"ranks"}) for change in advice.changes)
    change = of(advice, strategy=Strategy.ZERO3, ranks=2)
    assert change.fits and "ZeRO-3 and 2 ranks" in change.words


def test_larger_groups_are_the_smallest_that_fit() -> None:
    spec = RunSpec(
        model=PRESETS["llama3-8b"], strategy=Strategy.HYBRID_SHARD, ranks=48, shard_ranks=2, seq=64,
        precision=Precision.BF16_MIXED,
    )  # fmt: skip
    capacity = walked(replace(spec, shard_ranks=8))
    change = of(advise(spec, capacity, 0), shard_ranks=8)
    assert change.fits and change.spec.shard_ranks == 8
    # 5 of 5: nothing in between.
    prime = replace(spec, ranks=5, shard_ranks=1)
    assert of(advise(prime, 1, 0), shard_ranks=5).spec.shard_ranks == 5


def test_where_nothing_helps_there_is_no_change_and_no_error() -> None:
    spec = RunSpec(
        model=bare(1), ranks=4096, precision=Precision.BF16, optimizer=Optimizer.SGD, offload=Offload.PARAMS,
        unit=UnitPolicy.parse("model"),
    )  # fmt: skip
    advice = advise(spec, 1, 0)
    assert advice.changes == advice.together == () and not advice.fits and not advice.why_not


def test_what_follows_a_change_is_said() -> None:
    """8-bit moments are updated by a GPU kernel, so an optimizer on the host has others."""
    change = of(advise(SPECS["8-bit"], 1, 0), offload=Offload.OPTIMIZER)
    assert change.spec.optimizer is Optimizer.ADAMW and "optimizer is now adamw" in change.notes[0]


@pytest.mark.parametrize("name", SPECS)
def test_toggles_stand_for_the_spec_and_come_back_from_a_page(name: str) -> None:
    spec = SPECS[name]
    assert replace(spec_of(toggles_of(spec)), steps=spec.steps, seed=spec.seed) == spec
    for advice in advices(spec):
        for toggles in (*(change.toggles for change in advice.changes), advice.toggles_together):
            assert from_plain(json.loads(json.dumps(as_plain(toggles)))) == toggles


@pytest.mark.parametrize(
    "data",
    [
        {"model": "tiny"}, {"strategy": "zero9"}, {"strategy": None}, {"ranks": "4"}, {"ranks": True}, {"ranks": 4.0},
        {"checkpointing": 1}, {"grad_dtype": "bf16"}, {"__class__": 1}, {"batch": None},
    ],
)  # fmt: skip
def test_what_no_change_has_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        from_plain(data)


def test_neighbours_in_the_list_are_told_apart() -> None:
    for spec in SPECS.values():
        for advice in advices(spec):
            words = [change.words for change in advice.changes]
            assert len(set(words)) == len(words)
            assert all(low.peak_nbytes <= high.peak_nbytes for low, high in pairwise(advice.changes))


def test_a_list_costs_few_specs() -> None:
    """About a tenth of a millisecond each. Counted, not timed; the first call lays out the steps that are new."""
    spec = RunSpec(model=PRESETS["llama3-70b"], ranks=8, precision=Precision.BF16_MIXED, seq=4096)
    advise(spec, H100.nbytes)
    assert num_calls(lambda: advise(spec, H100.nbytes)) < 12_000
