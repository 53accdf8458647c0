"""The shard map on paper: every mark at its place and with its figures, every word legible, by both pens."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tests.view.drawn import (
    ODD,
    SVG,
    assert_odd_name_is_text,
    assert_same_bytes_again,
    assert_words_have_room,
    said_in,
    words_of,
)
from zeroviz.combs import LEAST, Axis, Tooth, comb, teeth_of
from zeroviz.draw import WIDTH
from zeroviz.draw_shard_map import (
    COPY_HATCH,
    LINE_POINTS,
    NAME,
    ROW_POINTS,
    TRACK,
    paper_of,
    save_shard_map,
    shard_map_svg,
)
from zeroviz.errors import ZerovizError
from zeroviz.models import PRESETS, bare
from zeroviz.paper import CLEAR, Paper, Shape
from zeroviz.predict import predict
from zeroviz.shard_map import ShardMap, build_shard_map
from zeroviz.shard_rules import Hold, Piece, Slot
from zeroviz.spec import Implementation, Offload, Optimizer, Precision, RunSpec, Settings, Strategy, UnitPolicy
from zeroviz.style import PADDING, PAINT

LLAMA = {"model": PRESETS["llama3-8b"], "precision": Precision.BF16_MIXED}


def map_of(**fields: Any) -> ShardMap:
    return build_shard_map(RunSpec(**{"model": PRESETS["tiny"], "ranks": 4, **fields}))


MAPS = {
    "ddp": map_of(strategy=Strategy.DDP),
    "zero1": map_of(strategy=Strategy.ZERO1, precision=Precision.BF16_MIXED),
    "zero2 offloaded": map_of(strategy=Strategy.ZERO2, offload=Offload.OPTIMIZER),
    "zero3": map_of(),
    "one rank": map_of(ranks=1),
    "sixteen": map_of(ranks=16),
    "sgd": map_of(optimizer=Optimizer.SGD),
    "groups": map_of(strategy=Strategy.HYBRID_SHARD, ranks=8, shard_ranks=4),
    "many groups": map_of(strategy=Strategy.HYBRID_SHARD, ranks=2**20, shard_ranks=4),
    "fsdp2": map_of(impl=Implementation.FSDP2, ranks=3),
    "fsdp1": map_of(impl=Implementation.FSDP1, ranks=3, settings=Settings(use_orig_params=True)),
    "zero_redundancy": map_of(impl=Implementation.ZERO_REDUNDANCY, strategy=Strategy.ZERO1, ranks=3),
    "deepspeed": map_of(impl=Implementation.DEEPSPEED),
    "megatron": map_of(impl=Implementation.MEGATRON, strategy=Strategy.MEGATRON_OPTIM, ranks=3),
    "bare": map_of(model=bare(72), unit=UnitPolicy.parse("model"), ranks=7),
    "llama 64": map_of(**LLAMA, ranks=64),
    "llama 64 whole": map_of(**LLAMA, ranks=64, strategy=Strategy.ZERO1),
    "llama 4096": map_of(**LLAMA, ranks=4096),
    "fsdp2 64": map_of(model=PRESETS["llama3-8b"], impl=Implementation.FSDP2, ranks=64),
    "a million": map_of(impl=Implementation.FSDP2, ranks=10**6),
    "layers": map_of(model=PRESETS["llama3-70b"], ranks=8, unit=UnitPolicy.parse("layer")),
    "deep": map_of(model=replace(PRESETS["tiny"], layers=3000), ranks=3),
    "long names": map_of(model=PRESETS["llama3-70b"], ranks=8, unit=UnitPolicy.parse("numel:2e9")),
}


def marks_of(paper: Paper) -> list[Shape]:
    """One for each row, class and way of holding."""
    return [shape for shape in paper.shapes if isinstance(shape, Shape) and "kind" in shape.data]


@pytest.mark.parametrize("name", MAPS)
def test_every_lane_has_one_mark_for_each_way_of_holding_with_its_bytes(name: str) -> None:
    shard_map = MAPS[name]
    marks = marks_of(paper_of(shard_map))
    keys = [(mark.data["rank"], mark.data["class"], mark.data["kind"]) for mark in marks]
    assert len(keys) == len(set(keys))
    expected = {
        (rank_of(shard_map, lane.row), panel.tensors.value, piece.hold.value)
        for panel in shard_map.panels
        for lane in panel.lanes
        for piece in lane.pieces
    }
    assert set(keys) == expected
    sums: Counter[tuple[str, str]] = Counter()
    for mark in marks:
        sums[mark.data["rank"], mark.data["class"]] += int(mark.data["nbytes"])
        assert f"{int(mark.data['nbytes']):,} B" in mark.tip
    for panel in shard_map.panels:
        for lane in panel.lanes:
            if lane.nbytes is not None:
                assert sums[rank_of(shard_map, lane.row), panel.tensors.value] == lane.nbytes


def rank_of(shard_map: ShardMap, row: int) -> str:
    ranks = shard_map.rows[row].ranks
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def test_bytes_of_a_rank_are_the_traces() -> None:
    """The figures under the pointer add up to what the rank holds at rest."""
    marks = marks_of(paper_of(MAPS["fsdp2"]))
    for rank in predict(MAPS["fsdp2"].spec).ranks:
        assert (
            sum(int(mark.data["nbytes"]) for mark in marks if mark.data["rank"] == str(rank.rank)) == rank.rest_nbytes
        )


def test_marks_say_their_units_and_groups() -> None:
    assert {mark.data["unit"] for mark in marks_of(paper_of(MAPS["llama 64"]))} == {"0-33"}
    zero_redundancy = marks_of(paper_of(MAPS["zero_redundancy"]))
    assert {mark.data["unit"] for mark in zero_redundancy if mark.data["class"] == "moments"} == {"0 2-3", "0-3"}
    groups = {
        (mark.data["rank"], mark.data["group"], mark.data["shard"]) for mark in marks_of(paper_of(MAPS["groups"]))
    }
    assert groups == {(str(rank), str(rank // 4), str(rank % 4)) for rank in range(8)}


def teeth(mark: Shape) -> list[tuple[float, float]]:
    """(x, end) of each tooth of a mark: four corners each."""
    return [(mark.points[at][0], mark.points[at + 2][0]) for at in range(0, len(mark.points), 4)]


def drawn_pieces(shard_map: ShardMap, paper: Paper) -> list[tuple[Shape, list[tuple[float, float]]]]:
    """Each mark with where its pieces begin and end by the axis."""
    columns = [s for s in paper.shapes if isinstance(s, Shape) and "unit-column" in s.data]
    axis = Axis(shard_map.slots, columns[0].points[0][0], columns[-1].points[1][0])
    lanes = {
        (panel.tensors.value, rank_of(shard_map, lane.row)): lane.pieces
        for panel in shard_map.panels
        for lane in panel.lanes
    }
    return [
        (
            mark,
            [
                (axis.x(piece.start), axis.x(piece.stop))
                for piece in lanes[mark.data["class"], mark.data["rank"]]
                if piece.hold.value == mark.data["kind"]
            ],
        )
        for mark in marks_of(paper)
    ]


@pytest.mark.parametrize(("name", "height"), [("zero3", 18), ("zero1", 18), ("groups", 13), ("sixteen", 7)])
def test_shards_lie_to_scale_and_are_as_high_as_their_lanes(name: str, height: int) -> None:
    for mark, pieces in drawn_pieces(MAPS[name], paper_of(MAPS[name])):
        if mark.data["kind"] == "owned":
            assert [x for tooth in teeth(mark) for x in tooth] == pytest.approx([x for piece in pieces for x in piece])
            assert {y for _, y in mark.points} == {mark.points[0][1], mark.points[0][1] - height}


@pytest.mark.parametrize("name", MAPS)
def test_every_piece_lies_in_a_tooth_and_no_tooth_beside_all_pieces(name: str) -> None:
    """Within the widths that LEAST and the grid of whole points add."""
    for mark, pieces in drawn_pieces(MAPS[name], paper_of(MAPS[name])):
        found = teeth(mark)
        assert all(a[0] < a[1] <= b[0] for a, b in pairwise(found))
        number = 0
        for x, end in pieces:
            while found[number][1] + 2 < end:
                number += 1
            assert found[number][0] - 2 <= x and end <= found[number][1] + 2
        starts = [x for x, _ in pieces]
        assert all(any(x - 3 <= start <= end + 3 for start in starts) for x, end in found)


@pytest.mark.parametrize("name", MAPS)
def test_the_parameters_panel_has_a_column_for_each_unit(name: str) -> None:
    """Side by side, as high as the panel, of no colour, and below the marks, which the pointer finds first."""
    shard_map = MAPS[name]
    shapes = [shape for shape in paper_of(shard_map).shapes if isinstance(shape, Shape)]
    columns = [shape for shape in shapes if "unit-column" in shape.data]
    assert [column.data["unit-column"] for column in columns] == [str(column.index) for column in shard_map.columns]
    assert all(column.fill == CLEAR for column in columns)
    assert all(a.points[1][0] == b.points[0][0] for a, b in pairwise(columns))
    assert len({(column.points[0][1], column.points[2][1]) for column in columns}) == 1
    top, bottom = columns[0].points[0][1], columns[0].points[2][1]
    lanes = [mark for mark in marks_of(paper_of(shard_map)) if mark.data["class"] == "param"]
    assert top <= min(mark.down + y for mark in lanes for _, y in mark.points)
    assert bottom >= max(mark.down + y for mark in lanes for _, y in mark.points)
    assert max(map(shapes.index, columns)) < min(shapes.index(mark) for mark in shapes if "kind" in mark.data)
    for column, shape in zip(shard_map.columns, columns, strict=True):
        is_wide = shape.points[1][0] - shape.points[0][0] >= LINE_POINTS
        assert shape.tip.startswith(f"{column.name}: {column.numel:,} elements") == is_wide


@pytest.mark.parametrize("name", MAPS)
def test_no_kind_is_told_by_colour_alone(name: str) -> None:
    """A whole copy is hatched, padding is cross-hatched or a low dark notch, a part is plain; the key says so."""
    shard_map = MAPS[name]
    paper = paper_of(shard_map)
    for mark in marks_of(paper):
        (panel,) = [panel for panel in shard_map.panels if panel.tensors.value == mark.data["class"]]
        if mark.data["kind"] == "padding":
            low = max(y for _, y in mark.points) - min(y for _, y in mark.points) < 6
            assert mark.fill == PADDING.color and (mark.hatch == PADDING.hatch or low or len(mark.points) > 4)
        else:
            assert mark.fill == PAINT[panel.category].color
            assert mark.hatch == (COPY_HATCH if mark.data["kind"] == "whole" else None)
    said = " ".join(words_of(paper))
    kinds = {mark.data["kind"] for mark in marks_of(paper)}
    for kind, words in (
        ("owned", "held by this rank alone"),
        ("whole", "a whole copy, the same"),
        ("owned", "not held"),
    ):
        assert (words in said) == (kind in kinds)
    if "padding" in kinds:
        assert PADDING.label in words_of(paper)


@pytest.mark.parametrize("name", MAPS)
def test_no_word_leaves_the_paper_or_covers_another(name: str) -> None:
    assert_words_have_room(paper_of(MAPS[name]).figure())


@pytest.mark.parametrize("name", MAPS)
def test_svg_is_whole_and_says_what_the_map_says(name: str) -> None:
    shard_map = MAPS[name]
    text = shard_map_svg(shard_map)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and NAME in str(root.get("class")).split() and root.get("width") == "100%"
    assert root.get("aria-label") == shard_map.sentence
    patterns = {pattern.get("id") for pattern in root.iter(f"{SVG}pattern")}
    assert set(re.findall(r'fill="url\(#([^)]+)\)"', text)) == patterns
    words = said_in(text)
    for panel in shard_map.panels:
        assert panel.label in words and panel.detail in words
    assert shard_map.title in words
    assert set(" ".join((*shard_map.subtitle, *shard_map.notes)).split()) <= set(words.split())
    assert min(float(points) for points in re.findall(r'font-size="([\d.]+)"', text)) >= ROW_POINTS >= 12
    assert not re.search(r' id="(?!zeroviz-)', text)
    assert paper_of(shard_map).width == WIDTH


@pytest.mark.parametrize(
    ("name", "most"),
    [("zero3", 12_000), ("llama 64", 60_000), ("llama 64 whole", 60_000), ("llama 4096", 60_000), ("fsdp2 64", 64_000)],
)
def test_svg_stays_light(name: str, most: int) -> None:
    """One path a mark. FSDP2 cuts 291 parameters where our own code cuts 34 units."""
    assert len(shard_map_svg(MAPS[name])) < most


def test_rows_are_named_or_told_under_the_pointer() -> None:
    for name in ("zero3", "groups", "llama 64", "a million"):
        said = Counter(words_of(paper_of(MAPS[name])))
        for row in MAPS[name].rows:
            assert said[row.label] == len(MAPS[name].panels)
    sixteen = paper_of(MAPS["sixteen"])
    said = Counter(words_of(sixteen))
    assert said["rank 14"] == 3 and said["rank 15"] == 0
    assert any(mark.tip.startswith("rank 15: Parameters") for mark in marks_of(sixteen))


def test_a_folded_row_says_what_its_ranks_hold() -> None:
    said = Counter(words_of(paper_of(MAPS["llama 64 whole"])))
    assert said["56 ranks, a whole copy on each"] == 2 and said["56 ranks, each its own part"] == 2
    empty = Counter(words_of(paper_of(MAPS["a million"])))
    assert empty["nothing"] == 4 and empty["0 B"] == 4  # the last ranks have no rows and so no moments


def test_units_are_named_first_those_that_are_no_blocks() -> None:
    said = words_of(paper_of(MAPS["llama 64"]))
    assert {"embed", "head", "2", "30", "block"} <= set(said) and "1" not in said
    assert {"root", "block 0", "block 1", "block 2"} <= set(words_of(paper_of(MAPS["zero3"])))


def test_the_same_map_gives_the_same_bytes(tmp_path: Path) -> None:
    assert_same_bytes_again(lambda path: save_shard_map(MAPS["zero1"], path), tmp_path)
    assert MAPS["zero1"].title in (tmp_path / "1.svg").read_text()


def test_an_unknown_format_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ZerovizError, match=r"\.svg, \.png or \.pdf"):
        save_shard_map(MAPS["zero3"], tmp_path / "map.bmp")


def test_names_in_a_picture_are_text_and_never_markup() -> None:
    assert_odd_name_is_text(shard_map_svg(map_of(model=ODD)))


# ---- from pieces to points ----


def test_an_axis_is_to_scale_and_too_much_padding_to_a_smaller_one() -> None:
    # 60 and 30 elements with 10 of padding between: 100 on 200 points.
    axis = Axis((Slot(0, 0, 60, 10), Slot(1, 70, 30, 0)), 50.0, 250.0)
    assert axis.padding_scale == 1 and [axis.x(at) for at in (0, 60, 70, 85, 100)] == [50, 170, 190, 220, 250]
    # 30 and 30 of parameters, 300 of padding: it gets half the width that they have, 30 elements' worth.
    axis = Axis((Slot(0, 0, 30, 300), Slot(1, 330, 30, 0)), 0.0, 90.0)
    assert axis.padding_scale == 0.1 and [axis.x(at) for at in (0, 30, 180, 330, 360)] == [0, 30, 45, 60, 90]


def test_what_is_narrow_is_wider_and_lower_within_its_unit() -> None:
    axis, edges = Axis((Slot(0, 0, 1000, 0),), 0.0, 100.0), [(0.0, 100.0)]
    wide, narrow, last = Piece(0, 300, 0, Hold.OWNED), Piece(500, 501, 0, Hold.OWNED), Piece(999, 1000, 0, Hold.OWNED)
    width, height = LEAST[Hold.OWNED]
    first, middle, end = teeth_of([wide, narrow, last], Hold.OWNED, axis, edges)
    assert first == Tooth(0, 30, 1)
    assert (middle.x + middle.stop) / 2 == pytest.approx(50.05) and middle.stop - middle.x == pytest.approx(width)
    assert middle.height == height
    assert (end.x, end.stop) == pytest.approx((100 - width, 100))  # not beyond the unit


def test_pieces_that_touch_are_one_tooth_and_many_stay_few() -> None:
    axis, edges = Axis((Slot(0, 0, 1000, 0),), 0.0, 100.0), [(0.0, 100.0)]
    touching = [Piece(0, 100, 0, Hold.OWNED), Piece(103, 200, 0, Hold.OWNED)]
    assert teeth_of(touching, Hold.OWNED, axis, edges) == [Tooth(0, 20, 1)]
    slivers = [Piece(at, at + 1, 0, Hold.OWNED) for at in range(0, 1000, 10)]  # a point apart, a tenth wide
    (one,) = teeth_of(slivers, Hold.OWNED, axis, edges)
    assert one.height == LEAST[Hold.OWNED][1]  # a tenth of it is theirs, and it looks like little


def test_a_comb_runs_round_its_teeth_along_the_lower_edge() -> None:
    assert comb([Tooth(1, 3), Tooth(5, 6, 0.5)], 10, 20) == [
        (1, 20), (1, 10), (3, 10), (3, 20), (5, 20), (5, 15), (6, 15), (6, 20),
    ]  # fmt: skip


def test_nothing_is_lit_between_the_teeth_of_a_comb() -> None:
    """The lower edge, along which teeth hang together, is of no height: matplotlib paints the lane there."""
    paper = Paper(100)
    paper.height = 30
    paper.rectangle(0, 10, 100, 10, TRACK)
    paper.add(Shape(comb([Tooth(10, 30), Tooth(60, 80)], 10, 20), "#000000"))
    canvas = FigureCanvasAgg(paper.figure())
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())
    height, width, _ = image.shape

    def color(x: float, y: float) -> tuple[int, ...]:
        return tuple(int(part) for part in image[int(y / 30 * height), int(x / 100 * width), :3])

    assert color(20, 15) == color(70, 15) == (0, 0, 0)
    track = tuple(int(TRACK[at : at + 2], 16) for at in (1, 3, 5))
    assert color(45, 15) == color(45, 19) == color(5, 15) == track
