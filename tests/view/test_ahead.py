"""Pictures drawn ahead of a slider's move: what the state draws once it has moved, or none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from zeroviz.labels import Language
from zeroviz.models import PRESETS
from zeroviz.panel import ExplorerPanel
from zeroviz.panel import stage as stage_module
from zeroviz.panel.ahead import SLIDERS, pictures_ahead
from zeroviz.panel.pictures import PICTURES, as_text
from zeroviz.spec import Implementation, Precision, Strategy, UnitKind
from zeroviz.state import Explorer
from zeroviz.toggles import TOGGLES
from zeroviz.trace import Origin

STATES: dict[str, dict[str, Any]] = {
    "opening": {},
    "uneven": {"ranks": 7, "precision": Precision.BF16_MIXED, "strategy": Strategy.ZERO2, "accumulation": 3},
    "hybrid": {"ranks": 6, "strategy": Strategy.HYBRID_SHARD, "shard_ranks": 3, "unit": UnitKind.LAYER},
    "large": {"ranks": 64, "model": PRESETS["llama3-8b"], "seq": 4096},
    "fsdp2 resharded": {"ranks": 12, "impl": Implementation.FSDP2, "reshard_ranks": 4},
    "dealt": {"ranks": 3, "impl": Implementation.ZERO_REDUNDANCY, "strategy": Strategy.ZERO1},
}


def shown(page: ExplorerPanel) -> dict[str, Any]:
    """What the page shows, but for which state's it says it is."""
    page.stage.draw_rest()
    parts = (*PICTURES, "frames")
    sent = {part: json.loads(as_text(getattr(page.stage, part))) for part in parts}
    return {part: {key: value for key, value in data.items() if key != "of"} for part, data in sent.items()}


@pytest.mark.parametrize("toggle", SLIDERS)
@pytest.mark.parametrize("name", STATES)
def test_what_is_drawn_ahead_is_what_is_drawn(name: str, toggle: str) -> None:
    """Every picture and the film, to the letter, whatever follows from the move: another shard group, fewer ranks than
    the one whose film is shown. A state that is refused has no pictures, and the page's own move is refused alike."""
    page = ExplorerPanel(Explorer())
    page.stage.is_open = dict.fromkeys(page.stage.is_open, True)
    state = page.state
    assert state.choose(**STATES[name])
    state.language, state.zoom, state.gpu, state.rank = Language.CHINESE, True, "24GiB", min(2, state.ranks - 1)
    offered = {each: page.controls.widget[each].options for each in SLIDERS}
    place = offered[toggle].index(page.controls.widget[toggle].value)
    before, rank = (state.toggles, state.spec, shown(page)), state.rank
    ahead = pictures_ahead(state, {"toggle": toggle, "at": [place - 1, place + 1]}, offered, PICTURES)
    assert (state.toggles, state.spec, shown(page)) == before, "what is drawn ahead changes nothing"
    num_moved = 0
    for near in (place - 1, place + 1):
        if not 0 <= near < len(offered[toggle]):
            assert str(near) not in ahead
            continue
        if state.choose(**{toggle: offered[toggle][near]}):
            num_moved += 1
            assert {part: json.loads(text) for part, text in ahead[str(near)].items()} == shown(page)
            state.undo()
            state.rank = rank
        else:
            assert str(near) not in ahead
    assert num_moved == len(ahead)


def test_a_run_is_shown_ahead_too() -> None:
    """Measured bars of a state that was run before stand in its pictures, ahead as they do at the move."""
    page = ExplorerPanel(Explorer())
    state = page.state
    ran = replace(state.predicted, origin=Origin.LIVE)
    state.choose(ranks=5)
    state._keep_run(ran.spec, ran)
    offered = {"ranks": page.controls.widget["ranks"].options}
    ahead = pictures_ahead(state, {"toggle": "ranks", "at": [3]}, offered, ["bars"])
    assert offered["ranks"][3] == 4 and ">measured<" in json.loads(ahead["3"]["bars"])["svg"]


