"""What can be asked of a step before it is shown: what a rank holds at rest, what at the peak, what it sends.

A figure is read off a rank's trace and nowhere else, so a question, its answer and the picture of both agree to the
byte. In bytes, of the device; what lies on the host is in none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from zeroviz.axis import amount, axis_unit
from zeroviz.category import CATEGORY_ORDER, Category
from zeroviz.collectives import CollectiveOp
from zeroviz.errors import SpecError
from zeroviz.models import Family
from zeroviz.policies import Offload
from zeroviz.quantity import DECIMAL_UNITS
from zeroviz.rank_trace import RankTrace
from zeroviz.spec import RunSpec
from zeroviz.style import WIRE_PAINT, label_of
from zeroviz.trace import Trace
from zeroviz.wording import title, what_text

MAX_SPREAD = 1000
"""Amounts that are further apart are each said in a unit of its own, for 0.0019 GB is no figure to read."""


class Asked(Enum):
    """Which figure of a rank is asked for."""

    REST = "rest"
    """What it holds between two steps."""
    PEAK = "peak"
    """The most that it holds at one moment of a step."""
    SENT = "sent"
    """What it sends in one step, in a ring."""

    @property
    def label(self) -> str:
        """What the figure is, for a list to choose from and for an axis."""
        return {"rest": "held at rest", "peak": "held at the peak", "sent": "sent in one step"}[self.value]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a figure. stays: whether it is held at rest as well; nothing that is sent is."""

    key: Category | CollectiveOp
    nbytes: int
    stays: bool


@dataclass(frozen=True, slots=True)
class Figure:
    """The bytes asked for, and the parts they are the sum of: what is held at rest first, each in its usual order."""

    nbytes: int
    parts: tuple[Part, ...]


def figure_of(trace: Trace, what: Asked, rank: int) -> Figure:
    """The figure of `rank`. Raises SpecError for a rank that the step has not."""
    if not 0 <= rank < trace.spec.ranks:
        raise SpecError(f"rank is {rank}; it must be a whole number from 0 to {trace.spec.ranks - 1:,}.")
    return figure_of_rank(trace.ranks[rank], what)


def figure_of_rank(seen: RankTrace, what: Asked) -> Figure:
    """The figure of a rank's own trace."""
    match what:
        case Asked.REST:
            return Figure(seen.rest_nbytes, tuple(Part(c, nbytes, True) for c, nbytes in seen.at_rest.items()))
        case Asked.PEAK:
            return Figure(seen.peak().total, _parts_at_peak(seen))
        case Asked.SENT:
            return Figure(seen.sent_nbytes, _parts_sent(seen))


def _parts_at_peak(seen: RankTrace) -> tuple[Part, ...]:
    rest, peak = seen.at_rest, seen.peak().by_category
    stays = [Part(c, min(nbytes, peak.get(c, 0)), True) for c, nbytes in rest.items()]
    added = [Part(c, nbytes - rest.get(c, 0), False) for c, nbytes in peak.items()]
    return tuple(part for part in (*stays, *added) if part.nbytes > 0)


def _parts_sent(seen: RankTrace) -> tuple[Part, ...]:
    sums = {op: sum(total.sent_nbytes for total in seen.wire() if total.op is op) for op in CollectiveOp}
    return tuple(Part(op, nbytes, False) for op, nbytes in sums.items() if nbytes)


# ---- in words ----


def unit_of(*values: int) -> tuple[str, int]:
    """The one unit in which these bytes are said, and how many bytes it has: of several that of an axis for them, of
    one, or where they are too far apart for one unit, that of the last."""
    if len(values) > 1 and max(values) <= MAX_SPREAD * min(values):
        return axis_unit(max(values))
    return next((pair for pair in DECIMAL_UNITS if values[-1] >= pair[1]), ("B", 1))


def amounts(*values: int) -> tuple[str, ...]:
    """Bytes for a person, all in one unit so that they compare digit by digit; in units of their own if far apart."""
    if max(values) > MAX_SPREAD * min(values):
        return tuple(amount(value, unit_of(value)[0]) for value in values)
    unit, _ = unit_of(*values)
    return tuple(amount(value, unit) for value in values)


def part_label(key: Category | CollectiveOp, spec: RunSpec) -> str:
    """What a part is called: `gradients, whole`, `all-gather`."""
    return label_of(key, spec) if isinstance(key, Category) else WIRE_PAINT[key].label


def sums_of(figure: Figure) -> dict[Category | CollectiveOp, int]:
    """The bytes of each category or collective of a figure, in the usual order."""
    order: Sequence[Category | CollectiveOp] = (*CATEGORY_ORDER, *CollectiveOp)
    sums = {key: sum(part.nbytes for part in figure.parts if part.key is key) for key in order}
    return {key: nbytes for key, nbytes in sums.items() if nbytes}


def sum_words(figure: Figure, spec: RunSpec, unit: str) -> str:
    """A figure as the sum it is: `15.00 GB (parameters, whole) + 16.41 GB (...)`; a category stands once. Of one part
    alone its name: `all-reduce alone`."""
    sums = sums_of(figure)
    if len(sums) == 1:
        return f"{part_label(next(iter(sums)), spec)} alone"
    return " + ".join(f"{amount(nbytes, unit)} ({part_label(key, spec)})" for key, nbytes in sums.items())


def state_words(spec: RunSpec) -> str:
    """The step that is asked about: strategy, ranks and precision, then model, parameters, units, batch and options."""
    return f"{title(spec)}; {what_text(spec)}"


def question_words(spec: RunSpec, what: Asked, rank: int) -> str:
    """The question in one sentence, with all that the figure depends on."""
    holder = f"the device of rank {rank:,}" if spec.offload is not Offload.NONE else f"rank {rank:,}"
    asked = {
        Asked.REST: f"does {holder} hold between two steps",
        Asked.PEAK: f"does {holder} hold at the peak of a step",
        Asked.SENT: f"does rank {rank:,} send in one step",
    }[what]
    is_bare = what is Asked.PEAK and spec.model.family is Family.BARE
    return f"{state_words(spec)}: how many bytes {asked}{', activations not counted' if is_bare else ''}?"
