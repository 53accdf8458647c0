"""Columns of text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap

WIDTH = 80
_LABEL_WIDTH = 24


def columns(rows: Iterable[Sequence[str]], min_width: int = 13, *, may_drop: bool = True) -> list[str]:
    """Align cells: the first to the left, the others to the right, each at least two spaces from its neighbour.

    Columns are at least `min_width` wide, and narrower where the line would not fit otherwise; then one space apart;
    and for figures wider still the last column, which says one of the others in short, is left out.
    """
    cells = [list(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    label_width = max(widths[0], _LABEL_WIDTH)
    gap = 2 if label_width + sum(width + 2 for width in widths[1:]) <= WIDTH else 1
    least = [width + gap for width in widths[1:]]
    if label_width + sum(least) > WIDTH and may_drop:
        return columns([row[:-1] for row in cells], min_width, may_drop=False)
    while min_width and label_width + sum(max(width, min_width) for width in least) > WIDTH:
        min_width -= 1
    widths = [max(width, min_width) for width in least]
    lines = []
    for label, *figures in cells:
        line = label.ljust(label_width)
        line += "".join(figure.rjust(width) for figure, width in zip(figures, widths, strict=True))
        lines.append(line.rstrip())
    return lines


def entry(label: str, text: str, label_width: int = _LABEL_WIDTH) -> list[str]:
    first, *rest = wrap(text, WIDTH - label_width)
    return [label.ljust(label_width) + first, *(" " * label_width + line for line in rest)]
