"""torch's caching allocator in Python, as its source describes it, for machines without a GPU. Not a recording of one.

`FakeCudaMemory` stands for the module `torch.cuda.memory`: every function of it that is called here has the name of
torch's own, and its arguments are bound to the signature of torch's own. What it imitates: blocks of 512 bytes,
segments of 2 and 20 MiB that are split and merged, two frees for a block that another stream has used, statistics, and
a ring of history entries.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cluster.cuda_allocator import CudaAllocator

MIB = 2**20
DEVICE_NBYTES = 80 * 10**9
CONTEXT_NBYTES = 450 * 10**6
_STATS = ("allocation", "allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")


@dataclass
class _Block:
    """A stretch of a segment; free blocks have state `inactive` and nothing requested."""

    address: int
    size: int
    requested: int = 0
    state: str = "inactive"
    used_elsewhere: bool = False


@dataclass
class _Segment:
    address: int
    size: int
    blocks: list[_Block] = field(default_factory=list)


class FakeCudaMemory:
    """One device, number 0. The methods without an underscore's worth of torch behind them are the test's own."""

    def __init__(self) -> None:
        self.segments: list[_Segment] = []
        self.stats: dict[str, Counter[str]] = {name: Counter() for name in _STATS}
        self.ring: list[dict[str, Any]] = []
        self.max_entries = 0
        self.thread = "main"
        self.labels: dict[str, str] = {}
        self.backend = "native"
        self.rounds_what_it_records = False
        self.has_metadata = True

    # What the test does to it.

    def alloc(self, nbytes: int) -> int:
        """The address of a block for a tensor of `nbytes`."""
        self.complete_frees()  # malloc asks first which other streams are done
        size = max(512, -(-nbytes // 512) * 512)
        block = min(
            (block for segment in self.segments for block in segment.blocks if self._fits(segment, block, size)),
            key=lambda block: (block.size, block.address),
            default=None,
        )
        if block is None:
            block = self._new_segment(size)
        self._split(block, size)
        block.requested, block.state = nbytes, "active_allocated"
        self._note("alloc", block.address, size if self.rounds_what_it_records else nbytes)
        self._count("allocation", 1)
        for name, amount in (("allocated_bytes", size), ("active_bytes", size), ("requested_bytes", nbytes)):
            self._count(name, amount)
        return block.address

    def use_elsewhere(self, address: int) -> None:
        """Another stream works on the block: `record_stream`."""
        self._block(address).used_elsewhere = True

    def free(self, address: int) -> None:
        """The tensor at `address` dies."""
        block = self._block(address)
        assert block.state == "active_allocated"
        self._count("allocation", -1)
        self._count("allocated_bytes", -block.size)
        self._note("free_requested", address, block.requested)
        block.state = "active_awaiting_free"
        if not block.used_elsewhere:
            self._complete(block)

    def complete_frees(self) -> None:
        """Other streams are done with everything."""
        for block in [block for segment in self.segments for block in segment.blocks]:
            if block.state == "active_awaiting_free":
                self._complete(block)

    @contextmanager
    def on_thread(self, name: str) -> Iterator[None]:
        """Allocations inside are another thread's, with a label of its own."""
        before, self.thread = self.thread, name
        yield
        self.thread = before

    # torch.cuda.memory's own.

    def _record_memory_history(self, *args: Any, **kwargs: Any) -> None:
        bound = _bind("_record_memory_history", args, kwargs)
        bound.apply_defaults()
        assert bound.arguments["context"] in (None, "all")
        enabled = bound.arguments["enabled"]
        self.max_entries = bound.arguments["max_entries"] if enabled == "all" else 0
        if enabled is None or bound.arguments["clear_history"]:
            self.ring = []

    def _snapshot(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        _bind("_snapshot", args, kwargs)
        traces = [[dict(entry) for entry in self.ring]]
        return {"segments": self._described(), "device_traces": traces, "allocator_settings": {}}

    def memory_snapshot(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        _bind("memory_snapshot", args, kwargs)
        self._note("snapshot", 0, self.stats["active_bytes"]["current"])
        return self._described()

    def memory_stats_as_nested_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        _bind("memory_stats_as_nested_dict", args, kwargs)
        metrics = ("current", "peak", "allocated", "freed")
        return {name: {"all": {metric: stat[metric] for metric in metrics}} for name, stat in self.stats.items()}

    def reset_peak_memory_stats(self, *args: Any, **kwargs: Any) -> None:
        _bind("reset_peak_memory_stats", args, kwargs)
        for stat in self.stats.values():
            stat["peak"] = stat["current"]

    def mem_get_info(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        _bind("mem_get_info", args, kwargs)
        used = CONTEXT_NBYTES + self.stats["reserved_bytes"]["current"]
        return DEVICE_NBYTES - used, DEVICE_NBYTES

    def get_allocator_backend(self) -> str:
        _bind("get_allocator_backend", (), {})
        return self.backend

    def _set_memory_metadata(self, *args: Any, **kwargs: Any) -> None:
        bound = _bind("_set_memory_metadata", args, kwargs)
        if not self.has_metadata:
            raise AttributeError("module 'torch._C' has no attribute '_cuda_setMemoryMetadata'")
        self.labels[self.thread] = bound.arguments["metadata"]

    # Inside.

    def _note(self, action: str, address: int, size: int) -> None:
        if self.max_entries:
            label = self.labels.get(self.thread, "")
            self.ring.append({"action": action, "addr": address, "size": size, "stream": 0, "user_metadata": label})
            del self.ring[: -self.max_entries]

    def _count(self, name: str, amount: int) -> None:
        stat = self.stats[name]
        stat["current"] += amount
        stat["peak"] = max(stat["peak"], stat["current"])
        stat["allocated" if amount > 0 else "freed"] += abs(amount)

    def _block(self, address: int) -> _Block:
        return next(block for segment in self.segments for block in segment.blocks if block.address == address)

    def _fits(self, segment: _Segment, block: _Block, size: int) -> bool:
        is_small = segment.size == 2 * MIB
        return block.state == "inactive" and block.size >= size and is_small == (size <= MIB)

    def _new_segment(self, size: int) -> _Block:
        nbytes = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        address = max((segment.address + segment.size for segment in self.segments), default=0x7F00_0000_0000) + MIB
        segment = _Segment(address, nbytes, [_Block(address, nbytes)])
        self.segments.append(segment)
        self._note("segment_alloc", address, nbytes)
        self._count("reserved_bytes", nbytes)
        return segment.blocks[0]

    def _split(self, block: _Block, size: int) -> None:
        segment = next(segment for segment in self.segments if block in segment.blocks)
        remaining = block.size - size
        if remaining >= 512 if segment.size == 2 * MIB else remaining > MIB:
            place = segment.blocks.index(block)
            segment.blocks.insert(place + 1, _Block(block.address + size, remaining))
            block.size = size

    def _complete(self, block: _Block) -> None:
        self._note("free_completed", block.address, block.requested)
        self._count("active_bytes", -block.size)
        self._count("requested_bytes", -block.requested)
        block.requested, block.state, block.used_elsewhere = 0, "inactive", False
        segment = next(segment for segment in self.segments if block in segment.blocks)
        merged: list[_Block] = []
        for each in segment.blocks:
            if merged and merged[-1].state == each.state == "inactive":
                merged[-1].size += each.size
            else:
                merged.append(each)
        segment.blocks = merged

    def _described(self) -> list[dict[str, Any]]:
        return [
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.size,
                "blocks": [
                    {
                        "address": block.address,
                        "size": block.size,
                        "requested_size": block.requested,
                        "state": block.state,
                    }
                    for block in segment.blocks
                ],
            }
            for segment in self.segments
        ]


def _bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Raises TypeError for a call that torch's own function would not take."""
    return inspect.signature(getattr(torch.cuda.memory, name)).bind(*args, **kwargs)


class FakeAllocator(CudaAllocator):
    """A CudaAllocator over a fake memory. workspaces: the addresses that cuBLAS holds."""

    def __init__(self, memory: FakeCudaMemory) -> None:
        super().__init__(torch.device("cuda", 0), memory)
        self.memory = memory
        self.workspaces: list[int] = []

    def synchronize(self) -> None:
        """The streams are done; the blocks they held come back at the next allocation."""

    def drop_workspaces(self) -> None:
        while self.workspaces:
            self.memory.free(self.workspaces.pop())

    def make(self, nbytes: int) -> object:
        return _Made(self.memory, nbytes)


class _Made:
    """A tensor's part in this: a block while it lives."""

    def __init__(self, memory: FakeCudaMemory, nbytes: int) -> None:
        self._memory, self._address = memory, memory.alloc(nbytes)

    def __del__(self) -> None:
        self._memory.free(self._address)
