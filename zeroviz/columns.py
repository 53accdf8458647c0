"""Columns of text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap

WIDTH = 80
_LABEL_WIDTH = 24
_LONG = 32
"""Letters of a heading. To make room for one as long as this a column of figures would have to go."""
_BINARY = "binary"


def columns(rows: Iterable[Sequence[str]], min_width: int = 13) -> list[str]:
    """Align cells: the first to the left, the others to the right, each at least two spaces from its neighbour.

    Columns are at least `min_width` wide, and narrower where the line would not fit otherwise; then one space apart.
    For figures wider still columns are left out that say in short what others say exactly: the one headed `binary`
    first, in every table that has it, then the last. A heading too long to stand beside its columns stands above them.
    """
    cells = [list(row) for row in rows]
    title, *heads = cells[0]
    if len(title) > _LONG and not _fits(cells):
        return [*wrap(title, WIDTH, subsequent_indent="  "), *columns([["", *heads], *cells[1:]], min_width)]
    if not _fits(cells) and _BINARY in cells[0]:
        position = cells[0].index(_BINARY)
        cells = [[*row[:position], *row[position + 1 :]] for row in cells]
    if not _fits(cells):
        cells = [row[:-1] for row in cells]
    widths = _widths(cells)
    label_width = max(widths[0], _LABEL_WIDTH)
    gap = 2 if label_width + sum(width + 2 for width in widths[1:]) <= WIDTH else 1
    least = [width + gap for width in widths[1:]]
    while min_width and label_width + sum(max(width, min_width) for width in least) > WIDTH:
        min_width -= 1
    widths = [max(width, min_width) for width in least]
    lines = []
    for label, *figures in cells:
        line = label.ljust(label_width)
        line += "".join(figure.rjust(width) for figure, width in zip(figures, widths, strict=True))
        lines.append(line.rstrip())
    return lines


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]


def _fits(cells: Sequence[Sequence[str]]) -> bool:
    """Whether the columns fit one space apart."""
    label, *figures = _widths(cells)
    return max(label, _LABEL_WIDTH) + sum(width + 1 for width in figures) <= WIDTH


def entry(label: str, text: str, label_width: int = _LABEL_WIDTH) -> list[str]:
    """Some words beside their label; below it where it has no room for them."""
    first, *rest = wrap(text, WIDTH - label_width)
    if len(label) >= label_width:
        above = wrap(label.strip(), WIDTH, initial_indent="  ", subsequent_indent="    ")
        return [*above, *(" " * label_width + line for line in (first, *rest))]
    return [label.ljust(label_width) + first, *(" " * label_width + line for line in rest)]
