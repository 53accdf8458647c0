"""The still copy: what is in it is what `predict` says, and it is sent once the state is at rest."""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import threading
from base64 import b64decode
from contextvars import ContextVar
from dataclasses import dataclass, field
from html import unescape
from typing import Any
from xml.etree import ElementTree

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.view.backends import FakeBackend, in_loop, settled
from zeroviz.cli_spec import add_spec_options, spec_from_args
from zeroviz.labels import Language
from zeroviz.models import PRESETS
from zeroviz.panel import ExplorerPanel, explorer, still
from zeroviz.panel.still import NAME, Copy, Still, keep_still
from zeroviz.precision import Precision
from zeroviz.predict import predict
from zeroviz.scene import build_scene
from zeroviz.settings import SETTINGS
from zeroviz.shard_map import build_shard_map
from zeroviz.spec import Implementation, RunSpec, Strategy, UnitKind
from zeroviz.state import Explorer
from zeroviz.timeline import build_timeline
from zeroviz.wire_scene import build_wire_scene

PICTURES = ("bars", "map", "film", "wire")
STATES: list[dict[str, Any]] = [
    {},
    {"strategy": Strategy.DDP, "ranks": 1},
    {"strategy": Strategy.ZERO2, "ranks": 7, "precision": Precision.BF16_MIXED},
    {"strategy": Strategy.HYBRID_SHARD, "ranks": 8, "shard_ranks": 2, "accumulation": 2},
    {"model": PRESETS["llama3-8b"], "ranks": 64, "unit": UnitKind.LAYER, "checkpointing": True},
    {**dict.fromkeys(SETTINGS), "impl": Implementation.FSDP2, "strategy": Strategy.ZERO3, "ranks": 3},
]


def images(html: str) -> list[tuple[str, str]]:
    """(alt, SVG) of each image."""
    found = re.findall(r'<img alt="([^"]*)" style="[^"]*" src="data:image/svg\+xml;base64,([^"]*)">', html)
    return [(unescape(alt), b64decode(svg).decode()) for alt, svg in found]


def words(svg: str) -> list[str]:
    """The lines of text in a picture, which must be well-formed."""
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def nbytes(pattern: str, lines: list[str]) -> float:
    """The first amount that a line says."""
    value, unit = next(found for line in lines for found in re.findall(pattern, line))
    return float(value.replace(",", "")) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def command(html: str) -> str:
    found = re.search(r"<code [^>]*>(.*?)</code>", html)
    assert found
    return unescape(found[1])


def asked_by(line: str) -> RunSpec:
    program, *asked = shlex.split(line)
    assert program == "zeroviz" and asked[0] == "predict"
    parser = argparse.ArgumentParser()
    add_spec_options(parser)
    return spec_from_args(parser.parse_args(asked[1:]))


def state_of(toggles: dict[str, Any]) -> Explorer:
    state = Explorer()
    assert state.choose(**toggles), state.error
    return state


