"""Specs, and waiting for processes to be gone, for tests with real engines. Every wait is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster.reaper import MARK, marked_processes
from cluster.session import Session
from zeroviz.backend import Progress
from zeroviz.spec import RunSpec, Strategy, preset

FAKE_TARGET = "tests.dist.fake_ranks:behave"


def tiny(ranks: int = 2, strategy: Strategy = Strategy.DDP, *, seed: int = 0, steps: int = 2) -> RunSpec:
    """The tiny model on `ranks` ranks. For `fake_ranks` the seed picks the misbehaviour."""
    return RunSpec(model=preset("tiny"), strategy=strategy, ranks=ranks, seed=seed, steps=steps, seq=16)


def members(directory: Path) -> list[int]:
    """Process ids of the pool in `directory`: engines, the controller and what it forked."""
    return [process.pid for home, process in marked_processes() if home == directory]


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Seconds until `condition` held; fails the test after `timeout_s`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            pytest.fail(f"{what}: not within {timeout_s} s")
        time.sleep(0.05)
    return time.monotonic() - start


class Messages(list[Progress]):
    """Collects progress; call it as an OnProgress."""

    def __call__(self, progress: Progress) -> None:
        self.append(progress)

    @property
    def texts(self) -> list[str]:
        return [progress.message for progress in self]


def pool_directory(session: Session) -> Path:
    """The directory of the session's pool, read from an engine's environment."""
    return Path(psutil.Process(session.pids[0]).environ()[MARK])
