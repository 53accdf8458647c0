"""LiveBackend: a spec run for real on a session's engines, as a trace."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from cluster.manifest import read_manifest
from cluster.session import Session, SessionRun, ignore
from zeroviz.backend import OnProgress, Progress, RunState
from zeroviz.spec import RunSpec
from zeroviz.trace import Origin, Trace, merge, rank_from_dict
from zeroviz.wording import title


class LiveBackend:
    """Implements `zeroviz.backend.Backend`. Runs asked for at the same time go one after another.

    Without a session it uses the process's shared one, which starts engines at the first run. So a notebook cell that
    is run again finds its engines warm, and two explorers in one notebook share them.
    """

    def __init__(self, session: Session | None = None) -> None:
        self.session = session or shared_session()

    @property
    def is_warm(self) -> bool:
        """Whether engines stand, whoever started them."""
        return bool(self.session.pids)

    async def run(
        self, spec: RunSpec, on_progress: OnProgress = ignore, *, save_to: str = "", resume_from: str = ""
    ) -> Trace:
        """Run `spec` and return the live trace. SpecError or RunError as `Session.run`; TraceError if a rank's events
        do not add up.

        save_to: a new directory for the run's state after its last step. resume_from: one that an earlier run, of any
        strategy and number of ranks, has written; this one goes on from there. "" for none.
        """
        save_to, resume_from = (str(Path(name).resolve()) if name else "" for name in (save_to, resume_from))
        done = await self.session.run(spec, on_progress, save_to=save_to, resume_from=resume_from)
        notes = [note for rank in done.ranks for note in rank["notes"]]
        if (num_made := len(done.ranks[0]["losses"])) > spec.steps:
            notes.append(
                f"{num_made} steps were made and not {spec.steps}: {spec.impl.label} allocates anew in its first ones, "
                "and one is made to count its collectives, before the one that is measured."
            )
        if resume_from:
            saved = read_manifest(Path(resume_from))
            notes.append(
                f"Went on from {resume_from}, after {saved.num_steps} steps of {title(saved.spec)}; step 1 here is the "
                "next."
            )
        trace = merge(Origin.LIVE, spec, map(rank_from_dict, done.ranks), environment(done), notes)
        on_progress(Progress(RunState.DONE, _done_words(done)))
        return trace

    async def stop(self) -> None:
        """Stop the session's processes. Idempotent."""
        await self.session.stop()


@cache
def shared_session() -> Session:
    """The session of whoever brings none: one in a process."""
    return Session()


def _done_words(done: SessionRun) -> str:
    """How long a person waited, and for what."""
    if not done.cold:
        return f"done in {done.run_s:.1f} s"
    return f"done in {done.start_s + done.run_s:.1f} s: started in {done.start_s:.1f} s, ran in {done.run_s:.1f} s"


def environment(done: SessionRun) -> dict[str, object]:
    """What the run was made on. Times in seconds; `start_s` is 0.0 for engines that were warm."""
    return {
        "torch": done.facts.torch,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host_cores": os.cpu_count(),
        "backend": done.placement.backend,
        "devices": list(done.placement.devices),
        "gpus": list(done.facts.gpus),
        "engines": "cold" if done.cold else "warm",
        "start_s": round(done.start_s, 3),
        "run_s": round(done.run_s, 3),
        "ranks": [rank["environment"] for rank in done.ranks],
    }
