"""What to cut first: changes that would make the state fit its GPU, each a button that makes it.

Worked out when it is looked at, after the pictures are on their way: dozens of specs are tried.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from zeroviz.changes import from_plain
from zeroviz.draw_advice import advice_html
from zeroviz.errors import ZerovizError
from zeroviz.labels import say_html
from zeroviz.state import Explorer

HEADING = "What to cut first"


class AdviceSection(anywidget.AnyWidget):
    """A heading to press and, while it is open, the advice. The page sends back which change was pressed."""

    _esm = Path(__file__).with_name("advice.js")

    heading = traitlets.Unicode(HEADING).tag(sync=True)
    is_open = traitlets.Bool(False).tag(sync=True)
    html = traitlets.Unicode("").tag(sync=True)

    def __init__(self, state: Explorer) -> None:
        self._state = state
        super().__init__()
        self.add_class("zeroviz-section")
        self.add_class("zeroviz-advice-section")
        self.on_msg(lambda _, message, __: self.pressed(str(message.get("toggles", ""))))
        self.observe(lambda _: self.draw(), "is_open")
        state.observe(lambda _: setattr(self, "heading", state.say(HEADING)), "language")
        state.observe(lambda _: self.draw(), ["predicted", "gpu", "language"])

    def draw(self) -> None:
        """Work the advice out anew, if it can be seen."""
        if not self.is_open:
            return
        with self._state.lock:
            try:
                html = advice_html(self._state.advice(), self._state.gpu, can_press=True)
                self.html = say_html(html, self._state.say)
            except ZerovizError as error:
                self.html = f'<p class="zeroviz-section-error">{escape(str(error))}</p>'

    def pressed(self, toggles: str) -> None:
        """Make a change that was proposed. What was not proposed here is refused in a sentence."""
        try:
            wanted: Any = json.loads(toggles)
            self._state.choose(**from_plain(wanted))
        except (ZerovizError, ValueError, AttributeError) as error:
            self._state.error = f"{error}"
