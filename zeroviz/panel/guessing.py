"""Predict first: while it is on, each new state hides its numbers until a guess is made, and then shows how far off it
was, with what explains the gap."""

from __future__ import annotations

from html import escape

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.draw_guess import placed_guess
from zeroviz.errors import ZerovizError
from zeroviz.guess import Asked, Question, answer, build_question, parse_guess
from zeroviz.panel.section import Choice
from zeroviz.state import Explorer

MAX_CHOICES = 4


class Guessing(widgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """What is asked, the question with its choices or a number of one's own, and the answer. `switch` is elsewhere."""

    def __init__(self, state: Explorer) -> None:
        self._state = state
        self._question: Question | None = None
        self.switch = widgets.ToggleButton(description="Predict first", tooltip="Guess before the numbers are shown")
        self.switch.add_class("zeroviz-predict-first")
        labels = [(asked.label, asked) for asked in Asked]
        self.asked = widgets.Dropdown(options=labels, value=state.asked, description="guess")
        self._figures = Choice(self.asked, labels, lambda asked: setattr(state, "asked", asked))
        self.asked.add_class("zeroviz-asked")
        self.words = widgets.HTML()
        self.choices = [widgets.Button() for _ in range(MAX_CHOICES)]
        self.number = widgets.Text(placeholder="or your own: 1.5 GB, 800 MiB", description="number")
        self.number.add_class("zeroviz-guess-number")
        self.show_me = widgets.Button(description="That is my guess")
        self.show_me.add_class("zeroviz-guess-it")
        self.result = widgets.HTML()
        self.result.add_class("zeroviz-picture-card")
        self._choices = widgets.Box(self.choices)
        self._own = widgets.Box([self.number, self.show_me])
        for row in (self._choices, self._own):
            row.add_class("zeroviz-row")
        super().__init__([])
        self.add_class("zeroviz-guess")
        self.switch.observe(lambda change: setattr(state, "guessing", change.new), "value")
        for number, button in enumerate(self.choices):
            button.add_class(f"zeroviz-choice-{number}")
            button.on_click(lambda _, number=number: self._chosen(number))
        self.show_me.on_click(lambda _: self._typed())
        state.observe(lambda _: self.draw(), ["guessing", "asked", "guess_nbytes", "predicted", "measured", "language"])

    def draw(self) -> None:
        """The question of this state or, once it was answered, the answer."""
        state = self._state
        with state.lock:
            self._figures.name_it(state.say)
            self.switch.value, self.asked.value = state.guessing, state.asked
            if not state.guessing:
                self.children = []
                return
            try:
                self._question = build_question(state.predicted, state.asked, state.rank)
            except ZerovizError as error:  # nothing to guess: then nothing is hidden
                self._question, state.guess_nbytes = None, None
                self.words.value = f'<p class="zeroviz-section-error">{escape(str(error))}</p>'
                self.children = [self.asked, self.words]
                return
            if state.guess_nbytes is None:
                self._ask(self._question)
            else:
                found = answer(self._question, state.guess_nbytes, state.measured)
                self.result.value = placed_guess(found, state.say)["svg"]
                self.children = [self.asked, self.result]

    @property
    def hides(self) -> bool:
        """Whether a question waits for its guess, so that the numbers are not to be seen."""
        return self._state.guessing and self._question is not None and self._state.guess_nbytes is None

    def _ask(self, question: Question) -> None:
        self.words.value = f'<p class="zeroviz-question" role="heading" aria-level="3">{escape(question.words)}</p>'
        self.number.value = ""
        for button, choice in zip(self.choices, question.choices, strict=False):
            button.description = choice.text
        self._choices.children = self.choices[: len(question.choices)]
        self.children = [self.asked, self.words, self._choices, self._own]

    def _chosen(self, number: int) -> None:
        with self._state.lock:
            if self._question is not None and number < len(self._question.choices):
                self._state.guess_nbytes = self._question.choices[number].nbytes

    def _typed(self) -> None:
        try:
            self._state.guess_nbytes = parse_guess(self.number.value)
            self._state.error = ""
        except ZerovizError as error:
            self._state.error = str(error)
