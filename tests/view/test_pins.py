"""Pinned states beside the present one: what stands on the axis, the differences, and the section that shows them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.view.backends import FakeBackend, in_loop, settled
from zeroviz.backend import RunState
from zeroviz.errors import TraceError
from zeroviz.models import PRESETS
from zeroviz.panel.pinned import NOTHING, Pinned, differences_html
from zeroviz.pins import MAX_PINS, Pin, compare_pins, with_pin
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy
from zeroviz.state import Explorer
from zeroviz.trace import Origin

BASE = RunSpec(model=PRESETS["tiny"], ranks=3)


def pin_of(spec: RunSpec) -> Pin:
    return Pin({}, predict(spec))


def test_differences_are_the_pins_less_the_present_states() -> None:
    """ZeRO-3's shards against whole states: 16 bytes a parameter at rest, by uneven thirds."""
    ddp = pin_of(replace(BASE, strategy=Strategy.DDP))
    comparison = compare_pins([ddp], predict(BASE))
    assert comparison is not None
    theirs, ours = comparison.lines
    assert [line.name for line in comparison.lines] == ["DDP", "ZeRO-3"] and ours.beyond is None
    whole = ddp.predicted.ranks[0]
    here = max(predict(BASE).ranks, key=lambda rank: rank.peak().total)
    assert theirs.beyond == (
        whole.rest_nbytes - here.rest_nbytes,
        whole.peak().total - here.peak().total,
        whole.sent_nbytes - here.sent_nbytes,
    )
    assert [row.name for row in comparison.scene.rows] == ["DDP", "ZeRO-3"]
    assert comparison.scene.axis_max == max(whole.peak().total, here.peak().total)


def test_pins_of_other_models_and_runs_have_their_rows() -> None:
    other = pin_of(replace(BASE, model=PRESETS["tiny-llama"]))
    run = replace(predict(BASE), origin=Origin.LIVE)
    comparison = compare_pins([other], predict(BASE), run)
    assert comparison is not None
    assert [(row.name, row.origin) for row in comparison.scene.rows] == [
        ("tiny-llama", Origin.PREDICTED), ("tiny", Origin.PREDICTED), ("tiny", Origin.LIVE)
    ]  # fmt: skip


def test_nothing_to_compare_is_none_and_a_fifth_pin_is_refused() -> None:
    assert compare_pins([], predict(BASE)) is None
    assert compare_pins([pin_of(BASE)], predict(BASE)) is None
    pins: tuple[Pin, ...] = ()
    for ranks in range(1, MAX_PINS + 1):
        pins = with_pin(pins, pin_of(replace(BASE, ranks=ranks)))
    with pytest.raises(TraceError, match="4 states are pinned, and a picture takes 4; unpin one"):
        with_pin(pins, pin_of(replace(BASE, ranks=7)))
    again = with_pin(pins, Pin({}, predict(BASE), replace(predict(BASE), origin=Origin.LIVE)))
    assert len(again) == MAX_PINS and again[2].measured is not None
    comparison = compare_pins(pins, predict(replace(BASE, ranks=7)))
    assert comparison is not None and len(comparison.lines) == MAX_PINS + 1


def test_the_section_pins_goes_back_and_unpins() -> None:
    state = Explorer()
    section = Pinned(state)
    assert not section.is_open and section.go.disabled and section.unpin.disabled
    section.pin.click()
    assert section.is_open and "it is this one" in section.picture.value and not section.go.disabled
    state.choose(strategy=Strategy.DDP, ranks=7)
    assert 'class="zeroviz-differences"' in section.picture.value and 'aria-label="tiny' in section.picture.value
    comparison = state.comparison()
    assert comparison is not None and differences_html(comparison) in section.picture.value
    beyond = comparison.lines[0].beyond
    assert beyond is not None and f"{beyond.peak:+,} B" in section.picture.value
    section.go.click()
    assert (state.strategy, state.ranks) == (Strategy.ZERO3, 4)
    state.undo()
    assert (state.strategy, state.ranks) == (Strategy.DDP, 7)
    section.unpin.click()
    assert state.pins == () and NOTHING in section.picture.value


def test_a_pin_too_many_is_said_and_changes_nothing() -> None:
    state = Explorer()
    for ranks in range(1, MAX_PINS + 1):
        state.choose(ranks=ranks)
        assert state.pin()
    pins = state.pins
    state.choose(ranks=7)
    assert not state.pin() and state.pins == pins and "unpin one of them first" in state.error
    state.unpin(9)
    state.go_to_pin(-1)
    assert state.pins == pins and state.ranks == 7


def test_a_pinned_run_stays_when_the_explorer_forgets_it() -> None:
    async def work() -> None:
        state = Explorer(FakeBackend(), asyncio.get_running_loop())
        state.run()
        await settled(lambda: state.run_state is RunState.DONE)
        assert state.pin()
        state.choose(ranks=2)
        comparison = state.comparison()
        assert comparison is not None
        assert [row.origin for row in comparison.scene.rows] == [Origin.PREDICTED, Origin.LIVE, Origin.PREDICTED]

    in_loop(work)
