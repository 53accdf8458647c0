"""A caching allocator's recorded history, read as the events of one step. Plain data in, plain data out; no torch.

An entry is one of torch's `device_traces`: `action`, `addr`, `size`, which is what was asked for and not what rounding
made of it, and `user_metadata` where somebody set it. Entries stand in the order in which the allocator, under its
lock, did what they say.

[Note: places] The allocator counts the allocations and the requests to free it has served, and each has one entry. So
the two counts, read when an op begins or a tensor is tagged, are a place in the history; no clock enters. Metadata
could not do that: it belongs to a thread, and on a GPU autograd works in a thread of its own. It is a second witness:
what the thread of the schedule did carries the op's number, so places can be checked against it, and what another
thread did while no backward ran is the communication backend's.

[Note: two frees] `free_requested`: the tensor is gone. `free_completed`: the block can be used again, later than the
first only if another stream still works on it. Events end at the first, as the schedule does. The allocator's
`requested_bytes` falls at the second, and so does the running sum that is held against it.

[Note: no operators] The history knows no operators, so what a kernel borrows cannot be told from what one operator
hands to the next: it is in TEMPORARY here, and in KERNEL_SCRATCH on CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from cluster.cuda_log import Counts, CudaLog, TagMark, Where
from zeroviz.device_lines import DeviceLines
from zeroviz.schedule import OpKind
from zeroviz.trace import Category, Event

ALLOC, FREE, FREED = "alloc", "free_requested", "free_completed"
# Segments come from and go back to the driver; the rest are notes. None changes what tensors hold.
INERT = frozenset({"segment_alloc", "segment_free", "segment_map", "segment_unmap", "snapshot", "oom", "annotate"})

LABEL = "zeroviz|"
_NOWHERE: Where = ("", "", "")
_KEEPS_FOR_BACKWARD = (OpKind.FORWARD.value, OpKind.RECOMPUTE.value)
_Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class History:
    """What a log says of its step.

    num_events: allocations and frees that were read. unattributed_nbytes: how many bytes moved without an explanation,
    as Category.UNATTRIBUTED has it, plus what the allocator's own peak exceeds the history's by.
    """

    events: tuple[Event, ...]
    num_events: int
    unattributed_nbytes: int
    lines: DeviceLines


@dataclass(slots=True)
class _Block:
    """A block born in the step. op, death: numbers of the ops it was born and died in; None between two ops."""

    op: int | None
    in_backend: bool
    category: Category | None = None
    death: int | None = None
    is_dead: bool = False


def label_of(op: int, where: Where) -> str:
    """The metadata of op number `op`. A person sees it in torch's own viewer of memory snapshots."""
    return f"{LABEL}{op}|{'|'.join(where)}"


def read_history(log: CudaLog) -> History:
    """The events of the log's step, and the lines beside them; see the notes above."""
    return _Reader(log).read()


