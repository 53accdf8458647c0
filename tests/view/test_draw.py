"""The drawing: what is in the scene is on paper, legible, told apart without colour, and the same each time."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.view.drawn import ODD, SVG, assert_odd_name_is_text, assert_same_bytes_again, assert_words_have_room, said_in
from zeroviz.bar_layout import signed
from zeroviz.capacities import DEFAULT_RESERVE_NBYTES, parse_capacity
from zeroviz.capacity_line import CapacityLine
from zeroviz.compare import Moment
from zeroviz.draw import (
    CAPACITY_DASH,
    OUTLINE_DASH,
    REFERENCE_DASH,
    TOOTH_DEPTH,
    draw,
    paper_of,
    placed,
    save_figure,
    svg_text,
)
from zeroviz.errors import ZerovizError
from zeroviz.models import PRESETS
from zeroviz.paper import Shape, Words, text_width
from zeroviz.predict import predict
from zeroviz.scene import Reference, Scene, build_scene
from zeroviz.spec import Implementation, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.state import ddp_peak
from zeroviz.style import FONT_POINTS, PAINT, PAPER
from zeroviz.trace import Category, Origin


def scene_of(*, ran: bool = False, **fields: object) -> Scene:
    trace = predict(RunSpec(**{"model": PRESETS["tiny"], "ranks": 4, **fields}))  # type: ignore[arg-type]
    return build_scene(trace, replace(trace, origin=Origin.LIVE) if ran else None)


def on_gpu(gpu: str, *, ddp: bool = True, ran: bool = False, **fields: object) -> Scene:
    """llama3-8b on a GPU, beside DDP's peak, as on the page."""
    spec = RunSpec(
        **{"model": PRESETS["llama3-8b"], "ranks": 8, "precision": Precision.BF16_MIXED, "seq": 4096, **fields}
    )  # type: ignore[arg-type]
    trace, line = predict(spec), CapacityLine.of(parse_capacity(gpu), DEFAULT_RESERVE_NBYTES)
    reference = ddp_peak(spec) if ddp else None
    return build_scene(trace, replace(trace, origin=Origin.LIVE) if ran else None, reference=reference, capacity=line)


SCENES = {
    "one rank": scene_of(ranks=1, strategy=Strategy.DDP),
    "four": scene_of(),
    "eight measured": scene_of(ran=True, ranks=8, precision=Precision.BF16_MIXED),
    "sixteen measured": scene_of(ran=True, ranks=16, strategy=Strategy.ZERO2),
    "sixty-four": scene_of(ranks=64, precision=Precision.BF16_FP32GRAD),
    "large": scene_of(model=PRESETS["llama3-70b"], ranks=16, unit=UnitPolicy.parse("layer"), strategy=Strategy.ZERO1),
    "given back": scene_of(ranks=8, batch=2, seq=128),
    "few units": scene_of(model=PRESETS["llama3-70b"], ranks=64, unit=UnitPolicy.parse("numel:2e9")),
}
WITHIN = {
    "does not fit": on_gpu("a100-40gb"),
    "longest bar": on_gpu("a100-40gb", ddp=False, ran=True),
    "one bar": on_gpu("h100-80gb", ranks=64, strategy=Strategy.DDP),
    "far too large": on_gpu("h100-80gb", model=PRESETS["llama3-70b"]),
    "through the reference's words": on_gpu("100GB", ran=True),
    "at the reference": on_gpu("h200-141gb", ranks=16, strategy=Strategy.HYBRID_SHARD, shard_ranks=8),
    "beyond the reference": on_gpu("155GB", ran=True),
    "at the left": on_gpu("3GB", ran=True, strategy=Strategy.DDP, ranks=2),
    "given back beyond": on_gpu("20GB", ranks=4, ddp=False),
    "uneven ranks": on_gpu(
        "3GB", model=PRESETS["gpt2"], ranks=6, impl=Implementation.FSDP2, seq=512, precision=Precision.FP32, ddp=False
    ),
}
BEYOND = {
    "tiny": on_gpu("h100-80gb", model=PRESETS["tiny"], ranks=4, seq=32, ran=True),
    "long words": on_gpu("85899345920000", ran=True, ranks=2),
    "few": on_gpu("h100-80gb", model=PRESETS["tiny"], ranks=64, seq=32, ddp=False),
}
SCENES |= WITHIN | BEYOND


