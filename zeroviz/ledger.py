"""Ledger: the running account a walk keeps. Allocations have keys, so that every free names what it frees."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain

from zeroviz.category import Category
from zeroviz.events import Change, Changes, Events, Where


class Ledger:
    """Turns alloc and free calls into events. A key is allocated once and freed once."""

    def __init__(self) -> None:
        self._wheres: list[Where] = []
        self._stretches: list[Changes] = []
        self._open: list[Change] = []  # changes at the present place that are no part yet
        self._live: dict[Hashable, tuple[int, Category]] = {}
        self._where: Where = ("", "", "")
        self._shared: dict[tuple[Change, ...], Changes] = {}

    @property
    def events(self) -> Events:
        """All that was booked so far."""
        self._close()
        return Events(tuple(self._wheres), tuple(self._stretches))

    @property
    def where(self) -> Where:
        """Where in the step the next events happen."""
        return self._where

    def at(self, phase: str, op: str, unit: str) -> None:
        """Say where in the step the next events happen."""
        if self._open:
            self._close()
        self._where = (phase, op, unit)

    def alloc(self, key: Hashable, nbytes: int, category: Category) -> None:
        if key in self._live:
            raise KeyError(f"{key!r} is allocated already (at {self._where})")
        self._live[key] = (nbytes, category)
        self._open.append((category, nbytes))

    def free(self, *keys: Hashable) -> None:
        for key in keys:
            nbytes, category = self._live.pop(key)
            self._open.append((category, -nbytes))

    def replay(self, changes: Iterable[Change]) -> None:
        """Book changes that were worked out elsewhere and need no keys. `Changes` are shared."""
        if self._open:
            self._close()
        self._wheres.append(self._where)
        self._stretches.append(changes if isinstance(changes, Changes) else self._share(changes))

    def holds(self, key: Hashable) -> bool:
        return key in self._live

    def rename(self, old: Hashable, new: Hashable) -> None:
        """The same bytes under another key: an in-place result. No event."""
        if new in self._live:
            raise KeyError(f"{new!r} is allocated already (at {self._where})")
        self._live[new] = self._live.pop(old)

    def take(self) -> Changes:
        """What was booked since the last call, as one stretch; the ledger then has no events."""
        self._close()
        taken = Changes(chain.from_iterable(self._stretches))
        self._wheres.clear()
        self._stretches.clear()
        return taken

    def _close(self) -> None:
        if self._open:
            self._wheres.append(self._where)
            self._stretches.append(self._share(self._open))
            self._open.clear()

    def _share(self, changes: Iterable[Change]) -> Changes:
        """Equal stretches are one, and so are their sums."""
        key = tuple(changes)
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = Changes(key)
        return found
