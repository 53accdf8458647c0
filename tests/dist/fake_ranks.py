"""Stand-ins for `run_rank` that misbehave on request; the spec's seed says how. Runs on the engines."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from cluster.rank import RankJob
from zeroviz.errors import SpecError

ANSWER, RAISE_IN_ONE, RAISE_LATE, REFUSE, HANG, CHATTER = range(6)
FOREVER_S = 3600.0


def behave(job: RankJob) -> dict[str, Any]:
    """ANSWER at once; RAISE_IN_ONE: rank 1 raises, the others hang; RAISE_LATE: rank 0 loses its connection at once and
    rank 1 raises the cause 0.3 s later; REFUSE: every rank raises SpecError; HANG; CHATTER: print, then answer."""
    match job.spec.seed:
        case x if x == RAISE_IN_ONE:
            if job.rank == 1:
                raise ValueError("the loss is not a number.\nSecond line, which is for the traceback only.")
            time.sleep(FOREVER_S)
        case x if x == RAISE_LATE:
            if job.rank == 1:
                time.sleep(0.3)
                raise ArithmeticError("overflow")
            raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4242")
        case x if x == REFUSE:
            raise SpecError("precision is 'bf16', but this device has none.")
        case x if x == HANG:
            time.sleep(FOREVER_S)
        case x if x == CHATTER:
            print("engine stdout")
            print("engine stderr", file=sys.stderr)
            os.write(1, b"engine fd 1\n")
            os.write(2, b"engine fd 2\n")
    return {"rank": job.rank, "device": job.device, "store": job.store_path}
