"""How long a rehearsal is going to take, and how far it is.

Its work is counted in operators. How many there will be is known roughly from the number of parameters, how long one
takes is measured on the first of them: the estimate is there within a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from typing import Self

from zeroviz.backend import OnProgress, Progress, RunState
from zeroviz.spec import Implementation, RunSpec
from zeroviz.wording import title

# Operators for each parameter, counted for llama3-8b and its 291 parameters.
_MAKING = {Implementation.OWN: 10, Implementation.FSDP2: 20}
_PASS = {Implementation.OWN: 22, Implementation.FSDP2: 33}
_UPDATE = {Implementation.OWN: 7, Implementation.FSDP2: 19}
_RECOMPUTE = 1.3  # a pass with its forward made twice
NUM_STEPS = 2

LONG_S = 60.0
_FIRST_LOOK_S = 1.0
_EVERY_S = 2.0
_POLL_EVERY = 32  # operators, a few milliseconds


def expected_operators(spec: RunSpec) -> int:
    """How many operators a rehearsal of `spec` makes, roughly."""
    passes = _PASS[spec.impl] * spec.accumulation * (_RECOMPUTE if spec.checkpointing else 1.0)
    return int(len(spec.model.params) * (_MAKING[spec.impl] + NUM_STEPS * (passes + _UPDATE[spec.impl])))


class Pace:
    """Counts operators and says where the rehearsal stands: an estimate first if it is long, then every two seconds."""

    def __init__(
        self,
        spec: RunSpec,
        on_progress: OnProgress | None,
        poll: Callable[[], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._say, self._poll, self._clock = spec, on_progress, poll, clock
        self._expected = expected_operators(spec)
        self._num_done = 0
        self._num_looks = 0

    def __enter__(self) -> Self:
        spec = self._spec
        self._start = self._last_s = self._clock()
        self._num_at_last = 0
        self._next_look = self._start + _FIRST_LOOK_S / 2
        self._tell(RunState.RUNNING, f"rehearsing {title(spec)}")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._tell(RunState.DONE, f"rehearsed in {self._clock() - self._start:.1f} s")

    def operator(self) -> None:
        """One more operator is about to run."""
        self._num_done += 1
        if self._num_done % _POLL_EVERY:
            return
        if self._poll is not None:
            self._poll()
        if (now := self._clock()) >= self._next_look:
            self._look(now)

    def _look(self, now: float) -> None:
        """The first look, after half a second, only begins to measure: operators new to the mode are slow."""
        num_left = max(0, self._expected - self._num_done)
        left_s = num_left * (now - self._last_s) / (self._num_done - self._num_at_last)
        self._last_s, self._num_at_last = now, self._num_done
        self._num_looks += 1
        self._next_look = now + (_FIRST_LOOK_S / 2 if self._num_looks == 1 else _EVERY_S)
        if self._num_looks == 2 and now - self._start + left_s > LONG_S:
            whole = duration(now - self._start + left_s)
            self._tell(RunState.RUNNING, f"rehearsing: this takes about {whole}; Ctrl-C ends it")
        elif self._num_looks > 2:
            share = f"{self._num_done / self._expected:.0%}, about {duration(left_s)} left"
            self._tell(RunState.RUNNING, f"rehearsing: {share if num_left else 'nearly done'}")

    def _tell(self, state: RunState, message: str) -> None:
        if self._say is not None:
            self._say(Progress(state, message))


def duration(seconds: float) -> str:
    """`40 s`, `3 min`, `1 h 10 min`: rounded up, since it is an estimate."""
    if seconds <= 90:
        return f"{ceil(seconds)} s"
    minutes = ceil(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
