"""The executor: walks the schedule op by op, the same list the predictor walks, with tensors instead of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cluster.collectives import Collectives
from cluster.link import Link
from cluster.meter import Meter
from cluster.model import SublayerModule, build_sublayer
from cluster.own.clip import clip_grads
from cluster.own.ddp import DDPUnit, Slice
from cluster.own.hybrid import HybridUnit
from cluster.own.layers import ADDING
from cluster.own.optimizer import make_optimizer
from cluster.own.zero1 import Zero1Unit
from cluster.own.zero2 import Zero2Unit
from cluster.own.zero3 import Zero3Unit
from cluster.text import Batch, load_batch
from zeroviz.memory import rest_padding_nbytes, rest_places
from zeroviz.partition import buffers_for, plan_for
from zeroviz.schedule import Op, OpKind, schedule
from zeroviz.spec import RunSpec, Strategy
from zeroviz.trace import Category

STEP_COUNTER = "step"  # torch's name of it in an optimizer's state
UNIT_OF = {
    Strategy.DDP: DDPUnit,
    Strategy.ZERO1: Zero1Unit,
    Strategy.ZERO2: Zero2Unit,
    Strategy.ZERO3: Zero3Unit,
    Strategy.SHARD_GRAD_OP: Zero3Unit,
    Strategy.HYBRID_SHARD: HybridUnit,
    Strategy.MEGATRON_OPTIM: Zero1Unit,  # of one buffer: see [Note: one buffer] in zeroviz.schedule
}


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer of torch's updates at a time, each slice with its unit."""

    optimizer: torch.optim.Optimizer
    parts: list[tuple[DDPUnit, Slice]]


