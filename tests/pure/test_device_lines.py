"""The lines beside a step on a GPU: a ladder whose rungs add up, in no sum over categories, there and back in JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

import pytest

from zeroviz.causes import AWAITING, STEP_COUNTERS, UNEXPLAINED, WORKSPACES
from zeroviz.columns import WIDTH
from zeroviz.compare import compare
from zeroviz.device_lines import DeviceLines
from zeroviz.errors import TraceError
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy
from zeroviz.tables_device import device_section
from zeroviz.trace import AllocatorReading, Origin, RankTrace, Trace

MIB = 2**20
# Two tensors of 4001 and 7000 B (blocks of 4096 and 7168), 8 MiB of cuBLAS, 100 B of somebody (a block of 512);
# 700 B (1024) await another stream; one segment of 2 MiB and one of 20 MiB; the context has 400 MB.
LINES = DeviceLines(
    requested_nbytes=4001 + 7000 + 8 * MIB + 100,
    rounding_nbytes=(4096 + 7168 + 8 * MIB + 512) - (4001 + 7000 + 8 * MIB + 100),
    awaiting_nbytes=1024,
    cached_nbytes=22 * MIB - (4096 + 7168 + 8 * MIB + 512) - 1024,
    outside_nbytes=400_000_000,
    workspace_nbytes=8 * MIB,
    unnamed_nbytes=100,
    peak_reserved_nbytes=42 * MIB,
    peak_awaiting_nbytes=0,
)


def trace(*lines: DeviceLines | None) -> Trace:
    """A trace of as many ranks as lines, ZeRO-3 on the tiny model."""
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=len(lines), strategy=Strategy.ZERO3, seq=17))
    ranks = [replace(rank, device_lines=line) for rank, line in zip(predicted.ranks, lines, strict=True)]
    return replace(predicted, origin=Origin.LIVE, ranks=tuple(ranks))


def test_the_rungs_add_up() -> None:
    assert LINES.reserved_nbytes == 22 * MIB
    assert LINES.device_used_nbytes == 22 * MIB + 400_000_000


def test_they_are_in_no_sum() -> None:
    """A rank with lines rests and peaks at the very bytes it does without."""
    (bare,), (beside,) = trace(None).ranks, trace(LINES).ranks
    assert beside.rest_nbytes == bare.rest_nbytes
    assert beside.peak() == bare.peak()
    assert beside.machine_peak() == bare.machine_peak()


def test_they_go_through_json_and_into_the_report() -> None:
    faulty = replace(LINES, faults=("the history is truncated",))
    measured = trace(LINES, faulty, None)
    assert Trace.from_json(measured.to_json()).ranks == measured.ranks
    reported = [rank["device_lines"] for rank in json.loads(json.dumps(measured.report()))["ranks"]]
    assert reported[0]["cached_nbytes"] == LINES.cached_nbytes
    assert reported[1]["faults"] == ["the history is truncated"]
    assert reported[2] is None
    data = json.loads(measured.to_json())
    del data["ranks"][0]["device_lines"]["cached_nbytes"]
    with pytest.raises(TraceError, match="cached_nbytes"):
        Trace.from_json(json.dumps(data))


def test_a_trace_written_before_there_were_lines_has_none() -> None:
    data = json.loads(trace(LINES).to_json())
    del data["ranks"][0]["device_lines"]
    assert Trace.from_json(json.dumps(data)).ranks[0].device_lines is None


def test_14_asked_for_allocated_reserved_and_in_use_are_lines_of_their_own() -> None:
    assert device_section(trace(LINES)) == [
        "",
        "DEVICE AT REST, each rank        bytes      decimal       binary",
        "  asked for                  8,399,709      8.40 MB     8.01 MiB",
        "  + rounding to 512 B              675        675 B        675 B",
        "  + awaiting a stream            1,024      1.02 kB     1.00 KiB",
        "  + cached                  14,667,264     14.67 MB    13.99 MiB",
        "  = reserved                23,068,672     23.07 MB    22.00 MiB",
        "  + outside allocator      400,000,000    400.00 MB   381.47 MiB",
        "  = in use on device       423,068,672    423.07 MB   403.47 MiB",
        "  of what is asked for  8,388,608 B are cuBLAS's workspaces",
        "  of what is asked for  100 B have no name",
        "  during the step       at most 44,040,192 B reserved",
        "  outside allocator     the CUDA context, NCCL, and every other process on the",
        "                        device",
    ]


def reading(rank: RankTrace, *, outside: int, beyond: int) -> AllocatorReading:
    """An allocator that holds `outside` more at rest than the rank's categories and peaks `beyond` higher above it."""
    rest = rank.rest_nbytes + outside
    growth = max(accumulate((event.delta_nbytes for event in rank.events), initial=0)) + beyond
    return AllocatorReading(rest, rest + growth, "requested_bytes", num_events=len(rank.events))


@pytest.mark.parametrize(
    ("outside", "beyond", "outside_cause", "cause"),
    [
        (8 * MIB, 0, WORKSPACES, ""),
        (8 * MIB + 56, 0, f"{WORKSPACES}; {STEP_COUNTERS}", ""),
        (8 * MIB + 57, 0, UNEXPLAINED, ""),
        (0, 500, "", AWAITING),
        (0, 701, "", UNEXPLAINED),
        (0, -1, "", UNEXPLAINED),
    ],
)
def test_what_a_gpus_allocator_holds_besides_has_a_name(
    outside: int, beyond: int, outside_cause: str, cause: str
) -> None:
    """The step counters of 14 slices are 56 bytes; up to 700 bytes awaited another stream; else a byte is a finding."""
    predicted = trace(None)
    (rank,) = predicted.ranks
    lines = replace(LINES, peak_awaiting_nbytes=700)
    assert rank.step_counter_nbytes == 4 * (2 + 3 * 4)
    live = replace(rank, allocator=reading(rank, outside=outside, beyond=beyond), device_lines=lines)
    measured = replace(predicted, ranks=(live,), environment={"devices": ["cuda:0"], "backend": "none"})
    (row,) = compare(predicted, measured).allocator
    assert (row.outside_cause, row.cause) == (outside_cause, cause)
    assert (row.outside_nbytes, row.difference) == (outside, beyond)


def test_ranks_alike_share_a_table_and_faults_are_said() -> None:
    faulty = replace(LINES, peak_awaiting_nbytes=32002, faults=("the history is truncated: " + "word " * 30,))
    text = device_section(trace(LINES, faulty, LINES, None))
    assert [line for line in text if line.startswith("DEVICE")][1].startswith("DEVICE AT REST, rank 1")
    assert "DEVICE AT REST, ranks 0, 2" in text[1]
    assert "  during the step       at most 32,002 B awaiting another stream" in text
    assert any(line.startswith("  beware                the history is truncated") for line in text)
    assert all(len(line) <= WIDTH for line in text)
    assert device_section(trace(None, None)) == []
