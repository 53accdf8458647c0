"""HYBRID_SHARD: ZeRO-3 within a shard group of G ranks, and N/G such groups that are copies of one another.

A unit is gathered and its gradient reduce-scattered among the group's neighbours, over the fast link; what is left of
the gradient, a shard, is then summed across the groups, over the slow one. G = N is ZeRO-3, and G = 1 is DDP with
parameters copied out of their shard. See [Note: two groups] in `zeroviz.schedule`.
"""

from __future__ import annotations

from cluster.own.zero3 import Zero3Unit
from zeroviz.collectives import Group


class HybridUnit(Zero3Unit):
    """Adds to ZeRO-3: the reduction's second half."""

    def wait_reduce(self) -> None:
        """The group's sum is there; it is no mean yet."""
        self.wait()

    def reduce_replicas(self) -> None:
        """Start the sum of the owned part over the ranks that own the same."""
        self._pending = self.comm.all_reduce(self.landing, Group.REPLICA)

    def wait_replicas(self) -> None:
        self.wait()
        self.take_sum()
