"""The course of a step: moments, ops and columns against the trace, and two courses side by side."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate, pairwise, product
from random import Random

import pytest

from tests.every import pairs, settings_of
from zeroviz.course import Course, align, changing, columns, course_of, edges_of
from zeroviz.models import PRESETS, bare
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, UnitPolicy
from zeroviz.tables_step import MAX_OPS, NEIGHBOURS, step_table
from zeroviz.trace import Category, Event, RankTrace

GRID = [
    RunSpec(
        model=PRESETS[model],
        ranks=ranks,
        precision=precision,
        unit=UnitPolicy.parse(unit),
        **settings_of(strategy, ranks),
    )
    for model, (strategy, precision), ranks, unit in product(
        ("tiny", "tiny-llama"), pairs((Precision.FP32, Precision.BF16_FP32GRAD)), (1, 3), ("model", "block", "layer")
    )
]


def words(spec: RunSpec) -> str:
    return f"{spec.model.name} {spec.strategy.value} {spec.ranks} {spec.precision.value} {spec.unit}"


def rank_of(spec: RunSpec) -> RankTrace:
    return predict(spec).ranks[0]


def clean(rank: RankTrace) -> RankTrace:
    """The step without this machine's artefacts."""
    return replace(rank, events=tuple(event for event in rank.events if not event.category.is_artefact))


def with_artefacts(rank: RankTrace) -> RankTrace:
    """The clean step as gloo runs it: a copy of what is gathered within unshard, one within an op that else changes
    nothing, and scratch inside forward."""
    events: list[Event] = []
    for event in clean(rank).events:
        events.append(event)
        where, nbytes = event[:3], abs(event.delta_nbytes)
        if event.op == "unshard":
            events += [Event(*where, Category.BACKEND_COPY, nbytes), Event(*where, Category.BACKEND_COPY, -nbytes)]
            if event.phase == "backward":
                where = (event.phase, "wait unshard", event.unit)
                events += [Event(*where, Category.BACKEND_COPY, 12), Event(*where, Category.BACKEND_COPY, -12)]
        elif event.op == "forward":
            events += [Event(*where, Category.KERNEL_SCRATCH, 40), Event(*where, Category.KERNEL_SCRATCH, -40)]
    return replace(rank, events=tuple(events))


@pytest.mark.parametrize("spec", GRID, ids=words)
def test_a_course_is_the_trace_moment_by_moment(spec: RunSpec) -> None:
    rank = rank_of(spec)
    course = course_of(rank)
    assert course.events == clean(rank).events
    changes = (event.delta_nbytes for event in course.events)
    assert course.device == tuple(accumulate(changes, initial=rank.rest_nbytes))
    # Without offload nothing lies on the host. What is here peaks where all events together do.
    assert not any(course.host) and course.has_artefacts == (course.here != course.device)
    assert max(course.here) == max(accumulate((e.delta_nbytes for e in rank.events), initial=rank.rest_nbytes))
    peak = rank.peak()
    assert max(course.device) == peak.total
    assert course.peak_op.key == ((peak.phase, peak.op, peak.unit) if peak.op else ("", "", ""))
    (held,) = course.held([course.device.index(peak.total)])
    assert {category: nbytes for category, nbytes in held.items() if nbytes} == peak.by_category
    # Ops tile the moments after rest; one that makes artefacts only has none.
    assert [span.start for span in course.ops] == [1, *(span.stop for span in course.ops[:-1])]
    assert course.ops[-1].stop == len(course.device)
    for span in course.ops:
        assert {event[:3] for event in course.events[span.start - 1 : span.stop - 1]} <= {span.key}
        assert span.max_nbytes == max(course.device[span.start - 1 : span.stop]) <= span.max_here_nbytes
        assert span.end_nbytes == course.device[span.stop - 1]


@pytest.mark.parametrize("most", [1, 2, 7, 100, 10_000])
def test_columns_are_few_tile_the_step_and_lose_no_maximum(most: int) -> None:
    course = course_of(rank_of(RunSpec(model=PRESETS["tiny"], ranks=3)))
    start, stop = 5, len(course.device)
    edges = edges_of(start, stop, most)
    assert len(edges) == min(most, stop - start) and edges[0] == start
    first, *found = columns(course, [0, *edges, stop])
    assert first[:2] == (0, start)
    assert [low for low, _, _ in found] == [start, *(high for _, high, _ in found[:-1])] and found[-1][1] == stop
    for low, high, moment in found:
        assert low <= moment < high and course.device[moment] == max(course.device[low:high])
        assert moment == low or max(course.device[low:moment]) < course.device[moment]  # the first of equals
    assert max(course.device[moment] for _, _, moment in found) == max(course.device[start:stop])


def test_artefacts_are_here_and_never_on_the_device() -> None:
    rank = rank_of(RunSpec(model=PRESETS["tiny"], ranks=2))
    plain, course = course_of(clean(rank)), course_of(with_artefacts(rank))
    assert course.has_artefacts and course.device == plain.device == plain.here
    for span in course.ops:
        if span.op == "unshard":
            # The copy is as large as the buffer that is gathered, and stands beside it.
            copy = course.device[span.start] - course.device[span.start - 1]
            assert course.here[span.start] == span.max_here_nbytes == span.max_nbytes + copy
    copies = [span for span in course.ops if span.op == "wait unshard"]
    assert len(copies) == 4 and all(span.start == span.stop for span in copies)
    assert all(span.max_here_nbytes - span.max_nbytes == 12 for span in copies)


