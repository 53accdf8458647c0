"""Scene -> picture, by matplotlib's object API: a Figure, a file, or SVG text for the notebook.

The figure is one axes without an axis, in points, y downward, so that layout is plain arithmetic and a picture of
eight ranks is a hundred rectangles and as many words. Nothing here computes a number that is shown.
"""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zeroviz.compare import Moment
from zeroviz.errors import ZerovizError
from zeroviz.paper import FILE_FORMATS, text_width
from zeroviz.quantity import format_nbytes
from zeroviz.scene import Row, Scene, Segment
from zeroviz.style import (
    BLUE,
    FIGURE_INCHES,
    FONT_POINTS,
    INK,
    MUTED,
    PADDING,
    PAINT,
    PAPER,
    RC,
    RULE,
    label_of,
)
from zeroviz.trace import Origin

WIDTH = FIGURE_INCHES * 72
MARGIN = 10.0
LINE = FONT_POINTS * 1.38
TITLE_POINTS = 19.0
PLOT_HEIGHT = 236.0
"""Height that four or more rows share, as long as they stay legible: the page then rests while a slider moves."""
MIN_BAR, MAX_BAR = 21.0, 46.0
GROUP_GAP, INSET = 0.4, 1.5
SHORT_BAR = 24.0
"""Below this length in points, outlines and separators would be most of a bar, so they are thin."""
KEY = "Solid, to the thick mark: held at rest. Hatched, to the end of the outline: only within the step."


def draw(scene: Scene) -> Figure:
    """The picture as a matplotlib Figure, to save or to build on."""
    with matplotlib.rc_context(RC):
        return _Sheet(scene).figure


def save_figure(scene: Scene, path: Path) -> None:
    """Write the picture as .svg, .png or .pdf. The same scene gives the same bytes: no dates, no random ids."""
    kind = path.suffix.lower().lstrip(".")
    if kind not in FILE_FORMATS:
        raise ZerovizError(f"{path.name} ends in {path.suffix!r}; a picture can be saved as .svg, .png or .pdf.")
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    with matplotlib.rc_context(RC):
        _Sheet(scene).figure.savefig(path, format=kind, dpi=200, metadata=undated)