@pytest.mark.parametrize("toggles", STATES, ids=range(len(STATES)))
def test_each_picture_is_the_predictions_and_says_so(toggles: dict[str, Any]) -> None:
    state = state_of(toggles)
    trace = predict(state.spec)
    bundle = Copy.of(state, PICTURES).bundle()
    found = images(bundle["text/html"])
    wire, timeline = build_wire_scene(trace), build_timeline(trace)
    sentences = [state.scene().sentence, build_shard_map(trace.spec).sentence, timeline.sentence, wire.sentence]
    assert [alt for alt, _ in found] == sentences
    bars, _, film, sent = (words(svg) for _, svg in found)
    amount = build_scene(trace, capacity=state.scene().capacity, reference=state.scene().reference).amount
    for rank in trace.ranks[:: max(1, trace.spec.ranks // 4)]:
        assert amount(rank.rest_nbytes) in bars and amount(rank.peak().total) in bars
    first = trace.ranks[0]
    assert nbytes(r"Predicted: .* peak ([\d.,]+) (\wB|B) in ", film) == pytest.approx(first.peak().total, rel=1e-3)
    said = nbytes(r"Predicted: ([\d.,]+) (\wB|B) .*sent by ", sent) if trace.spec.ranks > 1 else 0
    assert said == pytest.approx(first.sent_nbytes, rel=1e-3)
    assert asked_by(command(bundle["text/html"])) == trace.spec
    assert command(bundle["text/html"]) in bundle["text/plain"] and sentences[0] in bundle["text/plain"]


def test_an_image_stands_by_itself_and_carries_nothing_that_it_cannot_show() -> None:
    for _, svg in images(Copy.of(Explorer(), PICTURES).bundle()["text/html"]):
        root = ElementTree.fromstring(svg)
        assert root.get("font-family") and "var(" not in svg and "currentColor" not in svg
        assert "<title" not in svg and " data-" not in svg and "href" not in svg


def test_labels_are_in_the_language_that_was_chosen() -> None:
    state = Explorer()
    state.language = Language.CHINESE
    assert any(re.search("[\u4e00-\u9fff]", svg) for _, svg in images(Copy.of(state, PICTURES).bundle()["text/html"]))


def test_a_model_of_ones_own_is_named_beside_its_file() -> None:
    state = Explorer()
    assert state.take_in(
        '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 101}', "own.json"
    )
    html = Copy.of(state, ["bars"]).bundle()["text/html"]
    assert "--model CONFIG.json " in command(html) and f"CONFIG.json is the file of {state.model.name}." in html


def test_what_is_too_large_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Explorer()
    whole = Copy.of(state, PICTURES).bundle()["text/html"]
    lengths = [len(image) for image in re.findall(r"<img [^>]*>", whole)]
    most = sum(lengths) - lengths[2]  # the film, the largest, has no room; the wire after it has
    assert lengths[2] > lengths[3]
    monkeypatch.setattr(still, "MAX_NBYTES", most)
    bundle = Copy.of(state, PICTURES).bundle()
    assert [alt for alt, _ in images(bundle["text/html"])] == [
        alt for number, (alt, _) in enumerate(images(whole)) if number != 2
    ]
    said = f"Left out, being {lengths[2]:,} B beside {most:,} B for all: The whole step, op by op."
    assert said in bundle["text/html"] and said in bundle["text/plain"]


@dataclass
class Sent:
    """What a still copy publishes, as a display publisher would."""

    updates: list[dict[str, str]] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    cells: list[str] = field(default_factory=list)

    def __call__(self, data: dict[str, str], *, transient: dict[str, str], update: bool) -> None:
        assert update == bool(self.first), "the first is a new output, and only the first"
        self.ids.add(transient["display_id"])
        self.cells.append(CELL.get())
        if update:
            self.updates.append(data)
        else:
            self.first = data

    @property
    def html(self) -> str:
        return self.updates[-1]["text/html"]


CELL: ContextVar[str] = ContextVar("cell")
REST_S = 0.2


def kept(page: ExplorerPanel, unseen_s: float = 60.0) -> Sent:
    CELL.set("explorer's")
    sent = Sent()
    Still(page, sent, asyncio.get_running_loop(), REST_S, unseen_s)
    CELL.set("another")
    return sent


def panel() -> ExplorerPanel:
    return ExplorerPanel(Explorer(FakeBackend(), asyncio.get_running_loop()))


def test_one_update_follows_many_changes_and_is_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: how fast the machine is says nothing here."""

    async def work() -> None:
        loop, now_s = asyncio.get_running_loop(), 0.0
        monkeypatch.setattr(loop, "time", lambda: now_s)

        async def passes(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds
            for _ in range(5):
                await asyncio.sleep(0)

        page = panel()
        sent = kept(page)
        assert images(sent.first["text/html"]) == [] and NAME in sent.first["text/html"]
        for ranks in range(2, 12):  # a slider is dragged, for longer than a rest
            page.state.ranks = ranks
            await passes(REST_S * 0.9)
        assert sent.updates == []
        for _ in range(30):
            await passes(REST_S * 0.9)
        assert len(sent.updates) == 1 and asked_by(command(sent.html)) == page.state.spec
        assert len(images(sent.html)) == 4 and images(sent.html)[0][0] == page.state.scene().sentence
        assert len(sent.ids) == 1 and set(sent.cells) == {"explorer's"}

    in_loop(work)


def test_a_toggle_on_another_thread_is_sent_from_the_loop() -> None:
    async def work() -> None:
        page = panel()
        sent = kept(page)
        toggle = threading.Thread(target=lambda: page.state.choose(strategy=Strategy.ZERO1))
        toggle.start()
        await settled(lambda: bool(sent.updates))
        toggle.join()
        assert "--strategy zero1 " in command(sent.html) and set(sent.cells) == {"explorer's"}

    in_loop(work)


def test_what_is_open_is_in_it_and_a_run_that_lands() -> None:
    async def work() -> None:
        page = panel()
        sent = kept(page)
        page.stage.is_open = {**page.stage.is_open, "timeline": False, "map": False, "formula": True}
        await settled(lambda: bool(sent.updates))
        state = page.state
        assert [alt for alt, _ in images(sent.html)] == [state.scene().sentence, state.wire().sentence]
        page.state.run()
        await settled(lambda: len(sent.updates) == 2)
        assert state.measured is not None and "Measured is a live run of this very state." in sent.html
        alt, svg = images(sent.html)[0]
        assert alt == state.scene().sentence and "measured" in words(svg)

    in_loop(work)


def test_a_question_without_its_guess_is_not_answered_by_the_copy() -> None:
    async def work() -> None:
        page = panel()
        sent = kept(page)
        page.state.guessing = True
        await settled(lambda: bool(sent.updates))
        assert images(sent.html) == [] and "It asks for a guess first" in sent.html
        assert page.state.scene().sentence not in sent.updates[-1]["text/plain"]
        page.state.guess_nbytes = 1_000_000
        await settled(lambda: len(sent.updates) == 2)
        assert len(images(sent.html)) == 4

    in_loop(work)


def test_the_first_copy_waits_for_the_page_but_not_for_ever() -> None:
    async def work() -> None:
        page, other = panel(), panel()
        sent, unseen = kept(page), kept(other, unseen_s=2 * REST_S)
        page.stage.seen = ["bars"]
        await settled(lambda: bool(sent.updates and unseen.updates))
        page.stage.seen = ["film"]  # it scrolls
        await asyncio.sleep(2 * REST_S)
        assert len(sent.updates) == 1

    in_loop(work)


def test_there_is_none_without_ipython_or_in_voila(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert keep_still(explorer(FakeBackend()), loop) is None
        shell = type("Shell", (), {"display_pub": type("Publisher", (), {"publish": Sent()})})
        monkeypatch.setattr(still, "get_ipython", lambda: shell)
        CELL.set("")
        assert keep_still(panel(), loop) is not None
        monkeypatch.setenv("SERVER_SOFTWARE", "voila/0.5")
        assert keep_still(panel(), loop) is None

    assert not InteractiveShell.initialized()
    in_loop(work)
