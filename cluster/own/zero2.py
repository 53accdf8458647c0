"""ZeRO-2: between steps a rank keeps the gradient of its shard only.

A unit's full gradient lives from its backward to its reduction; its shard from there to the next step's beginning.
"""

from __future__ import annotations

import torch

from cluster.link import HOST
from cluster.own.buffer import FlatBuffer
from cluster.own.zero1 import Zero1Unit


class Zero2Unit(Zero1Unit):
    """Adds to ZeRO-1: a gradient shard of its own, and a full gradient that comes and goes."""

    holds_sum = False
    """Whether the gradient shard holds the sum of earlier micro-batches of this step."""

    def make_grad_shard(self) -> torch.Tensor:
        numel = self.stop - self.start
        self.shard = FlatBuffer(numel, self.grad_dtype, self.shard_device, self.meter, self.places.grad)
        self.drop_grad()
        return self.shard.tensor

    @property
    def shard_device(self) -> torch.device:
        """Where shards that are tensors of their own are kept."""
        return HOST if self.spec.offload.moves_params else self.device

    @property
    def landing(self) -> torch.Tensor:
        """Where the reduced gradient arrives: in its shard, or in its part of the full buffer if it must be added to
        the shard, or taken down to the host."""
        direct = not self.holds_sum and not self.spec.offload.moves_params
        return self.grad_shard if direct else self.grad.tensor[self.start : self.stop]

    def drop_grad(self) -> None:
        if self.spec.drops_grad:
            self.shard.release()

    def reduce_grad(self) -> None:
        if self.spec.drops_grad and not self.holds_sum:
            self.shard.allocate()
        self._pending = self.comm.reduce_scatter(self.landing, self.grad.tensor, self.within)

    def take_sum(self) -> None:
        landed = self.landing
        landed.div_(self.comm.num_ranks)
        if landed is not self.grad_shard:
            self._add_to_shard(landed)
        self.holds_sum = True
        self.grad.release()

    def _add_to_shard(self, landed: torch.Tensor) -> None:
        if not self.spec.offload.moves_params:
            self.grad_shard.add_(landed)
        elif self.holds_sum:
            self.grad_shard.add_(self.link.down(landed, self.unit.name))
        else:
            self.link.down_into(self.grad_shard, landed, self.unit.name)

    def hand_over_grad(self) -> None:
        super().hand_over_grad()
        self.holds_sum = False  # the next step begins anew
