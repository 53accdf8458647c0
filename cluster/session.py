"""Session: engines that stay warm between runs, and one spec run on them; every wait is bounded.

[Note: private loop] A session's work happens on an event loop of its own, in a daemon thread. The caller's loop (a
Jupyter kernel's, or the command line's) therefore never waits for a process to start or die, a session may be used
from several loops one after another, and the blocking form of every method costs nothing extra. Progress is handed
back to the loop from which the method was called.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from cluster import capacity, engine, manifest, watch
from cluster.placement import Placement, place
from cluster.pool import Pool
from zeroviz.backend import OnProgress, Progress, RunState
from zeroviz.errors import RunError, SpecError
from zeroviz.spec import RunSpec
from zeroviz.wording import title

T = TypeVar("T")

START_TIMEOUT_S = 60.0
START_TIMEOUT_PER_RANK_S = 3.0  # of one core: starting an engine and importing torch, twice over
RUN_TIMEOUT_S = 600.0
RUN_TIMEOUT_PER_STEP_S = 60.0


@dataclass(frozen=True)
class SessionRun:
    """What a run gave. ranks: each rank's plain data in rank order. cold: whether engines had to be started for it.

    start_s: seconds until all engines were warm. run_s: seconds from there to the last rank's answer.
    """

    ranks: list[dict[str, Any]]
    placement: Placement
    facts: engine.EngineFacts
    cold: bool
    start_s: float
    run_s: float


def ignore(_: Progress) -> None:
    """For whoever wants no news."""


class Session:
    """Engines on this machine, started when first needed and kept until `stop`. One run at a time; others wait.

    A session can be used again after `stop`, and as a context manager, `with` or `async with`. Each method has a
    blocking form, `run_sync` for `run`. A failed or cancelled run takes its engines with it, because a broken
    collective spoils the group's later ones; the next run starts fresh ones.

    target: `module:function` that a rank's engine calls with its RankJob. run_timeout_s: bound of one run once its
    engines are warm; None for 600 s and 60 s more for each step. start_timeout_s: bound of starting them; None for 60 s
    and 3 s more for each rank.
    """

    def __init__(
        self,
        *,
        target: str = "cluster.rank:run_rank",
        run_timeout_s: float | None = None,
        start_timeout_s: float | None = None,
    ) -> None:
        self._target = target
        self._run_timeout_s = run_timeout_s
        self._start_timeout_s = start_timeout_s
        self._pool: Pool | None = None
        self._num_runs = 0
        self._num_stops = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = asyncio.Lock()
        self._loop_guard = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the warm engines: rank r runs in process `pids[r]`."""
        return [facts.pid for facts in self._pool.facts] if self._pool else []

    async def ensure(self, num_ranks: int, on_progress: OnProgress = ignore) -> None:
        """Have at least `num_ranks` engines warm. SpecError if memory is short, RunError if they are late."""
        await self._hop(self._exclusively(partial(self._ensure, num_ranks, _relay(on_progress))))

    async def run(self, spec: RunSpec, on_progress: OnProgress = ignore, **job: Any) -> SessionRun:
        """Run `spec` on the first `spec.ranks` engines, starting what is missing. job: more fields of `RankJob`.

        SpecError: it cannot be run here; nothing was started, or everything still stands. RunError: it failed; `rank`
        names the first rank that did. Cancelling it kills the engines before CancelledError goes on.
        """
        return await self._hop(self._exclusively(partial(self._run, spec, _relay(on_progress), job)))

    async def stop(self) -> None:
        """Kill all engines and the controller, and end a run in progress with RunError. Idempotent."""
        await self._hop(self._stop())

    def ensure_sync(self, num_ranks: int, on_progress: OnProgress = ignore) -> None:
        """`ensure`, blocking; progress comes from the session's thread."""
        self._block(self._exclusively(partial(self._ensure, num_ranks, on_progress)))

    def run_sync(self, spec: RunSpec, on_progress: OnProgress = ignore, **job: Any) -> SessionRun:
        """`run`, blocking; progress comes from the session's thread."""
        return self._block(self._exclusively(partial(self._run, spec, on_progress, job)))

    def stop_sync(self) -> None:
        """`stop`, blocking."""
        self._block(self._stop())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop_sync()

    # ---- between the caller's thread and the session's ----

    async def _hop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` on the private loop. When the caller is cancelled, the engines are dead before it is told."""
        try:
            return await asyncio.wrap_future(self._submit(work))
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.wrap_future(self._submit(self._stop())))
            raise

    def _block(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            self._submit(self._stop()).result()
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._loop_guard:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True, name="zeroviz-session").start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ---- on the private loop ----

    async def _exclusively(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do `work` alone. Whatever ends it early, other than a SpecError, costs the pool."""
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(_retrieve)
        self._tasks.add(task)
        num_stops = self._num_stops
        try:
            async with self._lock:
                try:
                    return await work()
                except SpecError:
                    raise
                except BaseException:
                    self._discard()
                    raise
        except asyncio.CancelledError:
            if self._num_stops > num_stops:
                raise RunError("The run was stopped before it was done.") from None
            raise
        finally:
            self._tasks.discard(task)

    async def _stop(self) -> None:
        self._num_stops += 1
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._discard()

    def _discard(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.kill()

    def _num_warm(self) -> int:
        """How many engines stand ready; a pool that lost a process since the last run is worth none."""
        if self._pool and (self._pool.exits or self._pool.controller_is_gone):
            self._discard()
        return len(self._pool.facts) if self._pool else 0

    async def _ensure(self, num_ranks: int, on_progress: OnProgress) -> Pool:
        capacity.check_engines(num_ranks - self._num_warm())
        if self._pool is None:
            timeout_s = self._start_timeout_s or START_TIMEOUT_S + START_TIMEOUT_PER_RANK_S * num_ranks
            self._pool = Pool(self._target, timeout_s)
        await self._pool.grow(num_ranks, on_progress)
        return self._pool

    async def _run(self, spec: RunSpec, on_progress: OnProgress, job: Mapping[str, Any]) -> SessionRun:
        started = time.monotonic()
        num_warm = self._num_warm()
        capacity.check_runnable(spec)
        manifest.check_job(spec, job.get("save_to", ""), job.get("resume_from", ""))
        # Whether there is a GPU is known for certain only from an engine; a GPU's memory is not the host's to check.
        check_later = capacity.may_have_gpu()
        if not check_later:
            capacity.check_capacity(spec, num_warm=num_warm)
        pool = await self._ensure(spec.ranks, on_progress)
        facts = pool.facts[0]
        placement = place(spec.ranks, len(facts.gpus))
        if check_later and placement.devices[0] == "cpu":
            capacity.check_capacity(spec, num_warm=len(pool.facts))
        warm = time.monotonic()
        devices = ", ".join(dict.fromkeys(placement.devices))
        on_progress(
            Progress(
                RunState.RUNNING,
                f"running {title(spec)} ({placement.backend}, {devices})",
            )
        )
        ranks = await self._run_ranks(pool, spec, placement, job)
        cold = num_warm < spec.ranks
        return SessionRun(ranks, placement, facts, cold, warm - started, time.monotonic() - warm)

    async def _run_ranks(
        self, pool: Pool, spec: RunSpec, placement: Placement, job: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Give every rank its job and wait for the answers."""
        self._num_runs += 1
        # A file that no other run has used is a meeting place without ports, and so without races for one.
        store = pool.directory / f"store-{self._num_runs}"
        timeout_s = self._run_timeout_s or RUN_TIMEOUT_S + RUN_TIMEOUT_PER_STEP_S * spec.steps
        shared = {
            **job,
            "spec": spec,
            "store_path": str(store),
            "backend": placement.backend,
            "timeout_s": timeout_s,
        }
        calls = [
            pool.submit(rank, engine.run_job, self._target, {**shared, "rank": rank, "device": device})
            for rank, device in enumerate(placement.devices)
        ]
        try:
            return await watch.wait_for_answers(pool, calls, timeout_s)
        except SpecError:
            # Every rank refuses a wrong request at once; the engines are then as good as before.
            if not await watch.all_ready(calls):
                self._discard()
            raise
        finally:
            store.unlink(missing_ok=True)


def _relay(on_progress: OnProgress) -> OnProgress:
    """`on_progress`, called on the loop that is running now instead of on the private one."""
    loop = asyncio.get_running_loop()

    def relay(progress: Progress) -> None:
        loop.call_soon_threadsafe(on_progress, progress)

    return relay


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Look at the exception of a task whose caller has gone, or asyncio would print it."""
    if not task.cancelled():
        task.exception()