class _Reader:
    """One reading of one log. `moves` are the step's allocations and frees; a place is an index among them."""

    def __init__(self, log: CudaLog) -> None:
        self.log = log
        self.step, self.after, self.num_lost = _cut(log)
        self.moves = [entry for entry in self.step if entry["action"] in (ALLOC, FREE)]
        self.op_at: list[int | None] = [None] * len(self.moves)
        self.in_backend = [False] * len(self.moves)
        self.tags_at: dict[int, list[TagMark]] = {}
        self.born: dict[int, _Block] = {}
        self.held = {holding.address: holding for holding in reversed(log.held)}  # the first category given stands
        self.sketch: list[tuple[Where, _Block | Category, int]] = []
        self.faults: list[str] = []
        self.peak_awaiting_nbytes = 0

    def read(self) -> History:
        self._place_marks()
        self._compare_with_labels()
        missing = self._walk()
        workspace_nbytes = self._find_workspaces()
        events = tuple(Event(*where, self._category(of), nbytes) for where, of, nbytes in self.sketch)
        moved = sum(abs(event.delta_nbytes) for event in events if event.category is Category.UNATTRIBUTED)
        return History(events, len(self.moves), moved + abs(missing), self._lines(workspace_nbytes))

    def _place_marks(self) -> None:
        """Turn counts into places. Each place is checked: as many allocations stand before it as the mark counted."""
        num_before = list(accumulate((move["action"] == ALLOC for move in self.moves), initial=0))
        start, end = self.log.start.counts, self.log.end.counts
        num_lost_allocs = end.num_allocs - start.num_allocs - num_before[-1]
        num_astray = 0

        def place(counts: Counts) -> int:
            nonlocal num_astray
            index = sum(counts) - sum(start) - self.num_lost
            if not 0 <= index <= len(self.moves):  # in the part that was lost
                return 0 if index < 0 else len(self.moves)
            num_astray += num_before[index] != counts.num_allocs - start.num_allocs - num_lost_allocs
            return index

        for number, op in enumerate(self.log.ops):
            for index in range(place(op.begin), place(op.end)):
                self.op_at[index] = number
        for span in self.log.backend:
            for index in range(place(span.begin), place(span.end)):
                self.in_backend[index] = True
        for tag in self.log.tags:
            self.tags_at.setdefault(place(tag.at), []).append(tag)
        if num_astray:
            self.faults.append(f"{num_astray:,} marks stand where the history has other allocations before them")

    def _compare_with_labels(self) -> None:
        """Hold the places against the labels of the schedule's own thread, and find what other threads allocated."""
        labels = [_number_in(move) for move in self.moves]
        if all(label is None for label in labels):
            return
        num_strayed = 0
        for index, (label, number) in enumerate(zip(labels, self.op_at, strict=True)):
            if label is not None:
                num_strayed += label != number
            elif number is not None and self.log.ops[number].where[1] != OpKind.BACKWARD.value:
                self.in_backend[index] = True
        if num_strayed:
            self.faults.append(f"{num_strayed:,} entries carry the label of another op than they are counted in")

    def _walk(self) -> int:
        """Follow every block from its birth to its death, and the running sum beside them.

        Returns the bytes by which the allocator's own peak lies above the history's.
        """
        moved = sum(_change(entry) for entry in self.step)
        running = self.log.end.requested_nbytes - moved
        peak = max(self.log.start.requested_nbytes, running)
        awaiting = sum(block.requested_nbytes for block in self.log.blocks if not block.in_use)
        jump = running - self.log.start.requested_nbytes
        if self.num_lost:  # events end at the first free, which the lost part has of some blocks and the rest not
            jump += awaiting
            awaiting = _waiting_before(self.step)
            jump -= awaiting
        if jump:
            self.sketch.append((_NOWHERE, Category.UNATTRIBUTED, jump))
        self._report_jump(jump)
        unknown: set[str] = set()
        num_tags_astray = index = 0
        for entry in self.step:
            action = entry["action"]
            running += _change(entry)
            if action == FREED:
                awaiting -= entry["size"]
            elif action in (ALLOC, FREE):
                num_tags_astray += self._apply_tags(index)
                # Not after each free: where no other stream has the block, its second free follows at once.
                self.peak_awaiting_nbytes = max(self.peak_awaiting_nbytes, awaiting)
                if action == ALLOC:
                    self._birth(entry, index)
                else:
                    awaiting += entry["size"]
                    self._death(entry, index)
                index += 1
            elif action not in INERT:
                unknown.add(action)
            peak = max(peak, running)
        num_tags_astray += self._apply_tags(index)
        self.peak_awaiting_nbytes = max(self.peak_awaiting_nbytes, awaiting)
        missing = self.log.end.requested_peak_nbytes - peak
        if missing:
            self.faults.append(f"the history's peak is {peak:,} B, the allocator's {peak + missing:,} B")
        if num_tags_astray and not self.num_lost:
            self.faults.append(f"{num_tags_astray:,} tags name an address where no block lives")
        if unknown:
            self.faults.append(f"the history has actions this version does not know: {', '.join(sorted(unknown))}")
        return missing

    def _report_jump(self, jump: int) -> None:
        if self.num_lost:
            num_all = self.num_lost + len(self.moves)
            self.faults.append(
                f"the history is truncated: the first {self.num_lost:,} of {num_all:,} allocations and frees were "
                f"overwritten at max_entries {self.log.max_entries:,}; record with more"
            )
        elif jump:
            self.faults.append(f"the history does not lead from the allocator's total to its next one: {jump:+,} B")

    def _where(self, index: int) -> Where:
        number = self.op_at[index]
        return _NOWHERE if number is None else self.log.ops[number].where

    def _birth(self, entry: _Entry, index: int) -> None:
        block = _Block(self.op_at[index], self.in_backend[index])
        self.born[entry["addr"]] = block
        self.sketch.append((self._where(index), block, entry["size"]))

    def _death(self, entry: _Entry, index: int) -> None:
        block = self.born.pop(entry["addr"], None)
        holding = self.held.pop(entry["addr"], None)
        of: _Block | Category = Category.UNATTRIBUTED  # it was there before the step, and nobody has said what it is
        if block is not None:
            block.is_dead, block.death = True, self.op_at[index]
            of = block
        elif holding is not None and holding.category is not None:
            of = holding.category
        self.sketch.append((self._where(index), of, -entry["size"]))

    def _apply_tags(self, index: int) -> int:
        """Apply the tags made at this place; returns how many found no block."""
        num_astray = 0
        for tag in self.tags_at.get(index, ()):
            block = self.born.get(tag.address)
            if block is not None:
                block.category = tag.category
            else:
                num_astray += tag.address not in self.held
        return num_astray

    def _find_workspaces(self) -> int:
        """What cuBLAS gave back when asked to. Returns the bytes of those it had before the step."""
        nbytes = 0
        for entry in self.after:
            if entry["action"] == FREE:
                block = self.born.get(entry["addr"])
                if block is None:
                    nbytes += entry["size"]
                elif block.category is None:
                    block.category = Category.KERNEL_SCRATCH
        return nbytes

    def _category(self, of: _Block | Category) -> Category:
        """The block's tag, or else the rule: what forward leaves behind is there for backward."""
        if isinstance(of, Category):
            return of
        if of.category is not None:
            return of.category
        if of.in_backend:
            return Category.BACKEND_COPY
        kind = _NOWHERE[1] if of.op is None else self.log.ops[of.op].where[1]
        left_behind = not of.is_dead or of.death != of.op
        return Category.ACTIVATION if kind in _KEEPS_FOR_BACKWARD and left_behind else Category.TEMPORARY

    def _lines(self, workspace_nbytes: int) -> DeviceLines:
        start = self.log.start
        in_use = {block.address: block.requested_nbytes for block in self.log.blocks if block.in_use}
        awaiting = sum(block.requested_nbytes for block in self.log.blocks if not block.in_use)
        requested = start.requested_nbytes - awaiting
        if sum(in_use.values()) != requested:
            self.faults.append(
                f"at rest the allocator's blocks hold {sum(in_use.values()):,} B, its total says {requested:,} B"
            )
        held = {holding.address: holding.nbytes for holding in self.log.held}
        if num_foreign := sum(in_use.get(address) != nbytes for address, nbytes in held.items()):
            self.faults.append(f"{num_foreign:,} tensors held at rest are no blocks of this allocator")
        if self.log.num_on_host:
            self.faults.append("the step used the host's memory, of which this history has nothing")
        named = sum(nbytes for address, nbytes in in_use.items() if address in held)
        return DeviceLines(
            requested_nbytes=requested,
            rounding_nbytes=start.allocated_nbytes - requested,
            awaiting_nbytes=start.active_nbytes - start.allocated_nbytes,
            cached_nbytes=start.reserved_nbytes - start.active_nbytes,
            outside_nbytes=self.log.device_used_nbytes - start.reserved_nbytes,
            workspace_nbytes=workspace_nbytes,
            unnamed_nbytes=requested - named - workspace_nbytes,
            peak_reserved_nbytes=self.log.end.reserved_peak_nbytes,
            peak_awaiting_nbytes=self.peak_awaiting_nbytes,
            faults=tuple(self.faults),
        )


