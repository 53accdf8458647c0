"""The residual table: every category, sums that are sums, and what nobody can explain as a line of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.every import settings_of
from zeroviz.category import Category
from zeroviz.compare import UNEXPLAINED, compare
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.residuals import Held, Residual, alone, op_notes, residuals, senders
from zeroviz.spec import Offload, Precision, RunSpec, Strategy
from zeroviz.tables_live import render_live
from zeroviz.trace import AllocatorReading, Event, Origin, RankTrace, Trace


def spec_of(**fields: Any) -> RunSpec:
    return RunSpec(**{"model": PRESETS["tiny"], "ranks": 3, **fields})


def as_run(trace: Trace, *extra: Event, rank: int = 0) -> Trace:
    """The trace as a gloo run would have it, read event by event; `extra` events come first in rank's first backward
    and are undone by the step's last event."""
    ranks = list(trace.ranks)
    for number, seen in enumerate(ranks):
        events = tuple(seen.events)
        if number == rank and extra:
            place = next(i for i, event in enumerate(events) if event.op == "backward")
            undone = [e._replace(delta_nbytes=-e.delta_nbytes) for e in extra]
            last = events[-1]
            undone = [event._replace(phase=last.phase, op=last.op, unit=last.unit) for event in undone]
            events = (*events[:place], *extra, *events[place:], *undone)
        changed = replace(seen, events=events)
        rest = sum(changed.rest.values()) + changed.step_counter_nbytes
        reading = AllocatorReading(rest, changed.machine_peak().total, "a test", num_events=len(events))
        ranks[number] = replace(changed, allocator=reading)
    return replace(
        trace, origin=Origin.LIVE, ranks=tuple(ranks), environment={"backend": "gloo", "devices": ["cpu"] * len(ranks)}
    )


def tables(predicted: Trace, measured: Trace, rank: int = 0) -> dict[Held, Residual]:
    seen = measured.ranks[rank]
    return {r.held: r for r in residuals(compare(predicted, measured), rank, seen.step_counter_nbytes)}


def first_backward(rank: RankTrace, category: Category, nbytes: int) -> Event:
    event = next(event for event in rank.events if event.op == "backward")
    return event._replace(category=category, delta_nbytes=nbytes)


@pytest.mark.parametrize("offload", Offload)
@pytest.mark.parametrize("strategy", [Strategy.ZERO3, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD])
def test_a_run_as_predicted_leaves_nothing_over(strategy: Strategy, offload: Offload) -> None:
    predicted = predict(spec_of(offload=offload, **settings_of(strategy, spec_of().ranks)))
    rank = predicted.ranks[0]
    found = tables(predicted, as_run(predicted))
    wanted = {Held.REST, Held.NCCL, Held.HERE} | ({Held.HOST} if offload.moves_optimizer else set())
    assert set(found) == wanted
    for held, residual in found.items():
        assert residual.total.difference == residual.unexplained_nbytes == 0 and not residual.causes
        sums = sum(row.predicted for row in residual.rows), sum(row.measured for row in residual.rows)
        counters = residual.step_counter_nbytes
        assert (residual.total.predicted, residual.total.measured) == (sums[0] + counters, sums[1] + counters)
        assert counters == (rank.step_counter_nbytes if held is Held.HERE else 0)
    assert found[Held.REST].total.measured == rank.rest_nbytes
    assert found[Held.NCCL].total.measured == rank.peak().total
    assert found[Held.HERE].total.measured == rank.machine_peak().total
    if Held.HOST in found:
        assert {row.category: row.measured for row in found[Held.HOST].rows} == rank.at_rest_on_host
    assert all(row.category and row.category.on_device for row in (*found[Held.REST].rows, *found[Held.NCCL].rows))


def test_what_nobody_predicted_is_unexplained_on_nccl_and_here() -> None:
    predicted = predict(spec_of())
    leak = first_backward(predicted.ranks[0], Category.TEMPORARY, 36)
    found = tables(predicted, as_run(predicted, leak))
    for held in (Held.NCCL, Held.HERE):
        assert found[held].unexplained_nbytes == 36
        ((cause, rows),) = found[held].causes
        assert cause.startswith(UNEXPLAINED) and [row.category for row in rows] == [Category.TEMPORARY]
    assert found[Held.REST].unexplained_nbytes == 0
    untouched = tables(predicted, as_run(predicted, leak), rank=1)
    assert all(residual.unexplained_nbytes == 0 for residual in untouched.values())