def test_what_lies_on_the_host_is_counted_apart() -> None:
    rank = rank_of(RunSpec(model=PRESETS["tiny"], ranks=2))
    held = rank.rest[Category.OPTIMIZER_STATE]
    rest = {**rank.rest, Category.OPTIMIZER_STATE: 0, Category.HOST_OPTIMIZER_STATE: held}
    step = Event("optimizer", "optimizer step", "root", Category.HOST_TEMPORARY, 36)
    away = replace(rank, rest=rest, events=(*rank.events, step, step._replace(delta_nbytes=-36)))
    course, plain = course_of(away), course_of(rank)
    assert len(course.device) == len(plain.device) + 2
    assert course.device[: len(plain.device)] == tuple(nbytes - held for nbytes in plain.device)
    assert max(course.host) == held + 36 and course.host[0] == course.host[-1] == held


def test_aligned_ops_pair_by_name_and_a_missing_one_is_flat() -> None:
    rank = rank_of(RunSpec(model=PRESETS["tiny"], ranks=2))
    ours, theirs = course_of(clean(rank)), course_of(with_artefacts(rank))
    pairs = align(ours, theirs)
    assert [left.key for left, _ in pairs] == [right.key for _, right in pairs]
    assert [right for _, right in pairs] == list(theirs.ops)
    assert [left for left, _ in pairs if left.stop > left.start] == list(ours.ops)
    flat = [(left, right) for left, right in pairs if left.stop == left.start]
    assert {left.op for left, _ in flat} == {"wait unshard"} and len(flat) == 4
    # Nothing changes in them but the copies, so the level is the measured step's too.
    assert all(left.max_nbytes == left.end_nbytes == right.end_nbytes == right.max_nbytes for left, right in flat)
    assert [(right, left) for left, right in pairs] == align(theirs, ours)


def test_one_op_more_here_and_there_never_shifts_a_micro_batch() -> None:
    """Micro-batches repeat their ops; where gloo's copies come apart from an op of their own is chance."""
    rank = rank_of(RunSpec(model=PRESETS["tiny"], ranks=2, accumulation=3))
    course = course_of(rank)
    copy = Event("backward", "wait sync", "block 1", Category.BACKEND_COPY, 12)
    cuts = [at for at, (one, two) in enumerate(pairwise(rank.events), 1) if one[:3] != two[:3]]
    for seed in range(20):
        places = sorted(Random(seed).sample(cuts, 8), reverse=True)
        events = list(rank.events)
        for at in places:
            events[at:at] = [copy, copy._replace(delta_nbytes=-12)]
        pairs = align(course, course_of(replace(rank, events=tuple(events))))
        both = changing(pairs)
        assert [ours for ours, _ in both] == [span for span in course.ops if span.stop > span.start]
        assert [ours for ours, _ in pairs if ours in course.ops] == list(course.ops)
        assert all(ours.key == theirs.key and ours.max_nbytes == theirs.max_nbytes for ours, theirs in both)


def test_a_longer_measured_op_shows_in_its_maximum() -> None:
    rank = rank_of(RunSpec(model=PRESETS["tiny"], ranks=2))
    place = next(i for i, event in enumerate(rank.events) if event.op == "backward" and event.unit == "block 1")
    leak = Event("backward", "backward", "block 1", Category.TEMPORARY, 4)
    events = (*rank.events[:place], leak, *rank.events[place:], leak._replace(delta_nbytes=-4, op="drop batch"))
    other = replace(rank, events=events)
    pairs = align(course_of(rank), course_of(other))
    assert {right.max_nbytes - left.max_nbytes for left, right in pairs} == {0, 4}
    first = next(left for left, right in pairs if right.max_nbytes != left.max_nbytes)
    assert (first.op, first.unit) == ("backward", "block 1")


# ---- the text twin ----


@pytest.mark.parametrize("spec", GRID[::5], ids=words)
def test_the_table_says_each_phases_most_and_marks_the_peak(spec: RunSpec) -> None:
    rank = rank_of(spec)
    course = course_of(rank)
    lines = step_table("each rank", rank)
    assert max(map(len, lines)) <= 80
    cells = [re.split(r" {2,}", line[2:]) for line in lines[1:]]
    figures = {label: figure[0] for label, *figure in cells if figure}
    if len(course.ops) > MAX_OPS:
        for phase in ("forward", "backward", "optimizer"):
            assert figures[phase] == f"{max(span.max_nbytes for span in course.ops if span.phase == phase):,}"
        assert len(lines) <= 1 + 3 + 1 + 2 * NEIGHBOURS + 1
    (marked,) = [line for line in lines if line.startswith("* ")]
    assert f"{rank.peak().total:,}" in marked and rank.peak().op in marked


def test_the_live_table_has_differences_and_what_stands_here() -> None:
    rank = rank_of(RunSpec(model=PRESETS["tiny"], ranks=2))
    text = "\n".join(step_table("each rank", rank, with_artefacts(rank)))
    assert "predicted" in text and "as here" in text
    num_ops = len(course_of(clean(rank)).ops)  # into which others the copies fall is chance
    assert f"{num_ops} of {num_ops} reach the predicted maximum to the byte" in text
    assert "as here" not in "\n".join(step_table("each rank", rank, clean(rank)))


def test_a_bare_counts_few_ops_are_all_listed_and_a_step_without_events_has_no_table() -> None:
    rank = rank_of(RunSpec(model=bare(1001), unit=UnitPolicy.parse("model"), ranks=2))
    lines = step_table("each rank", rank)
    assert len(lines) == 1 + len(course_of(rank).ops) <= 1 + MAX_OPS
    assert step_table("each rank", replace(rank, events=())) == []


def test_a_course_is_remembered_for_ranks_that_share_their_events() -> None:
    first, second = predict(RunSpec(model=PRESETS["tiny"], ranks=2)).ranks
    assert isinstance(course_of(first), Course) and course_of(first) is course_of(second)
