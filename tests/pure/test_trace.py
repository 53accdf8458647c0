"""Trace: totals derived from events, the checks, and JSON there and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from zeroviz.collectives import CollectiveOp
from zeroviz.errors import TraceError
from zeroviz.models import PRESETS
from zeroviz.spec import RunSpec
from zeroviz.trace import AllocatorReading, Category, Collective, Event, Origin, RankTrace, Trace, merge

SPEC = RunSpec(model=PRESETS["tiny"], ranks=2)
REST = {Category.SHARDED_PARAM: 100, Category.OPTIMIZER_STATE: 200}


def event(op: str, category: Category, nbytes: int) -> Event:
    return Event("forward", op, "block 0", category, nbytes)


STEP = (
    event("unshard", Category.UNSHARDED_PARAM, 200),
    event("forward", Category.ACTIVATION, 50),
    event("reshard", Category.UNSHARDED_PARAM, -200),
    event("unshard", Category.UNSHARDED_PARAM, 200),
    event("backward", Category.ACTIVATION, -50),
    event("reshard", Category.UNSHARDED_PARAM, -200),
)
CALLS = tuple(Collective(CollectiveOp.ALL_GATHER, "fp32", 2, 200, "forward", "block 0") for _ in range(2))


def rank_of(rank: int = 0, events: tuple[Event, ...] = STEP) -> RankTrace:
    return RankTrace(
        rank=rank,
        rest=REST,
        events=events,
        collectives=CALLS,
        padding_nbytes=4,
        step_counter_nbytes=8,
        allocator=AllocatorReading(308, 560, "allocator", 6, num_hidden_frees=1, num_late=2, late_ns=3_000),
        losses=(5.5, 5.25),
        step_time_ns=(1_000, 2_000),
    )


TRACE = Trace(Origin.LIVE, SPEC, (rank_of(0), rank_of(1)), {"torch": "2", "nested": {"cores": 2}}, ("a note",))


def test_totals_are_derived_from_events() -> None:
    rank = rank_of()
    assert rank.rest_nbytes == 300
    peak = rank.peak()
    # 100 + 200 at rest, + 200 gathered, + 50 saved; first reached at the first forward, then at the second unshard.
    assert (peak.total, peak.phase, peak.op, peak.unit) == (550, "forward", "forward", "block 0")
    assert sum(peak.by_category.values()) == 550
    assert peak.by_category[Category.UNSHARDED_PARAM] == 200


def test_wire_totals_use_the_ring_factor_of_the_sum() -> None:
    (total,) = rank_of().wire()
    # Two all-gathers of 200 bytes over 2 ranks: 400 in all, (2-1)/2 of it sent.
    assert (total.op, total.count, total.payload_nbytes, total.sent_nbytes) == (CollectiveOp.ALL_GATHER, 2, 400, 200)
    assert rank_of().sent_nbytes == 200


def test_the_peak_is_the_devices_and_the_machine_peak_everything() -> None:
    """A kernel borrows 70 in forward, gloo clones 300 in the second gather, and 40 lie on the host all along."""
    rest = {**REST, Category.HOST_OPTIMIZER_STATE: 40}
    events = (
        *STEP[:2],
        event("forward", Category.KERNEL_SCRATCH, 70),
        event("forward", Category.KERNEL_SCRATCH, -70),
        *STEP[2:4],
        event("unshard", Category.BACKEND_COPY, 300),
        event("unshard", Category.BACKEND_COPY, -300),
        *STEP[4:],
    )
    rank = replace(rank_of(events=events), rest=rest)
    assert rank.rest_nbytes == 300 and rank.at_rest_on_host == {Category.HOST_OPTIMIZER_STATE: 40}
    assert rank.peak() == rank_of().peak()
    peak = rank.machine_peak()
    # 300 + 40 at rest, 200 gathered, 50 saved, 300 cloned; and the step counters' 8.
    assert (peak.total, peak.op) == (300 + 40 + 200 + 50 + 300 + 8, "unshard")
    assert peak.by_category[Category.BACKEND_COPY] == 300
    assert sum(peak.by_category.values()) + rank.step_counter_nbytes == peak.total
    rank.check()
    # Two ranks may share events and rest and differ in their counters.
    assert replace(rank, step_counter_nbytes=0).machine_peak().total == peak.total - 8


def test_a_step_that_allocates_nothing_peaks_at_rest() -> None:
    peak = rank_of(events=()).peak()
    assert (peak.total, peak.phase, peak.op) == (300, "at rest", "")


def test_check_catches_what_was_freed_twice() -> None:
    twice = (*STEP, event("reshard", Category.UNSHARDED_PARAM, -1))
    with pytest.raises(TraceError, match=r"event 6 .*UNSHARDED_PARAM falls to -1 bytes; more was freed than allocated"):
        rank_of(events=twice).check()


def test_check_catches_what_is_left_over() -> None:
    with pytest.raises(TraceError, match=r"does not end at rest; left over \{'UNSHARDED_PARAM': 200\}"):
        rank_of(events=STEP[:-1]).check()


def test_a_measured_leak_is_no_nonsense() -> None:
    """What a real step leaves is for the comparison to name; what cannot be true is refused from anybody."""
    leaks = [rank_of(0, STEP[:-1]), rank_of(1)]
    assert merge(Origin.LIVE, SPEC, leaks).ranks[0].leftover() == {Category.UNSHARDED_PARAM: 200}
    for origin in (Origin.PREDICTED, Origin.REHEARSED):
        with pytest.raises(TraceError, match="does not end at rest"):
            merge(origin, SPEC, leaks)
    twice = (*STEP, event("reshard", Category.UNSHARDED_PARAM, -1))
    with pytest.raises(TraceError, match="more was freed than allocated"):
        merge(Origin.LIVE, SPEC, [rank_of(0, twice), rank_of(1)])


def test_what_nobody_accounts_for_may_go_below_nothing() -> None:
    """A jump of the allocator's total that no block explains may be one down."""
    jump = (event("forward", Category.UNATTRIBUTED, -5), *STEP, event("forward", Category.UNATTRIBUTED, 5))
    rank_of(events=jump).check()


