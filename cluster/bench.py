"""Two implementations of one spec, step by step in turn, in the same processes: times, and one metered step each.

Both models stand side by side on every rank. A round is one step of each, the order turned about from round to round;
each step begins at a barrier, and its time is the slowest rank's. Nothing is metered meanwhile; after the rounds one
step of each is, for the peak and, where a library's calls do not pass our seam, one before the rounds is counted.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from cluster.capacity import check_capacity
from cluster.collectives import Collectives, collectives_of
from cluster.live import environment
from cluster.meter import Meter, held_by_category
from cluster.probe import GroupCheck
from cluster.rank import RankJob, joined_group, set_imports_aside
from cluster.session import Session
from cluster.steps import counted_of, steps_of
from zeroviz.backend import OnProgress, Progress, RunState
from zeroviz.bench import Pair, Side
from zeroviz.errors import RunError, SpecError
from zeroviz.spec import RunSpec
from zeroviz.trace import Category, RankTrace

NUM_WARM_STEPS = 4
# gloo's threads let go of the last collective's copies within a millisecond.
_QUIET_S = 0.005


class BenchSide:
    """One implementation's model on this rank."""

    def __init__(self, spec: RunSpec, comm: Collectives, device: torch.device) -> None:
        self.spec, self.comm, self.device = spec, comm, device
        self.meter = Meter()
        try:
            self.steps = steps_of(spec, comm, device)(self.meter)
        except (ImportError, KeyError) as error:
            raise SpecError(f"impl {spec.impl.value} is not to be had here ({error}).") from None
        self.loss = 0.0

    def warm_up(self) -> None:
        """As many steps as any library takes to allocate as it will from then on; the last is counted, if need be."""
        counted = counted_of(self.steps)
        for _ in range(NUM_WARM_STEPS):
            self.steps.step()
        with counted.counted.counting() if counted else nullcontext():
            self.steps.step()

    def timed_step(self) -> tuple[int, int]:
        """Nanoseconds from a moment at which all ranks are there, and nanoseconds of this process's work."""
        self.comm.barrier()
        start, worked = time.perf_counter_ns(), time.process_time_ns()
        self.loss = self.steps.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter_ns() - start, time.process_time_ns() - worked

    def held(self) -> Iterator[tuple[torch.Tensor, Category | None]]:
        yield from self.steps.held_tensors()
        yield from ((counter, None) for counter in self.steps.step_counters())

    def metered_step(self, beside: BenchSide) -> RankTrace:
        """What one more step holds and sends. What the other side holds is there as well, and not counted."""
        gc.collect()
        self.comm.barrier()
        time.sleep(_QUIET_S)
        rest = held_by_category(self.steps.held_tensors())
        num_counters_nbytes = sum(counter.untyped_storage().nbytes() for counter in self.steps.step_counters())
        self.comm.start_record()
        held = (*self.held(), *((tensor, None) for tensor, _ in beside.held()))
        recording_of = self.meter.recording(iter(held), self.device)
        del held  # nothing here may keep what a step might want to free
        with recording_of as recording, self.comm.settled_by(recording.settling):
            self.steps.step()
        counted = counted_of(self.steps)
        return RankTrace(
            rank=self.comm.rank,
            rest=rest,
            events=recording.events,
            collectives=tuple(self.comm.calls if counted is None else counted.counted.calls),
            step_counter_nbytes=num_counters_nbytes,
        )


def bench_rank(job: RankJob) -> dict[str, Any]:
    """One rank's part: `job.num_rounds` rounds of `job.spec` beside `job.against`. Plain data, `own` and `other`."""
    assert job.against is not None
    set_imports_aside()
    torch.set_num_threads(1)
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined_group(replace(job, spec=job.against)) as theirs:
        groups = GroupCheck(device)
        groups.check()
        ours = collectives_of(job.spec, job.rank, timedelta(seconds=job.timeout_s))
        own, other = BenchSide(job.spec, ours, device), BenchSide(job.against, theirs, device)
        groups.check()
        sides = (own, other)
        for side in sides:
            side.warm_up()
        times: list[list[tuple[int, int]]] = [[], []]
        for number in range(job.num_rounds):
            gc.collect()
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                times[which].append(sides[which].timed_step())
        traces = own.metered_step(other), other.metered_step(own)
        return {"environment": {"intra_op_threads": torch.get_num_threads()}} | {
            name: {
                "step_time_ns": [wall for wall, _ in times[which]],
                "cpu_time_ns": [worked for _, worked in times[which]],
                "rest_nbytes": trace.rest_nbytes,
                "peak_nbytes": trace.peak().total,
                "here_nbytes": trace.machine_peak().total,
                "sent_nbytes": trace.sent_nbytes,
                "loss": side.loss,
            }
            for which, (name, side, trace) in enumerate(zip(("own", "other"), sides, traces, strict=True))
        }


def side_of(ranks: Sequence[Mapping[str, Any]]) -> Side:
    """One side from what each rank measured of it."""
    walls, works = (zip(*(rank[name] for rank in ranks), strict=True) for name in ("step_time_ns", "cpu_time_ns"))
    return Side(
        step_time_ns=tuple(map(max, walls)),
        cpu_time_ns=tuple(map(sum, works)),
        loss=sum(rank["loss"] for rank in ranks) / len(ranks),
        **{
            name: max(rank[name] for rank in ranks)
            for name in ("rest_nbytes", "peak_nbytes", "here_nbytes", "sent_nbytes")
        },
    )


async def bench_pairs(
    wanted: Sequence[tuple[RunSpec, RunSpec] | Pair], num_rounds: int, on_progress: OnProgress
) -> tuple[list[Pair], dict[str, Any]]:
    """Every pair, one after another on the same engines, and what they ran on. A pair that is refused, or fails, is
    absent, with the reason."""
    found: list[Pair] = []
    facts: dict[str, Any] = {"host_cores": os.cpu_count(), "load_before": [round(x, 1) for x in os.getloadavg()]}
    session = Session(target="cluster.bench:bench_rank")
    try:
        for number, each in enumerate(wanted):
            if isinstance(each, Pair):
                found.append(each)
                continue
            own, other = each
            words = f"{number + 1}/{len(wanted)}: {own.strategy.value}, own and {other.impl.value}, {num_rounds} rounds"
            on_progress(Progress(RunState.RUNNING, words))
            pair = Pair(strategy=own.strategy, impl=other.impl)
            # As many steps as are made bound the run's time.
            spec = replace(own, steps=2 * (num_rounds + NUM_WARM_STEPS + 3))
            try:
                check_capacity(own, num_warm=len(session.pids), beside=other)
                done = await session.run(spec, _quiet(on_progress), against=other, num_rounds=num_rounds)
            except (SpecError, RunError) as error:
                found.append(replace(pair, absent=str(error), failed=isinstance(error, RunError)))
                continue
            ours, theirs = (side_of([rank[name] for rank in done.ranks]) for name in ("own", "other"))
            found.append(replace(pair, own=ours, other=theirs))
            facts |= {name: value for name, value in environment(done).items() if name != "ranks"}
    finally:
        await session.stop()
    return found, facts


def _quiet(on_progress: OnProgress) -> OnProgress:
    """Only what is said while engines start: a pair has its own line."""

    def show(progress: Progress) -> None:
        if progress.state is RunState.STARTING:
            on_progress(progress)

    return show
