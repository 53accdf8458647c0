"""The recorder of the CUDA meter without a GPU, over an imitated allocator; and one real step, mirrored into it.

Nothing here ran on a GPU: `fake_cuda.py` imitates torch's allocator after its source. What that leaves open,
`tests/gpu/test_cuda_meter.py` asks a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch

import cluster.meter
from cluster.collectives import Collectives, _backend, backend_hooks
from cluster.cuda_allocator import history_fault
from cluster.meter import Meter, held_by_category
from cluster.own.step import Executor
from cluster.record_cuda import CudaRecorder
from cluster.record_storages import StorageRecorder
from cluster.recording import Recording
from cluster.settle import Settling
from tests.dist.fake_cuda import CONTEXT_NBYTES, FakeAllocator, FakeCudaMemory
from zeroviz.models import PRESETS
from zeroviz.schedule import OpKind
from zeroviz.spec import Precision, RunSpec, Strategy
from zeroviz.trace import Category, RankTrace

WORKSPACE_NBYTES = 8519680  # cuBLAS's default for one thread and stream before Hopper


class Held:
    """Stands for a tensor: an address, its bytes and a device are all that a recorder asks for."""

    def __init__(self, memory: FakeCudaMemory, nbytes: int, device: str = "cuda:0") -> None:
        self.device, self._nbytes = torch.device(device), nbytes
        self.address = memory.alloc(nbytes)

    def untyped_storage(self) -> Held:
        return self

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self._nbytes


def filled(recorder: CudaRecorder) -> Recording:
    recording = Recording(recorder.method)
    recorder.fill(recording)
    assert recording.device_lines is not None
    return recording


@pytest.mark.parametrize("has_metadata", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_add_up_to_the_byte(seed: int, has_metadata: bool) -> None:
    """500 random allocations and frees in 40 ops, a third of the blocks tagged, some used by another stream.

    Expected by a bookkeeping of the test's own: for each op and category the bytes that came and went.
    """
    rng = random.Random(seed)
    memory = FakeCudaMemory()
    memory.has_metadata = has_metadata
    allocator = FakeAllocator(memory)
    rest: Any = [(Held(memory, rng.randrange(1, 3 * 2**20)), Category.SHARDED_PARAM) for _ in range(5)]
    allocator.workspaces = [memory.alloc(WORKSPACE_NBYTES)]
    library = memory.alloc(77)
    recorder = CudaRecorder(allocator)
    expected: list[tuple[str, str, str, Category | None, int]] = []
    live: list[tuple[Held, int, Category | None, int]] = []  # tensor, bytes, tag, place of its birth in `expected`
    rest_nbytes = memory.stats["requested_bytes"]["current"]
    with recorder.recording(rest, None):
        for number in range(40):
            where = (("forward", OpKind.FORWARD.value), ("backward", OpKind.BACKWARD.value))[number >= 20]
            unit = f"block {number % 20}"
            with recorder.op(*where, unit), memory.on_thread("autograd" if number >= 20 else "main"):
                for _ in range(12):
                    if live and rng.random() < 0.45:
                        tensor, nbytes, tag, birth = live.pop(rng.randrange(len(live)))
                        memory.free(tensor.address)
                        if tag is None:
                            same_op = expected[birth][:3] == (*where, unit)
                            born_forward = expected[birth][0] == "forward"
                            tag = Category.ACTIVATION if born_forward and not same_op else Category.TEMPORARY
                            expected[birth] = (*expected[birth][:3], tag, nbytes)
                        expected.append((*where, unit, tag, -nbytes))
                    else:
                        nbytes = rng.choice([rng.randrange(1, 2000), rng.randrange(1, 12 * 2**20)])
                        tensor = Held(memory, nbytes)
                        tag = Category.UNSHARDED_PARAM if rng.random() < 1 / 3 else None
                        if tag is not None:
                            recorder.tag(tensor, tag)  # type: ignore[arg-type]
                        if rng.random() < 0.1:
                            memory.use_elsewhere(tensor.address)
                        live.append((tensor, nbytes, tag, len(expected)))
                        expected.append((*where, unit, tag, nbytes))
        with recorder.op("optimizer", OpKind.OPTIMIZER_STEP.value, ""):
            for tensor, nbytes, tag, birth in live:
                memory.free(tensor.address)
                if tag is None:
                    tag = Category.ACTIVATION if expected[birth][0] == "forward" else Category.TEMPORARY
                    expected[birth] = (*expected[birth][:3], tag, nbytes)
                expected.append(("optimizer", OpKind.OPTIMIZER_STEP.value, "", tag, -nbytes))
    recording = filled(recorder)
    assert [tuple(event) for event in recording.events] == expected
    assert recording.unattributed_nbytes == 0
    assert (recording.rest_nbytes, recording.peak_nbytes) == (rest_nbytes, memory.stats["requested_bytes"]["peak"])
    lines = recording.device_lines
    assert lines is not None and lines.faults == ()
    assert lines.workspace_nbytes == WORKSPACE_NBYTES
    assert lines.unnamed_nbytes == 77
    assert lines.outside_nbytes == CONTEXT_NBYTES
    assert lines.peak_awaiting_nbytes > 0
    memory.free(library)


def test_a_ring_that_is_too_short_is_named() -> None:
    memory = FakeCudaMemory()
    recorder = CudaRecorder(FakeAllocator(memory), max_entries=10)
    with recorder.recording([], None), recorder.op("forward", "forward", "block 0"):
        for nbytes in range(1000, 1020):
            memory.free(memory.alloc(nbytes))
    recording = filled(recorder)
    assert recording.device_lines is not None
    # Ten entries: the newest three blocks' three each, and the second free of a fourth.
    words = "the first 34 of 40 allocations and frees were overwritten at max_entries 10"
    assert words in recording.device_lines.faults[0]
    assert [event.delta_nbytes for event in recording.events] == [1017, -1017, 1018, -1018, 1019, -1019]


def test_a_block_that_outlives_the_step_is_left_over_and_not_hidden() -> None:
    """A leak of a tagged buffer and one of nobody's: both stand in the events without an end."""
    memory = FakeCudaMemory()
    recorder = CudaRecorder(FakeAllocator(memory))
    with recorder.recording([], None), recorder.op("backward", "unshard", "block 1"):
        recorder.allocated(Held(memory, 3001), Category.UNSHARDED_PARAM)  # type: ignore[arg-type]
        memory.alloc(501)
    recording = filled(recorder)
    rank = RankTrace(rank=0, rest={}, events=recording.events)
    assert rank.leftover() == {Category.UNSHARDED_PARAM: 3001, Category.TEMPORARY: 501}
    assert recording.unattributed_nbytes == 0


