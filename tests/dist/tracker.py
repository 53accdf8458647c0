"""torch's FSDPMemTracker on the FSDP2 model that we rehearse: an account of the same bytes that we did not write."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from cluster.meter import Meter
from cluster.rehearse import CPU, fake_group
from cluster.steps import steps_of
from cluster.witness.fsdp2 import FSDP2
from zeroviz.spec import RunSpec


def tracker_totals(spec: RunSpec) -> tuple[int, int]:
    """(peak, held after the step) of rank 0's second step, with the optimizer's step counters.

    `Tensor.item` answers 1, since a fake tensor has no number: the loss, and Adam's step count.
    """
    with fake_group(spec, 0) as comm:
        make = steps_of(spec, comm, CPU)
        with FakeTensorMode(), patch.object(torch.Tensor, "item", lambda self: 1.0):
            steps = make(Meter())
            assert isinstance(steps, FSDP2)
            tracker = FSDPMemTracker(steps.model, steps.optimizer)
            with tracker:
                steps.step()
                tracker.reset_mod_stats()
                steps.step()
    return tuple(  # type: ignore[return-value]
        sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot(when).values()) for when in ("peak", "current")
    )
