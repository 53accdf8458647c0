"""FSDP2's optimizer step of a rank that does not walk the step itself.

Forward and backward allocate the same on every rank: FSDP2 pads each chunk to the first rank's. The optimizer sees the
chunk without padding, so moments and temporaries are the rank's own; for these the real optimizer runs on tensors of
the rank's shapes. They are plain ones: what it does to a DTensor, it does to the local part.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cluster.dtypes import TORCH_DTYPE
from cluster.meter import Meter
from cluster.own.optimizer import make_optimizer
from cluster.own.step import STEP_COUNTER
from zeroviz.partition import local_rows
from zeroviz.schedule import OpKind, Phase
from zeroviz.spec import RunSpec
from zeroviz.trace import Category
from zeroviz.witness.fsdp2_groups import parameter_order


class Update:
    """The rank's parameters and their optimizer, without a model."""

    def __init__(self, spec: RunSpec, rank: int, meter: Meter, device: torch.device) -> None:
        self._meter = meter
        self._parameters = []
        for shape in parameter_order(spec):
            local = (local_rows(shape.shape[0], spec.num_shards, rank % spec.num_shards), *shape.shape[1:])
            values = torch.zeros((2, *local), dtype=TORCH_DTYPE[spec.recipe.param], device=device)
            parameter = nn.Parameter(values[0])
            parameter.grad = values[1]
            self._parameters.append(parameter)
        self._optimizer = make_optimizer(spec.optimizer, self._parameters)

    def step(self) -> None:
        self._meter.at(Phase.OPTIMIZER.value, OpKind.OPTIMIZER_STEP.value, "")
        self._optimizer.step()

    def moments(self) -> Iterator[tuple[Tensor, Category]]:
        """The optimizer's state, step counters left out."""
        return ((value, Category.OPTIMIZER_STATE) for name, value in self._state() if name != STEP_COUNTER)

    def held_tensors(self) -> Iterator[tuple[Tensor, Category | None]]:
        """Everything there is; only the moments have a category."""
        yield from ((parameter, None) for parameter in self._parameters)  # the gradient shares the storage
        yield from ((value, None) for name, value in self._state() if name == STEP_COUNTER)
        yield from self.moments()

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for state in self._optimizer.state.values():
            yield from ((name, value) for name, value in state.items() if value is not None)
