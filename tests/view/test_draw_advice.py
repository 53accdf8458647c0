"""The advice for the page and for a terminal: the same figures in both, changes that the explorer takes as they are."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.every import settings_of
from tests.view.backends import FakeBackend
from zeroviz.advice import Advice, advise
from zeroviz.capacity_line import both
from zeroviz.changes import from_plain
from zeroviz.columns import WIDTH
from zeroviz.draw_advice import MAX_CHANGES, advice_html, advice_text, together_words
from zeroviz.models import PRESETS, bare
from zeroviz.peak import peak_of
from zeroviz.spec import Implementation, Offload, Optimizer, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.state import Explorer

GIB = 2**30
LLAMA: dict[str, Any] = {"model": PRESETS["llama3-8b"], "ranks": 8, "precision": Precision.BF16_MIXED, "seq": 4096}
LARGE: dict[str, Any] = {**LLAMA, "model": PRESETS["llama3-70b"]}
PAIR = RunSpec(model=PRESETS["tiny"], batch=2)
ADVICES = {
    "one is enough": advise(RunSpec(**LLAMA), 40 * GIB),
    "two are": advise(RunSpec(**LARGE), 80 * GIB),
    "four are not": advise(RunSpec(**{**LARGE, "ranks": 1, "batch": 8}, strategy=Strategy.DDP), 3 * GIB),
    "fits": advise(RunSpec(**{**LLAMA, "seq": 1024}), 80 * GIB),
    "just so": advise(RunSpec(**LLAMA), peak_of(RunSpec(**LLAMA)).total, 0),
    "bare": advise(RunSpec(model=bare(10**10), ranks=2, unit=UnitPolicy.parse("model")), 80 * GIB),
    "bare fits": advise(RunSpec(model=bare(10**9), ranks=2, unit=UnitPolicy.parse("model")), 80 * GIB),
    "of others": advise(RunSpec(model=PRESETS["tiny"], impl=Implementation.FSDP2), 80 * GIB),
    "of others, too large": advise(RunSpec(model=PRESETS["tiny"], impl=Implementation.DEEPSPEED), 10**6, 0),
    "no reserve": advise(RunSpec(model=PRESETS["tiny"]), 10**9),
    "notes": advise(RunSpec(model=PRESETS["tiny"], optimizer=Optimizer.ADAMW_8BIT, batch=8), 10**5, 0),
    "few bytes": advise(PAIR, peak_of(PAIR).total - 1, 0),
    "nothing helps": advise(
        RunSpec(model=bare(1), ranks=4096, precision=Precision.BF16, optimizer=Optimizer.SGD, offload=Offload.PARAMS,
                unit=UnitPolicy.parse("model")), 1, 0,
    ),
}  # fmt: skip


def parsed(advice: Advice, **how: bool) -> ElementTree.Element:
    return ElementTree.fromstring(advice_html(advice, "h100-80gb", **how))


def text_of(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


@pytest.mark.parametrize("can_press", [False, True])
@pytest.mark.parametrize("name", ADVICES)
def test_a_row_has_its_changes_figures_and_toggles(name: str, can_press: bool) -> None:
    advice = ADVICES[name]
    root = parsed(advice, can_press=can_press)
    assert root.get("data-fits") == str(advice.fits).lower()
    rows = root.findall(".//tbody/tr")
    assert len(rows) == min(len(advice.changes), MAX_CHANGES)
    for row, change in zip(rows, advice.changes, strict=False):
        assert (row.get("data-peak"), row.get("data-fits")) == (str(change.peak_nbytes), str(change.fits).lower())
        words = text_of(row)
        for said in (change.words, both(change.peak_nbytes), change.reason, change.costs, *change.notes):
            assert " ".join(said.split()) in words
        assert ("not enough" in words) != change.fits
        (pressed,) = row.findall(".//*[@data-toggles]")
        assert pressed.tag == ("button" if can_press else "span")
        assert from_plain(json.loads(pressed.get("data-toggles", ""))) == change.toggles
    items = root.findall(".//ol/li")
    assert [item.get("data-peak") for item in items] == [str(change.peak_nbytes) for change in advice.together]


@pytest.mark.parametrize("name", ADVICES)
def test_a_table_says_what_its_columns_are(name: str) -> None:
    for table in parsed(ADVICES[name]).iter("table"):
        assert table.findtext("caption")
        heads = table.findall("thead/tr/th")
        assert all(head.get("scope") == "col" and head.text for head in heads)
        for row in table.findall("tbody/tr"):
            assert len(row) == len(heads) and row[0].tag == "th" and row[0].get("scope") == "row"


@pytest.mark.parametrize("name", ["one is enough", "two are", "four are not", "notes"])
def test_the_explorer_takes_every_change_as_it_stands_on_the_page(name: str) -> None:
    """And comes to the peak that was said."""
    advice = ADVICES[name]
    spec = advice.spec
    for pressed in parsed(advice, can_press=True).findall(".//*[@data-toggles]"):
        state = Explorer(FakeBackend())
        fields = ("model", "strategy", "ranks", "precision", "optimizer", "seq", "batch")
        assert state.choose(**{field: getattr(spec, field) for field in fields}) and state.spec == spec
        toggles = from_plain(json.loads(pressed.get("data-toggles", "")))
        assert state.choose(**toggles), state.error
        peaks = {change.peak_nbytes for change in (*advice.changes, *advice.together[-1:])}
        assert state.predicted.ranks[0].peak().total in peaks
        if toggles == advice.toggles_together:
            assert state.predicted.ranks[0].peak().total == advice.together[-1].peak_nbytes


@pytest.mark.parametrize("name", ADVICES)
def test_text_and_page_say_the_same_within_80_columns(name: str) -> None:
    advice = ADVICES[name]
    text = advice_text(advice, "h100-80gb")
    assert text.strip() and [line for line in text.splitlines() if len(line) > WIDTH] == []
    flat, page = " ".join(text.split()), text_of(parsed(advice))
    for change in (*advice.changes[:MAX_CHANGES], *advice.together):
        for said in (change.words, change.reason, both(change.peak_nbytes)):
            assert " ".join(said.split()) in flat and " ".join(said.split()) in page
    for said in (together_words(advice), advice.why_not, text.partition("\n\n")[0]):
        assert " ".join(said.split()) in page


def test_verdicts_in_words() -> None:
    said = {name: " ".join(advice_text(advice, "h100-80gb").split()) for name, advice in ADVICES.items()}
    assert said["one is enough"].startswith("Does not fit h100-80gb by 10.35 GB (9.64 GiB).")
    assert "No single change" not in said["one is enough"]
    assert "These 2 together are" in said["two are"] and "these 4 together are not" in said["four are not"]
    assert f"{both(-ADVICES['four are not'].together[-1].spare_nbytes)} are still too much" in said["four are not"]
    fits = ADVICES["fits"]
    assert fits.largest_batch is not None and fits.largest_batch > 1
    assert f"The largest batch that still fits is {fits.largest_batch}, now it is 1" in said["fits"]
    assert "No larger batch fits than the present 1" in said["just so"] and "0 B to spare" in said["just so"]
    assert "batch" not in said["bare fits"]
    assert "our own code only" in said["of others"] and said["of others"].startswith("Fits")
    assert "our own code only" in said["of others, too large"] and said["of others, too large"].startswith("Does not")
    assert said["no reserve"].startswith("The reserve of 2.147 GB leaves nothing")
    assert "by 1 B." in said["few bytes"]
    assert said["nothing helps"].endswith("take a smaller model, or a larger GPU.")


def test_names_are_text_and_never_markup() -> None:
    html = advice_html(ADVICES["one is enough"], "<script>alert(1)</script>")
    assert "<script" not in html and ElementTree.fromstring(html) is not None


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("ranks", [1, 8, 4096])
def test_every_strategy_has_words(strategy: Strategy, ranks: int) -> None:
    spec = RunSpec(model=PRESETS["tiny"], ranks=ranks, **settings_of(strategy, ranks))
    for capacity in (1, peak_of(spec).total // 2, 10**12):
        advice = advise(spec, capacity, 0)
        assert [line for line in advice_text(advice).splitlines() if len(line) > WIDTH] == []
        assert parsed(advice, can_press=True) is not None
