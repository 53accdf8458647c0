"""A session's life with real engines: start, grow, subset, warm rerun, stop; and what it refuses to start."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster import capacity
from cluster.live import LiveBackend
from cluster.placement import place
from cluster.session import Session
from tests.dist.fake_ranks import CHATTER, HANG
from tests.dist.helpers import FAKE_TARGET, Messages, members, pool_directory, tiny, wait_until
from zeroviz.backend import RunState
from zeroviz.errors import RunError, SpecError
from zeroviz.models import Family, ModelShape
from zeroviz.spec import RunSpec, Strategy, UnitKind, UnitPolicy, preset
from zeroviz.trace import Origin

pytestmark = pytest.mark.dist


def test_first_run_starts_engines_and_says_so(warm: Session) -> None:
    progress = Messages()
    trace = asyncio.run(LiveBackend(warm).run(tiny(2), progress))
    trace.check()
    assert trace.origin is Origin.LIVE
    assert [rank.rank for rank in trace.ranks] == [0, 1]
    assert trace.environment is not None
    assert trace.environment["backend"] == "gloo"
    assert trace.environment["devices"] == ["cpu", "cpu"]
    assert trace.environment["engines"] == "cold"
    assert progress.texts[0] == "starting 0/2 engines"
    assert "starting 2/2 engines" in progress.texts
    assert "running DDP on 2 ranks, fp32 (gloo, cpu)" in progress.texts
    assert progress.texts[-1].startswith("done in ")
    states = [line.state for line in progress]
    assert states == sorted(states, key=[RunState.STARTING, RunState.RUNNING, RunState.DONE].index)


def test_warm_rerun_starts_nothing(warm: Session) -> None:
    warm.ensure_sync(2)
    pids, progress = warm.pids, Messages()
    done = warm.run_sync(tiny(2), progress)
    assert not done.cold
    assert done.start_s < 0.5
    assert warm.pids == pids
    assert [line.state for line in progress] == [RunState.RUNNING]


def test_grow_keeps_the_engines_and_a_subset_uses_them(warm: Session) -> None:
    warm.ensure_sync(2)
    before, progress = warm.pids, Messages()
    warm.ensure_sync(3, progress)
    assert warm.pids[: len(before)] == before
    assert len(warm.pids) == 3
    assert progress.texts[0] == "starting 2/3 engines"
    for ranks in (1, 3, 2):
        done = warm.run_sync(tiny(ranks, Strategy.DDP))
        assert [rank["rank"] for rank in done.ranks] == list(range(ranks))
        assert not done.cold


def test_a_session_serves_several_loops_and_runs_one_at_a_time(warm: Session) -> None:
    async def both() -> list[float]:
        spans = []

        async def one() -> None:
            progress = Messages()
            started: list[float] = []

            def show(line: object) -> None:
                started.append(time.monotonic())
                progress(line)  # type: ignore[arg-type]

            await warm.run(tiny(2), show)
            spans.append((started[-1], time.monotonic()))

        await asyncio.gather(one(), one())
        (_, first_end), (second_start, _) = sorted(spans)
        return [first_end, second_start]

    for _ in range(2):
        first_end, second_start = asyncio.run(both())
        assert second_start >= first_end - 0.05


def test_the_callers_loop_stays_free() -> None:
    """Starting, running and stopping never hold the caller's loop: it lags no more than a thread of its own does, on a
    machine however busy, plus a quarter of a second."""

    async def main() -> float:
        worst, stop_ticking, worst_beside = 0.0, False, 0.0

        async def tick() -> None:
            nonlocal worst
            while not stop_ticking:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                worst = max(worst, time.monotonic() - before - 0.01)

        def tick_beside() -> None:
            nonlocal worst_beside
            while not stop_ticking:
                before = time.monotonic()
                time.sleep(0.01)
                worst_beside = max(worst_beside, time.monotonic() - before - 0.01)

        beside = threading.Thread(target=tick_beside)
        beside.start()
        ticking = asyncio.create_task(tick())
        async with Session(target=FAKE_TARGET) as session:
            await session.run(tiny(1))
        stop_ticking = True
        await ticking
        beside.join()
        return worst - worst_beside

    assert asyncio.run(main()) < 0.25


def test_stop_leaves_nothing_and_is_idempotent() -> None:
    with Session(target=FAKE_TARGET) as session:
        session.stop_sync()  # before anything was started
        session.run_sync(tiny(1))
        directory = pool_directory(session)
        assert members(directory)
        assert all(os.getsid(pid) != os.getsid(0) for pid in members(directory))  # out of reach of a terminal's Ctrl-C
        started = time.monotonic()
        session.stop_sync()
        assert time.monotonic() - started < 3.0
        assert members(directory) == []
        assert not directory.exists()
        assert session.pids == []
        session.stop_sync()


def test_stop_ends_a_run_in_progress() -> None:
    async def main() -> None:
        async with Session(target=FAKE_TARGET) as session:
            await session.ensure(1)
            run = asyncio.create_task(session.run(tiny(1, seed=HANG)))
            await asyncio.sleep(0.3)
            started = time.monotonic()
            await session.stop()
            with pytest.raises(RunError, match="stopped"):
                await run
            assert time.monotonic() - started < 3.0

    asyncio.run(main())


def test_an_owner_stays_light_and_its_terminal_quiet(tmp_path: Path) -> None:
    """A run imports no torch into the owner, prints nothing of the engines' and leaves nothing in the home directory;
    an owner that forgets to stop leaves no process."""
    script = f"""
