"""The explorer's last state as still pictures, in an output of its cell: what a notebook shows without a kernel.

A widget is nothing without its kernel, and a notebook keeps none. So the cell has one more output, an HTML text with
the pictures in it, which is saved with the notebook and follows the state once that is at rest. While the widget is on
the page the copy is out of sight, by a style that is part of the widget: it comes and goes with it.

[Note: which cell] The copy is sent under a display id, from the loop that runs the kernel's cells and in the context of
the explorer's own cell. From a widget's callback it would be sent in the name of whichever cell runs just then. Lab
follows a display id as long as the page is open that ran the cell: loaded anew, it shows the copy as it was saved, and
keeps that until the cell is run again.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Self
from uuid import uuid4

import ipywidgets as widgets  # type: ignore[import-untyped]
from IPython import get_ipython

from zeroviz.command import CONFIG, command_line
from zeroviz.labels import Language, say
from zeroviz.panel.controls import VIEWS
from zeroviz.panel.panel import ExplorerPanel
from zeroviz.panel.stage import HEADINGS, PICTURE_OF
from zeroviz.panel.take import Drawing, drawings
from zeroviz.paper import Shape
from zeroviz.spec import RunSpec
from zeroviz.state import Explorer
from zeroviz.trace import Trace
from zeroviz.wording import title

NAME = "zeroviz-still-copy"
REST_S = 1.0
"""How long nothing must have changed: a slider that is dragged is never followed, only where it is left."""
UNSEEN_S = 10.0
"""After so long the first copy is made even though no page has said that it shows the widget. Made earlier it would be
in sight for a moment."""
MAX_NBYTES = 1_000_000
"""Of all pictures as they are sent. A notebook goes into version control and into mail, and Jupyter's server drops what
a kernel sends beyond 3 MB in 3 s."""

_BOX = (
    "max-width: 920px; padding: 10px 12px; border: 1px solid #d0d0d0; border-radius: 6px; background-color: #ffffff; "
    "color: #1a1a1a"
)
_SHELL = "Its prediction in a shell:"
_LINE = "margin: 0 10px 8px; color: #1a1a1a"
_CODE = "background-color: #ececec; color: #1a1a1a; padding: 1px 4px; overflow-wrap: anywhere"
_PICTURE = "display: block; width: 100%; height: auto; margin: 10px 0 0"
"""In the elements themselves: where a notebook is not trusted, a style sheet is taken out."""

Bundle = dict[str, str]
Publish = Callable[..., Any]


def keep_still(panel: ExplorerPanel, loop: asyncio.AbstractEventLoop) -> Still | None:
    """The still copy of `panel` in the cell that runs now. None where nothing is ever saved: in Voila, without IPython.

    `loop` runs the kernel's cells.
    """
    shell = get_ipython()
    if shell is None or os.environ.get("SERVER_SOFTWARE", "").startswith("voila"):
        return None
    return Still(panel, shell.display_pub.publish, loop)


class Still:
    """An output of the cell that makes it, kept up with `panel`. Made before the panel is shown.

    publish: as of IPython's display publisher.
    """

    def __init__(
        self,
        panel: ExplorerPanel,
        publish: Publish,
        loop: asyncio.AbstractEventLoop,
        rest_s: float = REST_S,
        unseen_s: float = UNSEEN_S,
    ) -> None:
        self._panel, self._publish, self._loop, self._rest_s = panel, publish, loop, rest_s
        self._context = contextvars.copy_context()  # see [Note: which cell]
        self._is_waiting = False
        self._due_s = 0.0
        self.ident = uuid4().hex
        panel.add_class(f"{NAME}-of-{self.ident}")
        panel.children = (
            *panel.children,
            widgets.HTML(f"<style>{_hidden(self.ident)}</style>", layout={"display": "none"}),
        )
        self._send({"text/html": _box(self.ident), "text/plain": ""}, update=False)
        panel.state.observe(
            lambda _: self.touch(), ["predicted", "measured", "earlier", "guessing", "guess_nbytes", *VIEWS]
        )
        panel.stage.observe(lambda _: self.touch(), "is_open")
        panel.stage.observe(self._seen, "seen")
        self._touch(unseen_s)

    def touch(self) -> None:
        """Draw the copy when nothing has called this for a while. Any thread may; it does not wait."""
        self._touch(self._rest_s)

    def _touch(self, rest_s: float) -> None:
        with self._panel.state.lock:
            self._due_s = self._loop.time() + rest_s
            if self._is_waiting:
                return
            self._is_waiting = True
        self._loop.call_soon_threadsafe(self._wait, context=self._context)

    def draw(self) -> None:
        """Send the copy of the state as it is now."""
        state, stage = self._panel.state, self._panel.stage
        with state.lock:
            is_open = [picture for name, picture in PICTURE_OF.items() if stage.is_open[name]]
            names = [] if self._panel.guessing.hides else ["bars", *is_open]
            copy = Copy.of(state, names)
        self._send(copy.bundle(self.ident), update=True)

    def _seen(self, change: Any) -> None:
        if change.old is None:  # the widget has come to a page, and with it what hides the copy
            self.touch()

    def _wait(self) -> None:
        with self._panel.state.lock:
            left_s = self._due_s - self._loop.time()
            if left_s > 0:
                self._loop.call_later(min(left_s, self._rest_s), self._wait, context=self._context)
                return
            self._is_waiting = False
        self.draw()

    def _send(self, bundle: Bundle, *, update: bool) -> None:
        self._publish(bundle, transient={"display_id": self.ident}, update=update)


@dataclass(frozen=True, slots=True)
class Copy:
    """What of a state goes into its copy: read while the state is locked, drawn when it no longer is."""

    spec: RunSpec
    measured: Trace | None
    language: Language
    pictures: dict[str, tuple[Drawing, Any]]

    @classmethod
    def of(cls, state: Explorer, names: Sequence[str]) -> Self:
        """names: of its pictures, bars, map, film and wire; none where they are hidden until a guess is made."""
        with state.lock:
            known = drawings(state)
            pictures = {name: (known[name], known[name].scene_of()) for name in names if name in known}
            return cls(state.spec, state.measured, state.language, pictures)

    def bundle(self, ident: str = "") -> Bundle:
        """The copy as HTML, and in a few lines of text."""
        command = command_line("predict", self.spec)
        left = f"A still copy of the zeroviz explorer as it was left: {title(self.spec)}."
        first = f"{left} Run the cell for the live one."
        notes, images, left_nbytes = self._notes(command), [], MAX_NBYTES
        for name in self.pictures:
            image = self._image(name)
            if len(image) > left_nbytes:
                notes.append(f"Left out, being {len(image):,} B beside {MAX_NBYTES:,} B for all: {_heading(name)}.")
                continue
            left_nbytes -= len(image)
            images.append(image)
        sentences = [scene.sentence for _, scene in self.pictures.values()]
        lines = [escape(first), f'{_SHELL} <code style="{_CODE}">{escape(command)}</code>', *map(escape, notes)]
        html = "".join(f'<p style="{_LINE}">{line}</p>' for line in lines) + "".join(images)
        return {
            "text/html": _box(ident, html),
            "text/plain": "\n".join([first, f"{_SHELL} {command}", *notes, *sentences[:1]]),
        }

    def _notes(self, command: str) -> list[str]:
        notes = []
        if CONFIG in command:
            notes.append(f"{CONFIG} is the file of {self.spec.model.name}.")
        if not self.pictures:
            notes.append("It asks for a guess first, so its pictures are left out.")
        elif self.measured is not None:
            notes.append(f"Measured is a {self.measured.origin.value} run of this very state.")
        return notes

    def _image(self, name: str) -> str:
        """Without what an image cannot show, tooltips and figures for programs: half of its bytes."""
        drawing, scene = self.pictures[name]
        paper = drawing.paper_of(scene)
        paper.shapes = [replace(each, tip="", data={}) if isinstance(each, Shape) else each for each in paper.shapes]
        svg = paper.svg(drawing.svg_name, scene.sentence, say=lambda label: say(label, self.language))
        source = f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"
        return f'<img alt="{escape(scene.sentence)}" style="{_PICTURE}" src="{source}">'


def _heading(name: str) -> str:
    """What the page calls a picture."""
    return next((HEADINGS[part] for part, picture in PICTURE_OF.items() if picture == name), name)


def _box(ident: str, html: str = "") -> str:
    style = f' style="{_BOX}"' if html else ""
    return f'<div class="{NAME} {NAME}-{ident}"{style}>{html}</div>'


def _hidden(ident: str) -> str:
    """No copy where its own widget has put its pictures on the page, nor the room of an output for it."""
    live, copy = f"body:has(.{NAME}-of-{ident} .zeroviz-stage)", f".{NAME}-{ident}"
    return f"{live} {copy}, {live} .jp-OutputArea-child:has({copy}) {{ display: none; }}"
