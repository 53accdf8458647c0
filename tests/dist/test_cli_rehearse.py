"""`zeroviz rehearse`, and FSDP2 on the command line, as a person calls them: as processes, with signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.dist.test_cli_live import ROOT, STOP_TIMEOUT_S, command, zeroviz
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy
from zeroviz.trace import Origin, Trace

pytestmark = pytest.mark.dist


def test_it_prints_the_report_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    trace_file, figure, timeline = (tmp_path / name for name in ("trace.json", "picture.svg", "step.svg"))
    files = ("--trace", str(trace_file), "--figure", str(figure), "--timeline", str(timeline))
    done = zeroviz("rehearse", "--json", "--ranks", "3", "--impl", "fsdp2", *files)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["origin"]) == ("zeroviz.report/1", "rehearsed")
    trace = Trace.from_json(trace_file.read_text())
    assert (trace.origin, trace.report()) == (Origin.REHEARSED, report)
    for picture in (figure, timeline):
        assert picture.read_bytes().startswith(b"<?xml") and b"ehearsed" in picture.read_bytes()
    assert "rehearsed in" in done.stderr


def test_a_large_model_on_many_ranks_is_rehearsed_as_predicted() -> None:
    words = ("--model", "llama3-8b", "--ranks", "1000", "--precision", "bf16-mixed", "--strategy", "shard_grad_op")
    done = zeroviz("rehearse", "--json", *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    spec = RunSpec(
        model=PRESETS["llama3-8b"], ranks=1000, precision=Precision.BF16_MIXED, strategy=Strategy.SHARD_GRAD_OP
    )
    expected = predict(spec).report()
    assert report["spec"] == expected["spec"]
    for rank, want in zip(report["ranks"], expected["ranks"], strict=True):
        assert (rank["at_rest"], rank["peak"], rank["wire"]) == (want["at_rest"], want["peak"], want["wire"])
        assert rank["allocator"] is None and rank["losses"] == []


def test_it_is_shown_beside_the_prediction() -> None:
    done = zeroviz("rehearse", "--ranks", "3", "--model", "tiny-llama", "--precision", "bf16-mixed", "--unit", "layer")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("REHEARSED: ZeRO-3 on 3 ranks, tiny-llama (")
    assert max(map(len, done.stdout.splitlines())) <= 80
    heads = [line for line in done.stdout.splitlines() if "difference" in line]
    assert len(heads) == 4 and all("predicted" in head and "rehearsed" in head for head in heads)
    for title in ("AT REST", "PEAK AS ON NCCL", "THE STEP", "ON THE WIRE"):
        assert f"\n{title}" in done.stdout
    assert "NOT AS PREDICTED" not in done.stdout
    ops = next(line for line in done.stdout.splitlines() if line.startswith("  ops"))
    num_equal, num_ops = ops.split()[1], ops.split()[3]
    assert num_equal == num_ops and "the predicted maximum" in ops
    for line in done.stdout.splitlines():
        if line.startswith("  total"):
            assert line.split()[3] == "0"


def test_fsdp2_is_rehearsed_and_run_beside_its_prediction() -> None:
    """Nothing differs: neither at rest, nor at either peak, nor in any op, nor on the wire."""
    rehearsed = zeroviz("rehearse", "--ranks", "3", "--impl", "fsdp2")
    assert rehearsed.returncode == 0, rehearsed.stderr
    assert rehearsed.stdout.startswith("REHEARSED: ZeRO-3 (fsdp2) on 3 ranks, tiny (")
    # The last rank holds fewer rows, and moments of them only.
    assert "AT REST, ranks 0-1" in rehearsed.stdout and "AT REST, rank 2" in rehearsed.stdout
    run = zeroviz("run", "--ranks", "3", "--impl", "fsdp2", "--steps", "2")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("LIVE: ZeRO-3 (fsdp2) on 3 ranks, tiny (")
    for done in (rehearsed, run):
        assert "predicted" in done.stdout and "NOT AS" not in done.stdout
        totals = [line.split() for line in done.stdout.splitlines() if line.startswith(("  total", "  unexplained"))]
        assert len(totals) >= 4
        assert all(words[3] == "0" for words in totals if words[0] == "total")
        assert all(words[1] == "0" for words in totals if words[0] == "unexplained")
        ops = [line.split() for line in done.stdout.splitlines() if line.startswith("  ops")]
        assert ops and all(words[1] == words[3] for words in ops)


def test_a_run_that_does_not_fit_offers_the_rehearsal_and_that_works() -> None:
    """On a machine without a GPU; 405 billion parameters fit no other one either."""
    done = zeroviz("run", "--model", "llama3-70b", "--ranks", "64", "--precision", "bf16-mixed")
    assert (done.returncode, done.stdout) == (2, "")
    offered = done.stderr.partition("`")[2].partition("`")[0]
    assert offered == "zeroviz rehearse --model llama3-70b --strategy zero3 --ranks 64 --precision bf16-mixed"
    assert zeroviz(*offered.split()[1:], "--json").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_long_rehearsal_says_so_first_and_ends_at_once(number: signal.Signals) -> None:
    """64 micro-batches of an 80-block model: minutes. The estimate is there within seconds, and so is the end."""
    process = subprocess.Popen(
        command("rehearse", "--model", "llama3-70b", "--accumulation", "64", "--ranks", "8"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stderr is not None
    news = [next(process.stderr), next(process.stderr)]
    assert news[0] == "rehearsing ZeRO-3 on 8 ranks, fp32\n"
    assert news[1].startswith("rehearsing: this takes about ") and news[1].endswith("; Ctrl-C ends it\n")
    started = time.monotonic()
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - started < STOP_TIMEOUT_S
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "zeroviz: interrupted; nothing was left running."
