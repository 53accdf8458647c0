"""ZeRO-2: between steps a rank keeps the gradient of its shard only.

A unit's full gradient lives from its backward to its reduction and is then freed.
"""

from __future__ import annotations

import torch

from cluster.link import HOST
from cluster.own.zero1 import Zero1Unit


class Zero2Unit(Zero1Unit):
    """Adds to ZeRO-1: a gradient shard of its own, and a full gradient that comes and goes."""

    grads_held = False
    holds_sum = False
    """Whether the gradient shard holds the sum of earlier micro-batches of this step."""

    def make_grad_shard(self) -> torch.Tensor:
        return torch.zeros(self.stop - self.start, dtype=self.grad_dtype, device=self.shard_device)

    @property
    def shard_device(self) -> torch.device:
        """Where shards that are tensors of their own are kept."""
        return HOST if self.spec.offload.moves_params else self.device

    @property
    def landing(self) -> torch.Tensor:
        """Where the reduced gradient arrives: in its shard, or in its slice of the full buffer if it must be added to
        the shard, or taken down to the host."""
        adds_up = self.spec.accumulation > 1 and self.spec.reduces_each
        direct = not adds_up and not self.spec.offload.moves_params
        return self.grad_shard if direct else self.grad.tensor[self.start : self.stop]

    def prepare_grad(self) -> None:
        self.grad.allocate()
        super().prepare_grad()

    def reduce_grad(self) -> None:
        self._pending = self.comm.reduce_scatter(self.landing, self.grad.tensor, self.within)

    def take_sum(self) -> None:
        landed = self.landing
        landed.div_(self.comm.num_ranks)
        if landed is not self.grad_shard:
            self._add_to_shard(landed)
        self.grad.release()

    def _add_to_shard(self, landed: torch.Tensor) -> None:
        if not self.spec.offload.moves_params:
            self.grad_shard.add_(landed) if self.holds_sum else self.grad_shard.copy_(landed)
        elif self.holds_sum:
            self.grad_shard.add_(self.link.down(landed, self.unit.name))
        else:
            self.link.down_into(self.grad_shard, landed, self.unit.name)
        self.holds_sum = True

    def give_grad(self) -> None:
        super().give_grad()
        self.holds_sum = False  # the next step begins anew
