"""What metering a step costs: metered over unmetered, interleaved in one process, on a model of 3.7 million parameters.

    python benchmarks/meter_times.py [ROUNDS]

A round is one step of each kind, one after the other; the table gives the median of the rounds' ratios, so that what
else runs on the machine weighs on both. "In the step" is the step's own time, from its first op to its last; the aim is
1.15 at most. "All in" has also what comes before and after: starting and stopping torch's profiler and working its
events out. That costs some microseconds an event (the last column), whatever the model's size: the bf16 recipes have
five times the events, nearly all of them packed operands of the flash kernel.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import torch

from cluster.meter import Meter
from cluster.own.step import Executor
from cluster.rank import RankJob, joined_group, set_imports_aside
from zeroviz.models import PRESETS
from zeroviz.spec import Precision, RunSpec, Strategy

MODEL = replace(
    PRESETS["tiny"],
    name="small",
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=4,
    head_dim=64,
    ffn=1024,
    vocab=1024,
    positions=128,
    tied=False,
)
CASES = [
    (ranks, strategy, precision)
    for ranks in (1, 2)
    for strategy in (Strategy.DDP, Strategy.ZERO3)
    for precision in (Precision.FP32, Precision.BF16_MIXED)
]
DEFAULT_ROUNDS = 15


def measure(job: RankJob, num_rounds: int) -> tuple[list[tuple[float, float, float]], int]:
    """(unmetered, metered in the step, metered all in) in seconds, a round each; and the events of a metered step."""
    torch.set_num_threads(1)
    set_imports_aside()  # as on the engines
    device = torch.device("cpu")
    rounds = []
    with joined_group(job) as comm:
        meter = Meter()
        executor = Executor(job.spec, comm, meter, device)

        def metered() -> tuple[float, float, int]:
            held = chain(executor.held_tensors(), ((counter, None) for counter in executor.step_counters()))
            start = time.perf_counter()
            with meter.recording(held, device) as recording, comm.settled_by(recording.settling):
                begin = time.perf_counter()
                executor.step()
                end = time.perf_counter()
            return end - begin, time.perf_counter() - start, recording.num_events

        for _ in range(2):
            executor.step()
            *_, num_events = metered()
        for _ in range(num_rounds):
            gc.collect()
            comm.barrier()
            start = time.perf_counter()
            executor.step()
            plain = time.perf_counter() - start
            comm.barrier()
            rounds.append((plain, *metered()[:2]))
    return rounds, num_events


def main() -> None:
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_ROUNDS
    print(f"{MODEL.num_params:,} parameters, 4 x 128 tokens a rank, {num_rounds} rounds, medians; ratios to unmetered")
    print("ranks  strategy  recipe      events  unmetered  in the step  all in  an event")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it reports every start and stop otherwise
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for number, (ranks, strategy, precision) in enumerate(CASES):
            spec = RunSpec(model=MODEL, ranks=ranks, strategy=strategy, precision=precision, batch=4, seq=128)
            store = str(Path(directory) / f"store{number}")
            jobs = [
                RankJob(spec=spec, rank=rank, store_path=store, backend="gloo", device="cpu", timeout_s=120.0)
                for rank in range(ranks)
            ]
            futures = [pool.submit(measure, job, num_rounds) for job in jobs]
            rounds, num_events = futures[0].result()
            plain = statistics.median(plain for plain, _, _ in rounds)
            inside = statistics.median(inside / plain for plain, inside, _ in rounds)
            whole = statistics.median(whole / plain for plain, _, whole in rounds)
            print(
                f"{ranks:5}  {strategy.value:8}  {precision.value:10}  {num_events:6}  {plain * 1e3:6.1f} ms"
                f"  {inside:11.3f}  {whole:6.3f}  {(whole - inside) * plain / num_events * 1e6:5.1f} us",
                flush=True,
            )


if __name__ == "__main__":
    main()
