"""Settling: a metered step waits for gloo's copies to go, within a bound, and an unmetered one asks nothing."""

from __future__ import annotations

import pytest
import torch

from cluster.meter import Meter
from cluster.own.step import Executor
from cluster.rank import RankJob, joined_group
from cluster.settle import Settling, workers_rest
from tests.dist.ranks import RankPool
from zeroviz.models import PRESETS
from zeroviz.spec import RunSpec, Strategy


def test_what_is_down_already_is_not_waited_for() -> None:
    settling = Settling(lambda: 100)
    assert settling.down_to(100) == 100
    assert (settling.num_late, settling.late_ns, settling.num_given_up) == (0, 0, 0)


def test_a_late_free_is_waited_for_and_counted() -> None:
    readings = iter([150, 150, 120, 90])
    settling = Settling(lambda: next(readings))
    assert settling.down_to(100) == 90
    assert (settling.num_late, settling.num_given_up) == (1, 0)
    assert settling.late_ns > 0


def test_what_never_goes_is_given_up_and_counted() -> None:
    settling = Settling(lambda: 150, bound_ns=1_000_000)
    assert settling.down_to(100) is None
    assert (settling.num_late, settling.num_given_up) == (1, 1)


def seen_at_work(job: RankJob) -> tuple[bool, bool]:
    """Whether gloo's workers were seen running while they reduced, and at rest when all was over."""
    tensor = torch.ones(20_000_000)
    with joined_group(job):
        work = torch.distributed.all_reduce(tensor, async_op=True)
        was_running = False
        while not work.is_completed():
            was_running |= not workers_rest()
        work.wait()
        return was_running, Settling(lambda: 0).until(workers_rest)


def test_gloos_workers_are_seen_at_work_and_at_rest(rank_pool: RankPool) -> None:
    """A profiler that stops while one of them runs may be written to later."""
    spec = RunSpec(model=PRESETS["tiny"], ranks=2)
    assert rank_pool.run(seen_at_work, spec) == [(True, True)] * 2


class Counting:
    """A counter that says how often it was asked; nothing ever has to be waited for."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __call__(self) -> int:
        self.num_asked += 1
        return 0


def asked(job: RankJob) -> list[int]:
    """How often a step asks the counter: unmetered, and in the collectives of a settled one."""
    counter = Counting()
    found = []
    with joined_group(job) as comm:
        executor = Executor(job.spec, comm, Meter(), torch.device("cpu"))
        for settling in (None, Settling(counter)):
            before = counter.num_asked
            with comm.settled_by(settling):
                executor.step()
            found.append(counter.num_asked - before)
    return found


@pytest.mark.parametrize(
    ("changes", "num_asked"),
    [
        # Four units: 8 gathers and 4 reductions. Each asks as it starts, and once more when its wait, at once, is over.
        ({"strategy": Strategy.ZERO3}, 12 + 12),
        ({"strategy": Strategy.DDP}, 4 + 4),
        # Beside compute only the last reduction, and the last gather of updated parameters, is waited for at once.
        ({"strategy": Strategy.ZERO1, "async_reduce": True}, 8 + 2),
        # All are under way when the first wait comes.
        ({"strategy": Strategy.DDP, "async_reduce": True}, 4),
    ],
)
def test_an_unmetered_step_asks_nothing(rank_pool: RankPool, changes: dict[str, object], num_asked: int) -> None:
    spec = RunSpec(model=PRESETS["tiny"], ranks=2, seq=17, steps=2, **changes)  # type: ignore[arg-type]
    for unmetered, settled in rank_pool.run(asked, spec):
        assert unmetered == 0
        assert settled == num_asked
