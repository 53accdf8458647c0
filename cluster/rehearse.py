"""The real step on fake tensors in a fake group: any model, any N, no memory.

The code is that of a live run, down to the collectives' calls: our executor or torch's FSDP2, torch's operators and
autograd, torch.distributed. Fake are the tensors (`cluster.fake`) and the process group (torch's `fake` backend, which
answers every collective at once), so one rank walks the step alone in place of N. Two steps are made: the optimizer's
state comes with the first, the second is recorded.

Rank 0 walks. Under our own implementation ranks differ in padding only; FSDP2's differ in their optimizer's step too,
and each kind of rank makes its own (`cluster.witness.update`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
import torch._dynamo  # any optimizer imports it when made: a second that is none of the rehearsal's
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from cluster.capacity import check_runnable
from cluster.collectives import Collectives, collectives_of
from cluster.fake import FakeTensors
from cluster.meter import Meter, held_by_category
from cluster.pace import Pace
from cluster.record_fake import FakeRecorder
from cluster.steps import needs_group, steps_of
from cluster.witness.chunks import chunks_on_demand
from cluster.witness.update import Update
from zeroviz.backend import OnProgress
from zeroviz.command import command_line
from zeroviz.errors import RunError, SpecError
from zeroviz.implementations import can_rehearse
from zeroviz.memory import rest_padding_nbytes
from zeroviz.partition import alike_stretches
from zeroviz.rank_trace import AlikeRanks
from zeroviz.schedule import Phase
from zeroviz.spec import Implementation, RunSpec
from zeroviz.trace import Category, Event, Origin, RankTrace, Trace
from zeroviz.witness.fsdp2_groups import alike, local_numels

CPU = torch.device("cpu")
MAX_TOKENS = 2**24
NOTE = (
    "Rehearsed as on CPU, with the tensors the CPU's kernels keep and borrow; kernels' inner scratch and a backend's "
    "copies are not there, since no kernel and no backend ran."
)


def rehearse(spec: RunSpec, on_progress: OnProgress | None = None, poll: Callable[[], None] | None = None) -> Trace:
    """The step of `spec`, every rank's. SpecError for what cannot be run at all; RunError inside a process group.

    on_progress: gets an estimate first if it is going to take long. poll: called every few milliseconds; what it
    raises ends the rehearsal.
    """
    check_rehearsable(spec)
    if dist.is_initialized():
        raise RunError("A rehearsal makes a process group of its own, and this process is in one; leave that first.")
    with Pace(spec, on_progress, poll) as pace:
        tensors = FakeTensors(pace.operator)
        first = _walk(spec, tensors)
        ranks = _fsdp2_ranks(spec, first, tensors) if spec.impl is Implementation.FSDP2 else _own_ranks(spec, first)
    environment = {"torch": torch.__version__, "python": platform.python_version(), "meter": FakeRecorder.method}
    return Trace(Origin.REHEARSED, spec, ranks, environment, notes=(NOTE,))


def check_rehearsable(spec: RunSpec) -> None:
    """Raise SpecError for code that only runs for real, a model without layers, and a batch that would take minutes to
    write down."""
    if not can_rehearse(spec.impl):
        raise SpecError(
            f"impl is {spec.impl.value!r}, which is not rehearsed here: our own code and fsdp2 are; use "
            f"{command_line('predict', spec)!r} or {command_line('run', spec)!r}."
        )
    check_runnable(spec)
    if spec.num_tokens_per_rank > MAX_TOKENS:
        raise SpecError(
            f"batch {spec.batch:,} of seq {spec.seq:,} is {spec.num_tokens_per_rank:,} tokens on each rank, which a "
            f"rehearsal reads one by one; use at most {MAX_TOKENS:,}, or `zeroviz predict`."
        )


@contextmanager
def fake_group(spec: RunSpec, rank: int) -> Iterator[Collectives]:
    """Be `rank` of `spec.ranks` ranks for the block. The others do not exist."""
    if not needs_group(spec):
        yield collectives_of(spec, rank)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.ranks)
    try:
        yield collectives_of(spec, rank)
    finally:
        dist.destroy_process_group()


def _walk(spec: RunSpec, tensors: FakeTensors) -> RankTrace:
    """Rank 0's trace, checked."""
    meter = Meter(FakeRecorder(tensors))
    with fake_group(spec, 0) as comm:
        make = steps_of(spec, comm, CPU)
        with tensors:
            with chunks_on_demand():
                steps = make(meter)
            steps.step()
            rest = held_by_category(steps.held_tensors())
            step_counter_nbytes = sum(counter.untyped_storage().nbytes() for counter in steps.step_counters())
            comm.start_record()
            steps.link.start_record()
            held = chain(steps.held_tensors(), ((counter, None) for counter in steps.step_counters()))
            with meter.recording(held, CPU) as recording:
                steps.step()
            trace = RankTrace(
                rank=0,
                rest=rest,
                events=recording.events,
                collectives=tuple(comm.calls),
                transfers=tuple(steps.link.transfers),
                padding_nbytes=steps.padding_nbytes(),
                step_counter_nbytes=step_counter_nbytes,
            )
    trace.check()
    return trace


def _own_ranks(spec: RunSpec, first: RankTrace) -> Sequence[RankTrace]:
    """Every rank's trace: rank 0's, with the rank's padding."""
    return AlikeRanks(
        [
            (stretch, replace(first, rank=stretch.start, padding_nbytes=rest_padding_nbytes(spec, stretch.start)))
            for stretch in alike_stretches(spec)
        ]
    )


def _fsdp2_ranks(spec: RunSpec, first: RankTrace, tensors: FakeTensors) -> Sequence[RankTrace]:
    """Every rank's trace: rank 0's, with the optimizer's step of the rank's kind.

    Rank 0's own is made again as well: in the walk it is made on DTensors, and what these do once to know an operator
    (they run it on fake tensors of the whole shape) is no part of a step.
    """
    before = tuple(event for event in first.events if event.phase != Phase.OPTIMIZER.value)
    padded_nbytes = first.rest[Category.SHARDED_PARAM] + first.rest[Category.SHARDED_GRAD]
    stretches = []
    for stretch in alike(spec):
        moments_nbytes, events = _update(spec, stretch.start, tensors)
        moments = {Category.OPTIMIZER_STATE: moments_nbytes} if moments_nbytes else {}
        rest = dict(first.rest)
        rest.pop(Category.OPTIMIZER_STATE, None)
        trace = replace(
            first,
            rank=stretch.start,
            rest={**rest, **moments},
            events=before + events,
            padding_nbytes=padded_nbytes - 2 * spec.recipe.param.itemsize * sum(local_numels(spec, stretch.start)),
        )
        trace.check()
        stretches.append((stretch, trace))
    return AlikeRanks(stretches)


def _update(spec: RunSpec, rank: int, tensors: FakeTensors) -> tuple[int, tuple[Event, ...]]:
    """Bytes of the rank's moments, and the events of its optimizer's step."""
    meter = Meter(FakeRecorder(tensors))
    with tensors:
        update = Update(spec, rank, meter, CPU)
        update.step()
        moments_nbytes = sum(held_by_category(update.moments()).values())
        with meter.recording(update.held_tensors(), CPU) as recording:
            update.step()
    return moments_nbytes, tuple(recording.events)
