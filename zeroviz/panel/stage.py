"""The pictures as one widget: bars, shard map and film, with the moment of the step that all of them show.

Python lays a picture out and sends it as one text of SVG; `stage.js` puts it on the page and draws over it what follows
the cursor. A toggle is one message with what it changed, however many pictures that are.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from zeroviz.implementations import PAIRS
from zeroviz.panel.ahead import pictures_ahead
from zeroviz.panel.pictures import PICTURES, as_text, picture
from zeroviz.scene import Scene
from zeroviz.state import Explorer

HEADINGS = {
    "map": "Who holds what",
    "timeline": "The whole step, op by op",
    "wire": "What each rank sends",
    "formula": "How the figures come about",
}
PICTURE_OF = {"map": "map", "timeline": "film", "wire": "wire", "formula": "formula"}
"""The picture under each heading; the bars have none."""
OPEN = {name: name != "formula" for name in HEADINGS}
"""At first. What is closed is not drawn."""
LABELS = ("rest", "end", "peak", "Present")
"""Of the buttons that the page makes itself."""
ASKS = ("strategy", "strategy back", "more ranks", "fewer ranks", "undo")
"""What a presenter's keys ask of the state."""


MOST_RANKS = 4096
"""That a presenter's keys go to, as the slider does."""
MOST_AHEAD = 500_000
"""Letters of the pictures in sight; of more none is drawn ahead: most of it would be sent in vain, and a move meanwhile
would wait for it."""
MAX_DIGITS = 18
"""Of a number that is typed beside a slider: more than any has."""
JOINED = ("bars", "map", "frames")
"""What the page joins by the moment of the step, if it is of one state."""


def _to_json(value: dict[str, Any], _: object) -> str:
    return as_text(value)


