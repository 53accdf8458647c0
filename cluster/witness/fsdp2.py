"""FSDP2: torch's `fully_shard` on the sublayers of `cluster.model`, one group a unit, as its users write it.

Each unit that is one segment is a group; what is left (a tied embedding with its head, or the whole model under unit
`model`) is the root's. Under ZeRO-3 every group, the root's included, is freed after forward and gathered again
(`reshard_after_forward=True`); under SHARD_GRAD_OP none is. The gradient is dropped when the next step begins, as in
most training loops, so it is held at rest and made anew in backward.

FSDP2 cuts each parameter by rows, each into N pieces of as many rows, so padding is a parameter's and not a unit's, and
the moments of a rank's rows have no padding at all: ranks differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from cluster.collectives import Collectives
from cluster.dtypes import TORCH_DTYPE
from cluster.link import Link
from cluster.meter import Meter
from cluster.model import SublayerModule, build_sublayer, initial_value
from cluster.own.optimizer import make_optimizer
from cluster.own.step import STEP_COUNTER
from cluster.text import load_batch
from cluster.witness.chunks import local_part
from cluster.witness.marked import ZERO_GRAD, Chain, Marks, Segment
from zeroviz.partition import plan_for
from zeroviz.schedule import OpKind, Phase
from zeroviz.spec import RunSpec
from zeroviz.trace import Category


class FSDP2:
    """One rank's model and training step."""

    def __init__(self, spec: RunSpec, comm: Collectives, meter: Meter, device: torch.device, mesh: DeviceMesh) -> None:
        """mesh: of one dimension, the ranks of `comm`."""
        self.spec, self.comm, self.device = spec, comm, device
        self.link = Link(meter)
        self._marks = Marks(meter, comm)
        self._num_batches = 0
        self.model = self._build(mesh)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_Gather(comm, meter))
                module.set_custom_reduce_scatter(_Reduce(comm, meter))
        self._parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(spec.optimizer, self._parameters)

    def _build(self, mesh: DeviceMesh) -> Chain:
        """The sharded model. Whole parameters exist one group at a time."""
        spec, plan = self.spec, plan_for(self.spec)
        uses = [segment.unit for segment in plan.segments]
        reshard = spec.strategy.reshards_after_forward
        values: dict[str, nn.Parameter] = {}  # by name: a tied one is used twice
        segments = []
        for planned in plan.segments:
            modules = [build_sublayer(sublayer, spec.model) for sublayer in planned.sublayers]
            for module in modules:
                self._fill(module, values)
            is_group = len(plan.units) > 1 and uses.count(planned.unit) == 1
            name = plan.units[planned.unit].name
            segments.append(Segment(name, modules, is_group=is_group, marks=self._marks))
            if is_group:
                fully_shard(segments[-1], mesh=mesh, reshard_after_forward=reshard)
        chain = Chain(segments, self._marks)
        fully_shard(chain, mesh=mesh, reshard_after_forward=reshard)
        return chain

    def _fill(self, module: SublayerModule, values: dict[str, nn.Parameter]) -> None:
        model, dtype = self.spec.model, TORCH_DTYPE[self.spec.recipe.param]
        for name in module.slots:
            if name not in values:
                shape = next(shape for shape in model.params if shape.name == name)
                values[name] = nn.Parameter(initial_value(model, shape, self.spec.seed).to(self.device, dtype))
            module.install(name, values[name])

    def step(self) -> float:
        """One training step; returns this rank's loss, the mean over its tokens."""
        marks = self._marks
        marks.at(Phase.FORWARD, ZERO_GRAD)
        self.optimizer.zero_grad()
        marks.at(Phase.FORWARD, OpKind.LOAD_BATCH.value)
        batch = load_batch(self.spec, self.comm.rank, self._num_batches, self.device)
        self._num_batches += 1
        marks.tag(batch.tensors(), Category.INPUT)
        loss = self.model(batch)
        value = loss.item()
        torch.autograd.backward(loss)
        marks.tag(self._sharded_grads(), Category.SHARDED_GRAD)
        marks.at(Phase.BACKWARD, OpKind.DROP_BATCH.value)
        del loss, batch
        marks.at(Phase.OPTIMIZER, OpKind.OPTIMIZER_STEP.value)
        self.optimizer.step()
        return value

    def held_tensors(self) -> Iterator[tuple[Tensor, Category]]:
        """Everything the rank holds between steps."""
        yield from ((local_part(parameter), Category.SHARDED_PARAM) for parameter in self._parameters)
        yield from ((grad, Category.SHARDED_GRAD) for grad in self._sharded_grads())
        for name, value in self._optimizer_state():
            if name != STEP_COUNTER:
                yield value, Category.OPTIMIZER_STATE

    def step_counters(self) -> Iterator[Tensor]:
        """The optimizer's step counters, one scalar a parameter, which no category counts."""
        return (value for name, value in self._optimizer_state() if name == STEP_COUNTER)

    def padding_nbytes(self) -> int:
        """How many bytes of what is held at rest are padding: rows that make the pieces of a parameter alike."""
        held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor, _ in self.held_tensors()}
        return sum(held.values()) - sum(tensor.nbytes for tensor, _ in self.held_tensors())

    def _sharded_grads(self) -> Iterator[Tensor]:
        return (local_part(parameter.grad) for parameter in self._parameters if parameter.grad is not None)

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        for state in self.optimizer.state.values():
            yield from ((name, local_part(value)) for name, value in state.items() if value is not None)


class _Gather(AllGather):
    """fully_shard's all-gather, over our seam and waited for at once."""

    def __init__(self, comm: Collectives, meter: Meter) -> None:
        self._comm, self._meter = comm, meter

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self._meter.tag(buffer, Category.ALL_GATHER_BUFFER)
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._comm.all_gather(output_tensor, input_tensor).wait()


class _Reduce(ReduceScatter):
    """fully_shard's reduce-scatter, likewise. Its output becomes the gradient, and is tagged so after backward."""

    def __init__(self, comm: Collectives, meter: Meter) -> None:
        self._comm, self._meter = comm, meter

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self._meter.tag(buffer, Category.REDUCE_SCATTER_BUFFER)
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._comm.reduce_scatter(output_tensor, input_tensor, average=op == dist.ReduceOp.AVG).wait()
