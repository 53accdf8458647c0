"""Run a function as N real ranks: warm worker processes, a gloo group made anew for each call."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from cluster.rank import RankJob
from zeroviz.spec import RunSpec

T = TypeVar("T")
MAX_RANKS = 4
TIMEOUT_S = 60.0


class RankPool:
    """Four worker processes. Ranks wait for one another in the rendezvous, so each lands in a process of its own."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(MAX_RANKS, mp_context=multiprocessing.get_context("spawn"))
        self._directory = tempfile.TemporaryDirectory()
        self._num_runs = 0

    def run(self, function: Callable[[RankJob], T], spec: RunSpec) -> list[T]:
        """`function(job)` on every rank of `spec`, results in rank order."""
        self._num_runs += 1
        store = str(Path(self._directory.name) / f"store{self._num_runs}")
        jobs = [
            RankJob(spec=spec, rank=rank, store_path=store, backend="gloo", device="cpu", timeout_s=TIMEOUT_S)
            for rank in range(spec.ranks)
        ]
        futures = [self._pool.submit(function, job) for job in jobs]
        return [future.result(timeout=TIMEOUT_S) for future in futures]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._directory.cleanup()
