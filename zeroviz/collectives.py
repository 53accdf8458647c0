"""What a collective sends: payload, and the bytes each rank puts on the wire with a ring."""

from __future__ import annotations

from zeroviz.members import Members


class CollectiveOp(Members):
    """A collective and how often each payload byte leaves a rank, times (n-1)/n.

    Source: nccl-tests, doc/PERFORMANCE.md: bus-bandwidth factors of a ring.
    """

    ALL_REDUCE = "all_reduce"
    """2: a reduce-scatter, then an all-gather."""
    ALL_GATHER = "all_gather"
    """1."""
    REDUCE_SCATTER = "reduce_scatter"
    """1."""
    BROADCAST = "broadcast"
    """1: passed on from rank to rank, and not by the last; the mean over ranks."""

    @property
    def ring_passes(self) -> int:
        return 2 if self is CollectiveOp.ALL_REDUCE else 1


class Group(Members):
    """Which ranks take part in a collective."""

    ALL = "all"
    """Every rank of the run."""
    SHARD = "shard"
    """The ranks that hold one copy of the states together: neighbours, rank // G alike."""
    REPLICA = "replica"
    """The ranks that hold the same shard, one of each shard group: rank % G alike."""

    @property
    def words(self) -> str:
        """How a table calls it; nothing where there is only one group."""
        return {"all": "", "shard": "in group", "replica": "across groups"}[self.value]


def ring_sent_nbytes(op: CollectiveOp, payload_nbytes: int, num_ranks: int) -> int:
    """Bytes one rank sends in a ring: passes * (n-1)/n * payload, the payload being the whole array's bytes.

    Rounded up where n does not divide it: some rank's chunk is the longer one. 0 for one rank.
    """
    return -(-op.ring_passes * (num_ranks - 1) * payload_nbytes // num_ranks)
