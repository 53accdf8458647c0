"""The allocator's own figure of live bytes.

On CPU torch keeps an exact running total behind an exported flag; it counts every block of the CPU allocator on every
thread, gloo's and OpenMP's included. The flag and the counter's place are no public interface, so `cpu_counter` proves
itself with known allocations when it is made and says so when it cannot. With the flag set, the profiler's memory
events carry the exact total as well. On CUDA the public figures are used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise

import torch

from cluster.cuda_allocator import CudaAllocator, fault_on

# `ProfiledCPUMemoryReporter` begins with a mutex (40 bytes) and a hash map (56); the total follows. The search range
# allows for another standard library's layout.
_SEARCH_NBYTES = 256
_PROBE_NBYTES = (12345, 54321)


def cpu_counter() -> Callable[[], int] | None:
    """A function giving torch's live CPU bytes, or None where this torch does not offer the counter.

    Call it before the first tensor that is to be counted: blocks born before are unknown to it.
    """
    return _probe()[0]


def cpu_fault() -> str:
    """Why there is no counter; empty where there is one."""
    return _probe()[1]


@lru_cache(maxsize=1)
def _probe() -> tuple[Callable[[], int] | None, str]:
    """The counter, or None and what is wrong."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
        reporter = library._ZN3c1025profiledCPUMemoryReporterEv
    except (OSError, ValueError, AttributeError) as error:
        return None, f"torch {torch.__version__} lacks a symbol: {error}"
    reporter.restype, reporter.argtypes = ctypes.c_void_p, []
    base = reporter()
    for offset in range(0, _SEARCH_NBYTES, 8):
        word = ctypes.c_size_t.from_address(base + offset)
        if _counts(word):
            return partial(getattr, word, "value"), ""
    return None, f"no counter of torch {torch.__version__} follows known allocations to the byte"


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
    return [after - before for before, after in pairwise(readings)] == [
        small,
        large,
        -small,
        -large,
    ]


def live_nbytes(device: torch.device) -> int | None:
    """Bytes the allocator of `device` has given out now; None where it cannot be read."""
    if device.type == "cuda":
        # The figure that the recorder on this device reports: what was asked for, or what rounding made of it.
        if fault_on(device.index):
            return torch.cuda.memory_allocated(device)
        return CudaAllocator(device).totals().requested_nbytes
    counter = cpu_counter()
    return None if counter is None else counter()
