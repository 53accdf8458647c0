"""Record a few metered steps on this machine's GPUs, so that they can be kept and read where there is none.

    python tests/gpu/record.py FOLDER [--seconds 180]

For one rank and for a rank a GPU, each strategy in fp32 and bf16-mixed, FOLDER gets two files a run: the trace
(zeroviz.trace/1, `zeroviz compare` reads it) and the log of rank 0 (zeroviz.cuda-log/1: the allocator's history and the
places written down, `cluster.cuda_history` reads it). `machine.json` says what they were recorded on and by which
command. No run is begun that the time would not allow, and the last line names what was left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shlex
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import cluster.meter
from cluster.placement import place
from cluster.rank import RankJob, run_rank
from cluster.record_cuda import CudaRecorder
from zeroviz.errors import TraceError
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy
from zeroviz.trace import Origin, Trace, merge, rank_from_dict

STRATEGIES = (Strategy.ZERO3, Strategy.ZERO2, Strategy.ZERO1, Strategy.DDP)
PRECISIONS = (Precision.FP32, Precision.BF16_MIXED)
SEQ = 17
RUN_TIMEOUT_S = 60.0


def metered(job: RankJob) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """One rank's run as it always is, and the log its recorder kept; None where the step was watched instead."""
    kept: list[Any] = []
    choose = cluster.meter.recorder_for

    def keep(device: torch.device) -> Any:
        kept.append(choose(device))
        return kept[-1]

    with patch.object(cluster.meter, "recorder_for", keep):
        result = run_rank(job)
    recorder, _ = kept[0]
    log = recorder.log if isinstance(recorder, CudaRecorder) else None
    return result, None if log is None else log.to_dict()


def machine(command: str) -> dict[str, Any]:
    """What the runs were made on."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "command": command,
        "gpus": [
            {"name": gpu.name, "total_memory": gpu.total_memory, "sm": f"{gpu.major}.{gpu.minor}"} for gpu in gpus
        ],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": list(torch.cuda.nccl.version()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "allocator_settings": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
    }


def record(spec: RunSpec, pool: ProcessPoolExecutor, folder: Path, facts: dict[str, Any]) -> str:
    """Run `spec`, write its two files, and say in a line what came of it."""
    placement = place(spec.ranks, len(facts["gpus"]))
    name = f"{spec.strategy.value}-{spec.precision.value}-{spec.ranks}"
    with tempfile.TemporaryDirectory() as store:
        jobs = [
            RankJob(
                spec=spec,
                rank=rank,
                store_path=str(Path(store) / "store"),
                backend=placement.backend,
                device=placement.devices[rank],
                timeout_s=RUN_TIMEOUT_S,
            )
            for rank in range(spec.ranks)
        ]
        futures = [pool.submit(metered, job) for job in jobs]
        results = [future.result(timeout=RUN_TIMEOUT_S) for future in futures]
    environment = {
        **{key: value for key, value in facts.items() if key != "gpus"},
        "gpus": [gpu["name"] for gpu in facts["gpus"]],
        "backend": placement.backend,
        "devices": list(placement.devices),
        "ranks": [result["environment"] for result, _ in results],
    }
    if (log := results[0][1]) is not None:
        log["note"] = f"Recorded on {facts['gpus'][0]['name']}, torch {facts['torch']}, CUDA {facts['cuda']}."
        (folder / f"{name}.log.json").write_text(json.dumps(log) + "\n")
    try:
        trace = merge(Origin.RECORDED, spec, [rank_from_dict(result) for result, _ in results], environment)
    except TraceError as error:
        return f"{name}: the log is kept and there is no trace: {error}"
    (folder / f"{name}.trace.json").write_text(trace.to_json() + "\n")
    return f"{name}: {summary(trace)}"


def summary(trace: Trace) -> str:
    """At rest and at the peak, measured against predicted, and what the recording's own checks found."""
    measured, predicted = trace.ranks[0], predict(trace.spec).ranks[0]
    parts = [
        f"at rest {measured.rest_nbytes - predicted.rest_nbytes:+,} B",
        f"peak {measured.peak().total - predicted.peak().total:+,} B against the prediction",
    ]
    if measured.allocator is not None:
        parts.append(f"unattributed {measured.allocator.unattributed_nbytes:,} B")
    faults = [fault for rank in trace.ranks if rank.device_lines for fault in rank.device_lines.faults]
    return "; ".join([*parts, *dict.fromkeys(faults)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where the files go; made if it is not there")
    parser.add_argument("--seconds", type=float, default=180.0, help="begin no run after so many (default 180)")
    options = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        print("There is no CUDA device on this machine; run this where there is one.", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    facts = machine(shlex.join([Path(sys.executable).name, *sys.argv]))
    (options.folder / "machine.json").write_text(json.dumps(facts, indent=1) + "\n")
    specs = [
        RunSpec(model=PRESETS["tiny"], ranks=ranks, strategy=strategy, precision=precision, seq=SEQ)
        for ranks in sorted({1, num_gpus})
        for strategy in STRATEGIES
        for precision in PRECISIONS
    ]
    deadline = time.monotonic() + options.seconds
    with ProcessPoolExecutor(num_gpus, mp_context=multiprocessing.get_context("spawn")) as pool:
        while specs and time.monotonic() < deadline:
            print(record(specs.pop(0), pool, options.folder, facts), flush=True)
    left = ", ".join(f"{spec.strategy.value}-{spec.precision.value}-{spec.ranks}" for spec in specs)
    print(f"left out for time: {left}" if left else "all runs recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
