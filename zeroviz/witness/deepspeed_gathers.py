"""When DeepSpeed's stage 3 gathers, copies out and frees which parameters: its coordinator, on names and not tensors.

[Note: the coordinator] From the third step on it knows the order in which modules run, forward and backward. Whenever
one begins, its parameters are gathered if they are not there, and then those used next, as many as 5e7 elements
(`prefetch_bucket_size`) and no more than 1e9 whole at a time (`max_live_parameters`). When a module is over its
parameters are freed, unless they are used again within 1e9 elements (`max_reuse_distance`), or were passed over by the
gather ahead because they were still there. So a model of fewer than some 1e9 parameters is gathered once, as forward
begins, and is whole until backward frees it, module by module: what `reshard_after_forward=False` is elsewhere.
(partitioned_param_coordinator.py.)

[Note: a gather] Several parameters are gathered in one call into one buffer, rank by rank, and each is then copied out
of it into a tensor of its own, all of them when the first is used; the buffer goes when the last of them is used. A
single one is gathered where it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from zeroviz.models import NamedShape, Sublayer, SublayerKind
from zeroviz.partition import plan_for
from zeroviz.spec import RunSpec
from zeroviz.witness.deepspeed_parts import is_persistent

PREFETCH_NUMEL = 50_000_000
LIVE_NUMEL = REUSE_NUMEL = 1_000_000_000


class Act(Enum):
    """What the coordinator does."""

    GATHER = "gather"
    COPY_OUT = "copy out"
    FREE_BUFFER = "free the buffer of a gather"
    FREE = "free parameters"


@dataclass(frozen=True, slots=True)
class Deed:
    """One of them, on these parameters in this order."""

    act: Act
    shapes: tuple[NamedShape, ...]


Spot = tuple[int, int, int]
"""(segment, sublayer in it, module in that); -1 for the whole of what comes before it."""


@dataclass
class Deeds:
    """What is done, in order, as a module begins and when it is over, in forward and in backward."""

    forward_begin: dict[Spot, list[Deed]] = field(default_factory=dict)
    forward_end: dict[Spot, list[Deed]] = field(default_factory=dict)
    backward_begin: dict[Spot, list[Deed]] = field(default_factory=dict)
    backward_end: dict[Spot, list[Deed]] = field(default_factory=dict)
    left: list[Deed] = field(default_factory=list)
    """When backward is over: modules whose input takes no gradient have no end of theirs."""


def modules_of(sublayer: Sublayer) -> list[tuple[str, tuple[NamedShape, ...]]]:
    """The modules inside a sublayer in the order in which they run: (name, parameters)."""
    found: dict[str, list[NamedShape]] = {}
    for shape in sublayer.params:
        found.setdefault(shape.name.rpartition(".")[0], []).append(shape)
    modules = [(name, tuple(shapes)) for name, shapes in found.items()]
    # Learned positions are read by the embedding itself: their module never runs.
    return modules[:1] if sublayer.kind is SublayerKind.EMBED else modules


def own_parameters(sublayer: Sublayer) -> tuple[NamedShape, ...]:
    """What a sublayer reads of modules that do not run."""
    return sublayer.params[1:] if sublayer.kind is SublayerKind.EMBED else ()


def deeds_of(spec: RunSpec) -> Deeds:
    """A micro-batch's, once the order is known."""
    coordinator = _Coordinator(spec)
    coordinator.run()
    return coordinator.deeds


@dataclass
class _Use:
    """A module that begins: where it stands, and what it needs."""

    spot: Spot
    shapes: tuple[NamedShape, ...]
    is_forward: bool


