"""What is asked of torch's caching allocator on one GPU, and whether it answers as its documentation says.

Recording its history is no public interface (`torch.cuda.memory._record_memory_history`, `_snapshot`), so
`history_fault` tries it with known blocks before it is relied upon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from cluster.cuda_log import Block, Counts, Totals

# Neither is a multiple of 512: an entry that carried the rounded size would be found out.
_PROBE_NBYTES = (12345, 54321)
_PROBE_ENTRIES = 1000


class CudaAllocator:
    """The caching allocator of one device. `memory` is `torch.cuda.memory`; tests bring another."""

    def __init__(self, device: torch.device, memory: ModuleType | Any = torch.cuda.memory) -> None:
        if device.index is None:
            raise ValueError(f"The device is {device}; name one of them, such as cuda:0.")
        self.device, self.index, self._memory = device, device.index, memory

    def start(self, max_entries: int) -> None:
        """Begin a history of at most `max_entries` entries, the newest; stacks are left out. Empties the one there."""
        self._memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=max_entries, clear_history=True
        )

    def stop(self) -> None:
        """End the history and forget it."""
        self._memory._record_memory_history(None)

    def label(self, text: str) -> None:
        """Write `text` on every entry that this thread makes from now on. torch 2.10 and newer."""
        with suppress(AttributeError):
            self._memory._set_memory_metadata(text)

    def totals(self) -> Totals:
        """The allocator's figures now."""
        return Totals.of(self._memory.memory_stats_as_nested_dict(self.device))

    def counts(self) -> Counts:
        """The place in the history that is now. The GPU is not waited for."""
        allocation = self._memory.memory_stats_as_nested_dict(self.device)["allocation"]["all"]
        return Counts(allocation["allocated"], allocation["freed"])

    def allocated_nbytes(self) -> int:
        """Live bytes, rounding included, which is enough to see them come down."""
        nbytes: int = self._memory.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["current"]
        return nbytes

    def reset_peaks(self) -> None:
        self._memory.reset_peak_memory_stats(self.device)

    def entries(self) -> Sequence[Mapping[str, Any]]:
        """The history, oldest first."""
        traces: Sequence[Sequence[Mapping[str, Any]]] = self._memory._snapshot()["device_traces"]
        return traces[self.index] if self.index < len(traces) else ()

    def blocks(self) -> list[Block]:
        """Every block that belongs to a tensor or a library, or awaits another stream."""
        found = []
        for segment in self._memory.memory_snapshot():
            if segment["device"] == self.index:
                for block in segment["blocks"]:
                    # The third state is called active_awaiting_free or active_pending_free.
                    if block["state"] != "inactive":
                        in_use = block["state"] == "active_allocated"
                        found.append(Block(block["address"], block["requested_size"], in_use))
        return found

    def device_used_nbytes(self) -> int:
        """What is in use on the whole device, by whomever."""
        free, total = self._memory.mem_get_info(self.device)
        return int(total - free)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.device)

    def drop_workspaces(self) -> None:
        """Have cuBLAS give its workspaces back; it takes new ones at its next matrix product."""
        torch._C._cuda_clearCublasWorkspaces()

    def make(self, nbytes: int) -> object:
        """A block of `nbytes` that lives as long as the object."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def backend_name(self) -> str:
        """`native` for the caching allocator."""
        return str(self._memory.get_allocator_backend())


def history_fault(allocator: CudaAllocator) -> str:
    """Why this allocator's history cannot be relied upon, or an empty text.

    Two known blocks are made and dropped while it records. It must have exactly their four entries in order, with the
    sizes asked for, and its counts and its total of requested bytes must have followed. cuBLAS's workspaces are dropped
    on the way, to see that they can be.
    """
    if (name := allocator.backend_name()) != "native":
        return f"the allocator {name} records none"
    try:
        allocator.drop_workspaces()
        allocator.start(_PROBE_ENTRIES)
        try:
            readings, addresses = _make_and_drop(allocator)
            entries = [entry for entry in allocator.entries() if entry["action"] in ("alloc", "free_requested")]
        finally:
            allocator.stop()
        small, large = _PROBE_NBYTES
        got = [(entry["action"], entry["size"]) for entry in entries]
        if got != [("alloc", small), ("alloc", large), ("free_requested", small), ("free_requested", large)]:
            return f"two known blocks left other entries than theirs ({got[:6]})"
        if [entry["addr"] for entry in entries] != addresses * 2:
            return "the entries of two known blocks have other addresses than the blocks"
        steps = [sum(after.counts) - sum(before.counts) for before, after in pairwise(readings)]
        grown = [after.requested_nbytes - before.requested_nbytes for before, after in pairwise(readings)]
        if steps != [1, 1, 1, 1] or grown != [small, large, -small, -large]:
            return f"its counts and totals do not follow two known blocks ({steps}, {grown})"
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        return f"this torch does not record it as expected ({type(error).__name__}: {error})"
    return ""


def _make_and_drop(allocator: CudaAllocator) -> tuple[list[Totals], list[int]]:
    readings, addresses = [allocator.totals()], list[int]()
    known = [block.address for block in allocator.blocks()]
    kept: list[object] = []
    for nbytes in _PROBE_NBYTES:
        kept.append(allocator.make(nbytes))
        readings.append(allocator.totals())
        addresses += [block.address for block in allocator.blocks() if block.address not in known + addresses]
    while kept:
        kept.pop(0)
        readings.append(allocator.totals())
    return readings, addresses


@lru_cache
def fault_on(index: int) -> str:
    """`history_fault` of a GPU, asked once a process."""
    torch.cuda.init()  # type: ignore[no-untyped-call]  # before that there are no statistics
    return history_fault(CudaAllocator(torch.device("cuda", index)))
