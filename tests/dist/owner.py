"""A process that owns a session, to be killed: prints the pool's directory once it is running, then runs on.

Ctrl-C ends it quietly.

python -m tests.dist.owner sync|async
"""

from __future__ import annotations

import asyncio
import sys

from cluster.live import LiveBackend
from cluster.session import Session
from tests.dist.helpers import pool_directory, tiny
from zeroviz.backend import Progress, RunState
from zeroviz.spec import RunSpec

LONG = 10**6  # steps; a run that does not end by itself


def main() -> None:
    session = Session()

    def show(progress: Progress) -> None:
        if progress.state is RunState.RUNNING:
            print(pool_directory(session), flush=True)

    spec: RunSpec = tiny(2, steps=LONG)
    try:
        if sys.argv[1] == "sync":
            session.run_sync(spec, show)
        else:
            asyncio.run(LiveBackend(session).run(spec, show))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
