"""The allocator's own figures: live bytes now, and the largest live total inside a step.

On CPU torch keeps an exact running total behind an exported flag; it counts every block of the CPU allocator on every
thread, gloo's and OpenMP's included. The flag and the counter's place are no public interface, so `cpu_counter` proves
itself with known allocations when it is made and says so when it cannot. On CUDA the public figures are used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

# `ProfiledCPUMemoryReporter` begins with a mutex (40 bytes) and a hash map (56); the total follows. The search range
# allows for another standard library's layout.
_SEARCH_NBYTES = 256
_PROBE_NBYTES = (12345, 54321)


@lru_cache(maxsize=1)
def cpu_counter() -> Callable[[], int] | None:
    """A function giving torch's live CPU bytes, or None where this torch does not offer the counter.

    Call it before the first tensor that is to be counted: blocks born before are unknown to it.
    """
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
        reporter = library._ZN3c1025profiledCPUMemoryReporterEv
    except (OSError, ValueError, AttributeError):
        return None
    reporter.restype, reporter.argtypes = ctypes.c_void_p, []
    base = reporter()
    for offset in range(0, _SEARCH_NBYTES, 8):
        word = ctypes.c_size_t.from_address(base + offset)
        if _counts(word):
            return lambda: word.value
    return None


def _counts(word: ctypes.c_size_t) -> bool:
    """Whether the word follows two known allocations and their frees, to the byte."""
    small, large = _PROBE_NBYTES
    readings = [word.value]
    first = torch.empty(small, dtype=torch.uint8)
    readings.append(word.value)
    second = torch.empty(large, dtype=torch.uint8)
    readings.append(word.value)
    del first
    readings.append(word.value)
    del second
    readings.append(word.value)
    return [after - before for before, after in zip(readings, readings[1:], strict=False)] == [
        small,
        large,
        -small,
        -large,
    ]


def live_nbytes(device: torch.device) -> int | None:
    """Bytes the allocator of `device` has given out now; None where it cannot be read."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    counter = cpu_counter()
    return None if counter is None else counter()


class PeakWatch:
    """The largest live total while a `watch_peak` block ran: `nbytes`, None where it cannot be read, and `source`."""

    def __init__(self) -> None:
        self.nbytes: int | None = None
        self.source = "not read"


@contextmanager
def watch_peak(device: torch.device) -> Iterator[PeakWatch]:
    """Watch the allocator of `device` inside the block; the result is there after it."""
    watch = PeakWatch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield watch
        torch.cuda.synchronize(device)
        watch.nbytes = torch.cuda.max_memory_allocated(device)
        watch.source = "torch.cuda.max_memory_allocated"
        return
    # With the counter's flag set, each of the profiler's memory events carries the exact live total.
    activities = [torch.profiler.ProfilerActivity.CPU]
    counted = cpu_counter() is not None
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        yield watch
    if not counted:
        watch.source = "not read: this torch build has no CPU byte counter"
        return
    try:
        roots = profile.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    except AttributeError:
        watch.source = "not read: this torch build has no memory event tree"
        return
    watch.nbytes = max(_totals(roots), default=None)
    watch.source = "torch CPU allocator, profiler memory events"


def _totals(nodes: list[Any]) -> Iterator[int]:
    """`total_allocated` of every memory event in the tree."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node.name == "[memory]":
            yield node.extra_fields.total_allocated
        stack.extend(node.children)
