"""The seam's count for code we did not write: every call to torch.distributed, seen from outside.

A library calls torch.distributed in its own ways, from Python or from C++ (DDP's reducer), and all of them end in an
operator of the c10d namespace. A dispatch mode sees these on their way, with their tensors and their group; nothing in
the library is changed. But a step under such a mode allocates otherwise (see [Note: sums] in zeroviz/tape.py), so
the step that is counted is another one than the step that is metered: the one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.dtypes import NAME_OF
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.errors import RunError
from zeroviz.trace import Collective


class Counted:
    """What a counted step called. `at` says where in the step the next calls are made; see `Collectives.at`."""

    def __init__(self) -> None:
        self.calls: list[Collective] = []
        self.small: list[str] = []
        """Calls that carry no tensor of the model: flags, lists of indices. Named, and in no figure."""
        self.sent: list[torch.Tensor] = []
        """The whole array of each call, also of a single rank's: a library's own buffers, seen where they are sent."""
        self._where = ("", "")
        self.groups: dict[str, Group] = {}
        """Which ranks a group has, by its name; all, where nothing is said."""

    def at(self, phase: str, unit: str) -> None:
        self._where = (phase, unit)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.calls, self.small, self.sent = [], [], []
        with _Mode(self._called):
            yield

    def _called(self, name: str, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        op = _OP.get(name)
        if op is None:
            if name in _CARRIES_NOTHING:
                return
            raise RunError(f"The library called {name}, which is not counted here; known are {', '.join(sorted(_OP))}.")
        whole = max(tensors, key=lambda tensor: tensor.nbytes)
        if group.size() == 1:
            self.sent.append(whole)
            return
        if whole.dtype not in NAME_OF:
            self.small.append(f"{name} of {whole.numel()} {whole.dtype}")
            return
        nbytes = sum(tensor.nbytes for tensor in tensors) if name in _OF_MANY else whole.nbytes
        nbytes *= group.size() if name in _BY_PIECES else 1
        phase, unit = self._where
        among = self.groups.get(group.group_name, Group.ALL)
        self.calls.append(Collective(op, NAME_OF[whole.dtype].value, group.size(), nbytes, phase, unit, among))
        self.sent.append(whole)


# The operator's name -> what it is. Where one is given a list of tensors, each is an array of its own (_OF_MANY).
_OP: Mapping[str, CollectiveOp] = {
    "allreduce_": CollectiveOp.ALL_REDUCE,
    "allreduce_coalesced_": CollectiveOp.ALL_REDUCE,
    "_allgather_base_": CollectiveOp.ALL_GATHER,
    "allgather_": CollectiveOp.ALL_GATHER,
    "_reduce_scatter_base_": CollectiveOp.REDUCE_SCATTER,
    "reduce_scatter_": CollectiveOp.REDUCE_SCATTER,
    "broadcast_": CollectiveOp.BROADCAST,
    "allgather_into_tensor_coalesced_": CollectiveOp.ALL_GATHER,
    "reduce_scatter_tensor_coalesced_": CollectiveOp.REDUCE_SCATTER,
}
_OF_MANY = frozenset({"allreduce_coalesced_"})
# Given the whole array as a list of its pieces, one a rank, which must be alike.
_BY_PIECES = frozenset({"allgather_", "reduce_scatter_"})
_CARRIES_NOTHING = frozenset({"barrier", "monitored_barrier_"})


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, called: Callable[[str, Sequence[torch.Tensor], dist.ProcessGroup], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called = called

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
            if groups:
                name = func.name().removeprefix("c10d::")
                self._called(name, list(_tensors(args)), dist.ProcessGroup.unbox(groups[0]))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
