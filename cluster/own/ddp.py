"""Distributed data parallel: everything whole on every rank, one all-reduce of each unit's gradient.

This is also the base of the ZeRO stages. A unit has two flat buffers, parameters and gradients, and `owned`, the
elements this rank's optimizer updates: under DDP all of them.

[Note: slices] The optimizer sees `owned` in slices, each a parameter of its own, and updates one after another: its
temporaries, and the cast of a gradient of another dtype, are then a slice's and not the unit's.
`zeroviz.partition.update_numels` says how long a slice is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from cluster.collectives import Collectives, Handle
from cluster.dtypes import TORCH_DTYPE
from cluster.link import HOST, Link
from cluster.meter import Meter
from cluster.model import SublayerModule, initial_value
from cluster.own.buffer import FlatBuffer
from cluster.own.layers import AddingLayer
from zeroviz.collectives import Group
from zeroviz.memory import rest_places
from zeroviz.partition import Unit, buffer_numel, shard_bounds, update_numels
from zeroviz.spec import RunSpec
from zeroviz.trace import Category


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of what a rank owns of a unit, updated at a time. See [Note: slices]."""

    start: int
    stop: int
    owned: nn.Parameter


class DDPUnit:
    """One unit's tensors on one rank, and what each op of the schedule does with them.

    within: the ranks among which the unit's shards lie.
    """

    params_held = True
    """Whether the full parameters are always there."""

    def __init__(
        self, spec: RunSpec, unit: Unit, comm: Collectives, link: Link, meter: Meter, device: torch.device
    ) -> None:
        self.spec, self.unit, self.comm, self.link, self.meter, self.device = spec, unit, comm, link, meter, device
        self.places = rest_places(spec)
        self.within = Group.SHARD if spec.strategy.replicates else Group.ALL
        recipe = spec.recipe
        self.param_dtype, self.grad_dtype = TORCH_DTYPE[recipe.param], TORCH_DTYPE[recipe.grad]
        self.start, self.stop = shard_bounds(unit, spec, comm.rank)
        numel = buffer_numel(unit, spec)
        self.param = FlatBuffer(numel, self.param_dtype, device, meter, Category.UNSHARDED_PARAM)
        self.grad = FlatBuffer(numel, self.grad_dtype, device, meter, Category.UNSHARDED_GRAD)
        # Where the optimizer works, and where shards of their own are kept.
        self.optimizer_device = HOST if spec.offload.moves_optimizer else device
        self.param_shard = self.make_param_shard()
        self.grad_shard = self.make_grad_shard()
        self.master = (
            torch.zeros(self.stop - self.start, dtype=TORCH_DTYPE[recipe.update], device=self.optimizer_device)
            if self.places.master
            else None
        )
        self.parameters = dict(self._make_parameters())
        padding = self.grad.tensor[unit.numel :]  # a view, which can only be made while there is memory
        self._fill_with_initial_values()
        if not self.params_held:
            self.param.release()
        if self.grad_comes_and_goes:
            self.grad.release()
        self.slices = list(self._make_slices())
        self._padding_grad = padding
        self._written: set[int] = set()
        self._unwritten: set[int] = set()
        self._pending: Handle | None = None
        self._handed: torch.Tensor | None = None

    # What a stage owns. DDP's shard is the whole buffer.

    def make_param_shard(self) -> torch.Tensor:
        return self.param.tensor

    def make_grad_shard(self) -> torch.Tensor:
        return self.grad.tensor

    @property
    def owned(self) -> torch.Tensor:
        """What the optimizer updates, (numel,): the master copy, or the parameters themselves."""
        return self.param_shard if self.master is None else self.master

    @property
    def grad_comes_and_goes(self) -> bool:
        """Whether the full gradient buffer has memory in a part of the step only; Megatron's has it always."""
        return not self.spec.strategy.has_whole_buffer

    # The ops of the schedule, in the order of a step. The schedule holds only ops that act, so a stage adds the methods
    # of the ops it adds: `sync_param` in zero1.py, `unshard` and `reshard` in zero3.py.

    def drop_grad(self) -> None:
        """Free the gradient of the step before."""
        self.grad.release()

    def begin_grad(self, weight: torch.Tensor) -> bool:
        """Backward is about to add to the gradient of `weight`: allocate the full buffer, if it is gone.

        Whether nothing is there to be added to: then the gradient is written, and only what layers do not write by
        themselves is zeroed. See `cluster.own.layers`.
        """
        if not self.grad.is_held:
            self.grad.allocate()
            added = [p.grad for p in self.parameters.values() if p.grad is not None and id(p) not in self._written]
            torch._foreach_zero_([*added, self._padding_grad])
            self._unwritten = set(self._written)
        is_first = id(weight) in self._unwritten
        self._unwritten.discard(id(weight))
        return is_first

    def zero_grad(self) -> None:
        """Zero a buffer that stays."""
        self.grad.tensor.zero_()

    def reduce_grad(self) -> None:
        """Start the sum of the gradient over all ranks."""
        self._pending = self.comm.all_reduce(self.grad.tensor)

    def wait_reduce(self) -> None:
        """Wait for it, and take the sum."""
        self.wait()
        self.take_sum()

    def take_sum(self) -> None:
        """The mean over ranks is the sum over N, divided in the gradient's dtype."""
        self.grad_shard.div_(self.comm.num_ranks)

    def hand_over_grad(self) -> None:
        """Bring the owned gradient to where the optimizer works."""
        self._handed = self.link.down(self.grad_shard, self.unit.name) if self.crosses_link else self.grad_shard

    def give_grad(self, part: Slice) -> None:
        """Let the optimizer see a slice of it, in the dtype it works in."""
        assert self._handed is not None
        part.owned.grad = self._handed[part.start : part.stop].to(part.owned.dtype)

    def take_back_grad(self) -> None:
        """The update is made."""
        self._handed = None

    def take_update(self) -> None:
        """Bring the updated elements back into the parameters, if the optimizer worked on a copy of them."""
        if self.master is None:
            return
        if self.crosses_link:
            self.link.up_into(self.param_shard, self.master.to(self.param_dtype), self.unit.name)
        else:
            self.param_shard.copy_(self.master)

    @property
    def crosses_link(self) -> bool:
        """Whether gradient and parameters are on the other side than the optimizer."""
        return self.spec.offload.moves_optimizer and not self.spec.offload.moves_params

    def wait(self) -> None:
        """Wait for the unit's collective under way, if there is one."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    # Set-up and inspection.

    def install(self, modules: list[SublayerModule]) -> None:
        """Make the modules compute with this unit's parameters."""
        for module in modules:
            for name, (owner, slot) in module.slots.items():
                module.install(name, self.parameters[name])
                if isinstance(owner, AddingLayer):
                    owner.begin_grad = self.begin_grad
                    if slot == "weight" and self.param_dtype is self.grad_dtype:  # a cast adds as it always did
                        self._written.add(id(self.parameters[name]))

    def held_tensors(self) -> Iterator[tuple[torch.Tensor, Category]]:
        """Everything this unit holds between steps but the moments, each with its category; views of one storage may
        repeat."""
        yield self.param.tensor, Category.UNSHARDED_PARAM
        yield self.grad.tensor, Category.UNSHARDED_GRAD
        yield self.param_shard, self.places.param
        yield self.grad_shard, self.places.grad
        if self.master is not None and self.places.master is not None:
            yield self.master, self.places.master

    def _make_slices(self) -> Iterator[Slice]:
        start = 0
        for numel in update_numels(self.unit, self.spec):
            yield Slice(start, start + numel, nn.Parameter(self.owned[start : start + numel]))
            start += numel

    def _make_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters: views into the flat buffer, with `.grad` preset to views into the gradient's."""
        start = 0
        for shape in self.unit.params:
            parameter = nn.Parameter(self.param.view(start, shape.shape))
            # autograd then casts each fresh gradient to the recipe's dtype and adds it in place.
            parameter.grad_dtype = self.grad_dtype
            parameter.grad = self.grad.view(start, shape.shape)
            start += shape.numel
            yield shape.name, parameter

    @torch.no_grad()
    def _fill_with_initial_values(self) -> None:
        """Write each parameter's initial value, one parameter at a time, wherever this rank keeps its elements."""
        start = 0
        for shape in self.unit.params:
            value = initial_value(self.spec.model, shape, self.spec.seed).view(-1)
            if self.params_held:
                self.param.view(start, (shape.numel,)).copy_(value)
            low, high = max(start, self.start), min(start + shape.numel, self.stop)
            if low < high:
                self.owned[low - self.start : high - self.start].copy_(value[low - start : high - start])
            start += shape.numel
        if self.master is not None:
            self.param_shard.copy_(self.master)