@pytest.mark.parametrize("name", SCENES)
def test_svg_holds_every_mark_and_word(name: str) -> None:
    scene = SCENES[name]
    text = svg_text(scene)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.get("width") == "100%" and root.get("viewBox")
    marks = {path.get("data-mark"): path for path in root.iter(f"{SVG}path") if path.get("data-mark")}
    line = {"capacity"} if scene.capacity else set()
    assert set(marks) == {mark.id for mark in (*scene.rows, *scene.segments, *scene.paddings, *scene.beyond)} | line
    for segment in scene.segments:
        assert marks[segment.id].get("data-nbytes") == str(segment.nbytes)
        tooltip = marks[segment.id].find(f"{SVG}title")
        assert tooltip is not None and f"{segment.nbytes:,} B" in (tooltip.text or "")
    words = said_in(text)
    for line in (scene.title, scene.recipe, *(row.source_label for row in scene.rows), scene.axis_label):
        assert line in words
    # Long lines are wrapped, so their words are looked for one by one.
    assert set(" ".join((*scene.subtitle, *scene.notes)).split()) <= set(words.split())


@pytest.mark.parametrize("name", SCENES)
def test_no_word_leaves_the_paper_or_covers_another(name: str) -> None:
    assert_words_have_room(draw(SCENES[name]))


def test_all_text_is_legible_from_afar() -> None:
    sizes = {float(size) for size in re.findall(r'font-size="([\d.]+)"', svg_text(SCENES["eight measured"]))}
    assert sizes and min(sizes) >= FONT_POINTS >= 14


def test_what_lives_only_within_the_step_is_hatched_and_what_is_held_is_not() -> None:
    scene = SCENES["eight measured"]
    root = ElementTree.fromstring(svg_text(scene))
    fills = {path.get("data-mark"): path.get("fill", "") for path in root.iter(f"{SVG}path") if path.get("data-mark")}
    for segment in scene.segments:
        assert ("url(#" in fills[segment.id]) == ("-peak-" in segment.id), segment.id
    for padding in scene.paddings:
        assert "url(#" in fills[padding.id]


def test_figures_are_never_in_two_pictures_ids() -> None:
    """Two pictures of one scene may stand in one page, so marks carry no id."""
    assert not re.search(r'<(?!pattern)[^>]* id="', svg_text(SCENES["four"]))


def test_the_same_scene_gives_the_same_bytes(tmp_path: Path) -> None:
    assert_same_bytes_again(lambda path: save_figure(SCENES["four"], path), tmp_path)
    assert svg_text(SCENES["four"]) == svg_text(SCENES["four"])
    svg, pdf = (tmp_path / "1.svg").read_text(), (tmp_path / "1.pdf").read_bytes()
    assert "<text" in svg and SCENES["four"].title in svg
    assert b"/Subtype /Type0" in pdf or b"CIDFontType2" in pdf  # Type 42: text that can be searched and copied


def test_an_unknown_format_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ZerovizError, match=r"\.svg, \.png or \.pdf"):
        save_figure(SCENES["four"], tmp_path / "picture.bmp")


def test_a_reference_is_drawn_with_its_name() -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=4))
    assert "peak of DDP 10.00 MB" in svg_text(build_scene(trace, reference=Reference(10**7, "peak of DDP")))


def test_names_in_a_picture_are_text_and_never_markup() -> None:
    assert_odd_name_is_text(svg_text(build_scene(predict(RunSpec(model=ODD, ranks=2)))))