class Stage(anywidget.AnyWidget):
    """What `state` shows, as pictures. `cursor` is the frame of the film; it is saved a moment after it has moved."""

    _esm = Path(__file__).with_name("stage.js")

    bars = traitlets.Dict().tag(sync=True, to_json=_to_json)
    map = traitlets.Dict().tag(sync=True, to_json=_to_json)
    film = traitlets.Dict().tag(sync=True, to_json=_to_json)
    wire = traitlets.Dict().tag(sync=True, to_json=_to_json)
    formula = traitlets.Dict().tag(sync=True, to_json=_to_json)
    frames = traitlets.Dict().tag(sync=True, to_json=_to_json)
    cursor = traitlets.Int(0).tag(sync=True)
    is_open = traitlets.Dict(OPEN).tag(sync=True)
    headings = traitlets.Dict(HEADINGS).tag(sync=True)
    labels = traitlets.Dict(dict.fromkeys(LABELS, "")).tag(sync=True)
    download = traitlets.Dict().tag(sync=True)
    version = traitlets.Int(0).tag(sync=True)
    """Counts drawings, so that who waits for one can tell that it is there."""
    seen = traitlets.List(traitlets.Unicode(), None, allow_none=True).tag(sync=True)
    """Pictures within the window, as the page says; None before it does. A toggle draws these at once."""
    has_due = traitlets.Bool(False).tag(sync=True)
    """Whether something waits to be drawn: until it comes into sight, or the page has nothing else to do and asks."""
    aspect = traitlets.Float(0.0).tag(sync=True)
    """Of the window that a presented picture has to itself, its width by its height; 0 where none is presented."""
    sliders = traitlets.Dict().tag(sync=True)
    """The sliders' models by their toggles: the page sees them move before the kernel does. See `ahead`."""

    def __init__(self, state: Explorer, sliders: Mapping[str, Any] | None = None) -> None:
        """sliders: SelectionSliders by their toggles."""
        self._state = state
        self._sliders = sliders or {}
        self._scene: Scene | None = None
        self._due: list[str] = []
        self._later: Callable[[], None] | None = None
        self._number = 0
        super().__init__(sliders={toggle: slider.model_id for toggle, slider in self._sliders.items()})
        self.observe(lambda _: self.draw(state.scene()), "is_open")
        self.observe(lambda _: self._draw_due(self.seen or ()), "seen")
        self.observe(lambda _: self._draw_bars(), "aspect")
        self.on_msg(lambda _, message, __: self._told(message))

    def draw(self, scene: Scene, and_later: Callable[[], None] | None = None) -> None:
        """Send `scene`, which is the state's, and what else it shows now; what is closed is not drawn, and what is out
        of sight later, with `and_later`, what the page draws below the pictures."""
        with self._state.lock, self.hold_sync():
            say = self._state.say
            self.headings = {name: say(heading) for name, heading in HEADINGS.items()}
            self.labels = {label: say(label) for label in LABELS}
            self._scene = scene
            self._number += 1
            self._due = ["bars", *(picture for name, picture in PICTURE_OF.items() if self.is_open[name])]
            self._later = and_later
            if self.seen is None:
                self.draw_rest()
            else:
                self._draw_due(self.seen)
            self.version += 1

    def draw_rest(self) -> None:
        """Draw what is out of sight, and below the pictures."""
        with self._state.lock:
            later, self._later = self._later, None
            self._draw_due(self._due)
            if later is not None:
                later()

    def _draw_due(self, names: Iterable[str]) -> None:
        """Of what waits to be drawn, what is named."""
        with self._state.lock, self.hold_sync():
            for name in [name for name in self._due if name in names]:
                self._draw(name)
                self._due.remove(name)
            self.has_due = bool(self._due) or self._later is not None

    def _draw_bars(self) -> None:
        """The bars of the same state, for other room; what was drawn ahead for the room before is of no use."""
        with self._state.lock, self.hold_sync():
            if self._scene is not None and "bars" not in self._due:
                self._draw("bars")
                self.version += 1

    def _draw(self, name: str) -> None:
        """One picture. `of`: which state's it is."""
        assert self._scene is not None
        for part, data in picture(name, self._state, self._scene, self.aspect).items():
            setattr(self, part, data | {"of": self._number} if data and part in JOINED else data)

    def _told(self, message: dict[str, Any]) -> None:
        if message.get("rest"):
            self.draw_rest()
        elif message.get("ahead"):
            self._draw_ahead(message)
        elif "typed" in message:
            self._typed(str(message.get("toggle")), str(message["typed"]))
        else:
            self.asked(str(message.get("ask", "")))

    def _draw_ahead(self, asked: dict[str, Any]) -> None:
        """The pictures in sight, of the states that the page asks for: unless it shows another one by now, a question
        hides them, or they are long."""
        with self._state.lock:
            names = [name for name in PICTURES if name in (self.seen or ())]
            parts = [*names, *(["frames"] if "film" in names else [])]
            num_letters = sum(len(as_text(getattr(self, part))) for part in parts)
            if asked.get("version") != self.version or self._state.guessing or num_letters > MOST_AHEAD:
                return
            offered = {toggle: slider.options for toggle, slider in self._sliders.items()}
            pictures = pictures_ahead(self._state, asked, offered, names, self.aspect)
            self.send({"ahead": pictures, "number": asked["ahead"]})

    def _typed(self, toggle: str, text: str) -> None:
        """A number typed beside a slider: any that a state may have, not only those along it."""
        if toggle not in self._sliders:
            return
        digits = text.replace(",", "")
        if digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS:
            self._state.choose(**{toggle: int(digits)})
            return
        with self._state.lock:
            shown = text if len(text) <= MAX_DIGITS else f"{text[:MAX_DIGITS]}…"
            self._state.error, self._state.notice = f"{toggle} is {shown!r}; type a whole number, such as 12.", ""

    def asked(self, what: str) -> None:
        """What a presenter's key asks for, one of ASKS: the strategy after or before, twice or half the ranks, undo."""
        state = self._state
        with state.lock:
            if what == "undo":
                state.undo()
            elif what.startswith("strategy"):
                strategies = PAIRS[state.impl]
                step = -1 if what == "strategy back" else 1
                state.choose(strategy=strategies[(strategies.index(state.strategy) + step) % len(strategies)])
            elif what == "more ranks":
                state.choose(ranks=min(MOST_RANKS, state.ranks * 2))
            elif what == "fewer ranks":
                state.choose(ranks=max(1, state.ranks // 2))

    def hand_over(self, name: str, mime: str, content: bytes) -> None:
        """Let the browser save a file."""
        number = self.download.get("number", 0) + 1
        self.download = {"number": number, "name": name, "mime": mime, "content": b64encode(content).decode()}
