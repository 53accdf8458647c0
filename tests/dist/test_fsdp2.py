"""torch's FSDP2 as a witness: it trains what a single process trains, and its rehearsal is its live run to the byte.

Rehearsed and live events are compared one by one, in order: place, category and bytes. torch's own FSDPMemTracker
is a second account of the rehearsed model.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import DTensor

from cluster.fake import FakeTensors
from cluster.meter import Meter
from cluster.rank import RankJob, run_rank
from cluster.rehearse import CPU, fake_group, rehearse
from cluster.steps import steps_of
from cluster.witness.chunks import Chunks
from cluster.witness.fsdp2 import FSDP2, _Gather
from tests.dist.ranks import RankPool
from tests.dist.references import BOUND, distance, reference
from tests.dist.test_rehearse import assert_same_events, live
from tests.dist.tracker import tracker_totals
from tests.dist.trained import trained
from zeroviz.collectives import CollectiveOp
from zeroviz.compare import compare
from zeroviz.models import PRESETS
from zeroviz.partition import local_rows, padding_numel, plan_for
from zeroviz.spec import Implementation, Optimizer, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.trace import Category, Origin, Trace, rank_from_dict
from zeroviz.witness.fsdp2_groups import alike

STRATEGIES = (Strategy.ZERO3, Strategy.SHARD_GRAD_OP)


def fsdp2(model: str, ranks: int, **settings: Any) -> RunSpec:
    """17 tokens, and rows that no number of ranks divides."""
    return RunSpec(model=PRESETS[model], ranks=ranks, impl=Implementation.FSDP2, **{"seq": 17, "steps": 2, **settings})


# ---- it trains ----


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_trains_as_one_process_does(rank_pool: RankPool, model: str, ranks: int) -> None:
    want, start = reference(fsdp2(model, ranks, batch=2))
    for strategy in STRATEGIES:
        (got,) = trained(rank_pool, fsdp2(model, ranks, batch=2, strategy=strategy))
        assert distance(got, want, start) <= BOUND[ranks]


# ---- live and rehearsed ----


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_holds_what_was_rehearsed(rank_pool: RankPool, model: str, ranks: int, strategy: Strategy) -> None:
    for unit, precision in (("block", Precision.FP32), ("layer", Precision.BF16), ("model", Precision.FP32)):
        spec = fsdp2(model, ranks, strategy=strategy, precision=precision, unit=UnitPolicy.parse(unit))
        for got, want in zip(rehearse(spec).ranks, live(rank_pool, spec), strict=True):
            assert_same_events(got, want, (spec, got.rank))
            assert want.allocator is not None
            assert want.allocator.rest_nbytes == want.rest_nbytes + want.step_counter_nbytes
            assert want.allocator.unattributed_nbytes == 0


@pytest.mark.parametrize("optimizer", [optimizer for optimizer in Optimizer if optimizer.runs])
def test_every_optimizer_takes_what_was_rehearsed(rank_pool: RankPool, optimizer: Optimizer) -> None:
    """Over 3 ranks, of which the last updates fewer rows than the others."""
    spec = fsdp2("tiny", 3, optimizer=optimizer)
    for got, want in zip(rehearse(spec).ranks, live(rank_pool, spec), strict=True):
        assert_same_events(got, want, (spec, got.rank))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gpt2_holds_what_was_rehearsed(rank_pool: RankPool, ranks: int, strategy: Strategy) -> None:
    spec = fsdp2("gpt2", ranks, strategy=strategy, seq=33)
    for got, want in zip(rehearse(spec).ranks, live(rank_pool, spec), strict=True):
        assert_same_events(got, want, (spec, got.rank))


def with_a_buffer_kept(job: RankJob) -> dict[str, int]:
    """What is still held, by category, when a step ends in which a gathered buffer of block 0 was kept."""
    kept: list[torch.Tensor] = []
    allocate = _Gather.allocate
    num_calls = 0

    def allocate_and_keep(self: _Gather, *size: Any, **options: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        buffer = allocate(self, *size, **options)
        if num_calls == 8 + 2:  # a step gathers four units twice; the second step is the metered one
            kept.append(buffer)
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Gather, "allocate", allocate_and_keep)
        rank = rank_from_dict(run_rank(job))
    return {category.value: nbytes for category, nbytes in rank.leftover().items()}


def test_a_buffer_kept_is_found(rank_pool: RankPool) -> None:
    """The comparison can fail: block 0 in chunks of rows is 37,237 elements and the padding that two ranks need."""
    spec = fsdp2("tiny", 2)
    block = plan_for(spec).units[1]
    nbytes = 4 * (block.numel + padding_numel(block, spec))
    assert rank_pool.run(with_a_buffer_kept, spec) == [{Category.ALL_GATHER_BUFFER.value: nbytes}] * 2


# ---- what FSDP2 is known for ----


def test_at_rest_it_is_sharded_by_rows() -> None:
    """4 bytes of each row's elements, three ranks' chunks alike; moments without padding."""
    spec = fsdp2("tiny", 3)
    for rank in rehearse(spec).ranks:
        rows = [(shape, local_rows(shape.shape[0], 3, rank.rank)) for shape in spec.model.params]
        own = sum(num * (shape.numel // shape.shape[0]) for shape, num in rows)
        padded = sum(-(-shape.shape[0] // 3) * (shape.numel // shape.shape[0]) for shape in spec.model.params)
        assert rank.rest[Category.SHARDED_PARAM] == rank.rest[Category.SHARDED_GRAD] == 4 * padded
        assert rank.rest[Category.OPTIMIZER_STATE] == 8 * own
        assert rank.padding_nbytes == 8 * (padded - own)
        assert rank.step_counter_nbytes == 4 * len(spec.model.params)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_wire_is_two_gathers_or_one(ranks: int) -> None:
    """Every unit whole with its padding, gathered twice under ZeRO-3 and once under SHARD_GRAD_OP, reduced once."""
    for strategy, times in ((Strategy.ZERO3, 2), (Strategy.SHARD_GRAD_OP, 1)):
        spec = fsdp2("tiny-llama", ranks, strategy=strategy)
        whole = sum(unit.numel + padding_numel(unit, spec) for unit in plan_for(spec).units)
        totals = {total.op: total for total in rehearse(spec).ranks[0].wire()}
        assert totals[CollectiveOp.ALL_GATHER].payload_nbytes == 4 * whole * times
        assert totals[CollectiveOp.REDUCE_SCATTER].payload_nbytes == 4 * whole
        assert totals[CollectiveOp.ALL_GATHER].count == times * len(plan_for(spec).units)


def test_backward_gathers_one_group_ahead() -> None:
    """torch's implicit prefetch: when block 2 runs backward, the buffer of block 1's gather is there already."""
    trace = rehearse(fsdp2("tiny", 2)).ranks[0]
    begun = [
        event.unit
        for event in trace.events
        if event.phase == "backward" and event.category is Category.ALL_GATHER_BUFFER and event.delta_nbytes > 0
    ]
    # The root and, on its heels, block 2; then block 1 while block 2 is current, and so on; block 0 prefetches nothing.
    assert begun == ["root", "root", "block 2", "block 1"]


def test_a_live_run_beside_its_rehearsal_leaves_nothing_unexplained(rank_pool: RankPool) -> None:
    spec = fsdp2("tiny", 2)
    measured = Trace(Origin.LIVE, spec, tuple(live(rank_pool, spec)), {"backend": "gloo", "devices": ["cpu"] * 2})
    comparison = compare(rehearse(spec), measured)
    assert comparison.unexplained == ()
    assert all(row.difference == 0 for row in (*comparison.memory, *comparison.wire, *comparison.allocator))


# ---- how it is cut ----


@pytest.mark.parametrize("num_rows", [1, 2, 5, 12, 257])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5, 7, 300])
def test_a_chunk_on_demand_is_the_one_of_torchs_list(num_rows: int, num_chunks: int) -> None:
    tensor = torch.arange(num_rows * 3.0).view(num_rows, 3)
    mine, theirs = Chunks(tensor, num_chunks, 0), _chunk_with_empty(tensor, num_chunks, dim=0)
    assert len(mine) == len(theirs) == num_chunks
    for got, want in zip(mine, theirs, strict=True):
        assert torch.equal(got, want) and got.numel() == want.numel()
        assert got.untyped_storage()._cdata == tensor.untyped_storage()._cdata or got.numel() == 0


def test_chunks_on_demand_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = fsdp2("tiny-llama", 5)
    quick = rehearse(spec)
    monkeypatch.setattr("cluster.rehearse.chunks_on_demand", nullcontext)
    assert rehearse(spec).ranks == quick.ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64, 300, 1000])
def test_ranks_of_a_stretch_hold_the_same_rows(ranks: int) -> None:
    """And neighbouring stretches do not: each is as long as it can be."""
    spec = fsdp2("tiny-llama", ranks)
    rows = sorted({shape.shape[0] for shape in spec.model.params})
    kinds = [{tuple(local_rows(num, ranks, rank) for num in rows) for rank in stretch} for stretch in alike(spec)]
    assert all(len(kind) == 1 for kind in kinds)
    assert all(left != right for left, right in pairwise(kinds))
    assert [rank for stretch in alike(spec) for rank in stretch] == list(range(ranks))


# ---- torch's own tracker ----


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_torchs_tracker_counts_the_same(model: str, strategy: Strategy) -> None:
    """Its peak and what it finds held after the step, step counters included, in which it is right to the byte."""
    cases = (("block", Precision.FP32, 2), ("layer", Precision.BF16, 3), ("model", Precision.FP32, 5))
    for unit, precision, ranks in cases:
        spec = fsdp2(model, ranks, strategy=strategy, precision=precision, unit=UnitPolicy.parse(unit), seq=40)
        rank = rehearse(spec).ranks[0]
        peak, held = tracker_totals(spec)
        assert rank.peak().total + rank.step_counter_nbytes == peak, spec
        assert rank.rest_nbytes + rank.step_counter_nbytes == held, spec


def test_it_is_torchs_code_that_is_rehearsed() -> None:
    """The modules are torch's FSDP modules, and the parameters DTensors in N pieces."""
    spec = fsdp2("tiny", 3)
    with fake_group(spec, 0) as comm:
        make = steps_of(spec, comm, CPU)
        with FakeTensors():
            steps = make(Meter())
            assert isinstance(steps, FSDP2)
            kinds = [type(module).__name__ for module in steps.model.modules() if hasattr(module, "unshard")]
            assert kinds == ["FSDPChain", "FSDPSegment", "FSDPSegment", "FSDPSegment"]
            assert all(isinstance(parameter, DTensor) for parameter in steps.model.parameters())
