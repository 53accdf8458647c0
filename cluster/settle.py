"""Settling: in a metered step, wait until the backend's threads have let go of what they copied.

gloo's worker thread drops its last reference to a copy up to a millisecond after the wait for its result is over. The
copy would then stand beside whatever the next op allocates, in some steps and not in others. A metered step waits that
out, says how often and how long, and never longer than a bound. An unmetered step does not wait.

[Note: a late end] gloo marks a collective's future as done before it tells the profiler that the collective has ended.
Who waits for the work itself, as our own code does, is told after that; DistributedDataParallel waits for the future. A
profiler that has stopped in between has freed the event whose end is then written: a time in the middle of something
else, and sooner or later a process that crashes. So a metered step ends when gloo's workers are at rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from cluster.allocator import live_nbytes

# A busy machine may keep that thread from its processor for long; what it still holds then would be named unexplained.
BOUND_NS = 2_000_000_000
# On a GPU more stays live than the step names, cuBLAS's workspaces for one, and would be waited for in vain.
_GPU_BOUND_NS = 100_000_000
# Short against the fraction of a millisecond that the backend's thread takes, and it lets that thread run.
_PAUSE_S = 0.00002
_LET_IN_S = 0.0005


_TASKS = Path("/proc/self/task")
_WORKER = "(pt_gloo_runloop)"


def workers_rest() -> bool:
    """Whether none of gloo's workers runs, or could: each sleeps. See [Note: a late end]. Linux alone says so."""
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            stat = (task / "stat").read_text()
        except OSError:  # it has just ended
            continue
        _, name, state = stat.partition(_WORKER)
        if name and state.split()[0] == "R":
            return False
    return True


class Settling:
    """Waits for the live bytes that `counter` reads to come down, each time for `bound_ns` at most.

    num_late, late_ns: how often it had to wait, and how long in all. num_given_up: how often it hit the bound.
    """

    def __init__(self, counter: Callable[[], int], bound_ns: int = BOUND_NS) -> None:
        self.counter, self.bound_ns = counter, bound_ns
        self.num_late = 0
        self.late_ns = 0
        self.num_given_up = 0

    def down_to(self, nbytes: int) -> int | None:
        """Wait until no more than `nbytes` are live. The reading that said so, or None after the bound."""
        live = nbytes

        def is_down() -> bool:
            nonlocal live
            live = self.counter()
            return live <= nbytes

        return live if self.until(is_down) else None

    def let_in(self) -> None:
        """Give Python's lock away for a moment: a thread that waits for it gets it."""
        time.sleep(_LET_IN_S)

    def until(self, is_done: Callable[[], bool]) -> bool:
        """Wait until `is_done()`; False after the bound."""
        if is_done():
            return True
        start = time.perf_counter_ns()
        done = False
        while not done and time.perf_counter_ns() - start < self.bound_ns:
            time.sleep(_PAUSE_S)
            done = is_done()
        self.num_late += 1
        self.late_ns += time.perf_counter_ns() - start
        self.num_given_up += not done
        return done


def settle(device: torch.device, nbytes: int) -> int:
    """Between steps: wait until the backend's threads have let go of the last collective's copies and no more than
    `nbytes` are live on `device`. Live bytes then; what is still there after the bound is the caller's to report."""
    bound_ns = BOUND_NS if device.type == "cpu" else _GPU_BOUND_NS
    Settling(lambda: live_nbytes(device) or 0, bound_ns).down_to(nbytes)
    return live_nbytes(device) or 0
