"""What crosses the wire: one collective call as a rank makes it, and the calls of a step summed."""

from __future__ import annotations

from dataclasses import dataclass

from zeroviz.collectives import CollectiveOp, ring_sent_nbytes


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call as a rank made it, in a group of `num_ranks`.

    payload_nbytes: the whole array's, padding included. sent_nbytes: what a ring makes this rank send of it.
    """

    op: CollectiveOp
    dtype: str
    num_ranks: int
    payload_nbytes: int
    phase: str
    unit: str

    @property
    def sent_nbytes(self) -> int:
        return ring_sent_nbytes(self.op, self.payload_nbytes, self.num_ranks)


@dataclass(frozen=True, slots=True)
class WireTotal:
    """All collectives of one op and dtype of a step: count, whole-array payload, and ring bytes this rank sends."""

    op: CollectiveOp
    dtype: str
    count: int
    payload_nbytes: int
    sent_nbytes: int


def sum_by_op(collectives: tuple[Collective, ...]) -> tuple[WireTotal, ...]:
    """Collectives summed by (op, dtype, group); the ring figure is taken of the sum, so it is rounded once."""
    groups: dict[tuple[CollectiveOp, str, int], list[int]] = {}
    for call in collectives:
        groups.setdefault((call.op, call.dtype, call.num_ranks), []).append(call.payload_nbytes)
    return tuple(
        WireTotal(op, dtype, len(payloads), sum(payloads), ring_sent_nbytes(op, sum(payloads), num_ranks))
        for (op, dtype, num_ranks), payloads in groups.items()
    )
