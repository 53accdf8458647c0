"""Take it away: any picture as a file, the ledger, the trace, the Python that makes the state again.

Files are made when they are asked for and go to the browser, which saves them where it saves downloads: the kernel may
be on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any, NamedTuple

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz import draw, draw_shard_map, draw_timeline, draw_wire
from zeroviz.command import command_line
from zeroviz.export import Format, export
from zeroviz.panel.section import Choice, Section
from zeroviz.panel.stage import Stage
from zeroviz.paper import FILE_FORMATS, Paper
from zeroviz.shard_map import build_shard_map
from zeroviz.state import Explorer

_MIME = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf"}
_SUFFIX: Mapping[Format, tuple[str, str]] = {
    Format.CSV: ("ledger.csv", "text/csv"),
    Format.MARKDOWN: ("ledger.md", "text/markdown"),
    Format.JSON: ("trace.json", "application/json"),
    Format.CHROME: ("chrome-trace.json", "application/json"),
    Format.PYTHON: ("state.py", "text/x-python"),
}


class File(NamedTuple):
    """What the browser is handed."""

    name: str
    mime: str
    content: bytes


class Drawing(NamedTuple):
    """How a picture is laid out, what it is laid out of as the state stands, what an SVG of it is called."""

    paper_of: Callable[[Any], Paper]
    scene_of: Callable[[], Any]
    svg_name: str


class TakeAway(Section):
    """A choice of files, a button, and the state in words for a notebook and a shell."""

    def __init__(self, state: Explorer, stage: Stage) -> None:
        self._state, self._stage = state, stage
        self.files: dict[str, Callable[[], File]] = {**_pictures(state), **_texts(state)}
        labels = [(name, name) for name in self.files]
        self.what = widgets.Dropdown(options=labels, description="file")
        self._names = Choice(self.what, labels, lambda _: None)
        self.what.add_class("zeroviz-file")
        self.download = widgets.Button(description="Download", tooltip="Make this file and let the browser save it")
        self.download.add_class("zeroviz-download")
        super().__init__(state, "take", "Take it away", [self.what, self.download], is_open=False)
        self.download.on_click(lambda _: stage.hand_over(*self.files[self.what.value]()))
        state.observe(lambda _: self.draw(), ["predicted"])

    def name_it(self) -> None:
        super().name_it()
        self._names.name_it(self._state.say)

    def svg(self) -> str:
        """No picture: the state as Python, and as a command."""
        spec = self._state.spec
        script = export(Format.PYTHON, self._state.predicted)
        return (
            f'<pre class="zeroviz-code" tabindex="0" aria-label="this state as Python">{escape(script)}</pre>'
            f'<pre class="zeroviz-code" tabindex="0" aria-label="this state as a command">'
            f"{escape(command_line('predict', spec))}</pre>"
        )


def drawings(state: Explorer) -> dict[str, Drawing]:
    """The pictures of `state` that stand by themselves, by name."""
    return {
        "bars": Drawing(draw.paper_of, state.scene, draw.NAME),
        "map": Drawing(draw_shard_map.paper_of, lambda: build_shard_map(state.spec), draw_shard_map.NAME),
        "film": Drawing(draw_timeline.paper_of, state.timeline, draw_timeline.NAME),
        "wire": Drawing(draw_wire.paper_of, state.wire, draw_wire.NAME),
    }


def _pictures(state: Explorer) -> dict[str, Callable[[], File]]:
    known = drawings(state)

    def picture(name: str, kind: str) -> File:
        paper_of, scene_of, svg_name = known[name]
        scene = scene_of()
        return File(f"zeroviz-{name}.{kind}", _MIME[kind], paper_of(scene).file(kind, svg_name, scene.sentence))

    return {
        f"{name} as {kind.upper()}": lambda name=name, kind=kind: picture(name, kind)  # type: ignore[misc]
        for name in known
        for kind in FILE_FORMATS
    }


def _texts(state: Explorer) -> dict[str, Callable[[], File]]:
    words = {
        Format.CSV: "ledger as CSV",
        Format.MARKDOWN: "ledger as Markdown",
        Format.JSON: "trace as JSON",
        Format.CHROME: "trace for Perfetto",
        Format.PYTHON: "state as Python",
    }

    def text(form: Format) -> File:
        measured = state.measured
        shown = state.predicted if measured is None or form.compares else measured
        made = export(form, shown, measured if form.compares else None)
        name, mime = _SUFFIX[form]
        return File(f"zeroviz-{name}", mime, made.encode())

    return {words[form]: lambda form=form: text(form) for form in Format}  # type: ignore[misc]
