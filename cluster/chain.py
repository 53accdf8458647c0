"""The chain: an order of the allocator's events in which their running sum is the allocator's total at every event.

The total of an event is taken under the allocator's lock, so it is right. Two things around it are not. Threads write
their times a little after the lock, so two events of two threads can stand in the wrong order. And a thread without a
profiler state frees without an event: gloo's worker drops its last reference to a copy that way, and it shows only
in the next total. `link` mends the first and rebuilds the second; what neither explains is a link by itself, marked.

[Note: marks] A mark is a reading of the counter at a moment when no other thread was at work. It says where a free
without an event happened, which the next event alone may say an op too late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

# How many events ahead an event of another thread is looked for, and how many blocks at once may have gone unseen.
_WINDOW = 8
_MAX_AT_ONCE = 3


@dataclass(slots=True)
class Link:
    """A change of the allocator's total. nbytes is signed; total is the live bytes after it.

    place: where it happened, for whoever reads the chain; by the backend or not, is all that matters here.
    is_mark: a reading and no change. is_hidden: a free that had no event. is_unattributed: a jump without a block.
    """

    time_ns: int
    pointer: int
    nbytes: int
    total: int
    thread: int
    place: Any
    by_backend: bool = False
    is_mark: bool = False
    is_hidden: bool = False
    is_unattributed: bool = False

    @property
    def before(self) -> int:
        """Live bytes before the change."""
        return self.total - self.nbytes


class Chain:
    """The changes of one step, linked. start_nbytes: the allocator's total before them."""

    def __init__(self, start_nbytes: int, changes: Iterable[Link]) -> None:
        self.start_nbytes = start_nbytes
        self.links: list[Link] = []
        self.num_hidden_frees = 0
        self.unattributed_nbytes = 0
        self._total = start_nbytes
        self._open: dict[int, Link] = {}
        self._assumed: dict[int, int] = {}
        pending = deque(changes)
        while pending:
            change = pending.popleft()
            if change.before != self._total:
                for earlier in self._earlier(change, pending):
                    pending.remove(earlier)
                    self._put(earlier)
                self._explain(change)
            if not change.is_mark:
                self._put(change)

    def _put(self, link: Link) -> None:
        self._total += link.nbytes
        if link.nbytes > 0:
            self._open[link.pointer] = link
        elif self._open.pop(link.pointer, None) is None and link.pointer in self._assumed:
            # This block was taken for one that was freed unseen; it was another one of its size.
            twin = next((block for block in self._open.values() if block.nbytes == -link.nbytes), None)
            if twin is not None:
                del self._open[twin.pointer]
                link.pointer = twin.pointer
        self.links.append(link)

    def _earlier(self, change: Link, pending: deque[Link]) -> list[Link]:
        """Changes of other threads that really came before this one: they lead from the total to where it begins."""
        total, found = self._total, []
        for position, other in enumerate(pending):
            if position == _WINDOW:
                break
            if other.thread != change.thread and not other.is_mark and other.before == total:
                found.append(other)
                total = other.total
                if total == change.before:
                    return found
        return []

    def _explain(self, change: Link) -> None:
        """Book what happened unseen before `change`: blocks that add up to the gap, or a jump that stays a finding."""
        reused = self._open.get(change.pointer) if change.nbytes > 0 else None
        if reused is not None:
            self._free_unseen(reused, change)
        gap = self._total - change.before
        if gap > 0:
            for block in self._blocks_of(gap):
                self._free_unseen(block, change)
        jump = change.before - self._total
        if jump:
            self.unattributed_nbytes += abs(jump)
            self._total += jump
            self.links.append(replace(change, pointer=0, nbytes=jump, total=self._total, is_unattributed=True))

    def _blocks_of(self, nbytes: int) -> tuple[Link, ...]:
        """Open blocks of `nbytes` in all: the backend's before others, one before several, the oldest first."""
        backend = [block for block in self._open.values() if block.by_backend]
        others = [block for block in self._open.values() if not block.by_backend]
        for blocks, most in ((backend, _MAX_AT_ONCE), (others, 1), (backend + others[-_WINDOW:], 2)):
            for count in range(1, most + 1):
                for chosen in combinations(blocks, count):
                    if sum(block.nbytes for block in chosen) == nbytes:
                        return chosen
        return ()

    def _free_unseen(self, block: Link, at: Link) -> None:
        self.num_hidden_frees += 1
        self._assumed[block.pointer] = block.nbytes
        total = self._total - block.nbytes
        self._put(replace(at, pointer=block.pointer, nbytes=-block.nbytes, total=total, is_mark=False, is_hidden=True))