def test_a_note_of_several_ranks_stands_once() -> None:
    trace = merge(Origin.LIVE, SPEC, [rank_of(0), rank_of(1)], notes=["one", "two", "one"])
    assert trace.notes == ("one", "two")


def test_check_catches_missing_ranks() -> None:
    with pytest.raises(TraceError, match="A trace of 2 ranks holds ranks"):
        merge(Origin.LIVE, SPEC, [rank_of(0), rank_of(0)])
    assert [rank.rank for rank in merge(Origin.LIVE, SPEC, [rank_of(1), rank_of(0)]).ranks] == [0, 1]


def test_json_there_and_back() -> None:
    assert Trace.from_json(TRACE.to_json()) == TRACE
    assert Trace.from_json(TRACE.to_json()).report() == TRACE.report()


def test_a_reading_of_an_older_file_is_read() -> None:
    data = json.loads(TRACE.to_json())
    for rank in data["ranks"]:
        rank["allocator"] = [308, 560, "allocator"]
    assert Trace.from_json(json.dumps(data)).ranks[0].allocator == AllocatorReading(308, 560, "allocator")


def test_json_cut_in_half_is_refused() -> None:
    text = TRACE.to_json()
    with pytest.raises(TraceError, match="not whole JSON"):
        Trace.from_json(text[: len(text) // 2])


@pytest.mark.parametrize("schema", ["zeroviz.trace/2", "zeroviz.report/1", None, 3])
def test_another_schema_is_refused_by_name(schema: object) -> None:
    data = {**json.loads(TRACE.to_json()), "schema": schema}
    with pytest.raises(TraceError, match=r"this version reads 'zeroviz\.trace/1'"):
        Trace.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"zeroviz.trace/1"'])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(TraceError):
        Trace.from_json(text)


@pytest.mark.parametrize("field", ["origin", "spec", "ranks", "environment", "notes"])
def test_a_lost_field_is_refused(field: str) -> None:
    data = json.loads(TRACE.to_json())
    del data[field]
    with pytest.raises(TraceError, match="lacks or garbles"):
        Trace.from_json(json.dumps(data))


def test_garbled_ranks_are_refused() -> None:
    data = json.loads(TRACE.to_json())
    for garbled in (
        3,
        [3],
        [{}],
        [{**data["ranks"][0], "rest": {"NO_SUCH": 1}}],
        [{**data["ranks"][0], "events": [[1]]}],
        [{**data["ranks"][0], "allocator": {"rest_nbytes": 1}}],
        [{**data["ranks"][0], "allocator": [1, 2]}],
        [{**data["ranks"][0], "allocator": {**data["ranks"][0]["allocator"], "peak_nbytes": "many"}}],
    ):
        with pytest.raises(TraceError, match="lacks or garbles"):
            Trace.from_json(json.dumps({**data, "ranks": garbled}))


def test_report_has_the_documented_form() -> None:
    report = TRACE.report()
    assert report["schema"] == "zeroviz.report/1"
    assert report["origin"] == "live"
    assert report["model"]["num_params"] == SPEC.model.num_params
    rank = report["ranks"][1]
    assert rank["rank"] == 1
    assert rank["at_rest"]["by_category"] == {"SHARDED_PARAM": 100, "OPTIMIZER_STATE": 200}
    assert rank["at_rest"]["total"] == 300
    assert rank["peak"]["total"] == 550
    assert rank["wire"]["sent_nbytes"] == 200
    assert rank["machine_peak"]["total"] == 558  # and the step counters' 8
    assert rank["at_rest"]["on_host"] == {}
    assert rank["allocator"]["peak_nbytes"] == 560
    assert rank["allocator"]["num_hidden_frees"] == 1 and rank["allocator"]["unattributed_nbytes"] == 0
    assert rank["losses"] == [5.5, 5.25]
    json.dumps(report)


def test_categories_that_hold_nothing_are_left_out() -> None:
    rank = replace(rank_of(), rest={**REST, Category.MASTER_PARAM: 0})
    assert Category.MASTER_PARAM not in rank.at_rest


def test_a_loss_that_is_no_number_is_null_in_json() -> None:
    """JSON has no NaN and no infinity; a program that reads the report must be able to."""
    diverged = replace(TRACE, ranks=tuple(replace(rank, losses=(5.5, float("nan"))) for rank in TRACE.ranks))
    text = json.dumps(diverged.report(), allow_nan=False)
    assert json.loads(text)["ranks"][0]["losses"] == [5.5, None]
    assert str(Trace.from_json(diverged.to_json()).ranks[0].losses) == "(5.5, nan)"
