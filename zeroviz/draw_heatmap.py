"""HeatMap -> picture: a grid of cells, each with its sign and what is left or missing.

Whether a cell fits is said four times: by its colour, by a hatch over what does not fit, by the sign in it and by the
thick line between the two.
"""

from __future__ import annotations

from pathlib import Path

from zeroviz.head import LINE, MARGIN, ROOM, WIDTH, headed
from zeroviz.heatmap import Cell, HeatMap
from zeroviz.labels import Say
from zeroviz.paper import Paper, text_width
from zeroviz.style import EXCEEDS, FITS, INK, MUTED

NAME = "zeroviz-heatmap"
CELL_HEIGHT = 25.0
HATCH = "//"


def paper_of(heatmap: HeatMap) -> Paper:
    """The picture laid out."""
    paper = Paper(WIDTH)
    y = _head(paper, heatmap)
    left = MARGIN + max(text_width(f"{value:,}") for value in heatmap.values) + 8
    left = max(left, MARGIN + text_width(heatmap.upward.value) + 8)
    width = (WIDTH - MARGIN - left) / len(heatmap.ranks)
    bottom = y + CELL_HEIGHT * len(heatmap.values)

    def corner(column: int, row: int) -> tuple[float, float]:
        """A corner of the grid, counted from the lower left."""
        return left + width * column, bottom - CELL_HEIGHT * row

    for row, cells in enumerate(heatmap.rows):
        for column, cell in enumerate(cells):
            x, lower = corner(column, row)
            _cell(paper, heatmap, cell, x, lower - CELL_HEIGHT, width)
        paper.text(left - 8, corner(0, row)[1] - CELL_HEIGHT / 2, f"{heatmap.values[row]:,}", anchor="end")
    for column, ranks in enumerate(heatmap.ranks):
        paper.text(corner(column, 0)[0] + width / 2, bottom + LINE * 0.7, f"{ranks:,}", anchor="middle")
    for x0, y0, x1, y1 in heatmap.boundary:
        paper.line((corner(x0, y0), corner(x1, y1)), INK, 3.0)
    now = heatmap.current
    x, lower = corner(heatmap.ranks.index(now.ranks), heatmap.values.index(now.value))
    paper.rectangle(x + 2.5, lower - CELL_HEIGHT + 2.5, width - 5, CELL_HEIGHT - 5, line=2.0)
    y = bottom + LINE * 1.7
    paper.text(left + width * len(heatmap.ranks) / 2, y, "ranks", anchor="middle", color=MUTED)
    for note in heatmap.notes:
        for line in paper.wrapped(note, ROOM):
            y += LINE
            paper.text(MARGIN, y, line, color=MUTED)
    paper.height = y + LINE * 0.5 + MARGIN
    return paper


def heatmap_svg(heatmap: HeatMap, *, on_page: bool = False, say: Say = str) -> str:
    """The picture as one `<svg>` element. on_page: in the page's theme; else as a file has it, light. say: what each
    label is put as."""
    return paper_of(heatmap).svg(NAME, heatmap.sentence, on_page=on_page, say=say)


def save_heatmap(heatmap: HeatMap, path: Path) -> None:
    """Write the picture as .svg, .png or .pdf."""
    paper_of(heatmap).save(path, NAME, heatmap.sentence)


def _head(paper: Paper, heatmap: HeatMap) -> float:
    """Title, what is asked, and the key. Returns where the grid begins."""
    y = headed(paper, heatmap.title, heatmap.subtitle)
    y, x = y + LINE * 1.3, MARGIN
    for fill, hatch, words in (
        (FITS[1], None, "+ fits, GB to spare"),
        (EXCEEDS[1], HATCH, "- does not fit, GB missing (k: 1,000 GB)"),
    ):
        paper.rectangle(x, y - 8, 25, 16, fill, hatch, line=0.8)
        paper.text(x + 32, y, words)
        x += 32 + text_width(words) + 24
    paper.text(MARGIN, y + LINE * 1.1, heatmap.upward.value, color=MUTED)
    return y + LINE * 1.8


def _cell(paper: Paper, heatmap: HeatMap, cell: Cell, x: float, y: float, width: float) -> None:
    budget = heatmap.budget_nbytes
    # Thirds of the budget that are free, and excess of up to one budget, up to four, beyond.
    free, over = cell.spare_nbytes * 3 // budget, -cell.spare_nbytes
    tint = FITS[2 - min(2, free)] if cell.fits else EXCEEDS[(over > budget) + (over > 4 * budget)]
    excess = f"{abs(cell.spare_nbytes):,} B {'to spare' if cell.fits else 'too much'}"
    tip = f"{cell.ranks:,} ranks, {heatmap.upward.value} {cell.value:,}: peak {cell.peak_nbytes:,} B, {excess}"
    data = {"ranks": str(cell.ranks), "value": str(cell.value), "spare": str(cell.spare_nbytes)}
    paper.rectangle(
        x, y, width, CELL_HEIGHT, tint, None if cell.fits else HATCH, line=0.4, tip=tip, data=data
    )  # fmt: skip
    if text_width(cell.words) + 4 <= width:
        paper.text(x + width / 2, y + CELL_HEIGHT / 2, cell.words, anchor="middle", is_backed=not cell.fits)
