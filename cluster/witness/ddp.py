"""torch's DistributedDataParallel: everything whole, gradients all-reduced in buckets as they become ready.

[Note: buckets] The reducer keeps one flat buffer a bucket, as many bytes as the gradients, from the first step to the
end. Without `gradient_as_bucket_view` each gradient is a tensor of its own, copied into its bucket and back: a second
copy of the gradients, held at rest. With it the gradients are views into the buckets.

[Note: rebuilt buckets] In the first step the buckets are in the reverse order of the parameters; they are made anew, in
the order in which gradients became ready, as the second step begins. From the third on nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cluster.own.optimizer import make_optimizer
from cluster.witness.plain import PlainModel, PlainSteps
from zeroviz.settings import MIB, value_of
from zeroviz.spec import RunSpec
from zeroviz.trace import Category


def distributed(spec: RunSpec, plain: PlainModel) -> DistributedDataParallel:
    """`plain` with its gradients all-reduced. A bucket's size is given only if it was set: the library's own default
    has a smaller first bucket besides."""
    given = spec.settings.bucket_nbytes
    return DistributedDataParallel(
        plain,
        bucket_cap_mb=None if given is None else given / MIB,  # exact: MIB is a power of two
        gradient_as_bucket_view=value_of(spec.settings, "bucket_view", spec.impl),
    )


class DDP(PlainSteps):
    """One rank's model and training step."""

    num_warm_steps = 2

    def wrap(self, plain: PlainModel) -> tuple[nn.Module, torch.optim.Optimizer]:
        return distributed(self.spec, plain), make_optimizer(self.spec.optimizer, list(plain.parameters()))

    def reducing(self, reduces: bool) -> AbstractContextManager[None]:
        if reduces:
            return nullcontext()
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        no_sync: AbstractContextManager[None] = model.no_sync()
        return no_sync

    def held_tensors(self) -> Iterator[tuple[Tensor, Category]]:
        yield from super().held_tensors()
        # A bucket is seen where it is sent, in the step that was counted.
        yield from ((bucket, Category.BUCKET) for bucket in self.counted.sent)
