"""The real step on fake tensors in a fake group: any model, any N, no memory.

The code is that of a live run, down to the collectives' calls: `cluster.own`'s executor, torch's operators and autograd,
torch.distributed. Fake are the tensors (`cluster.fake`) and the process group (torch's `fake` backend, which answers
every collective at once), so one rank walks the step alone in place of N. Two steps are made: the optimizer's state
comes with the first, the second is recorded.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from cluster.capacity import check_runnable
from cluster.collectives import Collectives
from cluster.fake import FakeTensors
from cluster.meter import Meter, held_by_category
from cluster.own.step import Executor
from cluster.record_fake import FakeRecorder
from zeroviz.backend import OnProgress, Progress, RunState
from zeroviz.errors import RunError, SpecError
from zeroviz.memory import rest_padding_nbytes
from zeroviz.spec import RunSpec
from zeroviz.trace import Origin, RankTrace, Trace, merge


def rehearse(spec, on_progress=lambda p: None):
    tensors = FakeTensors()
    recorder = FakeRecorder(tensors)
    meter = Meter(recorder)
    device = torch.device("cpu")
    with fake_group(0, spec.ranks) as comm, tensors:
        executor = Executor(spec, comm, meter, device)
        executor.step()
        rest = held_by_category(executor.held_tensors())
        counters = sum(c.untyped_storage().nbytes() for c in executor.step_counters())
        comm.start_record()
        executor.link.start_record()
        held = chain(executor.held_tensors(), ((counter, None) for counter in executor.step_counters()))
        with meter.recording(held, device) as recording:
            executor.step()
        ranks = [
            RankTrace(
                rank=r,
                rest=rest,
                events=recording.events,
                collectives=tuple(comm.calls),
                transfers=tuple(executor.link.transfers),
                padding_nbytes=rest_padding_nbytes(spec, r),
                step_counter_nbytes=counters,
            )
            for r in range(spec.ranks)
        ]
    return merge(Origin.REHEARSED, spec, ranks)


@contextmanager
def fake_group(rank: int, num_ranks: int) -> Iterator[Collectives]:
    if num_ranks == 1:
        yield Collectives(0, 1, None)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield Collectives(rank, num_ranks, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
