"""ZeRO-2: between steps a rank keeps the gradient of its shard only.

A unit's full gradient lives from its backward to its reduction and is then freed.
"""

from __future__ import annotations

import torch

from cluster.own.zero1 import Zero1Unit


class Zero2Unit(Zero1Unit):
    """Adds to ZeRO-1: a gradient shard of its own, and a full gradient that comes and goes."""

    grads_held = False

    def make_grad_shard(self) -> torch.Tensor:
        return torch.zeros(self.stop - self.start, dtype=self.grad_dtype, device=self.device)

    def prepare_grad(self) -> None:
        self.grad.allocate()
        super().prepare_grad()

    def reduce_grad(self) -> None:
        self._pending = self.comm.reduce_scatter(self.grad_shard, self.grad.tensor)

    def wait_reduce(self) -> None:
        super().wait_reduce()
        self.grad.release()
