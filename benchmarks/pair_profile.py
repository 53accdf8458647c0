"""Where the steps of our own code and of another implementation spend their time: why a ratio is what it is.

    python benchmarks/pair_profile.py [MODEL IMPL STRATEGY [ROUNDS]]

Without a pair, those whose times are nearest to one another, on the small model. Both models stand on the same two
ranks, and a round is one step of each under torch's profiler. Four lines add up to the step: three kinds of ops by
their own time on the thread that makes the step, and what is no op, which is Python and waiting for the other rank.
Beside them, at the same time: processor time of gloo's threads, which share the cores with the steps, and how long
collectives of each kind were under way. Figures are medians over rounds and ranks. A profiled step takes longer than
one of `zeroviz bench`: compare the columns of a table, not tables.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.autograd.profiler import profile
from torch.autograd.profiler_util import FunctionEvent

from cluster.bench import BenchSide
from cluster.collectives import collectives_of
from cluster.rank import RankJob, joined_group, set_imports_aside
from zeroviz.bench import Pair, pairs_of
from zeroviz.models import PRESETS
from zeroviz.spec import Implementation, RunSpec, Strategy, parse_enum

PAIRS = (
    ("ddp", "ddp"),
    ("zero_redundancy", "zero1"),
    ("deepspeed", "zero2"),
    ("megatron", "megatron_optim"),
)
DEFAULT_ROUNDS = 21
SEQ = 128
STEP, NO_OP, GLOO_CPU = "step", "  no op", "gloo's threads, CPU"
PRODUCTS, COPIES, OTHER = "  matrix products", "  copies", "  other ops"
_KINDS = {
    PRODUCTS: ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "flash_attention"),
    COPIES: ("aten::copy_", "aten::cat", "aten::_chunk_cat", "aten::split_with_sizes_copy", "aten::_foreach_copy_"),
}


def kind_of(name: str) -> str:
    """The line an op's own time is counted on."""
    return next((kind for kind, ops in _KINDS.items() if any(name == op or op in name[6:] for op in ops)), OTHER)


def parts(events: Iterable[FunctionEvent], wall_ms: float, gloo_ms: float) -> dict[str, float]:
    """Milliseconds of each line, of one step on one rank."""
    found = Counter({STEP: wall_ms, PRODUCTS: 0.0, COPIES: 0.0, OTHER: 0.0, NO_OP: wall_ms, GLOO_CPU: gloo_ms})
    for event in events:
        if event.name.startswith("gloo:"):
            found[event.name] += event.time_range.elapsed_us() / 1e3
        elif event.name.startswith("aten::"):
            found[kind_of(event.name)] += event.self_cpu_time_total / 1e3
            found[NO_OP] -= event.self_cpu_time_total / 1e3
    return dict(found)


def profiled_step(side: BenchSide) -> dict[str, float]:
    """One step under the profiler, which is started before the ranks meet and stopped after they are through."""
    with profile(use_device=None) as found:
        side.comm.barrier()
        start, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        side.steps.step()
        wall = time.perf_counter() - start
        gloo = (time.process_time() - process) - (time.thread_time() - thread)
        side.comm.barrier()
    assert found.function_events is not None
    return parts(found.function_events, wall * 1e3, gloo * 1e3)


def measure(job: RankJob) -> tuple[list[dict[str, float]], ...]:
    """What each round's steps spent, own's and the other's, on this rank."""
    assert job.against is not None
    torch.set_num_threads(1)
    set_imports_aside()  # as on the engines
    device = torch.device("cpu")
    rounds: tuple[list[dict[str, float]], ...] = ([], [])
    with joined_group(replace(job, spec=job.against)) as theirs:
        ours = collectives_of(job.spec, job.rank, timedelta(seconds=job.timeout_s))
        sides = BenchSide(job.spec, ours, device), BenchSide(job.against, theirs, device)
        for side in sides:
            side.warm_up()
        for number in range(job.num_rounds):
            gc.collect()
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                rounds[which].append(profiled_step(sides[which]))
        return rounds


def show(model: str, impl: str, strategy: str, num_rounds: int) -> None:
    """Print one pair's table."""
    if model not in PRESETS:
        raise SystemExit(f"MODEL is {model!r}; it must be one of {', '.join(PRESETS)}.")
    base = RunSpec(model=PRESETS[model], ranks=2, seq=SEQ)
    pair, *_ = pairs_of(base, parse_enum(Implementation, impl, "IMPL"), parse_enum(Strategy, strategy, "STRATEGY"))
    if isinstance(pair, Pair):
        raise SystemExit(pair.absent)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        job = RankJob(
            spec=pair[0],
            against=pair[1],
            rank=0,
            store_path=str(Path(folder) / "store"),
            backend="gloo",
            device="cpu",
            timeout_s=120.0,
            num_rounds=num_rounds,
        )
        futures = [pool.submit(measure, replace(job, rank=rank)) for rank in range(2)]
        own, other = (list(chain(*rounds)) for rounds in zip(*(future.result() for future in futures), strict=True))
    lines = list(dict.fromkeys(name for step in (*own, *other) for name in step))
    print(f"\n{model}, {strategy}: ms of a profiled step, {num_rounds} rounds")
    print(f"{'':28}{'own':>9}{impl:>17}")
    for name in sorted(lines, key=lambda name: name.startswith("gloo:")):
        mine, its = (statistics.median(step.get(name, 0.0) for step in side) for side in (own, other))
        print(f"{name:28}{mine:9.1f}{its:17.1f}", flush=True)


def main() -> None:
    given = sys.argv[1:]
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it reports every start and stop otherwise
    print(f"torch {torch.__version__}, gloo, 2 ranks, fp32, 1 x {SEQ} tokens on each")
    if not given:
        for impl, strategy in PAIRS:
            show("small", impl, strategy, DEFAULT_ROUNDS)
    elif len(given) in (3, 4):
        show(given[0], given[1], given[2], int(given[3]) if len(given) == 4 else DEFAULT_ROUNDS)
    else:
        raise SystemExit(f"{' '.join(given)!r} is no pair; give MODEL IMPL STRATEGY [ROUNDS], or nothing.")


if __name__ == "__main__":
    main()