def test_what_another_stream_held_is_taken_back_before_the_step() -> None:
    """Freed, used by another stream, and that stream is done: the block is free again at the next allocation."""
    memory = FakeCudaMemory()
    address = memory.alloc(5001)
    memory.use_elsewhere(address)
    memory.free(address)
    recorder = CudaRecorder(FakeAllocator(memory))
    with recorder.recording([], None):
        pass
    recording = filled(recorder)
    assert recording.rest_nbytes == 0 and recording.events == ()
    assert recording.device_lines is not None and recording.device_lines.awaiting_nbytes == 0


def test_what_happens_while_the_recording_is_set_up_is_before_the_step() -> None:
    """Another thread frees between the clearing of the history and the first reading of the totals."""
    memory = FakeCudaMemory()
    allocator = FakeAllocator(memory)
    early = memory.alloc(900)
    reset, memory_free = allocator.reset_peaks, memory.free
    allocator.reset_peaks = lambda: (memory_free(early), reset())[1]  # type: ignore[method-assign]
    recorder = CudaRecorder(allocator)
    with recorder.recording([], None), recorder.op("forward", "forward", "block 0"):
        memory.free(memory.alloc(1234))
    recording = filled(recorder)
    assert [event.delta_nbytes for event in recording.events] == [1234, -1234]
    assert recording.unattributed_nbytes == 0
    # The blocks had been counted before it: said, since the line of unnamed bytes is off by them.
    assert recording.device_lines is not None
    assert recording.device_lines.faults == ("at rest the allocator's blocks hold 900 B, its total says 0 B",)


