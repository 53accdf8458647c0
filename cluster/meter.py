"""The meter: what a rank holds by category at every op of a step, read from live tensor storages.

[Note: what the meter sees] Every storage an operator returns is seen at its birth (TorchDispatchMode) and at its death
(a weak reference), under its identity, so aliases count once. Flat buffers report their own resizing. Not seen are
blocks that never leave an operator: kernels' scratch and the backend's working copies. The allocator's figure
(`cluster.allocator`) has them, and is reported beside.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroviz.schedule import OpKind
from zeroviz.trace import Category, Event

_NOTHING: AbstractContextManager[None] = nullcontext()


class Meter:
    """Records one step on demand; otherwise every call is a test of one attribute."""

    def __init__(self) -> None:
        self._tracker: _Tracker | None = None

    @contextmanager
    def recording(self, rest: Iterable[tuple[torch.Tensor, Category | None]]) -> Iterator[Recording]:
        """Record inside the block. `rest` is all that is held already; category None is held but not counted."""
        recording = Recording()
        self._tracker = _Tracker(rest)
        try:
            with self._tracker:
                yield recording
        finally:
            tracker, self._tracker = self._tracker, None
        recording.events = tracker.events()

    def op(self, phase: str, op: str, unit: str) -> AbstractContextManager[None]:
        """The block inside is this op of the schedule."""
        return _NOTHING if self._tracker is None else self._tracker.op(phase, op, unit)

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what a tensor born in this step is for; untagged ones are ruled by where they live."""
        if self._tracker is not None:
            self._tracker.tag(tensor, category)

    def allocated(self, tensor: torch.Tensor, category: Category) -> None:
        """A flat buffer got its memory."""
        if self._tracker is not None:
            self._tracker.allocated(tensor, category)

    def released(self, tensor: torch.Tensor) -> None:
        """A flat buffer is about to give its memory back."""
        if self._tracker is not None:
            self._tracker.released(tensor)


@dataclass
class Recording:
    """What a recorded step did; filled when the block ends."""

    events: tuple[Event, ...] = ()


def held_by_category(held: Iterable[tuple[torch.Tensor, Category]]) -> dict[Category, int]:
    """Bytes by category of the storages behind `held`; a storage counts once, under the first category given."""
    seen: set[int] = set()
    total: dict[Category, int] = {}
    for tensor, category in held:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes():
            seen.add(storage._cdata)
            total[category] = total.get(category, 0) + storage.nbytes()
    return total


class _Block:
    """One storage's life: its bytes and, once known, its category."""

    __slots__ = ("category", "nbytes", "reference")

    def __init__(self, nbytes: int, category: Category | None) -> None:
        self.nbytes, self.category = nbytes, category
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class _Tracker(TorchDispatchMode):
    """Watches storages while it is active. Keys are the storages' addresses, dropped when the storage dies."""

    def __init__(self, rest: Iterable[tuple[torch.Tensor, Category | None]]) -> None:
        super().__init__()
        self._live: dict[int, _Block] = {}
        self._log: list[tuple[tuple[str, str, str], _Block, int]] = []
        self._where = ("", "", "")
        self._born: list[tuple[int, _Block]] = []
        for tensor, category in rest:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._live.setdefault(storage._cdata, _Block(storage.nbytes(), category))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    @contextmanager
    def op(self, phase: str, op: str, unit: str) -> Iterator[None]:
        self._where, self._born = (phase, op, unit), []
        yield
        # What forward leaves behind is there for backward; anything else on its way is temporary.
        left = Category.ACTIVATION if op == OpKind.FORWARD.value else Category.TEMPORARY
        for key, block in self._born:
            if block.category is None:
                block.category = left if self._live.get(key) is block else Category.TEMPORARY

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        self._live[tensor.untyped_storage()._cdata].category = category

    def allocated(self, tensor: torch.Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        self._birth(storage._cdata, _Block(storage.nbytes(), category))

    def released(self, tensor: torch.Tensor) -> None:
        self._death(tensor.untyped_storage()._cdata)

    def events(self) -> tuple[Event, ...]:
        """The step as events, each with its block's final category."""
        return tuple(
            Event(*where, block.category or Category.TEMPORARY, sign * block.nbytes)
            for where, block, sign in self._log
        )

    def _see(self, tensor: torch.Tensor) -> None:
        """Take note of the tensor's storage, unless it is known.

        A storage unknown here may have been made below the dispatcher a moment ago (a tensor from an array). If it
        had been there since before the step, the books would not close, and `Trace.check` says so.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or not storage.nbytes():
            return
        block = _Block(storage.nbytes(), None)
        block.reference = weakref.ref(storage, lambda _, key=key: self._death(key))
        self._birth(key, block)

    def _birth(self, key: int, block: _Block) -> None:
        self._live[key] = block
        self._born.append((key, block))
        self._log.append((self._where, block, 1))

    def _death(self, key: int) -> None:
        block = self._live.pop(key, None)
        if block is not None:
            self._log.append((self._where, block, -1))
