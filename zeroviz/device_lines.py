"""What a GPU's memory holds beside the step: the lines between what tensors asked for and what the device has in use.

None of them is ever part of a sum over categories. They are a ladder, each rung a fact of the allocator or the driver:

    requested + rounding + awaiting + cached = reserved        reserved + outside = in use on the device
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceLines:
    """One rank's device at rest, just before the metered step, and two figures of the step itself. All in bytes.

    requested_nbytes: asked for by blocks that belong to a tensor or a library.
    rounding_nbytes: what the allocator adds to these blocks, which are multiples of 512 bytes (allocated - requested).
    awaiting_nbytes: blocks already given back that another stream still works on (active - allocated).
    cached_nbytes: segments and parts of them that the allocator keeps for the next block (reserved - active).
    outside_nbytes: in use on the device but not by this allocator (used - reserved): the CUDA context, NCCL, and every
        other process on the same device.
    workspace_nbytes: of requested, the workspaces cuBLAS keeps for each thread and stream, in no category.
    unnamed_nbytes: of requested, what no category, step counter or workspace accounts for.
    peak_reserved_nbytes: the largest `reserved` during the step: what the device must have free.
    peak_awaiting_nbytes: the most that awaited another stream during the step, in requested bytes.
    faults: what the recording's own checks found, each a sentence; empty if every figure is as good as it claims.
    """

    requested_nbytes: int
    rounding_nbytes: int
    awaiting_nbytes: int
    cached_nbytes: int
    outside_nbytes: int
    workspace_nbytes: int
    unnamed_nbytes: int
    peak_reserved_nbytes: int
    peak_awaiting_nbytes: int
    faults: tuple[str, ...] = ()

    @property
    def reserved_nbytes(self) -> int:
        """What the allocator holds of the device, in use or not."""
        return self.requested_nbytes + self.rounding_nbytes + self.awaiting_nbytes + self.cached_nbytes

    @property
    def device_used_nbytes(self) -> int:
        """What the driver says is in use on the whole device."""
        return self.reserved_nbytes + self.outside_nbytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a trace and a report."""
        return {**asdict(self), "faults": list(self.faults)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceLines:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError for other data."""
        numbers = {name: int(value) for name, value in data.items() if name != "faults"}
        return cls(**numbers, faults=tuple(str(fault) for fault in data["faults"]))
