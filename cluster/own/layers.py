"""Linear and embedding layers that add their weight's gradient straight into its place in the unit's flat buffer.

autograd makes a parameter's gradient as a tensor of its own and then adds it to the view that is there: for a moment
twice the weight's bytes, which for the head of a large vocabulary is the peak of the step, and one more pass over
memory. Here the matrix product itself adds to the view, as with Megatron's `gradient_accumulation_fusion`; the first
one of a step writes it, which spares the zeros and their reading. Vectors (norms, biases) and learned positions go
autograd's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cluster.model import Layers

NO_PADDING = -1  # every token has a row of its own


BeginGrad = Callable[[Tensor], bool]
"""Called with a weight before anything is added to its gradient; whether there is nothing yet to add to, which it says
only where weight and gradient have one dtype."""


def _is_there(weight: Tensor) -> bool:
    """Of a buffer that has its memory already, and zeros or a sum in it."""
    return False


class AddingLayer(nn.Module):
    """A layer whose weight's gradient is a view of a buffer."""

    begin_grad: BeginGrad = staticmethod(_is_there)


class _Linear(torch.autograd.Function):
    """x (..., num_in), weight (num_out, num_in), bias (num_out,) or None -> (..., num_out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, begin_grad: BeginGrad) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.begin_grad = begin_grad
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        is_first = ctx.begin_grad(weight)
        rows = dy.flatten(0, -2)
        _add_product(weight.grad, rows.t(), x.flatten(0, -2), is_first=is_first)
        return dy @ weight, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """total += left @ right, in one kernel where the dtypes are one; is_first: total = left @ right."""
    if is_first:
        torch.mm(left, right, out=total)
    elif total.dtype is left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


class _Embedding(torch.autograd.Function):
    """tokens (batch, seq), weight (vocab, hidden) -> (batch, seq, hidden).

    The gradient is a tensor of its own for a moment, as autograd's: rows added one by one to what a tied head left
    would be rounded in another order, and training would end elsewhere than one process' does.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, begin_grad: BeginGrad) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.begin_grad = begin_grad
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        tokens, weight = ctx.saved_tensors
        is_first = ctx.begin_grad(weight)
        grad = torch.ops.aten.embedding_dense_backward(dy, tokens, len(weight), NO_PADDING, False)
        weight.grad.copy_(grad) if is_first else weight.grad.add_(grad)
        return None, None, None


class AddingLinear(AddingLayer, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Linear.apply(x, self.weight, self.bias, self.begin_grad)  # type: ignore[no-untyped-call]
        return y


class AddingEmbedding(AddingLayer, nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        rows: Tensor = _Embedding.apply(tokens, self.weight, self.begin_grad)  # type: ignore[no-untyped-call]
        return rows


ADDING = Layers(AddingLinear, AddingEmbedding)
