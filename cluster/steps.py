"""Whose code runs the step: the one place that knows the implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch

from cluster.collectives import Collectives
from cluster.link import Link
from cluster.meter import Meter
from cluster.own.step import Executor
from cluster.witness.ddp import DDP
from cluster.witness.fsdp1 import FSDP1, mesh_of
from cluster.witness.fsdp2 import FSDP2, Meshes
from cluster.witness.plain import PlainSteps
from zeroviz.spec import Implementation, RunSpec
from zeroviz.trace import Category


class Steps(Protocol):
    """One rank's model and its training steps."""

    link: Link

    def step(self) -> float: ...
    def held_tensors(self) -> Iterator[tuple[torch.Tensor, Category]]: ...
    def step_counters(self) -> Iterator[torch.Tensor]: ...
    def padding_nbytes(self) -> int: ...


def needs_group(spec: RunSpec) -> bool:
    """Whether a process group is needed: our own code needs none for a single rank."""
    return spec.ranks > 1 or spec.impl is not Implementation.OWN


def counted_of(steps: Steps) -> PlainSteps | None:
    """The steps of a library whose calls do not pass our seam, and are counted from outside."""
    return steps if isinstance(steps, PlainSteps) else None


def steps_of(spec: RunSpec, comm: Collectives, device: torch.device) -> Callable[[Meter], Steps]:
    """What makes the rank's model. What belongs to the group, and not to the model, is made here and now."""
    if spec.impl is Implementation.FSDP2:
        return partial(FSDP2, spec, comm, device=device, meshes=Meshes.of(spec, comm, device))
    if spec.impl is Implementation.OWN:
        return partial(Executor, spec, comm, device=device)
    if spec.impl is Implementation.MEGATRON:
        from cluster.witness.megatron import Megatron, groups_of  # an optional extra, and seconds to import

        return partial(Megatron, spec, comm, device=device, groups=groups_of(comm.rank))
    if spec.impl is Implementation.DEEPSPEED:
        from cluster.witness.deepspeed import DeepSpeed, join  # an optional extra, and seconds to import

        join(comm, device)
        return partial(DeepSpeed, spec, comm, device=device)
    if spec.impl is Implementation.FSDP1:
        return partial(FSDP1, spec, comm, device=device, mesh=mesh_of(spec, device))
    if spec.impl is Implementation.ZERO_REDUNDANCY:
        from cluster.witness.zero_redundancy import ZeroRedundancy  # a second to import

        return partial(ZeroRedundancy, spec, comm, device=device)
    return partial(_WITNESS[spec.impl], spec, comm, device=device)


_WITNESS: dict[Implementation, Callable[..., Steps]] = {
    Implementation.DDP: DDP,
}