@pytest.mark.parametrize(("difference", "words"), [(0, "0 B"), (16, "+16 B"), (-40, "-40 B"), (12_345, "+12.34 kB")])
def test_signed_says_zero_plainly(difference: int, words: str) -> None:
    assert signed(difference) == words


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(color: str, deficiency: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of a colour as someone with the deficiency sees it."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(deficiency @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("name", DEFICIENCIES)
def test_categories_are_told_apart_by_colour_or_by_hatch(name: str) -> None:
    seen = {category: lab(PAINT[category].color, DEFICIENCIES[name]) for category in Category}
    for one, other in combinations(Category, 2):
        distance = np.linalg.norm(seen[one] - seen[other])
        assert distance > 14 or PAINT[one].hatch != PAINT[other].hatch, (one, other, distance)
    assert all(np.linalg.norm(color - lab(PAPER, DEFICIENCIES[name])) > 14 for color in seen.values())


def test_nothing_imports_pyplot() -> None:
    code = """
import sys
import zeroviz.panel
from zeroviz.draw import svg_text
from zeroviz.models import PRESETS
from zeroviz.paper import Shape, Words, text_width
from zeroviz.predict import predict
from zeroviz.scene import build_scene
from zeroviz.spec import RunSpec

svg_text(build_scene(predict(RunSpec(model=PRESETS["tiny"]))))
sys.exit(any(name in sys.modules for name in ("matplotlib.pyplot", "torch", "ipyparallel")))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_what_is_given_back_before_the_peak_is_a_white_strip_with_words_of_its_own() -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=2, batch=2, seq=128))
    scene = build_scene(replace(trace, origin=Origin.REHEARSED))
    root = ElementTree.fromstring(svg_text(scene))
    marks = {path.get("data-mark"): path for path in root.iter(f"{SVG}path") if path.get("data-mark")}
    strips = [segment for segment in scene.segments if segment.is_given_back]
    assert len(strips) == 2
    for strip in strips:
        assert marks[strip.id].get("fill") == PAPER and marks[strip.id].get("stroke") == PAINT[strip.category].color
        assert "given back before the peak" in "".join(marks[strip.id].itertext())
    words = said_in(svg_text(scene))
    assert "given back before the peak" in words and "Solid, to the thick mark" not in words
    # A strip lies over the bar: later in the file than every hatched segment.
    order = list(marks)
    hatched = [order.index(segment.id) for segment in scene.segments if segment.moment is Moment.PEAK]
    assert min(order.index(strip.id) for strip in strips) > max(hatched)


@pytest.mark.parametrize("origin", Origin)
@pytest.mark.parametrize("ranks", [1, 3, 20])
def test_every_row_of_ranks_is_named_once_whoever_saw_it(origin: Origin, ranks: int) -> None:
    scene = build_scene(replace(predict(RunSpec(model=PRESETS["tiny"], ranks=ranks)), origin=origin))
    texts = ["".join(e.itertext()) for e in ElementTree.fromstring(svg_text(scene)).iter(f"{SVG}text")]
    for row in scene.rows:
        assert texts.count(row.rank_label) == 1


# ---- what a GPU has ----


def shapes_of(scene: Scene) -> dict[str, Shape]:
    """Marks by name, as laid out."""
    return {s.data["mark"]: s for s in paper_of(scene).shapes if isinstance(s, Shape) and "mark" in s.data}


@pytest.mark.parametrize("name", WITHIN)
def test_the_line_stands_at_the_budget_with_a_dash_of_its_own(name: str) -> None:
    scene = SCENES[name]
    assert scene.capacity is not None
    page, line = placed(scene), shapes_of(scene)["capacity"]
    (x, top), (same, bottom) = line.points
    budget = scene.capacity.budget_nbytes
    assert x == same == pytest.approx(page["left"] + (page["right"] - page["left"]) * budget / page["most"])
    assert all(top < y and y + height < bottom for y, height, _ in page["bars"])
    dashes = [s.dash for s in paper_of(scene).shapes if isinstance(s, Shape) and s.dash]
    assert dashes.count(line.dash) == 1 and len({CAPACITY_DASH, OUTLINE_DASH, REFERENCE_DASH}) == 3
    assert (
        line.line > max(s.line for s in paper_of(scene).shapes if isinstance(s, Shape) and s.dash and s is not line) - 2
    )
    assert line.tip == scene.notes[0] and line.data["nbytes"] == str(budget)


@pytest.mark.parametrize("name", WITHIN)
def test_the_line_runs_through_no_word(name: str) -> None:
    (x, top), (_, bottom) = shapes_of(SCENES[name])["capacity"].points
    for words in (each for each in paper_of(SCENES[name]).shapes if isinstance(each, Words)):
        width = text_width(words.text, words.points, "bold" if words.is_bold else "normal")
        left = words.x - {"start": 0.0, "middle": width / 2, "end": width}[words.anchor]
        beside = x < left or x > left + width
        assert beside or words.y + words.points * 0.4 < top or words.y - words.points * 0.4 > bottom, words


@pytest.mark.parametrize("name", WITHIN)
def test_what_lies_beyond_is_under_a_saw_and_not_under_colour_alone(name: str) -> None:
    scene, shapes = SCENES[name], shapes_of(SCENES[name])
    for mark in scene.beyond:
        saw, bar = shapes[mark.id], shapes[scene.rows[mark.row].id]
        xs, ys = [x for x, _ in saw.points], [y + saw.down for _, y in saw.points]
        assert min(xs) == pytest.approx(shapes["capacity"].points[0][0]) and max(xs) == pytest.approx(bar.points[1][0])
        assert min(ys) == bar.points[0][1] and max(ys) == pytest.approx(bar.points[0][1] + TOOTH_DEPTH)
        assert saw.data["nbytes"] == str(mark.nbytes) and f"{mark.nbytes:,} B beyond" in saw.tip
    assert ("Below the saw" in svg_text(scene)) == bool(scene.beyond)


@pytest.mark.parametrize("name", BEYOND)
def test_a_line_beyond_the_axis_is_an_arrow_with_words(name: str) -> None:
    scene = SCENES[name]
    assert scene.capacity is not None and not scene.beyond
    assert f"{scene.capacity.words}, beyond the axis" in svg_text(scene)
    arrow = shapes_of(scene)["capacity"]
    words = [s for s in paper_of(scene).shapes if isinstance(s, Words) and "beyond the axis" in s.text]
    assert words[0].x < min(x for x, _ in arrow.points) and max(x for x, _ in arrow.points) <= paper_of(scene).width
    assert not any(s.dash == CAPACITY_DASH for s in paper_of(scene).shapes if isinstance(s, Shape))


@pytest.mark.parametrize("name", SCENES)
def test_with_a_window_to_itself_it_is_as_wide_as_that_lets_it_be(name: str) -> None:
    """Longer bars and no larger height; one that is as wide as the window, or wider, stays as it is."""
    page, wide = placed(SCENES[name]), placed(SCENES[name], aspect=1.86)

    def size(svg: str) -> tuple[float, float]:
        width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # type: ignore[union-attr]
        return float(width), float(height)

    (width, height), (wider, lower) = size(page["svg"]), size(wide["svg"])
    assert lower <= height and wide.keys() == page.keys() and wide["most"] == page["most"]
    if wider > width:
        assert wider <= 1.86 * lower and wide["right"] - wide["left"] > page["right"] - page["left"]
    else:
        assert wide == page
    assert placed(SCENES[name], aspect=0.5) == page


def test_a_capacity_changes_no_key_of_the_page_and_no_picture_without_it() -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=4))
    assert svg_text(build_scene(trace)) == svg_text(build_scene(trace, capacity=None))
    assert placed(SCENES["does not fit"]).keys() == placed(SCENES["four"]).keys() == {
        "svg", "left", "right", "most", "bars",
    }  # fmt: skip


def test_a_capacitys_name_is_text_and_never_markup() -> None:
    line = CapacityLine("<script>alert(1)</script>", 10**6, 0)
    text = svg_text(build_scene(predict(RunSpec(model=PRESETS["tiny"], ranks=2)), capacity=line))
    assert "<script" not in text and ElementTree.fromstring(text) is not None
