"""ZeRO-1: each rank updates 1/N of the parameters, so master copy and moments exist only for that shard.

The gradient is reduce-scattered to its owners and the updated shards are all-gathered: 2P on the wire, as DDP's
all-reduce. The naive form all-reduces the gradient and then uses one slice of it: 3P.
"""

from __future__ import annotations

import torch

from cluster.own.ddp import DDPUnit
from zeroviz.spec import Zero1Form


class Zero1Unit(DDPUnit):
    """Adds to DDP: shards that are views of the whole buffers."""

    def make_param_shard(self) -> torch.Tensor:
        return self.param.tensor[self.start : self.stop]

    def make_grad_shard(self) -> torch.Tensor:
        return self.grad.tensor[self.start : self.stop]

    def reduce_grad(self) -> None:
        if self.spec.zero1_form is Zero1Form.ALL_REDUCE:
            self._pending = self.comm.all_reduce(self.grad.tensor)
        else:
            # In place: the sum of the owned slice lands in the slice; the other slices are spent.
            self._pending = self.comm.reduce_scatter(self.grad_shard, self.grad.tensor, self.within)

    def sync_param(self) -> None:
        """Bring every rank the shards the others updated, in place."""
        self._pending = self.comm.all_gather(self.param.tensor, self.param_shard, self.within)

    def wait_sync(self) -> None:
        self.wait()
