"""The map on paper: every cell with its sign, the boundary and the present state marked, without colour alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.view.drawn import SVG, assert_words_have_room
from tests.view.test_draw import DEFICIENCIES, lab
from tests.view.test_draw_wire import luminance
from zeroviz.capacities import DEFAULT_RESERVE_NBYTES, parse_capacity
from zeroviz.draw_heatmap import HATCH, heatmap_svg, paper_of, save_heatmap
from zeroviz.heatmap import HeatMap, Upward, build_heatmap
from zeroviz.models import PRESETS
from zeroviz.panel import fit
from zeroviz.panel.look import CSS
from zeroviz.paper import BACKING, Shape
from zeroviz.spec import Precision, RunSpec, Strategy
from zeroviz.style import EXCEEDS, FITS, INK, MUTED, PAGE_INKS, PAPER


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
    assert_words_have_room(paper_of(MAPS[name]).figure())


# ---- on a page, light or dark ----


def inks_of(rule: str) -> dict[str, str]:
    """The variables that a rule of the page's style sheet sets."""
    return dict(re.findall(r"(--zv-[\w-]+): (#[0-9a-f]{6})", CSS.partition(f"{rule} {{")[2].partition("}")[0]))


THEMES = {"light": inks_of("\n.zeroviz-explorer"), "dark": inks_of('\n[data-jp-theme-light="false"] .zeroviz-explorer')}


def on_page(color: str, theme: str) -> str:
    """A colour of the picture as a page of `theme` shows it; `currentColor` is what a drawing's rule says."""
    said = PAGE_INKS[color]
    name = "--zv-ink" if said == "currentColor" else said.removeprefix("var(").partition(",")[0]
    return THEMES[theme][name]


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio, from 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def over(above: str, below: str, share: float) -> str:
    """`above` over `below` where it covers a share of it, as a browser blends two colours."""
    pairs = [(int(above[at : at + 2], 16), int(below[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)


def test_a_page_has_every_ink_in_both_themes_and_is_light_by_default() -> None:
    assert ".zeroviz-drawing { color: var(--zv-ink, #1a1a1a); }" in CSS
    assert set(THEMES["light"]) == set(THEMES["dark"])
    for color in PAGE_INKS:
        assert on_page(color, "light") == color.lower()
    assert {on_page(color, "light") for color in PAGE_INKS}.isdisjoint(on_page(color, "dark") for color in PAGE_INKS)
    assert luminance(on_page(PAPER, "dark")) < 0.02  # black is 0
    for tint in (*FITS, *EXCEEDS):
        assert luminance(on_page(tint, "dark")) < 0.15 and luminance(on_page(tint, "light")) > 0.45


@pytest.mark.parametrize("theme", THEMES)
def test_words_are_legible_on_every_cell_of_either_theme(theme: str) -> None:
    """4.5:1 is what WCAG asks of text. What does not fit is hatched, and its words are backed by paper: at worst they
    stand on what shines through of a stroke of the hatch."""
    ink, paper = on_page(INK, theme), on_page(PAPER, theme)
    for tint in FITS:
        assert contrast(ink, on_page(tint, theme)) >= 4.5, tint
    for tint in EXCEEDS:
        assert contrast(ink, on_page(tint, theme)) >= 4.5, tint
        for below in (on_page(tint, theme), ink):
            assert contrast(ink, over(paper, below, BACKING)) >= 4.5, tint
    for color in (INK, MUTED):
        assert contrast(on_page(color, theme), paper) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", DEFICIENCIES)
def test_fits_and_does_not_differ_to_any_eye_by_hue_and_without_one_by_the_hatch(name: str, theme: str) -> None:
    for fits in FITS:
        for exceeds in EXCEEDS:
            seen = [lab(on_page(tint, theme), DEFICIENCIES[name]) for tint in (fits, exceeds)]
            assert np.linalg.norm(seen[0] - seen[1]) > 14, (fits, exceeds)
    for tint in EXCEEDS:  # 3:1 is what WCAG asks of a sign that is no text
        assert contrast(on_page(INK, theme), on_page(tint, theme)) >= 3


@pytest.mark.parametrize("name", MAPS)
def test_on_a_page_every_colour_is_the_pages_and_in_a_file_none_is(name: str, tmp_path: Path) -> None:
    heatmap = MAPS[name]
    page, file = heatmap_svg(heatmap, on_page=True), heatmap_svg(heatmap)
    colors = re.compile(r'(?:fill|stroke)="([^"]+)"')
    plain = {"none", *(color for color in colors.findall(page) if color.startswith("url("))}
    assert set(colors.findall(page)) - plain <= set(PAGE_INKS.values())
    assert set(colors.findall(file)) - plain <= set(PAGE_INKS)
    assert "var(" not in file and "currentColor" not in file
    # The hatch is drawn in the page's ink, or it would be lost in a dark cell.
    hatches = re.findall(r"<pattern.*?</pattern>", page)
    assert hatches and all('stroke="currentColor"' in hatch for hatch in hatches)
    # They differ in colours alone.
    assert colors.sub("", page).replace(' class="zl"', "") == colors.sub("", file)
    save_heatmap(heatmap, tmp_path / "map.svg")
    assert (tmp_path / "map.svg").read_text().endswith(file)


def test_the_page_shows_the_map_in_its_theme() -> None:
    assert fit(batch=2).fit.picture.value == heatmap_svg(fit(batch=2).state.heatmap(), on_page=True)


def test_files_and_names(tmp_path: Path) -> None:
    for suffix in (".svg", ".png", ".pdf"):
        save_heatmap(MAPS["batch"], tmp_path / f"map{suffix}")
        assert (tmp_path / f"map{suffix}").stat().st_size > 5000
    odd = replace(PRESETS["tiny"], name="<script>alert(1)</script>")
    assert "<script" not in heatmap_svg(map_of(Upward.BATCH, model=odd, seq=32))