def test_what_the_backend_copies_is_its_own_and_is_waited_for() -> None:
    """The copy is born while the backend works and freed by a thread of its own: here, when the counter is read the
    second time after the step. Then the step ends as it began."""
    memory = FakeCudaMemory()
    allocator = FakeAllocator(memory)
    copies: list[int] = []
    readings: list[int] = []

    def counter() -> int:
        readings.append(allocator.allocated_nbytes())
        if len(readings) == 2:
            memory.free(copies.pop())
        return readings[-1]

    recorder, settling = CudaRecorder(allocator), Settling(counter)
    with recorder.recording([], settling):
        with recorder.op("backward", OpKind.REDUCE_GRAD.value, "block 0"), _backend():
            copies.append(memory.alloc(16001))
        with recorder.op("backward", OpKind.WAIT_REDUCE.value, "block 0"):
            memory.free(memory.alloc(501))
    assert readings == [16384, 16384, 0] and (settling.num_late, settling.num_given_up) == (1, 0)
    assert [(event.category, event.delta_nbytes) for event in filled(recorder).events] == [
        (Category.BACKEND_COPY, 16001),
        (Category.TEMPORARY, 501),
        (Category.TEMPORARY, -501),
        (Category.BACKEND_COPY, -16001),
    ]


def test_ops_may_nest() -> None:
    """An outer op's blocks before and after an inner one are the outer one's, by place and by label."""
    memory = FakeCudaMemory()
    recorder = CudaRecorder(FakeAllocator(memory))
    with recorder.recording([], None), recorder.op("forward", "forward", "block 0"):
        memory.free(memory.alloc(1001))
        with recorder.op("forward", "unshard", "block 1"):
            memory.free(memory.alloc(1002))
        memory.free(memory.alloc(1003))
    recording = filled(recorder)
    assert [(event.op, event.delta_nbytes) for event in recording.events if event.delta_nbytes > 0] == [
        ("forward", 1001),
        ("unshard", 1002),
        ("forward", 1003),
    ]
    assert recording.device_lines is not None and recording.device_lines.faults == ()


def test_the_hooks_and_the_history_end_with_the_recording() -> None:
    memory = FakeCudaMemory()
    recorder = CudaRecorder(FakeAllocator(memory))
    with pytest.raises(ArithmeticError), recorder.recording([], None):
        assert len(backend_hooks) == 1
        raise ArithmeticError
    assert not backend_hooks and not memory.max_entries and not memory.ring
    with pytest.raises(RuntimeError, match="Nothing has been recorded"):
        recorder.fill(Recording(recorder.method))


# A real step of our own implementation, its storages mirrored into the imitated allocator.


class Mirror(StorageRecorder):
    """Watches a step on CPU and repeats every birth and death of a storage on the imitated GPU."""

    def __init__(self, memory: FakeCudaMemory) -> None:
        super().__init__(torch.device("cpu"))
        self.memory = memory
        self.address: dict[int, int] = {}

    def hold(self, tensor: torch.Tensor) -> None:
        """A storage that is there before the step."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in self.address:
            self.address[storage._cdata] = self.memory.alloc(storage.nbytes())

    def _birth(self, key: int, block: Any) -> None:
        super()._birth(key, block)
        self.address[key] = self.memory.alloc(block.nbytes)

    def _death(self, key: int) -> None:
        if key in self._live:
            self.memory.free(self.address.pop(key))
        super()._death(key)


class MirroredRecorder(CudaRecorder):
    """A CudaRecorder whose tensors lie on CPU and whose blocks lie in the imitated allocator."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__(FakeAllocator(mirror.memory))
        self.mirror = mirror

    @contextmanager
    def recording(self, rest: Any, settling: Any) -> Iterator[None]:
        pairs = list(rest)
        for tensor, _ in pairs:
            self.mirror.hold(tensor)
        there = [(self._on_gpu(tensor), category) for tensor, category in pairs if tensor.untyped_storage().nbytes()]
        with super().recording(there, settling), self.mirror.recording(pairs, None):
            yield

    @contextmanager
    def op(self, phase: str, op: str, unit: str) -> Iterator[None]:
        with super().op(phase, op, unit), self.mirror.op(phase, op, unit):
            yield

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        self.mirror.tag(tensor, category)
        super().tag(self._on_gpu(tensor), category)

    def allocated(self, tensor: torch.Tensor, category: Category) -> None:
        self.mirror.allocated(tensor, category)
        super().tag(self._on_gpu(tensor), category)

    def released(self, tensor: torch.Tensor) -> None:
        self.mirror.released(tensor)

    def _on_gpu(self, tensor: torch.Tensor) -> Any:
        stand_in = Held.__new__(Held)
        storage = tensor.untyped_storage()
        stand_in.device, stand_in._nbytes = torch.device("cuda:0"), storage.nbytes()
        stand_in.address = self.mirror.address[storage._cdata]
        return stand_in


