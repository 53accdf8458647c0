"""Shapes and words in points, drawn twice: as SVG text for the notebook, in a few milliseconds, and as a matplotlib
Figure for files. One layout, two pens.

x grows to the right and y downward, in points. Nothing here knows of traces or bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib import font_manager
from matplotlib.ft2font import LoadFlags

from zeroviz.errors import ZerovizError
from zeroviz.labels import Say as Say
from zeroviz.style import FONT_POINTS, FONTS, INK, PAGE_INKS, PAPER, RC, TINTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_FORMATS = ("svg", "png", "pdf")
BASELINE = 0.36
"""How far below its middle a line of text has its baseline, in sizes of its font."""
HATCH_POINTS = 7.0
MAX_TENTHS = 20_000
FIRST_SQUARE = 0x2E80
"""From here on letters are Chinese, as wide as high; the page's own font has them and this one does not."""
CLEAR = "transparent"
"""A fill that shows nothing and yet is found by the pointer, unlike None, of which only the edge is."""
BACKING = 0.88
_ANCHOR = {"start": "left", "middle": "center", "end": "right"}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A closed polygon or, if `is_open`, a line. `tip` is its tooltip, `data` its data attributes, `dash` in points.

    A hatch has the colour of the edge. down: how far below its points it lies, so that shapes alike share them.
    """

    points: Points
    fill: str | None = None
    hatch: str | None = None
    edge: str = INK
    line: float = 0.0
    dash: tuple[float, ...] = ()
    is_open: bool = False
    tip: str = ""
    data: dict[str, str] = field(default_factory=dict)
    down: float = 0.0


@dataclass(frozen=True, slots=True)
class Words:
    """One line of text, its middle at y. `is_backed`: on paper of its own, so that a hatch does not run through it."""

    x: float
    y: float
    text: str
    points: float = FONT_POINTS
    is_bold: bool = False
    anchor: str = "start"
    color: str = INK
    is_backed: bool = False


class Piece(str):
    """A line of a text that has more of them: no label, even where it reads like one."""


class Paper:
    """A picture under construction; what is put on it later lies above. `height` is set by whoever lays it out."""

    def __init__(self, width: float) -> None:
        self.width, self.height = width, 0.0
        self.shapes: list[Shape | Words] = []

    def add(self, shape: Shape | Words) -> None:
        self.shapes.append(shape)

    def rectangle(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str | None = None,
        hatch: str | None = None,
        line: float = 0.0,
        edge: str = INK,
        dash: tuple[float, ...] = (),
        tip: str = "",
        data: dict[str, str] | None = None,
    ) -> None:
        corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height))
        self.add(Shape(corners, fill, hatch, edge, line, dash, tip=tip, data=data or {}))

    def line(self, points: Points, color: str = INK, width: float = 1.0, dash: tuple[float, ...] = ()) -> None:
        self.add(Shape(points, edge=color, line=width, dash=dash, is_open=True))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        points: float = FONT_POINTS,
        anchor: str = "start",
        color: str = INK,
        is_bold: bool = False,
        is_backed: bool = False,
    ) -> None:
        self.add(Words(x, y, text, points, is_bold, anchor, color, is_backed))

    def wrapped(self, text: str, width: float, points: float = FONT_POINTS, *, is_bold: bool = False) -> list[str]:
        """The text in lines of at most `width` points. Only a whole text can be a label, and be put as one."""
        lines, weight = [""], "bold" if is_bold else "normal"
        for word in text.split(" "):
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and text_width(longer, points, weight) > width:
                lines.append(word)
            else:
                lines[-1] = longer
        return lines if len(lines) == 1 else [Piece(line) for line in lines]

    def svg(self, name: str, sentence: str, *, on_page: bool = False, say: Say = str) -> str:
        """One `<svg>` element of class `name`, as wide as its cell; `sentence` is what it says to a screen reader.

        on_page: ink and paper are the page's, so that they follow its theme; a file says them itself. say: what each
        line of words is put as, laid out as it is.
        """
        hatches = {(str(s.fill), s.hatch, s.edge) for s in self.shapes if isinstance(s, Shape) and s.hatch}
        pen = _Pen(name, on_page=on_page, say=say)
        body = "".join(_pattern(name, pen, hatch, edge, fill) for fill, hatch, edge in sorted(hatches))
        body = f"<defs>{body}</defs>" if body else ""
        body += "".join(pen.shape(s) if isinstance(s, Shape) else pen.words(s) for s in self.shapes)
        return (
            f'<svg class="zeroviz-drawing {name}" role="img" aria-label="{escape(sentence)}" width="100%" '
            # A page may cap the height; --points tells it how far it can without the words growing too small.
            f'style="--points: {self.height:g}" preserveAspectRatio="xMidYMin meet" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" xmlns="http://www.w3.org/2000/svg" '
            f'font-family="{", ".join(FONTS)}" font-size="{FONT_POINTS:g}">'
            f'<rect width="100%" height="100%" fill="{pen.ink(PAPER)}"/>{body}</svg>'
        )

    def figure(self) -> Figure:
        """The same as a matplotlib Figure, to save or to build on."""
        # Here and not above: a page that is opened waits for half a second less.
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Polygon

        with matplotlib.rc_context(RC):
            figure = Figure(facecolor=PAPER, figsize=(self.width / 72, self.height / 72))
            axes = figure.add_axes((0, 0, 1, 1))
            axes.set_axis_off()
            axes.set_xlim(0, self.width)
            axes.set_ylim(self.height, 0)
            for order, shape in enumerate(self.shapes):
                if isinstance(shape, Words):
                    back = {"facecolor": PAPER, "alpha": BACKING, "linewidth": 0, "pad": 1.0}
                    axes.text(
                        shape.x, shape.y + BASELINE * shape.points, shape.text, fontsize=shape.points, zorder=order,
                        fontweight="bold" if shape.is_bold else "normal", ha=_ANCHOR[shape.anchor], va="baseline",
                        color=shape.color, bbox=back if shape.is_backed else None,
                    )  # fmt: skip
                    continue
                # matplotlib counts dashes in widths of the line.
                style: Any = (0, [dash / shape.line for dash in shape.dash]) if shape.dash else "solid"
                fill = "none" if shape.fill in (None, CLEAR) else shape.fill
                points = [(x, y + shape.down) for x, y in shape.points]
                if shape.is_open:
                    xs, ys = zip(*points, strict=True)
                    axes.add_line(Line2D(xs, ys, color=shape.edge, linewidth=shape.line, linestyle=style, zorder=order))
                elif shape.line or fill != "none":
                    axes.add_patch(
                        Polygon(
                            points, closed=True, facecolor=fill, edgecolor=shape.edge, linewidth=shape.line,
                            linestyle=style, hatch=shape.hatch, zorder=order, joinstyle="miter",
                        )
                    )  # fmt: skip
            return figure

    def save(self, path: Path, name: str, sentence: str) -> None:
        """Write a file as .svg, .png or .pdf."""
        kind = path.suffix.lower().lstrip(".")
        if kind not in FILE_FORMATS:
            raise ZerovizError(f"{path.name} ends in {path.suffix!r}; a picture can be saved as .svg, .png or .pdf.")
        path.write_bytes(self.file(kind, name, sentence))

    def file(self, kind: str, name: str, sentence: str) -> bytes:
        """A file of one of FILE_FORMATS. The same picture gives the same bytes: no dates, no random ids."""
        if kind == "svg":
            return ('<?xml version="1.0" encoding="utf-8"?>\n' + self.svg(name, sentence)).encode()
        buffer = io.BytesIO()
        with matplotlib.rc_context(RC):
            undated = {"CreationDate": None} if kind == "pdf" else {}
            self.figure().savefig(buffer, format=kind, dpi=200, metadata=undated)
        return buffer.getvalue()


def text_width(text: str, points: float = FONT_POINTS, weight: str = "normal") -> float:
    """Width of a text in points: the sum of its letters' advances, from the font's own metrics, without hinting."""
    return points * sum(map(_advances(weight).__getitem__, text))


class _Advances(dict[str, float]):
    """The advance of each letter seen, in sizes of the font. Setting a whole text anew costs a millisecond or two."""

    def __init__(self, weight: str) -> None:
        super().__init__()
        wanted = font_manager.FontProperties(family=FONTS, weight=weight)
        self._font = font_manager.get_font(str(font_manager.findfont(wanted)))

    def __missing__(self, letter: str) -> float:
        if ord(letter) >= FIRST_SQUARE:
            return 1.0
        self._font.set_size(100, 72)
        glyph = self._font.load_char(ord(letter), flags=LoadFlags.NO_HINTING)
        advance = self[letter] = glyph.linearHoriAdvance / 65536 / 100
        return advance


_advances = lru_cache(maxsize=2)(_Advances)


def _number(value: float) -> str:
    """A tenth of a point is less than a pixel's tenth on any screen that a picture is shown on."""
    return f"{value:.1f}".removesuffix(".0")


