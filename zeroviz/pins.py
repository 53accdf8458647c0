"""Pinned states: up to four of them beside the present one, on one axis, and how they differ from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeroviz.errors import TraceError
from zeroviz.scene import Scene
from zeroviz.side_by_side import MAX_TRACES, highest, names_of, side_by_side
from zeroviz.spec import RunSpec
from zeroviz.trace import Trace

MAX_PINS = MAX_TRACES - 1
"""The present state has a row too."""


class Pin(NamedTuple):
    """A state to come back to: its toggles, its prediction and, where it was run by then, its run."""

    toggles: Mapping[str, Any]
    predicted: Trace
    measured: Trace | None = None


class Figures(NamedTuple):
    """Bytes of the rank that peaks highest: at rest, at the peak, sent in a step; or how much more these are."""

    rest: int
    peak: int
    sent: int


@dataclass(frozen=True)
class Line:
    """One state of a comparison. beyond: how much more than the present state, of whose line it is None."""

    name: str
    spec: RunSpec
    figures: Figures
    beyond: Figures | None


@dataclass(frozen=True)
class Comparison:
    """Pinned states and the present one, which is last unless it is pinned itself."""

    scene: Scene
    lines: tuple[Line, ...]


def with_pin(pins: Sequence[Pin], pin: Pin) -> tuple[Pin, ...]:
    """`pins` and one more; of the same state the newer one, in its place. Raises TraceError where there is no room."""
    same = [number for number, each in enumerate(pins) if each.predicted.spec == pin.predicted.spec]
    if same:
        return tuple(pin if number == same[0] else each for number, each in enumerate(pins))
    if len(pins) >= MAX_PINS:
        raise TraceError(f"{len(pins)} states are pinned, and a picture takes {MAX_PINS}; unpin one of them first.")
    return (*pins, pin)


def compare_pins(pins: Sequence[Pin], predicted: Trace, measured: Trace | None = None) -> Comparison | None:
    """`pins` beside the present state; None where there is nothing to compare it with."""
    here = Pin({}, predicted, measured)
    shown = [*pins] if any(pin.predicted.spec == predicted.spec for pin in pins) else [*pins, here]
    if len(shown) < 2:
        return None
    traces = [pin.predicted for pin in shown]
    runs = {pin.predicted.spec: pin.measured for pin in (*shown, here) if pin.measured is not None}
    names = names_of([trace.spec for trace in traces])
    now = _figures(predicted)
    lines = []
    for trace, name in zip(traces, names, strict=True):
        figures = _figures(trace)
        beyond = Figures(*(theirs - ours for theirs, ours in zip(figures, now, strict=True)))
        lines.append(Line(name, trace.spec, figures, None if trace.spec == predicted.spec else beyond))
    return Comparison(side_by_side(traces, runs), tuple(lines))


def _figures(trace: Trace) -> Figures:
    rank = highest(trace)
    return Figures(rank.rest_nbytes, rank.peak().total, rank.sent_nbytes)
