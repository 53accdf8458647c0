"""A rank's step as a row of moments: what it holds at each, op by op, and few columns that lose no peak.

Moment 0 is at rest; moment k follows the k-th change of what the device or its host holds. This machine's artefacts,
kernels' scratch and the backend's copies, make no moment: they belong to the one they fall into. Of a stretch of
moments a column keeps the one at which the device holds most, so columns have the step's peak, however few they are.

A course is made part by part, as the events are kept; moments are spelt out only for whoever looks at each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from zeroviz.category import CATEGORY_ORDER, Category
from zeroviz.events import Where, as_events
from zeroviz.levels import Levels
from zeroviz.matching import side_by_side
from zeroviz.moments import Moments
from zeroviz.recall import recall
from zeroviz.series import Series
from zeroviz.trace import Event, RankTrace

STRETCHES_OF_A_WEIGHT = 2048
"""So many stretches more let a course weigh one more: some half a megabyte."""


class OpSpan(NamedTuple):
    """One op of the step and what it reaches. Its moments go from `start` up to `stop`; artefacts alone make none.

    max_nbytes: the most the device holds from the moment before it to its end. end_nbytes: what it leaves.
    max_here_nbytes: the most together with this machine's artefacts, the backend's copies and the kernels' scratch.
    """

    phase: str
    op: str
    unit: str
    start: int
    stop: int
    max_nbytes: int
    max_here_nbytes: int
    end_nbytes: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.phase, self.op, self.unit

    def flat(self, other: OpSpan) -> OpSpan:
        """`other`'s op where this span ends and nothing changes: no moments, and all the while what is held here."""
        level = self.end_nbytes
        return OpSpan(*other.key, self.stop, self.stop, level, level, level)


@dataclass(frozen=True, slots=True)
class Stretches:
    """What changes anything, artefacts included, in order: number i is at `places[i]` and makes the moments from
    `starts[i]` on. device, host, artefacts: bytes held before it.

    Lists side by side and not one of objects: there are tens of thousands, and the garbage collector would visit each.
    """

    places: list[Where] = field(default_factory=list)
    moments: list[Moments] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    artefacts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Course:
    """What a rank holds at each moment, and the ops they belong to. rest: by category, device and host."""

    rest: dict[Category, int]
    stretches: Stretches
    ops: tuple[OpSpan, ...]

    @cached_property
    def _made(self) -> list[int]:
        """The numbers of the stretches that make a moment."""
        return [number for number, moments in enumerate(self.stretches.moments) if moments.device]

    @cached_property
    def _starts(self) -> list[int]:
        return [self.stretches.starts[number] for number in self._made]

    @cached_property
    def device(self) -> Series:
        """Bytes on the device at each moment."""
        found, first = self.stretches, sum(nbytes for category, nbytes in self.rest.items() if category.on_device)
        pieces = [found.moments[number].device for number in self._made]
        return Series(first, self._starts, [found.device[number] for number in self._made], pieces)

    @cached_property
    def host(self) -> Series:
        """Bytes in the host's memory at each moment."""
        found, first = self.stretches, sum(nbytes for category, nbytes in self.rest.items() if category.on_host)
        pieces = [found.moments[number].host for number in self._made]
        return Series(first, self._starts, [found.host[number] for number in self._made], pieces)

    @cached_property
    def here(self) -> Series:
        """The most that the device holds at each moment together with this machine's artefacts."""
        found, first = self.stretches, self.device.first
        levels: list[int] = []
        pieces: list[tuple[int, ...]] = []
        for moments, device, artefacts in zip(found.moments, found.device, found.artefacts, strict=True):
            level = device + artefacts
            # Artefacts before the first moment of a stretch still belong to the moment before it.
            if not pieces:
                first = max(first, level + moments.lead)
            elif level + moments.lead > levels[-1] + pieces[-1][-1]:
                pieces[-1] = (*pieces[-1][:-1], level + moments.lead - levels[-1])
            if moments.device:
                levels.append(level)
                pieces.append(moments.here)
        return Series(first, self._starts, levels, pieces)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events that make moments."""
        return tuple(
            Event(*where, category, nbytes)
            for where, moments in zip(self.stretches.places, self.stretches.moments, strict=True)
            for category, nbytes in moments.changes
        )

    @property
    def at_rest(self) -> OpSpan:
        """The moment before the step."""
        return OpSpan("", "", "", 0, 1, self.device[0], self.here[0], self.device[0])

    @cached_property
    def peak_op(self) -> OpSpan:
        """The op in which the device first holds the most; at rest if no op holds more."""
        _, moment = self.device.most()
        return next((span for span in self.ops if span.start <= moment < span.stop), self.at_rest)

    @cached_property
    def has_artefacts(self) -> bool:
        """Whether this machine held anything beside the step's own bytes."""
        return self.here != self.device

    @cached_property
    def uses_host(self) -> bool:
        """Whether anything ever lies in the host's memory."""
        return bool(self.host.first) or any(self.stretches.host) or any(map(any, self.host.pieces))

    def levels(self, moments: Sequence[int]) -> Levels:
        """What is held at each of `moments`, which ascend."""
        found = self.stretches.moments
        return Levels(self.rest, self._starts, [found[number] for number in self._made], moments)

    def held(self, moments: Sequence[int]) -> list[dict[Category, int]]:
        """What is held at each of `moments`, which ascend, by category."""
        levels, nothing = self.levels(moments), dict.fromkeys(CATEGORY_ORDER, 0)
        return [nothing | dict(zip(levels.categories, row, strict=True)) for row in levels.rows]


