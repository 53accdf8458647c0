"""Gradient-norm clipping over shards: one number is summed over the ranks that own different parts.

The squares of what a rank owns are summed in fp32, then over the ranks; the square root is the norm of the whole mean
gradient, the same on every rank and under every strategy, padding being zero. The scale is that of torch's
`clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.collectives import Collectives
from zeroviz.collectives import Group

EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_


def clip_grads(grads: Sequence[torch.Tensor], max_norm: float, comm: Collectives, among: Group | None) -> None:
    """Scale `grads`, each (numel,), in place. among: the ranks that own the rest of it; None where all is owned."""
    scale = torch.zeros((), dtype=torch.float32, device=grads[0].device)
    for grad in grads:
        _add_square(scale, torch.linalg.vector_norm(grad, dtype=torch.float32))
    if among is not None:
        comm.all_reduce(scale, among).wait()
    scale.sqrt_().add_(EPSILON).reciprocal_().mul_(max_norm).clamp_(max=1.0)
    for grad in grads:
        grad.mul_(scale)


def _add_square(total: torch.Tensor, norm: torch.Tensor) -> None:
    """Add the square of `norm`, which is gone when this returns."""
    total.addcmul_(norm, norm)
