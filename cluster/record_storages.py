"""Record a step by watching storages: every one an operator returns, from its birth to its death.

Works on every device, through a TorchDispatchMode and weak references; aliases count once, under their storage's
identity. While the mode is active autograd adds gradients out of place, so at a sum inside a segment the watched step
holds one (tokens, hidden) tensor more than an unwatched one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cluster.recording import Held, Recording
from cluster.settle import Settling
from zeroviz.errors import RunError
from zeroviz.schedule import OpKind
from zeroviz.trace import Category, Event


class _Block:
    """One storage's life: its bytes and, once known, its category."""

    __slots__ = ("category", "nbytes", "reference")

    def __init__(self, nbytes: int, category: Category | None) -> None:
        self.nbytes, self.category = nbytes, category
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records one step; see the module's docstring. Keys are the storages' addresses, dropped when one dies."""

    method = "storages watched by a dispatch mode"

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._live: dict[int, _Block] = {}
        self._log: list[tuple[tuple[str, str, str], _Block, int]] = []
        self._where = ("", "", "")
        self._born: list[tuple[int, _Block]] = []
        self._rest_nbytes: int | None = None
        self._peak_nbytes: int | None = None
        self._on_host = False

    @contextmanager
    def recording(self, rest: Held, settling: Settling | None) -> Iterator[None]:
        for tensor, category in rest:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._live.setdefault(storage._cdata, _Block(storage.nbytes(), category))
        on_cuda = self._device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize(self._device)
            self._rest_nbytes = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        with self:
            yield
        if on_cuda:
            torch.cuda.synchronize(self._device)
            self._peak_nbytes = torch.cuda.max_memory_allocated(self._device)

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
        left = Category.ACTIVATION if op in (OpKind.FORWARD.value, OpKind.RECOMPUTE.value) else Category.TEMPORARY
        for key, block in self._born:
            if block.category is None:
                block.category = left if self._live.get(key) is block else Category.TEMPORARY

    def at(self, phase: str, op: str, unit: str) -> None:
        """Raises RunError: torch's FSDP frees a storage by resizing it, which passes no operator."""
        raise RunError(
            "This torch build lacks the allocator's events, and without them a step of torch's FSDP cannot be metered; "
            "use impl own, or `zeroviz rehearse`."
        )

    @contextmanager
    def on_host(self) -> Iterator[None]:
        outer, self._on_host = self._on_host, True  # these blocks nest
        yield
        self._on_host = outer

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        self._live[tensor.untyped_storage()._cdata].category = category

    def allocated(self, tensor: torch.Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        self._birth(storage._cdata, _Block(storage.nbytes(), category))

    def released(self, tensor: torch.Tensor) -> None:
        self._death(tensor.untyped_storage()._cdata)

    def fill(self, recording: Recording) -> None:
        recording.events = tuple(
            Event(*where, block.category or Category.TEMPORARY, sign * block.nbytes) for where, block, sign in self._log
        )
        recording.source = "torch.cuda.max_memory_allocated" if self._device.type == "cuda" else "not read"
        recording.rest_nbytes, recording.peak_nbytes = self._rest_nbytes, self._peak_nbytes

    def _see(self, tensor: torch.Tensor) -> None:
        """Take note of the tensor's storage, unless it is known.

        A storage unknown here may have been made below the dispatcher a moment ago (a tensor from a list). If it had
        been there since before the step, the books would not close, and `Trace.check` says so.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or not storage.nbytes():
            return
        block = _Block(storage.nbytes(), Category.HOST_TEMPORARY if self._on_host else None)

        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            self._death(key)

        block.reference = weakref.ref(storage, died)
        self._birth(key, block)

    def _birth(self, key: int, block: _Block) -> None:
        self._live[key] = block
        self._born.append((key, block))
        self._log.append((self._where, block, 1))

    def _death(self, key: int) -> None:
        block = self._live.pop(key, None)
        if block is not None:
            self._log.append((self._where, block, -1))
