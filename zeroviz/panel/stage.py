"""The pictures as one widget: bars, shard map and film, with the moment of the step that all of them show.

Python lays a picture out and sends it as one text of SVG; `stage.js` puts it on the page and draws over it what follows
the cursor. A toggle is one message with what it changed, however many pictures that are.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from zeroviz.draw import placed
from zeroviz.draw_formula import formula_html
from zeroviz.draw_shard_map import placed_map
from zeroviz.draw_timeline import placed_timeline
from zeroviz.draw_wire import placed_wire
from zeroviz.errors import ZerovizError
from zeroviz.film import Film, build_film
from zeroviz.implementations import PAIRS
from zeroviz.paper import Say
from zeroviz.scene import Scene
from zeroviz.shard_map import build_shard_map
from zeroviz.state import Explorer
from zeroviz.style import label_of

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


def _as_text(value: dict[str, Any], _: object) -> str:
    """One text: of a value as it is, ipywidgets would visit every number in search of buffers."""
    return json.dumps(value, separators=(",", ":"))


MOST_RANKS = 4096
"""That a presenter's keys go to, as the slider does."""


class Stage(anywidget.AnyWidget):
    """What `state` shows, as pictures. `cursor` is the frame of the film; it is saved a moment after it has moved."""

    _esm = Path(__file__).with_name("stage.js")

    bars = traitlets.Dict().tag(sync=True, to_json=_as_text)
    map = traitlets.Dict().tag(sync=True, to_json=_as_text)
    film = traitlets.Dict().tag(sync=True, to_json=_as_text)
    wire = traitlets.Dict().tag(sync=True, to_json=_as_text)
    formula = traitlets.Dict().tag(sync=True, to_json=_as_text)
    frames = traitlets.Dict().tag(sync=True, to_json=_as_text)
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

    def __init__(self, state: Explorer) -> None:
        self._state = state
        self._scene: Scene | None = None
        self._due: list[str] = []
        self._later: Callable[[], None] | None = None
        self._number = 0
        super().__init__()
        self.observe(lambda _: self.draw(state.scene()), "is_open")
        self.observe(lambda _: self._draw_due(self.seen or ()), "seen")
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

    def _draw(self, name: str) -> None:
        """One picture. `of`: which state's it is, so that the page joins only those of one state."""
        state, say, of = self._state, self._state.say, {"of": self._number}
        assert self._scene is not None
        if name == "bars":
            self.bars = placed(self._scene, say) | of
        elif name == "map":
            self.map = placed_map(build_shard_map(state.spec), say) | of
        elif name == "film":
            self._draw_film(of)
        elif name == "wire":
            self.wire = placed_wire(state.wire(), say)
        else:
            self.formula = {"svg": formula_html(state.formula())}

    def _told(self, message: dict[str, Any]) -> None:
        if message.get("rest"):
            self.draw_rest()
        else:
            self.asked(str(message.get("ask", "")))

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

    def _draw_film(self, of: dict[str, int]) -> None:
        state = self._state
        timeline = state.timeline()
        try:
            film = build_film(state.predicted, state.rank)
        except ZerovizError:  # too long a step: it is still a timeline
            film = None
        moments = [frame.moment for frame in film.frames] if film else []
        self.film = placed_timeline(timeline, moments, state.say)
        self.frames = frames_of(film, state.say, is_each=len(state.ranks_apart) == 1) | of if film else {}


def frames_of(film: Film, say: Say = str, *, is_each: bool) -> dict[str, Any]:
    """The film as plain lists, by what of it is looked up together. is_each: it is every rank's film."""
    frames = film.frames
    return {
        "rank": film.rank,
        "each": is_each,
        "peak": film.peak,
        "unit": film.unit,
        "categories": [say(label_of(category, film.spec)) for category in film.categories],
        "units": list(film.units),
        "words": [frame.words for frame in frames],
        "nbytes": [frame.nbytes for frame in frames],
        "held": [list(frame.held) for frame in frames],
        "gathered": [list(frame.gathered) for frame in frames],
    }
