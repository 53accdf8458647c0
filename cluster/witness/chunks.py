"""How FSDP2 cuts a parameter: by rows, into N chunks of ceil(rows / N), the last ones shorter or empty.

torch makes a list of all N chunks to take one of them; for N = 1,024 and a model of 70 billion parameters that takes
the better part of a minute. `chunks_on_demand` makes the one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor

from zeroviz.partition import chunk_rows, local_rows


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without a new view; other tensors as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Chunks(Sequence[torch.Tensor]):
    """`torch.chunk(tensor, num_chunks, dim)` filled up with empty tensors, each chunk made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num_chunks, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._num_chunks

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not 0 <= index < self._num_chunks:
            raise IndexError(index)
        num_rows = self._tensor.size(self._dim)
        length = local_rows(num_rows, self._num_chunks, index)
        if length == 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, index * chunk_rows(num_rows, self._num_chunks), length)


@contextmanager
def chunks_on_demand() -> Iterator[None]:
    """Inside, `fully_shard` makes the one chunk it takes and not all N."""
    name = "_chunk_with_empty"
    whole = getattr(_fsdp_param, name)
    setattr(_fsdp_param, name, Chunks)
    try:
        yield
    finally:
        setattr(_fsdp_param, name, whole)
