"""The step as film: a frame an op, with what the op does in a sentence, and what is held and gathered at its end; the
op that holds the peak has one more before it, at the peak, unless the peak is its end.

Pure, as a picture's data is: a cursor that steps through the frames needs nothing else, and so asks nobody.

[Note: gathered] A unit is gathered while a rank holds whole parameters of it that it does not hold at rest. The events
say so under every implementation, since they carry the unit; where a library gathers the next unit within the op of
another one, the frame shows it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeroviz.axis import amount, axis_unit
from zeroviz.category import Category
from zeroviz.course import Course, OpSpan, course_of
from zeroviz.errors import TraceError
from zeroviz.schedule import OpKind
from zeroviz.spec import RunSpec
from zeroviz.timeline import distinct_ranks
from zeroviz.trace import Origin, Trace

MAX_FRAMES = 4000
"""A longer step is refused as film: nobody steps through it, and the page would carry it with every toggle."""


class Frame(NamedTuple):
    """One op. `moment` is its last one on the timeline's axis, or the peak's; the rest is what stands there.

    nbytes: what the device holds. held: the same by category, in the order of `Film.categories`. gathered: units, by
    number, whose whole parameters are there beyond what is at rest. most: the largest sum within the op.
    """

    moment: int
    phase: str
    op: str
    unit: str
    nbytes: int
    most: int
    held: tuple[int, ...]
    gathered: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class Film:
    """The frames of one rank's step; the first is at rest. peak: the number of the frame at the peak's moment."""

    spec: RunSpec
    rank: int
    origin: Origin
    categories: tuple[Category, ...]
    units: tuple[str, ...]
    frames: tuple[Frame, ...]
    peak: int
    unit: str

    def amount(self, nbytes: int) -> str:
        """Bytes in the film's one unit."""
        return amount(nbytes, self.unit)


def build_film(trace: Trace, rank: int = 0) -> Film:
    """The film of a rank's step. Raises TraceError for a rank that is not there, and for a step of too many ops."""
    if not 0 <= rank < len(trace.ranks):
        raise TraceError(f"Rank {rank} was asked for; the trace has ranks 0 to {len(trace.ranks) - 1}.")
    seen = trace.ranks[rank]
    course = course_of(seen)
    spans = [span for span in course.ops if span.stop > span.start]
    if len(spans) >= MAX_FRAMES:
        raise TraceError(
            f"The step has {len(spans):,} ops, and a film shows at most {MAX_FRAMES:,}; use larger units or fewer "
            "micro-batches."
        )
    most, top = course.device.most()
    unit, _ = axis_unit(most)
    shots = [(span, moment) for span in spans for moment in _moments_of(span, top)]
    moments = [0, *(moment for _, moment in shots)]
    levels = course.levels(moments)
    on_device = tuple(category for category in levels.present if category.on_device)
    held = levels.of(on_device)
    units = tuple(dict.fromkeys(span.unit for span in course.ops if span.unit))
    is_each = len(trace.ranks) > 1 and len(distinct_ranks(trace)) == 1
    teller = _Teller(trace.spec, "each rank" if is_each else f"rank {rank}", unit)
    frames = [Frame(0, "", "", "", course.device[0], course.device[0], held[0], (), teller.at_rest(course))]
    before = course.device[0]
    for (span, moment), here, gathered in zip(shots, held[1:], _gathered(course, moments[1:], units), strict=True):
        is_end, is_peak = moment == span.stop - 1, moment == top
        nbytes = span.end_nbytes if is_end else most
        words = teller.op(span, nbytes, nbytes - before, len(gathered), is_end=is_end, is_peak=is_peak)
        frames.append(Frame(moment, span.phase, span.op, span.unit, nbytes, span.max_nbytes, here, gathered, words))
        before = nbytes if is_end else before
    return Film(trace.spec, rank, trace.origin, on_device, units, tuple(frames), moments.index(top), unit)


def _moments_of(span: OpSpan, top: int) -> tuple[int, ...]:
    """The moments of an op that are frames: its end, and `top` before that if it is within."""
    end = span.stop - 1
    return (top, end) if span.start <= top < end else (end,)


