"""A state's pictures as plain data, as `stage.js` takes them: the SVG, and the places in it that a moment needs."""

from __future__ import annotations

import json
from typing import Any

from zeroviz.draw import placed
from zeroviz.draw_formula import formula_html
from zeroviz.draw_shard_map import placed_map
from zeroviz.draw_timeline import placed_timeline
from zeroviz.draw_wire import placed_wire
from zeroviz.errors import ZerovizError
from zeroviz.film import Film, build_film
from zeroviz.labels import Say
from zeroviz.scene import Scene
from zeroviz.shard_map import build_shard_map
from zeroviz.state import Explorer
from zeroviz.style import label_of

PICTURES = ("bars", "map", "film", "wire", "formula")


def as_text(value: dict[str, Any]) -> str:
    """One text: of a value as it is, ipywidgets would visit every number in search of buffers."""
    return json.dumps(value, separators=(",", ":"))


def picture(name: str, state: Explorer, scene: Scene, aspect: float = 0.0) -> dict[str, dict[str, Any]]:
    """One of PICTURES under its name; a film with its `frames`. scene: the state's. aspect: of the window that bars
    have to themselves, if they have one."""
    say = state.say
    if name == "bars":
        return {name: placed(scene, say, state.rank, aspect)}
    if name == "map":
        return {name: placed_map(build_shard_map(state.spec), say)}
    if name == "wire":
        return {name: placed_wire(state.wire(), say)}
    if name == "formula":
        return {name: {"svg": formula_html(state.formula(), say)}}
    try:
        film = build_film(state.predicted, state.rank)
    except ZerovizError:  # too long a step: it is still a timeline
        film = None
    moments = [frame.moment for frame in film.frames] if film else []
    frames = frames_of(film, say, is_each=len(state.ranks_apart) == 1) if film else {}
    return {"film": placed_timeline(state.timeline(), moments, say), "frames": frames}


def frames_of(film: Film, say: Say = str, *, is_each: bool) -> dict[str, Any]:
    """The film as plain lists, by what of it is looked up together. is_each: it is every rank's film. at: the op of
    each frame, by its number in `ops`."""
    frames = film.frames
    ops = {frame[1:4]: None for frame in frames}
    number_of = {op: number for number, op in enumerate(ops)}
    return {
        "each": is_each,
        "peak": film.peak,
        "unit": film.unit,
        "categories": [say(label_of(category, film.spec)) for category in film.categories],
        "units": list(film.units),
        "ops": [list(op) for op in ops],
        "at": [number_of[frame[1:4]] for frame in frames],
        "words": [frame.words for frame in frames],
        "nbytes": [frame.nbytes for frame in frames],
        "held": [list(frame.held) for frame in frames],
        "gathered": [list(frame.gathered) for frame in frames],
    }
