"""One step under the referee, and the same step under the meter: prints both as JSON.

    LD_PRELOAD=referee.so python -m tests.dist.referee_step SPEC.json

The referee counts all of the process, and so what a recording itself allocates; it watches a step that is not
recorded. The step after it is recorded. Steps of one rank are alike to the byte.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from cluster.allocator import cpu_counter
from cluster.meter import Meter
from cluster.own.step import Executor
from cluster.rank import RankJob, joined_group
from cluster.settle import Settling
from tests.dist.ranks import RankPool
from zeroviz.spec import RunSpec


def refereed(job: RankJob) -> dict[str, Any]:
    """The growth of one step by the referee and by the allocator, in bytes."""
    referee = ctypes.CDLL(None)
    for name in ("referee_live", "referee_peak"):
        getattr(referee, name).restype = ctypes.c_long
    torch.set_num_threads(1)
    # In bf16 oneDNN's matrix products take from the heap what the processor demands, in torch's allocator on some and
    # beside it on others (0.2 MB were seen). Without it the kernels are torch's own everywhere.
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    device = torch.device("cpu")
    with joined_group(job) as comm:
        meter = Meter()
        executor = Executor(job.spec, comm, meter, device)
        for _ in range(3):  # the optimizer's state, and what libraries set up once
            executor.step()
        gc.collect()
        gc.disable()  # the collector frees and allocates when it likes
        comm.barrier()
        counter = cpu_counter()
        assert counter is not None
        referee.referee_restart()
        before = referee.referee_live()
        with comm.settled_by(Settling(counter)):
            executor.step()
        by_referee = referee.referee_peak() - before
        comm.barrier()
        with meter.recording(executor.held_tensors(), device) as recording, comm.settled_by(recording.settling):
            executor.step()
        gc.enable()
    assert recording.peak_nbytes is not None and recording.rest_nbytes is not None
    return {"referee": by_referee, "allocator": recording.peak_nbytes - recording.rest_nbytes}


def main() -> None:
    spec = RunSpec.from_dict(json.loads(Path(sys.argv[1]).read_text()))
    pool = RankPool()
    print(json.dumps(pool.run(refereed, spec)))
    pool.close()


if __name__ == "__main__":
    main()
