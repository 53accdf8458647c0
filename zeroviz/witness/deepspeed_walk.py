"""What every stage of DeepSpeed's has in common: a step of micro-batches, and what its engine makes around a loss.

[Note: the loss] The engine divides the loss by the number of micro-batches and, but for stage 0 and for stage 1 with
fp32 gradients of bf16 parameters, multiplies it by a scale of one. Each makes a number, which the engine holds till
backward is over, and another one on the way back.

[Note: what is left out] Numbers of a few bytes that are made and dropped while the norm is worked out, in the update's
op. They never stand beside the most that the op holds, except where a part is smaller than they are.
"""

from __future__ import annotations

from zeroviz import artefacts
from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.ledger import Ledger
from zeroviz.models import NamedShape
from zeroviz.schedule import OpKind, Phase
from zeroviz.spec import DType, RunSpec
from zeroviz.tape import NUMBER_NBYTES
from zeroviz.wire import Collective
from zeroviz.witness.deepspeed_parts import scales_the_loss
from zeroviz.witness.graph import Graph

FP32 = DType.FP32.itemsize
WIDE = 8  # bytes of an fp64 number: the dtype of the norm
_SCRATCH, _KEPT = Category.KERNEL_SCRATCH, Category.ACTIVATION


class Walk:
    """One rank's step. A stage says what becomes of gradients (`ready`, `finish`) and how it updates (`update`)."""

    keeps_gradients = False
    """Whether a micro-batch's gradients stay whole: the first one's do, later ones are added to them and dropped."""

    def __init__(self, spec: RunSpec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        self.ledger = Ledger()
        self.collectives: list[Collective] = []
        self.number = 0
        """Of the micro-batch."""
        self._staying = Graph(spec, fresh=Category.UNSHARDED_GRAD)
        self._passing = Graph(spec, fresh=Category.TEMPORARY)

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch is the step's last."""
        return self.number == self.spec.accumulation - 1

    @property
    def graph(self) -> Graph:
        """Of the micro-batch; its gradients are born as what they are going to be."""
        return self._staying if self.keeps_gradients and self.number == 0 else self._passing

    def step(self) -> None:
        """Book the whole step."""
        for number in range(self.spec.accumulation):
            self.number = number
            self.micro_batch()
            self.ledger.at(Phase.OPTIMIZER.label, OpKind.OPTIMIZER_STEP.label, "")
        self.update()

    def micro_batch(self) -> None:
        graph, ledger = self.graph, self.ledger
        graph.load_batch(ledger)
        self.forward()
        scales = scales_the_loss(self.spec)
        ledger.replay(_before_backward(2 if scales else 1))
        self.backward()
        ledger.replay([(_KEPT, -FP32)])  # the gradient of the loss by itself
        self.finish()
        ledger.replay([(_KEPT, -FP32)] * (2 if scales else 1))
        graph.drop_batch(ledger)

    def forward(self) -> None:
        self.graph.forward(self.ledger)

    def backward(self) -> None:
        """Every segment's, with the gradient of the loss that the first of them uses up."""
        for position, segment in enumerate(reversed(self.graph.plan.segments)):
            if position == 0:
                self.ledger.at(Phase.BACKWARD.label, OpKind.BACKWARD.label, self.graph.unit_name(segment))
                self.ledger.replay([(_KEPT, -FP32)])
            self.graph.backward_of(self.ledger, segment, self.ready)

    def ready(self, shape: NamedShape) -> None:
        """The gradient of `shape` is there."""
        raise NotImplementedError

    def finish(self) -> None:
        """Backward is over; the loss is still held."""
        raise NotImplementedError

    def update(self) -> None:
        raise NotImplementedError

    def send(self, op: CollectiveOp, dtype: DType, numel: int) -> None:
        """Note a call on all ranks; one rank sends nothing."""
        if self.spec.ranks > 1:
            phase, _, unit = self.ledger.where
            self.collectives.append(Collective(op, dtype.value, self.spec.ranks, numel * dtype.itemsize, phase, unit))

    def make(self, nbytes: int, category: Category = Category.TEMPORARY) -> None:
        if nbytes:
            self.ledger.replay([(category, nbytes)])

    def drop(self, nbytes: int, category: Category = Category.TEMPORARY) -> None:
        if nbytes:
            self.ledger.replay([(category, -nbytes)])

    def divide(self, dtype: DType) -> None:
        """A tensor is divided by N, in place."""
        self.ledger.replay(artefacts.number(dtype.itemsize))

    def norm(self, numels: list[int]) -> None:
        """The squares of each tensor of the gradient are summed up in fp64, of which it makes a copy."""
        changes = []
        for numel in numels:
            changes += [
                (Category.TEMPORARY, numel * WIDE),
                (Category.TEMPORARY, WIDE),
                (Category.TEMPORARY, -numel * WIDE),
            ]
        self.ledger.replay(changes)
        self.drop(len(numels) * WIDE)


def _before_backward(num_factors: int) -> list[tuple[Category, int]]:
    """The loss times each of the factors, then the gradient of that back to the loss. See [Note: the loss]."""
    forward = [(_SCRATCH, NUMBER_NBYTES), (_SCRATCH, FP32), (_KEPT, FP32), (_SCRATCH, -FP32)] * num_factors
    back: list[tuple[Category, int]] = [(_KEPT, FP32)]  # one, by itself
    for number in reversed(range(num_factors)):
        kind = _KEPT if number == 0 else Category.TEMPORARY
        back += [(_SCRATCH, FP32), (kind, FP32), (_SCRATCH, -FP32)]
        if number < num_factors - 1:
            back.append((Category.TEMPORARY, -FP32))
        back.append((_SCRATCH, -NUMBER_NBYTES))
    return [*forward, *back]
