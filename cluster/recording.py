"""What a recorder hands over: a step's events, and what the allocator itself said of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.settle import Settling
from zeroviz.device_lines import DeviceLines
from zeroviz.trace import AllocatorReading, Category, Event

Held = Iterable[tuple[torch.Tensor, Category | None]]


@dataclass
class Recording:
    """What a recorded step did; filled when the block ends.

    rest_nbytes: the allocator's live bytes as the step began. peak_nbytes: the largest live total inside it, everything
    included. Both None where they cannot be read. source: where they come from. method: how the events were read.
    The rest is as in `zeroviz.trace.AllocatorReading`. settling: for the collectives of the step; None to wait nowhere.
    device_lines: what a GPU holds beside the step; None where the allocator keeps no history.
    """

    method: str
    settling: Settling | None = None
    events: tuple[Event, ...] = ()
    rest_nbytes: int | None = None
    peak_nbytes: int | None = None
    source: str = ""
    num_events: int = 0
    num_hidden_frees: int = 0
    unattributed_nbytes: int = 0
    device_lines: DeviceLines | None = None

    def reading(self, before_nbytes: int) -> AllocatorReading | None:
        """The allocator's figures for the report; None where they could not be read.

        before_nbytes: what was live before anything of the run was made, which is no part of it.
        """
        if self.rest_nbytes is None or self.peak_nbytes is None:
            return None
        return AllocatorReading(
            rest_nbytes=self.rest_nbytes - before_nbytes,
            peak_nbytes=self.peak_nbytes - before_nbytes,
            source=self.source,
            num_events=self.num_events,
            num_hidden_frees=self.num_hidden_frees,
            unattributed_nbytes=self.unattributed_nbytes,
            num_late=self.settling.num_late if self.settling else 0,
            late_ns=self.settling.late_ns if self.settling else 0,
            num_given_up=self.settling.num_given_up if self.settling else 0,
        )


class Recorder(Protocol):
    """One way to record a step."""

    method: str

    def recording(self, rest: Held, settling: Settling | None) -> AbstractContextManager[None]: ...
    def op(self, phase: str, op: str, unit: str) -> AbstractContextManager[None]: ...
    def at(self, phase: str, op: str, unit: str) -> None: ...
    def on_host(self) -> AbstractContextManager[None]: ...
    def tag(self, tensor: torch.Tensor, category: Category) -> None: ...
    def allocated(self, tensor: torch.Tensor, category: Category) -> None: ...
    def released(self, tensor: torch.Tensor) -> None: ...
    def fill(self, recording: Recording) -> None: ...
