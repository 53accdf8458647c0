"""Titles: whole on the paper however long they are, and one wording in every picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.view.drawn import assert_words_have_room
from zeroviz import draw, draw_heatmap, draw_shard_map, draw_timeline, draw_wire
from zeroviz.capacities import Capacity
from zeroviz.head import MARGIN, TITLE_POINTS, WIDTH, headed
from zeroviz.heatmap import Upward, build_heatmap
from zeroviz.implementations import PAIRS, PRECISIONS
from zeroviz.models import PRESETS
from zeroviz.paper import Paper, Words, text_width
from zeroviz.precision import WHOLE_BUFFER_PRECISIONS
from zeroviz.predict import predict
from zeroviz.scene import build_scene
from zeroviz.shard_map import build_shard_map
from zeroviz.spec import Implementation, Precision, RunSpec, Strategy
from zeroviz.timeline import build_timeline
from zeroviz.wire_scene import build_wire_scene
from zeroviz.wording import strategy_label, title

Pictured = tuple[Any, Callable[[Any], Paper]]


def pictures(spec: RunSpec) -> dict[str, Pictured]:
    """Of a state, as data, with what lays them out."""
    trace = predict(spec)
    return {
        "bars": (build_scene(trace), draw.paper_of),
        "map": (build_shard_map(spec), draw_shard_map.paper_of),
        "film": (build_timeline(trace), draw_timeline.paper_of),
        "wire": (build_wire_scene(trace), draw_wire.paper_of),
    }


def state(impl: Implementation, strategy: Strategy, precision: Precision, ranks: int) -> RunSpec:
    group = max(2, ranks // 8) if strategy.replicates else None
    return RunSpec(
        model=PRESETS["tiny"], strategy=strategy, impl=impl, precision=precision, ranks=ranks, shard_ranks=group
    )


def title_lines(paper: Paper) -> list[Words]:
    return [s for s in paper.shapes if isinstance(s, Words) and s.points == TITLE_POINTS]


EVERY = [
    (impl, strategy, precision)
    for impl, strategy in product(Implementation, Strategy)
    for precision in PRECISIONS[impl]
    if strategy in PAIRS[impl]
    and (precision in WHOLE_BUFFER_PRECISIONS or not strategy.has_whole_buffer)
    and (impl, strategy, precision) != (Implementation.DEEPSPEED, Strategy.DDP, Precision.BF16_FP32GRAD)
]
LONG = {
    "two in groups of two": state(Implementation.OWN, Strategy.HYBRID_SHARD, Precision.BF16_FP32GRAD, 2),
    "4,096 in groups": state(Implementation.FSDP1, Strategy.HYBRID_SHARD, Precision.FSDP_MIXED, 4096),
    "64 in groups": state(Implementation.FSDP2, Strategy.HYBRID_SHARD, Precision.FP32, 64),
    "zero redundancy": state(Implementation.ZERO_REDUNDANCY, Strategy.ZERO1, Precision.FP32, 64),
}


@pytest.mark.parametrize("ranks", [2, 64])
@pytest.mark.parametrize(("impl", "strategy", "precision"), EVERY)
def test_every_picture_says_whose_step_it_is_in_the_same_words_and_cuts_none(
    impl: Implementation, strategy: Strategy, precision: Precision, ranks: int
) -> None:
    spec = state(impl, strategy, precision, ranks)
    for picture, paper_of in pictures(spec).values():
        assert picture.title.startswith(title(spec)) and strategy_label(spec) in title(spec)
        lines = title_lines(paper_of(picture))
        assert " ".join(line.text for line in lines) == picture.title
        for line in lines:
            assert line.x == MARGIN and line.x + text_width(line.text, TITLE_POINTS, "bold") <= WIDTH - MARGIN


@pytest.mark.parametrize("name", LONG)
def test_words_have_room_under_a_title_of_any_length(name: str) -> None:
    long = 0
    for picture, paper_of in pictures(LONG[name]).values():
        for shown in (picture, replace(picture, title=f"{picture.title}; {picture.title}")):
            paper = paper_of(shown)
            assert_words_have_room(paper.figure())
            long += len(title_lines(paper)) > 1
    assert long >= 4


def test_a_map_of_what_fits_has_names_of_any_length() -> None:
    model = replace(PRESETS["tiny"], name="a model of a lab with a name that goes on for longer than a line has room")
    gpu = Capacity("the GPU at the far end of the second rack", 80 * 2**30, is_nominal=False)
    heatmap = build_heatmap(RunSpec(model=model, ranks=4), Upward.BATCH, gpu, 0)
    paper = draw_heatmap.paper_of(heatmap)
    assert len(title_lines(paper)) > 1
    assert_words_have_room(paper.figure())


def test_a_short_head_is_as_high_as_its_lines() -> None:
    """Each line of a title moves all below it by as much."""
    one, two = (headed(Paper(WIDTH), "word " * count, ("what is drawn",)) for count in (1, 20))
    three = headed(Paper(WIDTH), "word " * 30, ("what is drawn",))
    assert two - one == pytest.approx(three - two) and two > one + TITLE_POINTS
