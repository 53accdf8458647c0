"""The meter: what a rank holds by category at every op of one step.

Three ways to read it, one result. On CPU the allocator's own events are recorded (`record_events`), on CUDA the caching
allocator's history (`record_cuda`): nothing is added to the step. Where this torch build lacks those, live storages are
watched (`record_storages`); the watching itself makes autograd add gradients out of place, and the recording says so.

[Note: what is counted] Every block, once, whatever aliases it. A block that is born and freed inside one operator is
the kernel's scratch, the 8 bytes of a Python number it was given included; one made inside a collective is the
backend's working copy. Both have categories of their own: they are part of what this machine's allocator gave out
(`RankTrace.machine_peak`) and no part of what the step holds on any (`RankTrace.peak`). Watched storages do not show
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from cluster.allocator import cpu_counter, cpu_fault
from cluster.cuda_allocator import CudaAllocator, fault_on
from cluster.record_cuda import CudaRecorder
from cluster.record_events import EventRecorder
from cluster.record_storages import StorageRecorder
from cluster.recording import Held, Recorder, Recording
from cluster.settle import Settling
from zeroviz.trace import Category

_NOTHING: AbstractContextManager[None] = nullcontext()


class Meter:
    """Records one step on demand; otherwise every call is a test of one attribute."""

    def __init__(self, given: Recorder | None = None) -> None:
        """given: how to record, where the device does not decide it."""
        self._given = given
        self._recorder: Recorder | None = None

    @contextmanager
    def recording(self, rest: Held, device: torch.device) -> Iterator[Recording]:
        """Record inside the block. `rest` is all that is held already; category None is held but not counted."""
        recorder, settling = recorder_for(device) if self._given is None else (self._given, None)
        recording = Recording(recorder.method, settling)
        self._recorder = recorder
        try:
            with recorder.recording(rest, recording.settling):
                yield recording
        finally:
            self._recorder = None
        recorder.fill(recording)

    def op(self, phase: str, op: str, unit: str) -> AbstractContextManager[None]:
        """The block inside is this op of the schedule."""
        return _NOTHING if self._recorder is None else self._recorder.op(phase, op, unit)

    def at(self, phase: str, op: str, unit: str) -> None:
        """From here to the next call is this op: for code whose hooks are called, and cannot stand around a block."""
        if self._recorder is not None:
            self._recorder.at(phase, op, unit)

    def on_host(self) -> AbstractContextManager[None]:
        """What the block inside makes and drops is the host's: for work on offloaded states."""
        return _NOTHING if self._recorder is None else self._recorder.on_host()

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what a tensor born in this step is for; untagged ones are ruled by where they live."""
        if self._recorder is not None:
            self._recorder.tag(tensor, category)

    def allocated(self, tensor: torch.Tensor, category: Category) -> None:
        """A flat buffer got its memory."""
        if self._recorder is not None:
            self._recorder.allocated(tensor, category)

    def released(self, tensor: torch.Tensor) -> None:
        """A flat buffer is about to give its memory back."""
        if self._recorder is not None:
            self._recorder.released(tensor)


def recorder_for(device: torch.device) -> tuple[Recorder, Settling | None]:
    """How a step on `device` is read, and what its collectives wait for; see the module's docstring."""
    if device.type == "cuda":
        if not (fault := fault_on(device.index)):
            recorder = CudaRecorder(CudaAllocator(device))
            return recorder, recorder.settling()
        watcher = StorageRecorder(device)
        watcher.method = f"{StorageRecorder.method}; not the allocator's history: {fault}"
        return watcher, None
    counter = cpu_counter()
    if counter is not None:
        return EventRecorder(), Settling(counter)
    watcher = StorageRecorder(device)
    watcher.method = f"{StorageRecorder.method}; not the allocator's events: {cpu_fault()}"
    return watcher, None


def dependence(device: torch.device) -> str:
    """Which figures of a run on `device` nobody but our own code has read, and why; empty where the allocator says them
    all."""
    if device.type == "cuda":
        if not (fault := fault_on(device.index)):
            return ""
        return (
            f"The history of this GPU's allocator cannot be read ({fault}). The peak and its categories are those of "
            "the storages our own code watched; only the allocator's totals, beside them, are independent."
        )
    if not (fault := cpu_fault()):
        return ""
    return (
        f"torch's CPU allocator cannot be read ({fault}). What is held at rest, the peak and its categories are those "
        "of the storages our own code watched, and no independent figure confirms them; what this machine's allocator "
        "gave out is not known."
    )


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
