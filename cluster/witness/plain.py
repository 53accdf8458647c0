"""A model as its users write it, for libraries that wrap a whole model: sublayers in a row, one autograd graph.

It says where in the step it is, from `forward` and from hooks on the gradients of each unit's output: nothing in the
library is touched. A step is written as in most training loops: gradients are dropped at its beginning, so they are
held at rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from cluster.collectives import Collectives
from cluster.dtypes import TORCH_DTYPE
from cluster.link import Link
from cluster.meter import Meter
from cluster.model import SublayerModule, build_sublayer, initial_value
from cluster.own.step import STEP_COUNTER
from cluster.text import Batch, load_batch
from cluster.witness.counted import Counted
from zeroviz.partition import plan_for
from zeroviz.schedule import OpKind, Phase
from zeroviz.spec import RunSpec
from zeroviz.trace import Category
from zeroviz.witness.graph import ZERO_GRAD


class Places:
    """Tells the meter and the count which op of the step has begun."""

    def __init__(self, meter: Meter, counted: Counted) -> None:
        self.meter, self.counted = meter, counted

    def at(self, phase: Phase, op: str, unit: str = "") -> None:
        self.counted.at(phase.value, unit)
        self.meter.at(phase.value, op, unit)


class PlainSegment(nn.Module):
    """Consecutive sublayers of one unit: `segment(x, batch) -> x`."""

    def __init__(self, unit: str, sublayers: list[SublayerModule], places: Places) -> None:
        super().__init__()
        self.unit, self._places = unit, places
        self.sublayers = nn.ModuleList(sublayers)

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        self._places.at(Phase.FORWARD, OpKind.FORWARD.value, self.unit)
        for sublayer in self.sublayers:
            x = sublayer(x, batch)
        assert x is not None
        x.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]
        return x

    def __call__(self, x: Tensor | None, batch: Batch) -> Tensor:
        y: Tensor = super().__call__(x, batch)
        return y

    def _enter_backward(self, grad: Tensor) -> None:
        self._places.at(Phase.BACKWARD, OpKind.BACKWARD.value, self.unit)


class PlainModel(nn.Module):
    """`model(batch) -> loss`, the mean over this rank's tokens. Parameters have their initial values, whole."""

    def __init__(self, spec: RunSpec, places: Places, device: torch.device) -> None:
        super().__init__()
        plan, dtype = plan_for(spec), TORCH_DTYPE[spec.recipe.param]
        shapes = {shape.name: shape for shape in spec.model.params}
        values: dict[str, nn.Parameter] = {}  # by name: a tied one is used twice
        segments = []
        for planned in plan.segments:
            modules = [build_sublayer(sublayer, spec.model) for sublayer in planned.sublayers]
            for module in modules:
                for name in module.slots:
                    if name not in values:
                        value = initial_value(spec.model, shapes[name], spec.seed)
                        values[name] = nn.Parameter(value.to(device, dtype))
                    module.install(name, values[name])
            segments.append(PlainSegment(plan.units[planned.unit].name, modules, places))
        self.segments = nn.ModuleList(segments)
        self.by_name = values
        """Every parameter by its published name, in order of first use."""

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor | None = None
        for segment in self.segments:
            x = segment(x, batch)
        assert x is not None
        return x


class PlainSteps:
    """One rank's training step around a wrapped model. A witness makes `model` and `optimizer` and says what it holds.

    num_warm_steps: after how many steps the library allocates as it will from then on.
    """

    num_warm_steps = 1

    def __init__(self, spec: RunSpec, comm: Collectives, meter: Meter, device: torch.device) -> None:
        self.spec, self.comm, self.meter, self.device = spec, comm, meter, device
        self.link = Link(meter)
        self.counted = Counted()
        self.places = Places(meter, self.counted)
        self._num_batches = 0
        self.plain = PlainModel(spec, self.places, device)
        self.model, self.optimizer = self.wrap(self.plain)

    def wrap(self, plain: PlainModel) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The library's model around `plain`, and its optimizer."""
        raise NotImplementedError

    def step(self) -> float:
        """One training step; returns this rank's loss, the mean over its tokens and micro-batches."""
        accumulation = self.spec.accumulation
        self.places.at(Phase.FORWARD, ZERO_GRAD)
        self.zero_grad()
        loss = 0.0
        for number in range(accumulation):
            with self.reducing(self.spec.reduces_each or number == accumulation - 1):
                loss += self.micro_batch() / accumulation
        self.places.at(Phase.OPTIMIZER, OpKind.OPTIMIZER_STEP.value)
        self.update()
        return loss

    def micro_batch(self) -> float:
        """Forward and backward of one micro-batch; returns this rank's loss, the mean over its tokens."""
        self.places.at(Phase.FORWARD, OpKind.LOAD_BATCH.value)
        batch = load_batch(self.spec, self.comm.rank, self._num_batches, self.device)
        self._num_batches += 1
        self.tag(batch.tensors(), Category.INPUT)  # no variable here may hold one of them
        loss = self.model(batch)
        value: float = loss.item()
        self.backward(loss)
        self.tag_gradients()
        self.places.at(Phase.BACKWARD, OpKind.DROP_BATCH.value)
        del loss, batch
        return value

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def reducing(self, reduces: bool) -> AbstractContextManager[None]:
        """Around a micro-batch, of which the gradients are reduced or, with `reduces` false, only added up."""
        if not reduces:
            raise NotImplementedError
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """From the loss to the gradients of the mean over micro-batches."""
        share = None if self.spec.accumulation == 1 else torch.full_like(loss, 1 / self.spec.accumulation)
        torch.autograd.backward(loss, share)

    def update(self) -> None:
        self.optimizer.step()

    def tag(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Say what tensors born in this step are for."""
        for tensor in tensors:
            self.meter.tag(tensor, category)

    def tag_gradients(self) -> None:
        """Gradients made in this backward have no name yet."""
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                self.meter.tag(parameter.grad, Category.UNSHARDED_GRAD)

    def held_tensors(self) -> Iterator[tuple[Tensor, Category]]:
        """Everything the rank holds between steps; a storage counts once, under the first category given."""
        for parameter in self.plain.parameters():
            yield parameter, Category.UNSHARDED_PARAM
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                yield parameter.grad, Category.UNSHARDED_GRAD
        for name, value in self.optimizer_state():
            if name != STEP_COUNTER:
                yield value, Category.OPTIMIZER_STATE

    def step_counters(self) -> Iterator[Tensor]:
        """The optimizer's step counters, which no category counts."""
        return (value for name, value in self.optimizer_state() if name == STEP_COUNTER)

    def padding_nbytes(self) -> int:
        """How many bytes of what is held at rest are padding."""
        return 0

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all that the optimizer keeps; nothing before the first step."""
        for state in self.optimizer.state.values():
            yield from ((name, value) for name, value in state.items() if isinstance(value, Tensor))
