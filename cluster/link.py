"""The link between a rank's device and its host: every copy that offloading makes passes here and is recorded.

On a machine without GPUs both ends are the same memory. The copies are made all the same, so that what a step holds on
either side is what it would hold with a GPU.
"""

from __future__ import annotations

import torch

from cluster.dtypes import NAME_OF
from cluster.meter import Meter
from zeroviz.link import Direction, Transfer

HOST = torch.device("cpu")


class Link:
    """Copies of flat tensors, shape (numel,), down to the host and up to the device. `transfers`: since the last
    `start_record`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.transfers: list[Transfer] = []
        self._where = ("", "")

    def start_record(self) -> None:
        """Forget the copies recorded so far."""
        self.transfers = []

    def at(self, phase: str, unit: str) -> None:
        """Say where in the step the next copies are made."""
        self._where = (phase, unit)

    def down(self, source: torch.Tensor, unit: str) -> torch.Tensor:
        """A new tensor on the host with the elements of `source`."""
        with self._meter.on_host():
            copy = source.to(HOST, copy=True)
        self._record(Direction.TO_HOST, source, unit)
        return copy

    def down_into(self, target: torch.Tensor, source: torch.Tensor, unit: str) -> None:
        """Copy the device's `source` into the host's `target`."""
        target.copy_(source)
        self._record(Direction.TO_HOST, source, unit)

    def up_into(self, target: torch.Tensor, source: torch.Tensor, unit: str) -> None:
        """Copy the host's `source` into the device's `target`, of the same dtype."""
        target.copy_(source)
        self._record(Direction.TO_DEVICE, source, unit)

    def _record(self, direction: Direction, tensor: torch.Tensor, unit: str) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        self.transfers.append(Transfer(direction, NAME_OF[tensor.dtype].value, nbytes, self._where[0], unit))
