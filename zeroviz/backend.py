"""The Backend protocol: a RunSpec goes in, a Trace comes out; and the states a run goes through.

`cluster.live.LiveBackend` implements it with processes. The view half knows only this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from zeroviz.spec import RunSpec
from zeroviz.trace import Trace


class RunState(Enum):
    """Where a run stands."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of news for a person: `starting 2/4 engines`, `running`, `done in 0.6 s`."""

    state: RunState
    message: str


OnProgress = Callable[[Progress], None]


class Backend(Protocol):
    """Runs specs for real. All waits inside are bounded; failures are RunError or SpecError."""

    async def run(self, spec: RunSpec, on_progress: OnProgress) -> Trace:
        """Run the spec's steps on `spec.ranks` ranks and return the live trace."""
        ...

    async def stop(self) -> None:
        """Stop every process the backend started. Idempotent."""
        ...
