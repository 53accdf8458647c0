"""A pool: one ipyparallel controller and its engines on this machine, in a directory of their own.

A pool is used once: started, grown, killed. `cluster.session` replaces a broken one. All of it lives on one event loop.

[Note: start time] Registration waits one and a half heartbeats, so the controller beats ten times faster than by
default and allows as many more misses, lest a machine that is short of cores lose engines which are only slow. An
engine's nanny process would report its death to the controller; the owner sees that sooner from the process itself, so
nannies are left out, and so are the controller's task scheduler, broadcast tree and database, which nothing here uses.
Four engines on two cores are registered after 1.4 s instead of 6.6 s.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from ipyparallel import AsyncResult, Client
from ipyparallel.cluster.cluster import Cluster
from traitlets.config import Config

from cluster import engine, reaper
from zeroviz.backend import OnProgress, Progress, RunState
from zeroviz.errors import RunError

T = TypeVar("T")

POLL_S = 0.02
HEARTBEAT_MS = 300
ALLOWED_MISSES = 200  # 200 * 0.3 s = 60 s without a heartbeat before the controller gives an engine up
CONNECT_TIMEOUT_S = 20

_silent = logging.getLogger("zeroviz.cluster")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False
_silent.setLevel(logging.CRITICAL + 1)


class Pool:
    """Engines that are up and warm, in the order in which they are given ranks.

    `facts[i]` is what engine i said of itself; it is there as soon as `grow` has returned for more than i ranks.
    """

    def __init__(self, target: str, start_timeout_s: float) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="zeroviz-"))
        self.facts: list[engine.EngineFacts] = []
        self._target = target
        self._timeout_s = start_timeout_s
        self._num_started = 0
        self._client: Client | None = None
        self._guard = reaper.start_guard(self.directory)
        self._cluster = _new_cluster(self.directory, start_timeout_s)

    async def grow(self, num_ranks: int, on_progress: OnProgress) -> None:
        """Have at least `num_ranks` engines registered and warm. RunError says how many came in time."""
        if num_ranks <= len(self.facts):
            return
        deadline = time.monotonic() + self._timeout_s
        try:
            if self._client is None:
                _say(on_progress, f"starting 0/{num_ranks} engines")
                await self._cluster.start_controller()
            if num_ranks > self._num_started:
                num_more, self._num_started = num_ranks - self._num_started, num_ranks
                await self._cluster.start_engines(num_more)
            if self._client is None:
                info = (await self._cluster.controller.get_connection_info())["client"]
                self._client = await _in_thread(lambda: self._connect(info))
        except (RuntimeError, TimeoutError, OSError) as error:
            raise RunError(
                f"The controller of the engines did not come up ({_first_line(str(error))}); "
                f"0 of {num_ranks} engines started."
            ) from error
        await self._registered(num_ranks, on_progress, deadline)
        await self._warm(num_ranks, on_progress, deadline)

    def submit(self, rank: int, function: Callable[..., T], *args: object) -> AsyncResult:
        """Call `function(*args)` on the engine of `rank`. The function's module must be importable there."""
        assert self._client is not None
        return self._client[self._client.ids[rank]].apply_async(function, *args)

    def forget(self, results: Sequence[AsyncResult]) -> None:
        """Drop answered calls from the client's caches, which would otherwise keep every trace ever run."""
        assert self._client is not None
        self._client.purge_local_results(list(results))

    @property
    def exits(self) -> dict[int, int]:
        """Engines that ended by themselves: process id to exit code, negative for the signal that killed it."""
        return {
            data["pid"]: data["exit_code"]
            for engine_set in self._cluster.engines.values()
            for data in engine_set.stop_data.get("engines", {}).values()
        }

    @property
    def controller_is_gone(self) -> bool:
        return self._cluster.controller is not None and self._cluster.controller.state == "after"

    def kill(self) -> None:
        """Kill every process of the pool and remove its directory; blocks for well under a second. Idempotent.

        Raises RunError if some do not die.
        """
        client, self._client = self._client, None
        if client is not None:
            client.close(linger=0)
        try:
            reaper.sweep(self.directory)
        except TimeoutError as error:
            raise RunError(f"Some engines cannot be stopped ({error}); they may hang in a driver.") from error
        finally:
            reaper.dismiss_guard(self._guard)

    def _connect(self, info: dict[str, Any]) -> Client:
        # A Client given no ipython_dir would make ~/.ipython.
        return Client(info, ipython_dir=str(self.directory), timeout=CONNECT_TIMEOUT_S)

    async def _registered(self, num_ranks: int, on_progress: OnProgress, deadline: float) -> None:
        assert self._client is not None
        shown = 0
        while (num_here := len(self._client.ids)) < num_ranks:
            if num_here != shown:
                shown = num_here
                _say(on_progress, f"starting {num_here}/{num_ranks} engines")
            self._check_start(num_here, num_ranks, deadline)
            await asyncio.sleep(POLL_S)
        _say(on_progress, f"starting {num_ranks}/{num_ranks} engines")

    async def _warm(self, num_ranks: int, on_progress: OnProgress, deadline: float) -> None:
        """Ask each new engine for its facts, all at once; importing torch takes as long as starting did."""
        first = len(self.facts)
        results = [self.submit(rank, engine.describe, self._target) for rank in range(first, num_ranks)]
        _say(on_progress, f"loading torch on {len(results)} engines")
        while num_left := sum(not result.ready() for result in results):
            self._check_start(num_ranks - num_left, num_ranks, deadline)
            await asyncio.sleep(POLL_S)
        for result in results:
            if not result.successful():
                raise RunError(f"An engine could not load torch: {_first_line(str(result.exception()))}.")
        self.facts += [result.get() for result in results]

    def _check_start(self, num_here: int, num_ranks: int, deadline: float) -> None:
        """Raise RunError when starting has failed or takes too long; `num_here` engines have come this far."""
        came = f"{num_here} of {num_ranks} engines came up"
        for pid, code in self.exits.items():
            raise RunError(f"An engine (process {pid}) ended with {exit_text(code)} while starting; {came}.")
        if self.controller_is_gone:
            raise RunError(f"The controller of the engines ended while they were starting; {came}.")
        if time.monotonic() > deadline:
            raise RunError(f"Only {came} within {self._timeout_s:.0f} s.")


