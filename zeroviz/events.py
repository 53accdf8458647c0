"""What happens to a rank's memory: single changes, stretches of them that repeat, and the events of a whole step.

[Note: shared changes] A large model's step is tens of thousands of changes, but blocks are alike: most of a step is the
same few stretches over and over. A predicted step is therefore kept as parts, each a place and a shared stretch with
its sums worked out once; it is spelt out event by event only for those who look at every event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, overload

from zeroviz.category import Category
from zeroviz.moments import Change as Change
from zeroviz.moments import Moments

Where = tuple[str, str, str]
"""(phase, op, unit)"""


class Event(NamedTuple):
    """A change of what a rank holds: `delta_nbytes` of `category`, positive when allocated, negative when freed.

    phase, op and unit say where in the step it happened: `backward`, `unshard`, `block 3`.
    """

    phase: str
    op: str
    unit: str
    category: Category
    delta_nbytes: int


@dataclass(frozen=True, slots=True)
class Crest:
    """How far the sum over a stretch of changes rises above its start, after how many changes first, and its end."""

    top: int
    num_changes: int
    net: int


class Changes(tuple[Change, ...]):
    """A stretch of changes. Its sums are worked out once: share it and do not rebuild it."""

    @cached_property
    def on_device(self) -> Crest:
        """Of what the device holds for the step: see `Category.on_device`."""
        return _crest([nbytes if category.on_device else 0 for category, nbytes in self])

    @cached_property
    def here(self) -> Crest:
        """Of all categories."""
        return _crest([nbytes for _, nbytes in self])

    @cached_property
    def moments(self) -> Moments:
        """Its changes one by one."""
        return Moments.of(self)

    @cached_property
    def net(self) -> Mapping[Category, int]:
        """What the stretch leaves, by category."""
        counts: Counter[Category] = Counter()
        for category, nbytes in self:
            counts[category] += nbytes
        return {category: nbytes for category, nbytes in counts.items() if nbytes}


def _crest(deltas: list[int]) -> Crest:
    totals = list(accumulate(deltas, initial=0))
    top = max(totals)
    return Crest(top, totals.index(top), totals[-1])


class Events(Sequence[Event]):
    """The events of a step, kept as parts. See [Note: shared changes]. Equal to any sequence of the same events."""

    def __init__(self, wheres: Sequence[Where], stretches: Sequence[Changes]) -> None:
        """wheres, stretches: of each part in turn. Two lists, for a tuple a part would cost more than the part."""
        self.wheres, self.stretches = wheres, stretches

    @property
    def parts(self) -> Iterator[tuple[Where, Changes]]:
        return zip(self.wheres, self.stretches, strict=True)

    def then(self, other: Events) -> Events:
        """These and what follows; the stretches are shared."""
        return Events((*self.wheres, *other.wheres), (*self.stretches, *other.stretches))

    @cached_property
    def spelt_out(self) -> tuple[Event, ...]:
        # Event(...) would go through a Python function for each.
        new = tuple.__new__
        return tuple(
            new(Event, (phase, op, unit, category, nbytes))
            for (phase, op, unit), changes in self.parts
            for category, nbytes in changes
        )

    def __len__(self) -> int:
        return sum(map(len, self.stretches))

    def __iter__(self) -> Iterator[Event]:
        return iter(self.spelt_out)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, index: int | slice) -> Event | tuple[Event, ...]:
        return self.spelt_out[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Events):
            return self is other or self.spelt_out == other.spelt_out
        return self.spelt_out == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.spelt_out)

    def __repr__(self) -> str:
        return f"Events of {len(self.stretches)} parts"

    def first_top(self, start: int, *, here: bool) -> tuple[int, int, int]:
        """(sum, part, changes into the part) where the sum from `start` is first largest; part -1 is before all.

        here: of all categories, and not of the device's alone.
        """
        crests = [changes.here if here else changes.on_device for changes in self.stretches]
        starts = accumulate((crest.net for crest in crests), initial=start)
        tops = [before + crest.top for before, crest in zip(starts, crests, strict=False)]
        best = max(tops, default=start)
        if best <= start:
            return start, -1, 0
        part = tops.index(best)
        return best, part, crests[part].num_changes

    def held_at(self, rest: Mapping[Category, int], part: int, num_changes: int) -> tuple[Counter[Category], Where]:
        """What is held after so many changes of a part, and where that is; part -1 is before all."""
        live = Counter(rest)
        before = self.stretches[: max(part, 0)]
        counts = Counter(map(id, before))
        for changes in {id(changes): changes for changes in before}.values():
            for category, nbytes in changes.net.items():
                live[category] += counts[id(changes)] * nbytes
        if part < 0:
            return live, ("at rest", "", "")
        for category, nbytes in self.stretches[part][:num_changes]:
            live[category] += nbytes
        return live, self.wheres[part]


def as_events(events: Sequence[Event]) -> Events:
    """A plain sequence of events as parts, one for each op in turn."""
    if isinstance(events, Events):
        return events
    wheres: list[Where] = []
    stretches: list[list[Change]] = []
    for phase, op, unit, category, nbytes in events:
        where = (phase, op, unit)
        if not wheres or wheres[-1] != where:
            wheres.append(where)
            stretches.append([])
        stretches[-1].append((category, nbytes))
    return Events(wheres, [Changes(changes) for changes in stretches])