def course_of(rank: RankTrace) -> Course:
    """The course of a rank's step; ranks that share their events share these."""
    return recall("course", (rank.events, rank.rest), lambda: _course(rank), weigh=_weight)


def columns(course: Course, edges: Sequence[int]) -> list[tuple[int, int, int]]:
    """The stretches between neighbours of `edges`, which cover the step, as (start, stop, moment at which the device
    holds most, the first)."""
    return [(low, high, moment) for (low, high), moment in zip(pairwise(edges), course.device.tops(edges), strict=True)]


def edges_of(start: int, stop: int, most: int) -> list[int]:
    """Where at most `most` stretches of about the same length begin that cover start..stop, the end left out."""
    length = stop - start
    num_columns = min(most, length)
    return [start + length * number // num_columns for number in range(num_columns)]


def align(ours: Course, theirs: Course) -> list[tuple[OpSpan, OpSpan]]:
    """The ops of two courses of one step side by side, in order.

    Where only one of them has an op that changes anything, the other has a flat one, without a moment of its own.
    """
    pairs: list[tuple[OpSpan, OpSpan]] = []
    left, right = ours.at_rest, theirs.at_rest
    for i, j in side_by_side([span.key for span in ours.ops], [span.key for span in theirs.ops]):
        if i is not None:
            left, right = ours.ops[i], right.flat(ours.ops[i]) if j is None else theirs.ops[j]
        elif j is not None:
            left, right = left.flat(theirs.ops[j]), theirs.ops[j]
        pairs.append((left, right))
    return pairs


def changing(pairs: Sequence[tuple[OpSpan, OpSpan]]) -> list[tuple[OpSpan, OpSpan]]:
    """Those with a moment on either side. Into what other ops a backend's copies fall is chance."""
    return [(ours, theirs) for ours, theirs in pairs if ours.stop > ours.start or theirs.stop > theirs.start]


def _weight(course: Course) -> int:
    return 1 + len(course.stretches.places) // STRETCHES_OF_A_WEIGHT


def _course(rank: RankTrace) -> Course:
    rest = {category: nbytes for category, nbytes in rank.rest.items() if nbytes}
    device = sum(nbytes for category, nbytes in rest.items() if category.on_device)
    host = sum(nbytes for category, nbytes in rest.items() if category.on_host)
    artefacts, moment = 0, 1
    found = Stretches()
    ops: list[OpSpan] = []
    last: Where | None = None
    start, most, most_here = moment, device, device
    for where, changes in as_events(rank.events).parts:
        if not changes:
            continue
        if where != last:
            if last is not None:
                ops.append(OpSpan(*last, start, moment, most, most_here, device))
            last, start, most, most_here = where, moment, device, device + artefacts
        moments = changes.moments
        found.places.append(where)
        found.moments.append(moments)
        found.starts.append(moment)
        found.device.append(device)
        found.host.append(host)
        found.artefacts.append(artefacts)
        most, most_here = max(most, device + moments.top), max(most_here, device + artefacts + moments.top_here)
        moment += len(moments.device)
        device += moments.net_device
        host += moments.net_host
        artefacts += moments.net_artefacts
    if last is not None:
        ops.append(OpSpan(*last, start, moment, most, most_here, device))
    return Course(rest, found, tuple(ops))
