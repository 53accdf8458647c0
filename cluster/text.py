"""Batches of the shipped text: deterministic, and the same global batch whatever the number of ranks.

A token is a byte of `data/founding.txt`, folded into the model's vocabulary (byte % vocab). Sequence i of the global
batch of a step starts at an offset drawn from (seed, step, i) alone. Rank r takes sequences [r * batch, (r+1) * batch),
so N ranks with `batch` sequences see together what one rank with N * batch sees.

[Note: own storage] Every tensor of a batch has a storage of exactly its size, made from a list in one allocation. A
slice of a global batch would not: on rank 0 it is contiguous, so even `.contiguous()` returns a view that keeps the
whole global batch alive.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import cos, sin

import torch
from torch import Tensor

from cluster.dtypes import TORCH_DTYPE
from zeroviz.models import Family, ModelShape
from zeroviz.spec import RunSpec


@dataclass(frozen=True)
class Batch:
    """What one rank reads in one step.

    tokens, targets: (batch, seq) int64; a target is the token after.
    rotary: cos and sin, each (seq, head_dim / 2) in the compute dtype; None for learned positions.
    """

    tokens: Tensor
    targets: Tensor
    rotary: tuple[Tensor, Tensor] | None

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tokens, self.targets, *(self.rotary or ()))


def load_batch(spec: RunSpec, rank: int, step: int, device: torch.device | str = "cpu") -> Batch:
    """Rank `rank`'s batch of step `step`. Its bytes are `zeroviz.predict.input_nbytes(spec)`."""
    return _load(spec, range(rank * spec.batch, (rank + 1) * spec.batch), step, device)


def load_global_batch(spec: RunSpec, step: int, device: torch.device | str = "cpu") -> Batch:
    """All ranks' sequences in one batch, in rank order: what a single process would train on."""
    return _load(spec, range(spec.ranks * spec.batch), step, device)


def _load(spec: RunSpec, sequences: range, step: int, device: torch.device | str) -> Batch:
    text = _text()
    rows = []
    for index in sequences:
        start = _start(spec.seed, step, index, len(text))
        # The text is a ring.
        rows.append([text[(start + i) % len(text)] % spec.model.vocab for i in range(spec.seq + 1)])
    return Batch(
        tokens=torch.tensor([row[:-1] for row in rows], device=device),
        targets=torch.tensor([row[1:] for row in rows], device=device),
        rotary=_rotary(spec.model, spec.seq, TORCH_DTYPE[spec.recipe.compute], device),
    )


def _start(seed: int, step: int, index: int, num_places: int) -> int:
    digest = hashlib.sha256(f"{seed} {step} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % num_places


def _rotary(
    model: ModelShape, seq: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor] | None:
    """cos and sin of position * theta^(-2i / head_dim), each (seq, head_dim / 2)."""
    if model.family is not Family.LLAMA:
        return None
    frequencies = [model.rope_theta ** (-2 * i / model.head_dim) for i in range(model.head_dim // 2)]
    angles = [[position * frequency for frequency in frequencies] for position in range(seq)]
    return (
        torch.tensor([[cos(angle) for angle in row] for row in angles], dtype=dtype, device=device),
        torch.tensor([[sin(angle) for angle in row] for row in angles], dtype=dtype, device=device),
    )


@cache
def _text() -> bytes:
    return files("cluster").joinpath("data/founding.txt").read_bytes()
