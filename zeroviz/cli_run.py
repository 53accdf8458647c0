"""`zeroviz run` and `zeroviz doctor`: the two commands that start processes, and the care that none outlives them.

The only module of this package that reaches into `cluster`, and only when one of the two is called.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from zeroviz.backend import Progress
from zeroviz.errors import RunError
from zeroviz.spec import RunSpec
from zeroviz.trace import Trace

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")


def run_live(spec: RunSpec) -> Trace:
    """Run `spec` on engines of its own and return the measured trace; progress goes to stderr."""
    with _sigterm_as_interrupt():
        try:
            from cluster.live import LiveBackend
        except ImportError as error:
            raise _missing(error) from None
        line = ProgressLine()

        async def run() -> Trace:
            backend = LiveBackend()
            try:
                return await backend.run(spec, line.show)
            finally:
                await backend.stop()

        try:
            return _until_interrupted(run)
        finally:
            line.end()


def examine(*, as_json: bool) -> int:
    """Run the doctor and print what it found; 1 if anything failed."""
    with _sigterm_as_interrupt():
        try:
            from cluster.doctor import examine_machine
        except ImportError as error:
            raise _missing(error) from None
        line = ProgressLine()
        try:
            findings = _until_interrupted(lambda: examine_machine(line.show))
        finally:
            line.end()
    print(json.dumps(findings.to_dict(), indent=1) if as_json else findings.render())
    return 0 if findings.ok else 1


class ProgressLine:
    """Progress on stderr: one line rewritten in place on a terminal, one line each in a file or pipe."""

    def __init__(self) -> None:
        self._in_place = sys.stderr.isatty()
        self._last = ""

    def show(self, progress: Progress) -> None:
        if progress.message == self._last:
            return
        self._last = progress.message
        # ESC [K clears what a longer message left behind.
        print(f"\r{progress.message}\033[K" if self._in_place else progress.message, end="", file=sys.stderr)
        if not self._in_place:
            print(file=sys.stderr)
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the cursor on a fresh line."""
        if self._in_place and self._last:
            print(file=sys.stderr, flush=True)


def _until_interrupted(work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` to its end, or cancel it at the first SIGINT or SIGTERM and raise KeyboardInterrupt.

    The first signal cancels; later ones are ignored, so that an impatient second Ctrl-C cannot cut the stopping of the
    engines short and leave them behind. Stopping is bounded by the backend.
    """

    async def watched() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work())
        interrupted = False

        def interrupt() -> None:
            nonlocal interrupted
            if not interrupted:
                interrupted = True
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            return await task
        except asyncio.CancelledError:
            if interrupted:
                raise KeyboardInterrupt from None
            raise

    return asyncio.run(watched())


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM raises KeyboardInterrupt, as Ctrl-C does, also while modules are still being imported."""
    before = signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _missing(error: ImportError) -> RunError:
    return RunError(f"The live half cannot be imported ({error}); install it with pip install -c constraints.txt -e .")
