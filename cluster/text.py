"""Batches of the shipped text: deterministic, and the same global batch whatever the number of ranks.

A token is a byte of `data/founding.txt`, folded into the model's vocabulary (byte % vocab). Sequence i of the global
batch of a step starts at an offset drawn from (seed, step, i) alone. Rank r takes sequences [r * batch, (r+1) * batch),
so N ranks with `batch` sequences see together what one rank with N * batch sees.

[Note: own storage] Every tensor of a batch has a storage of exactly its size. A slice of a global batch would not:
on rank 0 it is contiguous, so even `.contiguous()` returns a view that keeps the whole global batch alive.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zeroviz.models import Family, ModelShape
from zeroviz.spec import DType, RunSpec

TORCH_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}


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
    starts = np.array([_start(spec.seed, step, index, len(text)) for index in sequences], dtype=np.int64)
    places = (starts[:, None] + np.arange(spec.seq + 1)) % len(text)  # the text is a ring
    window = text[places].astype(np.int64) % spec.model.vocab
    # torch.tensor copies into a storage of its own.
    return Batch(
        tokens=torch.tensor(window[:, :-1], device=device),
        targets=torch.tensor(window[:, 1:], device=device),
        rotary=_rotary(spec.model, spec.seq, TORCH_DTYPES[spec.precision.param], device),
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
    frequencies = model.rope_theta ** (-np.arange(0, model.head_dim, 2) / model.head_dim)
    angles = np.outer(np.arange(seq), frequencies)
    return (
        torch.tensor(np.cos(angles), dtype=dtype, device=device),
        torch.tensor(np.sin(angles), dtype=dtype, device=device),
    )


@cache
def _text() -> npt.NDArray[np.uint8]:
    return np.frombuffer(files("cluster").joinpath("data/founding.txt").read_bytes(), dtype=np.uint8)
