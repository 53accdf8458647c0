"""The map on paper: every cell with its sign, the boundary and the present state marked, without colour alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tests.view.test_draw import DEFICIENCIES, lab
from zeroviz.capacities import DEFAULT_RESERVE_NBYTES, parse_capacity
from zeroviz.draw_heatmap import EXCEEDS, FITS, HATCH, heatmap_svg, paper_of, save_heatmap
from zeroviz.heatmap import HeatMap, Upward, build_heatmap
from zeroviz.models import PRESETS
from zeroviz.paper import Shape
from zeroviz.spec import Precision, RunSpec, Strategy
from zeroviz.style import INK

SVG = "{http://www.w3.org/2000/svg}"


def map_of(upward: Upward, gpu: str = "h100-80gb", **fields: Any) -> HeatMap:
    spec = {"model": PRESETS["llama3-8b"], "ranks": 8, "precision": Precision.BF16_MIXED, "seq": 4096, **fields}
    return build_heatmap(RunSpec(**spec), upward, parse_capacity(gpu), DEFAULT_RESERVE_NBYTES)


MAPS = {
    "batch": map_of(Upward.BATCH),
    "sequence": map_of(Upward.SEQ, ranks=3),
    "tiny": map_of(Upward.BATCH, model=PRESETS["tiny"], seq=32),
    "nothing fits": map_of(Upward.SEQ, "a100-40gb", model=PRESETS["llama3-70b"], strategy=Strategy.DDP),
}


def cells_of(heatmap: HeatMap) -> dict[tuple[int, int], Shape]:
    shapes = [shape for shape in paper_of(heatmap).shapes if isinstance(shape, Shape) and "spare" in shape.data]
    return {(int(shape.data["ranks"]), int(shape.data["value"])): shape for shape in shapes}


@pytest.mark.parametrize("name", MAPS)
def test_every_cell_is_in_its_place_with_its_sign(name: str) -> None:
    heatmap = MAPS[name]
    cells = cells_of(heatmap)
    assert len(cells) == len(heatmap.ranks) * len(heatmap.values)
    lefts = {ranks: {shape.points[0][0] for (r, _), shape in cells.items() if r == ranks} for ranks in heatmap.ranks}
    assert [min(lefts[ranks]) for ranks in heatmap.ranks] == sorted(min(xs) for xs in lefts.values())
    root = ElementTree.fromstring(heatmap_svg(heatmap))
    words = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    for row in heatmap.rows:
        for cell in row:
            shape = cells[cell.ranks, cell.value]
            assert shape.data["spare"] == str(cell.spare_nbytes) and f"{cell.peak_nbytes:,} B" in shape.tip
            assert (shape.hatch is None, shape.fill in FITS) == (cell.fits, cell.fits)
            assert (shape.hatch == HATCH, shape.fill in EXCEEDS) == (not cell.fits, not cell.fits)
            assert cell.words in words
    # The first row lies lowest: batch and sequence grow upward.
    lowest = [cells[heatmap.ranks[0], value].points[0][1] for value in heatmap.values]
    assert lowest == sorted(lowest, reverse=True)


@pytest.mark.parametrize("name", MAPS)
def test_the_boundary_is_drawn_thick_along_the_cells(name: str) -> None:
    heatmap = MAPS[name]
    lines = [s for s in paper_of(heatmap).shapes if isinstance(s, Shape) and s.is_open and s.line == 3.0]
    assert len(lines) == len(heatmap.boundary) and all(line.edge == INK for line in lines)
    corners = {(round(x, 3), round(y, 3)) for shape in cells_of(heatmap).values() for x, y in shape.points}
    for line in lines:
        assert {(round(x, 3), round(y, 3)) for x, y in line.points} <= corners


@pytest.mark.parametrize("name", MAPS)
def test_the_present_state_is_framed(name: str) -> None:
    heatmap = MAPS[name]
    (frame,) = [s for s in paper_of(heatmap).shapes if isinstance(s, Shape) and s.fill is None and s.line == 2.0]
    cell = cells_of(heatmap)[heatmap.current.ranks, heatmap.current.value]
    (x0, y0), _, (x1, y1), _ = cell.points
    assert all(x0 < x < x1 and y0 < y < y1 for x, y in frame.points)


@pytest.mark.parametrize("name", MAPS)
def test_no_word_leaves_the_paper_or_covers_another(name: str) -> None:
    figure = paper_of(MAPS[name]).figure()
    FigureCanvasAgg(figure).draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in figure.axes[0].texts]
    for words, box in boxes:
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1, words
    for (words, box), (others, other) in combinations(boxes, 2):
        overlap = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
        assert min(overlap) <= 3.5, (words, others)


@pytest.mark.parametrize("name", DEFICIENCIES)
def test_words_stand_out_from_every_tint(name: str) -> None:
    """Lightness carries the words, whatever hues an eye can tell: L* of ink is about 9."""
    for tint in (*FITS, *EXCEEDS):
        assert lab(tint, DEFICIENCIES[name])[0] - lab(INK, np.eye(3))[0] > 55


def test_files_and_names(tmp_path: Path) -> None:
    for suffix in (".svg", ".png", ".pdf"):
        save_heatmap(MAPS["batch"], tmp_path / f"map{suffix}")
        assert (tmp_path / f"map{suffix}").stat().st_size > 5000
    odd = replace(PRESETS["tiny"], name="<script>alert(1)</script>")
    assert "<script" not in heatmap_svg(map_of(Upward.BATCH, model=odd, seq=32))
