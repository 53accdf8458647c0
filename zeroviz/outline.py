"""The outline of a step: its schedule as tokens of equal changes, and the stretches of it that repeat.

An outline knows the order of things and which of them are alike, but no size: it is the same for every batch, seq,
number of ranks and precision. `zeroviz.peak` puts bytes on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from zeroviz.models import SublayerKind
from zeroviz.partition import Place, Plan, Segment, Unit, buffers_for, plan_for
from zeroviz.schedule import Op, OpKind, Order, last_wait, schedule

MAX_PERIOD = 64  # tokens; blocks cut into layers repeat after 16. Longer patterns are walked through, repeats and all


@dataclass(frozen=True, slots=True)
class Token:
    """What fixes which bytes an op changes, or a sublayer within a FORWARD or BACKWARD: equal tokens, equal changes.

    slot: which of the outline's distinct unit sizes; 0 where no unit's buffers are touched.
    sublayer: what is computed, and its place in the segment. dry: without a graph, in a checkpointed region.
    released: first and last sublayer of a segment that is over, where the caller then lets something go.
    half: of a sublayer's backward, what comes before its unit's gradient buffer is needed (0), or after (1); None where
    the buffer is there. begins: the op allocates a gradient: BACKWARD the unit's buffer, and the first REDUCE_GRAD of a
    unit in the step the shard; with parameters on the host, where that stays, the first wait of a unit in the step.
    """

    op: OpKind
    slot: int = 0
    sublayer: tuple[SublayerKind, Place] | None = None
    dry: bool = False
    released: tuple[SublayerKind, SublayerKind] | None = None
    half: int | None = None
    begins: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """`count` repetitions of `period` tokens, the first at `start`; a single token is a run of 1 x 1."""

    start: int
    period: int
    count: int


@dataclass(frozen=True)
class Outline:
    """The step in tokens. `sequence` indexes `tokens`; `ops` says of each of its positions which op that is part of.

    slot_of: each buffer's slot. sizes: how many buffers there are of each slot's size, which is (elements, slices of an
    update). samples: one buffer of each slot.
    """

    plan: Plan
    slot_of: tuple[int, ...]
    sizes: Counter[tuple[int, int]]
    samples: tuple[Unit, ...]
    tokens: tuple[Token, ...]
    sequence: tuple[int, ...]
    ops: tuple[Op, ...]

    def where(self, position: int) -> tuple[str, str, str]:
        """(phase, op, unit) of a position of `sequence`, as events have it."""
        op = self.ops[position]
        return op.phase.label, op.kind.label, "" if op.unit is None else self.plan.units[op.unit].name

    @cached_property
    def wheres(self) -> tuple[tuple[str, str, str], ...]:
        """`where` of every position."""
        return tuple(map(self.where, range(len(self.sequence))))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """What repeats: the whole of `sequence`, covered by runs."""
        return tuple(_runs(self.sequence))


@lru_cache(maxsize=1024)
def outline(order: Order) -> Outline:
    """The outline of every spec with this order, whatever its batch, seq, ranks and precision."""
    spec = order.spec
    plan = plan_for(spec)
    buffers = buffers_for(spec)
    sizes_of = [(buffer.numel, 1 if spec.optimizer.steps_together else buffer.num_slices) for buffer in buffers]
    sizes = Counter(sizes_of)
    slots = {size: slot for slot, size in enumerate(sizes)}
    slot_of = tuple(slots[size] for size in sizes_of)
    samples = tuple(buffers[slot_of.index(slot)] for slot in slots.values())
    number: dict[Token, int] = {}
    known: dict[Hashable, list[int]] = {}  # of a segment's tokens
    sequence: list[int] = []
    ops: list[Op] = []
    reduced: set[int | None] = set()
    has_buffer: set[int | None] = set()
    ends = last_wait(spec.strategy)
    makes_shard = OpKind.REDUCE_GRAD if spec.drops_grad else ends  # or fills the one that stays
    for op in schedule(spec):
        if op.kind is ends and spec.strategy.shards_grad:
            has_buffer.discard(op.unit)
        if op.segment is not None:
            assert op.unit is not None
            begins = op.kind is OpKind.BACKWARD and op.unit not in has_buffer and not spec.strategy.has_whole_buffer
            has_buffer |= {op.unit} if begins else set()
            segment, slot = plan.segments[op.segment], slot_of[op.unit] if begins else None
            alike = (op.kind, segment.places, segment.region is None, segment.starts_region, segment.ends_region, slot)
            numbers = known.get(alike)
            if numbers is None:
                tokens = segment_tokens(op.kind, segment, slot)
                numbers = known[alike] = [number.setdefault(token, len(number)) for token in tokens]
        else:
            begins = spec.strategy.shards_grad and op.kind is makes_shard and op.unit not in reduced
            reduced |= {op.unit} if begins else set()
            token = Token(op.kind, 0 if op.unit is None else slot_of[op.unit], begins=begins)
            numbers = [number.setdefault(token, len(number))]
        sequence += numbers
        ops += [op] * len(numbers)
    return Outline(plan, slot_of, sizes, samples, tuple(number), tuple(sequence), tuple(ops))


def segment_tokens(op: OpKind, segment: Segment, begins: int | None = None) -> list[Token]:
    """One token a sublayer, in the order of the pass; after them, what the caller lets go. begins: the slot of the unit
    whose gradient buffer is allocated on the way."""
    first, last = segment.sublayers[0].kind, segment.sublayers[-1].kind
    buffer = [] if begins is None else [Token(op, begins, begins=True)]
    if first is SublayerKind.BARE:
        return buffer
    dry = op is OpKind.FORWARD and segment.region is not None
    tokens = [Token(op, sublayer=sublayer, dry=dry) for sublayer in segment.places]
    if op is OpKind.BACKWARD:
        tokens.reverse()
    if buffer:
        tokens = [replace(tokens[0], half=0), *buffer, replace(tokens[0], half=1), *tokens[1:]]
    if op is OpKind.BACKWARD or (dry and not segment.starts_region) or (op is OpKind.RECOMPUTE and segment.ends_region):
        tokens.append(Token(op, released=(first, last)))
    return tokens


def _runs(sequence: Sequence[int]) -> Iterator[Run]:
    """Cover the sequence with runs, at each position the one that reaches furthest.

    Two repetitions are visited anyway, so a run has at least three.
    """
    position = 0
    while position < len(sequence):
        best = Run(position, 1, 1)
        for period in range(1, min(MAX_PERIOD, (len(sequence) - position) // 3) + 1):
            if best.count > 1 and period % best.period == 0:
                continue  # a multiple of a period reaches no further
            stop = position
            while stop + period < len(sequence) and sequence[stop] == sequence[stop + period]:
                stop += 1
            count = (stop - position) // period + 1
            if count >= 3 and count * period > best.count * best.period:
                best = Run(position, period, count)
        yield best
        position += best.count * best.period
