"""The film of a step: a frame an op, whose figures are the trace's own and whose words say them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from zeroviz.category import Category
from zeroviz.course import course_of
from zeroviz.errors import TraceError
from zeroviz.film import MAX_FRAMES, Film, build_film
from zeroviz.implementations import PAIRS, PRECISIONS
from zeroviz.models import PRESETS
from zeroviz.partition import plan_for
from zeroviz.predict import predict
from zeroviz.schedule import OpKind
from zeroviz.spec import Implementation, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.timeline import build_timeline

TINY = PRESETS["tiny"]
EVERY = [(impl, strategy) for impl, strategies in PAIRS.items() for strategy in strategies]


def spec_of(impl: Implementation, strategy: Strategy, ranks: int = 4) -> RunSpec:
    """Uneven: 133,106 parameters over 4 ranks, 37,237 in a block."""
    precision = PRECISIONS[impl][0]
    if strategy.has_whole_buffer:
        precision = Precision.BF16_FP32GRAD
    groups = 2 if strategy.replicates else None
    return RunSpec(model=TINY, impl=impl, strategy=strategy, ranks=ranks, shard_ranks=groups, precision=precision)


def film_of(**settings: object) -> Film:
    return build_film(predict(RunSpec(model=TINY, ranks=4, **settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("impl", "strategy"), EVERY, ids=lambda value: value.value)
def test_frames_add_up_to_the_trace(impl: Implementation, strategy: Strategy) -> None:
    """A frame's categories sum to its bytes, its bytes are the course's at its moment, the first and the last frame
    stand at rest, and the frame of the peak holds what the trace does then, where the timeline's pin stands."""
    trace = predict(spec_of(impl, strategy))
    for rank in (0, 3):
        film, course = build_film(trace, rank), course_of(trace.ranks[rank])
        for frame in film.frames:
            assert sum(frame.held) == frame.nbytes == course.device[frame.moment]
            assert frame.most >= frame.nbytes
        moments = [frame.moment for frame in film.frames]
        assert moments == sorted(set(moments))
        assert film.frames[0].nbytes == film.frames[-1].nbytes == trace.ranks[rank].rest_nbytes
        at_peak, peak = film.frames[film.peak], trace.ranks[rank].peak()
        held = {category: nbytes for category, nbytes in zip(film.categories, at_peak.held, strict=True) if nbytes}
        assert held == {category: nbytes for category, nbytes in peak.by_category.items() if nbytes}
        assert at_peak.nbytes == max(frame.most for frame in film.frames) == peak.total
        assert (at_peak.op, at_peak.unit) == (peak.op, peak.unit)
        assert at_peak.moment == build_timeline(trace, rank=rank, from_rest=False).peak.moment
        assert at_peak.words.endswith(f"This is the peak of the step: it holds {film.amount(peak.total)}.")


def test_the_ops_end_follows_its_peak_and_counts_from_before_the_op() -> None:
    """ZeRO-3 on 4: within the backward of block 2 stand 1,247,536 bytes, at its end 1,104,596, before it 1,069,940."""
    film = film_of()
    before, at_peak, end = film.frames[film.peak - 1 : film.peak + 2]
    assert [frame.nbytes for frame in (before, at_peak, end)] == [1_069_940, 1_247_536, 1_104_596]
    assert at_peak[1:4] == end[1:4] == ("backward", OpKind.BACKWARD.label, "block 2") and before.op != end.op
    assert at_peak.gathered == end.gathered == (0, 3)
    assert at_peak.words.startswith("Each rank runs the backward of block 2: +177.6 kB so far; 2 units whole now. ")
    assert end.words.startswith(
        "Each rank runs the backward of block 2: +34.66 kB; 2 units whole now. It holds 1,105 kB"
    )


@pytest.mark.parametrize(("impl", "strategy"), EVERY, ids=lambda value: value.value)
def test_what_is_gathered_at_the_peak_is_what_is_whole_then(impl: Implementation, strategy: Strategy) -> None:
    """As the events up to that moment say, counted one by one."""
    film, course = build_film(predict(spec_of(impl, strategy))), course_of(predict(spec_of(impl, strategy)).ranks[0])
    frame, whole = film.frames[film.peak], Counter[str]()
    for event in course.events[: frame.moment]:
        if event.category is Category.UNSHARDED_PARAM:
            whole[event.unit] += event.delta_nbytes
    assert [film.units[unit] for unit in frame.gathered] == [unit for unit in film.units if whole[unit] > 0]


