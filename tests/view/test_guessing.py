"""Predict first: numbers are out of sight until a guess is made, and each new state asks anew."""

from __future__ import annotations

import pytest

from zeroviz.guess import Asked, answer, build_question
from zeroviz.models import PRESETS
from zeroviz.panel.panel import ExplorerPanel
from zeroviz.spec import Strategy
from zeroviz.state import Explorer


@pytest.fixture
def page() -> ExplorerPanel:
    page = ExplorerPanel(Explorer())
    page.guessing.switch.value = True
    return page


def hides(page: ExplorerPanel) -> bool:
    return "zeroviz-guessing" in page._dom_classes


def test_the_switch_hides_and_a_choice_shows(page: ExplorerPanel) -> None:
    assert page.state.guessing and hides(page)
    question = build_question(page.state.predicted, Asked.PEAK)
    assert question.words.split()[0] in page.guessing.words.value
    shown = page.guessing._choices.children
    assert [button.description for button in shown] == [choice.text for choice in question.choices]
    wrong = next(number for number, choice in enumerate(question.choices) if not choice.is_right)
    shown[wrong].click()
    assert not hides(page)
    verdict = answer(question, question.choices[wrong].nbytes)
    assert verdict.verdict in page.guessing.result.value.replace("&#x27;", "'")
    page.guessing.switch.value = False
    assert not hides(page) and page.guessing.children == ()


def test_a_number_of_ones_own_and_what_is_no_number(page: ExplorerPanel) -> None:
    page.guessing.number.value = "much"
    page.guessing.show_me.click()
    assert hides(page) and "much" in page.state.error
    page.guessing.number.value = "1.2 MB"
    page.guessing.show_me.click()
    assert not hides(page) and not page.state.error and page.state.guess_nbytes == 1_200_000


def test_each_new_state_and_each_other_figure_asks_anew(page: ExplorerPanel) -> None:
    page.guessing._choices.children[0].click()
    assert not hides(page)
    page.state.choose(strategy=Strategy.DDP)
    assert hides(page) and page.state.guess_nbytes is None
    page.guessing._choices.children[0].click()
    page.guessing.asked.value = Asked.SENT
    assert hides(page)
    page.state.choose(ranks=1)  # nothing is sent: there is nothing to guess, so nothing is hidden
    assert not hides(page) and "zeroviz-section-error" in page.guessing.words.value
    page.state.choose(ranks=3)
    assert hides(page)


def test_off_it_costs_nothing_and_hides_nothing() -> None:
    page = ExplorerPanel(Explorer())
    page.state.choose(model=PRESETS["gpt2"], ranks=3)
    assert page.guessing._question is None and not hides(page)