def _gathered(course: Course, moments: Sequence[int], units: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """The units gathered at each of `moments`, which ascend. See [Note: gathered]."""
    number_of = {name: number for number, name in enumerate(units)}
    live: Counter[int] = Counter()
    found = course.stretches
    whole: dict[int, int] = {}  # by identity: stretches share their moments
    done = 0
    for moment in moments:
        while done < len(found.places) and found.starts[done] + len(found.moments[done].device) <= moment + 1:
            unit, stretch = number_of.get(found.places[done][2]), found.moments[done]
            if unit is not None:
                if id(stretch) not in whole:
                    net = dict(stretch.net)
                    whole[id(stretch)] = net.get(Category.UNSHARDED_PARAM, 0)
                if whole[id(stretch)]:
                    live[unit] += whole[id(stretch)]
            done += 1
        now = live
        if done < len(found.places) and found.starts[done] <= moment:  # the peak is within a stretch
            now, unit = live.copy(), number_of.get(found.places[done][2])
            if unit is not None:
                changes = found.moments[done].changes[: moment - found.starts[done] + 1]
                now[unit] += sum(nbytes for category, nbytes in changes if category is Category.UNSHARDED_PARAM)
        yield tuple(sorted(number for number, nbytes in now.items() if nbytes > 0))


class _Teller:
    """Puts ops into words: who does what to which unit, what changes, what is borrowed then."""

    def __init__(self, spec: RunSpec, whose: str, unit: str) -> None:
        self.spec, self.unit = spec, unit
        self.whose = f"{whose[:1].upper()}{whose[1:]}"
        self.num_shards = spec.num_shards

    def at_rest(self, course: Course) -> str:
        return f"At rest: {self.whose[:1].lower()}{self.whose[1:]} holds {amount(course.device[0], self.unit)}."

    def op(self, span: OpSpan, nbytes: int, delta: int, num_gathered: int, *, is_end: bool, is_peak: bool) -> str:
        """One sentence or two of an op, at its end or at the peak within it: `nbytes` held, `delta` more than before
        it."""
        change = (
            f"{'+' if delta > 0 else '-' if delta < 0 else ''}{amount(abs(delta), self.unit)}"
            if delta
            else "nothing stays"
        )
        words = f"{self.whose} {self._does(span)}: {change}{'' if is_end else ' so far'}"
        if span.op == OpKind.UNSHARD.label and self.num_shards > 1:
            borrowed = self.num_shards - 1
            words += f"; {borrowed:,} of {self.num_shards:,} parts of it are borrowed"
        if num_gathered:
            words += f"; {num_gathered:,} unit{'s' if num_gathered > 1 else ''} whole now"
        if is_peak:
            return f"{words}. This is the peak of the step: it holds {amount(nbytes, self.unit)}."
        return f"{words}. It holds {amount(nbytes, self.unit)}."

    def _does(self, span: OpSpan) -> str:
        of = f" of {span.unit}" if span.unit else ""
        if span.op == OpKind.REDUCE_GRAD.label:
            shards = self.spec.strategy.shards_grad or self.spec.strategy.has_whole_buffer
            return f"{'reduce-scatters' if shards else 'reduces'} the gradient{of}"
        return _DOES.get(span.op, f"does {span.op}{{of}}").format(of=of, what=span.unit or "its parameters")


_DOES = {
    OpKind.UNSHARD.label: "all-gathers {what}",
    OpKind.RESHARD.label: "frees the whole parameters{of}, and its own part stays",
    OpKind.WAIT_UNSHARD.label: "waits for {what} to be there",
    OpKind.DROP_GRAD.label: "drops the gradients of the step before",
    OpKind.ZERO_GRAD.label: "clears its gradients",
    OpKind.LOAD_BATCH.label: "takes its tokens and targets",
    OpKind.DROP_BATCH.label: "drops its tokens and targets",
    OpKind.FORWARD.label: "runs the forward{of}",
    OpKind.RECOMPUTE.label: "runs the forward{of} once more",
    OpKind.BACKWARD.label: "runs the backward{of}",
    OpKind.WAIT_REDUCE.label: "waits for the gradient{of} to be summed",
    OpKind.REDUCE_REPLICAS.label: "all-reduces its part of the gradient{of} over the groups",
    OpKind.WAIT_REPLICAS.label: "waits for that sum{of}",
    OpKind.CLIP_GRAD.label: "scales the gradient to the norm",
    OpKind.OPTIMIZER_STEP.label: "updates what it owns{of}",
    OpKind.HOST_STEP.label: "has the host update what it owns{of}",
    OpKind.SYNC_PARAM.label: "gathers the updated parameters{of}",
    OpKind.WAIT_SYNC.label: "waits for the updated parameters{of}",
}
"""What an op does, after who does it."""
