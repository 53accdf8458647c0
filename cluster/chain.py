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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice
from typing import Any, NamedTuple

# How many events ahead an event of another thread is looked for; how many choices of blocks are tried for one gap.
_WINDOW = 8
_MAX_CHOICES = 100_000
# The same where nothing nearer explains a total: a thread that lost its processor between the lock and its clock writes
# its time many events too late.
_FAR_WINDOW = 4096


class Choice(NamedTuple):
    """Blocks that may have gone unseen at once: `least` to `most`, of the backend's, of the newest others, or both.

    lost_only: only blocks whose free has no event anywhere.
    """

    lost_only: bool
    of_backend: bool
    num_others: int
    least: int
    most: int


_ALL = 2**40
# A backend that got behind lets several go at once.
_BY_BACKEND = ((True, 0, 1, 1), (True, 0, 2, 8))
_BY_ANYBODY = (*_BY_BACKEND, (False, _ALL, 1, 1), (True, _WINDOW, 2, 2))
# The likeliest first. What has an event of its own went by that event, unless events are in disorder.
_STAGES = tuple(
    tuple(Choice(lost_only, *each) for each in choices)
    for lost_only in (True, False)
    for choices in (_BY_BACKEND, _BY_ANYBODY)
)


@dataclass(slots=True)
class Link:
    """A change of the allocator's total. nbytes is signed; total is the live bytes after it.

    place: where it happened, for whoever reads the chain; by the backend or not, is all that matters here.
    is_mark: a reading and no change. is_hidden: a free that had no event. is_unattributed: a jump without a block.
    is_lost: a block whose free no event says.
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
    is_lost: bool = False

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
        self._assumed: dict[int, Link] = {}  # the births of blocks that were taken for freed unseen, by pointer
        # Those frees by bytes and total, each with its position.
        self._unseen: dict[tuple[int, int], tuple[Link, int]] = {}
        self._births: dict[int, int] = {}  # of open blocks, their positions
        pending = deque(changes)
        _mark_lost(pending)
        while pending:
            change = pending.popleft()
            if change.before != self._total:
                if self._was_taken_for_unseen(change):
                    continue
                self._put_earlier(self._earlier(change, pending, _WINDOW), change, pending)
                self._explain(change, pending)
            if not change.is_mark:
                self._put(change)

    def _put(self, link: Link) -> None:
        self._total += link.nbytes
        if link.nbytes > 0:
            self._open[link.pointer] = link
            self._births[link.pointer] = len(self.links)
        else:
            self._open.pop(link.pointer, None)
        self.links.append(link)

    def _was_taken_for_unseen(self, change: Link) -> bool:
        """Whether this free has its link already: written far too late, it was taken for one without an event."""
        link, position = self._unseen.get((change.nbytes, change.total), (None, 0))
        if link is None:
            return False
        # A block that came since is another one, at whatever address.
        is_open = change.pointer in self._open
        if self._births[change.pointer] > position if is_open else change.pointer != link.pointer:
            return False
        del self._unseen[change.nbytes, change.total]
        self.num_hidden_frees -= 1
        link.is_hidden = False
        if is_open:  # another block of its size was taken for this one
            self._open[link.pointer] = self._assumed.pop(link.pointer)
            link.pointer = change.pointer
            del self._open[change.pointer]
        return True

    def _put_earlier(self, found: Iterable[Link], change: Link, pending: deque[Link]) -> None:
        """Put what came before `change`, whose time was then written too late: it is no later than that of `change`."""
        for earlier in found:
            pending.remove(earlier)
            earlier.time_ns = min(earlier.time_ns, change.time_ns)
            self._put(earlier)

    def _earlier(self, change: Link, pending: deque[Link], window: int) -> list[Link]:
        """Changes of other threads that really came before this one: they lead from the total to where it begins."""
        total, found = self._total, []
        unborn: set[int] = set()  # blocks that only come, whose frees are no earlier
        for other in islice(pending, window):
            leads_on = other.thread != change.thread and not other.is_mark and other.before == total
            if leads_on and (other.nbytes > 0 or other.pointer not in unborn):
                found.append(other)
                total = other.total
                if total == change.before:
                    return found
            elif other.nbytes > 0:
                unborn.add(other.pointer)
        return []

    def _explain(self, change: Link, pending: deque[Link]) -> None:
        """Book what happened unseen before `change`: blocks that add up to the gap, or a jump that stays a finding.

        In turn: blocks of the backend's, by themselves or behind changes of other threads whose own times may have been
        written too late; one change that was written far too late; then the same with blocks of ours, which seldom go
        unseen.
        """
        reused = self._open.get(change.pointer) if change.nbytes > 0 else None
        if reused is not None:
            self._free_unseen(reused, change)
        for choices in _STAGES:
            self._free_behind(change, pending, choices)
            if change.before != self._total:
                self._put_earlier(self._earlier(change, pending, _FAR_WINDOW), change, pending)
            if change.before != self._total:
                self._put_late(change, pending, choices)
            if change.before == self._total:
                return
        jump = change.before - self._total
        self.unattributed_nbytes += abs(jump)
        self._total += jump
        self.links.append(replace(change, pointer=0, nbytes=jump, total=self._total, is_unattributed=True))

    def _free_behind(self, change: Link, pending: deque[Link], choices: Iterable[Choice]) -> None:
        """Blocks that went unseen just before `change`, behind as few changes of other threads as can be."""
        leads = [[], *self._leads(change, pending)]
        for choice in choices:
            for lead in leads:
                total = lead[-1].total if lead else self._total
                gone = {link.pointer for link in lead if link.nbytes < 0}
                live = [block for block in self._open.values() if block.pointer not in gone]
                born = [link for link in lead if link.nbytes > 0 and link.pointer not in gone]
                if (blocks := _blocks_of(total - change.before, [*live, *born], (choice,))) is None:
                    continue
                self._put_earlier(lead, change, pending)
                for block in blocks:
                    self._free_unseen(block, change)
                return

    def _leads(self, change: Link, pending: deque[Link]) -> Iterator[list[Link]]:
        """What other threads may have done before `change`: 1, 2, ... changes that lead on from the total."""
        total, found = self._total, []
        for other in islice(pending, _WINDOW):
            if other.thread == change.thread or other.is_mark:
                continue
            if other.before != total:
                return
            found.append(other)
            total = other.total
            yield list(found)

    def _put_late(self, change: Link, pending: deque[Link], choices: Iterable[Choice]) -> None:
        """One event of another thread that came before `change` and was written far too late, with blocks that went
        unseen before it and after it. Its own total says how much each time."""
        for other in islice(pending, _FAR_WINDOW):
            if other.thread == change.thread or other.is_mark:
                continue
            before = _blocks_of(self._total - other.before, self._open.values(), choices)
            if before is None:
                continue
            left = [block for block in self._open.values() if block not in before]
            born = [other] if other.nbytes > 0 else []
            after = _blocks_of(other.total - change.before, [*left, *born], choices)
            if after is None:
                continue
            other.time_ns = min(other.time_ns, change.time_ns)
            for block in before:
                self._free_unseen(block, other)
            self._put_earlier([other], change, pending)
            for block in after:
                self._free_unseen(block, change)
            return

    def _free_unseen(self, block: Link, at: Link) -> None:
        self.num_hidden_frees += 1
        self._assumed[block.pointer] = block
        total = self._total - block.nbytes
        link = replace(at, pointer=block.pointer, nbytes=-block.nbytes, total=total, is_mark=False, is_hidden=True)
        self._unseen[link.nbytes, link.total] = link, len(self.links)
        self._put(link)


def _mark_lost(changes: Iterable[Link]) -> None:
    """Tell the blocks that no event frees: their pointer is next heard of when it is given out again, or never."""
    born: dict[int, Link] = {}
    for change in changes:
        if change.nbytes > 0:
            change.is_lost = True
            born[change.pointer] = change
        elif (block := born.pop(change.pointer, None)) is not None:
            block.is_lost = False


def _blocks_of(nbytes: int, blocks: Iterable[Link], choices: Iterable[Choice]) -> tuple[Link, ...] | None:
    """Blocks of `nbytes` in all. None for no such blocks; no blocks for no bytes.

    The backend's oldest come first, for it works them off in turn, and of others the newest: what it still holds of
    ours, a collective took that has just ended.
    """
    if nbytes <= 0:
        return None if nbytes else ()
    backend: list[Link] = []
    others: list[Link] = []
    for block in blocks:
        (backend if block.by_backend else others).append(block)
    for lost_only, of_backend, num_others, least, most in choices:
        candidates = [*(backend if of_backend else ()), *reversed(others[max(0, len(others) - num_others) :])]
        if lost_only:
            candidates = [block for block in candidates if block.is_lost]
        chosen = chain.from_iterable(combinations(candidates, count) for count in range(least, most + 1))
        for each in islice(chosen, _MAX_CHOICES):
            if sum(block.nbytes for block in each) == nbytes:
                return each
    return None
