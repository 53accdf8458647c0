"""The timeline on paper: every area, word and mark, legible and in place, by both pens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.view.drawn import ODD, SVG, assert_odd_name_is_text, assert_same_bytes_again, assert_words_have_room, said_in
from zeroviz.draw_timeline import NAME, WIDTH, paper_of, save_timeline, timeline_svg
from zeroviz.errors import ZerovizError
from zeroviz.models import PRESETS
from zeroviz.paper import Paper, Shape, Words, text_width
from zeroviz.predict import predict
from zeroviz.scene import Reference
from zeroviz.spec import Offload, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.style import FONT_POINTS, PAINT, label_of, short_of
from zeroviz.timeline import Timeline, build_timeline
from zeroviz.trace import Origin


def timeline_of(*, ran: bool = False, reference: int = 0, **fields: Any) -> Timeline:
    trace = predict(RunSpec(**{"model": PRESETS["tiny"], "ranks": 4, **fields}))
    measured = replace(trace, origin=Origin.LIVE) if ran else None
    return build_timeline(trace, measured, reference=Reference(reference, "peak of DDP") if reference else None)


TIMELINES = {
    "four": timeline_of(),
    "measured": timeline_of(ran=True, ranks=2, precision=Precision.BF16_MIXED),
    "beside ddp": timeline_of(reference=3_400_000),
    "one unit": timeline_of(ranks=2, unit=UnitPolicy.parse("model")),
    "layers": timeline_of(unit=UnitPolicy.parse("layer"), strategy=Strategy.ZERO2),
    "micro-batches": timeline_of(accumulation=5),
    "flat": timeline_of(model=PRESETS["gpt2"], strategy=Strategy.DDP, ranks=2),
    "offloaded": timeline_of(offload=Offload.OPTIMIZER, ran=True),
    "8b": timeline_of(model=PRESETS["llama3-8b"], ranks=8, precision=Precision.BF16_MIXED, seq=4096, ran=True),
    "70b": timeline_of(model=PRESETS["llama3-70b"], ranks=64, precision=Precision.BF16_MIXED, seq=2048),
    "70b in micro-batches": timeline_of(model=PRESETS["llama3-70b"], ranks=16, accumulation=6),
    "long units": timeline_of(unit=UnitPolicy.parse("numel:50000")),
}


def words_of(paper: Paper) -> list[Words]:
    return [shape for shape in paper.shapes if isinstance(shape, Words)]


def areas_of(paper: Paper) -> dict[str, Shape]:
    shapes = [shape for shape in paper.shapes if isinstance(shape, Shape)]
    return {shape.data["category"]: shape for shape in shapes if "category" in shape.data}


@pytest.mark.parametrize("name", TIMELINES)
def test_every_area_is_drawn_as_high_as_it_is_and_named(name: str) -> None:
    timeline = TIMELINES[name]
    paper = paper_of(timeline)
    areas = areas_of(paper)
    said = " ".join(words.text for words in words_of(paper))
    for part in timeline.parts:
        lines = [s for s in paper.shapes if isinstance(s, Shape) and s.is_open and s.line == 1.2 and not s.dash]
        level, height = 0, max(y for _, y in areas[part.categories[-1].value].points)
        assert any(line.points[0][1] == line.points[1][1] == height for line in lines)  # the axis
        tops = []
        for number, category in enumerate(part.categories):
            level = max(sum(column.held[: number + 1]) for column in part.columns)
            if level <= part.axis_min:
                assert category.value not in areas
                continue
            area = areas[category.value]
            tops.append((level - part.axis_min, height - min(y for _, y in area.points)))
            # From the axis, to the axis, over the whole width.
            assert area.points[0][1] == area.points[-1][1] == height
            assert area.hatch == (None if category in part.held_at_rest else PAINT[category].hatch)
            label = label_of(category, timeline.spec)
            assert label in said or short_of(category, timeline.spec) in said
        scale = max(points for _, points in tops) / max(nbytes for nbytes, _ in tops)
        for nbytes, points in tops:
            assert points == pytest.approx(nbytes * scale, abs=0.06)  # what is less than a stroke is not drawn


@pytest.mark.parametrize("name", TIMELINES)
def test_no_word_leaves_the_paper_or_covers_another(name: str) -> None:
    assert_words_have_room(paper_of(TIMELINES[name]).figure())


@pytest.mark.parametrize("name", TIMELINES)
def test_svg_is_whole_light_and_says_what_the_timeline_says(name: str) -> None:
    timeline = TIMELINES[name]
    text = timeline_svg(timeline)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and NAME in str(root.get("class")).split() and root.get("width") == "100%"
    assert root.get("aria-label") == timeline.sentence
    assert len(text) < 150_000
    patterns = {pattern.get("id") for pattern in root.iter(f"{SVG}pattern")}
    used = set(re.findall(r'fill="url\(#([^)]+)\)"', text))
    assert used == patterns
    words = said_in(text)
    for line in (
        timeline.title,
        *(band.label for band in timeline.phases[-1:]),
        f"peak {timeline.parts[0].amount(timeline.peak.nbytes)}",
    ):
        assert line in words
    assert set(" ".join((*timeline.subtitle, *timeline.notes)).split()) <= set(words.split())
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)"', text)) >= FONT_POINTS >= 14
    assert not re.search(r' id="(?!zeroviz-)', text)


def test_an_op_tells_its_bytes_under_the_pointer() -> None:
    timeline = TIMELINES["measured"]
    root = ElementTree.fromstring(timeline_svg(timeline))
    marks = [path for path in root.iter(f"{SVG}path") if path.get("data-op")]
    ops = [op for op in timeline.ops if op.span.stop > op.span.start]  # one of artefacts alone has no width
    assert [int(str(mark.get("data-nbytes"))) for mark in marks] == [op.span.max_nbytes for op in ops]
    for mark, op in zip(marks, ops, strict=True):
        tip = mark.find(f"{SVG}title")
        assert tip is not None and f"at most {op.span.max_nbytes:,} B" in (tip.text or "")
        assert f"measured at most {op.measured_max:,} B (0 B)" in (tip.text or "")
        assert mark.get("fill") == "transparent"  # the pointer does not find what has no fill


def test_very_many_ops_are_told_unit_by_unit() -> None:
    timeline = TIMELINES["70b"]
    root = ElementTree.fromstring(timeline_svg(timeline))
    marks = [path for path in root.iter(f"{SVG}path") if path.get("data-op")]
    assert len(marks) == len(timeline.units) < len(timeline.ops)
    assert max(int(str(mark.get("data-nbytes"))) for mark in marks) == timeline.peak.nbytes


def test_the_pin_stands_on_the_peak() -> None:
    timeline = TIMELINES["four"]
    paper = paper_of(timeline)
    (pin,) = [s for s in paper.shapes if isinstance(s, Shape) and not s.is_open and len(s.points) == 3]
    x, y = pin.points[2]
    top = areas_of(paper)[timeline.parts[0].categories[-1].value]
    assert y == pytest.approx(min(at for _, at in top.points), abs=0.06)
    corners = [at for at, height in top.points if abs(height - y) < 0.06]
    assert min(corners) <= x <= max(corners)


def test_the_measured_line_lies_on_the_areas_edge() -> None:
    timeline = TIMELINES["measured"]
    paper = paper_of(timeline)
    edge = areas_of(paper)[timeline.parts[0].categories[-1].value].points[1:-1]
    lines = [s for s in paper.shapes if isinstance(s, Shape) and s.is_open and list(s.points) == list(edge)]
    assert len(lines) == 1 and lines[0].line > 1.2


def test_the_same_timeline_gives_the_same_bytes(tmp_path: Path) -> None:
    assert_same_bytes_again(lambda path: save_timeline(TIMELINES["four"], path), tmp_path)
    assert TIMELINES["four"].title in (tmp_path / "1.svg").read_text()


def test_an_unknown_format_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ZerovizError, match=r"\.svg, \.png or \.pdf"):
        save_timeline(TIMELINES["four"], tmp_path / "step.bmp")


def test_names_in_a_picture_are_text_and_never_markup() -> None:
    assert_odd_name_is_text(timeline_svg(timeline_of(model=ODD)))


# ---- paper itself ----


def test_paper_wraps_words_to_a_width() -> None:
    text = "what each of the four ranks holds at rest, at the peak, and within the step"
    lines = Paper(200).wrapped(text, 180)
    assert len(lines) > 1 and " ".join(lines) == text
    assert all(text_width(line) <= 180 for line in lines)


def test_both_pens_draw_the_same_points() -> None:
    paper = Paper(120)
    paper.height = 60
    paper.rectangle(10, 20, 30, 15, "#E69F00", "xx", line=0.7, tip="a & b")
    paper.line(((0, 5), (50, 5), (50, 30), (80, 42.5)), dash=(3.0, 2.0))
    text = paper.svg("a-name", "in words")
    assert 'd="M10 20h30v15h-30Z"' in text and 'd="M0 5h50v25l30 12.5"' in text
    assert "<title>a &amp; b</title>" in text and 'stroke-dasharray="3 2"' in text
    axes = paper.figure().axes[0]
    assert axes.patches[0].get_path().vertices[:4].tolist() == [[10, 20], [40, 20], [40, 35], [10, 35]]
    assert axes.lines[0].get_xydata().tolist() == [[0, 5], [50, 5], [50, 30], [80, 42.5]]


@pytest.mark.parametrize("hatch", sorted({paint.hatch for paint in PAINT.values()}))
def test_every_hatch_has_a_pattern(hatch: str) -> None:
    paper = Paper(50)
    paper.height = 50
    paper.rectangle(0, 0, 50, 50, "#CCCCCC", hatch)
    root = ElementTree.fromstring(paper.svg("a-name", ""))
    (pattern,) = root.iter(f"{SVG}pattern")
    path = pattern.find(f"{SVG}path")
    assert path is not None and len(path.get("d", "")) > 5


def test_paper_is_as_wide_as_the_other_pictures() -> None:
    assert paper_of(TIMELINES["four"]).width == WIDTH
