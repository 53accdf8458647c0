"""Does it fit a GPU, and if not what to cut first: every single change with the peak that it gives, exactly. Pure.

A peak fits if it is at most the capacity less the reserve, as in `zeroviz budget`. Every change is a legal spec, made
as the explorer makes it: the toggle is set, the others follow (`toggles.settle`), and RunSpec has the last word. Its
peak is `zeroviz.peak`'s, which is the walk's.

[Note: greedy] Where no single change fits, the one with the lowest peak is kept, then the best beside it, and so on up
to four. What looked little alone may be much later, for the peak moves to another moment: so all options are worked
out again each time. A greedy search is no proof that three other changes would not do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

from zeroviz.budget import MAX_COUNT
from zeroviz.capacities import DEFAULT_RESERVE_NBYTES
from zeroviz.capacity_line import nothing_left
from zeroviz.changes import Option, options
from zeroviz.errors import SpecError
from zeroviz.memory import rest_by_category
from zeroviz.models import Family
from zeroviz.peak import moments_of, peak_of
from zeroviz.predict import predict
from zeroviz.quantity import format_nbytes
from zeroviz.rank_trace import Peak, alike
from zeroviz.spec import Implementation, Offload, RunSpec, UnitKind
from zeroviz.style import label_of
from zeroviz.toggles import settle, spec_of, toggles_of
from zeroviz.trace import Category

MAX_TOGETHER = 4
MIN_SHARE_OF_CUT = 4
"""A second category is named where it falls by at least a fourth of what the first one does."""


@dataclass(frozen=True, slots=True)
class Change:
    """What to change, and what comes of it.

    toggles: for `Explorer.choose`, on the state that the advice is of. words: the change. costs: what one pays for it.
    spec: what it makes. cuts: the categories that fall most at the peak, and by how many bytes, largest first. reason:
    these in words, and what lies on the host instead. notes: what else followed, in sentences.
    """

    toggles: Mapping[str, Any]
    words: str
    costs: str
    spec: RunSpec
    peak_nbytes: int
    spare_nbytes: int
    cuts: tuple[tuple[Category, int], ...]
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.spare_nbytes >= 0


@dataclass(frozen=True)
class Advice:
    """Whether `spec` fits, and what to do about it.

    changes: single ones that lower the peak, the lowest first; none where it fits. together: a combination, each change
    with its own toggles and with the peak of all up to it; none where a single one fits.
    largest_batch: where it fits, and where there is a batch. why_not: a sentence where changes were not worked out.
    """

    spec: RunSpec
    capacity_nbytes: int
    reserve_nbytes: int
    peak_nbytes: int
    changes: tuple[Change, ...] = ()
    together: tuple[Change, ...] = ()
    largest_batch: int | None = None
    largest_batch_peak_nbytes: int | None = None
    why_not: str = ""

    @property
    def budget_nbytes(self) -> int:
        return self.capacity_nbytes - self.reserve_nbytes

    @property
    def spare_nbytes(self) -> int:
        """What the peak leaves of the budget; less than 0 where it does not fit."""
        return self.budget_nbytes - self.peak_nbytes

    @property
    def fits(self) -> bool:
        return self.spare_nbytes >= 0

    @property
    def toggles_together(self) -> dict[str, Any]:
        """Those of all changes of `together`."""
        return {name: value for change in self.together for name, value in change.toggles.items()}


def advise(spec: RunSpec, capacity_nbytes: int, reserve_nbytes: int = DEFAULT_RESERVE_NBYTES) -> Advice:
    """The advice for `spec`, of whatever strategy and implementation. What cannot be worked out is no error: `why_not`
    says so."""
    peak = _highest(spec)
    advice = Advice(
        spec, capacity_nbytes, reserve_nbytes, peak.total, why_not=nothing_left(capacity_nbytes, reserve_nbytes)
    )
    if advice.why_not:
        return advice
    if spec.impl is not Implementation.OWN:
        what = "The largest batch is" if advice.fits else "What to cut is"
        return replace(advice, why_not=f"{what} worked out for our own code only, and this is {spec.impl.label}.")
    if advice.fits:
        batch = largest_batch(spec, advice.budget_nbytes)
        if batch is None:
            return advice
        peak = peak_of(replace(spec, batch=batch))
        return replace(advice, largest_batch=batch, largest_batch_peak_nbytes=peak.total)
    search = _Search(spec, advice.budget_nbytes)
    changes = tuple(sorted(search.changes(_At(spec, peak, ()), {}), key=lambda change: change.peak_nbytes))
    together = () if not changes or changes[0].fits else search.together(changes[0])
    return replace(advice, changes=changes, together=together)


def _highest(spec: RunSpec) -> Peak:
    """Of the rank that peaks highest; our own ranks peak alike."""
    if spec.impl is Implementation.OWN:
        return peak_of(spec)
    return max((rank.peak() for _, rank in alike(predict(spec).ranks)), key=lambda peak: peak.total)


def largest_batch(spec: RunSpec, budget_nbytes: int) -> int | None:
    """What `budget.largest_batch` finds, without a search: each moment that can be the peak is linear in the batch, see
    [Note: linear moments] in peak.py. None for a bare count, 0 where not even one sequence fits."""
    if spec.model.family is Family.BARE:
        return None
    moments = moments_of(spec)
    _, *others = moments.values(spec)
    most = MAX_COUNT
    for moment in moments.candidates:
        per_token, *fixed = moment.total
        left = budget_nbytes - sum(map(mul, fixed, others))
        if per_token:
            most = min(most, left // (per_token * spec.seq))
        elif left < 0:
            return 0
    return max(0, most)


@dataclass(frozen=True, slots=True)
class _At:
    """A spec that was made, its peak, and what followed."""

    spec: RunSpec
    peak: Peak
    notes: tuple[str, ...]


class _Search:
    """Specs around one, each made and worked out once."""

    def __init__(self, spec: RunSpec, budget_nbytes: int) -> None:
        self.spec, self.budget_nbytes = spec, budget_nbytes
        self._base = toggles_of(spec)
        self._known: dict[tuple[tuple[str, Any], ...], _At | None] = {}

    def at(self, toggles: Mapping[str, Any]) -> _At | None:
        """`spec` with toggles set as the explorer sets them; None where it would refuse."""
        key = tuple(toggles.items())
        if key not in self._known:
            self._known[key] = self._make(toggles)
        return self._known[key]

    def _make(self, toggles: Mapping[str, Any]) -> _At | None:
        wanted = {**self._base, **toggles}
        # A unit of so many elements has a count that `settle` would not keep, for the page has no such unit.
        keeps = ("blocks",) if self.spec.unit.kind is UnitKind.NUMEL and "unit" not in toggles else ()
        notes = settle(wanted, given={**toggles, **{name: wanted[name] for name in keeps}})
        try:
            spec = spec_of(wanted)
        except SpecError:
            return None
        if (self.spec.steps, self.spec.seed) != (spec.steps, spec.seed):  # which are no toggles
            spec = replace(spec, steps=self.spec.steps, seed=self.spec.seed)
        return _At(spec, peak_of(spec), tuple(notes))

    def changes(self, now: _At, done: Mapping[str, Any]) -> Iterable[Change]:
        """Every change beside `done` that lowers the peak of `now`, which is what `done` makes."""

        def fits(toggles: Mapping[str, Any]) -> bool:
            at = self.at({**done, **toggles})
            return at is not None and at.peak.total <= self.budget_nbytes

        batch = max(1, largest_batch(now.spec, self.budget_nbytes) or 0)
        for option in options(now.spec, fits, batch):
            if option.toggles.keys() & done.keys():
                continue
            at = self.at({**done, **option.toggles})
            if at is not None and at.peak.total < now.peak.total:
                yield self._change(option, now, at)

    def together(self, first: Change) -> tuple[Change, ...]:
        """See [Note: greedy]."""
        found, done = [first], dict(first.toggles)
        while not found[-1].fits and len(found) < MAX_TOGETHER:
            now = self.at(done)
            assert now is not None
            best = min(self.changes(now, done), key=lambda change: change.peak_nbytes, default=None)
            if best is None:
                break
            found.append(best)
            done |= best.toggles
        return tuple(found)

    def _change(self, option: Option, before: _At, after: _At) -> Change:
        cuts = _cuts(before.peak, after.peak)
        falls = [f"{label_of(category, before.spec)} {format_nbytes(nbytes)} less" for category, nbytes in cuts]
        moved = _on_host(after.spec) - _on_host(before.spec)
        return Change(
            toggles=option.toggles,
            words=option.words,
            costs=option.costs,
            spec=after.spec,
            peak_nbytes=after.peak.total,
            spare_nbytes=self.budget_nbytes - after.peak.total,
            cuts=cuts,
            reason=", ".join([*falls, f"{format_nbytes(moved)} more on the host"] if moved > 0 else falls),
            notes=tuple(note for note in after.notes if note not in before.notes),
        )


def _cuts(before: Peak, after: Peak) -> tuple[tuple[Category, int], ...]:
    """The one or two categories of which the peak holds so much less."""
    falls = ((category, held - after.by_category.get(category, 0)) for category, held in before.by_category.items())
    first, *others = sorted(falls, key=lambda fall: -fall[1])
    return (first, *(other for other in others[:1] if other[1] * MIN_SHARE_OF_CUT >= first[1]))


def _on_host(spec: RunSpec) -> int:
    """What the rank's host holds of it between steps, in bytes."""
    if spec.offload is Offload.NONE:
        return 0
    return sum(nbytes for category, nbytes in rest_by_category(spec).items() if category.on_host)
