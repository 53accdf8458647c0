"""Figures kept in pieces against the same figures spelt out, and the course of a step against a walk event by event."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.every import settings_of
from zeroviz.category import Category
from zeroviz.course import course_of
from zeroviz.events import Changes, Event, as_events
from zeroviz.models import PRESETS
from zeroviz.moments import Moments
from zeroviz.predict import predict
from zeroviz.recall import MAX_WEIGHT, recall
from zeroviz.series import Series
from zeroviz.spec import Offload, RunSpec, Strategy
from zeroviz.trace import RankTrace


def series_of(first: int, *pieces: tuple[int, tuple[int, ...]]) -> Series:
    starts = [1 + sum(len(piece) for _, piece in pieces[:number]) for number in range(len(pieces))]
    return Series(first, starts, [level for level, _ in pieces], [piece for _, piece in pieces])


def test_a_series_is_the_figures_it_spells_out() -> None:
    shared = (4, -1, 4)
    series = series_of(7, (5, shared), (0, (2,)), (5, shared))
    figures = (7, 9, 4, 9, 2, 9, 4, 9)
    assert series == figures and tuple(series) == figures and len(series) == 8 and hash(series) == hash(figures)
    assert [series[number] for number in range(-8, 8)] == [*figures, *figures] and series[2:5] == figures[2:5]
    with pytest.raises(IndexError):
        series[8]
    for low in range(8):
        for high in range(low + 1, 9):
            most = max(figures[low:high])
            assert series.most(low, high) == (most, low + figures[low:high].index(most))
    assert series.most() == (9, 1)
    assert series_of(3) == (3,) and series_of(3).most() == (3, 0)


def walked(rank: RankTrace) -> tuple[list[int], list[int], list[int]]:
    """Device, here and host at each moment, event by event: the definition."""
    device, host, artefacts = [rank.rest_nbytes], [sum(rank.at_rest_on_host.values())], 0
    here = device.copy()
    for event in rank.events:
        category, nbytes = event.category, event.delta_nbytes
        if category.is_artefact:
            artefacts += nbytes
            here[-1] = max(here[-1], device[-1] + artefacts)
        else:
            device.append(device[-1] + nbytes * category.on_device)
            host.append(host[-1] + nbytes * category.on_host)
            here.append(device[-1] + artefacts)
    return device, here, host


@pytest.mark.parametrize("seed", range(40))
def test_a_course_of_any_events_is_the_walk_over_them(seed: int) -> None:
    """Artefacts before, between, beside and after the moments, some of them below zero; ops of one event and of many,
    as parts and one by one."""
    random = Random(seed)
    pool = (Category.ACTIVATION, Category.TEMPORARY, Category.HOST_TEMPORARY, Category.BACKEND_COPY)
    kinds = (*pool, Category.KERNEL_SCRATCH, Category.UNATTRIBUTED)
    events = tuple(
        Event("forward", random.choice("abc"), "", random.choice(kinds), random.randint(-50, 90))
        for _ in range(random.randint(0, 60))
    )
    rank = RankTrace(0, {Category.SHARDED_PARAM: 1000, Category.HOST_GRAD: 70}, events)
    device, here, host = walked(rank)
    for same in (rank, replace(rank, events=as_events(events))):
        course = course_of(same)
        assert (course.device, course.here, course.host) == (tuple(device), tuple(here), tuple(host))
        assert course.has_artefacts is (here != device) and course.uses_host
        live = dict.fromkeys(Category, 0) | dict(rank.rest)
        held = course.held(range(len(device)))
        assert held[0] == live
        for event, now in zip(course.events, held[1:], strict=True):
            live[event.category] += event.delta_nbytes
            assert now == live
        few = sorted(random.sample(range(len(device)), min(3, len(device))))
        assert course.held(few) == [held[moment] for moment in few]
        # Each op's most is that of a walk over its events alone.
        level = beside = 0
        left = list(events)
        for span in course.ops:
            most, most_here = level, level + beside
            while left and left[0][:3] == span.key:
                event = left.pop(0)
                level += event.delta_nbytes * event.category.on_device
                beside += event.delta_nbytes * event.category.is_artefact
                most, most_here = max(most, level), max(most_here, level + beside)
            assert (span.max_nbytes, span.max_here_nbytes, span.end_nbytes) == (
                1000 + most,
                1000 + most_here,
                1000 + level,
            )
        assert not left


def test_a_long_steps_stretches_are_few_objects() -> None:
    """Micro-batches repeat what they change, so what is worked out once for each stretch is little, whatever their
    number: all but the first, the last and the ones between are met before."""

    def stretches(accumulation: int) -> int:
        spec = RunSpec(model=PRESETS["tiny"], ranks=3, accumulation=accumulation, offload=Offload.PARAMS)
        return len({id(changes) for _, changes in as_events(predict(spec).ranks[0].events).parts})

    assert stretches(3) == stretches(40)


def test_a_heavy_result_makes_room_for_itself_and_stays() -> None:
    made = [object() for _ in range(MAX_WEIGHT)]
    calls: list[int] = []

    def ask(number: int, weight: int = 1) -> object:
        def compute() -> object:
            calls.append(number)
            return object()

        return recall("a test", (made[number],), compute, weigh=lambda _: weight)

    kept = [ask(number) for number in range(MAX_WEIGHT)]
    assert [ask(number) for number in range(MAX_WEIGHT)] == kept and calls == list(range(MAX_WEIGHT))
    heavy = object()
    first = recall("a test", (heavy,), object, weigh=lambda _: 10 * MAX_WEIGHT)
    assert recall("a test", (heavy,), object) is first
    assert ask(0) is not kept[0]


def test_moments_count_from_the_start_of_their_stretch() -> None:
    copy, scratch = Category.BACKEND_COPY, Category.KERNEL_SCRATCH
    stretch = Changes(
        [(copy, 5), (Category.INPUT, 3), (scratch, 2), (Category.HOST_GRAD, 4), (copy, -5), (scratch, -2)]
    )
    moments = stretch.moments
    assert moments == Moments.of(stretch) and stretch.moments is moments
    assert (moments.device, moments.host, moments.here) == ((3, 3), (0, 4), (3 + 5 + 2, 3 + 5 + 2))
    assert (moments.lead, moments.top, moments.top_here, moments.net_artefacts) == (5, 3, 10, 0)
    assert dict(moments.net) == {Category.INPUT: 3, Category.HOST_GRAD: 4}


@pytest.mark.parametrize("strategy", Strategy)
def test_the_courses_of_predicted_steps_are_walked_alike(strategy: Strategy) -> None:
    rank = predict(RunSpec(model=PRESETS["tiny-llama"], ranks=3, accumulation=3, **settings_of(strategy, 3))).ranks[0]
    course = course_of(rank)
    assert tuple(map(list, (course.device, course.here, course.host))) == walked(rank)
