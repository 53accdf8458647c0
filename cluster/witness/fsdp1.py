"""FSDP1: torch's FullyShardedDataParallel, one instance a unit inside a root, as an auto-wrap policy makes them.

Each unit that is one segment is an instance; what is left (a tied embedding with its head, or the whole model under
unit `model`) is the root's. An instance lays its parameters one after another in a flat parameter and keeps 1/N of it.

[Note: copies of a gradient] A unit is whole in one buffer, whose memory comes with the gather and goes with the
reshard; sublayers compute with views into it. So in backward the gradient of each view is held until the last one of
the unit is there, and then all are copied into a flat one: two copies of the unit's gradient. Where N does not divide
that, it is copied once more with padding at its end, and the reduce-scatter reads the copy; `use_orig_params` pads the
flat parameter itself and needs none.

[Note: one rank] In a shard group of one rank torch warns and does NO_SHARD, for the whole is its own shard. What is
held is then named so: whole parameters, whole gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from cluster.collectives import Collectives
from cluster.dtypes import TORCH_DTYPE
from cluster.meter import Meter
from cluster.own.optimizer import make_optimizer
from cluster.own.step import STEP_COUNTER
from cluster.witness.flat import Copies, Instance, Marks, Naming
from cluster.witness.plain import PlainModel, PlainSteps
from zeroviz.collectives import Group
from zeroviz.partition import plan_for
from zeroviz.schedule import Phase
from zeroviz.settings import BackwardPrefetch as Prefetch
from zeroviz.settings import value_of
from zeroviz.spec import RunSpec, Strategy
from zeroviz.trace import Category
from zeroviz.witness.graph import ZERO_GRAD

_SHARDING: Mapping[Strategy, ShardingStrategy] = {
    Strategy.ZERO3: ShardingStrategy.FULL_SHARD,
    Strategy.SHARD_GRAD_OP: ShardingStrategy.SHARD_GRAD_OP,
    Strategy.DDP: ShardingStrategy.NO_SHARD,
    Strategy.HYBRID_SHARD: ShardingStrategy.HYBRID_SHARD,
}
_PREFETCH: Mapping[Prefetch, BackwardPrefetch | None] = {
    Prefetch.PRE: BackwardPrefetch.BACKWARD_PRE,
    Prefetch.POST: BackwardPrefetch.BACKWARD_POST,
    Prefetch.NONE: None,
}


def mesh_of(spec: RunSpec, device: torch.device) -> DeviceMesh | None:
    """The groups of ranks: (replicas, shard group) under hybrid_shard; None is one group of all."""
    if spec.shard_ranks is None:
        return None
    return init_device_mesh(device.type, (spec.ranks // spec.shard_ranks, spec.shard_ranks))


class FSDP1(PlainSteps):
    """One rank's model and training step."""

    def __init__(
        self, spec: RunSpec, comm: Collectives, meter: Meter, device: torch.device, mesh: DeviceMesh | None
    ) -> None:
        self._mesh = mesh
        self.instances: list[Instance] = []
        self._marks: list[Marks] = []
        super().__init__(spec, comm, meter, device)
        if mesh is not None:
            for dim, group in enumerate((Group.REPLICA, Group.SHARD)):
                self.counted.groups[mesh.get_group(dim).group_name] = group

    def wrap(self, plain: PlainModel) -> tuple[nn.Module, torch.optim.Optimizer]:
        plan = plan_for(self.spec)
        units = [segment.unit for segment in plan.segments]
        plain.by_name.clear()  # it would hold the whole parameters
        for position, (unit, segment) in enumerate(zip(units, list(plain.segments), strict=True)):
            if len(plan.units) > 1 and units.count(unit) == 1:
                plain.segments[position] = outer = self._instance(segment)
                self.instances.append(Instance(plan.units[unit].name, outer, segment))
        root = self._instance(plain)
        root.register_forward_pre_hook(self._drops_gradients)
        if root._has_params:
            rest = next(unit for unit in units if len(plan.units) == 1 or units.count(unit) > 1)
            self.instances.append(Instance(plan.units[rest].name, root, plain))
        copies = Copies(self.comm, self.instances)
        naming = Naming(self.meter, copies)
        for position, instance in enumerate(self.instances):
            near = self.instances[max(position - 1, 0) : position + 1]  # backward gathers the one before ahead
            self._marks.append(Marks(instance, near, self.places, naming, copies))
        return root, make_optimizer(self.spec.optimizer, list(root.parameters()))

    def _instance(self, module: nn.Module) -> FullyShardedDataParallel:
        settings, impl, recipe = self.spec.settings, self.spec.impl, self.spec.recipe
        reduced = value_of(settings, "reduce_dtype", impl)
        narrow = recipe.compute is not recipe.param
        precision = MixedPrecision(
            param_dtype=TORCH_DTYPE[recipe.compute] if narrow else None,
            reduce_dtype=None if reduced is None else TORCH_DTYPE[reduced],
        )
        with warnings.catch_warnings():
            # Of what was asked for: see [Note: one rank], and strategy ddp.
            warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`", UserWarning)
            warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
            return FullyShardedDataParallel(
                module,
                sharding_strategy=_SHARDING[self.spec.strategy],
                device_mesh=self._mesh,
                device_id=self.device,  # without it FSDP looks for a GPU
                mixed_precision=precision,
                use_orig_params=value_of(settings, "use_orig_params", impl),
                backward_prefetch=_PREFETCH[value_of(settings, "backward_prefetch", impl)],
                limit_all_gathers=value_of(settings, "limit_all_gathers", impl),
            )

    def _drops_gradients(self, module: nn.Module, args: object) -> None:
        """With `use_orig_params` FSDP drops the flat gradients here, and not in the optimizer's zero_grad."""
        self.places.at(Phase.FORWARD, ZERO_GRAD)

    def step(self) -> float:
        loss = super().step()
        self.counted.sent.clear()  # buffers that FSDP lets go
        return loss

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        for marks in self._marks:
            marks.drop_hooks()

    def tag_gradients(self) -> None:
        for instance in self.instances:
            self.meter.tag(instance.flat.grad, self._category(Category.SHARDED_GRAD, Category.UNSHARDED_GRAD))

    def held_tensors(self) -> Iterator[tuple[Tensor, Category]]:
        for instance in self.instances:
            yield instance.flat, self._category(Category.SHARDED_PARAM, Category.UNSHARDED_PARAM)
            if instance.flat.grad is not None:
                yield instance.flat.grad, self._category(Category.SHARDED_GRAD, Category.UNSHARDED_GRAD)
        for name, value in self.optimizer_state():
            if name != STEP_COUNTER:
                yield value, Category.OPTIMIZER_STATE

    def padding_nbytes(self) -> int:
        """At the end of the last ranks' shards; with `use_orig_params` also between parameters, and in no moment."""
        nbytes = 0
        for instance in self.instances:
            flat, state = instance.flat, self.optimizer.state.get(instance.flat, {})
            grad = () if flat.grad is None else (flat.grad,)
            moments = (value for name, value in state.items() if name != STEP_COUNTER and value is not None)
            nbytes += (flat.numel() - instance.num_own()) * sum(each.itemsize for each in (flat, *grad, *moments))
        return nbytes

    def _category(self, shard: Category, whole: Category) -> Category:
        """By what FSDP does, not by what it was asked for: see [Note: one rank]."""
        return shard if self.instances[0].outer.sharding_strategy is not ShardingStrategy.NO_SHARD else whole
