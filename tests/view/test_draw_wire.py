"""What each rank sends, on paper: every mark at its place and with its figures, every word legible, by both pens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.every import settings_of
from tests.view.drawn import (
    ODD,
    SVG,
    assert_odd_name_is_text,
    assert_same_bytes_again,
    assert_words_have_room,
    said_in,
    words_of,
)
from zeroviz.collectives import CollectiveOp
from zeroviz.draw_wire import NAME, SMALL_POINTS, WIDTH, paper_of, placed_wire, save_wire, wire_svg
from zeroviz.errors import SpecError, ZerovizError
from zeroviz.models import PRESETS
from zeroviz.paper import Paper, Shape
from zeroviz.predict import predict
from zeroviz.spec import Implementation, Precision, RunSpec, Settings, Strategy
from zeroviz.style import INK, PAPER, WIRE_PAINT
from zeroviz.trace import Origin, Trace
from zeroviz.wire_scene import WireScene, build_wire_scene

GROUPS = {"strategy": Strategy.HYBRID_SHARD, "ranks": 8, "shard_ranks": 4}
LLAMA = {"model": PRESETS["llama3-70b"], "precision": Precision.BF16_FP32GRAD}


def trace_of(**fields: Any) -> Trace:
    return predict(RunSpec(**{"model": PRESETS["tiny"], "ranks": 4, **fields}))


def wire_of(*, ran: bool = False, in_elements: bool = False, **fields: Any) -> WireScene:
    trace = trace_of(**fields)
    return build_wire_scene(trace, replace(trace, origin=Origin.LIVE) if ran else None, in_elements=in_elements)


def wrong_of(num_wrong: int, **fields: Any) -> WireScene:
    """A run in which the first ranks each send something else."""
    trace = trace_of(**fields)
    ranks = list(trace.ranks)
    for rank in range(num_wrong):
        calls = ranks[rank].collectives
        more = calls[0]._replace(payload_nbytes=calls[0].payload_nbytes * (rank + 1))
        ranks[rank] = replace(ranks[rank], collectives=(*calls, more))
    return build_wire_scene(trace, replace(trace, origin=Origin.LIVE, ranks=tuple(ranks)))


SCENES = {
    "zero3": wire_of(),
    "zero3 elements": wire_of(in_elements=True),
    "zero3 measured": wire_of(ran=True),
    "ddp": wire_of(strategy=Strategy.DDP),
    "ddp elements": wire_of(strategy=Strategy.DDP, in_elements=True),
    "zero1": wire_of(strategy=Strategy.ZERO1, precision=Precision.BF16_MIXED),
    "one rank": wire_of(ranks=1),
    "two ranks": wire_of(ranks=2, strategy=Strategy.SHARD_GRAD_OP),
    "groups": wire_of(**GROUPS),
    "groups elements measured": wire_of(ran=True, in_elements=True, **GROUPS),
    "groups clipped": wire_of(clip_norm=1.0, **GROUPS),
    "groups 4096": wire_of(**{**GROUPS, **LLAMA, "ranks": 4096, "shard_ranks": 8}),
    "groups 4096 elements": wire_of(in_elements=True, **{**GROUPS, **LLAMA, "ranks": 4096, "shard_ranks": 8}),
    "micro-batches measured": wire_of(ran=True, accumulation=64, **{**GROUPS, **LLAMA}),
    "micro-batches": wire_of(in_elements=True, accumulation=64, ran=True, **{**GROUPS, **LLAMA}),
    "fsdp1": wire_of(impl=Implementation.FSDP1, in_elements=True),
    "fsdp2": wire_of(impl=Implementation.FSDP2, precision=Precision.FSDP_MIXED),
    "fsdp2 4096": wire_of(impl=Implementation.FSDP2, ranks=4096, in_elements=True),
    "resharded": wire_of(impl=Implementation.FSDP2, ranks=8, settings=Settings(reshard_ranks=2)),
    "zero_redundancy": wire_of(impl=Implementation.ZERO_REDUNDANCY, strategy=Strategy.ZERO1, ran=True),
    "deepspeed": wire_of(impl=Implementation.DEEPSPEED, model=PRESETS["llama3-8b"], ranks=64),
    "deepspeed zero2": wire_of(impl=Implementation.DEEPSPEED, strategy=Strategy.ZERO2, precision=Precision.BF16_MIXED),
    "megatron": wire_of(
        impl=Implementation.MEGATRON, strategy=Strategy.MEGATRON_OPTIM, precision=Precision.BF16_FP32GRAD, clip_norm=1.0
    ),
    "wrong": wrong_of(1),
    "all wrong": wrong_of(8, **GROUPS),
}


def marks_of(paper: Paper) -> dict[str, Shape]:
    marks = [shape for shape in paper.shapes if isinstance(shape, Shape) and "mark" in shape.data]
    assert len({mark.data["mark"] for mark in marks}) == len(marks)
    return {mark.data["mark"]: mark for mark in marks}


@pytest.mark.parametrize("name", SCENES)
def test_every_segment_has_a_mark_with_its_figures_at_its_place(name: str) -> None:
    scene = SCENES[name]
    paper, placed = paper_of(scene), placed_wire(scene)
    marks = marks_of(paper)
    assert set(marks) == {segment.id for segment in scene.segments} | ({"reference"} if scene.reference else set())
    per_point = scene.axis_max / (placed["right"] - placed["left"])
    for segment in scene.segments:
        mark = marks[segment.id]
        (x, y), _, (stop, bottom), _ = mark.points
        assert placed["segments"][segment.id] == pytest.approx((x, stop - x, y, bottom - y))
        assert (x - placed["left"]) * per_point == pytest.approx(segment.start, abs=0.11 * per_point)
        assert (stop - x) * per_point == pytest.approx(segment.length, abs=0.11 * per_point)
        assert mark.data["op"] == segment.op.value and mark.data["group"] == segment.group.value
        assert (mark.data["calls"], mark.data["payload"]) == (str(segment.calls), str(segment.payload_nbytes))
        assert (mark.data["nbytes"], mark.data["numel"]) == (str(segment.sent_nbytes), str(segment.volume_numel))
        assert f"{segment.sent_nbytes:,} B sent" in mark.tip and f"{segment.volume_numel:,} elements" in mark.tip


@pytest.mark.parametrize("name", SCENES)
def test_parts_lie_within_their_segments(name: str) -> None:
    placed = placed_wire(SCENES[name])
    parts = {part.id: segment.id for segment in SCENES[name].segments for part in segment.parts}
    assert set(placed["parts"]) == set(parts)
    for part, (x, width, y, height) in placed["parts"].items():
        left, room, top, most = placed["segments"][parts[part]]
        assert (y, height) == (top, most)
        assert left - 0.11 <= x and x + width <= left + room + 0.21
    on_page = paper_of(SCENES[name]).svg(NAME, SCENES[name].sentence, on_page=True)
    assert placed["svg"] == on_page and placed["most"] == SCENES[name].axis_max


@pytest.mark.parametrize("name", SCENES)
def test_ddps_bar_ends_where_its_line_stands(name: str) -> None:
    scene = SCENES[name]
    paper, placed = paper_of(scene), placed_wire(scene)
    if scene.reference is None:
        assert scene.spec.ranks == 1
        return
    x = placed["left"] + (placed["right"] - placed["left"]) * scene.reference.at / scene.axis_max
    bar = marks_of(paper)["reference"]
    assert (bar.points[0][0], bar.points[1][0]) == pytest.approx((placed["left"], x))
    lines = [s for s in paper.shapes if isinstance(s, Shape) and s.is_open and s.points[0][0] == s.points[1][0] == x]
    (line,) = [line for line in lines if line.edge == INK]
    lowest = max(y + height for _, _, y, height in placed["segments"].values())
    assert line.points[0][1] == bar.points[2][1] and line.points[1][1] >= lowest


@pytest.mark.parametrize("name", SCENES)
def test_no_word_leaves_the_paper_or_covers_another(name: str) -> None:
    assert_words_have_room(paper_of(SCENES[name]).figure())


@pytest.mark.parametrize("name", SCENES)
def test_svg_is_whole_and_says_what_the_scene_says(name: str) -> None:
    scene = SCENES[name]
    text = wire_svg(scene)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and NAME in str(root.get("class")).split() and root.get("width") == "100%"
    assert root.get("aria-label") == scene.sentence
    patterns = {pattern.get("id") for pattern in root.iter(f"{SVG}pattern")}
    assert set(re.findall(r'fill="url\(#([^)]+)\)"', text)) == patterns
    words = said_in(text)
    assert scene.title in words
    assert set(" ".join((*scene.subtitle, *scene.notes)).split()) <= set(words.split())
    for row in scene.rows:
        assert row.rank_label in words and row.source_label in words and row.lane in words
        assert scene.amount(row.length) in words
    if scene.rows:
        assert scene.axis_label in words
    assert min(float(points) for points in re.findall(r'font-size="([\d.]+)"', text)) >= SMALL_POINTS >= 12
    assert not re.search(r' id="(?!zeroviz-)', text)
    assert paper_of(scene).width == WIDTH and len(text) < 40_000


@pytest.mark.parametrize("name", SCENES)
def test_the_table_lists_every_collective_to_the_byte(name: str) -> None:
    scene = SCENES[name]
    said = words_of(paper_of(scene))
    exact = name != "micro-batches measured"  # of 14 digits, which have no room beside one another
    for entry in scene.entries:
        assert entry.label in said
        assert (f"{entry.predicted:,}" if exact else scene.amount(entry.predicted)) in said
        assert entry.measured is None or (f"{entry.measured:,}" if exact else scene.amount(entry.measured)) in said
    assert ("difference" in said) == any(entry.measured is not None for entry in scene.entries)


def test_a_difference_stands_beside_the_row() -> None:
    assert words_of(paper_of(SCENES["zero3 measured"])).count("(0 B)") == 1
    scene = SCENES["wrong"]
    (wrong,) = [row.difference for row in scene.rows if row.difference]
    assert wrong is not None and f"(+{scene.amount(wrong)})" in words_of(paper_of(scene))
    assert any(f"{wrong:,} B more than predicted" in note for note in scene.notes)


def test_2p_and_3p_are_seen_at_a_glance() -> None:
    said = words_of(paper_of(SCENES["zero3 elements"]))
    assert {"all-gather fp32 2P", "reduce-scatter fp32 P", "forward P", "backward P", "2P", "3P"} <= set(said)
    assert "2P" in words_of(paper_of(SCENES["ddp elements"]))
    assert "1.5 x DDP's" in words_of(paper_of(SCENES["zero3"]))


def test_groups_are_apart_and_their_sum_is_said() -> None:
    scene = SCENES["groups"]
    placed = placed_wire(scene)["segments"]
    inside = [placed[s.id] for s in scene.segments if s.row == 0]
    (across,) = [placed[s.id] for s in scene.segments if s.row == 1]
    assert across[2] > inside[0][2] + inside[0][3]  # below
    assert across[0] == pytest.approx(inside[-1][0] + inside[-1][1], abs=0.2)  # and from where it ends
    said = words_of(paper_of(scene))
    in_all = scene.rows[1].in_all
    assert in_all is not None and f"in all {scene.amount(in_all)}" in said
    assert said.count("in group") == said.count("across groups") == 1


def test_one_rank_has_words_and_no_bars() -> None:
    paper = paper_of(SCENES["one rank"])
    assert not [shape for shape in paper.shapes if isinstance(shape, Shape)]
    assert any("Nothing is sent" in words for words in words_of(paper))
    assert placed_wire(SCENES["one rank"])["segments"] == {}


@pytest.mark.parametrize("impl", Implementation)
def test_every_implementation_draws_whatever_its_strategy(impl: Implementation) -> None:
    drawn = 0
    for strategy in Strategy:
        for ranks in (1, 2, 6):
            try:
                scene = wire_of(
                    impl=impl, ran=True, in_elements=ranks == 6, **settings_of(strategy, ranks), ranks=ranks
                )
            except SpecError:
                continue
            ElementTree.fromstring(wire_svg(scene))
            drawn += 1
    assert drawn >= 3


def luminance(color: str) -> float:
    """Relative, as WCAG 2 has it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_no_collective_is_told_by_colour_alone() -> None:
    """Each has a hatch of its own, and ink is legible on each."""
    assert set(WIRE_PAINT) == set(CollectiveOp)
    assert len({paint.hatch for paint in WIRE_PAINT.values()}) == len(WIRE_PAINT)
    assert len({paint.color for paint in WIRE_PAINT.values()}) == len(WIRE_PAINT)
    for paint in WIRE_PAINT.values():
        assert (luminance(paint.color) + 0.05) / (luminance(INK) + 0.05) > 4.5
        assert paint.color != PAPER
    for scene in SCENES.values():
        for mark in marks_of(paper_of(scene)).values():
            if "op" in mark.data:
                paint = WIRE_PAINT[CollectiveOp(mark.data["op"])]
                assert (mark.fill, mark.hatch) == (paint.color, paint.hatch)


def test_predicted_bars_have_a_broken_outline_and_measured_ones_a_whole_one() -> None:
    outlines = [s for s in paper_of(SCENES["zero3 measured"]).shapes if isinstance(s, Shape) and s.line == 2]
    assert [bool(outline.dash) for outline in outlines] == [True, False]


def test_what_is_too_short_to_be_seen_is_named() -> None:
    words = " ".join(words_of(paper_of(SCENES["megatron"])))  # the norm's four bytes
    assert "What is too short to be seen is in the table alone." in words
    assert "too short" not in " ".join(words_of(paper_of(SCENES["zero3"])))


def test_the_same_scene_gives_the_same_bytes(tmp_path: Path) -> None:
    assert_same_bytes_again(lambda path: save_wire(SCENES["groups"], path), tmp_path)
    assert SCENES["groups"].title in (tmp_path / "1.svg").read_text()


def test_an_unknown_format_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ZerovizError, match=r"\.svg, \.png or \.pdf"):
        save_wire(SCENES["zero3"], tmp_path / "wire.bmp")


def test_names_in_a_picture_are_text_and_never_markup() -> None:
    assert_odd_name_is_text(wire_svg(wire_of(model=ODD)))
