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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from cluster.collectives import Collectives
from cluster.dtypes import TORCH_DTYPE
from cluster.meter import Meter
from cluster.model import SublayerModule
from cluster.own.optimizer import make_optimizer
from cluster.own.step import STEP_COUNTER
from cluster.witness.marked import ZERO_GRAD
from cluster.witness.plain import PlainModel, PlainSegment, PlainSteps
from zeroviz.collectives import Group
from zeroviz.partition import plan_for
from zeroviz.schedule import OpKind, Phase
from zeroviz.settings import BackwardPrefetch as Prefetch
from zeroviz.settings import value_of
from zeroviz.spec import RunSpec, Strategy
from zeroviz.trace import Category

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


class Instance:
    """One FSDP instance. flat: its flat parameter, whose data is the shard, or in use the whole."""

    def __init__(self, unit: str, outer: FullyShardedDataParallel, inner: nn.Module) -> None:
        self.unit, self.outer, self.inner = unit, outer, inner
        handle: Any = outer._handle
        self.flat: Any = handle.flat_param

    def views(self) -> Iterator[Tensor]:
        """The parameters as its sublayers have them in forward."""
        for segment in self.inner.modules():
            if isinstance(segment, PlainSegment) and (segment is self.inner or self._is_own(segment)):
                for sublayer in segment.sublayers:
                    assert isinstance(sublayer, SublayerModule)
                    yield from (getattr(owner, name) for owner, name in sublayer.slots.values())

    def _is_own(self, segment: PlainSegment) -> bool:
        """Whether a segment of the root's has no instance of its own."""
        assert isinstance(self.inner, PlainModel)
        return any(each is segment for each in self.inner.segments)

    def num_own(self) -> int:
        """Elements of the shard that are no padding."""
        return sum(part.numel_in_shard for part in self.flat._shard_param_infos if part.in_shard)


class FSDP1(PlainSteps):
    """One rank's model and training step."""

    def __init__(
        self, spec: RunSpec, comm: Collectives, meter: Meter, device: torch.device, mesh: DeviceMesh | None
    ) -> None:
        self._mesh = mesh
        self._naming = _Naming(meter)
        self._window = ExitStack()
        self._hooks: list[RemovableHandle] = []
        self.instances: list[Instance] = []
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
        for position in range(len(self.instances)):
            self._mark(position)
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

    def _mark(self, position: int) -> None:
        """Hooks of modules and tensors around FSDP's own: see where each is called."""
        instance, at = self.instances[position], self.places.at
        near = self.instances[max(position - 1, 0) : position + 1]  # backward gathers the one before ahead

        def name_whole() -> None:
            for each in near:
                self.meter.tag(each.flat, Category.UNSHARDED_PARAM)

        def before_unshard(module: nn.Module, args: object) -> None:
            at(Phase.FORWARD, OpKind.UNSHARD.value, instance.unit)
            self._window.enter_context(self._naming)

        def before_forward(module: nn.Module, args: object) -> None:
            self._window.close()
            name_whole()
            # FSDP's own hook of this kind, made just before, reduces.
            self._hooks.append(get_gradient_edge(instance.flat).node.register_hook(after_reduce))
            for view in instance.views():
                _on_grad(view, lambda grad: self.meter.tag(grad, Category.UNSHARDED_GRAD))

        def after_forward(module: nn.Module, args: object, output: Tensor) -> None:
            at(Phase.FORWARD, OpKind.RESHARD.value, instance.unit)
            _on_grad(output, before_unshard_again)

        def after_reshard(module: nn.Module, args: object, output: Tensor) -> None:
            _on_grad(output, before_backward)

        def before_unshard_again(grad: Tensor) -> None:
            name_whole()
            at(Phase.BACKWARD, OpKind.UNSHARD.value, instance.unit)
            self._naming.begin()

        def before_backward(grad: Tensor) -> None:
            self._naming.end()
            name_whole()
            at(Phase.BACKWARD, OpKind.BACKWARD.value, instance.unit)

        def before_reduce(grad: Tensor) -> None:
            self.meter.tag(grad, Category.UNSHARDED_GRAD)
            at(Phase.BACKWARD, OpKind.REDUCE_GRAD.value, instance.unit)
            self._naming.begin()

        def after_reduce(inputs: object, outputs: object) -> None:
            self._naming.end()

        instance.outer.register_forward_pre_hook(before_unshard)
        instance.inner.register_forward_pre_hook(before_forward)
        instance.inner.register_forward_hook(after_forward)
        instance.outer.register_forward_hook(after_reshard)
        _on_grad(instance.flat, before_reduce)

    def _drops_gradients(self, module: nn.Module, args: object) -> None:
        """With `use_orig_params` FSDP drops the flat gradients here, and not in the optimizer's zero_grad."""
        self.places.at(Phase.FORWARD, ZERO_GRAD)

    def step(self) -> float:
        with self._window:
            loss = super().step()
        self.counted.sent.clear()  # buffers that FSDP lets go
        return loss

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

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


class _Naming(TorchFunctionMode):
    """Says what the tensors are for that FSDP makes between two hooks, by the function that it calls for each.

    In backward it begins and ends within one node of the graph, around FSDP's own hook there.
    """

    CATEGORY: Mapping[Callable[..., Any], Category] = {
        F.pad: Category.REDUCE_SCATTER_BUFFER,
        Tensor.copy_: Category.ALL_GATHER_BUFFER,  # the shard in the compute dtype
        Tensor.to: Category.UNSHARDED_GRAD,  # in the dtype it is reduced in
        torch.empty_like: Category.SHARDED_GRAD,
    }

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (category := self.CATEGORY.get(func)) is not None:
            self._meter.tag(result, category)
        return result


def _on_grad(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` when the tensor's gradient is there, after the hooks it has."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
