"""FSDP2: torch's `fully_shard` on the sublayers of `cluster.model`, one group a unit, as its users write it.

Each unit that is one segment is a group; what is left (a tied embedding with its head, or the whole model under unit
`model`) is the root's. Under ZeRO-3 every group, the root's included, is freed after forward and gathered again
(`reshard_after_forward=True`); under SHARD_GRAD_OP none is. The gradient is dropped when the next step begins, as in
most training loops, so it is held at rest and made anew in backward.

FSDP2 cuts each parameter by rows, each into N pieces of as many rows, so padding is a parameter's and not a unit's, and
the moments of a rank's rows have no padding at all: ranks differ.

[Note: groups of ranks] Under HYBRID_SHARD fully_shard gets a mesh of two dimensions, (replicas, shard group). Under
`reshard_ranks` G it gets an int, frees a unit down to one part in G, and makes a mesh of its own for the groups of G;
the one that it takes is made here instead, once for all units and with a bound on its waits. The all-reduce across
replicas is a call of the library's own, not to be replaced; a hook behind it (`set_all_reduce_hook`) lets the seam
record it.

[Note: micro-batches] fully_shard reduces in every micro-batch and adds up shards, unless it is told not to
(`set_requires_gradient_sync`): then whole gradients stay, on every rank, up to the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard as library
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from cluster.collectives import Collectives, LetGo, Members
from cluster.dtypes import TORCH_DTYPE
from cluster.link import Link
from cluster.meter import Meter
from cluster.model import SublayerModule, build_sublayer, initial_value
from cluster.own.optimizer import make_optimizer
from cluster.own.step import STEP_COUNTER
from cluster.text import load_batch
from cluster.witness.chunks import local_part
from cluster.witness.marked import Chain, Marks, Segment
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.partition import plan_for
from zeroviz.schedule import OpKind, Phase
from zeroviz.spec import RunSpec
from zeroviz.trace import Category
from zeroviz.witness.graph import ZERO_GRAD


@dataclass(frozen=True)
class Meshes:
    """mesh: what fully_shard gets. resharded: the groups of `reshard_ranks`. See [Note: groups of ranks]."""

    mesh: DeviceMesh
    resharded: HSDPMeshInfo | None = None

    @classmethod
    def of(cls, spec: RunSpec, comm: Collectives, device: torch.device) -> Meshes:
        """Every rank calls it, outside any mode. `comm` then knows the groups."""
        if spec.shard_ranks is not None:
            return cls(_in_groups(comm, spec.shard_ranks, device))
        mesh = init_device_mesh(device.type, (spec.ranks,))
        if spec.settings.reshard_ranks is None:
            return cls(mesh)
        grouped = _in_groups(comm, spec.settings.reshard_ranks, device)
        return cls(mesh, HSDPMeshInfo(grouped, shard_mesh_dim=1, replicate_mesh_dim=0))

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, fully_shard takes the mesh of the groups of `reshard_ranks` and makes none."""
        if self.resharded is None:
            yield
            return
        name, resharded = "_get_post_forward_mesh_info", self.resharded
        make = getattr(library, name)
        setattr(library, name, lambda *_: resharded)
        try:
            yield
        finally:
            setattr(library, name, make)