def test_in_a_window_of_their_own_bars_are_as_wide_ahead_as_they_will_be() -> None:
    page = ExplorerPanel(Explorer())
    stage, narrow = page.stage, page.stage.bars
    stage.aspect = 1.86
    assert stage.bars["right"] > narrow["right"] and stage.bars["of"] == narrow["of"] == stage.frames["of"]
    offered = {"ranks": page.controls.widget["ranks"].options}
    ahead = pictures_ahead(page.state, {"toggle": "ranks", "at": [4]}, offered, PICTURES, stage.aspect)
    page.state.choose(ranks=5)
    assert json.loads(ahead["4"]["bars"]) == shown(page)["bars"]
    page.state.choose(ranks=4)
    stage.aspect = 0.0
    assert stage.bars["svg"] == narrow["svg"]


def test_what_a_page_asks_for_is_checked() -> None:
    """A message is the page's: what is not on a slider is left out, and nothing of it is an error."""
    state = Explorer()
    offered = {"ranks": (1, 2, 3)}
    for asked in ({}, {"toggle": "model", "at": [0]}, {"toggle": ["ranks"], "at": [0]}, {"toggle": "ranks", "at": 1}):
        assert pictures_ahead(state, asked, offered, ["bars"]) == {}
    found = pictures_ahead(state, {"toggle": "ranks", "at": [-1, 3, True, "0", None, 1]}, offered, ["bars"])
    assert list(found) == ["1"] and list(found["1"]) == ["bars"]


def test_nothing_is_sent_ahead_of_another_version_a_question_or_a_long_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ExplorerPanel(Explorer())
    stage, sent = page.stage, list[dict[str, Any]]()
    monkeypatch.setattr(stage, "send", sent.append)
    stage.seen = ["bars", "map"]
    asked = {"ahead": 7, "toggle": "ranks", "at": [2, 4], "version": stage.version}
    stage._told(asked)
    assert sent.pop()["number"] == 7 and not sent
    stage._told(asked | {"version": stage.version - 1})
    page.state.guessing = True
    stage._told(asked | {"version": stage.version})
    assert not sent
    page.state.guessing = False
    stage._told(asked | {"version": stage.version})
    assert sorted(sent[0]["ahead"]) == ["2", "4"] and sorted(sent.pop()["ahead"]["2"]) == ["bars", "map"]
    stage.seen = ["bars", "film"]  # of 80 blocks by layers in 8 micro-batches
    page.state.choose(model=PRESETS["llama3-70b"], unit=UnitKind.LAYER, accumulation=8, seq=4096)
    assert len(json.dumps(stage.film)) > stage_module.MOST_AHEAD
    stage._told(asked | {"version": stage.version})
    assert not sent


def test_a_state_beside_is_of_no_consequence() -> None:
    """It has every toggle of the state, what is looked at and its runs, and leaves the state alone."""
    state = Explorer()
    state.choose(ranks=6, strategy=Strategy.HYBRID_SHARD, shard_ranks=3)
    state.gpu, state.rank = "40GB", 5
    beside = state.beside(ranks=4)
    assert beside is not None and beside.ranks == 4 and beside.rank == 3 and beside.gpu == "40GB"
    assert {name for name in TOGGLES if getattr(beside, name) != getattr(state, name)} == {"ranks", "shard_ranks"}
    assert (state.ranks, state.shard_ranks, state.rank, state.can_undo) == (6, 3, 5, True)
    assert state.beside(seq=10**9) is None and not state.error


def test_news_that_nobody_waits_for_comes_when_the_page_rests() -> None:
    """What the controls say, for the Run button to wait for, is one message less in the way of the pictures; a refusal
    or a notice is put at once."""
    page = ExplorerPanel(Explorer())
    page.stage.seen = ["bars", "map"]
    page.state.choose(ranks=5)
    assert page.stage.has_due and "&quot;ranks&quot;: &quot;4&quot;" in page.news.value
    page.stage._told({"rest": True})
    assert not page.stage.has_due and "&quot;ranks&quot;: &quot;5&quot;" in page.news.value
    page.state.choose(ranks=6)
    assert not page.state.choose(seq=10**9)
    assert "sequence is 1000000000" in page.news.value and "&quot;ranks&quot;: &quot;6&quot;" in page.news.value
    page.state.choose(ranks=7)  # and the sentence goes at once
    assert "sequence is" not in page.news.value
