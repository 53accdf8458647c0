"""Is each collective right on this very group? Asked before a run shows a number, and by the doctor.

Each op that a run's code may use (sums and averages, gathers, broadcasts) is made once on the group's real backend, in
each dtype that is sent, and compared with the same thing made in one process. A backend that sums where it should
average, that mixes up places, or that quietly does nothing is then named, instead of training on.

[Note: exact in bf16] The inputs are small whole numbers, at most `NUM_ADDENDS` of them not zero in one place. Their
sums stay below 256, up to which bf16 holds every whole number, so a wrong sum cannot hide behind rounding. Of an
average a backend may scale before it sums, so it may differ by the roundings, a fraction of what a wrong one differs
by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cluster.allocator import live_nbytes
from cluster.collectives import _all_gather, _reduce_scatter
from cluster.dtypes import NAME_OF, TORCH_DTYPE
from cluster.settle import settle
from zeroviz.collectives import CollectiveOp
from zeroviz.errors import RunError

SHARD_NUMEL = 5
NUM_ADDENDS = 6
_End = Callable[[], torch.Tensor]
_Begun = tuple[dist.Work | None, torch.Tensor]
# What one collective of a few bytes may take.
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Probe:
    """One collective to try. average: the mean and not the sum, for those that reduce."""

    op: CollectiveOp
    dtype: torch.dtype
    average: bool = False

    @property
    def name(self) -> str:
        return f"{self.op.value}{' average' if self.average else ''} {NAME_OF[self.dtype].value}"


def probes() -> Iterator[Probe]:
    """Everything that is tried, the same on every rank."""
    for op in CollectiveOp:
        for dtype in TORCH_DTYPE.values():  # those that are sent: quantized moments are not
            yield Probe(op, dtype)
            if op in (CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER):
                yield Probe(op, dtype, average=True)


class GroupCheck:
    """Probes every process group of this process once: call `check` when groups may have been made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._probed: list[dist.ProcessGroup] = []

    def check(self) -> None:
        """Raise RunError, naming rank, op, dtype, what came and what should have, if a new group's collective is wrong.

        All ranks make their groups in one order, so all of a group's ranks meet here. A few milliseconds a group.
        """
        if not dist.is_initialized():
            return
        before = live_nbytes(self._device)
        for group in list(dist.distributed_c10d._world.pg_map):  # torch has no public list of its groups
            if not any(group is other for other in self._probed):
                self._probed.append(group)
                _check_group(group, self._device)
        if before is not None:
            settle(self._device, before)  # so that no later reading counts its copies


def probe(job: Any) -> dict[str, Any]:
    """What the doctor asks of an engine. `failures` maps `op dtype` to a sentence, empty where all is well."""
    from cluster.rank import joined_group  # which asks this module in turn

    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined_group(job):
        group = dist.group.WORLD
        assert group is not None
        return {"failures": {each.name: sentence for each, sentence in failures(group, device).items()}}


def _check_group(group: dist.ProcessGroup, device: torch.device) -> None:
    if group.size() == 1:
        return
    for each, sentence in failures(group, device).items():
        if sentence:
            backend = dist.get_backend(group)
            raise RunError(
                f"The backend {backend} is wrong: {each.name} over {group.size()} ranks, {sentence}; nothing was "
                "trained. `zeroviz doctor` tries every collective.",
                rank=dist.get_rank(),
            )


def failures(group: dist.ProcessGroup, device: torch.device) -> dict[Probe, str]:
    """What is wrong with each collective on this rank; empty where nothing is.

    All are started before the first is waited for: together they take little longer than one. And all are waited for
    before anything is said, so that ranks which find nothing wrong are not left behind.
    """
    rank, num_ranks = group.rank(), group.size()
    begun = {each: _begin(each, group, rank_input(rank, num_ranks, each.dtype, device)) for each in probes()}
    return {each: _failure(each, end, rank, num_ranks, device) for each, end in begun.items()}


def _begin(probe: Probe, group: dist.ProcessGroup, mine: torch.Tensor) -> _End:
    """Start the collective. What comes back waits for it and gives its result, or raises what it raised."""
    try:
        work, result = _RUN[probe.op](probe, group, mine)
    except Exception as error:
        return partial(_raise, error)
    return partial(_wait, work, result)


