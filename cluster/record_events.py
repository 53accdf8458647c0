"""Record a step on CPU from the allocator's own events, as torch's profiler keeps them.

Each event has a pointer, signed bytes and the allocator's running total; `chain.py` puts them in an order in which the
two agree at every event. Nothing is dropped: a block that never leaves its operator is KERNEL_SCRATCH, one made inside
a collective BACKEND_COPY. The step runs as it would unrecorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from cluster.chain import Chain, Link
from cluster.collectives import SETTLED_RANGE
from cluster.event_tree import AT_RANGE, HOST_RANGE, OP_RANGE, TAG_RANGE, Place, Tag, read
from cluster.recording import Held, Recording
from cluster.settle import Settling, workers_rest
from zeroviz.schedule import OpKind
from zeroviz.trace import Category, Event

# What these ops leave behind is there for backward.
_SAVING_OPS = frozenset({OpKind.FORWARD.value, OpKind.RECOMPUTE.value})

# A Python number handed to an operator (`grad / N`) becomes a tensor of 8 bytes before the operator begins.
_NUMBER_NBYTES = 8


class EventRecorder:
    """Records one step; see the module's docstring. `chain` is what the events came from, once it is recorded."""

    method = "allocator events"

    def __init__(self) -> None:
        # torch.profiler's own class works every event over in Python when it stops: ten times what reading them costs.
        self._profile = profile(use_kineto=True, profile_memory=True)
        self._rest: dict[int, Category | None] = {}
        self._rest_nbytes = 0
        self.chain = Chain(0, ())

    @contextmanager
    def recording(self, rest: Held, settling: Settling | None) -> Iterator[None]:
        if settling is None:
            raise RuntimeError("The allocator's events are read against its counter, and there is none.")
        self._remember(rest)
        self._rest_nbytes = settling.counter()
        with self._profile:
            yield
            # Collectives that overlap with compute leave copies to the backend's threads until here.
            if (live := settling.down_to(self._rest_nbytes)) is None:
                live = settling.counter()
            with record_function(f"{SETTLED_RANGE}{live}"):
                pass
            settling.until(workers_rest)

    def _remember(self, rest: Held) -> None:
        """Note the addresses of what is held. No tensor stays in a variable here while the step runs."""
        for tensor, category in rest:
            self._rest.setdefault(tensor.untyped_storage().data_ptr(), category)

    def op(self, phase: str, op: str, unit: str) -> AbstractContextManager[None]:
        return record_function(f"{OP_RANGE}{phase}|{op}|{unit}")

    def at(self, phase: str, op: str, unit: str) -> None:
        with record_function(f"{AT_RANGE}{phase}|{op}|{unit}"):
            pass

    def on_host(self) -> AbstractContextManager[None]:
        return record_function(HOST_RANGE)

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        with record_function(f"{TAG_RANGE}{tensor.untyped_storage().data_ptr()}|{category.value}"):
            pass

    def allocated(self, tensor: torch.Tensor, category: Category) -> None:
        self.tag(tensor, category)

    def released(self, tensor: torch.Tensor) -> None:
        """The allocator's event says it."""

    def fill(self, recording: Recording) -> None:
        results: Any = self._profile.kineto_results
        reading = read(results.experimental_event_tree())
        self.chain = Chain(self._rest_nbytes, reading.links)
        links = self.chain.links
        categories = _categories(links, reading.tags, self._rest)
        new = tuple.__new__  # Event(...) would go through a Python function for each
        recording.events = tuple(
            [
                new(Event, (*link.place.where, category, link.nbytes))
                for link, category in zip(links, categories, strict=True)
            ]
        )
        recording.rest_nbytes = self._rest_nbytes
        recording.peak_nbytes = max([self._rest_nbytes, *(link.total for link in links)])
        recording.source = "torch CPU allocator, profiler memory events"
        recording.num_events = reading.num_events
        recording.num_hidden_frees = self.chain.num_hidden_frees
        recording.unattributed_nbytes = self.chain.unattributed_nbytes


def _categories(links: list[Link], tags: Iterable[Tag], rest: dict[int, Category | None]) -> list[Category]:
    """The category of each change: of a block's birth by its tag or by a rule, of its free the same one.

    rest: the blocks held when the step began, by pointer. A block freed that nobody knows stays a finding.
    """
    found = [Category.UNATTRIBUTED] * len(links)
    born: dict[int, int] = {}
    tagged: dict[int, Category] = {}
    upcoming = iter(tags)
    tag = next(upcoming, None)

    def settle(birth: int, death: int | None) -> None:
        category = tagged.get(birth) or _rule(links[birth], None if death is None else links[death])
        found[birth] = category
        if death is not None:
            found[death] = category

    for position, link in enumerate(links):
        while tag is not None and tag.time_ns <= link.time_ns:
            if tag.pointer in born:
                tagged[born[tag.pointer]] = tag.category
            tag = next(upcoming, None)
        if link.is_unattributed:
            continue
        if link.nbytes > 0:
            born[link.pointer] = position
        elif (birth := born.pop(link.pointer, None)) is not None:
            settle(birth, position)
        else:
            found[position] = rest.pop(link.pointer, None) or Category.UNATTRIBUTED
    while tag is not None:
        if tag.pointer in born:
            tagged[born[tag.pointer]] = tag.category
        tag = next(upcoming, None)
    for birth in born.values():
        settle(birth, None)
    return found


def _rule(birth: Link, death: Link | None) -> Category:
    """What an untagged block is, by where it was born and where it died, if it did."""
    born: Place = birth.place
    died: Place | None = None if death is None else death.place
    if birth.by_backend:
        return Category.BACKEND_COPY
    if (
        died is not None
        and (born.op, born.operator) == (died.op, died.operator)
        and (born.operator or birth.nbytes == _NUMBER_NBYTES)
    ):
        return Category.KERNEL_SCRATCH
    if born.on_host:
        return Category.HOST_TEMPORARY
    if born.where[1] in _SAVING_OPS and (died is None or died.op != born.op):
        return Category.ACTIVATION
    return Category.TEMPORARY
