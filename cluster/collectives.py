"""The seam every byte passes: three collectives, one semantics on gloo and NCCL, each call recorded.

[Note: in place] all_gather takes the shard as a view of the full buffer or as a tensor of its own, and reduce_scatter
may write into a view of its input. Both backends allow it, and it is what keeps our own implementation free of
separate communication buffers. gloo makes working copies all the same (a gather holds its output twice, a
reduce-scatter clones its input, and lets go of it some time later in a thread of its own). They are the backend's:
calls and waits are marked and hidden from dispatch modes, so that a meter can tell them from our own. They are a
category of their own, which no figure for another backend counts.

[Note: at once] Where a wait follows its start at once, nothing of ours is allocated in between, so what is live after
it is what was live before, and a metered step can wait for just that (`settle.py`). Where compute stands between them
there is no such figure, and the copies go when gloo lets them go.

[Note: late references] gloo's worker drops its references to what it was given some time after the result is there. The
last of them but one gives the Python object back, which takes Python's lock: a moment in which torch counts one
reference and the object still has one too many. Who drops the tensor then does not free it; the worker does, when it
gets the lock, an op later or ten. So the object's own references are counted as well.

[Note: groups] HYBRID_SHARD's ranks are a table of shard groups (rows, neighbours) by replicas (columns), as in a 2-D
device mesh: rank r is in row r // G and column r % G. Each rank makes its own two groups and no other. A group of all
ranks is the run's own, and a group of one rank is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from operator import le
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from cluster.dtypes import NAME_OF
from cluster.settle import Settling
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.spec import Implementation, RunSpec
from zeroviz.trace import Collective

BACKEND_RANGE = "zeroviz::backend"
# A range of this name says how many bytes were live in it, while no thread of the backend was at work.
SETTLED_RANGE = "zeroviz::settled|"


# Entered around the backend's work by a recorder that has no such ranges to read.
backend_hooks: list[Callable[[], AbstractContextManager[None]]] = []


def _backend() -> AbstractContextManager[None]:
    """Inside, the backend works, not we. Nobody to whom that can be told costs nothing: a step enters it often."""
    watched = backend_hooks or torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled()
    return _told_backend() if watched else nullcontext()


@contextmanager
def _told_backend() -> Iterator[None]:
    with record_function(BACKEND_RANGE), _disable_current_modes(), ExitStack() as hooks:
        for hook in backend_hooks:
            hooks.enter_context(hook())
        yield


class Handle:
    """A collective under way; without work, as for one rank, one that is over."""

    def __init__(self, work: dist.Work | None = None, after: Callable[[], None] | None = None) -> None:
        """after: what to do when the result is there."""
        self._work, self._after = work, after

    def wait(self) -> None:
        """Wait until the result is there. Raises RuntimeError when the group broke or its time bound passed."""
        if self._work is not None:
            with _backend():  # gloo copies the result out of its clone in here
                self._work.wait()
            if self._after is not None:
                self._work = None  # gloo keeps its copies as long as this is held
                self._after()


# torch 2.13 renames the two single-tensor collectives and warns of the old names; older ones have only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Members:
    """A group this rank is in: how many ranks, and torch's group; None for a rank by itself, which sends nothing."""

    num_ranks: int
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        if (self.group is None) != (self.num_ranks == 1):
            given = f"{self.num_ranks} ranks and group {self.group!r}"
            raise ValueError(f"{given}: two or more need a group, one has none.")


