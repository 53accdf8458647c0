"""`zeroviz run`, `bench`, `doctor` and `rehearse`: the commands that need torch. The first three start processes, and
take care that none outlives them.

The only module of this package that reaches into `cluster`, and only when one of them is called.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self, TypeVar

from zeroviz.backend import Progress
from zeroviz.bench import Pair
from zeroviz.errors import RunError
from zeroviz.spec import RunSpec
from zeroviz.trace import Trace

T = TypeVar("T")


def run_live(spec: RunSpec, *, save_to: str = "", resume_from: str = "") -> Trace:
    """Run `spec` on engines of its own and return the measured trace; progress goes to stderr. See `LiveBackend.run`
    for the directories."""
    with Interrupts() as interrupts, ProgressLine() as line:
        try:
            from cluster.live import LiveBackend
        except ImportError as error:
            raise _missing(error) from None

        async def run() -> Trace:
            backend = LiveBackend()
            try:
                return await backend.run(spec, line.show, save_to=save_to, resume_from=resume_from)
            finally:
                await backend.stop()

        return interrupts.run(run)


def rehearse_spec(spec: RunSpec) -> Trace:
    """Rehearse `spec` in this process; progress goes to stderr. Nothing is started, so there is nothing to stop."""
    with Interrupts() as interrupts, ProgressLine() as line:
        try:
            from cluster.rehearse import rehearse
        except ImportError as error:
            raise _missing(error) from None
        with interrupts.polled():
            return rehearse(spec, line.show, interrupts.poll)


def run_bench(wanted: Sequence[tuple[RunSpec, RunSpec] | Pair], num_rounds: int) -> tuple[list[Pair], dict[str, Any]]:
    """Set every pair side by side on engines of its own; progress goes to stderr."""
    with Interrupts() as interrupts, ProgressLine() as line:
        try:
            from cluster.bench import bench_pairs
        except ImportError as error:
            raise _missing(error) from None
        return interrupts.run(lambda: bench_pairs(wanted, num_rounds, line.show))


def examine(*, as_json: bool) -> int:
    """Run the doctor and print what it found; 1 if anything failed."""
    with Interrupts() as interrupts, ProgressLine() as line:
        try:
            from cluster.doctor import examine_machine
        except ImportError as error:
            raise _missing(error) from None
        findings = interrupts.run(lambda: examine_machine(line.show))
    print(json.dumps(findings.to_dict(), indent=1) if as_json else findings.render())
    return 0 if findings.ok else 1


class ProgressLine:
    """Progress on stderr: one line rewritten in place on a terminal, one line each in a file or pipe."""

    def __init__(self) -> None:
        self._in_place = sys.stderr is not None and sys.stderr.isatty()
        self._last = ""

    def show(self, progress: Progress) -> None:
        if progress.message == self._last:
            return
        self._last = progress.message
        # ESC [K clears what a longer message left behind.
        self._write(f"\r{progress.message}\033[K" if self._in_place else f"{progress.message}\n")

    def _write(self, text: str) -> None:
        """News that cannot be told, to a closed or full stderr, must not cost the run."""
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.write(text)
                sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the cursor on a fresh line."""
        if self._in_place and self._last:
            self._write("\n")


class Interrupts:
    """Within it the first SIGINT or SIGTERM ends the work and raises KeyboardInterrupt; later ones are ignored.

    An impatient second Ctrl-C must not cut the stopping of the engines short and leave them behind. Stopping is
    bounded by the backend. After an interrupt the signals stay ignored: the process is on its way out.
    """

    def __enter__(self) -> Self:
        self._interrupted = False
        self._cancel: Callable[[], object] | None = None
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._interrupted else before)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` on an event loop of its own."""
        return asyncio.run(self._watched(work))

    async def _watched(self, work: Callable[[], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work())
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            if self._interrupted:
                raise KeyboardInterrupt from None
            raise

    @contextmanager
    def polled(self) -> Iterator[None]:
        """Inside, a signal takes effect at the next `poll`: raised anywhere, it could be lost in a destructor."""
        self._cancel = lambda: None
        try:
            yield
        finally:
            self._cancel = None

    def poll(self) -> None:
        """Raise KeyboardInterrupt if a signal has come."""
        if self._interrupted:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._interrupted:
            return
        self._interrupted = True
        if self._cancel is None:  # still importing: nothing has been started
            raise KeyboardInterrupt
        self._cancel()


def _missing(error: ImportError) -> RunError:
    return RunError(f"The live half cannot be imported ({error}); install it with pip install -c constraints.txt -e .")
