"""The timeline: the whole step as data, checked against the trace it was made of."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.every import pairs, settings_of
from zeroviz.axis import amount
from zeroviz.category import Category
from zeroviz.course import course_of
from zeroviz.errors import TraceError
from zeroviz.models import PRESETS, bare
from zeroviz.predict import predict
from zeroviz.scene import Reference
from zeroviz.spec import Implementation, Offload, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.timeline import MAX_COLUMNS, Band, build_timeline, distinct_ranks
from zeroviz.trace import Event, Origin, RankTrace, Trace


def spec_of(**fields: Any) -> RunSpec:
    return RunSpec(**{"model": PRESETS["tiny"], "ranks": 3, **fields})


def live(trace: Trace, **ranks: Any) -> Trace:
    """The trace as a run would have it; `ranks` may replace the first ranks."""
    return replace(trace, origin=Origin.LIVE, **ranks)


def leaking(rank: RankTrace, nbytes: int, unit: str = "block 1") -> RankTrace:
    """A step that holds `nbytes` more from the start of a unit's backward to the end of the step."""
    place = next(i for i, event in enumerate(rank.events) if event.op == "backward" and event.unit == unit)
    leak = Event("backward", "backward", unit, Category.TEMPORARY, nbytes)
    freed = rank.events[-1]._replace(category=Category.TEMPORARY, delta_nbytes=-nbytes)
    return replace(rank, events=(*rank.events[:place], leak, *rank.events[place:], freed))


GRID = [
    spec_of(
        model=PRESETS[model],
        ranks=ranks,
        unit=UnitPolicy.parse(unit),
        precision=precision,
        **settings_of(strategy, ranks),
    )
    for model, (strategy, precision), ranks, unit in product(
        ("tiny", "tiny-llama"), pairs((Precision.FP32, Precision.BF16_FP32GRAD)), (1, 4), ("model", "block", "layer")
    )
]


def words(spec: RunSpec) -> str:
    return f"{spec.model.name} {spec.strategy.value} {spec.ranks} {spec.unit} {spec.precision.value}"


@pytest.mark.parametrize("spec", GRID, ids=words)
def test_with_room_for_every_moment_the_areas_are_the_trace(spec: RunSpec) -> None:
    trace = predict(spec)
    rank, course = trace.ranks[0], course_of(trace.ranks[0])
    timeline = build_timeline(trace, most=10**6)
    (part,) = timeline.parts
    assert timeline.num_moments == len(course.device) == len(part.columns)
    held = course.held(range(timeline.num_moments))
    for moment, (column, all_held) in enumerate(zip(part.columns, held, strict=True)):
        assert (column.start, column.stop) == (moment, moment + 1)
        assert column.total == course.device[moment]
        assert dict(zip(part.categories, column.held, strict=True)) == {c: all_held[c] for c in part.categories}
    peak = rank.peak()
    assert (timeline.peak.nbytes, part.columns[timeline.peak.moment].total) == (peak.total, peak.total)
    # The most held stands at the bottom of the stack from the first moment on.
    at_rest = [category in rank.at_rest for category in part.categories]
    assert at_rest == sorted(at_rest, reverse=True)
    assert part.rest_nbytes == rank.rest_nbytes and part.axis_max == part.most == peak.total


@pytest.mark.parametrize("most", [3, 40, 300])
@pytest.mark.parametrize("spec", GRID[::9], ids=words)
def test_however_few_columns_no_peak_is_lost(spec: RunSpec, most: int) -> None:
    course = course_of(predict(spec).ranks[0])
    timeline = build_timeline(predict(spec), most=most)
    (part,) = timeline.parts
    edges = [part.columns[0].start, *(column.stop for column in part.columns)]
    assert edges[0] == 0 and edges[-1] == timeline.num_moments
    assert [column.start for column in part.columns] == edges[:-1]
    for column in part.columns:
        assert column.total == max(course.device[column.start : column.stop])
    for phase in timeline.phases:
        within = [column for column in part.columns if phase.start <= column.start < phase.stop]
        assert within[0].start == phase.start and within[-1].stop == phase.stop  # a column is of one phase
    assert len(part.columns) <= most + len(timeline.phases)


def test_a_step_of_a_large_model_stays_small() -> None:
    trace = predict(spec_of(model=PRESETS["llama3-70b"], ranks=64, precision=Precision.BF16_MIXED))
    timeline = build_timeline(trace)
    assert timeline.num_moments > 16_000 and len(timeline.parts[0].columns) <= MAX_COLUMNS
    assert timeline.parts[0].most == trace.ranks[0].peak().total
    assert any("columns" in note for note in timeline.notes)


