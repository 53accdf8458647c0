"""Where the rows of a scene stand: the columns beside the bars, the axis between them, how far down each bar lies.

A row's name stands beside its bar or, where names are so long that they would leave the axis too little, above it; then
differences stand below their figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from zeroviz.axis import Tick
from zeroviz.head import LINE, MARGIN, WIDTH
from zeroviz.paper import Paper, text_width
from zeroviz.quantity import format_nbytes
from zeroviz.scene import Row, Scene

LEAST_AXIS = 0.5
"""What of the width names beside the bars leave the axis at least; names of ranks alone are short and always stand
there."""
PLOT_HEIGHT = 236.0
"""Height that four or more rows share, as long as they stay legible: the page then rests while a slider moves."""
MIN_BAR, MAX_BAR = 21.0, 46.0
GROUP_GAP = 0.4
TICK_GAP = 10.0


@dataclass(frozen=True)
class Layout:
    """In points. heads and edges: of the columns of figures, and where these end. tops: of each row's bar, and height
    of all, from where the plot begins; above: lines of names that stand over bars, with their middles."""

    heads: tuple[str, str]
    source_edge: float
    left: float
    right: float
    edges: tuple[float, float]
    bar: float
    tops: tuple[float, ...]
    height: float
    above: tuple[tuple[float, str], ...]

    def lines(self, words: str) -> list[str]:
        """Those of a figure or its head."""
        return lines_of(words, is_stacked=bool(self.above))


def layout_of(scene: Scene, width: float = WIDTH) -> Layout:
    """The rows of `scene` on paper of a width."""
    differs = any(row.rest_difference is not None for row in scene.rows)
    heads = ("at rest (difference)", "at peak (difference)") if differs else ("at rest", "at peak")
    columns = [(head, *(figures_of(scene, row)[i] for row in scene.rows)) for i, head in enumerate(heads)]
    sources = max(text_width(row.source_label) for row in scene.rows) + 10
    source_edge = MARGIN + 14 + max(text_width(row.rank_label, weight="bold") for row in scene.rows)
    right, edges = _columns(columns, width, is_stacked=False)
    is_above = any(row.name for row in scene.rows) and right - source_edge - sources < LEAST_AXIS * width
    if is_above:
        source_edge = MARGIN + 14
        right, edges = _columns(columns, width, is_stacked=True)
    groups = [list(rows) for _, rows in groupby(scene.rows, key=lambda row: row.group)]
    least = 2 * LINE if is_above and differs else MIN_BAR
    bar = max(least, min(MAX_BAR, PLOT_HEIGHT / (len(scene.rows) + GROUP_GAP * len(groups))))
    y, tops, above = 0.0, [], []
    for rows in groups:
        y += bar * GROUP_GAP / 2
        for line in Paper(width).wrapped(rows[0].rank_label, width - 2 * MARGIN, is_bold=True) if is_above else ():
            above.append((y + LINE / 2, line))
            y += LINE
        tops += [y + bar * number for number in range(len(rows))]
        y += bar * (len(rows) + GROUP_GAP / 2)
    return Layout(heads, source_edge, source_edge + sources, right, edges, bar, tuple(tops), y, tuple(above))


def _columns(columns: Sequence[Sequence[str]], width: float, *, is_stacked: bool) -> tuple[float, tuple[float, float]]:
    """Where the axis ends, and each of the two columns at its right."""
    rest, peak = (
        max(text_width(line) for words in column for line in lines_of(words, is_stacked=is_stacked)) + 14
        for column in columns
    )
    edges = width - MARGIN - peak, width - MARGIN
    return edges[0] - rest - 8, edges


def lines_of(words: str, *, is_stacked: bool) -> list[str]:
    """A figure or its head, in one line, or the difference below it."""
    figure, _, difference = words.partition(" (")
    return [figure, f"({difference}"] if is_stacked and difference else [words]


def figures_of(scene: Scene, row: Row) -> tuple[str, str]:
    """The two figures at the right of a row; a measured one says how far it is from the predicted one."""
    pairs = ((row.rest_nbytes, row.rest_difference), (row.peak_nbytes, row.peak_difference))
    rest, peak = (
        scene.amount(nbytes) + ("" if difference is None else f" ({signed(difference)})")
        for nbytes, difference in pairs
    )
    return rest, peak


def signed(difference: int) -> str:
    """A difference for a person: `+1.2 kB`, `-40 B`, and plainly `0 B`."""
    return f"{'+' if difference > 0 else ''}{format_nbytes(difference)}"


def named_ticks(ticks: tuple[Tick, ...], points_a_byte: float) -> tuple[Tick, ...]:
    """Of ticks an equal step apart, from the first on, as many as have room for their words."""
    if len(ticks) < 2:
        return ticks
    apart = (ticks[1].nbytes - ticks[0].nbytes) * points_a_byte
    widest = max(text_width(tick.label) for tick in ticks) + TICK_GAP
    return ticks[:: max(1, -int(-widest // apart))]
