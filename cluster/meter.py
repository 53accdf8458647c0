"""The meter: what a rank holds by category at every op of one step.

Two ways to read it, one result. On CPU the allocator's own events are recorded (`record_events`): nothing is added to
the step. On CUDA, and where this torch build lacks those events, live storages are watched (`record_storages`); the
watching itself makes autograd add gradients out of place, and the recording says so.

[Note: what is counted] Every block that leaves the operator it was made in, once, whatever aliases it. A block that is
born and freed inside one operator is the kernel's scratch, the 8 bytes of a Python number it was given included; one
made inside a collective is the backend's working copy. Neither is in the categories; both are in the allocator's peak,
which is reported beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.allocator import cpu_counter
from cluster.record_events import EventRecorder
from cluster.record_storages import StorageRecorder
from zeroviz.trace import Category, Event

Held = Iterable[tuple[torch.Tensor, Category | None]]

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass
class Recording:
    """What a recorded step did; filled when the block ends.

    peak_nbytes: the allocator's largest live total inside the step, everything included; None where it cannot be
    read. source: where that figure comes from. method: how the events were read.
    """

    events: tuple[Event, ...] = ()
    peak_nbytes: int | None = None
    source: str = ""
    method: str = ""


class Recorder(Protocol):
    """One way to record a step."""

    method: str

    def recording(self, rest: Held) -> AbstractContextManager[None]: ...
    def op(self, phase: str, op: str, unit: str) -> AbstractContextManager[None]: ...
    def tag(self, tensor: torch.Tensor, category: Category) -> None: ...
    def allocated(self, tensor: torch.Tensor, category: Category) -> None: ...
    def released(self, tensor: torch.Tensor) -> None: ...
    def result(self) -> tuple[tuple[Event, ...], int | None, str]: ...


class Meter:
    """Records one step on demand; otherwise every call is a test of one attribute."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    @contextmanager
    def recording(self, rest: Held, device: torch.device) -> Iterator[Recording]:
        """Record inside the block. `rest` is all that is held already; category None is held but not counted."""
        use_events = device.type == "cpu" and cpu_counter() is not None
        recorder: Recorder = EventRecorder() if use_events else StorageRecorder(device)
        recording = Recording(method=recorder.method)
        self._recorder = recorder
        try:
            with recorder.recording(rest):
                yield recording
        finally:
            self._recorder = None
        recording.events, recording.peak_nbytes, recording.source = recorder.result()

    def op(self, phase: str, op: str, unit: str) -> AbstractContextManager[None]:
        """The block inside is this op of the schedule."""
        return _NOTHING if self._recorder is None else self._recorder.op(phase, op, unit)

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
