"""`zeroviz bench` on real ranks: two models in the same processes, each measured as if it were alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import bench
from cluster.bench import bench_pairs
from cluster.rank import RankJob
from tests.dist.ranks import RankPool
from zeroviz.bench import Pair, pairs_of
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Implementation, RunSpec, Strategy

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
BASE = RunSpec(model=PRESETS["tiny"], ranks=2, seq=17)
NUM_ROUNDS = 3


def bench_one(job: RankJob) -> dict[str, Any]:
    """The pair of the job's strategy: our own and, told by the seed, another's."""
    impl = list(Implementation)[job.spec.seed]
    ((own, other),) = pairs_of(replace(job.spec, seed=0), impl, job.spec.strategy)  # type: ignore[misc]
    return bench.bench_rank(replace(job, spec=own, against=other, num_rounds=NUM_ROUNDS))


@pytest.mark.parametrize(
    ("impl", "strategy", "ranks"),
    [
        (Implementation.FSDP2, Strategy.ZERO3, 2),
        (Implementation.DDP, Strategy.DDP, 3),
        (Implementation.ZERO_REDUNDANCY, Strategy.ZERO1, 2),
        (Implementation.DDP, Strategy.DDP, 1),
    ],
)
def test_each_side_is_measured_as_if_it_were_alone(
    rank_pool: RankPool, impl: Implementation, strategy: Strategy, ranks: int
) -> None:
    """Bytes are the predicted ones of either, to the byte, whatever the other model holds beside it; and both have
    trained on the same tokens: the same loss after as many steps."""
    spec = replace(BASE, strategy=strategy, ranks=ranks)
    ((own, other),) = pairs_of(spec, impl, strategy)  # type: ignore[misc]
    number = list(Implementation).index(impl)
    results = rank_pool.run(bench_one, replace(spec, seed=number))
    for name, each in (("own", own), ("other", other)):
        for rank, expected in zip(results, predict(each).ranks, strict=True):
            got = rank[name]
            assert (got["rest_nbytes"], got["peak_nbytes"]) == (expected.rest_nbytes, expected.peak().total), name
            assert got["sent_nbytes"] == expected.sent_nbytes
            assert len(got["step_time_ns"]) == len(got["cpu_time_ns"]) == NUM_ROUNDS
            assert min(*got["step_time_ns"], *got["cpu_time_ns"]) > 0
    for rank in results:
        assert rank["own"]["loss"] == pytest.approx(rank["other"]["loss"], rel=1e-5)


def test_rounds_take_turns_and_are_not_metered(rank_pool: RankPool) -> None:
    for order, metered in rank_pool.run(observed, replace(BASE, strategy=Strategy.DDP)):
        timed = [name for name in order if name is not None]
        assert timed == ["own", "other", "other", "own", "own", "other"]
        assert metered == [False] * len(timed)


def observed(job: RankJob) -> tuple[list[str], list[bool]]:
    """Which side each timed step was of, and whether a recorder was on."""
    order: list[str] = []
    metered: list[bool] = []
    whole = bench.BenchSide.timed_step

    def watched(side: bench.BenchSide) -> tuple[int, int]:
        order.append("own" if side.spec.impl is Implementation.OWN else "other")
        metered.append(side.meter._recorder is not None)
        return whole(side)

    bench.BenchSide.timed_step = watched  # type: ignore[method-assign]
    try:
        bench_one(replace(job, spec=replace(job.spec, seed=list(Implementation).index(Implementation.DDP))))
    finally:
        bench.BenchSide.timed_step = whole  # type: ignore[method-assign]
    return order, metered


def test_what_is_not_to_be_had_is_absent_and_what_breaks_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the bench goes on, on fresh engines where a pair broke them."""
    given = Pair(strategy=Strategy.ZERO2, impl=Implementation.DEEPSPEED, absent="because.")
    own = replace(BASE, strategy=Strategy.DDP)
    fine = (own, replace(own, impl=Implementation.DDP))
    too_large = tuple(replace(each, ranks=64, model=PRESETS["llama3-8b"]) for each in fine)
    broken = (own, replace(own, impl=Implementation.OWN, ranks=1))  # one rank's group, two ranks' job
    wanted: list[Any] = [given, too_large, broken, fine]
    pairs, facts = asyncio.run(bench_pairs(wanted, 2, lambda _: None))
    assert [pair.failed for pair in pairs] == [False, False, True, False]
    assert pairs[0] == given
    assert "of memory are free" in pairs[1].absent
    assert "ank" in pairs[2].absent
    assert pairs[3].own is not None and pairs[3].other is not None
    assert facts["backend"] == "gloo"


def test_the_command_prints_a_table_and_writes_both_files(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ["bench", "--model", "tiny", "--impl", "ddp", "--rounds", "2", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "zeroviz.cli", *words], capture_output=True, text=True, cwd=ROOT, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("BENCH: 2 ranks, fp32; tiny, 133,106 parameters")
    assert max(map(len, done.stdout.splitlines())) <= 80
    report = json.loads(out.read_text())
    assert [(entry["strategy"], entry["other"]) for entry in report["pairs"]] == [("ddp", "ddp")]
    assert report["spec"]["seq"] == 128
    assert out.with_suffix(".md").read_text() == f"```\n{done.stdout.rstrip()}\n```\n"
    assert "1/1: ddp, own and ddp, 2 rounds" in done.stderr