class Executor:
    """One rank's model and training step.

    [Note: segments] Each segment runs on a detached input, so its graph ends at the segment's border. What is kept for
    backward is the pair (input, edge of the output): the edge, not the output, because the next segment's input shares
    the output's memory already and an output kept here would live one phase longer than needed.

    [Note: checkpointing] A checkpointed region runs in forward without a graph and keeps its first input; in backward
    it runs once more, segment by segment and with graphs, and then its segments' backward follows. No random numbers
    are drawn in this model, so the second run gives the first one's values.
    """

    def __init__(self, spec: RunSpec, comm: Collectives, meter: Meter, device: torch.device) -> None:
        self.spec, self.comm, self.meter, self.device = spec, comm, meter, device
        self.plan = plan_for(spec)
        self.ops = schedule(spec)
        self.link = Link(meter)
        make_unit = UNIT_OF[spec.strategy]
        self.units = [make_unit(spec, buffer, comm, self.link, meter, device) for buffer in buffers_for(spec)]
        self.updates = self._make_updates()
        self.modules: list[list[SublayerModule]] = []
        for segment in self.plan.segments:
            modules = [build_sublayer(sublayer, spec.model, ADDING) for sublayer in segment.sublayers]
            (self.units[0] if spec.strategy.has_whole_buffer else self.units[segment.unit]).install(modules)
            self.modules.append(modules)
        self.num_batches = 0
        self._batch: Batch | None = None
        self._saved: dict[int, tuple[torch.Tensor | None, GradientEdge]] = {}
        self._region_inputs: dict[int, torch.Tensor] = {}
        self._activation: torch.Tensor | None = None
        self._grad: torch.Tensor | None = None

    def _make_updates(self) -> dict[int | None, list[Update]]:
        """By the unit an op names, what is updated one after another: all slices in one go, or each by itself."""
        parts = {unit.unit.index: [(unit, part) for part in unit.slices] for unit in self.units}

        def together(made: list[tuple[DDPUnit, Slice]]) -> Update:
            return Update(make_optimizer(self.spec.optimizer, [part.owned for _, part in made]), made)

        if self.spec.optimizer.steps_together:
            return {None: [together([part for of_unit in parts.values() for part in of_unit])]}
        whole = self.spec.strategy.has_whole_buffer
        return {None if whole else index: [together([part]) for part in of_unit] for index, of_unit in parts.items()}

    @property
    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """torch's optimizers, in the order in which they step."""
        return (update.optimizer for updates in self.updates.values() for update in updates)

    @torch.no_grad()
    def step(self) -> float:
        """One training step; returns this rank's loss, the mean over its tokens and micro-batches."""
        loss = 0.0
        for op in self.ops:
            name = "" if op.unit is None else self.plan.units[op.unit].name
            self.comm.at(op.phase.value, name)
            self.link.at(op.phase.value, name)
            with self.meter.op(op.phase.value, op.kind.value, name):
                self._execute(op)
            if op.kind is OpKind.FORWARD and op.segment == len(self.plan.segments) - 1:
                assert self._activation is not None
                loss += self._activation.item() / self.spec.accumulation
        return loss

    def _execute(self, op: Op) -> None:
        match op.kind:
            case OpKind.DROP_GRAD:
                for unit in self.units:
                    unit.drop_grad()
            case OpKind.LOAD_BATCH:
                self._load_batch()
            case OpKind.DROP_BATCH:
                self._batch = None
            case OpKind.FORWARD:
                assert op.segment is not None
                if self.plan.segments[op.segment].region is None:
                    self._forward(op.segment)
                else:
                    self._forward_without_graph(op.segment)
            case OpKind.RECOMPUTE:
                assert op.segment is not None
                self._recompute(op.segment)
            case OpKind.BACKWARD:
                assert op.segment is not None
                self._backward(op.segment)
            case OpKind.OPTIMIZER_STEP | OpKind.HOST_STEP:
                with self.meter.on_host() if op.kind is OpKind.HOST_STEP else nullcontext():
                    self._update(self.units if op.unit is None else [self.units[op.unit]], self.updates[op.unit])
            case OpKind.CLIP_GRAD:
                self._clip()
            case _:  # without a unit: of the one buffer
                _UNIT_ACTION[op.kind](self.units[op.unit or 0])

    def _load_batch(self) -> None:
        self._batch = load_batch(self.spec, self.comm.rank, self.num_batches, self.device)
        self.num_batches += 1
        for tensor in self._batch.tensors():
            self.meter.tag(tensor, Category.INPUT)

    def _forward(self, segment: int) -> None:
        """Run the segment on its detached input and keep the pair for backward."""
        entry = None if self._activation is None else self._activation.detach().requires_grad_()
        self._activation = None
        self._activation = self._run_with_graph(segment, entry)

    def _run_with_graph(self, segment: int, entry: torch.Tensor | None) -> torch.Tensor:
        """The segment's output, detached; the pair for its backward is kept."""
        with torch.enable_grad():
            output = self._run(segment, entry)
        self._saved[segment] = (entry, get_gradient_edge(output))
        return output.detach()

    def _run(self, segment: int, x: torch.Tensor | None) -> torch.Tensor:
        assert self._batch is not None
        for module in self.modules[segment]:
            x = module(x, self._batch)
        assert x is not None
        return x

    def _forward_without_graph(self, segment: int) -> None:
        """A checkpointed segment: of its region only the input is kept. [Note: checkpointing]"""
        entry, self._activation = self._activation, None
        assert entry is not None
        place = self.plan.segments[segment]
        if place.starts_region:
            assert place.region is not None
            self._region_inputs[place.region] = entry
        self._activation = self._run(segment, entry)

    def _recompute(self, segment: int) -> None:
        """Run a checkpointed segment once more, now with a graph; at the region's end nobody takes the output."""
        place = self.plan.segments[segment]
        assert place.region is not None
        entry = self._region_inputs.pop(place.region) if place.starts_region else self._activation
        self._activation = None
        assert entry is not None
        output = self._run_with_graph(segment, entry.detach().requires_grad_())
        self._activation = None if place.ends_region else output

    def _backward(self, segment: int) -> None:
        """Run backward from the stored pair; parameter gradients add up in the units' flat buffers."""
        entry, edge = self._saved.pop(segment)
        grad = self._grad
        if grad is None:  # the last segment: d loss / d loss
            assert self._activation is not None
            grad = torch.full_like(self._activation, 1 / self.spec.accumulation)  # the mean over micro-batches
            self._activation = None
        torch.autograd.backward(edge, grad)
        self._grad = None if entry is None else entry.grad

    def _clip(self) -> None:
        assert self.spec.clip_norm is not None
        among = self.units[0].within if self.spec.strategy.shards_optimizer else None
        clip_grads([unit.grad_shard for unit in self.units], self.spec.clip_norm, self.comm, among)

    def _update(self, units: list[DDPUnit], updates: list[Update]) -> None:
        """Update the owned elements of `units`, which are all that `updates` know."""
        for unit in units:
            unit.hand_over_grad()
        for update in updates:
            for unit, part in update.parts:
                unit.give_grad(part)
            update.optimizer.step()
            for _, part in update.parts:
                part.owned.grad = None
        for unit in units:
            unit.take_back_grad()
        for unit in units:
            unit.take_update()

    def held_tensors(self) -> Iterator[tuple[torch.Tensor, Category]]:
        """Everything the rank holds between steps: by unit, then the moments."""
        for unit in self.units:
            yield from unit.held_tensors()
        for name, value in self._optimizer_state():
            if name != STEP_COUNTER:
                yield value, rest_places(self.spec).moments

    def step_counters(self) -> Iterator[torch.Tensor]:
        """The optimizer's step counters, which no category counts."""
        return (value for name, value in self._optimizer_state() if name == STEP_COUNTER)

    def padding_nbytes(self) -> int:
        """How many bytes of what is held at rest are padding."""
        return rest_padding_nbytes(self.spec, self.comm.rank)

    def _optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of all that torch's optimizers keep; nothing before the first step."""
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from ((name, value) for name, value in state.items() if value is not None)


_UNIT_ACTION = {
    OpKind.UNSHARD: lambda unit: unit.unshard(),
    OpKind.WAIT_UNSHARD: lambda unit: unit.wait_unshard(),
    OpKind.RESHARD: lambda unit: unit.reshard(),
    OpKind.ZERO_GRAD: lambda unit: unit.zero_grad(),
    OpKind.REDUCE_GRAD: lambda unit: unit.reduce_grad(),
    OpKind.WAIT_REDUCE: lambda unit: unit.wait_reduce(),
    OpKind.REDUCE_REPLICAS: lambda unit: unit.reduce_replicas(),
    OpKind.WAIT_REPLICAS: lambda unit: unit.wait_replicas(),
    OpKind.SYNC_PARAM: lambda unit: unit.sync_param(),
    OpKind.WAIT_SYNC: lambda unit: unit.wait_sync(),
}
