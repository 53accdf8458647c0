"""The profiler's event tree as a list of allocator changes, each with its place in the step.

Our ops are ranges around torch's operators, a tag is an empty range that names a pointer, and a settled range carries a
reading of the allocator's counter. The tree is no public interface; tests compare what is read from it, block by block,
with the arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cluster.chain import Link
from cluster.collectives import BACKEND_RANGE, SETTLED_RANGE
from zeroviz.trace import Category

MEMORY = "[memory]"  # torch's name of an allocator event
OP_RANGE, AT_RANGE, TAG_RANGE, HOST_RANGE = "zeroviz::op|", "zeroviz::at|", "zeroviz::tag|", "zeroviz::host"

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


class Place(NamedTuple):
    """Where a change happened: our op (an instance, so two forwards differ), the operator, on the host or not."""

    op: int = 0
    where: tuple[str, str, str] = ("", "", "")
    operator: int = 0
    on_host: bool = False


NOWHERE = Place()


class Tag(NamedTuple):
    """From its time on, the block at `pointer` is known to be of `category`, back to its birth."""

    time_ns: int
    pointer: int
    category: Category


@dataclass
class Reading:
    """What the tree holds, each list in order of time. num_events: the allocator's own, marks left out."""

    links: list[Link] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)
    num_events: int = 0


def read(roots: Iterable[Any]) -> Reading:
    """The tree under `roots`.

    A step has thousands of nodes and each question to one crosses into C++, so none is asked twice.
    """
    found = Reading()
    links: list[Link] = []
    ops: list[tuple[int, Place]] = []
    # (node, its name, place, the node's thread is the backend's or the node is inside one of its calls, thread)
    stack = [(node, node.name, NOWHERE, False, node.start_tid) for node in roots]
    while stack:
        node, name, place, by_backend, thread = stack.pop()
        if name == MEMORY:  # of a thread that was in no range
            links.append(_link(node, thread, place, by_backend))
            continue
        if name.startswith("aten::"):
            if not place.operator and name not in COMPOSITE:
                place = Place(place.op, place.where, node.id, place.on_host)
        elif name.startswith("zeroviz::"):
            if name.startswith(TAG_RANGE):
                pointer, category = name[len(TAG_RANGE) :].split("|")
                found.tags.append(Tag(node.start_time_ns, int(pointer), Category(category)))
            elif name.startswith(OP_RANGE):
                phase, op, unit = name[len(OP_RANGE) :].split("|")
                place = Place(node.id, (phase, op, unit))
                ops.append((node.start_time_ns, place))
            elif name.startswith(AT_RANGE):  # what follows has no range around it, and is placed by time
                phase, op, unit = name[len(AT_RANGE) :].split("|")
                ops.append((node.start_time_ns, Place(node.id, (phase, op, unit))))
            elif name.startswith(SETTLED_RANGE):
                total = int(name[len(SETTLED_RANGE) :])
                links.append(Link(node.start_time_ns, 0, 0, total, thread, place, is_mark=True))
            elif name == HOST_RANGE:
                place = place._replace(on_host=True)
            elif name == BACKEND_RANGE:
                by_backend = True
        elif name.startswith(("gloo:", "c10d::")):
            by_backend = True
        for child in node.children:
            if (child_name := child.name) == MEMORY:
                links.append(_link(child, thread, place, by_backend))
            else:
                stack.append((child, child_name, place, by_backend, thread))
    found.num_events = sum(not link.is_mark for link in links)
    links.sort(key=_time)
    found.links = links
    found.tags.sort(key=_time)
    ops.sort(key=lambda op: op[0])
    _place_strays(links, ops)
    return found


def _link(node: Any, thread: int, place: Place, by_backend: bool) -> Link:
    memory = node.extra_fields
    return Link(node.start_time_ns, memory.ptr, memory.alloc_size, memory.total_allocated, thread, place, by_backend)


def _time(item: Link | Tag) -> int:
    return item.time_ns


def _place_strays(links: list[Link], ops: list[tuple[int, Place]]) -> None:
    """What happened in a thread of the backend, or between two ops, belongs to the op that was begun last."""
    starts = [start for start, _ in ops]
    for link in links:
        if link.place.op == 0 and starts:
            position = max(0, bisect_right(starts, link.time_ns) - 1)
            place = ops[position][1]
            link.place = link.place._replace(op=place.op, where=place.where)