def exit_text(code: int | None) -> str:
    """`signal 9` or `exit code 1`."""
    if code is None:
        return "an unknown exit code"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _new_cluster(directory: Path, start_timeout_s: float) -> Cluster:
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    environment = {
        reaper.MARK: str(directory),
        "IPYTHONDIR": str(directory / "ipython"),
        "PYTHONPATH": reaper.package_path(os.environ.get("PYTHONPATH", "")),
        # Without it a cluster.py or trace.py in the user's working directory would be imported in place of ours.
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "6",
        # glibc gives large blocks back to the system at once and faults them in anew in every op; an update of a unit's
        # flat buffer then takes three times as long. Set, these no longer adjust themselves: 32 MiB is their limit.
        "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
    }
    config = Config()
    config.LocalProcessLauncher.environment = environment
    config.LocalEngineSetLauncher.delay = 0.0
    config.ControllerLauncher.connection_info_timeout = start_timeout_s
    config.EngineLauncher.engine_args = [
        "--IPEngine.enable_nanny=False",
        "--IPEngine.timeout=60",
        f"--work-dir={directory}",
    ]
    return Cluster(
        config=config,
        log=_silent,
        load_profile=False,
        profile_dir=str(directory / "profile"),
        cluster_id="pool",
        cluster_file="",
        delay=0,
        # Stopping is ours: ipyparallel's own takes seconds and prints at exit.
        shutdown_atexit=False,
        controller_args=[
            f"--HeartMonitor.period={HEARTBEAT_MS}",
            f"--HeartMonitor.max_heartmonitor_misses={ALLOWED_MISSES}",
            "--IPController.broadcast_scheduler_depth=0",
            "--TaskScheduler.scheme_name=none",
            "--nodb",
            "--location=127.0.0.1",
            f"--work-dir={directory}",
        ],
    )


async def _in_thread(function: Callable[[], T]) -> T:
    """Run a blocking call in a daemon thread, which, unlike an executor's, cannot hold up the interpreter's exit."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()  # a caller that has gone away must not make set_result fail
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="zeroviz-connect").start()
    return await asyncio.wrap_future(future)


def _say(on_progress: OnProgress, message: str) -> None:
    on_progress(Progress(RunState.STARTING, message))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".")
