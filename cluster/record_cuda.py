"""Record a step on a GPU from the caching allocator's own history: nothing is added to the step.

Written down while the step runs: the allocator's counts wherever an op begins or ends and a tensor is tagged. Read
afterwards: the history, see `cuda_history.py`. `log` is what was written down; it goes to JSON and can be read again.

The recording ends with cuBLAS giving back its workspaces, so that they have a name: they are blocks of this allocator
that no category counts, one for each thread and stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from cluster.collectives import backend_hooks
from cluster.cuda_allocator import CudaAllocator
from cluster.cuda_history import label_of, read_history
from cluster.cuda_log import Counts, CudaLog, Holding, OpMark, SpanMark, TagMark
from cluster.recording import Held, Recording
from cluster.settle import Settling
from zeroviz.errors import RunError
from zeroviz.trace import Category

# Memory for entries is taken as they come, some 150 bytes each; a step of a 70B model makes tens of thousands.
MAX_ENTRIES = 1_000_000


class CudaRecorder:
    """Records one step; see the module's docstring."""

    method = "the caching allocator's history"

    def __init__(self, allocator: CudaAllocator, max_entries: int = MAX_ENTRIES) -> None:
        self._allocator, self._max_entries = allocator, max_entries
        self.log: CudaLog | None = None
        self._ops: list[OpMark] = []
        self._tags: list[TagMark] = []
        self._backend: list[SpanMark] = []
        self._num_on_host = 0
        self._labels = threading.local()

    def settling(self) -> Settling:
        """For collectives over a backend that copies, gloo's."""
        return Settling(self._allocator.allocated_nbytes)

    @contextmanager
    def recording(self, rest: Held, settling: Settling | None) -> Iterator[None]:
        allocator = self._allocator
        allocator.synchronize()
        allocator.make(1)  # an allocation takes back what other streams are done with; this one is dropped at once
        allocator.start(self._max_entries)
        try:
            # Only addresses are kept: the step must find its tensors held by nobody else.
            held = [
                Holding(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes(), category)
                for tensor, category in rest
                if self._is_ours(tensor)
            ]
            blocks, device_used = allocator.blocks(), allocator.device_used_nbytes()
            allocator.reset_peaks()
            start = allocator.totals()
            backend_hooks.append(self._in_backend)
            try:
                yield
            finally:
                backend_hooks.remove(self._in_backend)
            allocator.synchronize()
            if settling is not None and self._backend:
                settling.down_to(start.allocated_nbytes)
            end = allocator.totals()
            allocator.drop_workspaces()
            self.log = CudaLog(
                start=start,
                end=end,
                final=allocator.counts(),
                device_used_nbytes=device_used,
                max_entries=self._max_entries,
                blocks=blocks,
                held=held,
                ops=self._ops,
                tags=self._tags,
                backend=self._backend,
                num_on_host=self._num_on_host,
                entries=allocator.entries(),
            )
        finally:
            allocator.stop()

    @contextmanager
    def op(self, phase: str, op: str, unit: str) -> Iterator[None]:
        """Ops may nest; what is made in the inner one is the inner one's."""
        begin = self._allocator.counts()
        mark = OpMark((phase, op, unit), begin, begin)
        number, outer = len(self._ops), getattr(self._labels, "current", "")
        self._ops.append(mark)
        self._write_label(label_of(number, mark.where))
        try:
            yield
        finally:
            self._ops[number] = mark._replace(end=self._allocator.counts())
            self._write_label(outer)

    def at(self, phase: str, op: str, unit: str) -> None:
        """Raises RunError: on a GPU such steps have not been metered."""
        raise RunError(
            "torch's FSDP is metered on CPUs only; use impl own, `zeroviz rehearse`, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES=-1."
        )

    def on_host(self) -> AbstractContextManager[None]:
        """The host's memory has another allocator; that the step turned to it is noted."""
        self._num_on_host += 1
        return nullcontext()

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        if self._is_ours(tensor):
            self._tags.append(TagMark(self._allocator.counts(), tensor.untyped_storage().data_ptr(), category))
        elif tensor.device.type == "cpu":
            self._num_on_host += 1

    def allocated(self, tensor: torch.Tensor, category: Category) -> None:
        self.tag(tensor, category)

    def released(self, tensor: torch.Tensor) -> None:
        """The allocator's history says it."""

    def fill(self, recording: Recording) -> None:
        if self.log is None:
            raise RuntimeError("Nothing has been recorded; enter `recording` first.")
        history = read_history(self.log)
        recording.events = history.events
        recording.rest_nbytes = self.log.start.requested_nbytes
        recording.peak_nbytes = self.log.end.requested_peak_nbytes
        recording.source = "torch.cuda.memory_stats, requested_bytes"
        recording.num_events = history.num_events
        recording.unattributed_nbytes = history.unattributed_nbytes
        recording.device_lines = history.lines

    def _write_label(self, text: str) -> None:
        """For what this thread makes from now on; metadata is a thread's, and so is what it was before."""
        self._labels.current = text
        self._allocator.label(text)

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has a block of this allocator."""
        return tensor.device == self._allocator.device and tensor.untyped_storage().nbytes() > 0

    @contextmanager
    def _in_backend(self) -> Iterator[None]:
        begin: Counts = self._allocator.counts()
        yield
        self._backend.append(SpanMark(begin, self._allocator.counts()))
