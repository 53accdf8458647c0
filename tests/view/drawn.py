"""What every picture is held to: words that can be read, files that come out alike, names that are never markup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zeroviz.models import PRESETS
from zeroviz.paper import Paper, Words

SVG = "{http://www.w3.org/2000/svg}"
ODD = replace(PRESETS["tiny"], name="<script>alert(1)</script> & 'friends' \"of\" $x$")
"""A model with a name that a page, or matplotlib, could take for something else."""


def words_of(paper: Paper) -> list[str]:
    return [shape.text for shape in paper.shapes if isinstance(shape, Words)]


def said_in(svg: str) -> str:
    """All words of an SVG text."""
    return " ".join("".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text"))


def assert_words_have_room(figure: Figure) -> None:
    """No word leaves the paper or covers another."""
    FigureCanvasAgg(figure).draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in figure.axes[0].texts if text.get_text()]
    for words, box in boxes:
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1, words
    for (words, box), (others, other) in combinations(boxes, 2):
        overlap = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
        # Boxes reach above capitals and below descenders, where lines may touch.
        assert min(overlap) <= 3.5, (words, others)


def assert_same_bytes_again(save: Callable[[Path], object], folder: Path, least_nbytes: int = 5000) -> None:
    """Saved twice, in each format, the files are the same; they stay in `folder` as 1 and 2."""
    for suffix in (".svg", ".png", ".pdf"):
        paths = [folder / f"{number}{suffix}" for number in (1, 2)]
        for path in paths:
            save(path)
        first, second = (path.read_bytes() for path in paths)
        assert first == second and len(first) > least_nbytes


def assert_odd_name_is_text(svg: str) -> None:
    """In a picture of ODD."""
    assert "<script" not in svg
    assert ODD.name in said_in(svg)
