"""A whole model as one autograd graph: what it allocates, keeps and frees, for libraries that wrap a model.

`cluster.witness.plain` runs this step. Our own code runs each segment as a graph of its own (`zeroviz.activations`);
here nothing is cut, so that in backward nobody holds what crosses a unit's border, and every parameter's fresh gradient
is handed over: it stays what it is, and the library decides what becomes of it.

    graph = Graph(spec, fresh=Category.UNSHARDED_GRAD)   # under which category fresh gradients are born
    graph.load_batch(ledger)
    graph.forward(ledger)                                # or graph.forward_of(ledger, segment), one by one
    graph.backward(ledger, ready)                        # or begin_backward, backward_of one by one, end_backward
    graph.drop_batch(ledger)

Every call books its changes under the places that PlainModel marks: phase, op and the unit's name. `ready(shape)` is
called at the moment the parameter's gradient is there, in torch's order (`graph.ready_order`), with the ledger standing
just behind it: whatever the library's hook allocates is booked there. The gradient itself is booked already, without a
key; who frees it books `ledger.replay([(fresh, -nbytes)])`, see `nbytes`. A tied parameter is ready once, at its first
use (the embedding), when both gradients have been added.

[Note: one graph] Three things are held from outside. While a segment's forward runs the caller holds its input, needed
or not (of which nothing is left in backward). The loss is held until the batch is dropped. And the gradient of the
loss, made before backward begins, until it is over. Gradients are made in the dtype computed with; autograd casts none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

from zeroviz.activations import input_nbytes
from zeroviz.category import Category
from zeroviz.kernels import norm_saves_input
from zeroviz.ledger import Ledger
from zeroviz.models import NamedShape, Sublayer, SublayerKind
from zeroviz.partition import Place, Segment, plan_for
from zeroviz.schedule import OpKind, Phase
from zeroviz.spec import RunSpec
from zeroviz.sublayers import passes_with_grads
from zeroviz.tape import FP32_NBYTES, Ready, Sizes

ZERO_GRAD = "zero grad"
"""An op that own's schedule does not have: the gradients of the step before are dropped."""

OnReady = Callable[[NamedShape], None]


def _nothing(shape: NamedShape) -> None:
    """The gradient stays as it is."""


class Graph:
    """The model of `spec` as PlainModel builds it. See the module's docstring."""

    def __init__(self, spec: RunSpec, *, fresh: Category) -> None:
        """fresh: the category under which a parameter's gradient is born."""
        self.spec, self.plan, self.fresh = spec, plan_for(spec), fresh
        compute = spec.recipe.compute
        recipe = replace(spec.recipe, param=compute, grad=compute)
        self.sizes = Sizes(spec.model, recipe, spec.batch, spec.seq, fresh=fresh)

    def unit_name(self, segment: Segment) -> str:
        """The name under which the segment's changes are booked."""
        return self.plan.units[segment.unit].name

    def nbytes(self, shape: NamedShape) -> int:
        """Bytes of the parameter's fresh gradient."""
        return shape.numel * self.sizes.itemsize

    @cached_property
    def ready_order(self) -> tuple[NamedShape, ...]:
        """Every parameter once, in the order in which gradients become ready in backward."""
        order: list[NamedShape] = []
        self.backward(Ledger(), order.append)
        return tuple(order)

    def load_batch(self, ledger: Ledger) -> None:
        ledger.at(Phase.FORWARD.label, OpKind.LOAD_BATCH.label, "")
        ledger.alloc("batch", input_nbytes(self.spec), Category.INPUT)

    def drop_batch(self, ledger: Ledger) -> None:
        """Drop the loss and the batch."""
        ledger.at(Phase.BACKWARD.label, OpKind.DROP_BATCH.label, "")
        ledger.replay([(Category.ACTIVATION, -FP32_NBYTES)])
        ledger.free("batch")

    def forward(self, ledger: Ledger) -> None:
        for segment in self.plan.segments:
            self.forward_of(ledger, segment)

    def forward_of(self, ledger: Ledger, segment: Segment) -> None:
        """Book one segment's forward."""
        ledger.at(Phase.FORWARD.label, OpKind.FORWARD.label, self.unit_name(segment))
        for sublayer, place in self._places(segment):
            ledger.replay(passes_with_grads(self.sizes, sublayer.kind, place)[0])
        if segment.sublayers[0].kind is not SublayerKind.EMBED and not norm_saves_input(self.sizes):
            ledger.replay([(Category.ACTIVATION, -self.sizes.rows(self.sizes.model.hidden))])  # the caller held it

    def backward(self, ledger: Ledger, ready: OnReady = _nothing) -> None:
        self.begin_backward(ledger)
        for segment in reversed(self.plan.segments):
            self.backward_of(ledger, segment, ready)
        self.end_backward(ledger)

    def begin_backward(self, ledger: Ledger) -> None:
        """The gradient of the loss is made, a one, before the first hook says that backward has begun."""
        ledger.replay([(Category.ACTIVATION, FP32_NBYTES)])

    def backward_of(self, ledger: Ledger, segment: Segment, ready: OnReady = _nothing) -> None:
        """Book one segment's backward; `ready(shape)` is called as each gradient of it is there."""
        ledger.at(Phase.BACKWARD.label, OpKind.BACKWARD.label, self.unit_name(segment))
        for sublayer, place in reversed(list(self._places(segment))):
            _, up_to_grads, rest = passes_with_grads(self.sizes, sublayer.kind, place)
            for changes, which in up_to_grads:
                ledger.replay(changes)
                ready(_parameter(sublayer, which))
            ledger.replay(rest)

    def end_backward(self, ledger: Ledger) -> None:
        """The caller of backward lets the gradient of the loss go."""
        ledger.replay([(Category.ACTIVATION, -FP32_NBYTES)])

    def _places(self, segment: Segment) -> Iterator[tuple[Sublayer, Place]]:
        last = len(segment.sublayers) - 1
        for position, sublayer in enumerate(segment.sublayers):
            yield sublayer, Place(position == 0, position == last, self.spec.model.tied, in_graph=True)


def _parameter(sublayer: Sublayer, which: Ready) -> NamedShape:
    """The sublayer's parameter: a layer begins with its weight, and its bias follows."""
    weights = [number for number, shape in enumerate(sublayer.params) if not shape.name.endswith(".bias")]
    return sublayer.params[weights[which.layer] + which.is_bias]
