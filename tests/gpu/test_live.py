"""Live runs on GPUs: needs at least one, and is skipped by name where there is none.

Model states at rest do not depend on kernels, so predicted and measured agree to the byte there as on CPU. At the peak
CUDA's kernels keep other activations (fp32 norm statistics, fused RMSNorm), so only the states are compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from cluster.live import LiveBackend
from tests.every import pairs, settings_of
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy
from zeroviz.trace import Trace

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device on this machine")


@pytest.fixture(scope="module")
def backend() -> Iterator[LiveBackend]:
    backend = LiveBackend()
    yield backend
    asyncio.run(backend.stop())


def run(backend: LiveBackend, spec: RunSpec) -> Trace:
    return asyncio.run(backend.run(spec, lambda progress: None))


def placement(trace: Trace) -> tuple[object, object]:
    assert trace.environment is not None
    return trace.environment["backend"], trace.environment["devices"]


@pytest.mark.parametrize(("strategy", "precision"), pairs((Precision.FP32, Precision.BF16_MIXED)))
def test_a_rank_a_gpu_runs_on_nccl(backend: LiveBackend, strategy: Strategy, precision: Precision) -> None:
    spec = RunSpec(model=PRESETS["tiny"], ranks=NUM_GPUS, precision=precision, **settings_of(strategy, NUM_GPUS))
    trace = run(backend, spec)
    devices = [f"cuda:{index}" for index in range(NUM_GPUS)]
    assert placement(trace) == ("nccl" if NUM_GPUS > 1 else placement(trace)[0], devices)
    for measured, predicted in zip(trace.ranks, predict(spec).ranks, strict=True):
        assert measured.at_rest == predicted.at_rest
        assert measured.collectives == predicted.collectives
        # The allocator's figure is what was asked for: the categories, and what cuBLAS keeps beside them.
        assert measured.allocator is not None
        assert measured.allocator.rest_nbytes >= measured.rest_nbytes


@pytest.mark.parametrize("strategy", list(Strategy))
def test_several_ranks_a_gpu_run_on_gloo(backend: LiveBackend, strategy: Strategy) -> None:
    settings = settings_of(strategy, NUM_GPUS + 1)
    spec = RunSpec(model=PRESETS["tiny-llama"], ranks=NUM_GPUS + 1, **settings)
    trace = run(backend, spec)
    assert placement(trace)[0] == "gloo"
    for measured, predicted in zip(trace.ranks, predict(spec).ranks, strict=True):
        assert measured.at_rest == predicted.at_rest
        assert measured.losses[-1] < measured.losses[0]