@pytest.mark.parametrize(("impl", "strategy"), EVERY, ids=lambda value: value.value)
def test_every_op_has_a_verb_of_its_own(impl: Implementation, strategy: Strategy) -> None:
    for frame in build_film(predict(spec_of(impl, strategy))).frames[1:]:
        assert frame.words.endswith(".") and " does " not in frame.words, frame
        if frame.unit:
            assert frame.unit in frame.words


def test_zero3_gathers_a_unit_and_lets_it_go() -> None:
    """Tied: the root is whole through a whole pass, and beside it one block at a time; all is given back at the end."""
    film = film_of()
    assert film.units == ("root", "block 0", "block 1", "block 2")
    gathered = [frame.gathered for frame in film.frames]
    assert {len(each) for each in gathered} == {0, 1, 2}
    assert all(0 in each for each in gathered if len(each) == 2)
    for frame in film.frames:
        if frame.op == OpKind.UNSHARD.label:
            assert film.units.index(frame.unit) in frame.gathered
        elif frame.op == OpKind.RESHARD.label:
            assert film.units.index(frame.unit) not in frame.gathered
    assert gathered[-1] == ()


def test_without_resharding_every_unit_is_whole_at_the_end_of_forward() -> None:
    film = film_of(strategy=Strategy.SHARD_GRAD_OP)
    forward = [frame for frame in film.frames if frame.phase == "forward"]
    assert forward[-1].gathered == (0, 1, 2, 3)


@pytest.mark.parametrize("strategy", [Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2])
def test_whole_parameters_are_not_gathered(strategy: Strategy) -> None:
    assert all(frame.gathered == () for frame in film_of(strategy=strategy).frames)


def test_the_words_say_who_does_what_and_how_much() -> None:
    """Block 2 has 37,237 elements, 37,240 with padding: 148,960 bytes gathered, three quarters of them borrowed."""
    (frame, *_) = [f for f in film_of().frames if (f.op, f.unit) == (OpKind.UNSHARD.label, "block 2")]
    unit = plan_for(RunSpec(model=TINY, ranks=4)).units[3]
    assert unit.name == "block 2" and unit.numel == 37_237
    assert frame.words.startswith("Each rank all-gathers block 2: +149.0 kB; 3 of 4 parts of it are borrowed; 2 units")
    assert film_of().frames[0].words == "At rest: each rank holds 532.5 kB."
    assert film_of(strategy=Strategy.DDP).frames[0].words == "At rest: each rank holds 2.130 MB."


def test_a_rank_that_differs_is_named_and_one_alone_is_not_each() -> None:
    trace = predict(spec_of(Implementation.ZERO_REDUNDANCY, Strategy.ZERO1))
    assert build_film(trace, 2).frames[1].words.startswith("Rank 2 ")
    alone = build_film(predict(RunSpec(model=TINY, ranks=1)))
    assert alone.frames[1].words.startswith("Rank 0 ") and not any("borrowed" in f.words for f in alone.frames)


def test_figures_in_words_are_those_of_the_frame() -> None:
    film = film_of()
    for frame in film.frames:
        said = re.findall(r"holds ([^.]*\.?[^.]*)\.$", frame.words)
        if said:
            assert said == [film.amount(frame.nbytes)]


def test_a_large_model_is_a_film_too_and_a_step_of_too_many_ops_is_refused() -> None:
    film = build_film(predict(RunSpec(model=PRESETS["llama3-70b"], ranks=4096, unit=UnitPolicy.parse("layer"))))
    assert 1000 < len(film.frames) < MAX_FRAMES
    long = RunSpec(model=PRESETS["llama3-70b"], ranks=8, unit=UnitPolicy.parse("layer"), accumulation=4)
    with pytest.raises(TraceError, match=r"ops, and a film shows at most 4,000; use larger units or fewer"):
        build_film(predict(long))


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(TraceError, match="Rank 4 was asked for; the trace has ranks 0 to 3"):
        build_film(predict(RunSpec(model=TINY, ranks=4)), 4)
