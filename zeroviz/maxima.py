"""Per op of a step: the most that is held inside, what is held at the end, and what the op leaves changed.

Two traces of one schedule are compared op by op, so a byte too much is named with the op that made it and not only
where the peak happens to stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from zeroviz.category import Category
from zeroviz.matching import side_by_side
from zeroviz.schedule import OpKind
from zeroviz.trace import RankTrace

Where = tuple[str, str, str]

# gloo's thread makes its copy while the caller is on its way from the start of a collective to its wait, so which of
# the two ops holds it is chance. Where the wait follows at once the two are one op here.
_STARTED_BY = {
    OpKind.WAIT_UNSHARD.value: OpKind.UNSHARD.value,
    OpKind.WAIT_REDUCE.value: OpKind.REDUCE_GRAD.value,
    OpKind.WAIT_SYNC.value: OpKind.SYNC_PARAM.value,
}


@dataclass(slots=True)
class Span:
    """One op: `where` is (phase, op, unit), `most` the largest sum inside, the one it begins with included, `bare` the
    same without kernels' scratch, `last` the sum at its end, `net` what it changed by category."""

    where: Where
    most: int
    bare: int
    last: int
    net: Counter[Category]


def on_device(category: Category) -> bool:
    """What counts "as on NCCL"."""
    return category.on_device


def everything(category: Category) -> bool:
    """What counts "as here"."""
    return True


def spans(rank: RankTrace, counts: Callable[[Category], bool] = on_device) -> list[Span]:
    """The ops that change anything of what `counts`. With the backend's copies, a wait is part of its start."""
    joins = counts is not on_device
    counted = {category for category in Category if counts(category)}
    total = sum(nbytes for category, nbytes in rank.rest.items() if category in counted)
    total += rank.step_counter_nbytes if joins else 0
    scratch = 0
    found: list[Span] = []
    for event in rank.events:
        category, nbytes = event.category, event.delta_nbytes
        if category not in counted:
            continue
        where = event[:3]
        span = found[-1] if found else None
        if span is not None and span.where != where and joins:
            phase, op, unit = where
            if span.where == (phase, _STARTED_BY.get(op), unit):
                where = span.where
        if span is None or span.where != where:
            span = Span(where, total, total - scratch, total, Counter())
            found.append(span)
        total += nbytes
        scratch += nbytes if category is Category.KERNEL_SCRATCH else 0
        span.most, span.bare, span.last = max(span.most, total), max(span.bare, total - scratch), total
        span.net[category] += nbytes
    return found


def maxima(rank: RankTrace) -> list[tuple[str, str, str, int, int]]:
    """(phase, op, unit, most inside, total at the end) on the device, of each op that changes what it holds."""
    return [(*span.where, span.most, span.last) for span in spans(rank)]


def machine_maxima(rank: RankTrace, *, scratch: bool = True) -> list[tuple[str, str, str, int, int]]:
    """The same over all categories; the most without what kernels borrow, if asked, over the ops that do more than
    that."""
    found = spans(rank, everything)
    if scratch:
        return [(*span.where, span.most, span.last) for span in found]
    return [(*span.where, span.bare, span.last) for span in found if set(span.net) != {Category.KERNEL_SCRATCH}]


@dataclass(frozen=True, slots=True)
class Pair:
    """One op of both traces. An op that changed nothing on one side holds there what was held before it."""

    where: Where
    predicted_most: int
    measured_most: int
    bare_difference: int
    """measured - predicted, of the most without kernels' scratch."""
    left: Mapping[Category, int]
    """What the op leaves that was not predicted, by category; negative for what it freed unexpectedly."""
    carried: int
    """What the ops before have left in all."""

    @property
    def difference(self) -> int:
        """measured - predicted, of the most."""
        return self.measured_most - self.predicted_most


def pairs(predicted: list[Span], measured: list[Span], start: tuple[int, int]) -> Iterator[Pair]:
    """The ops of both sides, aligned. start: what each side holds before the step."""
    totals, carried = list(start), start[1] - start[0]
    for left, right in _aligned(predicted, measured):
        known = left or right
        assert known is not None
        mosts, bares = [], []
        for side, span in enumerate((left, right)):
            mosts.append(span.most if span else totals[side])
            bares.append(span.bare if span else totals[side])
            totals[side] = span.last if span else totals[side]
        changed = Counter(right.net if right else {})
        changed.subtract(left.net if left else {})
        unexpected = {category: nbytes for category, nbytes in changed.items() if nbytes}
        yield Pair(known.where, mosts[0], mosts[1], bares[1] - bares[0], unexpected, carried)
        carried += sum(unexpected.values())


def _aligned(predicted: list[Span], measured: list[Span]) -> Iterator[tuple[Span | None, Span | None]]:
    keys = [span.where for span in predicted], [span.where for span in measured]
    for i, j in side_by_side(*keys):
        yield None if i is None else predicted[i], None if j is None else measured[j]
