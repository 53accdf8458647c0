"""What goes wrong, and that nothing outlives it: dying ranks, raising ranks, dying owners, Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import KernelManager

from cluster.engine import RankFailure
from cluster.session import Session
from cluster.watch import RemoteTracebackError, find_cause, find_consequence
from tests.dist.fake_ranks import HANG, RAISE_IN_ONE, RAISE_LATE, REFUSE
from tests.dist.helpers import FAKE_TARGET, Messages, members, pool_directory, tiny, wait_until
from tests.dist.owner import LONG
from zeroviz.backend import Progress, RunState
from zeroviz.errors import RunError, SpecError

pytestmark = pytest.mark.dist

GONE_S = 30.0  # what the product promises for processes whose owner was killed; a second is usual


def kill_rank_soon(session: Session, rank: int, delay_s: float) -> Messages:
    """Progress that kills `rank` with SIGKILL `delay_s` after the run has begun."""

    class Killing(Messages):
        def __call__(self, progress: Progress) -> None:
            super().__call__(progress)
            if progress.state is RunState.RUNNING:
                threading.Timer(delay_s, os.kill, (session.pids[rank], signal.SIGKILL)).start()

    return Killing()


# ---- a rank raises ----


def test_a_refusal_in_every_rank_is_a_spec_error_and_costs_no_engine(faking: Session) -> None:
    faking.ensure_sync(2)
    pids = faking.pids
    with pytest.raises(SpecError, match=r"^precision is 'bf16', but this device has none\.$"):
        faking.run_sync(tiny(2, seed=REFUSE))
    assert faking.pids == pids
    assert not faking.run_sync(tiny(2)).cold


def test_an_engine_that_died_between_runs_is_replaced(faking: Session) -> None:
    faking.ensure_sync(2)
    pids = faking.pids
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pids[0]), 10, "killed engine gone")
    assert len(faking.run_sync(tiny(2)).ranks) == 2
    assert not set(pids) & set(faking.pids)


def test_the_rank_that_raises_is_named_while_the_others_hang(faking: Session) -> None:
    started = time.monotonic()
    with pytest.raises(RunError) as caught:
        faking.ensure_sync(3)
        started = time.monotonic()
        faking.run_sync(tiny(3, seed=RAISE_IN_ONE))
    assert time.monotonic() - started < 3.0
    assert str(caught.value) == "Rank 1 failed with ValueError: the loss is not a number."
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, RemoteTracebackError)
    assert "fake_ranks.py" in str(caught.value.__cause__)
    assert faking.pids == []


def test_a_lost_connection_is_not_taken_for_the_cause(faking: Session) -> None:
    with pytest.raises(RunError, match="Rank 1 failed with ArithmeticError: overflow"):
        faking.run_sync(tiny(2, seed=RAISE_LATE))


def test_causes_come_before_consequences() -> None:
    lost = RankFailure("RuntimeError", "Connection closed by peer", "", is_spec_error=False, is_connection=True)
    bug = RankFailure("KeyError", "", "", is_spec_error=False, is_connection=False)
    assert find_cause([None, None], {}) is None
    assert find_cause([lost, None], {}) is None
    assert str(find_consequence([None, lost])) == "Rank 1 failed with RuntimeError: Connection closed by peer."
    assert str(find_cause([lost, None, bug], {})) == "Rank 2 failed with KeyError."
    assert "Rank 1 died" in str(find_cause([lost, None, bug], {1: "signal 11"}))
    # A process that ended after it had answered is no failure of this run.
    assert find_cause([{}, None], {0: "signal 9"}) is None


# ---- a rank dies ----


def test_a_rank_killed_during_a_step_is_named_and_the_next_run_works() -> None:
    with Session() as session:
        session.ensure_sync(2)
        pids, directory = session.pids, pool_directory(session)
        started = time.monotonic()
        with pytest.raises(RunError, match="Rank 1 died during the run: its process ended with signal 9") as caught:
            session.run_sync(tiny(2, steps=LONG), kill_rank_soon(session, 1, delay_s=1.0))
        assert caught.value.rank == 1
        assert time.monotonic() - started < 1.0 + 10.0
        assert members(directory) == []  # a failed collective spoils later ones, so no engine is kept
        assert [rank["rank"] for rank in session.run_sync(tiny(2)).ranks] == [0, 1]
        assert not set(pids) & set(session.pids)


# ---- bounds ----


def test_a_run_that_does_not_end_is_ended(faking: Session) -> None:
    with pytest.raises(RunError, match=r"not done after 3 s; ranks \[0\] have not answered") as caught:
        faking.run_sync(tiny(1, seed=HANG))
    assert caught.value.rank == 0
    assert faking.pids == []


def test_engines_that_do_not_start_in_time_are_counted() -> None:
    with Session(target=FAKE_TARGET, start_timeout_s=0.05) as session:
        with pytest.raises(RunError, match="0 of 2 engines"):
            session.ensure_sync(2)
        assert session.pids == []


def test_an_engine_that_cannot_load_its_code_is_reported() -> None:
    with Session(target="no_such_module:run") as session, pytest.raises(RunError, match="no_such_module"):
        session.ensure_sync(1)


# ---- the caller goes away ----


def test_cancelling_a_run_kills_its_engines(faking: Session) -> None:
    async def main() -> None:
        await faking.ensure(1)
        directory = pool_directory(faking)
        run = asyncio.create_task(faking.run(tiny(1, seed=HANG)))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert time.monotonic() - started < 2.0
        assert members(directory) == []

    asyncio.run(main())


@contextmanager
def owner(how: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process group of its own that is in the middle of a run, and its pool's directory."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.dist.owner", how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process, _killed_at_last(process.pid):
        directory = Path(process.stdout.readline().strip())
        assert members(directory)
        time.sleep(0.5)  # into the steps
        yield process, directory


@contextmanager
def _killed_at_last(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_owner_leaves_no_process_and_no_directory() -> None:
    with owner("async") as (process, directory):
        process.kill()
        wait_until(lambda: not members(directory), GONE_S, "engines and controller of a killed owner gone")
        wait_until(lambda: not directory.exists(), GONE_S, "directory removed")


@pytest.mark.parametrize("how", ["async", "sync"])
def test_ctrl_c_ends_an_owner_and_its_engines(how: str) -> None:
    with owner(how) as (process, directory):
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=5)
        assert process.returncode == 130
        assert stderr == ""  # neither the owner's threads nor an engine say anything
        assert members(directory) == []
        assert not directory.exists()


KERNEL_CELL = f"""
import asyncio
from cluster.session import Session
from tests.dist.helpers import pool_directory, tiny
session = Session()
await session.ensure(2)
task = asyncio.create_task(session.run(tiny(2, steps={LONG})))
await asyncio.sleep(0.5)
print(pool_directory(session), flush=True)
"""


def test_a_killed_notebook_kernel_leaves_no_process() -> None:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    try:
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=30)
        outputs: list[dict[str, str]] = []

        def collect(message: dict[str, Any]) -> None:
            if message["msg_type"] not in ("status", "execute_input"):
                outputs.append(message["content"])

        client.execute_interactive(KERNEL_CELL, timeout=60, output_hook=collect)
        client.stop_channels()
        assert [output.get("name") for output in outputs] == ["stdout"], outputs  # no log line and no warning
        directory = Path(outputs[0]["text"].strip())
        assert members(directory)
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        wait_until(lambda: not members(directory), GONE_S, "engines and controller of a killed kernel gone")
        wait_until(lambda: not directory.exists(), GONE_S, "directory removed")
    finally:
        manager.shutdown_kernel(now=True)