import sys
from cluster.session import Session
from tests.dist.helpers import tiny
session = Session(target="{FAKE_TARGET}")
session.run_sync(tiny(2, seed={CHATTER}))
assert "torch" not in sys.modules
print(*session.pids)
"""
    home = tmp_path / "home"
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": os.pathsep.join([os.getcwd()])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert not home.exists()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 10, "engines of a finished owner gone")


def test_a_bare_count_cannot_be_run() -> None:
    model = ModelShape(name="7e9 parameters", family=Family.BARE, bare_num_params=7 * 10**9)
    with Session() as session, pytest.raises(SpecError, match="no layers to run"):
        session.run_sync(RunSpec(model=model, unit=UnitPolicy(UnitKind.MODEL)))


def test_what_does_not_fit_is_refused_before_anything_starts() -> None:
    spec = RunSpec(model=preset("llama3-8b"), strategy=Strategy.DDP, ranks=64, batch=1)
    progress = Messages()
    line = "`zeroviz rehearse --model llama3-8b --strategy ddp --ranks 64`"
    with Session() as session, pytest.raises(SpecError, match=rf"takes .* are free\. .*{line}"):
        session.run_sync(spec, progress)
    assert progress == []


def test_warm_engines_are_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny(4)
    monkeypatch.setattr(capacity, "free_nbytes", lambda: 3 * capacity.ENGINE_NBYTES)
    with pytest.raises(SpecError, match="4 engines"):
        capacity.check_capacity(spec, num_warm=0)
    capacity.check_capacity(spec, num_warm=2)
    # Four engines fit, but not with the step of the ranks on top.
    monkeypatch.setattr(capacity, "free_nbytes", lambda: 4 * capacity.ENGINE_NBYTES)
    with pytest.raises(SpecError, match="for the step at its peak"):
        capacity.check_capacity(replace(spec, strategy=Strategy.ZERO3), num_warm=0)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        # Version 2: the tightest limit on the way up counts; 100 - (70 - 20) = 50 is less than 1000 - 70.
        (
            "0::/outer/inner\n",
            {
                "outer/memory.max": "1000",
                "outer/memory.current": "70",
                "outer/memory.stat": "inactive_file 0",
                "outer/inner/memory.max": "100",
                "outer/inner/memory.current": "70",
                "outer/inner/memory.stat": "anon 50\ninactive_file 20",
            },
            50,
        ),
        # Version 1 inside a container: the path is the host's, the limit stands at the root of the mount.
        (
            "4:memory:/docker/abc\n3:cpuset:/\n",
            {
                "memory/memory.limit_in_bytes": "500",
                "memory/memory.usage_in_bytes": "200",
                "memory/memory.stat": "total_inactive_file 0",
            },
            300,
        ),
        (
            "0::/\n",
            {"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 0"},
            None,
        ),
    ],
)
def test_cgroup_limits(tmp_path: Path, membership: str, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "self").write_text(membership)
    headrooms = capacity.cgroup_headrooms(tmp_path / "cgroup", tmp_path / "self")
    assert min(headrooms, default=None) == expected


def test_placement() -> None:
    assert place(3, 0).backend == "gloo"
    assert place(3, 0).devices == ("cpu", "cpu", "cpu")
    assert place(2, 2).backend == "nccl"
    assert place(2, 4).devices == ("cuda:0", "cuda:1")
    # More ranks than GPUs: ranks share them, which NCCL refuses.
    assert place(5, 2).backend == "gloo"
    assert place(5, 2).devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0")


def test_backends_that_bring_no_session_share_one() -> None:
    """So a notebook's cell that is run again does not start engines beside the old ones."""
    assert LiveBackend().session is LiveBackend().session
    assert not LiveBackend(Session()).is_warm
