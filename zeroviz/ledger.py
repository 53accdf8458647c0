"""Ledger: the running account a walk keeps. Allocations have keys, so that every free names what it frees."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from zeroviz.trace import Category, Event


class Ledger:
    """Turns alloc and free calls into events. A key is allocated once and freed once."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._live: dict[Hashable, tuple[int, Category]] = {}
        self._where = ("", "", "")

    def at(self, phase: str, op: str, unit: str) -> None:
        """Say where in the step the next events happen."""
        self._where = (phase, op, unit)

    def alloc(self, key: Hashable, nbytes: int, category: Category) -> None:
        if key in self._live:
            raise KeyError(f"{key!r} is allocated already (at {self._where})")
        self._live[key] = (nbytes, category)
        self.events.append(Event(*self._where, category, nbytes))

    def free(self, *keys: Hashable) -> None:
        for key in keys:
            nbytes, category = self._live.pop(key)
            self.events.append(Event(*self._where, category, -nbytes))

    def replay(self, changes: Iterable[tuple[Category, int]]) -> None:
        """Book changes that were worked out elsewhere and need no keys: (category, signed bytes)."""
        phase, op, unit = self._where
        # A large model has 16,560 events; Event(...) would go through a Python function for each.
        new = tuple.__new__
        self.events += [new(Event, (phase, op, unit, category, nbytes)) for category, nbytes in changes]

    def holds(self, key: Hashable) -> bool:
        return key in self._live

    def rename(self, old: Hashable, new: Hashable) -> None:
        """The same bytes under another key: an in-place result. No event."""
        if new in self._live:
            raise KeyError(f"{new!r} is allocated already (at {self._where})")
        self._live[new] = self._live.pop(old)