class _Tenths(dict[int, str]):
    """Tenths of a point as SVG says them. A path asks for the same few hundred over and over."""

    def __missing__(self, tenths: int) -> str:
        text = _number(tenths / 10)
        if len(self) < MAX_TENTHS:
            self[tenths] = text
        return text


_tenths = _Tenths()


class _Pen:
    """Draws the shapes of one picture as SVG. Strokes are worked out once where shapes share their points."""

    def __init__(self, name: str, *, on_page: bool, say: Say) -> None:
        self.name, self._inks, self._say = name, PAGE_INKS if on_page else {}, say
        self._known: dict[int, str] = {}

    def ink(self, color: str) -> str:
        """A colour of paper or of ink as the page has it; of paint, itself."""
        return self._inks.get(color, color)

    def edge(self, color: str, fill: str) -> str:
        """The colour of an edge or a hatch: of paint as it is on any page; of what follows the page, the page's."""
        return color if self.ink(fill) == fill else self.ink(color)

    def shape(self, shape: Shape) -> str:
        fill = self.ink(shape.fill or "none")
        is_bare = shape.is_open or shape.fill is None
        edge = self.ink(shape.edge) if is_bare else self.edge(shape.edge, str(shape.fill))
        # A line of the page's may run over paint; that of a cell of a map does not.
        halo = ' class="zl"' if edge != shape.edge and shape.line and shape.fill not in TINTS else ""
        if shape.hatch:
            fill = f"url(#{_pattern_id(self.name, str(shape.fill), shape.hatch, shape.edge)})"
        stroke = f' stroke="{edge}" stroke-width="{shape.line:g}"' if shape.line else ""
        dash = f' stroke-dasharray="{" ".join(map(_number, shape.dash))}"' if shape.dash else ""
        data = "".join(f' data-{name}="{escape(value)}"' for name, value in shape.data.items())
        path = f'<path d="{self._path(shape)}" fill="{fill}"{stroke}{dash}{halo}{data}'
        return f"{path}><title>{escape(shape.tip)}</title></path>" if shape.tip else f"{path}/>"

    def words(self, words: Words) -> str:
        said = words.text if isinstance(words.text, Piece) else self._say(words.text)
        size = "" if words.points == FONT_POINTS else f' font-size="{words.points:g}"'
        bold = ' font-weight="bold"' if words.is_bold else ""
        anchor = "" if words.anchor == "start" else f' text-anchor="{words.anchor}"'
        text = (
            f'<text x="{_number(words.x)}" y="{_number(words.y + BASELINE * words.points)}"{size}{bold}{anchor} '
            f'fill="{self.ink(words.color) if words.color != PAPER else PAPER}">{escape(said)}</text>'
        )
        if not words.is_backed:
            return text
        width = text_width(said, words.points, "bold" if words.is_bold else "normal") + 4
        left = words.x - {"start": 2.0, "middle": width / 2, "end": width - 2}[words.anchor]
        return (
            f'<rect x="{_number(left)}" y="{_number(words.y - words.points * 0.62)}" width="{_number(width)}" '
            f'height="{_number(words.points * 1.24)}" fill="{self.ink(PAPER)}" fill-opacity="{BACKING}"/>{text}'
        )

    def _path(self, shape: Shape) -> str:
        strokes = self._known.get(id(shape.points))
        if strokes is None:
            strokes = self._known[id(shape.points)] = _strokes(shape.points)
        x, y = shape.points[0]
        return f"M{_tenths[round(x * 10)]} {_tenths[round((y + shape.down) * 10)]}{strokes}" + "Z" * (not shape.is_open)


def _strokes(points: Points) -> str:
    """Each from where the last one ended, which is short and the same wherever a shape stands; level and upright ones,
    which are most of all, as h and v."""
    texts = _tenths
    tenths = [(round(across * 10), round(down * 10)) for across, down in points]
    return "".join(
        [
            "h" + texts[x - left]
            if y == up
            else "v" + texts[y - up]
            if x == left
            else f"l{texts[x - left]} {texts[y - up]}"
            for (left, up), (x, y) in pairwise(tenths)
        ]
    )


def _pattern_id(name: str, fill: str, hatch: str, ink: str) -> str:
    """A picture's own: one that refers to another picture's patterns loses them where that is hidden."""
    return f"{name}-{fill.lstrip('#')}-{hatch.encode().hex()}-{ink.lstrip('#')}"


def _pattern(name: str, pen: _Pen, hatch: str, ink: str, fill: str) -> str:
    """A hatch in matplotlib's letters as an SVG pattern; a letter more is a finer one."""
    side = HATCH_POINTS * 2 / max(1, len(hatch))
    strokes = {
        "/": f"M-1 1L1 -1M0 {side:g}L{side:g} 0M{side - 1:g} {side + 1:g}L{side + 1:g} {side - 1:g}",
        "\\": f"M-1 {side - 1:g}L1 {side + 1:g}M0 0L{side:g} {side:g}M{side - 1:g} -1L{side + 1:g} 1",
        "|": f"M{side / 2:g} 0V{side:g}",
        "-": f"M0 {side / 2:g}H{side:g}",
        ".": f"M{side / 2:g} {side / 2:g}h0.1",
    }
    letters = {"x": "/\\", "+": "|-"}.get(hatch[0], hatch[0])
    lines = "".join(strokes[letter] for letter in letters)
    round_ends = ' stroke-linecap="round" stroke-width="1.8"' if letters == "." else ' stroke-width="0.7"'
    size = f'width="{side:g}" height="{side:g}"'
    return (
        f'<pattern id="{_pattern_id(name, fill, hatch, ink)}" patternUnits="userSpaceOnUse" {size}>'
        f'<rect {size} fill="{pen.ink(fill)}"/><path d="{lines}" stroke="{pen.edge(ink, fill)}"{round_ends} '
        'fill="none"/></pattern>'
    )
