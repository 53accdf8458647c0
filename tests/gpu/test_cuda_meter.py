"""The CUDA meter on a GPU: needs at least one, and is skipped by name where there is none.

What `tests/dist/test_record_cuda.py` can only imitate is asked of the allocator itself: that its history closes against
its own totals, that every place and label agrees, and what a block used by two streams looks like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch

from cluster.cuda_allocator import CudaAllocator, history_fault
from cluster.live import LiveBackend
from cluster.record_cuda import CudaRecorder
from cluster.recording import Recording
from zeroviz.compare import compare
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy
from zeroviz.trace import Category, RankTrace, Trace

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device on this machine")

STRATEGIES = [Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3]
PRECISIONS = [Precision.FP32, Precision.BF16_MIXED]
NUM_RANKS = sorted({1, max(1, NUM_GPUS)})


@pytest.fixture(scope="module")
def backend() -> Iterator[LiveBackend]:
    backend = LiveBackend()
    yield backend
    asyncio.run(backend.stop())


def run(backend: LiveBackend, spec: RunSpec) -> Trace:
    return asyncio.run(backend.run(spec, lambda progress: None))


def recorded(recorder: CudaRecorder) -> Recording:
    recording = Recording(recorder.method)
    recorder.fill(recording)
    return recording


def assert_the_chain_closes(rank: RankTrace) -> None:
    """From the allocator's total before the step through every entry to its total after it, and at its peak.

    Growth by the allocator's own peak is growth by the events, plus what awaited another stream at that moment.
    """
    reading, lines = rank.allocator, rank.device_lines
    assert reading is not None and lines is not None
    assert lines.faults == ()
    assert reading.num_events == len(rank.events) > 0
    assert reading.unattributed_nbytes == 0
    by_events = max(accumulate((event.delta_nbytes for event in rank.events), initial=0))
    assert 0 <= reading.peak_nbytes - reading.rest_nbytes - by_events <= lines.peak_awaiting_nbytes
    # At rest: the categories, cuBLAS, and the step counters where the optimizer keeps them on the device.
    assert lines.unnamed_nbytes == 0
    outside = reading.rest_nbytes - rank.rest_nbytes - lines.workspace_nbytes
    assert outside in (0, rank.step_counter_nbytes)
    assert lines.rounding_nbytes >= 0 and lines.cached_nbytes >= 0 and lines.outside_nbytes > 0


@pytest.mark.parametrize("ranks", NUM_RANKS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_metered_step_closes_and_what_differs_has_a_name(
    backend: LiveBackend, strategy: Strategy, precision: Precision, ranks: int
) -> None:
    """At rest and on the wire as predicted, to the byte. The peak may differ by kernels, and then says so."""
    spec = RunSpec(model=PRESETS["tiny"], ranks=ranks, strategy=strategy, precision=precision, seq=17)
    trace, predicted = run(backend, spec), predict(spec)
    assert trace.environment is not None
    assert {rank["meter"] for rank in trace.environment["ranks"]} == {CudaRecorder.method}
    for measured, expected in zip(trace.ranks, predicted.ranks, strict=True):
        assert_the_chain_closes(measured)
        assert measured.at_rest == expected.at_rest
        assert measured.collectives == expected.collectives
    comparison = compare(predicted, trace)
    assert [row for row in comparison.memory if row.category and row.difference and not row.cause] == []
    assert comparison.unexplained == ()


def test_llama_on_one_gpu_closes_too(backend: LiveBackend) -> None:
    spec = RunSpec(
        model=PRESETS["tiny-llama"], ranks=1, strategy=Strategy.ZERO3, precision=Precision.BF16_MIXED, seq=17
    )
    (rank,) = run(backend, spec).ranks
    assert_the_chain_closes(rank)


def test_ranks_that_share_a_gpu_show_the_backends_copies(backend: LiveBackend) -> None:
    """NCCL refuses two ranks on one GPU; gloo clones what it reduces and scatters, on the device."""
    spec = RunSpec(model=PRESETS["tiny"], ranks=NUM_GPUS + 1, strategy=Strategy.ZERO3, seq=17)
    for rank in run(backend, spec).ranks:
        assert_the_chain_closes(rank)
        copies = [event.delta_nbytes for event in rank.events if event.category is Category.BACKEND_COPY]
        assert sum(copies) == 0


@pytest.fixture
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def test_the_self_check_passes_and_leaves_nothing(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    before = CudaAllocator(device).totals().requested_nbytes
    assert history_fault(CudaAllocator(device)) == ""
    assert CudaAllocator(device).totals().requested_nbytes <= before


def test_a_block_used_by_two_streams_is_freed_twice(device: torch.device) -> None:
    """The tensor is gone at once; its block awaits the other stream while the next one is allocated."""
    recorder = CudaRecorder(CudaAllocator(device))
    other = torch.cuda.Stream(device)
    with recorder.recording([], None), recorder.op("forward", "forward", "block 0"):
        tensor = torch.empty(1_000_001, dtype=torch.uint8, device=device)
        with torch.cuda.stream(other):
            torch.cuda._sleep(200_000_000)
        tensor.record_stream(other)
        del tensor
        later = torch.empty(501, dtype=torch.uint8, device=device)
        del later
    recording = recorded(recorder)
    assert [event.delta_nbytes for event in recording.events] == [1_000_001, -1_000_001, 501, -501]
    assert recording.device_lines is not None
    assert recording.device_lines.peak_awaiting_nbytes == 1_000_001
    assert recording.unattributed_nbytes == 0


def test_backward_works_in_a_thread_that_carries_no_label(device: torch.device) -> None:
    """Why places are counted and not read off the metadata: what autograd allocates has none."""
    recorder = CudaRecorder(CudaAllocator(device))
    weight = torch.ones(301, 301, device=device, requires_grad=True)
    with recorder.recording([(weight, Category.UNSHARDED_PARAM)], None):
        with recorder.op("forward", "forward", "block 0"):
            loss = (weight @ weight).sum()
        with recorder.op("backward", "backward", "block 0"):
            loss.backward()
            weight.grad = None
    assert recorder.log is not None
    recording = recorded(recorder)
    assert recording.device_lines is not None and recording.device_lines.faults == ()
    num_born = sum(event.phase == "backward" and event.delta_nbytes > 0 for event in recording.events)
    num_labelled = sum(
        entry["action"] == "alloc" and entry["user_metadata"].startswith("zeroviz|1|") for entry in recorder.log.entries
    )
    assert 0 < num_labelled < num_born  # d loss / d loss is made in our own thread


def test_a_history_too_short_for_the_step_is_named(device: torch.device) -> None:
    recorder = CudaRecorder(CudaAllocator(device), max_entries=10)
    with recorder.recording([], None), recorder.op("forward", "forward", "block 0"):
        for numel in range(1000, 1020):
            torch.empty(numel, dtype=torch.uint8, device=device)
    recording = recorded(recorder)
    assert recording.device_lines is not None
    assert "of 40 allocations and frees were overwritten" in recording.device_lines.faults[0]
