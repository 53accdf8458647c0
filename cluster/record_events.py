"""Record a step on CPU from the allocator's own events, as torch's profiler keeps them.

Each event has a pointer, signed bytes and the allocator's running total. Our ops are `record_function` ranges around
them; a tag is an empty range that names a pointer. The step runs as it would unrecorded.

The profiler's event tree is no public interface; tests compare it, block by block, with the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cluster.collectives import BACKEND_RANGE
from zeroviz.schedule import OpKind
from zeroviz.trace import Category, Event

_OP, _TAG = "zeroviz::op|", "zeroviz::tag|"

# Operators made of others: what dies inside them was handed from one operator to the next, as it would be without
# them. What dies inside any other operator is its scratch.
COMPOSITE = frozenset(
    {
        "aten::linear",
        "aten::matmul",
        "aten::layer_norm",
        "aten::rms_norm",
        "aten::_fused_rms_norm",
        "aten::cross_entropy_loss",
        "aten::scaled_dot_product_attention",
    }
)

# A Python number handed to an operator (`grad / N`) becomes a tensor of 8 bytes before the operator begins.
_NUMBER_NBYTES = 8


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a memory event stands: our op (an instance, so two forwards differ), the operator, backend or not."""

    op: int
    where: tuple[str, str, str]
    operator: int
    in_backend: bool


@dataclass(slots=True)
class _Entry:
    """A memory event on its way to becoming an Event; `category` None until ruled."""

    time_ns: int
    pointer: int
    nbytes: int
    total: int
    place: _Place
    category: Category | None = None
    dropped: bool = False


class EventRecorder:
    """Records one step; see the module's docstring."""

    method = "allocator events"

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)

    @contextmanager
    def recording(self, rest: Iterable[tuple[torch.Tensor, Category | None]]) -> Iterator[None]:
        """What is held already has its events behind it, so `rest` is not needed."""
        with self._profile:
            yield

    def op(self, phase: str, op: str, unit: str) -> AbstractContextManager[None]:
        return record_function(f"{_OP}{phase}|{op}|{unit}")

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        with record_function(f"{_TAG}{tensor.untyped_storage().data_ptr()}|{category.value}"):
            pass

    def allocated(self, tensor: torch.Tensor, category: Category) -> None:
        self.tag(tensor, category)

    def released(self, tensor: torch.Tensor) -> None:
        """The allocator's event says it."""

    def result(self) -> tuple[tuple[Event, ...], int | None, str]:
        """(events, the allocator's peak, its source)."""
        entries, tags = self._read()
        peak = max((entry.total for entry in entries), default=None)
        _rule(entries, tags)
        events = tuple(
            Event(*entry.place.where, entry.category or Category.TEMPORARY, entry.nbytes)
            for entry in entries
            if not entry.dropped
        )
        return events, peak, "torch CPU allocator, profiler memory events"

    def _read(self) -> tuple[list[_Entry], list[tuple[int, int, Category]]]:
        """Memory events and tags (time, pointer, category), each in order of time."""
        entries: list[_Entry] = []
        tags: list[tuple[int, int, Category]] = []
        nowhere = _Place(0, ("", "", ""), 0, False)
        kineto: Any = self._profile.profiler
        stack = [(node, nowhere) for node in kineto.kineto_results.experimental_event_tree()]
        while stack:
            node, place = stack.pop()
            name = node.name
            if name == "[memory]":
                fields = node.extra_fields
                entries.append(_Entry(node.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated, place))
                continue
            if name.startswith(_TAG):
                pointer, category = name[len(_TAG) :].split("|")
                tags.append((node.start_time_ns, int(pointer), Category(category)))
            elif name.startswith(_OP):
                phase, op, unit = name[len(_OP) :].split("|")
                place = _Place(node.id, (phase, op, unit), 0, False)
            elif name == BACKEND_RANGE or name.startswith("gloo:"):
                place = _Place(place.op, place.where, place.operator, True)
            elif name.startswith("aten::") and name not in COMPOSITE and not place.operator:
                place = _Place(place.op, place.where, node.id, place.in_backend)
            stack.extend((child, place) for child in node.children)
        entries.sort(key=lambda entry: entry.time_ns)
        tags.sort(key=lambda tag: tag[0])
        return entries, tags


def _rule(entries: list[_Entry], tags: list[tuple[int, int, Category]]) -> None:
    """Give every block its category, or drop it as the backend's or a kernel's."""
    born: dict[int, _Entry] = {}
    upcoming = iter(tags)
    tag = next(upcoming, None)

    def settle(birth: _Entry, death: _Entry | None) -> None:
        place = birth.place
        if birth.category is None:
            if place.in_backend:
                birth.dropped = True  # its free may come from the backend's thread, without an event
            elif (
                death is not None
                and place.operator == death.place.operator
                and (place.operator or birth.nbytes == _NUMBER_NBYTES)
            ):
                birth.dropped = True
            elif place.where[1] == OpKind.FORWARD.value and (death is None or death.place.op != place.op):
                birth.category = Category.ACTIVATION  # what forward leaves behind is there for backward
            else:
                birth.category = Category.TEMPORARY
        if death is not None:
            death.category, death.dropped = birth.category, birth.dropped

    for entry in entries:
        while tag is not None and tag[0] <= entry.time_ns:
            if tag[1] in born:
                born[tag[1]].category = tag[2]
            tag = next(upcoming, None)
        earlier = born.pop(entry.pointer, None)
        if earlier is not None:
            settle(earlier, entry if entry.nbytes < 0 else None)
        elif entry.nbytes < 0:
            # Not born in this step. If it was ours, the books will not close, and `Trace.check` says so.
            entry.dropped = entry.place.in_backend
        if entry.nbytes > 0:
            born[entry.pointer] = entry
    while tag is not None:
        if tag[1] in born:
            born[tag[1]].category = tag[2]
        tag = next(upcoming, None)
    for birth in born.values():
        settle(birth, None)