def _cut(log: CudaLog) -> tuple[Sequence[_Entry], Sequence[_Entry], int]:
    """The step's entries, those after it, and how many of the step's allocations and frees were overwritten.

    The end is certain: the entries after the step are as many as the counts grew by.
    """
    moves = [index for index, entry in enumerate(log.entries) if entry["action"] in (ALLOC, FREE)]
    num_after = sum(log.final) - sum(log.end.counts)
    num_kept = max(0, len(moves) - num_after)
    stop = moves[num_kept] if num_kept < len(moves) else len(log.entries)
    num_lost = sum(log.end.counts) - sum(log.start.counts) - num_kept
    # Entries before the step's first are those made while the recording was being set up.
    first = moves[-num_lost] if num_lost < 0 and -num_lost < num_kept else stop if num_lost < 0 else 0
    return log.entries[first:stop], log.entries[stop:], max(0, num_lost)


def _waiting_before(entries: Sequence[_Entry]) -> int:
    """Bytes of the blocks whose second free is here and whose first is not."""
    nbytes, asked = 0, set()
    for entry in entries:
        if entry["action"] == FREE:
            asked.add(entry["addr"])
        elif entry["action"] == FREED and entry["addr"] not in asked:
            nbytes += entry["size"]
        elif entry["action"] == FREED:
            asked.remove(entry["addr"])
    return nbytes


def _change(entry: _Entry) -> int:
    """How an entry changes the allocator's requested bytes."""
    size: int = entry["size"]
    return size if entry["action"] == ALLOC else -size if entry["action"] == FREED else 0


def _number_in(entry: _Entry) -> int | None:
    """The op's number in an entry's label; None without a label of ours."""
    text = entry.get("user_metadata")
    if not isinstance(text, str) or not text.startswith(LABEL):
        return None
    return int(text[len(LABEL) :].partition("|")[0])
