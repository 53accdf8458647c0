"""torch's ZeroRedundancyOptimizer beside DistributedDataParallel: ZeRO-1 by whole parameters.

Gradients are all-reduced as under DDP and stay whole; each rank updates the parameters that it owns, uncut, and then
each parameter is broadcast by its owner. That is 2P + P on the wire where a reduce-scatter and an all-gather were
P + P. Its `overlap_with_ddp` refuses gloo ("may meet hangs") and is not offered.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cluster.own.optimizer import class_of
from cluster.witness.ddp import DDP, distributed
from cluster.witness.plain import PlainModel
from zeroviz.schedule import OpKind, Phase

with warnings.catch_warnings():
    # The package scripts its functional optimizers, which nobody asked for, by ways that torch has deprecated.
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.(script|interface)` is", category=DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class ZeroRedundancy(DDP):
    """One rank's model and training step."""

    optimizer: ZeroRedundancyOptimizer

    def wrap(self, plain: PlainModel) -> tuple[nn.Module, torch.optim.Optimizer]:
        optimizer_class, options = class_of(self.spec.optimizer)
        optimizer = ZeroRedundancyOptimizer(plain.parameters(), optimizer_class=optimizer_class, **options)
        optimizer.optim.register_step_post_hook(self._enter_sync)
        return distributed(self.spec, plain), optimizer

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Of the parameters that this rank owns."""
        for state in self.optimizer.optim.state.values():
            yield from ((name, value) for name, value in state.items() if isinstance(value, Tensor))

    def _enter_sync(self, *_: Any) -> None:
        """The owned parameters are updated: the broadcasts follow."""
        self.places.at(Phase.OPTIMIZER, OpKind.SYNC_PARAM.value)