def _raise(error: Exception) -> torch.Tensor:
    raise error


def _wait(work: dist.Work | None, result: torch.Tensor) -> torch.Tensor:
    if work is not None:
        work.wait(TIMEOUT)
    return result


def _failure(probe: Probe, end: _End, rank: int, num_ranks: int, device: torch.device) -> str:
    try:
        got = end()
    except Exception as error:  # whatever a backend raises for what it cannot do is the finding
        return f"rank {rank} got {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    want = expected(probe, rank, num_ranks, device)
    if _alike(got, want, probe, num_ranks):
        return ""
    return f"rank {rank} got {_words(got)} where one process gets {_words(want)}"


def rank_input(rank: int, num_ranks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(num_ranks * SHARD_NUMEL,): small whole numbers that tell place and rank; see the note above.

    1 + 10 * rank, 2 + 10 * rank, ... for few ranks. For more, each place has so many ranks' numbers, and zeros.
    """
    place = torch.arange(num_ranks * SHARD_NUMEL, device=device)
    number = torch.full_like(place, rank) if num_ranks <= NUM_ADDENDS else (rank - place) % num_ranks
    return torch.where(number < NUM_ADDENDS, place % 9 + 1 + 10 * number, 0).to(dtype)


def expected(probe: Probe, rank: int, num_ranks: int, device: torch.device) -> torch.Tensor:
    """What the collective must leave on `rank`, made in this one process from all ranks' inputs, in fp64."""
    inputs = [rank_input(other, num_ranks, torch.float64, device) for other in range(num_ranks)]
    if probe.op is CollectiveOp.ALL_GATHER:
        return torch.cat([inputs[other].chunk(num_ranks)[other] for other in range(num_ranks)])
    if probe.op is CollectiveOp.BROADCAST:
        return inputs[-1]
    total = torch.stack(inputs).sum(0) / (num_ranks if probe.average else 1)
    return total if probe.op is CollectiveOp.ALL_REDUCE else total.chunk(num_ranks)[rank]


def _alike(got: torch.Tensor, want: torch.Tensor, probe: Probe, num_ranks: int) -> bool:
    """Equal; an average within half a unit in the last place for the scale, each addend and the result."""
    num_roundings = min(num_ranks, NUM_ADDENDS) + 2 if probe.average else 0
    bound = want.abs() * torch.finfo(probe.dtype).eps / 2 * num_roundings
    return bool(((got.double() - want).abs() <= bound).all())


def _words(values: torch.Tensor) -> str:
    return ", ".join(f"{value:g}" for value in values[: 2 * SHARD_NUMEL].tolist())


def _reduction(probe: Probe) -> Any:
    return dist.ReduceOp.AVG if probe.average else dist.ReduceOp.SUM


def _all_reduce(probe: Probe, group: dist.ProcessGroup, mine: torch.Tensor) -> _Begun:
    return dist.all_reduce(mine, op=_reduction(probe), group=group, async_op=True), mine


def _gather(probe: Probe, group: dist.ProcessGroup, mine: torch.Tensor) -> _Begun:
    full = torch.zeros_like(mine)
    return _all_gather(full, mine.chunk(group.size())[group.rank()].clone(), group=group, async_op=True), full


def _scatter(probe: Probe, group: dist.ProcessGroup, mine: torch.Tensor) -> _Begun:
    shard = torch.zeros_like(mine.chunk(group.size())[group.rank()])
    return _reduce_scatter(shard, mine, op=_reduction(probe), group=group, async_op=True), shard


def _broadcast(probe: Probe, group: dist.ProcessGroup, mine: torch.Tensor) -> _Begun:
    return dist.broadcast(mine, group_src=group.size() - 1, group=group, async_op=True), mine


_RUN: dict[CollectiveOp, Callable[[Probe, dist.ProcessGroup, torch.Tensor], _Begun]] = {
    CollectiveOp.ALL_REDUCE: _all_reduce,
    CollectiveOp.ALL_GATHER: _gather,
    CollectiveOp.REDUCE_SCATTER: _scatter,
    CollectiveOp.BROADCAST: _broadcast,
}
