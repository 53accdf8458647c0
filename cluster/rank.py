"""run_rank: the only function an engine is asked to call for a training run."""

from __future__ import annotations

import gc
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cluster.allocator import cpu_counter, live_nbytes
from cluster.collectives import Collectives, collectives_of
from cluster.meter import Meter, dependence, held_by_category
from cluster.own.step import Executor
from cluster.probe import GroupCheck
from cluster.settle import settle
from cluster.steps import Steps, counted_of, needs_group, steps_of
from zeroviz.errors import SpecError
from zeroviz.spec import DType, RunSpec
from zeroviz.trace import Category, RankTrace, rank_to_dict

# The counter knows only blocks born after it is switched on, so it is switched on with this module.
cpu_counter()


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """One rank's part of a run: the spec, and where this rank sits.

    store_path: a file all ranks reach, new for every run, through which they find each other.
    timeout_s: bound on the rendezvous and on every collective.
    save_to, resume_from: directories of checkpoints, absolute; "" for none (`cluster.checkpoint`).
    against, num_rounds: what `cluster.bench` sets beside the spec, and how often.
    """

    spec: RunSpec
    rank: int
    store_path: str
    backend: str
    device: str
    timeout_s: float
    save_to: str = ""
    resume_from: str = ""
    against: RunSpec | None = None
    num_rounds: int = 0


def run_rank(job: RankJob) -> dict[str, Any]:
    """Train `job.spec.steps` steps as one rank, metering the last, and return plain data.

    The result is `zeroviz.trace.rank_to_dict` plus `environment` and `notes`, sentences about the figures' sources.
    Raises SpecError when the device lacks the precision, RunError when a collective of its groups is wrong.
    """
    set_imports_aside()
    device = torch.device(job.device)
    check_precision(job.spec, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined_group(job) as comm:
        groups = GroupCheck(device)
        groups.check()
        trace, method = _train(job, comm, device, groups)
        result = rank_to_dict(trace)
        collect()  # what a library holds in circles goes while its group is still there
    result["environment"] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backend": job.backend if job.spec.ranks > 1 else "none",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "intra_op_threads": torch.get_num_threads(),
        "meter": method,
    }
    result["notes"] = [note] if (note := dependence(device)) else []
    return result


def set_imports_aside() -> None:
    """Take what imports left on the heap out of the garbage collector's sight, once for each set of modules.

    A full collection, of which each metered run needs several, then takes a millisecond and not a quarter of a second.
    """
    _set_aside(len(sys.modules))


@cache
def _set_aside(_: int) -> None:
    collect()
    gc.freeze()


def check_precision(spec: RunSpec, device: torch.device) -> None:
    """Raise SpecError if the device cannot compute in the recipe's parameter dtype."""
    if spec.recipe.compute is DType.BF16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        name = torch.cuda.get_device_name(device)
        raise SpecError(f"Precision is {spec.precision.value!r}, but {name} has no bf16; use precision fp32.")


@contextmanager
def joined_group(job: RankJob) -> Iterator[Collectives]:
    """Join the run's process group for the block. A single rank of our own code needs none.

    The group is made anew for each run, in some 50 ms: a pool of warm engines then serves any number of ranks.
    """
    num_ranks = job.spec.ranks
    if not needs_group(job.spec):
        yield collectives_of(job.spec, 0)
        return
    store = dist.FileStore(job.store_path, num_ranks)
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=num_ranks, timeout=timeout)
    try:
        yield collectives_of(job.spec, job.rank, timeout)
    finally:
        dist.destroy_process_group()


def collect() -> None:
    """Drop what nobody holds, twice: finalizers of a library's objects may cut further circles."""
    for _ in range(2):
        gc.collect()


def _train(job: RankJob, comm: Collectives, device: torch.device, groups: GroupCheck) -> tuple[RankTrace, str]:
    """The rank's trace, and how the metered step was read."""
    spec = job.spec
    # One thread a rank: ranks share the cores, and a kernel's scratch grows with its threads.
    torch.set_num_threads(1)
    make = steps_of(spec, comm, device)
    set_imports_aside()  # those of the library
    collect()
    before = live_nbytes(device)
    meter = Meter()
    executor = make(meter)
    groups.check()  # of those that the model made for itself
    num_earlier = _resumed(executor, job.resume_from)
    losses: list[float] = []
    step_time_ns: list[int] = []

    def step() -> None:
        start = time.perf_counter_ns()
        losses.append(executor.step())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        step_time_ns.append(time.perf_counter_ns() - start)

    counted = counted_of(executor)
    num_before = spec.steps - 1
    if counted is not None:
        # A step in which the calls are counted stands before the metered one, and the library has settled before both.
        num_before = max(num_before, counted.num_warm_steps + 1)
    for _ in range(num_before - (counted is not None)):
        step()
    if counted is not None:
        with counted.counted.counting():
            step()
    gc.collect()
    rest = held_by_category(executor.held_tensors())
    step_counter_nbytes = sum(counter.untyped_storage().nbytes() for counter in executor.step_counters())
    comm.barrier()
    settle(device, (before or 0) + sum(rest.values()) + step_counter_nbytes)
    comm.start_record()
    executor.link.start_record()
    # Nothing but the executor may hold its tensors while the step runs: it might want to free them.
    held = chain(executor.held_tensors(), ((counter, None) for counter in executor.step_counters()))
    with meter.recording(held, device) as recording, comm.settled_by(recording.settling):
        step()
    reading = None if before is None else recording.reading(before)
    if reading and device.type == "cpu":
        # On CPU nothing is at rest beside what the executor names, or it is a finding.
        unknown = reading.rest_nbytes - sum(rest.values()) - step_counter_nbytes
        rest |= {Category.UNATTRIBUTED: unknown} if unknown else {}
    trace = RankTrace(
        rank=comm.rank,
        rest=rest,
        events=recording.events,
        collectives=tuple(comm.calls if counted is None else counted.counted.calls),
        transfers=tuple(executor.link.transfers),
        padding_nbytes=executor.padding_nbytes(),
        step_counter_nbytes=step_counter_nbytes,
        allocator=reading,
        device_lines=recording.device_lines,
        losses=tuple(losses),
        step_time_ns=tuple(step_time_ns),
    )
    if job.save_to:
        from cluster.checkpoint import save

        assert isinstance(executor, Executor)
        save(executor, Path(job.save_to), num_earlier + len(losses))
    return trace, recording.method


def _resumed(executor: Steps, resume_from: str) -> int:
    """Put a checkpoint's state into the model, if one is named. How many steps it has behind it."""
    if not resume_from:
        return 0
    from cluster.checkpoint import load  # torch's distributed checkpoint takes most of a second to import

    assert isinstance(executor, Executor)
    return load(executor, Path(resume_from)).num_steps
