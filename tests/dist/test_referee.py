"""The meter against a referee that knows nothing of torch: a malloc that counts (referee.c), preloaded.

What torch's allocator gives out it has from malloc, so over a step the two must grow alike. The referee also sees what
is no tensor, down to blocks of 1 KiB: the autograd engine's tables (some 5 kB at most) and gloo's ring buffers. It does
not see the tensors below 1 KiB, of which a step of a small model holds some.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeroviz.artefacts import ring_scratch_nbytes
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy

ROOT = Path(__file__).resolve().parents[2]
BOUND_NBYTES = 64 * 1024
# Larger than tiny, so that its step is megabytes and 64 KiB of it a small part.
SMALL = replace(
    PRESETS["tiny"], name="small", hidden=128, ffn=512, heads=4, kv_heads=4, head_dim=32, vocab=512, positions=128
)


@pytest.fixture(scope="module")
def referee(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled referee."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile the malloc referee with")
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the malloc referee stands before glibc's malloc, and this is another C library")
    library = tmp_path_factory.mktemp("referee") / "referee.so"
    source = Path(__file__).with_name("referee.c")
    subprocess.run(
        ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60
    )
    return library


def judge(referee: Path, directory: Path, spec: RunSpec) -> list[dict[str, Any]]:
    """Each rank's growth of one step in bytes: by the referee, and by the allocator."""
    path = directory / "spec.json"
    path.write_text(json.dumps(spec.to_dict()))
    done = subprocess.run(
        [sys.executable, "-m", "tests.dist.referee_step", path],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(referee), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ranks: list[dict[str, Any]] = json.loads(done.stdout)
    return ranks


def growth(spec: RunSpec) -> int:
    """The predicted one, as here."""
    rank = predict(spec).ranks[0]
    return rank.machine_peak().total - rank.rest_nbytes - rank.step_counter_nbytes


@pytest.mark.parametrize("strategy", [Strategy.DDP, Strategy.ZERO3])
def test_one_rank_in_fp32_grows_by_what_was_predicted(referee: Path, tmp_path: Path, strategy: Strategy) -> None:
    """The growth is megabytes; the engine's tables and the small tensors are within 8 KiB of each other."""
    spec = RunSpec(model=SMALL, strategy=strategy, ranks=1, batch=4, seq=128, steps=2)
    (rank,) = judge(referee, tmp_path, spec)
    assert rank["allocator"] == growth(spec) > 8 * 2**20
    assert abs(rank["referee"] - rank["allocator"]) <= 8 * 1024


def test_one_rank_in_bf16(referee: Path, tmp_path: Path) -> None:
    spec = RunSpec(model=SMALL, ranks=1, batch=2, seq=128, precision=Precision.BF16_MIXED, steps=2)
    (rank,) = judge(referee, tmp_path, spec)
    assert abs(rank["referee"] - rank["allocator"]) <= BOUND_NBYTES


def test_two_ranks_with_gloos_ring_buffers_beside(referee: Path, tmp_path: Path) -> None:
    """Both steps wait for gloo's thread to let go of its copies; its ring buffers the referee alone sees."""
    spec = RunSpec(model=SMALL, ranks=2, batch=2, seq=128, steps=2)
    calls = predict(spec).ranks[0].collectives
    ring = max(ring_scratch_nbytes(call.op, call.payload_nbytes, 2) for call in calls)
    for rank in judge(referee, tmp_path, spec):
        assert rank["allocator"] == growth(spec)
        assert -BOUND_NBYTES <= rank["referee"] - rank["allocator"] <= BOUND_NBYTES + ring