def test_phases_and_units_are_the_schedules() -> None:
    timeline = build_timeline(predict(spec_of()))
    assert [band.label for band in timeline.phases] == ["forward", "backward", "optimizer"]
    assert timeline.phases[0].start == 0 and timeline.phases[-1].stop == timeline.num_moments
    assert [a.stop for a in timeline.phases[:-1]] == [b.start for b in timeline.phases[1:]]
    backward = timeline.phases[1]
    names = [band.label for band in timeline.units if backward.start <= band.start < backward.stop]
    # A tied root is used by the head, which comes first in backward, and by the embedding, which comes last.
    assert names == ["root", "block 2", "block 1", "block 0", "root"]
    place = next(mark.span for mark in timeline.ops if mark.span.start <= timeline.peak.moment < mark.span.stop)
    assert f"{place.op} of {place.unit}" == timeline.peak.place


def test_micro_batches_are_phases_of_their_own() -> None:
    timeline = build_timeline(predict(spec_of(accumulation=2)))
    assert [band.label for band in timeline.phases] == ["forward", "backward"] * 2 + ["optimizer"]


@pytest.mark.parametrize("most", [5, 100, MAX_COLUMNS])
def test_a_measured_step_that_agrees_lies_on_the_edge_of_the_areas(most: int) -> None:
    trace = predict(spec_of(ranks=4))
    timeline = build_timeline(trace, live(trace), most=most)
    assert all(column.measured == column.total for column in timeline.parts[0].columns)
    assert all(mark.measured_max == mark.span.max_nbytes for mark in timeline.ops)
    num_ops = len(timeline.ops)
    assert any(f"Of {num_ops} ops" in line and f"{num_ops} reach" in line for line in timeline.subtitle)


def test_a_leak_lifts_the_line_from_where_it_happens() -> None:
    trace = predict(spec_of(ranks=2))
    leaky = live(trace, ranks=(leaking(trace.ranks[0], 1000), trace.ranks[1]))
    timeline = build_timeline(trace, leaky, most=10**6)
    first = next(mark.span.start for mark in timeline.ops if mark.span.op == "backward" and mark.span.unit == "block 1")
    differences = [(column.measured or 0) - column.total for column in timeline.parts[0].columns]
    assert set(differences[:first]) == {0}
    last = next(mark.span.stop for mark in reversed(timeline.ops) if mark.span.op == "backward")
    # One more moment shares the op's stretch, so the line may lag by one moment within it; never at its end.
    assert max(differences) >= 1000 and differences[last] == 1000
    assert {mark.measured_max - mark.span.max_nbytes for mark in timeline.ops if mark.measured_max} == {0, 1000}
    other = build_timeline(trace, leaky, rank=1, most=10**6)
    assert all(column.measured == column.total for column in other.parts[0].columns)


def test_copies_of_the_backend_are_a_line_of_their_own_and_leave_the_measured_one_alone() -> None:
    trace = predict(spec_of(ranks=2))
    clean = tuple(event for event in trace.ranks[0].events if event.category.on_device)
    events: list[Event] = []
    for event in clean:
        events.append(event)
        if event.op == "unshard":
            copy = event._replace(category=Category.BACKEND_COPY)
            events += [copy, copy._replace(delta_nbytes=-copy.delta_nbytes)]
    rank = replace(trace.ranks[0], events=tuple(events))
    timeline = build_timeline(trace, live(trace, ranks=(rank, trace.ranks[1])), most=10**6)
    (part,) = timeline.parts
    assert part.has_artefacts and part.is_measured
    assert max(column.measured or 0 for column in part.columns) == part.most
    over = [(column.here or 0) - (column.measured or 0) for column in part.columns]
    assert max(over) == max(event.delta_nbytes for event in clean if event.op == "unshard") and min(over) == 0
    assert any("As here" in line for line in timeline.subtitle)


def test_a_measured_step_alone_is_drawn_as_areas_with_what_is_here_as_a_line() -> None:
    trace = live(predict(spec_of(ranks=2)))
    (part,) = build_timeline(trace).parts
    course = course_of(trace.ranks[0])
    assert part.most == max(course.device) and not part.is_measured and part.has_artefacts
    assert [column.here for column in part.columns] == [max(course.here[c.start : c.stop]) for c in part.columns]
    assert any("As here" in line for line in build_timeline(trace).subtitle)
    assert not any("As here" in line for line in build_timeline(predict(spec_of(ranks=2))).subtitle)


def test_a_rehearsal_is_called_so_as_the_line_and_as_the_areas() -> None:
    trace = predict(spec_of(ranks=2))
    rehearsed = replace(trace, origin=Origin.REHEARSED)
    timeline = build_timeline(trace, rehearsed)
    assert timeline.overlaid == "rehearsed" and any(line.startswith("Rehearsed: ") for line in timeline.subtitle)
    assert any("reach the predicted maximum" in line for line in timeline.subtitle)
    timeline = build_timeline(rehearsed, live(trace))
    assert timeline.overlaid == "measured" and any(line.startswith("Rehearsed: ") for line in timeline.subtitle)
    assert any("reach the rehearsed maximum" in line for line in timeline.subtitle)
    assert build_timeline(trace).overlaid == ""


