"""A caching allocator's history in the shape that torch documents, read as a step. No GPU, and no torch.

Nothing here was recorded on a GPU: `recorded/constructed_step.json` is written by hand. `tests/gpu/record.py` writes
files of the same format from a real one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cuda_history import History, read_history
from cluster.cuda_log import Counts, CudaLog
from zeroviz.device_lines import DeviceLines
from zeroviz.errors import TraceError
from zeroviz.trace import Category, Event, RankTrace

CONSTRUCTED = Path(__file__).with_name("recorded") / "constructed_step.json"
WORKSPACE_NBYTES = 8519680  # cuBLAS's default for one thread and stream before Hopper


@pytest.fixture
def log() -> CudaLog:
    return CudaLog.from_dict(json.loads(CONSTRUCTED.read_text()))


def by_category(history: History) -> dict[Category, list[int]]:
    """The changes of each category, in order."""
    found: dict[Category, list[int]] = {}
    for event in history.events:
        found.setdefault(event.category, []).append(event.delta_nbytes)
    return found


def test_a_constructed_step_is_read_as_derived(log: CudaLog) -> None:
    """Forward and backward of one unit, by hand.

    Sizes are those asked for and no multiples of 512: 12001 is a block of 12288 bytes, but an entry carries 12001.
    Tagged: two inputs of 520; the gathered unit of 12001, twice at one address; its gradient of 16001; the gradient's
    shard of 4000, freed in the step although born before it, and made anew at the same address.
    Ruled: 6000 and 1500000 outlive their forward and are activations; 3000 in forward, and at the same address 2000 in
    backward, die in the op they are born in; so does the optimizer's 4000.
    16001 born inside a collective is the backend's. A workspace that backward's thread got is known because cuBLAS
    gives it back at the end; it has no end in the step. 100 bytes were there before, in no category: a finding.
    """
    history = read_history(log)
    assert by_category(history) == {
        Category.INPUT: [520, 520, -520, -520],
        Category.UNSHARDED_PARAM: [12001, -12001, 12001, -12001],
        Category.UNSHARDED_GRAD: [16001, -16001],
        Category.SHARDED_GRAD: [-4000, 4000],
        Category.ACTIVATION: [6000, 1500000, -6000, -1500000],
        Category.TEMPORARY: [3000, -3000, 2000, -2000, 4000, -4000],
        Category.BACKEND_COPY: [16001, -16001],
        Category.KERNEL_SCRATCH: [WORKSPACE_NBYTES],
        Category.UNATTRIBUTED: [-100],
    }
    assert history.num_events == len(history.events) == 26
    assert history.unattributed_nbytes == 100
    freed = [event for event in history.events if event.category is Category.ACTIVATION][-1]
    assert freed == Event("backward", "backward", "block 0", Category.ACTIVATION, -1500000)


def test_the_constructed_step_peaks_where_it_should(log: CudaLog) -> None:
    """At rest 4000 + 4000 + 8000 in categories. Forward: inputs, the unit, 6000 and the large activation:
    16000 + 1040 + 12001 + 6000 + 1500000 = 1535041. Backward adds the gradient and 2000: 1535041 + 16001 + 2000 =
    1553042, and the workspace, which is no category's."""
    rest = {Category.SHARDED_PARAM: 4000, Category.SHARDED_GRAD: 4000, Category.OPTIMIZER_STATE: 8000}
    rank = RankTrace(rank=0, rest=rest, events=read_history(log).events)
    peak = rank.peak()
    assert (peak.total, peak.phase, peak.op, peak.unit) == (1553042, "backward", "backward", "block 0")
    assert rank.machine_peak().total == 1553042 + WORKSPACE_NBYTES
    assert rank.leftover() == {Category.KERNEL_SCRATCH: WORKSPACE_NBYTES, Category.UNATTRIBUTED: -100}


def test_the_lines_of_the_constructed_step(log: CudaLog) -> None:
    """Blocks at rest, asked for and rounded: 4000 (4096), 4000 (4096), 8000 (8192), a workspace, 100 (512) of somebody;
    one of 700 (1024) awaits another stream. One small segment of 2 MiB and a large one of 20 MiB are reserved.

    rounding = 96 + 96 + 192 + 412 = 796; cached = 2 MiB + 20 MiB - 16896 - 8519680 - 1024 = 14531072.
    Awaiting another stream at most: the gradient and its copy, 2 * 16001, until the optimizer's first block.
    """
    assert read_history(log).lines == DeviceLines(
        requested_nbytes=4000 + 4000 + 8000 + 100 + WORKSPACE_NBYTES,
        rounding_nbytes=796,
        awaiting_nbytes=1024,
        cached_nbytes=14531072,
        outside_nbytes=500_000_000 - 22 * 2**20,
        workspace_nbytes=WORKSPACE_NBYTES,
        unnamed_nbytes=100,
        peak_reserved_nbytes=62 * 2**20,
        peak_awaiting_nbytes=2 * 16001,
    )


