"""The page: controls, run and stop, news, picture, tables. Everything shown comes from the Explorer."""

from __future__ import annotations

import json
from html import escape
from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.panel.advice import AdviceSection
from zeroviz.panel.ahead import SLIDERS
from zeroviz.panel.controls import VIEWS, Controls
from zeroviz.panel.fit import FitSection
from zeroviz.panel.guessing import Guessing
from zeroviz.panel.intake import Intake
from zeroviz.panel.look import CSS
from zeroviz.panel.pinned import Pinned
from zeroviz.panel.refusal import page_words
from zeroviz.panel.shortcuts import Shortcuts
from zeroviz.panel.stage import Stage
from zeroviz.panel.tables import tables_html
from zeroviz.panel.take import TakeAway
from zeroviz.state import Explorer


class ExplorerPanel(widgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """An Explorer as one widget."""

    def __init__(self, state: Explorer) -> None:
        self.state = state
        # Pictures come first of all that observes, so that they are the first message a toggle sends; but a question
        # hides them before they are there.
        self.guessing = Guessing(state)
        state.observe(lambda _: self._hide(), ["guessing", "asked", "guess_nbytes", "predicted"])
        state.observe(lambda _: self.draw(), ["predicted", "measured", "earlier", *VIEWS])
        self.controls = Controls(state)
        self.run_button = _button("Run on cluster", "Run this very state on real processes and measure it", "run")
        self.stop_button = _button("Stop", "Stop the run and every process of the cluster", "stop")
        self.run_button.on_click(lambda _: state.run())
        self.stop_button.on_click(lambda _: state.stop())
        self.news = widgets.HTML()
        self.news.add_class("zeroviz-live")
        self.stage = Stage(state, {toggle: self.controls.widget[toggle] for toggle in SLIDERS})
        self.fit = FitSection(state)
        self.advice = AdviceSection(state)
        self.pinned = Pinned(state)
        self.take = TakeAway(state, self.stage)
        self.shortcuts = Shortcuts(state, self.guessing.switch)
        self.intake = Intake(state)
        self.tables = widgets.HTML()
        self.tables.add_class("zeroviz-tables-box")
        bar = widgets.Box([self.run_button, self.stop_button, self.news])
        bar.add_class("zeroviz-bar")
        desk = widgets.Box([self.shortcuts, self.intake, self.controls.box, bar])
        desk.add_class("zeroviz-desk")
        pictures = widgets.Box([self.guessing, self.stage, self.advice, self.pinned, self.fit, self.take])
        pictures.add_class("zeroviz-pictures")
        main = widgets.Box([desk, pictures])
        main.add_class("zeroviz-main")
        super().__init__([widgets.HTML(CSS), main, self.tables])
        self.add_class("zeroviz-explorer")
        named = (self.run_button, self.shortcuts.undo, self.shortcuts.reset, self.guessing.switch, self.pinned.pin,
                 self.pinned.go, self.pinned.unpin, self.pinned.which, self.take.what, self.take.download,
                 self.fit.upward, self.guessing.asked, self.guessing.number, self.guessing.show_me,
                 self.shortcuts.example)  # fmt: skip
        self._named = {widget: widget.description for widget in named}
        self._drawn: tuple[Any, ...] = ()
        self._told: tuple[Any, ...] = ()
        self._news_due = False
        self.draw()
        self.tell()
        told = ("predicted", "measured", "earlier", *VIEWS, "run_state", "message", "notice", "error")
        state.observe(lambda _: self.tell(), told)

    def __repr__(self) -> str:
        """What a notebook shows in the widget's place without a kernel: not all widgets of it, one in another."""
        return "The zeroviz explorer: live where a kernel runs."

    def _hide(self) -> None:
        """The numbers are out of sight, and out of a screen reader's, while a question waits for its guess."""
        if self.guessing.hides:
            self.add_class("zeroviz-guessing")
        else:
            self.remove_class("zeroviz-guessing")

    def draw(self) -> None:
        """Draw picture and tables anew, unless what they show is still the same."""
        state = self.state
        with state.lock:
            shown = (state.predicted, state.measured, state.earlier, *(getattr(state, name) for name in VIEWS))
            if all(now is before for now, before in zip(shown, self._drawn, strict=False)) and self._drawn:
                return
            self._drawn = shown
            scene = state.scene()

            def draw_rest() -> None:
                self.tables.value = tables_html(
                    scene, state.predicted, state.measured, earlier=state.earlier, say=state.say
                )
                if self._news_due:
                    self._put_news()

            self.stage.draw(scene, and_later=draw_rest)

    def tell(self) -> None:
        """Say what the cluster does and what was refused, and enable what can be pressed."""
        state = self.state
        with state.lock:
            self.run_button.disabled = state.busy
            self.stop_button.disabled = not state.can_stop
            self.stop_button.description = state.say("Stop engines" if state.is_warm and not state.busy else "Stop")
            for widget, label in self._named.items():
                widget.description = state.say(label)
            self.shortcuts.name_it()
            told = (state.run_state, state.message, state.notice, state.error)
            is_new, self._told = told != self._told, told
            self._news_due = True
            # What no reader waits for comes with what is drawn when the page rests.
            if is_new or not self.stage.has_due:
                self._put_news()

    def _put_news(self) -> None:
        """Put the news on the page. data-controls: what the controls say once the page has caught up with the state;
        see look.py on pressing Run."""
        state, self._news_due = self.state, False
        hints = (state.notice, state.too_large, state.other_run, state.short_bars)
        said = " ".join(hint for hint in hints if hint) if not state.error else ""
        self.news.value = (
            f'<div class="zeroviz-news" data-state="{state.run_state.value}" '
            f'data-controls="{escape(json.dumps(self.controls.words()))}">'
            f'<div class="zeroviz-progress">{escape(state.message)}</div>'
            f'<div class="zeroviz-error">{escape(page_words(state.error))}</div>'
            f'<div class="zeroviz-notice">{escape(said)}</div></div>'
        )


def _button(words: str, tooltip: str, name: str) -> widgets.Button:
    button = widgets.Button(description=words, tooltip=tooltip)
    button.add_class(f"zeroviz-{name}")
    return button