def test_a_copy_of_the_backend_counts_here_and_not_on_nccl() -> None:
    predicted = predict(spec_of())
    copy = first_backward(predicted.ranks[0], Category.BACKEND_COPY, 10_000_000)
    found = tables(predicted, as_run(predicted, copy))
    assert found[Held.NCCL].total.difference == 0 and found[Held.HERE].total.difference > 0


def test_ops_are_folded_by_cause_with_the_first_place() -> None:
    predicted = predict(spec_of())
    leak = first_backward(predicted.ranks[1], Category.UNSHARDED_GRAD, 500)
    comparison = compare(predicted, as_run(predicted, leak, rank=1))
    assert op_notes(comparison, 0) == ()
    notes = op_notes(comparison, 1)
    assert sum(note.num_ops for note in notes) == len(comparison.ops_of(1))
    assert notes[0].cause.startswith(UNEXPLAINED) and abs(notes[0].largest) == 500
    first = comparison.ops_of(1)[0]
    assert first.op in notes[0].place and first.unit in notes[0].place


@pytest.mark.parametrize("offload", Offload)
def test_a_trace_alone_has_the_rows_of_a_comparison_with_itself(offload: Offload) -> None:
    trace = predict(spec_of(offload=offload, precision=Precision.BF16_MIXED))
    ours, theirs = alone(trace, [(rank,) for rank in range(3)]), compare(trace, trace)
    assert ours.memory == theirs.memory and ours.wire == theirs.wire
    folded = alone(trace, [(0, 1, 2)], senders(trace))
    assert {row.rank for row in folded.memory} == {row.rank for row in folded.wire} == {0}
    assert senders(trace) == {0: (0, 1, 2)} and folded.link == alone(trace, [(0,)]).link


def test_the_live_report_has_both_peaks_unexplained_lines_and_what_is_outside() -> None:
    predicted = predict(spec_of(offload=Offload.OPTIMIZER))
    leak = first_backward(predicted.ranks[0], Category.TEMPORARY, 36)
    text = render_live(predicted, as_run(predicted, leak))
    assert max(map(len, text.splitlines())) <= 80 and text.isascii()
    assert "%" not in text.partition("AT REST")[2] and "RSS" not in text
    for title in ("AT REST, ", "AT REST ON THE HOST, ", "PEAK AS ON NCCL, ", "PEAK AS HERE, ", "THE STEP, "):
        assert f"{title}rank 0" in text and f"{title}ranks 1-2" in text
    # Rank 0 and the two others: at rest, on the host, both peaks, and on the wire.
    lines = [line.split() for line in text.splitlines() if line.startswith("  unexplained ")]
    assert [line[1] for line in lines] == ["0", "0", "36", "36", "0", "0", "0", "0", "0", "0"]
    assert "TEMPORARY: unexplained" in text and "NOT AS PREDICTED" in text
    assert "Outside torch's allocator" in text


def test_the_allocators_table_folds_ranks_that_rest_alike_and_no_others() -> None:
    """Rank 1 rests lower and grows by the same: both figures at rest are its own, so it has a table of its own."""
    predicted = predict(spec_of(ranks=3))
    run = as_run(predicted)
    less = 40

    def lower(rank: RankTrace) -> RankTrace:
        assert rank.allocator is not None
        reading = replace(
            rank.allocator,
            rest_nbytes=rank.allocator.rest_nbytes - less,
            peak_nbytes=rank.allocator.peak_nbytes - less,
        )
        held = rank.rest[Category.OPTIMIZER_STATE] - less
        return replace(rank, rest={**rank.rest, Category.OPTIMIZER_STATE: held}, allocator=reading)

    ranks = tuple(lower(rank) if rank.rank == 1 else rank for rank in run.ranks)
    text = render_live(predicted, replace(run, ranks=ranks))
    tables = {part.splitlines()[0].split("  ")[0]: part for part in text.split("ALLOCATOR, ")[1:]}
    assert list(tables) == ["ranks 0, 2", "rank 1"]
    for label, rank in (("ranks 0, 2", run.ranks[0]), ("rank 1", ranks[1])):
        assert f"{sum(rank.rest.values()):,}" in tables[label].splitlines()[1]
    assert "ALLOCATOR, each rank" in render_live(predicted, run)


@pytest.mark.parametrize("offload", Offload)
def test_as_here_says_that_host_and_device_are_one_memory_where_anything_is_offloaded(offload: Offload) -> None:
    predicted = predict(spec_of(ranks=2, offload=offload))
    run = as_run(predicted)
    said = [held for held, table in tables(predicted, run).items() if table.joins_host]
    assert said == ([] if offload is Offload.NONE else [Held.HERE])
    assert render_live(predicted, run).count("host and device are one memory here") == len(said)
