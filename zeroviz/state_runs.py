"""What an Explorer runs: the run under way, the traces of those that ended, what is said of them.

A run is one asyncio task on the loop given, the kernel's main one. Nothing here waits: `run` and `stop` may be called
from a widget. See [Note: threads] in `zeroviz.state`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from traitlets import Bool, HasTraits, Instance, Unicode, UseEnum

from zeroviz.backend import Backend, Progress, RunState
from zeroviz.errors import RunError, SpecError, ZerovizError
from zeroviz.spec import RunSpec
from zeroviz.trace import Trace
from zeroviz.wording import title

MAX_RUNS_KEPT = 8
STOPPED = "stopped; no engines are running"
_BUSY = (RunState.STARTING, RunState.RUNNING)
_log = logging.getLogger(__name__)


class Runs(HasTraits):
    """The half of an Explorer that runs what `predicted` predicts; the traits are described there."""

    run_state = UseEnum(RunState, default_value=RunState.IDLE)
    message = Unicode("")
    notice = Unicode("")
    error = Unicode("")
    predicted = Instance(Trace)
    measured = Instance(Trace, allow_none=True)
    earlier = Bool(False)

    def __init__(self, backend: Backend | None, loop: asyncio.AbstractEventLoop | None, **traits: Any) -> None:
        self.lock = threading.RLock()
        self._backend, self._loop = backend, loop
        self._stopping = self._has_engines = False
        self._runs: dict[RunSpec, Trace] = {}
        self._news_of: dict[RunSpec, str] = {}  # what was said at the end of each run
        self._run_spec: RunSpec | None = None
        self._unfinished: set[RunSpec] = set()
        self._last_news = ""
        self._tasks: set[Future[None]] = set()
        super().__init__(**traits)

    @property
    def spec(self) -> RunSpec:
        """The toggles as a RunSpec: always a valid one."""
        return self.predicted.spec

    def _show_run(self) -> None:
        self.measured = self._runs.get(self.spec)
        self.earlier = self.measured is not None and self.spec in self._unfinished

    def _tell_run(self) -> None:
        """What was said of the run that is shown, in place of what was said of another state's."""
        if self.run_state in (RunState.IDLE, RunState.DONE, RunState.FAILED):
            self.message = self._news_of.get(self.spec, "") if self.measured is not None and not self.earlier else ""
            self.run_state = RunState.DONE if self.message else RunState.IDLE

    def _keep_run(self, spec: RunSpec, trace: Trace) -> None:
        """The newest of those kept, and the one shown if the state is `spec`'s."""
        self._runs.pop(spec, None)
        self._runs[spec] = trace
        for oldest in list(self._runs)[:-MAX_RUNS_KEPT]:
            del self._runs[oldest]
            self._news_of.pop(oldest, None)
        self._unfinished &= self._runs.keys()
        self._unfinished.discard(spec)
        self._show_run()

    @property
    def other_run(self) -> str:
        """A sentence when the last run was of another state than the one shown; else empty."""
        if self._run_spec not in self._runs or self.measured is not None or self.busy or self._run_spec == self.spec:
            return ""
        return f"The last run was of another state ({title(self._run_spec)}); it is not in the picture."

    @property
    def busy(self) -> bool:
        """Whether a run is under way."""
        return self.run_state in _BUSY

    @property
    def can_stop(self) -> bool:
        """Whether there is a run, or engines that one left warm."""
        return self.busy or self.is_warm

    @property
    def is_warm(self) -> bool:
        """Whether engines stand. A backend that knows is asked: another explorer may have started or ended them."""
        return bool(getattr(self._backend, "is_warm", self._has_engines))

    def run(self) -> None:
        """Start a live run of this state and return at once. While one is under way, a second press does nothing."""
        loop = self._running_loop()
        with self.lock:
            if self.busy:
                return
            spec = self._run_spec = self.spec
            self._stopping = False
            self.error = self.notice = ""
            self.message = f"{title(spec)}: asking for {spec.ranks} {'engine' if spec.ranks == 1 else 'engines'}"
            self.run_state = RunState.STARTING
            self._spawn(self._run(spec), loop)

    def stop(self) -> None:
        """Stop the run and the engines, and return at once."""
        loop = self._running_loop()
        with self.lock:
            self._stopping = True
            self.message = "stopping"
            self._spawn(self._stop(), loop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._backend is None:
            raise RunError("This explorer has no event loop to run on; make it in a notebook cell.")
        return self._loop

    def _spawn(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.run_coroutine_threadsafe(work, loop)
        self._tasks.add(task)  # or it may be collected while it waits
        task.add_done_callback(self._tasks.discard)

    async def _run(self, spec: RunSpec) -> None:
        assert self._backend is not None
        try:
            trace = await self._backend.run(spec, self._progress)
        except SpecError as error:
            self._ended(spec, "not started", _without_shell(error))  # and engines of an earlier run still stand
        except ZerovizError as error:
            self._has_engines = False
            self._ended(spec, "failed", _without_shell(error))
        except Exception as error:
            _log.exception("The backend failed on %s", title(spec))
            self._ended(spec, "failed", f"The run failed inside zeroviz ({type(error).__name__}: {error}).")
        except asyncio.CancelledError:
            self._stopping = True
            self._ended(spec, "", "")
            raise
        else:
            with self.lock, self.hold_trait_notifications():
                self._keep_run(spec, trace)
                self._has_engines = True
                self._news_of[spec] = self._last_news
                is_shown = spec == self.spec
                self.run_state = RunState.DONE
                self.message = self._last_news if is_shown else f"{title(spec)}: {self._last_news}"

    async def _stop(self) -> None:
        """The run, if there is one, ends by itself with RunError."""
        assert self._backend is not None
        try:
            await self._backend.stop()
        except ZerovizError as error:
            self.error = str(error)
            return
        with self.lock:
            self._has_engines = False
            if not self.busy:
                self.run_state, self.message = RunState.STOPPED, STOPPED

    def _ended(self, spec: RunSpec, message: str, error: str) -> None:
        """A run came to its end without a trace: by Stop, or by `error`."""
        with self.lock, self.hold_trait_notifications():
            if spec in self._runs:
                self._unfinished.add(spec)
            self._show_run()
            if self._stopping:
                self.run_state, self.message = RunState.STOPPED, STOPPED
            else:
                self.run_state, self.message, self.error = RunState.FAILED, f"{message}: {title(spec)}", error

    def _progress(self, news: Progress) -> None:
        with self.lock:
            self._last_news = news.message
            # That it is done is said when its trace is here to be seen.
            if self.busy and news.state in _BUSY and not self._stopping:
                what = title(self._run_spec) if self._run_spec else ""
                self.message = news.message if what in news.message else f"{what}: {news.message}"
                self.run_state = news.state


def _without_shell(error: ZerovizError) -> str:
    """A refusal for this page, where the prediction that a shell would be advised to ask for stands already."""
    words = re.sub(r", or (?:use )?`zeroviz predict`[^.]*\.", "; its prediction is the picture.", str(error))
    return re.sub(r"Use `zeroviz predict`, or ", "Its prediction is the picture; to run it, use ", words)
