"""Another model, or a recorded trace: pasted, typed, picked or dropped on the page. `zeroviz.intake` says what it is.

A file is read in the browser, which need not be on the kernel's machine, and comes in pieces: a server takes messages
of some megabytes. A file that is too large for what can be read here is never read at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from zeroviz.quantity import format_nbytes
from zeroviz.state import Explorer

MAX_DROPPED_NBYTES = 64 * 10**6
PIECE_LETTERS = 2**20
HEADING = "Another model, or a recorded trace"
USE = "Use it"


class Intake(anywidget.AnyWidget):
    """A field, a button, a file picker, and the whole explorer as a place to drop a file on."""

    _esm = Path(__file__).with_name("intake.js")

    heading = traitlets.Unicode(HEADING).tag(sync=True)
    use = traitlets.Unicode(USE).tag(sync=True)
    hint = traitlets.Unicode("A config.json, a number such as 7.5B, or the path of a config or a trace").tag(sync=True)
    most_nbytes = traitlets.Int(MAX_DROPPED_NBYTES).tag(sync=True)
    piece_letters = traitlets.Int(PIECE_LETTERS).tag(sync=True)
    taken = traitlets.Int(0).tag(sync=True)
    """Counts what was taken in, so that the page can empty its field."""

    def __init__(self, state: Explorer) -> None:
        self._state = state
        self._pieces: list[str] = []
        super().__init__()
        self.on_msg(self._told)
        self.add_class("zeroviz-intake")
        state.observe(lambda _: self._name(), "language")

    def _name(self) -> None:
        self.heading, self.use = self._state.say(HEADING), self._state.say(USE)

    def _told(self, _: Any, message: dict[str, Any], buffers: Any) -> None:
        """One piece of a text, or of a file that is too large how large it is."""
        name = str(message.get("name", ""))
        if "nbytes" in message:
            self._state.error = (
                f"{name} holds {format_nbytes(int(message['nbytes']))}; the page takes files of at most "
                f"{format_nbytes(MAX_DROPPED_NBYTES)}, so give the path of a larger trace instead."
            )
            return
        if message.get("number") == 0:
            self._pieces = []
        self._pieces.append(str(message.get("text", "")))
        if message.get("is_last"):
            text, self._pieces = "".join(self._pieces), []
            if self._state.take_in(text, name):
                self.taken += 1
