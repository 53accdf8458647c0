"""Whose code runs the step: the one place that knows the implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
from torch.distributed.device_mesh import init_device_mesh

from cluster.collectives import Collectives
from cluster.link import Link
from cluster.meter import Meter
from cluster.own.step import Executor
from cluster.witness.ddp import DDP
from cluster.witness.fsdp2 import FSDP2
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
        mesh = init_device_mesh(device.type, (spec.ranks,))
        return partial(FSDP2, spec, comm, device=device, mesh=mesh)
    if spec.impl is Implementation.OWN:
        return partial(Executor, spec, comm, device=device)
    return partial(_WITNESS[spec.impl], spec, comm, device=device)


_WITNESS: dict[Implementation, Callable[..., Steps]] = {
    Implementation.DDP: DDP,
}
