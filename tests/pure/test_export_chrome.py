"""The step for a trace viewer: what both viewers read is what the trace holds and sends; the file stays small."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest

from tests.pure.exported import (
    CALL,
    HYBRID,
    LLAMA,
    MANY,
    MORE,
    PAIRED,
    RANK,
    SPEC,
    STEP,
    TINY,
    live,
    name,
    trace,
)
from zeroviz.collectives import CollectiveOp
from zeroviz.compare import maxima
from zeroviz.course import OpSpan
from zeroviz.export import chrome_trace
from zeroviz.export_calls import moments_of
from zeroviz.export_chrome import MAX_PROCESSES, distinct_steps, kept
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.series import Series
from zeroviz.spec import (
    Implementation,
    Offload,
    Precision,
    RunSpec,
    Strategy,
)

Record = dict[str, Any]
TWO_MB = 2_000_000


def records_of(text: str) -> list[Record]:
    document = json.loads(text)
    assert list(document) == ["displayTimeUnit", "otherData", "traceEvents"]
    assert document["displayTimeUnit"] in ("ms", "ns")
    records: list[Record] = document["traceEvents"]
    return records


def notes_of(text: str) -> list[str]:
    notes: list[str] = json.loads(text)["otherData"]["notes"]
    return notes


def samples_of(records: list[Record], pid: int, counter: str) -> list[tuple[int, dict[str, int]]]:
    """(ts, every series) of a counter, as both viewers read it. chrome://tracing takes the series from the first sample
    and what a later one lacks as 0; Perfetto takes it as it was. Both must come to the same."""
    found: list[tuple[int, dict[str, int]]] = []
    kept_as_it_was: dict[str, int] = {}
    for record in records:
        if record["ph"] == "C" and (record["pid"], record["name"]) == (pid, counter):
            args = record["args"]
            assert args and (not found or set(args) <= set(kept_as_it_was))
            kept_as_it_was |= args
            assert {series: args.get(series, 0) for series in kept_as_it_was} == kept_as_it_was
            found.append((record["ts"], dict(kept_as_it_was)))
    return found


def test_a_step_by_hand_as_counters() -> None:
    """Four changes are moments 1 to 4 after the rest; the last sample says once more how it ends."""
    records = records_of(chrome_trace(trace(RANK, RANK, RANK)))
    rest = {"SHARDED_PARAM": 101, "UNSHARDED_PARAM": 0, "OPTIMIZER_STATE": 203, "ACTIVATION": 0}
    assert samples_of(records, 10, "held") == [
        (0, rest),
        (1, rest | {"UNSHARDED_PARAM": 199}),
        (2, rest | {"UNSHARDED_PARAM": 199, "ACTIVATION": 57}),
        (3, rest | {"UNSHARDED_PARAM": 199}),
        (4, rest),
        (5, rest),
    ]
    assert [values["bytes"] for _, values in samples_of(records, 10, "held, sum")] == [304, 503, 560, 503, 304, 304]
    slices = [(each["name"], each["cat"], each["ts"], each["dur"]) for each in records if each["ph"] == "X"]
    assert slices == [
        ("forward", "phase", 1, 2), ("unshard block 0", "op", 1, 1), ("forward block 0", "op", 2, 1),
        ("backward", "phase", 3, 2), ("backward block 0", "op", 3, 1), ("reshard block 0", "op", 4, 1),
    ]  # fmt: skip
    (call,) = [each for each in records if each["ph"] == "i"]
    assert (call["name"], call["ts"], call["s"]) == ("all_gather fp32", 1, "t")
    assert call["args"] == {
        "phase": "forward", "unit": "block 0", "payload_nbytes": 199, "sent_nbytes": 133, "num_ranks": 3,
    }  # fmt: skip
    assert [each["args"]["name"] for each in records if each["name"] == "process_name"] == ["ranks 0-2"]


@pytest.mark.parametrize("spec", PAIRED, ids=name)
def test_counters_reach_exactly_the_peak_and_ops_what_is_held_in_them(spec: RunSpec) -> None:
    predicted = predict(spec)
    text = chrome_trace(predicted)
    records = records_of(text)
    steps = distinct_steps(predicted)
    assert {each["pid"] for each in records} == {10 * number for number in range(1, len(steps) + 1)}
    for number, step in enumerate(steps, 1):
        pid, rank = 10 * number, step.first
        samples = samples_of(records, pid, "held")
        assert max(sum(values.values()) for _, values in samples) == rank.peak().total
        assert [(ts, sum(values.values())) for ts, values in samples] == [
            (ts, values["bytes"]) for ts, values in samples_of(records, pid, "held, sum")
        ]
        assert {series: nbytes for series, nbytes in samples[0][1].items() if nbytes} == {
            category.value: nbytes for category, nbytes in rank.at_rest.items()
        }
        host = samples_of(records, pid, "on the host")
        assert bool(host) == (spec.offload is not Offload.NONE)
        if host:
            assert sum(host[0][1].values()) == sum(rank.at_rest_on_host.values())
        slices = [each for each in records if each["ph"] == "X" and each["pid"] == pid]
        ops = [each["args"] for each in slices if each["cat"] == "op"]
        reached = [(a["phase"], a["op"], a["unit"], a["most_nbytes"], a["end_nbytes"]) for a in ops]
        # `maxima` leaves out what does nothing to the device, and joins what it parts.
        assert [place for place in maxima(rank) if place not in reached] == []
    assert notes_of(text) == list(predicted.notes)


@pytest.mark.parametrize("spec", PAIRED, ids=name)
def test_records_are_what_the_format_asks_for(spec: RunSpec) -> None:
    """Each kind has its fields; slices of a thread nest; no thread of two processes has one number."""
    fields = {"M": set(), "C": {"ts"}, "X": {"ts", "dur", "cat"}, "i": {"ts", "s"}}
    threads: dict[int, int] = {}
    phases: dict[int, tuple[int, int]] = {}
    for record in records_of(chrome_trace(predict(spec))):
        assert set(record) == {"ph", "name", "pid", "tid", "args"} | fields[record["ph"]]
        assert threads.setdefault(record["tid"], record["pid"]) == record["pid"]
        if record["ph"] == "X":
            start, stop = record["ts"], record["ts"] + record["dur"]
            if record["cat"] == "phase":
                assert start >= phases.get(record["tid"], (0, 0))[1]
                phases[record["tid"]] = start, stop
            low, high = phases[record["tid"]]
            assert low <= start <= stop <= high


@pytest.mark.parametrize("spec", PAIRED, ids=name)
def test_what_is_sent_and_copied_is_there_call_by_call(spec: RunSpec) -> None:
    predicted = predict(spec)
    records = records_of(chrome_trace(predicted))
    rank = predicted.ranks[0]
    calls = [each for each in records if each["ph"] == "i" and each["pid"] == 10]
    payloads, counts = Counter[str](), Counter[str]()
    for call in calls:
        payloads[call["name"]] += call["args"].get("payload_nbytes", call["args"].get("nbytes", 0))
        counts[call["name"]] += 1
    totals = {total.label: total for total in rank.wire()}
    assert {label: total.payload_nbytes for label, total in totals.items()} == {each: payloads[each] for each in totals}
    assert {label: total.count for label, total in totals.items()} == {each: counts[each] for each in totals}
    copied = sum(nbytes for label, nbytes in payloads.items() if label not in totals)
    assert copied == sum(transfer.nbytes for transfer in rank.transfers)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_gather_stands_at_the_op_that_starts_it(accumulation: int) -> None:
    """Of ZeRO-3 every gather has an unshard and every reduction a reduce grad, of its unit and phase, in order."""
    spec = RunSpec(model=LLAMA, ranks=3, accumulation=accumulation)
    records = records_of(chrome_trace(predict(spec)))
    ops, calls = defaultdict(list), defaultdict(list)
    for record in records:
        args = record["args"]
        if record["ph"] == "X" and record["cat"] == "op":
            ops[args["op"], args["phase"], args["unit"]].append(record["ts"])
        elif record["ph"] == "i":
            op = "unshard" if "gather" in record["name"] else "reduce grad"
            calls[op, args["phase"], args["unit"]].append(record["ts"])
    assert calls == {place: starts for place, starts in ops.items() if place[0] in ("unshard", "reduce grad")}


def test_where_calls_stand_by_hand() -> None:
    """Two gathers of one unit and two unshards: one each. Three reductions in one op of six moments: two apart. A unit
    whose ops change nothing stands with the call before it."""

    def op(label: str, unit: str, start: int, stop: int, phase: str = "backward") -> OpSpan:
        return OpSpan(phase, label, unit, start, stop, 0, 0, 0)

    ops = [
        op("unshard", "a", 1, 2),
        op("backward", "a", 2, 9),
        op("unshard", "a", 9, 10),
        op("reduce grad", "b", 10, 16),
    ]
    gather = CALL._replace(phase="backward", unit="a")
    reduction = CALL._replace(op=CollectiveOp.REDUCE_SCATTER, phase="backward", unit="b")
    lost = gather._replace(unit="c")
    assert moments_of([gather, lost, gather, *[reduction] * 3, lost], ops) == [1, 1, 9, 10, 12, 14, 14]
    assert moments_of([lost], []) == [0]


def test_moments_that_are_kept_have_the_peak_of_each_stretch() -> None:
    """Ten moments, five kept: the first, the last, and of 0-2, 3-5 and 6-9 the most, the first of equals."""
    series = Series(4, [1], [0], [(1, 9, 2, 8, 8, 1, 7, 3, 5)])
    assert list(series) == [4, 1, 9, 2, 8, 8, 1, 7, 3, 5]
    assert kept(series, 5) == [0, 2, 4, 7, 9]
    assert kept(series, 10) == list(range(10))


BIG = RunSpec(model=PRESETS["llama3-70b"], ranks=MANY, precision=Precision.BF16_MIXED, seq=4096)


@pytest.mark.parametrize(
    "spec",
    [
        BIG,
        replace(BIG, accumulation=64, offload=Offload.OPTIMIZER),
        RunSpec(model=PRESETS["llama3-8b"], impl=Implementation.MEGATRON, strategy=Strategy.MEGATRON_OPTIM, ranks=MANY),
        RunSpec(model=TINY, impl=Implementation.FSDP2, strategy=Strategy.HYBRID_SHARD, ranks=MANY, shard_ranks=512),
        replace(HYBRID, ranks=MANY, shard_ranks=512),
    ],
    ids=name,
)
def test_a_file_stays_small_and_loses_no_peak(spec: RunSpec) -> None:
    """4,096 ranks, a 70B model, 64 micro-batches, or hundreds of steps that differ: under 2 MB, and it is said what is
    not there. Each process reaches the peak of its ranks, and the highest is among them."""
    predicted = predict(spec)
    text = chrome_trace(predicted)
    assert len(text) < TWO_MB
    records = records_of(text)
    pids = {each["pid"] for each in records}
    assert len(pids) <= MAX_PROCESSES
    steps = distinct_steps(predicted)
    peaks = {step.first.peak().total for step in steps}
    reached = {pid: max(sum(values.values()) for _, values in samples_of(records, pid, "held")) for pid in pids}
    assert set(reached.values()) <= peaks and max(reached.values()) == max(peaks)
    if len(pids) < len(steps):
        assert notes_of(text)[-1].startswith(f"Of {len(steps):,} steps that differ {len(pids)} are here")
    else:
        assert set(reached.values()) == peaks
        assert sum(len(ranks) for step in steps for ranks in step.stretches) == MANY
    full = sum(len(step.first.events) for step in steps) < 3000
    assert bool(notes_of(text)) != full
    slices = [each for each in records if each["ph"] == "X"]
    for category in ("phase", "op"):  # folded or not, a slice has the most of what is in it
        mosts = [(each["pid"], each["args"]["most_nbytes"]) for each in slices if each["cat"] == category]
        assert {pid: max(most for of, most in mosts if of == pid) for pid in pids} == reached
    for total in steps[0].first.wire():  # folded or not, no byte is lost
        calls = [each["args"] for each in records if (each["ph"], each["pid"], each["name"]) == ("i", 10, total.label)]
        assert sum(each["payload_nbytes"] for each in calls) == total.payload_nbytes
        assert sum(each.get("calls", 1) for each in calls) == total.count


def test_what_the_axis_means_is_said() -> None:
    other = json.loads(chrome_trace(predict(SPEC)))["otherData"]
    assert "one microsecond is one change" in other["clock"]
    assert (other["title"], other["origin"]) == ("ZeRO-3 on 3 ranks, fp32", "predicted")
    assert RunSpec.from_dict(other["spec"]) == SPEC


def test_ranks_of_a_run_are_told_apart_by_what_they_did() -> None:
    """Ranks by themselves, not known to be alike. Two did the same, one gathered twice, one holds more; losses and
    padding tell nothing."""
    same = replace(RANK, events=list(STEP), losses=(2.0,), padding_nbytes=4)
    twice = replace(RANK, collectives=(CALL, CALL))
    found = distinct_steps(live(replace(RANK, losses=(1.0,)), twice, same, MORE))
    assert [step.label for step in found] == ["ranks 0, 2", "rank 1", "rank 3"]


def test_of_very_many_steps_the_one_that_peaks_highest_is_there() -> None:
    """A hundred ranks that keep 57, 58, ... bytes, number 40 a thousand more. Of a hundred steps fifteen are evenly
    from first to last, one in seven, and 40 is none of these."""
    ranks = []
    for number in range(100):
        nbytes = 57 + number + (1000 if number == 40 else 0)
        step = (STEP[0], STEP[1]._replace(delta_nbytes=nbytes), STEP[2]._replace(delta_nbytes=-nbytes), STEP[3])
        ranks.append(replace(RANK, events=step))
    text = chrome_trace(live(*ranks))
    names = [each["args"]["name"] for each in records_of(text) if each["name"] == "process_name"]
    assert names == [f"rank {number}" for number in sorted({40, *(number * 99 // 14 for number in range(15))})]
    assert notes_of(text) == [
        "Of 100 steps that differ 16 are here, the one that peaks highest among them; the names of the processes say "
        "whose they are."
    ]


def test_a_name_with_very_many_ranks_is_cut_short() -> None:
    """Every other rank of a hundred: eight are named."""
    text = chrome_trace(live(*[RANK, MORE] * 50))
    names = [each["args"]["name"] for each in records_of(text) if each["name"] == "process_name"]
    assert names[0] == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 42 stretches more"
