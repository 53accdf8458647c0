"""What crosses the wire: one collective call as a rank makes it, and the calls of a step summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zeroviz.collectives import CollectiveOp, Group, ring_sent_nbytes


class Collective(NamedTuple):
    """One collective call as a rank made it, among the `num_ranks` ranks of `group`.

    payload_nbytes: the whole array's, padding included. sent_nbytes: what a ring makes this rank send of it.
    """

    op: CollectiveOp
    dtype: str
    num_ranks: int
    payload_nbytes: int
    phase: str
    unit: str
    group: Group = Group.ALL

    @property
    def sent_nbytes(self) -> int:
        return ring_sent_nbytes(self.op, self.payload_nbytes, self.num_ranks)


@dataclass(frozen=True, slots=True)
class WireTotal:
    """All collectives of one op, dtype and group of a step: count, whole-array payload, ring bytes this rank sends."""

    op: CollectiveOp
    dtype: str
    count: int
    payload_nbytes: int
    sent_nbytes: int
    num_ranks: int = 0
    group: Group = Group.ALL

    @property
    def label(self) -> str:
        """`all_gather fp32`, `all_reduce fp32 across groups`."""
        return f"{self.op.value} {self.dtype} {self.group.words}".rstrip()


def sum_by_op(collectives: tuple[Collective, ...]) -> tuple[WireTotal, ...]:
    """Collectives summed by (op, dtype, group); the ring figure is taken of the sum, so it is rounded once."""
    groups: dict[tuple[CollectiveOp, str, int, Group], list[int]] = {}
    for call in collectives:
        groups.setdefault((call.op, call.dtype, call.num_ranks, call.group), []).append(call.payload_nbytes)
    return tuple(
        WireTotal(
            op, dtype, len(payloads), sum(payloads), ring_sent_nbytes(op, sum(payloads), num_ranks), num_ranks, group
        )
        for (op, dtype, num_ranks, group), payloads in groups.items()
    )
