"""The executor: walks the schedule op by op, the same list the predictor walks, with tensors instead of numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cluster.collectives import Collectives
from cluster.meter import Meter
from cluster.model import SublayerModule, build_sublayer
from cluster.own.ddp import DDPUnit
from cluster.own.zero1 import Zero1Unit
from cluster.own.zero2 import Zero2Unit
from cluster.own.zero3 import Zero3Unit
from cluster.text import Batch, load_batch
from zeroviz.partition import plan_for
from zeroviz.schedule import Op, OpKind, schedule
from zeroviz.spec import RunSpec, Strategy
from zeroviz.trace import Category

UNIT_OF = {
    Strategy.DDP: DDPUnit,
    Strategy.ZERO1: Zero1Unit,
    Strategy.ZERO2: Zero2Unit,
    Strategy.ZERO3: Zero3Unit,
}


class Executor:
    """One rank's model and training step.

    [Note: segments] Each segment runs on a detached input, so its graph ends at the segment's border. What is kept for
    backward is the pair (input, edge of the output): the edge, not the output, because the next segment's input shares
    the output's memory already and an output kept here would live one phase longer than needed.
    """

    def __init__(self, spec: RunSpec, comm: Collectives, meter: Meter, device: torch.device) -> None:
        self.spec, self.comm, self.meter, self.device = spec, comm, meter, device
        self.plan = plan_for(spec)
        self.ops = schedule(spec)
        self.units = [UNIT_OF[spec.strategy](spec, unit, comm, meter, device) for unit in self.plan.units]
        self.modules: list[list[SublayerModule]] = []
        for segment in self.plan.segments:
            modules = [build_sublayer(sublayer, spec.model) for sublayer in segment.sublayers]
            self.units[segment.unit].install(modules)
            self.modules.append(modules)
        self.num_steps = 0
        self._batch: Batch | None = None
        self._saved: dict[int, tuple[torch.Tensor | None, GradientEdge]] = {}
        self._activation: torch.Tensor | None = None
        self._grad: torch.Tensor | None = None

    @torch.no_grad()
    def step(self) -> float:
        """One training step; returns this rank's loss, the mean over its tokens."""
        loss = 0.0
        for op in self.ops:
            name = "" if op.unit is None else self.plan.units[op.unit].name
            self.comm.at(op.phase.value, name)
            with self.meter.op(op.phase.value, op.kind.value, name):
                self._execute(op)
            if op.kind is OpKind.FORWARD and op.segment == len(self.plan.segments) - 1:
                assert self._activation is not None
                loss = self._activation.item()
        self.num_steps += 1
        return loss

    def _execute(self, op: Op) -> None:
        unit = None if op.unit is None else self.units[op.unit]
        match op.kind:
            case OpKind.LOAD_BATCH:
                self._load_batch()
            case OpKind.DROP_BATCH:
                self._batch = None
            case OpKind.FORWARD:
                assert op.segment is not None
                self._forward(op.segment)
            case OpKind.BACKWARD:
                assert op.segment is not None
                self._backward(op.segment)
            case _:
                assert unit is not None
                _UNIT_ACTION[op.kind](unit)

    def _load_batch(self) -> None:
        self._batch = load_batch(self.spec, self.comm.rank, self.num_steps, self.device)
        for tensor in self._batch.tensors():
            self.meter.tag(tensor, Category.INPUT)

    def _forward(self, segment: int) -> None:
        """Run the segment on its detached input and keep the pair for backward."""
        assert self._batch is not None
        entry = None if self._activation is None else self._activation.detach().requires_grad_()
        self._activation = None
        with torch.enable_grad():
            output = entry
            for module in self.modules[segment]:
                output = module(output, self._batch)
        assert output is not None
        self._saved[segment] = (entry, get_gradient_edge(output))
        self._activation = output.detach()

    def _backward(self, segment: int) -> None:
        """Run backward from the stored pair; parameter gradients add up in the units' flat buffers."""
        entry, edge = self._saved.pop(segment)
        grad = self._grad
        if grad is None:  # the last segment: d loss / d loss
            assert self._activation is not None
            grad = torch.ones_like(self._activation)
            self._activation = None
        torch.autograd.backward(edge, grad)
        self._grad = None if entry is None else entry.grad

    def held_tensors(self) -> Iterator[tuple[torch.Tensor, Category]]:
        """Everything the rank holds between steps, by unit."""
        for unit in self.units:
            yield from unit.held_tensors()

    def step_counters(self) -> Iterator[torch.Tensor]:
        """The optimizer's step counters, which no category counts."""
        for unit in self.units:
            counter = unit.step_counter()
            if counter is not None:
                yield counter


_UNIT_ACTION = {
    OpKind.UNSHARD: lambda unit: unit.unshard(),
    OpKind.WAIT_UNSHARD: lambda unit: unit.wait_unshard(),
    OpKind.RESHARD: lambda unit: unit.reshard(),
    OpKind.PREPARE_GRAD: lambda unit: unit.prepare_grad(),
    OpKind.REDUCE_GRAD: lambda unit: unit.reduce_grad(),
    OpKind.WAIT_REDUCE: lambda unit: unit.wait_reduce(),
    OpKind.OPTIMIZER_STEP: lambda unit: unit.optimizer_step(),
    OpKind.SYNC_PARAM: lambda unit: unit.sync_param(),
    OpKind.WAIT_SYNC: lambda unit: unit.wait_sync(),
}
