"""The cells of the tables under the picture: figures marked for whoever reads by machine, causes, swatches."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from zeroviz.causes import is_unexplained
from zeroviz.spec import RunSpec
from zeroviz.style import PAINT, label_of
from zeroviz.trace import Category

Ranks = tuple[int, ...]


def table(caption: str, name: str, head: str, body: Iterable[str]) -> str:
    return (
        f'<div class="zeroviz-scroll" tabindex="0"><table class="zeroviz-{name}"><caption>{caption}</caption>'
        f"<thead>{head}</thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def figures(predicted: int, measured: int, ran: bool, data: str, cause: str, unit: str = " B") -> str:
    """Cells: predicted and, after a run, measured and difference. `data` marks them for whoever reads by machine."""
    ours = f'<td {data} data-source="predicted">{predicted:,}</td>'
    if not ran:
        return ours
    theirs = f'<td {data} data-source="measured">{measured:,}</td>'
    return ours + theirs + difference(measured - predicted, cause, unit, data)


def difference(nbytes: int, cause: str, unit: str = " B", data: str = "") -> str:
    kind = "unexplained" if is_unexplained(cause) else "differs" if nbytes else "zero"
    return f'<td {data} data-source="difference" class="zeroviz-{kind}">{signed(nbytes)}{unit}</td>'


def cause_cell(text: str, ran: bool) -> str:
    return f'<td class="zeroviz-words">{escape(text) or "none"}</td>' if ran else ""


def source_heads(ran: bool) -> str:
    return "<th>predicted</th><th>measured</th><th>difference</th>" if ran else "<th>predicted</th>"


def cause_head(ran: bool, rowspan: int = 1) -> str:
    return f'<th rowspan="{rowspan}">cause of the difference</th>' if ran else ""


def signed(difference: int) -> str:
    return f"{difference:+,}" if difference else "0"


def swatch(category: Category, spec: RunSpec, *, held: bool) -> str:
    """Solid for what is held at rest, hatched for the rest, as in the picture."""
    paint = PAINT[category]
    background = paint.color if held else f"{stripes(paint.hatch)}, {paint.color}"
    return f'<i style="background:{background}"></i>{escape(label_of(category, spec))}'


def stripes(hatch: str) -> str:
    """A hatch as CSS gradients, one a direction; dots as one that repeats by itself."""
    if hatch[0] == ".":
        return "radial-gradient(#1a1a1a 1px, transparent 1.5px) 0 0 / 4px 4px"
    angles = {"/": "-45deg", "\\": "45deg", "|": "90deg", "-": "0deg"}
    crossed = {"x": "/\\", "+": "|-"}.get(hatch[0], hatch[0])
    return ", ".join(
        f"repeating-linear-gradient({angles[mark]}, #1a1a1a 0 1px, transparent 1px 4px)" for mark in crossed
    )
