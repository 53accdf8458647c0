"""Which device each rank computes on, and which backend the ranks talk over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """The backend, and rank r's device at position r."""

    backend: str
    devices: tuple[str, ...]


def place(num_ranks: int, num_gpus: int) -> Placement:
    """NCCL when every rank has a GPU to itself; gloo when ranks share GPUs, which NCCL refuses, and on CPUs.

    Five ranks on two GPUs are on cuda:0, cuda:1, cuda:0, cuda:1, cuda:0.
    """
    if num_gpus == 0:
        return Placement("gloo", ("cpu",) * num_ranks)
    devices = tuple(f"cuda:{rank % num_gpus}" for rank in range(num_ranks))
    return Placement("nccl" if num_ranks <= num_gpus else "gloo", devices)
