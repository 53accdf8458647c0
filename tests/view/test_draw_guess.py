"""A guess on paper: every figure at its place, on a linear axis or far off on a logarithmic one, every word legible."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.view.drawn import (
    ODD,
    SVG,
    assert_odd_name_is_text,
    assert_same_bytes_again,
    assert_words_have_room,
    words_of,
)
from zeroviz.category import Category
from zeroviz.draw import WIDTH
from zeroviz.draw_guess import FAR, MARK, NAME, guess_svg, paper_of, placed_guess, save_guess
from zeroviz.errors import ZerovizError
from zeroviz.guess import Answer, Asked, answer, build_question, parse_guess
from zeroviz.models import PRESETS, bare
from zeroviz.paper import Paper, Shape
from zeroviz.predict import predict
from zeroviz.spec import Checkpointing, Implementation, Offload, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.style import FONT_POINTS, PAINT, WIRE_PAINT
from zeroviz.trace import Origin, Trace

FIGURE1 = {"model": bare(7_500_000_000), "unit": UnitPolicy.parse("model"), "ranks": 64}
LLAMA = {"model": PRESETS["llama3-8b"], "ranks": 8, "seq": 4096}


def answer_of(
    what: Asked, guess: str, *, more: int | None = None, origin: Origin = Origin.LIVE, **fields: Any
) -> Answer:
    """more: bytes that a measured step holds beyond the predicted ones; None measures nothing."""
    spec = RunSpec(**{"model": PRESETS["tiny"], "ranks": 4, "precision": Precision.BF16_MIXED, **fields})
    trace = predict(spec)
    ran = None if more is None else measured(trace, more, origin)
    return answer(build_question(trace, what), parse_guess(guess), ran)


def measured(trace: Trace, more: int, origin: Origin) -> Trace:
    first = trace.ranks[0]
    rest = {**first.rest, Category.TEMPORARY: more}
    return replace(trace, origin=origin, ranks=(replace(first, rest=rest), *trace.ranks[1:]))


ANSWERS = {
    "too much": answer_of(Asked.REST, "120 GB", **FIGURE1, strategy=Strategy.ZERO1),
    "too little": answer_of(Asked.PEAK, "40 GB", **LLAMA),
    "right": answer_of(Asked.REST, "31.4 GB", **FIGURE1, strategy=Strategy.ZERO1),
    "to the byte": answer_of(Asked.REST, "31406250000", **FIGURE1, strategy=Strategy.ZERO1, more=0),
    "a little off": answer_of(Asked.REST, "32.3 GB", **FIGURE1, strategy=Strategy.ZERO1),
    "measured": answer_of(Asked.PEAK, "532 kB", more=0),
    "measured more": answer_of(Asked.PEAK, "532 kB", more=4096),
    "recorded": answer_of(Asked.REST, "1 MB", more=-12, origin=Origin.RECORDED, strategy=Strategy.DDP),
    "rehearsed": answer_of(Asked.REST, "1 MB", more=0, origin=Origin.REHEARSED),
    "sent": answer_of(Asked.SENT, "399348", more=0),
    "sent by one": answer_of(Asked.SENT, "200 kB", strategy=Strategy.DDP),
    "sent in groups": answer_of(Asked.SENT, "200 kB", strategy=Strategy.HYBRID_SHARD, shard_ranks=2),
    "far above": answer_of(Asked.REST, "120 GB", **FIGURE1),
    "far below": answer_of(Asked.PEAK, "12 kB", more=0),
    "absurd": answer_of(Asked.REST, "1e24", more=0),
    "a byte": answer_of(Asked.REST, "1", **FIGURE1),
    "just beyond": answer_of(Asked.REST, "39.4 GB", **FIGURE1),
    "checkpointing": answer_of(
        Asked.PEAK, "50 GB", **LLAMA, checkpointing=Checkpointing(1), offload=Offload.OPTIMIZER, accumulation=4
    ),
    "a library": answer_of(
        Asked.PEAK, "300 MB", model=PRESETS["gpt2"], impl=Implementation.DEEPSPEED, strategy=Strategy.ZERO2
    ),
    "one rank": answer_of(Asked.PEAK, "1 MB", ranks=1),
}
FAR_OFF = {"far above", "far below", "absurd", "a byte", "just beyond"}
BARS = sorted(set(ANSWERS) - FAR_OFF)


def marks(paper: Paper, name: str) -> list[Shape]:
    return [shape for shape in paper.shapes if isinstance(shape, Shape) and shape.data.get("mark") == name]


def span(shape: Shape) -> tuple[float, float]:
    xs = [x for x, _ in shape.points]
    return min(xs), max(xs)


def rows_of(result: Answer) -> dict[str, int]:
    rows = {"guess": result.guess_nbytes, "model": result.model_nbytes}
    return rows if result.measured is None else {**rows, "measured": result.measured.nbytes}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_figure_has_one_mark_with_its_bytes(name: str) -> None:
    result = ANSWERS[name]
    paper = paper_of(result)
    for key in ("guess", "model", "measured"):
        nbytes = rows_of(result).get(key)
        found = marks(paper, key)
        assert len(found) == (nbytes is not None)
        if nbytes is not None:
            assert found[0].data["nbytes"] == str(nbytes) and f"{nbytes:,} B" in found[0].tip
    said = words_of(paper)
    assert {"your guess", "the model"} <= set(said)
    assert result.measured_origin is None or result.measured_origin.label in said
    assert set(result.texts) <= set(said)


@pytest.mark.parametrize("name", BARS)
def test_bars_are_to_scale_from_zero(name: str) -> None:
    result = ANSWERS[name]
    paper, place = paper_of(result), placed_guess(result)
    assert not place["is_log"] and place["least"] == 0
    per_byte = (place["right"] - place["left"]) / place["most"]
    for key, nbytes in rows_of(result).items():
        start, stop = span(marks(paper, key)[0])
        assert start == pytest.approx(place["left"])
        assert stop - start == pytest.approx(nbytes * per_byte, abs=0.1)
        assert place["rows"][key][2] == pytest.approx(stop, abs=0.1) and stop <= place["right"]


@pytest.mark.parametrize("name", BARS)
def test_a_bar_is_stacked_of_the_figures_parts_painted_as_everywhere(name: str) -> None:
    result = ANSWERS[name]
    paper = paper_of(result)
    for key, figure in (("model", result.question.model), ("measured", result.measured)):
        parts = marks(paper, f"{key}-part")
        if figure is None:
            assert parts == []
            continue
        assert [int(part.data["nbytes"]) for part in parts] == [part.nbytes for part in figure.parts]
        assert all(span(one)[1] == pytest.approx(span(other)[0], abs=0.1) for one, other in pairwise(parts))
        for mark, part in zip(parts, figure.parts, strict=True):
            paint = PAINT[part.key] if isinstance(part.key, Category) else WIRE_PAINT[part.key]
            assert (mark.fill, mark.hatch) == (paint.color, None if part.stays else paint.hatch)


@pytest.mark.parametrize("name", BARS)
def test_the_gap_lies_between_guess_and_model(name: str) -> None:
    result = ANSWERS[name]
    paper, place = paper_of(result), placed_guess(result)
    gaps = marks(paper, "gap")
    edges = sorted((place["rows"]["guess"][2], place["rows"]["model"][2]))
    if edges[1] - edges[0] < 1:
        assert gaps == []
        return
    (gap,) = gaps
    assert span(gap) == pytest.approx(edges, abs=0.1) and gap.data["nbytes"] == str(abs(result.difference))
    # What is missing is no part of the guess: its edge is broken.
    assert bool(gap.dash) is (result.difference < 0)


@pytest.mark.parametrize("name", sorted(FAR_OFF))
def test_what_is_far_off_is_on_a_logarithmic_axis_that_says_so(name: str) -> None:
    result = ANSWERS[name]
    paper, place = paper_of(result), placed_guess(result)
    assert place["is_log"] and result.factor > FAR
    assert any("logarithmic: each line is 10 times the one before" in words for words in words_of(paper))
    figures = rows_of(result)
    assert 1 <= place["least"] <= min(figures.values()) and max(figures.values()) <= place["most"]
    # Equal factors are equal lengths: the model is as far from the left end as its share of the decades.
    for key in figures:
        start, stop = span(marks(paper, key)[0])
        assert (start + stop) / 2 == pytest.approx(place["rows"][key][2], abs=0.1) and stop - start == pytest.approx(
            2 * MARK, abs=0.2
        )
    assert place["left"] - 0.1 <= min(x for _, _, x in place["rows"].values())
    (gap,) = marks(paper, "gap")
    assert gap.data["nbytes"] == str(abs(result.difference))
    powers = [words for words in words_of(paper) if re.fullmatch(r"10{0,2} [kMGTPEZY]?B", words)]
    assert 2 <= len(powers) <= 12


def test_the_factor_and_the_difference_are_written_beside_the_guess() -> None:
    assert {"x 3.82", "120.0 GB", "88.59 GB too much"} <= set(words_of(paper_of(ANSWERS["too much"])))
    assert {"÷ 1.28", "40.00 GB", "11.16 GB too little"} <= set(words_of(paper_of(ANSWERS["too little"])))
    assert "x 64" in words_of(paper_of(ANSWERS["far above"])) and "÷ 74.3" in words_of(paper_of(ANSWERS["far below"]))
    right = words_of(paper_of(ANSWERS["to the byte"]))
    assert not any(words.startswith(("x ", "÷ ")) or "too " in words for words in right)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_verdict_the_reason_and_the_sum_are_on_paper(name: str) -> None:
    result = ANSWERS[name]
    said = " ".join(words_of(paper_of(result)))
    assert result.words.removesuffix(".") in said and result.why in said
    assert f"The model's {result.texts[1]}:" in said
    assert result.question.what.label in said
    differs = result.measured is not None and result.measured.nbytes != result.model_nbytes
    assert (result.measured_words in said) is differs or not result.measured_words
    assert ("exactly the same" in said) is (result.measured is not None and not differs)


@pytest.mark.parametrize("name", ANSWERS)
def test_no_word_leaves_the_paper_or_covers_another(name: str) -> None:
    assert_words_have_room(paper_of(ANSWERS[name]).figure())


@pytest.mark.parametrize("name", ANSWERS)
def test_svg_is_whole_and_can_be_read_from_the_back_of_a_room(name: str) -> None:
    result = ANSWERS[name]
    text = guess_svg(result)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and NAME in str(root.get("class")).split() and root.get("width") == "100%"
    assert root.get("aria-label") == result.sentence
    # On a page ink and paper are the page's.
    assert placed_guess(result)["svg"] == paper_of(result).svg(NAME, result.sentence, on_page=True)
    patterns = {pattern.get("id") for pattern in root.iter(f"{SVG}pattern")}
    assert set(re.findall(r'fill="url\(#([^)]+)\)"', text)) == patterns
    assert min(float(points) for points in re.findall(r'font-size="([\d.]+)"', text)) >= FONT_POINTS
    assert not re.search(r' id="(?!zeroviz-)', text)
    assert paper_of(result).width == WIDTH and len(text) < 20_000


def test_the_sentence_says_all_of_it() -> None:
    assert ANSWERS["measured more"].sentence.endswith("4,096 B more than the model says.")
    for result in ANSWERS.values():
        assert result.question.words in result.sentence and result.words in result.sentence
        assert result.sum_words in result.sentence and result.why in result.sentence


def test_the_same_answer_gives_the_same_bytes(tmp_path: Path) -> None:
    assert_same_bytes_again(lambda path: save_guess(ANSWERS["measured"], path), tmp_path, 3000)


def test_an_unknown_format_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ZerovizError, match=r"\.svg, \.png or \.pdf"):
        save_guess(ANSWERS["right"], tmp_path / "guess.bmp")


def test_names_in_a_picture_are_text_and_never_markup() -> None:
    assert_odd_name_is_text(guess_svg(answer_of(Asked.REST, "1 MB", model=ODD)))
