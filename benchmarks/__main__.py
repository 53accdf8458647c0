"""How long a person waits: prediction, picture, cold start, warm rerun, and a step of each strategy.

`make bench`. Times are of this machine and of its load at the time; medians of a few repetitions.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from cluster.session import Session
from zeroviz.models import PRESETS
from zeroviz.partition import plan_units
from zeroviz.predict import predict
from zeroviz.scene import build_scene
from zeroviz.schedule import schedule
from zeroviz.spec import Precision, RunSpec, Strategy
from zeroviz.tables import render

REPETITIONS = 5
TINY = RunSpec(model=PRESETS["tiny"], ranks=2, steps=10)
LARGE = RunSpec(model=PRESETS["llama3-70b"], ranks=64, precision=Precision.BF16_MIXED)


def median_ms(work: Callable[[], object]) -> float:
    """Median wall time of `work` in milliseconds."""
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def show(what: str, milliseconds: float) -> None:
    print(f"{what:<58}{milliseconds:>12,.1f} ms", flush=True)


def bench_arithmetic() -> None:
    for spec in (TINY, LARGE):
        name = f"{spec.model.name}, {spec.ranks} ranks"

        def fresh(spec: RunSpec = spec) -> object:
            for cached in (predict, schedule, plan_units):
                cached.cache_clear()
            return predict(spec)

        show(f"predict, {name}", median_ms(fresh))
        trace = predict(spec)
        show(f"scene of the picture, {name}", median_ms(lambda trace=trace: build_scene(trace, None)))
        show(f"text table, {name}", median_ms(lambda trace=trace: render(trace)))


def bench_live() -> None:
    with Session() as session:
        start = time.perf_counter()
        session.run_sync(TINY)
        show(f"first run of {TINY.steps} steps, engines cold, {TINY.ranks} ranks", (time.perf_counter() - start) * 1e3)
        show(f"run of {TINY.steps} steps, engines warm, {TINY.ranks} ranks", median_ms(lambda: session.run_sync(TINY)))
        for strategy in Strategy:
            done = session.run_sync(replace(TINY, strategy=strategy))
            # The first step makes the optimizer's state and the last is metered; neither is a usual one.
            steps = [max(times) / 1e6 for times in zip(*(rank["step_time_ns"] for rank in done.ranks), strict=True)]
            show(f"one step of {strategy.label}, slowest rank", statistics.median(steps[1:-1]))


print(f"{os.cpu_count()} cores")
bench_arithmetic()
bench_live()
