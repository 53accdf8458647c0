"""A rank's step as a row of moments: what it holds at each, op by op, and few columns that lose no peak.

Moment 0 is at rest; moment k follows the k-th change of what the device or its host holds. This machine's artefacts,
kernels' scratch and the backend's copies, make no moment: they belong to the one they fall into. Of a stretch of
moments a column keeps the one at which the device holds most, so columns have the step's peak, however few they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby, pairwise

from zeroviz.category import CATEGORY_ORDER, Category
from zeroviz.recall import recall
from zeroviz.trace import Event, RankTrace


@dataclass(frozen=True, slots=True)
class OpSpan:
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


@dataclass(frozen=True)
class Course:
    """What a rank holds at each moment, and the ops they belong to.

    device, host: bytes at each moment. here: the most that the device holds there together with this machine's
    artefacts. events: those that make moments.
    """

    rest: dict[Category, int]
    events: tuple[Event, ...]
    device: tuple[int, ...]
    here: tuple[int, ...]
    host: tuple[int, ...]
    ops: tuple[OpSpan, ...]

    @property
    def at_rest(self) -> OpSpan:
        """The moment before the step."""
        return OpSpan("", "", "", 0, 1, self.device[0], self.here[0], self.device[0])

    @property
    def peak_op(self) -> OpSpan:
        """The op in which the device first holds the most; at rest if no op holds more."""
        moment = self.device.index(max(self.device))
        return next((span for span in self.ops if span.start <= moment < span.stop), self.at_rest)

    @property
    def has_artefacts(self) -> bool:
        """Whether this machine held anything beside the step's own bytes."""
        return self.here != self.device

    def held(self, moments: Sequence[int]) -> list[dict[Category, int]]:
        """What is held at each of `moments`, which ascend."""
        live = dict.fromkeys(CATEGORY_ORDER, 0) | self.rest
        result: list[dict[Category, int]] = []
        done = 0
        for moment in moments:
            for event in self.events[done:moment]:
                live[event.category] += event.delta_nbytes
            done = moment
            result.append(dict(live))
        return result


def course_of(rank: RankTrace) -> Course:
    """The course of a rank's step; ranks that share their events share these."""
    return recall("course", (rank.events, rank.rest), lambda: _course(rank))


def columns(course: Course, start: int, stop: int, most: int) -> list[tuple[int, int, int]]:
    """At most `most` stretches of start..stop as (start, stop, moment at which the device holds most, the first)."""
    length = stop - start
    num_columns = min(most, length)
    edges = [start + length * number // num_columns for number in range(num_columns + 1)]
    device = course.device
    return [(low, high, max(range(low, high), key=device.__getitem__)) for low, high in pairwise(edges)]


def align(ours: Course, theirs: Course) -> list[tuple[OpSpan, OpSpan]]:
    """The ops of two courses of one step side by side, in order.

    Where only one of them has an op that changes anything, the other has a flat one, without a moment of its own.
    """
    left, right = [span.key for span in ours.ops], [span.key for span in theirs.ops]
    if left == right:
        return list(zip(ours.ops, theirs.ops, strict=True))
    pairs: list[tuple[OpSpan, OpSpan]] = []
    before = ours.at_rest, theirs.at_rest
    for kind, low, high, start, stop in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if kind == "equal":
            met = list(zip(ours.ops[low:high], theirs.ops[start:stop], strict=True))
        else:
            met = [(span, before[1].flat(span)) for span in ours.ops[low:high]]
            last = met[-1][0] if met else before[0]
            met += [(last.flat(span), span) for span in theirs.ops[start:stop]]
        pairs += met
        before = pairs[-1]
    return pairs


def _course(rank: RankTrace) -> Course:
    rest = {category: nbytes for category, nbytes in rank.rest.items() if nbytes}
    device = [sum(nbytes for category, nbytes in rest.items() if category.on_device)]
    host = [sum(nbytes for category, nbytes in rest.items() if category.on_host)]
    here = device.copy()
    events: list[Event] = []
    ops: list[OpSpan] = []
    artefacts = 0
    for key, run in groupby(rank.events, key=lambda event: event[:3]):
        start, most, most_here = len(device), device[-1], device[-1] + artefacts
        for event in run:
            category, nbytes = event.category, event.delta_nbytes
            if category.is_artefact:
                artefacts += nbytes
                here[-1] = max(here[-1], device[-1] + artefacts)
            else:
                events.append(event)
                device.append(device[-1] + (nbytes if category.on_device else 0))
                host.append(host[-1] + (nbytes if category.on_host else 0))
                here.append(device[-1] + artefacts)
                most = max(most, device[-1])
            most_here = max(most_here, device[-1] + artefacts)
        ops.append(OpSpan(key[0], key[1], key[2], start, len(device), most, most_here, device[-1]))
    return Course(rest, tuple(events), tuple(device), tuple(here), tuple(host), tuple(ops))