class _Coordinator:
    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self.deeds = Deeds()
        self._uses = list(_uses(spec))
        before = list(accumulate((sum(shape.numel for shape in use.shapes) for use in self._uses), initial=0))
        self._numel_before = before
        self._positions: dict[str, list[int]] = {}
        for position, use in enumerate(self._uses):
            for shape in use.shapes:
                self._positions.setdefault(shape.name, []).append(position)
        # From here on only of parameters that are not whole for good.
        self._queue = deque(
            (shape, position) for position, use in enumerate(self._uses) for shape in sorted(use.shapes, key=self._id)
        )
        self._there: set[str] = set()
        self._in_flight: dict[str, _Gather] = {}
        self._active: dict[str, set[Spot]] = {}
        self._fetched_for: dict[str, int] = {}
        self._num_live = 0

    def run(self) -> None:
        deeds = self.deeds
        position = 0
        for spot, begins, is_forward in _order(self._spec):
            where = (
                (deeds.forward_begin if begins else deeds.forward_end)
                if is_forward
                else (deeds.backward_begin if begins else deeds.backward_end)
            )
            log = where.setdefault(spot, [])
            if begins:
                self._fetch(position, log)
                position += 1
            else:
                shapes = _shapes_at(self._spec, spot)
                self._release(spot, shapes, position, log)
        left = [shape for shape in self._all() if shape.name in self._there]
        self._free(left, deeds.left)

    def _all(self) -> Iterator[NamedShape]:
        seen: set[str] = set()
        for use in self._uses:
            for shape in use.shapes:
                if shape.name not in seen:
                    seen.add(shape.name)
                    yield shape

    def _id(self, shape: NamedShape) -> int:
        return self._positions[shape.name][0]

    def _fetch(self, position: int, log: list[Deed]) -> None:
        use = self._uses[position]
        needed = [shape for shape in use.shapes if not is_persistent(self._spec, shape)]
        self._gather([shape for shape in needed if not self._has(shape)], log)
        for shape in needed:
            self._active.setdefault(shape.name, set()).add(use.spot)
            if (gather := self._in_flight.pop(shape.name, None)) is not None:
                if gather.is_untouched:
                    self._there |= {each.name for each in gather.shapes}
                gather.take(shape, log)
        wanted = {shape.name for shape in use.shapes if self._fetched_for.get(shape.name, -1) < position}
        while self._queue and wanted:
            shape, at = self._queue.popleft()
            self._fetched_for[shape.name] = at
            wanted.discard(shape.name)
        ahead: dict[str, NamedShape] = {}
        numel, most = 0, min(LIVE_NUMEL - self._num_live, PREFETCH_NUMEL)
        while self._queue and numel < most:
            shape, at = self._queue.popleft()
            self._fetched_for[shape.name] = max(self._fetched_for.get(shape.name, -1), at)
            if not is_persistent(self._spec, shape) and not self._has(shape) and shape.name not in ahead:
                ahead[shape.name] = shape
                numel += shape.numel
        self._gather(list(ahead.values()), log)

    def _has(self, shape: NamedShape) -> bool:
        return shape.name in self._there or shape.name in self._in_flight

    def _gather(self, shapes: list[NamedShape], log: list[Deed]) -> None:
        if not shapes:
            return
        gather = _Gather(tuple(sorted(shapes, key=self._id)))
        for shape in gather.shapes:
            self._in_flight[shape.name] = gather
            self._num_live += shape.numel
        log.append(Deed(Act.GATHER, gather.shapes))

    def _release(self, spot: Spot, shapes: Sequence[NamedShape], position: int, log: list[Deed]) -> None:
        """position: of the next module to begin."""
        freed = []
        for shape in shapes:
            self._active.get(shape.name, set()).discard(spot)
            if is_persistent(self._spec, shape) or shape.name not in self._there or self._active[shape.name]:
                continue
            if self._fetched_for.get(shape.name, -1) > position or self._is_used_soon(shape, position):
                continue
            freed.append(shape)
        self._free(freed, log)

    def _is_used_soon(self, shape: NamedShape, position: int) -> bool:
        uses = self._positions[shape.name]
        following = bisect_left(uses, position)
        if following == len(uses):
            return False
        return self._numel_before[uses[following]] - self._numel_before[position] < REUSE_NUMEL

    def _free(self, shapes: Sequence[NamedShape], log: list[Deed]) -> None:
        for shape in shapes:
            self._there.discard(shape.name)
            self._num_live -= shape.numel
            log.append(Deed(Act.FREE, (shape,)))


class _Gather:
    """One call, until all its parameters are taken."""

    def __init__(self, shapes: tuple[NamedShape, ...]) -> None:
        self.shapes = shapes
        self._waiting = {shape.name for shape in shapes}

    @property
    def is_untouched(self) -> bool:
        """Whether none of its parameters was taken yet."""
        return len(self._waiting) == len(self.shapes)

    def take(self, shape: NamedShape, log: list[Deed]) -> None:
        """The parameter is needed now; with the first of them all are there."""
        coalesced = len(self.shapes) > 1
        if coalesced and self.is_untouched:
            log.append(Deed(Act.COPY_OUT, self.shapes))
        self._waiting.discard(shape.name)
        if coalesced and not self._waiting:
            log.append(Deed(Act.FREE_BUFFER, self.shapes))


def _shapes_at(spec: RunSpec, spot: Spot) -> tuple[NamedShape, ...]:
    segment, sublayer, module = spot
    if sublayer < 0:
        return ()
    found = plan_for(spec).segments[segment].sublayers[sublayer]
    return own_parameters(found) if module < 0 else modules_of(found)[module][1]


def _order(spec: RunSpec) -> Iterator[tuple[Spot, bool, bool]]:
    """(spot, begins, in forward) of a step: each module begins and, where it has an end of its own, ends."""
    segments = plan_for(spec).segments
    yield (-1, -1, -1), True, True
    for number, segment in enumerate(segments):
        yield (number, -1, -1), True, True
        for place, sublayer in enumerate(segment.sublayers):
            yield (number, place, -1), True, True
            for index in range(len(modules_of(sublayer))):
                yield (number, place, index), True, True
                yield (number, place, index), False, True
            yield (number, place, -1), False, True
    yield (-1, -1, -1), True, False
    for number, segment in reversed(list(enumerate(segments))):
        yield (number, -1, -1), True, False
        for place, sublayer in reversed(list(enumerate(segment.sublayers))):
            yield (number, place, -1), True, False
            ends = sublayer.kind is not SublayerKind.EMBED
            for index in reversed(range(len(modules_of(sublayer)))):
                yield (number, place, index), True, False
                if ends:
                    yield (number, place, index), False, False
            if ends:
                yield (number, place, -1), False, False


def _uses(spec: RunSpec) -> Iterator[_Use]:
    for spot, begins, is_forward in _order(spec):
        if begins:
            yield _Use(spot, _shapes_at(spec, spot), is_forward)
