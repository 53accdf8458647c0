"""ZeRO-3 (FULL_SHARD): between uses a rank keeps the parameters of its shard only.

A unit is gathered before its forward and again before its backward, and freed after each: with the gradient's
reduce-scatter 3P on the wire. SHARD_GRAD_OP is the same unit under another schedule, which gathers it once.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from cluster.own.zero2 import Zero2Unit


class Zero3Unit(Zero2Unit):
    """Adds to ZeRO-2: a parameter shard of its own, and full parameters that come and go."""

    params_held = False

    def make_param_shard(self) -> torch.Tensor:
        return torch.zeros(self.stop - self.start, dtype=self.param_dtype, device=self.shard_device)

    def unshard(self) -> None:
        """Allocate the full parameters and start the gather that fills them."""
        self.param.allocate()
        shard = self.param_shard
        # See [Note: storage resize]. The write may happen in the backend's thread, any time until the wait is over, so
        # the version counter is kept until then: `close` waits first and gives the counter back last.
        self._gathering = ExitStack()
        self._gathering.enter_context(torch.autograd._unsafe_preserve_version_counter(self.param.tensor))
        if self.spec.offload.moves_params:
            shard = self.param.tensor[self.start : self.stop]
            self.link.up_into(shard, self.param_shard, self.unit.name)
        self._gathering.callback(self.comm.all_gather(self.param.tensor, shard, self.within).wait)

    def wait_unshard(self) -> None:
        self._gathering.close()

    def reshard(self) -> None:
        self.param.release()
