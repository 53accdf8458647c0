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
from cluster.witness.fsdp2 import FSDP2
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


def steps_of(spec: RunSpec, comm: Collectives, device: torch.device) -> Callable[[Meter], Steps]:
    """What makes the rank's model. What belongs to the group, and not to the model, is made here and now."""
    if spec.impl is Implementation.FSDP2:
        mesh = init_device_mesh(device.type, (spec.ranks,))
        return partial(FSDP2, spec, comm, device=device, mesh=mesh)
    return partial(Executor, spec, comm, device=device)
