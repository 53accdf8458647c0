"""States side by side on paper: however long their names are, the axis has half of the width and every word room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.view.drawn import assert_words_have_room, words_of
from zeroviz.axis import Tick
from zeroviz.bar_layout import LEAST_AXIS, TICK_GAP, layout_of, named_ticks
from zeroviz.draw import draw, paper_of, placed
from zeroviz.examples import EXAMPLES
from zeroviz.head import WIDTH
from zeroviz.models import PRESETS
from zeroviz.paper import text_width
from zeroviz.scene import Scene, build_scene
from zeroviz.spec import Implementation, Precision, Strategy
from zeroviz.state import Explorer
from zeroviz.trace import Origin, Trace

LARGE = [EXAMPLES[name] for name in ("70B on 8 GPUs", "70B on 1,024 GPUs", "70B in groups of 8")]
MEGATRON = {
    "model": PRESETS["llama3-70b"], "impl": Implementation.MEGATRON, "strategy": Strategy.MEGATRON_OPTIM,
    "precision": Precision.FP32,
}  # fmt: skip
DEEPSPEED = {"impl": Implementation.DEEPSPEED, "ranks": 1024, "batch": 1000, "accumulation": 12}


def compared(*states: Mapping[str, Any], ran: bool = False) -> Scene:
    """The comparison of all but the last, pinned, and the last; each as toggled from a new explorer on."""
    explorer = Explorer()
    for number, toggles in enumerate(states):
        explorer.reset()
        assert explorer.choose(**toggles), explorer.error
        assert number == len(states) - 1 or explorer.pin()
    if ran:
        explorer.pins = tuple(pin._replace(measured=more(pin.predicted)) for pin in explorer.pins)
    comparison = explorer.comparison()
    assert comparison is not None
    return comparison.scene


def more(trace: Trace) -> Trace:
    """As if rehearsed, with a thousandth more at rest."""
    ranks = tuple(replace(rank, rest={k: n * 1001 // 1000 for k, n in rank.rest.items()}) for rank in trace.ranks)
    return replace(trace, ranks=ranks, origin=Origin.REHEARSED)


COMPARED = {
    "examples": compared(*LARGE, EXAMPLES["7B on 8 GPUs"]),
    "implementations": compared(*LARGE, MEGATRON),
    "two": compared({}, {"strategy": Strategy.ZERO2, "precision": Precision.BF16_MIXED, "checkpointing": True}),
    "five": compared(*LARGE, MEGATRON, DEEPSPEED),
    "a bare count": compared(EXAMPLES["7.5B on 64 GPUs (ZeRO paper)"], EXAMPLES["GPT-2 on this machine"], {}),
    "short names": compared({}, {"strategy": Strategy.DDP}),
    "rehearsed": compared({}, {"strategy": Strategy.DDP}, ran=True),
    "all rehearsed": compared(*(EXAMPLES[name] for name in list(EXAMPLES)[:2]), DEEPSPEED, ran=True),
}


@pytest.mark.parametrize("name", COMPARED)
def test_the_axis_has_half_of_the_width_whatever_the_names(name: str) -> None:
    page = placed(COMPARED[name])
    assert page["right"] - page["left"] >= LEAST_AXIS * WIDTH == WIDTH / 2
    assert page["left"] > 0 and page["right"] < WIDTH


@pytest.mark.parametrize("name", COMPARED)
def test_every_name_is_said_whole_and_no_word_leaves_the_paper_or_covers_another(name: str) -> None:
    scene = COMPARED[name]
    said = " ".join(words_of(paper_of(scene)))
    assert all(row.name in said for row in scene.rows) and scene.axis_label in said
    assert_words_have_room(draw(scene))


@pytest.mark.parametrize("name", COMPARED)
def test_names_stand_above_only_where_they_would_leave_too_little(name: str) -> None:
    scene, layout = COMPARED[name], layout_of(COMPARED[name])
    widest = max(text_width(row.name, weight="bold") for row in scene.rows)
    differs = any(row.rest_difference is not None for row in scene.rows)
    if layout.above and not differs:  # beside their figures, differences take more
        assert layout.right - layout.left - widest < LEAST_AXIS * WIDTH
    assert len(layout.above) >= len({row.name for row in scene.rows}) * bool(layout.above)
    bottoms = [top + layout.bar for top in layout.tops]
    assert all(top >= bottom for top, bottom in zip(layout.tops[1:], bottoms, strict=False))
    assert bottoms[-1] < layout.height


def test_ranks_are_named_beside_their_bars() -> None:
    assert not layout_of(build_scene(Explorer().predicted)).above


@pytest.mark.parametrize(("points", "shown"), [(100.0, 6), (40.0, 3), (20.0, 2), (5.0, 1)])
def test_ticks_are_named_as_far_as_their_words_have_room(points: float, shown: int) -> None:
    """Six of 1,000 apart, `points` from each other; the widest word needs between 40 and 60."""
    ticks = tuple(Tick(at * 1000, f"{at * 1000:,}") for at in range(6))
    assert 40 < text_width("5,000") + TICK_GAP < 60
    named = named_ticks(ticks, points / 1000)
    assert named[0] is ticks[0] and len(named) == shown
