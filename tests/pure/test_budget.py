"""What fits: searches against brute force over the walk, known answers by hand, and the command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.every import exists, pairs, settings_of
from zeroviz.budget import MAX_COUNT, Answer, budget_row, largest_batch, longest_seq, smallest_ranks
from zeroviz.capacities import DEFAULT_RESERVE_NBYTES, parse_capacity, parse_reserve
from zeroviz.cli import main
from zeroviz.errors import SpecError
from zeroviz.models import PRESETS, bare
from zeroviz.peak import peak_of
from zeroviz.precision import OWN_PRECISIONS
from zeroviz.predict import predict
from zeroviz.quantity import GIB
from zeroviz.spec import Precision, RunSpec, Strategy, UnitPolicy

WIDTH = 80
H100 = 80 * GIB - 2 * GIB  # the default budget: nominal capacity less the default reserve


def walked(spec: RunSpec) -> int:
    """The peak by the walk, which the searches do not use."""
    return predict(spec).ranks[0].peak().total


def assert_books_close(answer: Answer, budget: int) -> None:
    assert answer.ledger.total == answer.peak.total == walked(answer.spec) == budget - answer.spare_nbytes
    assert (answer.value is None) == (answer.spare_nbytes < 0) == bool(answer.reason)


def specs(**settings: Any) -> list[RunSpec]:
    return [
        RunSpec(model=PRESETS[name], precision=precision, **settings_of(strategy, settings.get("ranks", 2)), **settings)
        for name, (strategy, precision) in itertools.product(("tiny", "tiny-llama"), pairs())
    ]


# ---- brute force: at, just below and just above every peak of a small range ----


def check_largest(
    search: Callable[[RunSpec, int], Answer], spec: RunSpec, at: Callable[[int], RunSpec], most: int
) -> None:
    peaks = [walked(at(value)) for value in range(1, most + 1)]
    assert peaks == sorted(peaks)  # the monotony that the search stands on
    for budget in {peak + more for peak in peaks for more in (-1, 0, 1)}:
        num_fitting = sum(peak <= budget for peak in peaks)
        answer = search(spec, budget)
        if num_fitting == most:  # the range ends here, what fits need not
            assert answer.value is not None
            assert answer.value >= most
        else:
            assert (answer.value or 0) == num_fitting
        assert_books_close(answer, budget)


def test_largest_batch_is_the_brute_force_one() -> None:
    for spec in specs(ranks=3, seq=11):
        check_largest(largest_batch, spec, lambda batch, spec=spec: replace(spec, batch=batch), 8)


def test_longest_seq_is_the_brute_force_one() -> None:
    for spec in specs(ranks=2, batch=3):
        check_largest(longest_seq, spec, lambda seq, spec=spec: replace(spec, seq=seq), 30)


def test_smallest_n_is_the_brute_force_one() -> None:
    for spec in specs(seq=7):
        groups = spec.shard_ranks or 1
        peaks = {ranks: walked(replace(spec, ranks=ranks)) for ranks in range(groups, 13, groups)}
        for budget in {peak + more for peak in peaks.values() for more in (-1, 0, 1)}:
            answer = smallest_ranks(spec, budget)
            fits = [ranks for ranks, peak in peaks.items() if peak <= budget]
            if fits:
                assert answer.value == min(fits)
            else:
                assert answer.value is None or (answer.value > max(peaks) and not spec.strategy.replicates)
            if answer.value:  # otherwise the closest attempt is one with 4,096 ranks, a long walk
                assert_books_close(answer, budget)


def test_smallest_n_where_padding_decides() -> None:
    """Near the square root of a unit's numel the peak goes up and down with N. All budgets between are tried.

    Here the peaks are the fast ones, which test_peak.py has shown to be the walk's: 400 walks would take long.
    """
    spec = RunSpec(model=PRESETS["tiny"], precision=Precision.BF16)
    peaks = [peak_of(replace(spec, ranks=ranks)).total for ranks in range(1, 401)]
    assert any(after > before for before, after in itertools.pairwise(peaks))
    for budget in sorted(set(peaks[150:]))[::3]:
        assert smallest_ranks(spec, budget).value == 1 + next(i for i, peak in enumerate(peaks) if peak <= budget)


# ---- by hand ----


@pytest.mark.parametrize(
    ("strategy", "smallest", "parts"),
    [
        # P = 7e9, 2 + 2 + 12 bytes, 83.75e9 to spend. The update's temporaries: 4 + 2 * 4 = 12 bytes an owned element.
        # DDP: 16P + 12P at any N.
        (Strategy.DDP, None, {"at_rest": 112, "update": 84}),
        # 4P + 12P/N + 12P/N = 28e9 + 168e9/N: 84e9 at 3 is just too much, 70e9 at 4.
        (Strategy.ZERO1, 4, {"at_rest": 49, "update": 21}),
        # 2P + 14P/N and the larger of 2P, 12P/N: 105e9 at 2; at 3 14 + 98/3 + 28.
        (Strategy.ZERO2, 3, {"at_rest": 14 + 98 / 3, "update": 28}),
        # 16P/N and 12P/N: 56 + 42 = 98 at 2; at 3 112/3 + 28. In backward 14P/N and 2P + 2P: 98/3 + 28.
        (Strategy.ZERO3, 3, {"at_rest": 112 / 3, "update": 28}),
    ],
)
def test_seven_billion_on_80_gib(strategy: Strategy, smallest: int | None, parts: dict[str, float]) -> None:
    spec = RunSpec(
        model=bare(7 * 10**9), strategy=strategy, precision=Precision.BF16_MIXED, unit=UnitPolicy.parse("model")
    )
    answer = smallest_ranks(spec, H100)
    assert answer.value == smallest
    for part in ("at_rest", "gathered", "gradients", "update", "activations", "temporaries", "inputs"):
        assert getattr(answer.ledger, part) == pytest.approx(parts.get(part, 0) * 1e9, abs=100), part


def test_a_bare_count_is_asked_for_n_alone() -> None:
    row = budget_row(RunSpec(model=bare(10**9), unit=UnitPolicy.parse("model")), H100)
    assert (row.largest_batch, row.longest_seq) == (None, None)


def test_gpt2_ends_at_its_positions_and_llama_where_memory_does() -> None:
    assert longest_seq(RunSpec(model=PRESETS["gpt2"]), H100).value == 1024
    answer = longest_seq(RunSpec(model=PRESETS["tiny-llama"]), H100)
    assert answer.value is not None
    assert answer.value > PRESETS["tiny-llama"].positions
    assert peak_of(replace(answer.spec, seq=answer.value + 1)).total > H100
    assert longest_seq(RunSpec(model=PRESETS["tiny-llama"]), 10**21).value == MAX_COUNT


def test_a_budget_is_at_least_a_byte() -> None:
    with pytest.raises(SpecError, match="at least 1"):
        budget_row(RunSpec(model=PRESETS["tiny"]), 0)


# ---- reasons: what alone is too much, and what to cut first ----


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # 80 layers of 8,192 tokens keep hundreds of gigabytes, whatever N.
        (
            {"seq": 8192},
            (
                "no N up to 4,096 helps",
                "activations",
                "no strategy divides",
                "cut --seq or recompute (--checkpointing block) first",
            ),
        ),
        ({"seq": 64, "batch": 128}, ("activations", "cut --batch or recompute (--checkpointing block) first")),
        ({"strategy": Strategy.DDP}, ("the states at rest alone exceed", "shard more (--strategy zero3) first")),
        ({"strategy": Strategy.ZERO2}, ("the states at rest alone exceed", "--strategy zero3")),
        ({"unit": UnitPolicy.parse("model")}, ("the unit in use (model) alone", "smaller units (--unit block) first")),
        ({"unit": UnitPolicy.parse("block:40")}, ("alone exceed", "smaller units (--unit block) first")),
        ({"prefetch": 60}, ("the unit in use", "gather fewer units ahead (--prefetch 0) first")),
    ],
)
def test_why_70b_does_not_fit_at_any_n(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    spec = RunSpec(model=PRESETS["llama3-70b"], precision=Precision.BF16_MIXED, **settings)
    answer = smallest_ranks(spec, parse_capacity("a100-80gb").nbytes)
    assert answer.value is None
    assert answer.spare_nbytes < 0
    for word in words:
        assert word in answer.reason


def test_too_few_ranks_says_how_many_it_takes() -> None:
    """16 bytes a parameter of 8.03e9 are 64e9 on 2 ranks and 43e9 on 3; a token's own bytes are nothing beside."""
    spec = RunSpec(model=PRESETS["llama3-8b"], precision=Precision.BF16_MIXED, ranks=2)
    budget = 60 * 10**9
    assert largest_batch(spec, budget).reason == "one sequence needs at least 3 ranks: more ranks first"
    assert longest_seq(spec, budget).reason == "one token needs at least 3 ranks: more ranks first"
    assert largest_batch(replace(spec, ranks=3), budget).value is not None


