"""The head of a picture: its title and what is drawn, in lines that end on the paper."""

from __future__ import annotations

from collections.abc import Sequence

from zeroviz.paper import Paper
from zeroviz.style import FIGURE_INCHES, FONT_POINTS, INK, MUTED

WIDTH = FIGURE_INCHES * 72
MARGIN = 10.0
ROOM = WIDTH - 2 * MARGIN
LINE = FONT_POINTS * 1.38
TITLE_POINTS = 19.0
TITLE_LINE = TITLE_POINTS * 1.3
HINTED = 0.97
"""How much of the room a title takes at most: a pen that hints its letters makes them wider."""


def headed(paper: Paper, title: str, words: Sequence[str], num_muted: int = 1) -> float:
    """The title and the lines under it, the first of them muted. Returns where they end."""
    room = paper.width - 2 * MARGIN
    y = MARGIN + TITLE_POINTS * 0.6 - TITLE_LINE
    for line in paper.wrapped(title, room * HINTED, TITLE_POINTS, is_bold=True):
        y += TITLE_LINE
        paper.text(MARGIN, y, line, points=TITLE_POINTS, is_bold=True)
    y += TITLE_POINTS * 0.4
    for number, text in enumerate(words):
        for line in paper.wrapped(text, room):
            y += LINE
            paper.text(MARGIN, y, line, color=INK if number >= num_muted else MUTED)
    return y
