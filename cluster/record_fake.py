"""Record a rehearsed step: every storage of fake tensors, from its birth to its death, whatever aliases it.

Births are seen where an operator returns (`FakeTensors.on_result`) and where a storage is resized, deaths by weak
references and resizes. A kernel's scratch and a backend's copies are not there, since no kernel and no backend runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cluster.fake import FakeTensors
from cluster.recording import Held, Recording
from cluster.settle import Settling
from zeroviz.schedule import OpKind
from zeroviz.trace import Category, Event

# What these ops leave behind is there for backward.
_SAVING_OPS = frozenset({OpKind.FORWARD.value, OpKind.RECOMPUTE.value})


class _Block:
    """One storage's life: its bytes and, once known, its category."""

    __slots__ = ("category", "nbytes")

    def __init__(self, nbytes: int, category: Category | None) -> None:
        self.nbytes, self.category = nbytes, category


class FakeRecorder:
    """Records one step; see the module's docstring. Keys are the storages' addresses, dropped when one dies."""

    method = "fake tensors"

    def __init__(self, tensors: FakeTensors) -> None:
        self._tensors = tensors
        self._live: dict[int, _Block] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._log: list[tuple[tuple[str, str, str], _Block, int]] = []
        self._where = ("", "", "")
        self._born: list[tuple[int, _Block]] = []
        self._on_host = False

    @contextmanager
    def recording(self, rest: Held, settling: Settling | None) -> Iterator[None]:
        """No thread of a backend is at work, so `settling` has nothing to wait for."""
        self._remember(rest)
        self._tensors.on_result = self._see
        try:
            with self._seeing_resizes():
                yield
        finally:
            self._tensors.on_result = None
        self._close_op()

    def _remember(self, rest: Held) -> None:
        """Note the storages of what is held. No tensor stays in a variable here while the step runs."""
        for tensor, category in rest:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in self._live:
                self._live[storage._cdata] = _Block(storage.nbytes(), category)
                self._watch(storage)

    @contextmanager
    def op(self, phase: str, op: str, unit: str) -> Iterator[None]:
        self.at(phase, op, unit)
        yield
        self._close_op()

    def at(self, phase: str, op: str, unit: str) -> None:
        self._close_op()
        self._where = (phase, op, unit)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        outer, self._on_host = self._on_host, True  # these blocks nest
        yield
        self._on_host = outer

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        self._live[tensor.untyped_storage()._cdata].category = category

    def allocated(self, tensor: torch.Tensor, category: Category) -> None:
        """Its resize has been seen."""
        self.tag(tensor, category)

    def released(self, tensor: torch.Tensor) -> None:
        """Its resize is seen."""

    def fill(self, recording: Recording) -> None:
        recording.events = tuple(
            Event(*where, block.category or Category.TEMPORARY, sign * block.nbytes) for where, block, sign in self._log
        )

    def _close_op(self) -> None:
        """What an op that saves for backward leaves behind is there for backward; the rest on its way is temporary."""
        saves = self._where[1] in _SAVING_OPS
        for key, block in self._born:
            if block.category is None:
                stays = saves and self._live.get(key) is block
                block.category = Category.ACTIVATION if stays else Category.TEMPORARY
        self._born = []

    def _see(self, tensor: torch.Tensor) -> None:
        """Take note of the tensor's storage, unless it is known."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live and storage.nbytes():
            self._birth(storage)

    def _birth(self, storage: torch.UntypedStorage) -> None:
        block = _Block(storage.nbytes(), Category.HOST_TEMPORARY if self._on_host else None)
        self._live[storage._cdata] = block
        self._born.append((storage._cdata, block))
        self._log.append((self._where, block, 1))
        self._watch(storage)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata

        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            self._references.pop(key, None)
            self._death(key)

        self._references[key] = weakref.ref(storage, died)

    def _death(self, key: int) -> None:
        block = self._live.pop(key, None)
        if block is not None:
            self._log.append((self._where, block, -1))

    @contextmanager
    def _seeing_resizes(self) -> Iterator[None]:
        """torch has no hook for a resized storage, so its method is replaced for the block."""
        resize = torch.UntypedStorage.resize_

        def resize_and_see(storage: torch.UntypedStorage, nbytes: int) -> Any:
            before = storage.nbytes()
            result = resize(storage, nbytes)
            if storage.nbytes() != before:
                self._death(storage._cdata)
                if storage.nbytes():
                    self._birth(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_see  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