# ---- capacities ----


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("h100-80gb", 85_899_345_920),
        ("A100-40GB", 42_949_672_960),
        ("h200-141gb", 150_754_820_096),
        ("80GB", 80 * 10**9),
        ("80 gib", 80 * 2**30),
        ("1.5kB", 1500),
        ("85899345920", 85_899_345_920),
        ("8e10", 80 * 10**9),
        ("80_000", 80_000),
        ("7B", 7),  # bytes here, where --params 7B is a count
    ],
)
def test_capacities(text: str, nbytes: int) -> None:
    assert parse_capacity(text).nbytes == nbytes


@pytest.mark.parametrize(
    "text", ["", "h100", "80XB", "GB", "-1", "0", "1.5", "nan", "inf", "1e400GB", "1e-400", "9e21", "8 0 GB x"]
)
def test_other_capacities_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="allowed are a100-40gb, "):
        parse_capacity(text)


def test_reserves() -> None:
    assert [parse_reserve(text) for text in ("0", "2GiB", "1e9")] == [0, DEFAULT_RESERVE_NBYTES, 10**9]
    with pytest.raises(SpecError, match="--reserve is '-1'"):
        parse_reserve("-1")


# ---- the command ----


def zeroviz(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["budget", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "llama3-8b", "--gpu", "h100-80gb", "--ranks", "8", "--seq", "8192"),
        ("--model", "llama3-70b", "--gpu", "40GB", "--unit", "model", "--seq", "4096", "--batch", "16"),
        ("--model", "tiny", "--prefetch", "2", "--async-reduce", "true", "--zero1-form", "all-reduce"),
        ("--params", "1e15", "--ranks", "1000000"),
        ("--params", "1e18", "--gpu", "999999999999999999999", "--reserve", "0"),
        ("--model", "tiny-llama", "--gpu", "999999999999999999999"),
    ],
)
def test_table_is_80_columns_wide_and_says_what_it_assumes(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = zeroviz(capsys, *words)
    assert [line for line in out.splitlines() if len(line) > WIDTH] == []
    assert "inf" not in out
    flat = " ".join(out.split())
    if "--reserve" not in words:
        assert "assumed for driver context, NCCL's buffers" in flat
    if "--model" in words:
        assert "torch's CPU kernels" in flat


def test_table_of_one_strategy_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes by hand: P = 1e9, fp32, ZeRO-3 at N = 1: 16P at rest, 8P for the update: 24e9 of 30e9. In backward 12P, the
    gradient being gone, 4P gathered, 4P of gradient."""
    options = {"--params": "1e9", "--strategy": "zero3", "--precision": "fp32", "--gpu": "30GB", "--reserve": "0"}
    out = zeroviz(capsys, *itertools.chain.from_iterable(options.items()))
    line = "  fp32                   1  16.0 GB        0        0        0  8.00 GB  6.00 GB"
    assert line in out.splitlines()
    assert "reserve   none" in out


def test_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(zeroviz(capsys, "--model", "llama3-8b", "--ranks", "8", "--seq", "2048", "--json"))
    assert data["schema"] == "zeroviz.budget/1"
    assert data["gpu"] == {"name": "h100-80gb", "capacity_nbytes": 85_899_345_920, "is_nominal": True}
    assert data["budget_nbytes"] == H100
    assert [(row["strategy"], row["precision"]) for row in data["rows"]] == [
        (strategy.value, precision.value)
        for strategy in Strategy
        if not strategy.replicates  # without --shard-ranks there is no such row
        for precision in OWN_PRECISIONS
        if exists(strategy, precision)
    ]
    for row in data["rows"]:
        for answer in (row["smallest_ranks"], row["largest_batch"], row["longest_seq"]):
            assert sum(answer["ledger"].values()) == answer["peak"]["total"] == H100 - answer["spare_nbytes"]
            spec = RunSpec(
                model=PRESETS["llama3-8b"],
                strategy=Strategy(row["strategy"]),
                precision=Precision(row["precision"]),
                **answer["at"],
            )
            assert answer["peak"]["total"] == peak_of(spec).total


def test_settings_of_one_strategy_go_to_that_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(zeroviz(capsys, "--prefetch", "3", "--precision", "bf16", "--json"))
    assert [row["prefetch"] for row in data["rows"]] == [0, 0, 0, 3, 3]
    data = json.loads(zeroviz(capsys, *["--ranks", "8", "--shard-ranks", "4", "--precision", "bf16", "--json"]))
    assert [row["shard_ranks"] for row in data["rows"]] == [None] * 5 + [4]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu b200", "--gpu is 'b200'; allowed are a100-40gb, a100-80gb, h100-80gb, h200-141gb, or a capacity"),
        ("--gpu 1GB", "The reserve of 2.147 GB leaves nothing of --gpu 1GB"),
        ("--reserve much", "--reserve is 'much'"),
        ("--strategy ddp --prefetch 2", "prefetch is 2 with strategy ddp"),
        ("--zero1-form tree", "--zero1-form is 'tree'; allowed are reduce-scatter, all-reduce"),
        ("--params 7e9 --unit block", "a bare parameter count has no blocks"),
        ("--model gpt2 --seq 2000", "learned positions for 1024 tokens"),
        ("--ranks 0", "ranks is 0"),
        ("--figure a.svg", "not known to `zeroviz budget`"),
    ],
)
def test_refusals(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_more_shard_groups_help_no_rank_and_the_budget_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """P = 1e9 in fp32, 2 ranks a group: 8P at rest, of them 6P with 4P + 4P in backward, 14e9 bytes, whatever the
    number of groups."""
    words = "--params 1e9 --strategy hybrid_shard --ranks 64 --shard-ranks 2 --precision fp32 --reserve 0"
    data = json.loads(zeroviz(capsys, *words.split(), "--gpu", "14GB", "--json"))
    (row,) = data["rows"]
    assert row["shard_ranks"] == 2 and row["smallest_ranks"]["value"] == 2
    assert row["smallest_ranks"]["peak"]["total"] == 14 * 10**9
    out = zeroviz(capsys, *words.split(), "--gpu", "13GB")
    assert "HYBRID_SHARD, groups of 2 ranks" in out
    assert "more shard groups of 2 are copies and do not help" in " ".join(out.split())
