"""One plot of a timeline as data: columns of stacked categories, an axis, and the measured step laid over them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from zeroviz.axis import Tick, amount, axis_unit, axis_words, ticks
from zeroviz.category import CATEGORY_ORDER, DEVICE_CATEGORIES, Category
from zeroviz.course import Course, OpSpan
from zeroviz.levels import Levels, Row

NUM_TICKS = 6

# From the bottom: what is always there, then what changes slowly, so that an area's edge is its own and not that of a
# livelier one below it.
_SLOW_FIRST = (Category.INPUT, Category.ACTIVATION)

Stretch = tuple[int, int, int]
"""(first moment, end, moment of the most): a column of `zeroviz.course.columns`."""


@dataclass(frozen=True, slots=True)
class Column:
    """A stretch of moments as what is held at its largest one, by the part's categories.

    measured, here: the most that the measured step holds meanwhile, without and with this machine's artefacts.
    """

    start: int
    stop: int
    held: tuple[int, ...]
    measured: int | None = None
    here: int | None = None

    @property
    def total(self) -> int:
        return sum(self.held)


@dataclass(frozen=True, eq=False)
class Part:
    """One plot: the device's bytes or, of a step with offload, the host's. `axis_min` is not 0 where that is said.

    Its columns side by side: `edges` has where each begins, and the end; `held` a row for each, of what
    it holds of each of `categories`; measured and here are as `Column` says, None where there are none.
    """

    where: str
    categories: tuple[Category, ...]
    edges: Sequence[int]
    held: Sequence[Row]
    measured: Sequence[int] | None
    here: Sequence[int] | None
    rest_nbytes: int
    axis_min: int
    axis_max: int
    unit: str
    axis_label: str
    ticks: tuple[Tick, ...]

    held_at_rest: frozenset[Category]

    def amount(self, nbytes: int) -> str:
        """Bytes in the plot's unit."""
        return amount(nbytes, self.unit)

    @property
    def most(self) -> int:
        """The largest sum drawn as areas."""
        return max(map(sum, self.held))

    @property
    def is_measured(self) -> bool:
        return self.measured is not None

    @property
    def has_artefacts(self) -> bool:
        """Whether this machine held anything beside the step's own bytes."""
        return self.here is not None and self.here != self.measured

    @property
    def num_columns(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns one by one."""
        nothing = [None] * self.num_columns
        return tuple(
            Column(low, high, held, line, dotted)
            for (low, high), held, line, dotted in zip(
                pairwise(self.edges), self.held, self.measured or nothing, self.here or nothing, strict=True
            )
        )


@dataclass(frozen=True)
class Overlay:
    """A measured course and where on the drawn axis each of its moments lies."""

    course: Course
    places: Sequence[int]

    @classmethod
    def of(cls, course: Course, pairs: Sequence[tuple[OpSpan, OpSpan]]) -> Overlay:
        """`pairs`: the drawn ops beside this course's. An op's moments share its stretch; those of an op that only
        this course has lie on the moment before it."""
        places = [0] * len(course.device)
        for ours, theirs in pairs:
            width = ours.stop - ours.start
            for moment in range(theirs.start, theirs.stop):
                share = (moment - theirs.start) * width // (theirs.stop - theirs.start)
                places[moment] = ours.start + share if width else ours.start - 1
        return cls(course, places)

    def most(self, series: Sequence[int], stretches: Sequence[Stretch]) -> list[int]:
        """The most of `series` in each stretch; where it has no moment there, what was held before."""
        result, done = [], 0
        for _, high, _ in stretches:
            stop = bisect_right(self.places, high - 1, lo=done)
            result.append(max(series[done:stop]) if stop > done else series[max(0, done - 1)])
            done = stop
        return result


def device_part(
    course: Course, stretches: Sequence[Stretch], overlay: Overlay | None, *, from_rest: bool, is_own: bool
) -> Part:
    """What the device holds. is_own: the course was measured itself, so that its artefacts are its own line."""
    held = course.levels([moment for _, _, moment in stretches])
    measured = here = None
    if overlay is not None:
        measured = overlay.most(overlay.course.device, stretches)
        here = overlay.most(overlay.course.here, stretches)
    elif is_own and course.has_artefacts:
        here = [course.here.most(low, high)[0] for low, high, _ in stretches]
    start = course.device[0] if from_rest else 0
    return _part("held by the rank", DEVICE_CATEGORIES, course, stretches, held, measured, here, start)


def host_part(course: Course, stretches: Sequence[Stretch], overlay: Overlay | None) -> Part | None:
    """What lies in the host's memory; None where nothing ever does."""
    if not course.uses_host and (overlay is None or not overlay.course.uses_host):
        return None
    stretches = [(low, high, course.host.most(low, high)[1]) for low, high, _ in stretches]
    held = course.levels([moment for _, _, moment in stretches])
    line = None if overlay is None else overlay.most(overlay.course.host, stretches)
    categories = [category for category in CATEGORY_ORDER if category.on_host]
    return _part("held in the host's memory for the rank", categories, course, stretches, held, line, line, 0)


def reaching(part: Part, nbytes: int) -> Part:
    """The part with an axis up to `nbytes`, if it does not reach there yet."""
    largest = max(part.axis_max, nbytes)
    unit, scale = axis_unit(largest)
    label = axis_words(unit, scale, part.where)
    if part.axis_min:
        label += f"; the axis begins at {amount(part.axis_min, unit)}, not at 0"
    marks = ticks(part.axis_min, largest, scale, NUM_TICKS)
    return replace(part, axis_max=largest, unit=unit, axis_label=label, ticks=marks)


def _part(
    where: str,
    kind: Sequence[Category],
    course: Course,
    stretches: Sequence[Stretch],
    levels: Levels,
    measured: Sequence[int] | None,
    here: Sequence[int] | None,
    start: int,
) -> Part:
    present = [category for category in levels.present if category in kind]
    order = sorted(present, key=lambda category: (category not in course.rest, category not in _SLOW_FIRST))
    edges = [*(low for low, _, _ in stretches), stretches[-1][1]]
    held = levels.of(order)
    rest = sum(course.rest.get(category, 0) for category in kind)
    at_rest = frozenset(category for category in order if category in course.rest)
    part = Part(where, tuple(order), edges, held, measured, here, rest, start, 0, "", "", (), at_rest)
    return reaching(part, max(part.most, *(measured or ()), *(here or ()), 0))