def svg_text(scene: Scene) -> str:
    """The picture as one `<svg>` element as wide as its cell, each mark with its figures as data and as a tooltip."""
    buffer = io.StringIO()
    with matplotlib.rc_context(RC):
        sheet = _Sheet(scene)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        sheet.figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    opening = (
        f'<svg class="zeroviz-picture" role="img" aria-label="{escape(scene.sentence)}" width="100%" '
        # A page may cap the height; --points tells it how far it can without the words growing too small.
        f'style="--points: {sheet.height:g}" preserveAspectRatio="xMidYMin meet" '
        f'viewBox="0 0 {sheet.width:g} {sheet.height:g}" xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    body = re.sub(r"^.*?<svg[^>]*>", opening, text, count=1, flags=re.DOTALL)
    return re.sub(r'<g id="([^"]+)">', lambda match: sheet.marks.get(match[1], "<g>"), body)


class _Sheet:
    """One drawing under construction: where things go, top to bottom."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.marks: dict[str, str] = {}
        self.width = WIDTH
        differ = " (difference)" if any(row.rest_difference is not None for row in scene.rows) else ""
        self.column_heads = ("at rest" + differ, "at peak" + differ)
        columns = [(head, *(_figures(scene, row)[i] for row in scene.rows)) for i, head in enumerate(self.column_heads)]
        widths = [max(text_width(text, FONT_POINTS, "normal") for text in texts) + 14 for texts in columns]
        self.source_edge = MARGIN + 14 + max(text_width(row.rank_label, FONT_POINTS, "bold") for row in scene.rows)
        self.left = (
            self.source_edge + 10 + max(text_width(row.source_label, FONT_POINTS, "normal") for row in scene.rows)
        )
        self.peak_edge = WIDTH - MARGIN
        self.rest_edge = self.peak_edge - widths[1]
        self.right = self.rest_edge - widths[0] - 8
        self.figure = Figure(facecolor=PAPER)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        slots = len(scene.rows) + GROUP_GAP * len({row.ranks for row in scene.rows})
        self.bar = max(MIN_BAR, min(MAX_BAR, PLOT_HEIGHT / slots))
        self.top = self._head() + LINE * 1.1
        self.bottom = self.top + self.bar * slots
        self.height = self._axis() + MARGIN
        self._bars()
        self.figure.set_size_inches(self.width / 72, self.height / 72)
        self.axes.set_xlim(0, self.width)
        self.axes.set_ylim(self.height, 0)

    def x(self, nbytes: int) -> float:
        """Where a number of bytes lies on the axis."""
        return self.left + (self.right - self.left) * nbytes / max(1, self.scene.axis_max)

    def y(self, row: Row) -> float:
        """The upper edge of a row's bar."""
        group = [known.ranks for known in self.scene.rows[: row.index + 1]]
        num_gaps = len(dict.fromkeys(group)) - 1
        return self.top + self.bar * (row.index + GROUP_GAP * (num_gaps + 0.5))

    def text(self, x: float, y: float, text: str, **kwargs: Any) -> None:
        """One line of text, vertically centred at y."""
        self.axes.text(x, y, text, **{"va": "center_baseline", "color": INK, **kwargs})

    def rectangle(self, x: float, y: float, width: float, height: float, **kwargs: Any) -> None:
        self.axes.add_patch(Rectangle((x, y), width, height, **{"clip_on": False, **kwargs}))

    def _wrapped(self, text: str) -> list[str]:
        """The text in lines no wider than the picture."""
        lines = [""]
        for word in text.split(" "):
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and text_width(longer, FONT_POINTS, "normal") > self.width - 2 * MARGIN:
                lines.append(word)
            else:
                lines[-1] = longer
        return lines

    def _head(self) -> float:
        """Title, what is drawn, legend. Returns where they end."""
        scene = self.scene
        y = MARGIN + TITLE_POINTS * 0.6
        self.text(MARGIN, y, scene.title, fontsize=TITLE_POINTS, fontweight="bold")
        y += TITLE_POINTS * 0.4
        for number, words in enumerate((scene.recipe, *scene.subtitle)):
            for line in self._wrapped(words):
                y += LINE
                self.text(MARGIN, y, line, color=INK if number > 1 else MUTED)
        x, y = MARGIN, y + LINE * 1.4
        for entry in scene.legend:
            paint = PADDING if entry.category is None else PAINT[entry.category]
            hatch = paint.hatch if entry.category is None or not entry.held else None
            words = PADDING.label if entry.category is None else label_of(entry.category, scene.spec.strategy)
            advance = 32 + text_width(words, FONT_POINTS, "normal")
            if x + advance > self.width - MARGIN / 2:
                x, y = MARGIN, y + LINE * 1.2
            ink = PAPER if paint is PADDING else INK
            self.rectangle(x, y - 8, 25, 16, facecolor=paint.color, edgecolor=ink, linewidth=0.8, hatch=hatch)
            self.text(x + 32, y, words)
            x += advance + 18
        y += LINE * 0.15
        for line in self._wrapped(KEY):
            y += LINE
            self.text(MARGIN, y, line, color=MUTED)
        return y + LINE * 0.3

    def _axis(self) -> float:
        """Grid, ticks, column heads and notes. Returns where they end."""
        scene, y = self.scene, self.bottom + LINE * 0.7
        lines = [[(self.x(tick.nbytes), self.top), (self.x(tick.nbytes), self.bottom)] for tick in scene.ticks]
        self.axes.add_collection(LineCollection(lines, colors=RULE, linewidths=1, zorder=0), autolim=False)
        for tick in scene.ticks:
            self.text(self.x(tick.nbytes), y, tick.label, ha="center", color=MUTED)
        self.text(self.left, y + LINE, scene.axis_label, color=MUTED)
        if scene.reference is not None:
            x = self.x(scene.reference.nbytes)
            ends = [[(x, self.top), (x, self.bottom)]]
            self.axes.add_collection(LineCollection(ends, colors=INK, linestyles=":", linewidths=2), autolim=False)
            words = f"{scene.reference.label} {scene.amount(scene.reference.nbytes)}"
            self.text(x, self.top - LINE * 0.4, words, ha="right", color=MUTED)
        for edge, words in zip((self.rest_edge, self.peak_edge), self.column_heads, strict=True):
            self.text(edge, self.top - LINE * 0.4, words, ha="right", color=MUTED)
        y += LINE * 1.1
        for line in (line for note in scene.notes for line in self._wrapped(note)):
            y += LINE
            self.text(MARGIN, y, line, color=MUTED)
        return y + LINE * 0.5

    def _bars(self) -> None:
        scene = self.scene
        for segment in scene.segments:
            self._segment(segment, self.y(scene.rows[segment.row]))
        for padding in scene.paddings:
            row, x = scene.rows[padding.row], self.x(padding.start)
            width = self.x(padding.start + padding.nbytes) - x
            self._mark(padding.id, row, "padding", Moment.REST, padding.nbytes)
            self.rectangle(
                x, self.y(row) + INSET, width, self.bar - 2 * INSET, gid=padding.id, facecolor=PADDING.color,
                edgecolor=PAPER, linewidth=0, hatch=PADDING.hatch, zorder=2.5,
            )  # fmt: skip
        for row in scene.rows:
            self._row(row)

    def _row(self, row: Row) -> None:
        y, predicted = self.y(row), row.origin is Origin.PREDICTED
        middle = y + self.bar / 2
        end, short = self.x(row.rest_nbytes), self.x(row.peak_nbytes) - self.left < SHORT_BAR
        thickness = 4 if end - self.left > SHORT_BAR else 1.2
        self.marks[row.id] = _group(row.id, row, "outline", Moment.PEAK, row.peak_nbytes, _tooltip(row))
        self.rectangle(
            self.left, y + INSET, self.x(row.peak_nbytes) - self.left, self.bar - 2 * INSET, gid=row.id, fill=False,
            edgecolor=INK, linewidth=1 if short else 2, linestyle=(0, (5, 2)) if predicted and not short else "solid",
            zorder=4,
        )  # fmt: skip
        mark = LineCollection([[(end, y), (end, y + self.bar)]], colors=INK, linewidths=thickness, zorder=5)
        self.axes.add_collection(mark, autolim=False)
        if predicted:
            self.text(MARGIN, middle, row.rank_label, fontweight="bold")
        self.text(self.source_edge, middle, row.source_label, color=INK)
        for edge, figure in zip((self.rest_edge, self.peak_edge), _figures(self.scene, row), strict=True):
            self.text(edge, middle, figure, ha="right")

    def _segment(self, segment: Segment, y: float) -> None:
        paint, row = PAINT[segment.category], self.scene.rows[segment.row]
        x, stop = self.x(segment.start), self.x(segment.start + segment.nbytes)
        hatch = paint.hatch if segment.moment is Moment.PEAK else None
        label = label_of(segment.category, self.scene.spec.strategy)
        self._mark(segment.id, row, segment.category.value, segment.moment, segment.nbytes, label)
        self.rectangle(
            x, y + INSET, stop - x, self.bar - 2 * INSET, gid=segment.id, facecolor=paint.color, edgecolor=INK,
            linewidth=0.8 if stop - x > 4 else 0, hatch=hatch, zorder=2,
        )  # fmt: skip
        lines = _label_lines(paint.short, self.scene.amount(segment.nbytes), stop - x - 6, self.bar)
        # A hatch would run through the letters, so a label on one has paper behind it.
        behind = {"bbox": {"facecolor": PAPER, "alpha": 0.88, "linewidth": 0, "pad": 1.0}} if hatch else {}
        ink = PAPER if paint.color == BLUE and not hatch else INK
        for number, line in enumerate(lines):
            middle = y + self.bar / 2 + LINE * 0.9 * (number - (len(lines) - 1) / 2)
            self.text((x + stop) / 2, middle, line, ha="center", zorder=6, color=ink, **behind)

    def _mark(self, ident: str, row: Row, name: str, moment: Moment, nbytes: int, label: str | None = None) -> None:
        when = "at rest" if moment is Moment.REST else "added at the peak"
        tooltip = f"{row.rank_label}, {row.source_label}: {label or name} {when}, {nbytes:,} B"
        self.marks[ident] = _group(ident, row, name, moment, nbytes, tooltip)


def _group(ident: str, row: Row, name: str, moment: Moment, nbytes: int, tooltip: str) -> str:
    """The opening of a mark's SVG group. data-mark, not id: a page may hold two pictures of one scene."""
    return (
        f'<g data-mark="{ident}" data-ranks="{row.ranks[0]}-{row.ranks[-1]}" data-origin="{row.origin.value}" '
        f'data-moment="{moment.value}" data-category="{name}" data-nbytes="{nbytes}"><title>{escape(tooltip)}</title>'
    )


def _tooltip(row: Row) -> str:
    return (
        f"{row.rank_label}, {row.source_label}: {row.rest_nbytes:,} B at rest, peak {row.peak_nbytes:,} B "
        f"in {row.peak_place}"
    )


def _figures(scene: Scene, row: Row) -> tuple[str, str]:
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


def _label_lines(name: str, value: str, room: float, bar: float) -> tuple[str, ...]:
    """What fits into a segment: name over value, name and value, one of them, or nothing."""
    if bar >= 2.2 * LINE:
        if max(text_width(name, FONT_POINTS, "normal"), text_width(value, FONT_POINTS, "normal")) <= room:
            return name, value
    elif text_width(f"{name} {value}", FONT_POINTS, "normal") <= room:
        return (f"{name} {value}",)
    for text in (name, value):
        if text_width(text, FONT_POINTS, "normal") <= room:
            return (text,)
    return ()
