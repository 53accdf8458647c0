"""`zeroviz run` and `zeroviz doctor` as a person calls them: as processes, with signals, on real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from cluster.doctor import Findings, collective_checks
from cluster.reaper import MARK
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy
from zeroviz.trace import Category, Origin, Trace

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 5.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "zeroviz.cli", *words]


def zeroviz(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_run_prints_the_live_report_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    trace_file, figure = tmp_path / "trace.json", tmp_path / "picture.svg"
    words = (
        "run",
        "--json",
        "--ranks",
        "2",
        "--strategy",
        "zero2",
        "--trace",
        str(trace_file),
        "--figure",
        str(figure),
    )
    done = zeroviz(*words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["origin"]) == ("zeroviz.report/1", "live")
    # What is measured at rest is what was predicted, to the byte and by category.
    spec = RunSpec(model=PRESETS["tiny"], strategy=Strategy.ZERO2, ranks=2)
    for rank, expected in zip(report["ranks"], predict(spec).report()["ranks"], strict=True):
        assert rank["at_rest"]["by_category"] == expected["at_rest"]["by_category"]
        assert rank["wire"] == expected["wire"]
        assert len(rank["losses"]) == spec.steps
    trace = Trace.from_json(trace_file.read_text())
    assert (trace.origin, trace.report()) == (Origin.LIVE, report)
    assert figure.read_bytes().startswith(b"<?xml")
    # Progress is news, not data: it goes to stderr, a line each where stderr is no terminal.
    assert "\r" not in done.stderr
    assert "done in" in done.stderr


def test_run_shows_measured_beside_predicted() -> None:
    done = zeroviz("run", "--ranks", "2", "--model", "tiny-llama", "--precision", "bf16-mixed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("LIVE: ZeRO-3 on 2 ranks, tiny-llama (")
    assert max(map(len, done.stdout.splitlines())) <= 80
    parts = ("AT REST", "PEAK AS ON NCCL", "PEAK AS HERE", "Outside torch's allocator", "THE STEP", "ON THE WIRE")
    for title in (*parts, "ALLOCATOR", "LOSS", "STEP TIME", "ENVIRONMENT"):
        assert f"\n{title}" in done.stdout
    rest = done.stdout.partition("AT REST")[2].partition("PEAK AS ON NCCL")[0]
    for category in (Category.SHARDED_PARAM, Category.SHARDED_GRAD, Category.MASTER_PARAM, Category.OPTIMIZER_STATE):
        (line,) = [line for line in rest.splitlines() if category.value in line]
        assert line.split()[3] == "0", f"{category.value} differs: {line}"


def test_doctor_finds_every_collective_right() -> None:
    done = zeroviz("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    checks = {check["name"]: check["ok"] for check in report["checks"]}
    collectives = {
        f"{op} {dtype}" for op in ("all_reduce", "all_gather", "reduce_scatter") for dtype in ("fp32", "bf16")
    }
    assert collectives <= checks.keys()
    assert report["ok"] is all(checks.values()) is True


def test_doctor_names_what_a_dead_owner_left_behind(tmp_path: Path) -> None:
    """A process with a pool's mark and no guard beside it."""
    left = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: str(tmp_path / "pool")})
    try:
        done = zeroviz("doctor")
    finally:
        left.kill()
        left.wait()
    assert done.returncode == 1
    assert f"kill -9 {left.pid}" in " ".join(done.stdout.split())
    assert "1 of 27 checks failed: leftover engines." in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_collective_that_is_wrong_on_one_rank_fails() -> None:
    fine, wrong = collective_checks("gloo", [{"a fp32": "", "b fp32": ""}, {"a fp32": "", "b fp32": "rank 1 got [2]"}])
    assert (fine.ok, wrong.ok) == (True, False)
    assert "rank 1 got [2]" in wrong.detail
    text = Findings((fine, wrong)).render()
    assert "FAILED" in text
    assert text.endswith("1 of 2 checks failed: b fp32.")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["starting", "running"])
def test_an_interrupted_run_leaves_nothing(number: signal.Signals, stage: str) -> None:
    """Also when the impatient press twice; a terminal sends Ctrl-C to the whole process group."""
    process = subprocess.Popen(
        command("run", "--ranks", "2", "--steps", "100000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(stage):
            break
    children = psutil.Process(process.pid).children(recursive=True)
    started = time.monotonic()
    os.killpg(process.pid, number)
    time.sleep(0.1)
    if process.poll() is None:
        os.killpg(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - started < STOP_TIMEOUT_S
    assert process.returncode == 130
    assert out == ""
    assert err.endswith("zeroviz: interrupted; nothing was left running.\n")
    assert "Traceback" not in err
    assert _alive(children) == []


def _alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. A zombie has ended; its new parent has not yet asked how."""
    psutil.wait_procs(processes, timeout=1)
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