def test_what_is_offloaded_is_a_plot_of_its_own() -> None:
    trace = predict(spec_of(offload=Offload.OPTIMIZER))
    timeline = build_timeline(trace)
    device, host = timeline.parts
    assert all(category.on_device for category in device.categories)
    assert all(category.on_host for category in host.categories)
    assert host.most == max(course_of(trace.ranks[0]).host) > host.rest_nbytes > 0
    assert "host" in host.axis_label and len(build_timeline(predict(spec_of())).parts) == 1


def test_an_axis_from_rest_says_so_and_is_taken_where_the_step_is_flat() -> None:
    trace = predict(spec_of(model=PRESETS["gpt2"], strategy=Strategy.DDP, ranks=2))
    rest, peak = trace.ranks[0].rest_nbytes, trace.ranks[0].peak().total
    assert (peak - rest) * 5 < peak  # 32 tokens on a model of 124 million parameters
    (part,) = build_timeline(trace).parts
    assert part.axis_min == rest and f"begins at {amount(rest, part.unit)}, not at 0" in part.axis_label
    assert part.ticks[0].nbytes >= rest
    for timeline in (build_timeline(trace, from_rest=False), build_timeline(predict(spec_of()))):
        assert timeline.parts[0].axis_min == 0 == timeline.parts[0].ticks[0].nbytes
        assert "not at 0" not in timeline.parts[0].axis_label


def test_a_reference_stretches_the_axis_and_never_cuts_an_area() -> None:
    trace = predict(spec_of())
    peak = trace.ranks[0].peak().total
    assert build_timeline(trace, reference=Reference(2 * peak, "twice")).parts[0].axis_max == 2 * peak
    assert build_timeline(trace, reference=Reference(1, "little")).parts[0].axis_max == peak


def test_ranks_that_differ_are_told_apart() -> None:
    trace = predict(spec_of(ranks=4))
    assert distinct_ranks(trace) == distinct_ranks(trace, live(trace)) == (0,)
    odd = (*trace.ranks[:2], leaking(trace.ranks[2], 8), trace.ranks[3])
    assert distinct_ranks(trace, live(trace, ranks=odd)) == (0, 2)
    assert build_timeline(trace).title.endswith("the step of each rank")
    assert build_timeline(trace, live(trace, ranks=odd), rank=2).title.endswith("the step of rank 2")
    assert build_timeline(predict(spec_of(ranks=1))).title.endswith("the only rank")


def test_a_step_without_events_is_one_moment() -> None:
    trace = predict(spec_of(ranks=1))
    timeline = build_timeline(replace(trace, ranks=(replace(trace.ranks[0], events=()),)))
    assert timeline.num_moments == 1 and timeline.phases == (Band("at rest", 0, 1),) and timeline.ops == ()
    assert timeline.peak.place == "at rest"


def test_a_bare_count_has_a_timeline_and_says_what_it_lacks() -> None:
    timeline = build_timeline(predict(RunSpec(model=bare(1001), unit=UnitPolicy.parse("model"), ranks=3)))
    assert any("activations" in note for note in timeline.notes)
    assert Category.ACTIVATION not in timeline.parts[0].categories


def test_what_cannot_be_drawn_is_refused_in_a_sentence() -> None:
    trace = predict(spec_of())
    with pytest.raises(TraceError, match="another spec"):
        build_timeline(trace, live(predict(spec_of(batch=2))))
    with pytest.raises(TraceError, match="Rank 3 was asked for; the trace has ranks 0 to 2"):
        build_timeline(trace, rank=3)


def test_predicted_ranks_share_a_timeline_and_nothing_is_spelt_out_for_it() -> None:
    trace = predict(spec_of(ranks=7, accumulation=3))
    assert distinct_ranks(trace) == (0,)
    assert "spelt_out" not in vars(course_of(trace.ranks[0]).device)
    odd = replace(trace.ranks[2], rest={**trace.ranks[2].rest, Category.BUCKET: 3})
    ranks = (*trace.ranks[:2], odd, *trace.ranks[3:])
    assert distinct_ranks(replace(trace, ranks=ranks)) == (0, 2)


@pytest.mark.parametrize(
    ("impl", "strategy", "ranks"),
    [
        (Implementation.MEGATRON, Strategy.MEGATRON_OPTIM, 7),  # where a parameter is cut is each rank's own
        (Implementation.MEGATRON, Strategy.MEGATRON_OPTIM, 64),
        (Implementation.ZERO_REDUNDANCY, Strategy.ZERO1, 5),
        (Implementation.DEEPSPEED, Strategy.ZERO2, 8),
        (Implementation.FSDP2, Strategy.ZERO3, 3),
    ],
)
def test_predicted_ranks_are_told_apart_as_their_whole_courses_would(
    impl: Implementation, strategy: Strategy, ranks: int
) -> None:
    """Against the bytes at every moment of every rank."""
    precision = Precision.BF16_FP32GRAD if impl is Implementation.MEGATRON else Precision.FP32
    trace = predict(spec_of(impl=impl, strategy=strategy, ranks=ranks, precision=precision))
    first = {course_of(rank).device: rank.rank for rank in reversed(trace.ranks)}
    assert distinct_ranks(trace) == tuple(sorted(first.values()))
    assert len(first) > 1