def test_a_log_goes_to_json_and_back(log: CudaLog) -> None:
    data = json.loads(json.dumps(log.to_dict()))
    assert data == json.loads(CONSTRUCTED.read_text())
    assert CudaLog.from_dict(data) == log
    with pytest.raises(TraceError, match="schema is 'other'"):
        CudaLog.from_dict({**data, "schema": "other"})
    with pytest.raises(TraceError, match="lacks or garbles"):
        CudaLog.from_dict({**data, "ops": [[1]]})


@pytest.mark.parametrize("num_kept", range(0, 55, 6))
def test_a_truncated_history_is_named_and_what_is_left_is_placed(log: CudaLog, num_kept: int) -> None:
    """A ring of `num_kept` entries holds the newest ones. Whatever is left stands where it stood, every block whose
    birth is left has its category, and what the lost part moved is one jump: all in all the step moves as before."""
    whole = read_history(log)
    cut = replace(log, entries=log.entries[len(log.entries) - num_kept :], max_entries=num_kept)
    history = read_history(cut)
    num_lost = whole.num_events - history.num_events
    assert num_lost > 0
    assert f"the first {num_lost} of 26 allocations and frees were overwritten" in history.lines.faults[0]
    tail = [event for event in history.events if event.phase]
    expected = whole.events[num_lost:]
    assert [event[:3] for event in tail] == [event[:3] for event in expected]
    assert [event.delta_nbytes for event in tail] == [event.delta_nbytes for event in expected]
    for got, was in zip(tail, expected, strict=True):
        # A block whose birth was lost has no category any more, unless it was held at rest.
        assert got.category in (was.category, Category.UNATTRIBUTED)
        assert got.category is was.category or was.delta_nbytes < 0
    assert history.unattributed_nbytes > 0
    moved, was_moved = (sum(event.delta_nbytes for event in each.events) for each in (history, whole))
    assert moved == was_moved


def test_of_two_names_for_one_block_the_first_stands(log: CudaLog) -> None:
    """Replicated parameters are named whole first and as a shard after that; `held_by_category` does the same."""
    again = [holding._replace(category=Category.MASTER_PARAM) for holding in log.held]
    assert read_history(replace(log, held=[*log.held, *again])) == read_history(log)


def test_what_does_not_add_up_is_said(log: CudaLog) -> None:
    """A total, a peak, a place, a label, an action, an address: each wrong in turn, each found, none hidden."""
    end = log.end
    later = replace(end, requested_nbytes=end.requested_nbytes + 512)
    history = read_history(replace(log, end=later))
    assert history.unattributed_nbytes == 100 + 512 + 512  # the peak no longer fits either
    assert Event("", "", "", Category.UNATTRIBUTED, 512) in history.events
    assert "+512 B" in history.lines.faults[0]

    higher = replace(end, requested_peak_nbytes=end.requested_peak_nbytes + 7)
    history = read_history(replace(log, end=higher))
    assert history.unattributed_nbytes == 100 + 7
    assert "the allocator's 18,592,509 B" in history.lines.faults[0]

    begin = log.ops[3].begin
    astray = log.ops[3]._replace(begin=Counts(begin.num_allocs - 1, begin.num_frees + 1))
    faults = read_history(replace(log, ops=[*log.ops[:3], astray, *log.ops[4:]])).lines.faults
    assert faults == ("1 marks stand where the history has other allocations before them",)

    shifted = [log.ops[0]._replace(end=log.ops[1].end), log.ops[1]._replace(begin=log.ops[1].end), *log.ops[2:]]
    faults = read_history(replace(log, ops=shifted)).lines.faults
    assert faults == ("1 entries carry the label of another op than they are counted in",)

    entries = [*log.entries[:5], {**log.entries[0], "action": "teleport"}, *log.entries[5:]]
    assert "teleport" in read_history(replace(log, entries=entries)).lines.faults[0]

    tag = log.tags[0]._replace(address=1)
    assert "1 tags name an address" in read_history(replace(log, tags=[tag, *log.tags[1:]])).lines.faults[0]

    holding = log.held[0]._replace(nbytes=4096)
    assert "1 tensors held at rest" in read_history(replace(log, held=[holding, *log.held[1:]])).lines.faults[0]

    assert "at rest the allocator's blocks hold" in read_history(replace(log, blocks=log.blocks[1:])).lines.faults[0]
    assert "the host's memory" in read_history(replace(log, num_on_host=1)).lines.faults[0]


def test_without_labels_the_counts_alone_place_everything(log: CudaLog) -> None:
    """torch before 2.10 has no metadata, and its documentation no `user_metadata`."""
    bare = [{key: entry[key] for key in ("action", "addr", "size", "stream")} for entry in log.entries]
    assert read_history(replace(log, entries=bare)) == read_history(log)


def test_another_threads_block_outside_backward_is_the_backends(log: CudaLog) -> None:
    """Without its span the collective's block of 16001 carries our label and counts as ours; without the label it is
    another thread's."""
    ours = by_category(read_history(replace(log, backend=[])))
    assert Category.BACKEND_COPY not in ours
    entries = [
        {**entry, "user_metadata": ""} if "reduce grad" in entry["user_metadata"] else entry for entry in log.entries
    ]
    theirs = by_category(read_history(replace(log, backend=[], entries=entries)))
    assert theirs[Category.BACKEND_COPY] == [16001, -16001]
