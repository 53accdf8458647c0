"""A model as FSDP2 gets it: segments of sublayers that say where in the step they are.

[Note: FSDP2's hooks] fully_shard gathers a group in a forward pre-hook and, in backward, in a hook on the gradient of
its output; it frees in a forward hook, and reduces when the gradient of the group's input is there. So the marks are
set from `forward` itself, which the forward hooks surround, and from gradient hooks made before and after fully_shard's
own, which run in the order they were made in. A group whose input takes no gradient (the embedding's, and the root's)
is reduced in a callback at the end of backward, and ours is queued before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.autograd import Variable

from cluster.collectives import Collectives
from cluster.meter import Meter
from cluster.model import SublayerModule
from cluster.text import Batch
from zeroviz.schedule import OpKind, Phase
from zeroviz.trace import Category


class Marks:
    """Tells the meter and the collectives which op of the step has begun."""

    def __init__(self, meter: Meter, comm: Collectives) -> None:
        self._meter, self._comm = meter, comm

    def at(self, phase: Phase, op: str, unit: str = "") -> None:
        self._comm.at(phase.value, unit)
        self._meter.at(phase.value, op, unit)

    def tag(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """Say what tensors with memory are for; None and empty ones are passed over."""
        for tensor in tensors:
            if tensor is not None and tensor.untyped_storage().nbytes():
                self._meter.tag(tensor, category)


class Segment(nn.Module):
    """Consecutive sublayers of one unit: `segment(x, batch) -> x`, as a SublayerModule.

    is_group: fully_shard makes a group of it; else its parameters are in the root's.
    """

    def __init__(self, unit: str, sublayers: Sequence[SublayerModule], *, is_group: bool, marks: Marks) -> None:
        super().__init__()
        self.unit, self.is_group, self._marks = unit, is_group, marks
        self.sublayers = nn.ModuleList(sublayers)
        self.first_hook: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        self._enter(Phase.FORWARD)
        if self.is_group and x is not None:
            _on_grad(x, self._before_reduce)
        for sublayer in self.sublayers:
            x = sublayer(x, batch)
        assert x is not None
        if self.first_hook is not None:
            _on_grad(x, self.first_hook)
        if self.is_group:
            self._marks.at(Phase.FORWARD, OpKind.RESHARD.value, self.unit)
            _on_grad(x, self._before_unshard)
        return x

    def __call__(self, x: Tensor | None, batch: Batch) -> Tensor:
        y: Tensor = super().__call__(x, batch)
        return y

    def enter_backward(self, grad: Tensor) -> None:
        """A hook on the gradient of the output: the parameters are whole."""
        self._enter(Phase.BACKWARD)

    def enter_reduce(self) -> None:
        """The gradients are there and whole."""
        self._marks.tag((parameter.grad for parameter in self.parameters()), Category.UNSHARDED_GRAD)
        self._marks.at(Phase.BACKWARD, OpKind.REDUCE_GRAD.value, self.unit)

    def _enter(self, phase: Phase) -> None:
        self._marks.tag(self.parameters(), Category.UNSHARDED_PARAM)
        op = OpKind.FORWARD if phase is Phase.FORWARD else OpKind.BACKWARD
        self._marks.at(phase, op.value, self.unit)

    def _before_unshard(self, grad: Tensor) -> None:
        self._marks.at(Phase.BACKWARD, OpKind.UNSHARD.value, self.unit)

    def _before_reduce(self, grad: Tensor) -> None:
        self.enter_reduce()


class Chain(nn.Module):
    """The whole model: `chain(batch) -> loss`. Its own parameters, for fully_shard, are those of segments that are no
    groups; all of these are of one unit."""

    def __init__(self, segments: Sequence[Segment], marks: Marks) -> None:
        super().__init__()
        self.segments = nn.ModuleList(segments)
        self._marks, self._order = marks, tuple(segments)
        self._in_root = [segment for segment in segments if not segment.is_group]
        self._order[-1].first_hook = self._begin_backward

    def __call__(self, batch: Batch) -> Tensor:
        self._at_root(Phase.FORWARD, OpKind.UNSHARD)
        loss: Tensor = super().__call__(batch)
        if not self._order[-1].is_group:
            _on_grad(loss, self._order[-1].enter_backward)  # after the root's own
        return loss

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor | None = None
        for segment in self._order:
            if segment.is_group:
                self._marks.at(Phase.FORWARD, OpKind.UNSHARD.value, segment.unit)
            x = segment(x, batch)
            if segment.is_group or segment is not self._order[-1]:
                _on_grad(x, segment.enter_backward)
        assert x is not None
        self._at_root(Phase.FORWARD, OpKind.RESHARD)
        return x

    def _begin_backward(self, grad: Tensor) -> None:
        """The first hook of backward: fully_shard queues its callback in the second."""
        Variable._execution_engine.queue_callback(self._before_last_reduce)
        self._at_root(Phase.BACKWARD, OpKind.UNSHARD)

    def _before_last_reduce(self) -> None:
        for segment in self._in_root or self._order[:1]:
            segment.enter_reduce()

    def _at_root(self, phase: Phase, op: OpKind) -> None:
        if self._in_root:
            self._marks.at(phase, op.value, self._in_root[0].unit)


def _on_grad(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` when the tensor's gradient is there, after the hooks it has."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
