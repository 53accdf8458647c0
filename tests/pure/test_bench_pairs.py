"""The bench's pairs, ratios, report and table, without a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeroviz.bench import Pair, Side, Spread, pairs_of, report
from zeroviz.cli import main
from zeroviz.errors import SpecError
from zeroviz.implementations import PAIRS
from zeroviz.models import PRESETS
from zeroviz.settings import Settings
from zeroviz.spec import Implementation, Precision, RunSpec, Strategy
from zeroviz.tables_bench import render_bench

BASE = RunSpec(model=PRESETS["tiny"], ranks=2, seq=17)
FACTS = {
    "torch": "2",
    "python": "3",
    "backend": "gloo",
    "devices": ["cpu", "cpu"],
    "host_cores": 2,
    "load_before": [1.5],
}


def side(times: tuple[int, ...], peak: int = 1000, **changes: Any) -> Side:
    figures: dict[str, Any] = {
        "step_time_ns": times,
        "cpu_time_ns": times,
        "rest_nbytes": 500,
        "peak_nbytes": peak,
        "here_nbytes": peak + 1,
        "sent_nbytes": 300,
        "loss": 5.5,
    }
    return Side(**{**figures, **changes})


def pair(own: Side, other: Side) -> Pair:
    return Pair(strategy=Strategy.ZERO3, impl=Implementation.FSDP2, own=own, other=other)


# ---- pairs ----


def test_every_pair_of_every_implementation_is_there_once_and_those_with_an_aim_come_first() -> None:
    found = pairs_of(replace(BASE, strategy=Strategy.HYBRID_SHARD, shard_ranks=2))
    names = [
        (each.impl, each.strategy) if isinstance(each, Pair) else (each[1].impl, each[1].strategy) for each in found
    ]
    assert sorted(names, key=str) == sorted(
        ((impl, its) for impl, strategies in PAIRS.items() if impl is not Implementation.OWN for its in strategies),
        key=str,
    )
    assert list(dict.fromkeys(impl for impl, _ in names))[:3] == [
        Implementation.FSDP2,
        Implementation.DDP,
        Implementation.ZERO_REDUNDANCY,
    ]
    # Which is refused is said and not left out.
    assert all(each.absent for each in found if isinstance(each, Pair))


@pytest.mark.parametrize("impl", [impl for impl in Implementation if impl is not Implementation.OWN])
def test_the_two_sides_differ_in_whose_code_and_when_it_sends_alone(impl: Implementation) -> None:
    for each in pairs_of(replace(BASE, prefetch=1), impl):
        if isinstance(each, Pair):
            assert each.strategy is Strategy.HYBRID_SHARD  # whose groups were not given
            continue
        own, other = each
        assert (own.impl, other.impl) == (Implementation.OWN, impl)
        assert replace(own, impl=impl, prefetch=0, async_reduce=False) == other
        assert own.prefetch == own.strategy.shards_param  # where there is anything to gather ahead
        assert own.async_reduce is (own.strategy in (Strategy.DDP, Strategy.ZERO1))  # where it costs no byte


def test_settings_are_the_other_sides() -> None:
    ((own, other),) = pairs_of(BASE, Implementation.DDP, settings=Settings(bucket_view=True))  # type: ignore[misc]
    assert (own.settings.bucket_view, other.settings.bucket_view) == (None, True)


def test_what_a_library_cannot_do_is_absent_with_the_reason() -> None:
    (found,) = pairs_of(replace(BASE, precision=Precision.BF16_MIXED), Implementation.DDP)
    assert isinstance(found, Pair)
    assert "precision is 'bf16-mixed' with impl ddp" in found.absent


@pytest.mark.parametrize(
    ("impl", "strategy", "words"),
    [
        (Implementation.OWN, None, "one side of every pair"),
        (Implementation.FSDP2, Strategy.ZERO2, "there is deepspeed zero2"),
    ],
)
def test_a_pair_that_is_none_is_refused(impl: Implementation, strategy: Strategy | None, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        pairs_of(BASE, impl, strategy)


# ---- ratios ----


def test_a_ratio_is_of_one_round_and_the_median_of_all_is_shown() -> None:
    """1/2, 3/3 and 10/4: a round that was disturbed, 10, does not move the median; medians of times would give 3/3."""
    measured = pair(side((1, 3, 10)), side((2, 3, 4)))
    assert measured.time_ratios == (0.5, 1.0, 2.5)
    assert Spread.of(measured.time_ratios) == Spread(0.75, 1.0, 1.75)
    with pytest.raises(ValueError, match="1 values have no spread"):
        Spread.of((1.0,))


# ---- report and table ----


def test_the_report_has_every_figure_and_every_reason() -> None:
    pairs = [
        pair(side((2, 4), peak=900), side((4, 4), peak=1000)),
        Pair(strategy=Strategy.ZERO2, impl=Implementation.DEEPSPEED, absent="it is not installed."),
    ]
    found = json.loads(json.dumps(report(BASE, 2, pairs, FACTS)))
    assert (found["schema"], found["rounds"], found["environment"]) == ("zeroviz.bench/1", 2, FACTS)
    assert found["model"] == {"name": "tiny", "num_params": 133_106}
    measured, absent = found["pairs"]
    assert measured["own_over_other"]["step_time"]["median"] == 0.75
    assert measured["own_over_other"]["peak"] == 0.9
    assert measured["figures"]["own"]["step_time_ns"] == [2, 4]
    assert absent == {
        "strategy": "zero2",
        "own": "own",
        "other": "deepspeed",
        "absent": "it is not installed.",
        "failed": False,
    }
    assert RunSpec.from_dict(found["spec"]) == BASE


def test_one_rank_sends_nothing_and_has_no_ratio_of_it() -> None:
    quiet = pair(side((1, 1), sent_nbytes=0), side((1, 1), sent_nbytes=0))
    assert report(BASE, 2, [quiet], {})["pairs"][0]["own_over_other"]["sent"] is None
    line = next(line for line in render_bench(BASE, 2, [quiet], {}).splitlines() if "sent" in line)
    assert line.split()[-2:] == ["0", "0"]


@pytest.mark.parametrize("scale", [1, 10**6, 10**9])
def test_the_table_fits_the_terminal_and_says_what_is_above(scale: int) -> None:
    other = side((10**9, 10**9), peak=1000 * scale, rest_nbytes=500 * scale, sent_nbytes=300 * scale)
    own = replace(other, peak_nbytes=1001 * scale, step_time_ns=(2 * 10**9, 10**9))
    for impl in Implementation:
        pairs = [replace(pair(own, other), impl=impl), Pair(strategy=Strategy.DDP, impl=impl, absent="reason " * 20)]
        text = render_bench(BASE, 2, pairs, FACTS)
        assert max(map(len, text.splitlines())) <= 80
        assert text.isascii()
        said = " ".join(text.partition("ABOVE 1.0")[2].split())
        assert f"zero3 beside {impl.value}: step time 1.500; zero3 beside {impl.value}: peak 1.001" in said
        assert "ABSENT" in text
    assert "at most the other in step time and peak in the pair" in " ".join(
        render_bench(BASE, 2, [pair(other, other)], FACTS).split()
    )


# ---- the command line ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "1"], "--rounds is '1'; it must be a whole number from 2"),
        (["--rounds", "many"], "--rounds is 'many'"),
        (["--steps", "5"], "--steps is 5, but a bench makes --rounds of each"),
        (["--params", "7e9"], "a bare count, which has no layers to run"),
        (["--out", "table.txt"], "its name must end in .json"),
        (["--impl", "own"], "one side of every pair"),
        (["--bucket-view", "true"], "--bucket-view is a setting of other implementations; name one with --impl"),
        (["--impl", "fsdp2", "--bucket-view", "true"], "has no such setting"),
        (["--impl", "ddp", "--strategy", "zero1"], "no pair to set beside our own"),
        (["--model", "nothing"], "Model is 'nothing'; allowed are"),
    ],
)
def test_what_cannot_be_benched_is_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []
