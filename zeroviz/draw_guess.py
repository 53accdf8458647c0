"""Answer -> picture: the guess, the model and what was measured, on one axis.

Up to a factor of FAR the axis is linear and the three are bars: the model's and the measured one stacked as in every
other picture, the guess plain, with the gap between it and the model hatched. Beyond, the shorter bar would be a
sliver, so the axis is logarithmic and the three are marks, for a bar needs a zero and there is none.

[Note: far off] Log axis and no broken bar: how far the guess is off is what the picture is about, and a break hides
just that. Ticks are powers of ten, all labelled with their unit, and the axis says in words what a step on it means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, log10, pi, sin
from pathlib import Path
from typing import Any

from zeroviz.axis import Tick, amount, axis_words, ticks
from zeroviz.category import Category
from zeroviz.guess import Answer, Figure, Part, factor_text
from zeroviz.guess_figure import part_label, state_words
from zeroviz.head import LINE, MARGIN, ROOM, WIDTH, headed
from zeroviz.labels import Say
from zeroviz.paper import Paper, Shape, text_width
from zeroviz.quantity import format_nbytes
from zeroviz.style import (
    BLUE,
    INK,
    MUTED,
    ON_PAINT,
    PAINT,
    PALE,
    PAPER,
    RULE,
    WIRE_PAINT,
    short_of,
)

NAME = "zeroviz-guess"
LABEL_POINTS, AMOUNT_POINTS, WHY_POINTS = 16.0, 18.0, 16.0
FAR = 20
"""The factor beyond which the axis is logarithmic."""
BAR, GAP = 50.0, 14.0
RIGHT_SHARE = 1.04
"""How much longer than the longest bar the axis is."""
SWATCH = 25.0
MARK, NUM_CORNERS = 11.0, 40
OUTLINE_DASH, MODEL_DASH = (10.0, 4.0), (2.0, 3.5)
GAP_PAINT, GAP_HATCH = "#eeeeee", "//"
"""Of what is too much or missing. A paint and not the paper, so that the hatch is as plain on a dark page."""
LEAST_SHARE = 1 / 1000
"""Of the model's figure. A part that is smaller has no swatch; the sentence for those who do not see has it."""


def paper_of(answer: Answer) -> Paper:
    """The picture laid out."""
    return _Sheet(answer).paper


def guess_svg(answer: Answer) -> str:
    """The picture as one `<svg>` element."""
    return paper_of(answer).svg(NAME, answer.sentence)


def save_guess(answer: Answer, path: Path) -> None:
    """Write the picture as .svg, .png or .pdf."""
    paper_of(answer).save(path, NAME, answer.sentence)


def placed_guess(answer: Answer, say: Say = str) -> dict[str, Any]:
    """The picture and its places, in points as in the svg's viewBox: the svg, `left` and `right` of the axis and the
    bytes there, `least` and `most`, whether `is_log`, and (upper edge, height, x of its bytes) of each of `rows`."""
    sheet = _Sheet(answer)
    return {
        "svg": sheet.paper.svg(NAME, answer.sentence, on_page=True, say=say),
        "left": sheet.left,
        "right": sheet.right,
        "least": sheet.least,
        "most": sheet.most,
        "is_log": sheet.is_log,
        "rows": {row.key: (row.top, BAR, round(sheet.x(row.nbytes), 1)) for row in sheet.rows},
    }


@dataclass(frozen=True, slots=True)
class _Row:
    """One of the three: its name, its bytes, what stands at its right, and its parts where it is stacked."""

    key: str
    label: str
    nbytes: int
    text: str
    detail: str
    top: float
    figure: Figure | None = None


class _Sheet:
    """One drawing under construction, top to bottom."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.spec = answer, answer.question.spec
        self.is_log = _is_far(answer)
        self.paper = Paper(WIDTH)
        self.top = self._head()
        self.rows = list(self._rows(self.top))
        self.left = MARGIN + 14 + max(text_width(row.label, LABEL_POINTS, "bold") for row in self.rows)
        widths = [
            max(text_width(row.text, AMOUNT_POINTS, "bold"), text_width(row.detail))
            for row in self.rows
        ]  # fmt: skip
        self.right = WIDTH - MARGIN - 16 - max(widths)
        if self.is_log:  # a mark may stand at either end
            self.left, self.right = self.left + MARK, self.right - MARK
        self.bottom = self.rows[-1].top + BAR + GAP * 0.6
        self.least, self.most = self._ends()
        y = self._axis()
        self._model_line()
        for row in self.rows:
            self._row(row)
        self.paper.height = self._below(y) + MARGIN

    def x(self, nbytes: int) -> float:
        """Where a number of bytes lies on the axis."""
        share = nbytes / self.most
        if self.is_log:
            share = log10(max(1, nbytes) / self.least) / log10(self.most / self.least)
        return self.left + (self.right - self.left) * share

    def _ends(self) -> tuple[int, int]:
        """The bytes at the ends of the axis: from 0, or from a power of ten, to a little beyond all figures."""
        figures = [row.nbytes for row in self.rows]
        if not self.is_log:
            return 0, max(1, round(max(figures) * RIGHT_SHARE))
        # The next of 1, 2 and 5 times a power of ten, so that less than half a decade is empty.
        power = 10 ** (len(str(max(figures))) - 1)
        most = next(times * power for times in (2, 5, 10, 20) if times * power >= max(figures) * RIGHT_SHARE)
        return 10 ** (len(str(min(figures))) - 1), most

    def _head(self) -> float:
        """The verdict, what of the state explains it, and the step. Returns where they end."""
        paper, words = self.paper, self.answer.words.removesuffix(".")
        y = headed(paper, words, ())
        for line in paper.wrapped(self.answer.why, ROOM, WHY_POINTS) if self.answer.why else ():
            y += WHY_POINTS * 1.38
            paper.text(MARGIN, y, line, points=WHY_POINTS)
        for line in paper.wrapped(state_words(self.spec), ROOM):
            y += LINE
            paper.text(MARGIN, y, line, color=MUTED)
        return y + LINE * 1.1

    def _rows(self, top: float) -> Iterator[_Row]:
        answer, step = self.answer, BAR + GAP
        yield _Row("guess", "your guess", answer.guess_nbytes, answer.texts[0], answer.difference_words, top)
        model = answer.question.model
        yield _Row("model", "the model", model.nbytes, answer.texts[1], "", top + step, model)
        if (measured := answer.measured) is not None and answer.measured_origin is not None:
            difference = measured.nbytes - model.nbytes
            detail = (
                f"{'+' if difference > 0 else '-'}{format_nbytes(abs(difference))}"
                if difference
                else "exactly the same"
            )
            label = answer.measured_origin.label
            yield _Row("measured", label, measured.nbytes, answer.texts[2], detail, top + 2 * step, measured)

    # ---- the axis ----

    def _axis(self) -> float:
        """Grid, ticks and what the axis is. Returns where they end."""
        what = f"{self.answer.question.what.label} by rank {self.answer.question.rank:,}"
        if self.is_log:
            marks: tuple[Tick, ...] = tuple(self._powers())
            label = f"bytes {what}; logarithmic: each line is 10 times the one before"
        else:
            unit, scale = self.answer.unit
            marks, label = ticks(0, self.most, scale), axis_words(unit, scale, what)
        paper, y = self.paper, self.bottom + LINE * 0.7
        for tick in marks:
            x = self.x(tick.nbytes)
            paper.line(((x, self.top - 4), (x, self.bottom)), RULE)
            paper.text(x, y, tick.label, anchor="middle", color=MUTED)
        y += LINE
        paper.text(min(self.left, WIDTH - MARGIN - text_width(label)), y, label, color=MUTED)
        return y

    def _powers(self) -> Iterator[Tick]:
        """Powers of ten; of very many those whose words have room."""
        powers = [10**power for power in range(len(str(self.least)) - 1, len(str(self.most)))]
        widest = max(text_width(format_nbytes(power)) for power in powers) + 10
        every = max(1, -int(-widest * (len(powers) - 1) // (self.right - self.left)))
        for number, power in enumerate(powers):
            yield Tick(power, "" if number % every else format_nbytes(power))

    def _model_line(self) -> None:
        """Down from the model's figure through all rows, so that each is seen against it."""
        x = self.x(self.answer.model_nbytes)
        self.paper.line(((x, self.top - 4), (x, self.bottom)), INK, 1.8, MODEL_DASH)

    # ---- rows ----

    def _row(self, row: _Row) -> None:
        paper, middle = self.paper, row.top + BAR / 2
        paper.text(MARGIN, middle, row.label, points=LABEL_POINTS, is_bold=True)
        up = LINE * 0.5 if row.detail else 0.0
        paper.text(WIDTH - MARGIN, middle - up, row.text, points=AMOUNT_POINTS, is_bold=True, anchor="end")
        paper.text(WIDTH - MARGIN, middle + LINE * 0.6, row.detail, anchor="end", color=MUTED)
        if self.is_log:
            if row.key == "guess":
                self._arrow(row)
            self._mark(row)
        elif row.figure is None:
            self._guess_bar(row)
        else:
            self._stack(row, row.figure)

    def _guess_bar(self, row: _Row) -> None:
        """What of the guess is right, and what is too much or missing."""
        model, left = self.answer.model_nbytes, self.left
        both, end = self.x(min(row.nbytes, model)), self.x(max(row.nbytes, model))
        self.paper.rectangle(left, row.top, both - left, BAR, PALE)
        if end - both > 1:
            is_missing = row.nbytes < model
            self.paper.rectangle(
                both, row.top, end - both, BAR, GAP_PAINT, GAP_HATCH, line=1.6, edge=MUTED,
                dash=OUTLINE_DASH if is_missing else (), tip=self.answer.difference_words,
                data={"mark": "gap", "nbytes": str(abs(self.answer.difference))},
            )  # fmt: skip
        self._outline(row)
        self._gap_words(both, end, row.top)

    def _gap_words(self, start: float, end: float, top: float) -> None:
        words = self._times()
        if not self.answer.is_right and text_width(words, LABEL_POINTS, "bold") + 12 <= end - start:
            x, y = (start + end) / 2, top + BAR / 2
            self.paper.text(x, y, words, points=LABEL_POINTS, is_bold=True, anchor="middle", is_backed=True)

    def _stack(self, row: _Row, figure: Figure) -> None:
        """The figure's parts, painted as everywhere: solid is held at rest, hatched is of the step alone."""
        start = 0
        for part in figure.parts:
            x, stop = self.x(start), self.x(start + part.nbytes)
            fill, hatch = _paint(part)
            label = part_label(part.key, self.spec)
            self.paper.rectangle(
                x, row.top, stop - x, BAR, fill, hatch, line=0.8 if stop - x > 4 else 0.0,
                tip=f"{row.label}: {label}, {part.nbytes:,} B",
                data={"mark": f"{row.key}-part", "part": part.key.value, "nbytes": str(part.nbytes)},
            )  # fmt: skip
            name = _short(part, self.answer)
            if text_width(name) + 8 <= stop - x:
                ink = INK if hatch else PAPER if fill == BLUE else ON_PAINT
                middle = row.top + BAR / 2
                self.paper.text((x + stop) / 2, middle, name, anchor="middle", color=ink, is_backed=hatch is not None)
            start += part.nbytes
        self._outline(row)

    def _outline(self, row: _Row) -> None:
        dash = OUTLINE_DASH if row.key == "model" else ()
        self.paper.rectangle(
            self.left, row.top, self.x(row.nbytes) - self.left, BAR, line=2.4, dash=dash, tip=_tip(row), data=_data(row)
        )

    def _mark(self, row: _Row) -> None:
        """A disc; a ring for the guess, a lozenge for what was measured."""
        num_corners = 4 if row.key == "measured" else NUM_CORNERS
        x, y = self.x(row.nbytes), row.top + BAR / 2
        angles = [2 * pi * number / num_corners for number in range(num_corners)]
        corners = [(x + MARK * sin(angle), y + MARK * cos(angle)) for angle in angles]
        fill = PAPER if row.key == "guess" else INK
        self.paper.add(Shape(corners, fill, line=3.0, tip=_tip(row), data=_data(row)))

    def _arrow(self, row: _Row) -> None:
        """From the model's figure to the guess, with the factor between them."""
        start, stop, y = self.x(self.answer.model_nbytes), self.x(row.nbytes), row.top + BAR / 2
        ahead = 1 if stop > start else -1
        tip = stop - ahead * (MARK + 3)
        self.paper.line(((start, y), (tip - ahead * 10, y)), INK, 3.6)
        data = {"mark": "gap", "nbytes": str(abs(self.answer.difference))}
        head = ((tip, y), (tip - ahead * 14, y - 8), (tip - ahead * 14, y + 8))
        self.paper.add(Shape(head, fill=INK, tip=self.answer.difference_words, data=data))
        x, points = (start + tip) / 2, LABEL_POINTS
        self.paper.text(x, y, self._times(), points=points, is_bold=True, anchor="middle", is_backed=True)

    def _times(self) -> str:
        """What makes the guess of the model's figure: `x 3.82`, `÷ 2.34`."""
        return f"{'x' if self.answer.difference > 0 else '÷'} {factor_text(self.answer.factor)}"

    # ---- below ----

    def _below(self, y: float) -> float:
        """The parts of the model's figure with their amounts, and by how much the measured one differs. Returns where
        they end."""
        answer, paper = self.answer, self.paper
        figure, unit = answer.question.model, answer.unit[0]
        x, y = MARGIN, y + LINE * 1.5
        lead = f"The model's {answer.texts[1]}:"
        paper.text(x, y, lead, is_bold=True)
        x += text_width(lead, weight="bold") + 14
        for part in figure.parts:
            if part.nbytes < LEAST_SHARE * figure.nbytes:
                continue
            words = f"{part_label(part.key, self.spec)} {amount(part.nbytes, unit)}"
            advance = SWATCH + 7 + text_width(words)
            if x + advance > WIDTH - MARGIN / 2:
                x, y = MARGIN, y + LINE * 1.25
            fill, hatch = _paint(part)
            paper.rectangle(x, y - 8, SWATCH, 16, fill, hatch, line=0.8)
            paper.text(x + SWATCH + 7, y, words)
            x += advance + 18
        if answer.measured is not None and answer.measured.nbytes != figure.nbytes:
            for line in paper.wrapped(answer.measured_words, ROOM):
                y += LINE * 1.25
                paper.text(MARGIN, y, line)
        return y + LINE * 0.6


def _is_far(answer: Answer) -> bool:
    """Whether the figures are too far apart for bars."""
    figures = [answer.guess_nbytes, answer.model_nbytes]
    if answer.measured is not None:
        figures.append(max(1, answer.measured.nbytes))
    return max(figures) > FAR * min(figures)


def _paint(part: Part) -> tuple[str, str | None]:
    paint = PAINT[part.key] if isinstance(part.key, Category) else WIRE_PAINT[part.key]
    return paint.color, None if part.stays else paint.hatch


def _short(part: Part, answer: Answer) -> str:
    if isinstance(part.key, Category):
        return short_of(part.key, answer.question.spec)
    return WIRE_PAINT[part.key].label


def _tip(row: _Row) -> str:
    return f"{row.label}: {row.nbytes:,} B"


def _data(row: _Row) -> dict[str, str]:
    """What a program reads off a mark."""
    return {"mark": row.key, "nbytes": str(row.nbytes)}
