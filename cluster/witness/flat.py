"""One FSDP1 instance seen from outside: hooks of modules and tensors around FSDP's own, and what they say of a step.

Hooks run in the order they were made in, a module's and a tensor's. An instance's own are made when it is built (of the
module), in each forward (of the output's gradient, and of the flat parameter's AccumulateGrad node, which reduces), and
ours stand before and after each of them.

[Note: what a hook may hold] Views into the flat parameter outlive a step, and through them C++ holds it: the garbage
collector does not see past that. A hook on a view or on the flat parameter that led back to the model would keep both
for ever, and their process groups with all their threads. So these lead to it by weak references only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakMethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from cluster.collectives import SETTLED_RANGE, Collectives
from cluster.meter import Meter
from cluster.model import SublayerModule
from cluster.settle import Settling
from cluster.witness.plain import Places, PlainModel, PlainSegment
from zeroviz.schedule import OpKind, Phase
from zeroviz.trace import Category


class Naming(TorchFunctionMode):
    """Says what the tensors are for that FSDP makes between two hooks, by the function that it calls for each.

    In backward it begins and ends within one node of the graph, around FSDP's own hook there.
    """

    CATEGORY: Mapping[Callable[..., Any], Category] = {
        F.pad: Category.REDUCE_SCATTER_BUFFER,
        Tensor.copy_: Category.ALL_GATHER_BUFFER,  # the shard in the compute dtype
        Tensor.to: Category.UNSHARDED_GRAD,  # in the dtype it is reduced in
        torch.empty_like: Category.SHARDED_GRAD,
    }

    def __init__(self, meter: Meter, copies: Copies) -> None:
        super().__init__()
        self._meter, self._copies = meter, copies

    def begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.div_, Tensor.to):
            self._copies.goes_on(divides=func is Tensor.div_)
        result = func(*args, **(kwargs or {}))
        if (category := self.CATEGORY.get(func)) is not None:
            self._meter.tag(result, category)
        return result


class Copies:
    """In a metered step, waits until gloo has let go of its copies, as our own seam does.

    FSDP calls gloo itself and waits for the result alone. How much is live when its hook is over follows from what it
    holds then and held before.
    """

    def __init__(self, comm: Collectives, instances: Sequence[Instance]) -> None:
        self._comm, self._instances = comm, instances
        self._others_nbytes = 0
        self._divided_nbytes: int | None = None

    def begin(self) -> None:
        if (settling := self._comm.settling) is not None:
            self._others_nbytes = settling.counter() - self._held_nbytes()
            self._divided_nbytes = None

    def end(self) -> None:
        if (settling := self._comm.settling) is not None:
            self._wait(settling, self._others_nbytes + self._held_nbytes())

    def goes_on(self, *, divides: bool) -> None:
        """A gradient is about to be divided or cast. FSDP divides before it sends and makes nothing till it goes on."""
        if (settling := self._comm.settling) is None:
            return
        if self._divided_nbytes is not None:
            self._wait(settling, self._divided_nbytes)
        elif divides:
            self._divided_nbytes = settling.counter()

    def let_go(self, grad: Tensor, num_before: int) -> None:
        """Wait until gloo's references to what was reduced are gone as well, so that its bytes go when FSDP's do."""
        if (settling := self._comm.settling) is not None:
            settling.until(lambda: num_owners(grad) <= num_before)

    def _wait(self, settling: Settling, nbytes: int) -> None:
        live = settling.down_to(nbytes)
        if live is not None:
            with record_function(f"{SETTLED_RANGE}{live}"):
                pass

    def _held_nbytes(self) -> int:
        tensors = (tensor for instance in self._instances for tensor in instance.come_and_go())
        return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


class Instance:
    """One FSDP instance. flat: its flat parameter, whose data is the shard or, in use, the whole. outer, inner: FSDP's
    module and the one it wraps."""

    def __init__(self, unit: str, outer: FullyShardedDataParallel, inner: nn.Module) -> None:
        self.unit, self.outer, self.inner = unit, outer, inner
        handle: Any = outer._handle
        self.flat: Any = handle.flat_param

    def num_own(self) -> int:
        """Elements of the shard that are no padding."""
        return sum(part.numel_in_shard for part in self.flat._shard_param_infos if part.in_shard)

    def come_and_go(self) -> Iterator[Tensor]:
        """What FSDP makes and frees of the unit: the gathered buffer, the shard in the compute dtype (the whole, with
        NO_SHARD), and the gradient's shard."""
        for name in ("_full_param_padded", "_mp_shard", "_saved_grad_shard", "grad"):
            if (tensor := getattr(self.flat, name, None)) is not None:
                yield tensor

    def views(self) -> Iterator[Tensor]:
        """The parameters as its sublayers have them in forward."""
        parts = self.inner.segments if isinstance(self.inner, PlainModel) else [self.inner]
        for segment in parts:
            if isinstance(segment, PlainSegment):  # and not another instance
                for sublayer in segment.sublayers:
                    assert isinstance(sublayer, SublayerModule)
                    yield from (getattr(owner, name) for owner, name in sublayer.slots.values())