def _in_groups(comm: Collectives, num_together: int, device: torch.device) -> DeviceMesh:
    """The mesh (replicas, neighbours): `num_together` neighbouring ranks make a row."""
    ranks = torch.arange(comm.num_ranks).view(-1, num_together)
    place = (comm.rank // num_together, comm.rank % num_together)
    world: Any = dist.group.WORLD
    options = world._get_backend(device).options  # a rehearsal's group has none, and waits for nobody
    timeout = options._timeout if options else None
    groups = []
    for among, members in ((Group.REPLICA, ranks[:, place[1]]), (Group.SHARD, ranks[place[0]])):
        made = dist.new_group(members.tolist(), timeout=timeout, use_local_synchronization=True)
        comm.join(among, Members(len(members), made if len(members) > 1 else None))
        groups.append(made)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replica", "shard"))


class FSDP2:
    """One rank's model and training step."""

    def __init__(self, spec: RunSpec, comm: Collectives, meter: Meter, device: torch.device, meshes: Meshes) -> None:
        self.spec, self.comm, self.device = spec, comm, device
        self.link = Link(meter)
        self._marks = Marks(meter, comm)
        self._num_batches = 0
        self._let_go = LetGo()
        with meshes.taken():
            self.model = self._build(meshes.mesh)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_Gather(comm, meter))
                module.set_custom_reduce_scatter(_Reduce(comm, meter))
                if spec.strategy.replicates:
                    module.set_all_reduce_hook(self._all_reduced)
        self._parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(spec.optimizer, self._parameters)

    def _all_reduced(self, shard: Tensor) -> None:
        """The library has all-reduced a gradient shard across replicas. In a metered step gloo lets go of it before it
        is cast."""
        self._let_go.wait(shard, self.comm.settling)
        self.comm.saw(CollectiveOp.ALL_REDUCE, shard, Group.REPLICA)

    def _build(self, mesh: DeviceMesh) -> Chain:
        """The sharded model. Whole parameters exist one group at a time."""
        spec, plan = self.spec, plan_for(self.spec)
        uses = [segment.unit for segment in plan.segments]
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": spec.settings.reshard_ranks or spec.strategy.reshards_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if spec.recipe.compute is spec.recipe.param else TORCH_DTYPE[spec.recipe.compute],
                reduce_dtype=None if (reduce := spec.settings.reduce_dtype) is None else TORCH_DTYPE[reduce],
            ),
        }
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
                fully_shard(segments[-1], **options)
        chain = Chain(segments, self._marks)
        fully_shard(chain, **options)
        return chain

    def _fill(self, module: SublayerModule, values: dict[str, nn.Parameter]) -> None:
        model, dtype = self.spec.model, TORCH_DTYPE[self.spec.recipe.param]
        for name in module.slots:
            if name not in values:
                shape = next(shape for shape in model.params if shape.name == name)
                values[name] = nn.Parameter(initial_value(model, shape, self.spec.seed).to(self.device, dtype))
            module.install(name, values[name])

    def step(self) -> float:
        """One training step; returns this rank's loss, the mean over its tokens and micro-batches."""
        self._marks.at(Phase.FORWARD, ZERO_GRAD)
        self.optimizer.zero_grad()
        value = 0.0
        for micro_batch in range(self.spec.accumulation):
            if not self.spec.reduces_each:
                assert isinstance(self.model, FSDPModule)  # fully_shard has made it one
                self.model.set_requires_gradient_sync(micro_batch == self.spec.accumulation - 1)
            value += self._gradients() / self.spec.accumulation
        self._marks.at(Phase.OPTIMIZER, OpKind.OPTIMIZER_STEP.value)
        self.optimizer.step()
        return value

    def _gradients(self) -> float:
        """Forward and backward of one micro-batch; returns its loss."""
        marks = self._marks
        marks.at(Phase.FORWARD, OpKind.LOAD_BATCH.value)
        batch = load_batch(self.spec, self.comm.rank, self._num_batches, self.device)
        self._num_batches += 1
        marks.tag(batch.tensors(), Category.INPUT)
        loss = self.model(batch)
        if self.spec.settings.reshard_ranks is not None:
            marks.tag((local_part(parameter) for parameter in self.model.parameters()), Category.SHARDED_PARAM)
        value: float = loss.item()
        share = self.spec.accumulation
        torch.autograd.backward(loss, None if share == 1 else torch.full_like(loss, 1 / share))
        marks.tag(self._sharded_grads(), Category.SHARDED_GRAD)
        marks.tag(self._cast_grads(), Category.UNSHARDED_GRAD)
        marks.at(Phase.BACKWARD, OpKind.DROP_BATCH.value)
        del loss, batch  # in this order
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

    def _cast_grads(self) -> Iterator[Tensor | None]:
        """Whole gradients that wait for the last micro-batch in the dtype they will be reduced in."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                for group in state._fsdp_param_groups:
                    yield from (parameter.unsharded_accumulated_grad for parameter in group.fsdp_params)

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
        self._comm.all_gather(output_tensor, input_tensor, self._comm.which(group)).wait()


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
        among, average = self._comm.which(group), op == dist.ReduceOp.AVG
        self._comm.reduce_scatter(output_tensor, input_tensor, among, average=average).wait()
