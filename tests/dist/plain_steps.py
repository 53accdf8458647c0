"""What tests of other people's implementations share: train one, and hold its live run beside the arithmetic.

[Note: turns] Between two changes of direction (allocations, then frees, ...) torch's order is not promised; the bytes
by category at every such turn are, with the place, and so every maximum of every op is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from cluster.collectives import Collectives
from cluster.meter import Meter
from cluster.rank import RankJob, run_rank
from cluster.steps import steps_of
from cluster.witness.plain import PlainSteps
from tests.dist.ranks import RankPool
from tests.dist.trained import in_group
from zeroviz.compare import compare
from zeroviz.predict import predict
from zeroviz.spec import DType, RunSpec
from zeroviz.trace import Category, Event, Origin, RankTrace, Trace, merge, rank_from_dict

CPU = torch.device("cpu")
T = TypeVar("T")

Turn = tuple[str, str, str, dict[Category, int]]


def with_steps(job: RankJob, function: Callable[[PlainSteps], T]) -> T:
    """`function(steps)` on a rank of the job's group."""

    def work(comm: Collectives) -> T:
        steps = steps_of(job.spec, comm, CPU)(Meter())
        assert isinstance(steps, PlainSteps)
        return function(steps)

    return in_group(job, work)


def live(rank_pool: RankPool, spec: RunSpec) -> Trace:
    """The measured trace of all ranks."""
    ranks = [rank_from_dict(result) for result in rank_pool.run(run_rank, spec)]
    merged = merge(Origin.LIVE, spec, ranks)
    return Trace(Origin.LIVE, spec, merged.ranks, {"backend": "gloo", "devices": ["cpu"] * spec.ranks})


def turns(events: Sequence[Event], *, with_scratch: bool) -> list[Turn]:
    """The bytes of every turn, see the note. with_scratch: kernels' scratch is compared as well."""
    found: list[Turn] = []
    key: tuple[str, str, str, bool] | None = None
    total: Counter[Category] = Counter()
    for phase, op, unit, category, nbytes in events:
        if category is Category.KERNEL_SCRATCH and not with_scratch:
            continue
        if key != (phase, op, unit, nbytes > 0):
            key, total = (phase, op, unit, nbytes > 0), Counter()
            found.append((phase, op, unit, total))
        total[category] += nbytes
    return found


def assert_as_predicted(measured: Trace) -> None:
    """Every rank holds, does and sends what the arithmetic says, to the byte; kernels' scratch in bf16 left out."""
    spec = measured.spec
    exact = spec.recipe.compute is DType.FP32
    predicted = predict(spec)
    for want, got in zip(predicted.ranks, measured.ranks, strict=True):
        assert_same_figures(want, got, spec, exact=exact)
        ours, theirs = (turns(trace.events, with_scratch=exact) for trace in (want, got))
        assert ours == theirs, (spec, got.rank)
    comparison = compare(predicted, measured)
    assert comparison.unexplained == (), spec
    if exact:
        rows = (*comparison.memory, *comparison.wire, *comparison.allocator)
        assert all(row.difference == 0 for row in rows), spec


def assert_same_figures(want: RankTrace, got: RankTrace, spec: RunSpec, *, exact: bool) -> None:
    """At rest, on the wire and at the peak to the byte, and nothing that the allocator alone knows of.

    exact: also what this machine's kernels and backend borrow at the peak.
    """
    what = (spec, got.rank)
    want.check()
    assert rest(got) == rest(want), what
    assert got.step_counter_nbytes == want.step_counter_nbytes, what
    assert got.padding_nbytes == want.padding_nbytes, what
    assert got.collectives == want.collectives, what
    assert got.peak() == want.peak(), what
    assert got.leftover() == {}, what
    if exact:
        assert got.machine_peak() == want.machine_peak(), what
    reading = got.allocator
    assert reading is not None and reading.unattributed_nbytes == 0, what
    assert reading.rest_nbytes == got.rest_nbytes + got.step_counter_nbytes, what


def rest(rank: RankTrace) -> dict[Category, int]:
    """By category, those that hold nothing left out."""
    return {category: nbytes for category, nbytes in rank.rest.items() if nbytes}