def collectives_of(spec: RunSpec, rank: int, timeout: timedelta | None = None) -> Collectives:
    """The collectives of `rank` in torch's default group, and in the groups that our own code needs beside it.

    Every rank calls it; a single one needs no default group. timeout: bound on making groups and on their collectives.
    See [Note: groups].
    """
    everyone = Members(spec.ranks, dist.group.WORLD if spec.ranks > 1 else None)
    size = spec.shard_ranks
    if size is None or spec.impl is not Implementation.OWN:
        return Collectives(rank, everyone.num_ranks, everyone.group)
    row = range(rank // size * size, (rank // size + 1) * size)
    column = range(rank % size, spec.ranks, size)
    members = {}
    for group, ranks in ((Group.SHARD, row), (Group.REPLICA, column)):
        if len(ranks) in (1, spec.ranks):
            members[group] = everyone if len(ranks) == spec.ranks else Members(1, None)
        else:
            made = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
            members[group] = Members(len(ranks), made)
    return Collectives(rank, everyone.num_ranks, everyone.group, members)


class Collectives:
    """Collectives of a rank's groups. All are asynchronous and return a handle; all sum, none averages.

    `group` is of all ranks, None for a single rank: nothing is sent and nothing is recorded. groups: others that the
    rank is in; a call names one by `among`. `calls` is what was recorded since the last `start_record`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        group: dist.ProcessGroup | None,
        groups: Mapping[Group, Members] | None = None,
    ) -> None:
        self.rank, self.num_ranks, self._group = rank, num_ranks, group
        self._members = {Group.ALL: Members(num_ranks, group), **(groups or {})}
        self.calls: list[Collective] = []
        self._where = ("", "")
        self._num_ops = 0
        self._num_in_flight = 0
        self._settling: Settling | None = None

    def start_record(self) -> None:
        """Forget the calls recorded so far."""
        self.calls = []

    def at(self, phase: str, unit: str) -> None:
        """Say where in the step the next calls are made: at the start of every op."""
        self._where = (phase, unit)
        self._num_ops += 1

    @contextmanager
    def settled_by(self, settling: Settling | None) -> Iterator[None]:
        """Inside, a wait that follows its start at once also waits for the backend's copies to be gone."""
        self._settling = settling
        try:
            yield
        finally:
            self._settling = None

    def join(self, group: Group, members: Members) -> None:
        """Know another group that the rank is in: one that a library is given, or has made."""
        self._members[group] = members

    def which(self, group: dist.ProcessGroup) -> Group:
        """The name of one of the rank's groups; the one of all ranks before others of the same ranks."""
        return next(name for name, members in self._members.items() if members.group is group)

    def saw(self, op: CollectiveOp, full: torch.Tensor, among: Group) -> None:
        """Record a call that a library made by itself, of the whole array `full`. A rank by itself sends nothing."""
        if self._members[among].group is not None:
            self._record(op, full, among)

    @property
    def settling(self) -> Settling | None:
        """What a metered step waits with, for code that makes its calls itself; None in other steps."""
        return self._settling

    def all_reduce(self, full: torch.Tensor, among: Group = Group.ALL) -> Handle:
        """Sum `full` (numel,) over the ranks, in place."""
        group = self._members[among].group
        if group is None:
            return Handle()
        self._record(CollectiveOp.ALL_REDUCE, full, among)
        return self._started(lambda: dist.all_reduce(full, group=group, async_op=True), full)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, among: Group = Group.ALL) -> Handle:
        """Fill `full` (num_ranks * numel,) with every rank's `shard` (numel,), in rank order."""
        group = self._members[among].group
        if group is None:
            if not _in_place(full, shard):
                full.copy_(shard)
            return Handle()
        self._record(CollectiveOp.ALL_GATHER, full, among)
        return self._started(lambda: _all_gather(full, shard, group=group, async_op=True), full, shard)

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, among: Group = Group.ALL, *, average: bool = False
    ) -> Handle:
        """Sum `full` (num_ranks * numel,) over the ranks and leave this rank's part in `shard` (numel,).

        average: let the backend divide the sum by the number of ranks.
        """
        group = self._members[among].group
        if group is None:
            if not _in_place(full, shard):
                shard.copy_(full)
            return Handle()
        self._record(CollectiveOp.REDUCE_SCATTER, full, among)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return self._started(lambda: _reduce_scatter(shard, full, op=op, group=group, async_op=True), full, shard)

    def barrier(self) -> None:
        """Wait for every rank; not recorded, since it is no part of a step."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def _started(self, call: Callable[[], dist.Work], *tensors: torch.Tensor) -> Handle:
        """Make the call. "At once", see the note, is in the same op or in the next, with no other call under way."""
        settling = self._settling
        if settling is None:
            with _backend():
                return Handle(call())
        before, began, alone = settling.counter(), self._num_ops, self._num_in_flight == 0
        owners = owners_of(tensors)
        self._num_in_flight += 1

        def after() -> None:
            self._num_in_flight -= 1
            if alone and self._num_in_flight == 0 and self._num_ops <= began + 1:
                # Its references to what it was given go late as well. Who drops these tensors must see their bytes go.
                settling.until(lambda: is_let_go(tensors, owners))
                live = settling.down_to(before)
                if live is not None:
                    with record_function(f"{SETTLED_RANGE}{live}"):
                        pass

        with _backend():
            return Handle(call(), after)

    def _record(self, op: CollectiveOp, full: torch.Tensor, among: Group) -> None:
        nbytes = full.numel() * full.element_size()
        phase, unit = self._where
        num_ranks = self._members[among].num_ranks
        self.calls.append(Collective(op, NAME_OF[full.dtype].value, num_ranks, nbytes, phase, unit, among))


def _in_place(full: torch.Tensor, shard: torch.Tensor) -> bool:
    """Whether a single rank's shard is the full buffer. Told without an address, which fake tensors do not have."""
    same = full.untyped_storage()._cdata == shard.untyped_storage()._cdata
    return same and full.storage_offset() == shard.storage_offset()


def owners_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How many references keep each tensor, its storage and its Python object: three numbers a tensor."""
    counts = ((*_owners_in_torch(tensor), sys.getrefcount(tensor)) for tensor in tensors)
    return [count for of_tensor in counts for count in of_tensor]


def is_let_go(tensors: Sequence[torch.Tensor], before: Sequence[int]) -> bool:
    """Whether no more references keep them than `before`, each count by itself. See [Note: late references]."""
    return all(now <= then for now, then in zip(owners_of(tensors), before, strict=True))


class LetGo:
    """Waits for a tensor that a library gave to a call of its own, where nobody saw how it was held before: until
    Python alone holds it, and then once more, for its object."""

    def __init__(self) -> None:
        self._alone = _owners_in_torch(torch.empty(1))

    def wait(self, tensor: torch.Tensor, settling: Settling | None) -> None:
        """In a metered step, which has a `settling`."""
        if settling is not None:
            settling.until(lambda: all(map(le, _owners_in_torch(tensor), self._alone)))
            settling.let_in()


def _owners_in_torch(tensor: Any) -> tuple[int, int]:  # torch's stubs lack _use_count
    """How many references keep the tensor, and its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