@pytest.mark.parametrize("strategy", [Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED])
def test_a_real_step_reads_the_same_as_from_its_storages(
    strategy: Strategy, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of our own implementation, seen by two recorders at once: storages watched, and those same births and
    deaths as a history of the imitated allocator. Two ways from the step to its events, and every event is equal."""
    spec = RunSpec(model=PRESETS["tiny"], ranks=1, strategy=strategy, precision=precision, seq=17, steps=2)
    meter = Meter()
    executor = Executor(spec, Collectives(0, 1, None), meter, torch.device("cpu"))
    executor.step()
    mirror = Mirror(FakeCudaMemory())
    recorder = MirroredRecorder(mirror)
    monkeypatch.setattr(cluster.meter, "recorder_for", lambda device: (recorder, None))
    held = list(executor.held_tensors())
    counters = [(counter, None) for counter in executor.step_counters()]
    with meter.recording([*held, *counters], executor.device) as recording:
        executor.step()
    watched = Recording(mirror.method)
    mirror.fill(watched)
    assert recording.events == watched.events
    assert recording.unattributed_nbytes == 0
    assert recording.device_lines is not None and recording.device_lines.faults == ()
    assert recording.device_lines.unnamed_nbytes == 0
    rest = held_by_category(held)
    RankTrace(rank=0, rest=rest, events=recording.events).check()
    assert recording.rest_nbytes == sum(rest.values()) + 4 * len(counters)
    totals = accumulate((event.delta_nbytes for event in recording.events), initial=recording.rest_nbytes)
    assert recording.peak_nbytes == max(totals)


# Whether the history can be relied upon.


def spoil_backend(memory: FakeCudaMemory) -> None:
    memory.backend = "cudaMallocAsync"


def spoil_sizes(memory: FakeCudaMemory) -> None:
    memory.rounds_what_it_records = True


def spoil_history(memory: FakeCudaMemory) -> None:
    memory._note = lambda *_: None  # type: ignore[method-assign]


def spoil_addresses(memory: FakeCudaMemory) -> None:
    note = memory._note
    memory._note = lambda action, address, size: note(action, address + 512, size)  # type: ignore[method-assign]


def spoil_counts(memory: FakeCudaMemory) -> None:
    count = memory._count
    memory._count = lambda name, amount: None if name == "allocation" else count(name, amount)  # type: ignore[method-assign]


def spoil_interface(memory: FakeCudaMemory) -> None:
    memory._record_memory_history = None  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda memory: None, ""),
        (spoil_backend, "the allocator cudaMallocAsync records none"),
        (spoil_sizes, "two known blocks left other entries than theirs ([('alloc', 12800)"),
        (spoil_history, "two known blocks left other entries than theirs ([])"),
        (spoil_addresses, "the entries of two known blocks have other addresses"),
        (spoil_counts, "its counts and totals do not follow two known blocks ([0, 0, 0, 0]"),
        (spoil_interface, "this torch does not record it as expected (TypeError"),
    ],
)
def test_the_self_check_finds_an_allocator_that_answers_otherwise(
    spoil: Callable[[FakeCudaMemory], None], words: str
) -> None:
    memory = FakeCudaMemory()
    memory.alloc(5000)
    spoil(memory)
    fault = history_fault(FakeAllocator(memory))
    assert fault.startswith(words) if words else fault == ""
    assert memory.stats["requested_bytes"]["current"] == 5000


def test_a_gpu_without_a_history_is_watched_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.meter, "fault_on", lambda index: "the allocator cudaMallocAsync records none")
    recorder, settling = cluster.meter.recorder_for(torch.device("cuda", 0))
    assert isinstance(recorder, StorageRecorder) and settling is None
    assert recorder.method == (
        "storages watched by a dispatch mode; not the allocator's history: the allocator cudaMallocAsync records none"
    )
    monkeypatch.setattr(cluster.meter, "fault_on", lambda index: "")
    recorder, settling = cluster.meter.recorder_for(torch.device("cuda", 0))
    assert isinstance(recorder, CudaRecorder) and settling is not None
