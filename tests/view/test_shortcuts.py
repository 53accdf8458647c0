"""Examples, undo and reset; what is given to the page, and what can be taken away."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest

from zeroviz.draw import svg_text
from zeroviz.examples import EXAMPLES
from zeroviz.export import Format, export
from zeroviz.labels import Language
from zeroviz.models import PRESETS, bare
from zeroviz.panel.intake import PIECE_LETTERS, Intake
from zeroviz.panel.panel import ExplorerPanel
from zeroviz.panel.shortcuts import CHOOSE
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy
from zeroviz.state import MAX_UNDONE, Explorer
from zeroviz.trace import Origin


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_state_as_it_stands(name: str) -> None:
    """Nothing in it is settled otherwise, so that its name can be found again from the toggles."""
    page = ExplorerPanel(Explorer())
    page.state.choose(strategy=Strategy.ZERO1, batch=4)
    page.shortcuts.example.value = name
    assert page.state.error == "" and page.state.notice == ""
    assert page.state.toggles == page.state.opening | EXAMPLES[name]
    assert page.shortcuts.example.value == name
    page.state.choose(batch=16)
    assert page.shortcuts.example.value == CHOOSE


def test_another_language_keeps_the_example_and_sets_nothing() -> None:
    """Its options are named anew, which is no choice."""
    page = ExplorerPanel(Explorer())
    page.shortcuts.example.value = name = next(iter(EXAMPLES))
    page.state.pin()
    before = page.state.toggles, len(page.state._before)
    for language in (Language.CHINESE, Language.ENGLISH):
        page.state.language = language
        assert page.shortcuts.example.value == name and (page.state.toggles, len(page.state._before)) == before
        assert page.shortcuts.example.options[0] == (page.state.say(CHOOSE), CHOOSE)


@pytest.mark.parametrize(
    ("strategy", "published_gb"),
    [(Strategy.DDP, 120), (Strategy.ZERO1, 31.4), (Strategy.ZERO2, 16.6), (Strategy.ZERO3, 1.9)],
)
def test_the_papers_example_has_the_papers_figures(strategy: Strategy, published_gb: float) -> None:
    """Rajbhandari et al., arXiv 1910.02054, Figure 1: 7.5B parameters, 64 GPUs, K = 12, in GB of 1e9 bytes."""
    state = Explorer()
    assert state.start_from(EXAMPLES["7.5B on 64 GPUs (ZeRO paper)"]) and state.choose(strategy=strategy)
    assert round(state.predicted.ranks[0].rest_nbytes / 1e9, 1) == published_gb


def test_undo_goes_back_change_by_change_and_reset_can_be_undone() -> None:
    page = ExplorerPanel(Explorer())
    state, undo = page.state, page.shortcuts.undo
    assert undo.disabled and not state.can_undo
    seen = [state.toggles]
    for change in ({"ranks": 8}, {"strategy": Strategy.HYBRID_SHARD}, {"batch": 4}):
        assert state.choose(**change)
        seen.append(state.toggles)
    state.reset()
    assert state.toggles == state.opening == seen[0]
    for toggles in reversed(seen):
        assert not undo.disabled
        undo.click()
        assert state.toggles == toggles and state.spec == state.predicted.spec
    assert undo.disabled
    state.undo()  # nothing to undo changes nothing
    assert state.toggles == seen[0]


def test_what_was_refused_or_changed_nothing_is_not_remembered() -> None:
    state = Explorer()
    assert not state.choose(seq=10**6) and not state.can_undo
    assert state.choose(ranks=4) and not state.can_undo
    for ranks in range(1, MAX_UNDONE + 20):
        state.choose(ranks=1 + ranks % 7)
    assert state.can_undo
    for _ in range(MAX_UNDONE):
        state.undo()
    assert not state.can_undo


# ---- what can be taken away ----

STARTS = {"SVG": b"<?xml", "PNG": b"\x89PNG", "PDF": b"%PDF"}


def handed(page: ExplorerPanel, what: str) -> tuple[str, str, bytes]:
    page.take.what.value = what
    page.take.download.click()
    sent = page.stage.download
    return sent["name"], sent["mime"], base64.b64decode(sent["content"])


def test_every_picture_comes_as_each_kind_of_file() -> None:
    page = ExplorerPanel(Explorer())
    names = set()
    for picture in ("bars", "map", "film", "wire"):
        for kind, start in STARTS.items():
            name, mime, content = handed(page, f"{picture} as {kind}")
            assert content.startswith(start) and name == f"zeroviz-{picture}.{kind.lower()}" and kind.lower() in mime
            names.add(name)
    assert len(names) == 12
    _, _, svg = handed(page, "bars as SVG")
    assert svg_text(page.state.scene()).encode() in svg


def test_ledger_trace_and_code_are_those_of_the_state() -> None:
    page = ExplorerPanel(Explorer())
    page.state.choose(strategy=Strategy.ZERO2, ranks=3)
    predicted = predict(RunSpec(model=page.state.model, strategy=Strategy.ZERO2, ranks=3))
    for words, form in (
        ("ledger as CSV", Format.CSV), ("ledger as Markdown", Format.MARKDOWN), ("trace for Perfetto", Format.CHROME),
        ("trace as JSON", Format.JSON), ("state as Python", Format.PYTHON),
    ):  # fmt: skip
        _, _, content = handed(page, words)
        assert content.decode() == export(form, predicted), words
    assert json.loads(handed(page, "trace as JSON")[2])["spec"] == predicted.spec.to_dict()


def test_each_download_is_a_new_one() -> None:
    page = ExplorerPanel(Explorer())
    first = (handed(page, "ledger as CSV"), page.stage.download["number"])[1]
    assert handed(page, "ledger as CSV") and page.stage.download["number"] == first + 1


def test_the_state_stands_there_as_code_and_as_a_command() -> None:
    page = ExplorerPanel(Explorer())
    assert not page.take.is_open
    page.take.button.value = True
    page.state.choose(ranks=7)
    assert "RunSpec(" in page.take.picture.value and "--ranks 7" in page.take.picture.value


# ---- what is given: another model, a recorded trace ----


def sent(intake: Intake, text: str, name: str = "", letters: int = PIECE_LETTERS) -> None:
    """As the page sends it: in pieces."""
    pieces = [text[at : at + letters] for at in range(0, len(text), letters)] or [""]
    for number, piece in enumerate(pieces):
        message = {"name": name, "number": number, "text": piece, "is_last": number == len(pieces) - 1}
        intake._told(intake, message, [])


def test_a_pasted_model_is_the_states_and_undo_takes_it_back() -> None:
    state = Explorer()
    intake = Intake(state)
    sent(intake, "7.5B")
    assert state.model == bare(7_500_000_000) and intake.taken == 1 and not state.error
    config = {"model_type": "gpt2", "n_embd": 55, "n_layer": 3, "n_head": 5, "vocab_size": 257, "n_positions": 128}
    sent(intake, json.dumps(config, indent=2), "mine.json", letters=7)
    assert state.model.name == "mine" and "." in state.notice
    state.undo()
    assert state.model == bare(7_500_000_000)
    before = state.toggles
    sent(intake, "{")
    assert state.toggles == before and "not valid JSON" in state.error and intake.taken == 2


def test_a_recorded_trace_stands_beside_its_prediction() -> None:
    state = Explorer()
    intake = Intake(state)
    spec = RunSpec(model=PRESETS["tiny-llama"], strategy=Strategy.HYBRID_SHARD, ranks=6, shard_ranks=3, steps=4, seed=9)
    trace = replace(predict(spec), origin=Origin.LIVE)
    sent(intake, trace.to_json(), "trace.json")
    assert (state.strategy, state.ranks, state.shard_ranks) == (Strategy.HYBRID_SHARD, 6, 3)
    assert state.measured is not None and state.measured.origin is Origin.RECORDED
    assert {row.origin for row in state.scene().rows} == {Origin.PREDICTED, Origin.RECORDED}
    assert state.timeline().overlaid == "recorded"
    before = state.toggles
    for broken in (trace.to_json()[:-50], trace.to_json().replace('"schema": "', '"schema": "newer-', 1)):
        sent(intake, broken)
        assert state.error and state.toggles == before and state.measured is not None


def test_a_file_that_is_too_large_is_never_read() -> None:
    state = Explorer()
    intake = Intake(state)
    before = state.toggles
    intake._told(intake, {"name": "weights.json", "nbytes": 200_000_000}, [])
    assert state.error.startswith("weights.json holds 200 MB; the page takes files of at most 64 MB")
    assert state.toggles == before
