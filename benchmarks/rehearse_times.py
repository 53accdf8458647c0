"""Seconds to rehearse a step, our own code's and FSDP2's, beside torch's FSDPMemTracker on the same FSDP2 model.

    python -m benchmarks.rehearse_times [--all]

Every figure comes from a process of its own, as on the command line, without the seconds that importing torch takes.
The tracker runs two steps of the same `cluster.witness.fsdp2.FSDP2` under torch's FakeTensorMode, sharded as torch
shards, with a list of N chunks for each parameter. For 70 billion parameters on 1,024 ranks it is run with --all only:
it takes minutes.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from zeroviz.spec import Implementation, Precision, RunSpec, preset

SEQ = 1024
ROWS = (("gpt2", 8), ("llama3-8b", 8), ("llama3-70b", 64), ("llama3-70b", 1024))


def rehearsed(spec: RunSpec) -> tuple[float, int]:
    """(seconds, peak with the step counters, which the tracker counts)."""
    from cluster.rehearse import rehearse

    start = time.perf_counter()
    rank = rehearse(spec).ranks[0]
    return time.perf_counter() - start, rank.peak().total + rank.step_counter_nbytes


def tracked(spec: RunSpec) -> tuple[float, int]:
    """The same of the tracker."""
    from tests.dist.tracker import tracker_totals

    start = time.perf_counter()
    peak, _ = tracker_totals(spec)
    return time.perf_counter() - start, peak


def alone(function: Callable[[RunSpec], tuple[float, int]], spec: RunSpec) -> tuple[float, int]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (spec,))


def main() -> None:
    print(f"zero3, units of a block, bf16, one sequence of {SEQ:,} tokens on each rank; seconds, and the peak in bytes")
    print(f"{'':22}{'own':>8}{'fsdp2':>8}{'tracker':>9}{'ratio':>7}  peak: fsdp2 rehearsed, by the tracker")
    for model, ranks in ROWS:
        spec = RunSpec(model=preset(model), ranks=ranks, seq=SEQ, precision=Precision.BF16, impl=Implementation.FSDP2)
        own_s, _ = alone(rehearsed, replace(spec, impl=Implementation.OWN))
        fsdp2_s, peak = alone(rehearsed, spec)
        line = f"{f'{model}, N={ranks:,}':<22}{own_s:>8.1f}{fsdp2_s:>8.1f}"
        if ranks > 64 and "--all" not in sys.argv:
            print(f"{line}{'not run':>9}{'':7}  {peak:,}", flush=True)
            continue
        tracker_s, theirs = alone(tracked, spec)
        same = "the same" if theirs == peak else f"{theirs:,} ({theirs - peak:+,})"
        print(f"{line}{tracker_s:>9.1f}{tracker_s / fsdp2_s:>7.1f}  {peak:,}, {same}", flush=True)


if __name__ == "__main__":
    main()
