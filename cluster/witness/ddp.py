"""torch's DistributedDataParallel: everything whole, gradients all-reduced in buckets as they become ready.

[Note: buckets] The reducer keeps one flat buffer a bucket, as many bytes as the gradients, from the first step to the
end. Without `gradient_as_bucket_view` each gradient is a tensor of its own, copied into its bucket and back: a second
copy of the gradients, held at rest. With it the gradients are views into the buckets.

[Note: rebuilt buckets] In the first step the buckets are in the reverse order of the parameters; they are made anew, in
the order in which gradients became ready, as the second step begins. From the third on nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cluster.own.optimizer import make_optimizer
from cluster.witness.plain import PlainModel, PlainSteps
from zeroviz.settings import MIB, value_of
from zeroviz.trace import Category


class DDP(PlainSteps):
    """One rank's model and training step."""

    num_warm_steps = 2

    def wrap(self, plain: PlainModel) -> tuple[nn.Module, torch.optim.Optimizer]:
        settings, impl = self.spec.settings, self.spec.impl
        model = DistributedDataParallel(
            plain,
            bucket_cap_mb=value_of(settings, "bucket_nbytes", impl) / MIB,
            gradient_as_bucket_view=value_of(settings, "bucket_view", impl),
        )
        return model, make_optimizer(self.spec.optimizer, list(plain.parameters()))

    def held_tensors(self) -> Iterator[tuple[Tensor, Category]]:
        yield from super().held_tensors()
        # A bucket is seen where it is sent, in the step that was counted.
        yield from ((bucket, Category.BUCKET) for bucket in self.counted.sent)