class Marks:
    """The hooks of one instance. near: it and the one that backward gathers while this one is in use."""

    def __init__(self, instance: Instance, near: Sequence[Instance], places: Places, naming: Naming, copies: Copies):
        self._instance, self._near = instance, near
        self._places, self._naming, self._copies = places, naming, copies
        self._reduced: list[RemovableHandle] = []
        self._num_owners = 0
        instance.outer.register_forward_pre_hook(self._before_unshard)
        instance.inner.register_forward_pre_hook(self._before_forward)
        instance.inner.register_forward_hook(self._after_forward)
        instance.outer.register_forward_hook(self._after_reshard)
        _on_grad(instance.flat, _weakly(self._before_reduce))

    def drop_hooks(self) -> None:
        """Take back the hook of a step: the node it is on may live on."""
        while self._reduced:
            self._reduced.pop().remove()

    def _before_unshard(self, module: nn.Module, args: object) -> None:
        self._at(Phase.FORWARD, OpKind.UNSHARD)
        self._copies.begin()
        self._naming.begin()

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self._naming.end()
        self._copies.end()
        self._name_whole()
        self._reduced.append(get_gradient_edge(self._instance.flat).node.register_hook(self._after_reduce))
        for view in self._instance.views():
            _on_grad(view, _weakly(self._name_grad))

    def _after_forward(self, module: nn.Module, args: object, output: Tensor) -> None:
        self._at(Phase.FORWARD, OpKind.RESHARD)
        _on_grad(output, self._before_unshard_again)

    def _after_reshard(self, module: nn.Module, args: object, output: Tensor) -> None:
        _on_grad(output, self._before_backward)

    def _before_unshard_again(self, grad: Tensor) -> None:
        self._name_whole()
        self._at(Phase.BACKWARD, OpKind.UNSHARD)
        self._copies.begin()
        self._naming.begin()

    def _before_backward(self, grad: Tensor) -> None:
        self._naming.end()
        self._copies.end()
        self._name_whole()
        self._at(Phase.BACKWARD, OpKind.BACKWARD)

    def _before_reduce(self, grad: Tensor) -> None:
        self._name_grad(grad)
        self._at(Phase.BACKWARD, OpKind.REDUCE_GRAD)
        self._copies.begin()
        self._num_owners = num_owners(grad)
        self._naming.begin()

    def _after_reduce(self, outputs: object, inputs: tuple[Tensor, ...]) -> None:
        """The node still holds the flat gradient, `inputs`."""
        self._naming.end()
        if self._instance.flat.grad is None:
            self._copies.let_go(inputs[0], self._num_owners)
        self._copies.end()

    def _at(self, phase: Phase, op: OpKind) -> None:
        self._places.at(phase, op.value, self._instance.unit)

    def _name_grad(self, grad: Tensor) -> None:
        self._places.meter.tag(grad, Category.UNSHARDED_GRAD)

    def _name_whole(self) -> None:
        for each in self._near:
            self._places.meter.tag(each.flat, Category.UNSHARDED_PARAM)


def num_owners(tensor: Tensor) -> int:
    """How many references keep the tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that does not keep what it calls. See [Note: what a hook may hold]."""
    kept = WeakMethod(method)

    def hook(grad: Tensor) -> None:
        if (call := kept()) is not None:
            call(grad)

    return hook


def _on_grad(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` when the tensor's gradient is there, after the hooks it has."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
