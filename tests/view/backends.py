"""A backend for tests of the view: it honours the protocol and starts nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from zeroviz.backend import OnProgress, Progress, RunState
from zeroviz.errors import RunError
from zeroviz.predict import predict
from zeroviz.spec import RunSpec
from zeroviz.trace import Origin, Trace


@dataclass
class FakeBackend:
    """Hands back the prediction as if measured. `hold` keeps a run going until it is set; `failure` ends one."""

    failure: BaseException | None = None
    hold: asyncio.Event | None = None
    specs: list[RunSpec] = field(default_factory=list)
    num_stops: int = 0
    _stopped: asyncio.Event | None = None

    async def run(self, spec: RunSpec, on_progress: OnProgress) -> Trace:
        self.specs.append(spec)
        self._stopped = asyncio.Event()
        on_progress(Progress(RunState.STARTING, f"starting 0/{spec.ranks} engines"))
        await asyncio.sleep(0)
        on_progress(Progress(RunState.RUNNING, "running"))
        if self.hold is not None:
            waits = [asyncio.create_task(event.wait()) for event in (self.hold, self._stopped)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if self._stopped.is_set():
            raise RunError("The run was stopped before it was done.")
        if self.failure is not None:
            raise self.failure
        on_progress(Progress(RunState.DONE, "done in 0.6 s"))
        return replace(predict(spec), origin=Origin.LIVE)

    async def stop(self) -> None:
        self.num_stops += 1
        if self._stopped is not None:
            self._stopped.set()


async def settled(until: Callable[[], bool]) -> None:
    """Let the loop work until the condition holds."""
    async with asyncio.timeout(10):
        while not until():
            await asyncio.sleep(0.001)


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    """Run an async test."""

    async def main() -> None:
        await work()

    asyncio.run(main())
