"""The residual table as data: predicted, measured, difference and cause, category by category, each sum with what of it
nobody can explain. Every view of a comparison shows these.

"As on NCCL" is what the device holds for the step, wherever it runs. "As here" is all that this machine's allocator
gave out at its own peak: the same, what lies on the host, the backend's copies, kernels' scratch and step counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from zeroviz.category import CATEGORY_ORDER
from zeroviz.causes import is_unexplained
from zeroviz.compare import Comparison, Figure, MemoryRow, Moment, OpRow, WireRow, link_rows, where_text
from zeroviz.rank_trace import alike
from zeroviz.trace import Trace

ONE_MEMORY = "host and device are one memory here"


class Held(Enum):
    """What a residual table is of."""

    REST = "at rest"
    """On the device between two steps."""
    HOST = "at rest on the host"
    """In the host's memory between two steps: what is offloaded."""
    NCCL = "peak as on NCCL"
    """On the device where it holds most."""
    HERE = "peak as here"
    """Given out by this machine's allocator where that is most; read from the allocator's own events."""


@dataclass(frozen=True, slots=True)
class Residual:
    """One table of one rank. `total` is the sum; unexplained_nbytes what in the rows differs without a cause, whichever
    way. step_counter_nbytes: in the sum of HERE, on both sides, and in no row."""

    held: Held
    rows: tuple[MemoryRow, ...]
    total: MemoryRow
    unexplained_nbytes: int
    step_counter_nbytes: int = 0

    @property
    def joins_host(self) -> bool:
        """Whether what is offloaded stands among what the device holds: "as here", where the device is the CPU."""
        return self.held is Held.HERE and any(row.category and row.category.on_host for row in self.rows)

    @property
    def causes(self) -> tuple[tuple[str, tuple[MemoryRow, ...]], ...]:
        """Each cause with the rows that it explains, in their order."""
        found: dict[str, list[MemoryRow]] = {}
        for row in self.rows:
            if row.cause:
                found.setdefault(row.cause, []).append(row)
        return tuple((cause, tuple(rows)) for cause, rows in found.items())


@dataclass(frozen=True, slots=True)
class OpNote:
    """Ops that are not as predicted for one and the same cause: how many, by how much at most, and where first."""

    figure: Figure
    cause: str
    num_ops: int
    largest: int
    place: str


def senders(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Ranks that send the same and copy the same, by the first of them."""
    known: dict[tuple[int, int], list[range]] = {}
    alike_in: dict[object, list[range]] = {}
    for ranks, rank in alike(trace.ranks):
        calls = id(rank.collectives), id(rank.transfers)
        if calls not in known:
            copies = tuple((row.direction, row.dtype, row.predicted) for row in link_rows(rank, rank))
            known[calls] = alike_in.setdefault((rank.wire(), copies), [])
        known[calls].append(ranks)
    return {stretches[0].start: tuple(chain.from_iterable(stretches)) for stretches in alike_in.values()}


def alone(trace: Trace, groups: Iterable[Sequence[int]], sending: Iterable[int] | None = None) -> Comparison:
    """A trace that has nothing beside it, in the rows of a comparison: what is measured is what is predicted.

    groups: ranks that hold alike, of which the first has rows. sending: ranks that have rows for what they send, if not
    the same. `compare` would find the same op by op and rank by rank, of which there may be very many.
    """
    memory: list[MemoryRow] = []
    firsts = [trace.ranks[group[0]] for group in groups]
    for rank in firsts:
        rest = {category: nbytes for category, nbytes in rank.rest.items() if nbytes}
        for moment, held in ((Moment.REST, rest), (Moment.PEAK, rank.peak().by_category)):
            order = [category for category in CATEGORY_ORDER if category in held]
            memory += [MemoryRow(rank.rank, moment, c, held[c], held[c], "") for c in order]
            memory.append(MemoryRow(rank.rank, moment, None, sum(held.values()), sum(held.values()), ""))
    ranks = firsts if sending is None else [trace.ranks[number] for number in sending]
    wire = [WireRow(rank.rank, total, total, "") for rank in ranks for total in rank.wire()]
    link = [row for rank in ranks for row in link_rows(rank, rank)]
    return Comparison(tuple(memory), tuple(wire), (), link=tuple(link))


def residuals(comparison: Comparison, rank: int, step_counter_nbytes: int) -> tuple[Residual, ...]:
    """The tables of a rank: at rest, on the host if anything is, at the peak, and as here where that was read."""
    rest = comparison.of_rank(rank, Moment.REST)
    found = [_residual(Held.REST, (row for row in rest if row.category and row.category.on_device), rank, Moment.REST)]
    if on_host := [row for row in rest if row.category and row.category.on_host]:
        found.append(_residual(Held.HOST, on_host, rank, Moment.REST))
    for held, moment in ((Held.NCCL, Moment.PEAK), (Held.HERE, Moment.MACHINE_PEAK)):
        rows = comparison.of_rank(rank, moment)
        if rows:
            *parts, total = rows
            unexplained = comparison.unexplained_nbytes(rank, moment)
            counters = step_counter_nbytes if held is Held.HERE else 0
            found.append(Residual(held, tuple(parts), total, unexplained, counters))
    return tuple(found)


def op_notes(comparison: Comparison, rank: int) -> tuple[OpNote, ...]:
    """The rank's ops that differ, folded by figure and cause, in the order of the first of each."""
    alike: dict[tuple[Figure, str], list[OpRow]] = {}
    for row in comparison.ops_of(rank):
        alike.setdefault((row.figure, row.cause), []).append(row)
    return tuple(
        OpNote(
            figure,
            cause,
            len(rows),
            max((row.difference for row in rows), key=abs),
            where_text(rows[0].phase, rows[0].op, rows[0].unit),
        )
        for (figure, cause), rows in alike.items()
    )


def _residual(held: Held, rows: Iterable[MemoryRow], rank: int, moment: Moment) -> Residual:
    parts = tuple(rows)
    causes = "; ".join(dict.fromkeys(row.cause for row in parts if row.cause))
    predicted, measured = sum(row.predicted for row in parts), sum(row.measured for row in parts)
    total = MemoryRow(rank, moment, None, predicted, measured, causes)
    unexplained = sum(abs(row.difference) for row in parts if is_unexplained(row.cause))
    return Residual(held, parts, total, unexplained)
