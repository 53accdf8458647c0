"""The probe of a run's own groups: a backend that is wrong is named before a number is shown.

What is planted here happened to people: an average that is a sum (field report 26), a collective that does nothing
after another one failed (gloo, `_coalescing_manager`), shards in the wrong places. The inputs are those of
`cluster.probe.rank_input`: with two ranks 1 .. 9, 1 on rank 0 and 11 .. 19, 11 on rank 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import cluster.probe as probe_module
from cluster.allocator import live_nbytes
from cluster.dtypes import TORCH_DTYPE
from cluster.probe import NUM_ADDENDS, GroupCheck, Probe, _alike, expected, failures, probes, rank_input
from cluster.rank import RankJob, joined_group, run_rank
from cluster.session import Session
from tests.dist.ranks import RankPool
from zeroviz.collectives import CollectiveOp
from zeroviz.errors import RunError
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import DType, Precision, RunSpec, Strategy
from zeroviz.trace import Category, rank_from_dict

CPU = torch.device("cpu")


def spec_of(ranks: int, **settings: Any) -> RunSpec:
    return RunSpec(model=PRESETS["tiny"], ranks=ranks, seq=7, steps=2, **settings)


def sentences(job: RankJob) -> dict[str, str]:
    with joined_group(job):
        group = dist.group.WORLD
        assert group is not None
        return {each.name: sentence for each, sentence in failures(group, CPU).items()}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gloo_is_right_in_everything_a_run_may_use(rank_pool: RankPool, ranks: int) -> None:
    for found in rank_pool.run(sentences, spec_of(ranks)):
        assert len(found) == len(TORCH_DTYPE) * (len(CollectiveOp) + 2)  # two of them also average
        assert set(found.values()) == {""}


# ---- what is planted ----


def average_is_a_sum(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *tensors, op=dist.ReduceOp.SUM, **named: real(*tensors, op=dist.ReduceOp.SUM, **named)


def nothing_is_done(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *tensors, **named: None


def wrong_in_bf16(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *tensors, **named: None if tensors[0].dtype is torch.bfloat16 else real(*tensors, **named)


def raises(real: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*tensors: torch.Tensor, **named: Any) -> None:
        raise RuntimeError("Backend gloo does not implement it\nand more")

    return refuse


def from_rank_0(real: Callable[..., Any]) -> Callable[..., Any]:
    """A broadcast from another rank than was asked for."""
    return lambda tensor, group_src, **named: real(tensor, group_src=0, **named)


# The name to patch, what is planted, and the words of rank 1's message on two ranks.
PLANTS: list[tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]], list[str]]] = [
    (
        "torch.distributed.all_reduce",
        average_is_a_sum,
        ["all_reduce average fp32", "got 12, 14, 16, 18, 20, 22, 24, 26, 28, 12", "6, 7, 8, 9, 10, 11, 12, 13, 14, 6"],
    ),
    (
        "cluster.probe._reduce_scatter",
        average_is_a_sum,
        ["reduce_scatter average fp32", "rank 1 got 22, 24, 26, 28, 12 where one process gets 11, 12, 13, 14, 6;"],
    ),
    ("torch.distributed.all_reduce", nothing_is_done, ["all_reduce fp32", "rank 1 got 11, 12", "gets 12, 14"]),
    ("cluster.probe._all_gather", nothing_is_done, ["all_gather fp32", "got 0, 0", "gets 1, 2"]),
    ("cluster.probe._reduce_scatter", nothing_is_done, ["reduce_scatter fp32", "got 0, 0", "gets 22, 24"]),
    ("cluster.probe._reduce_scatter", wrong_in_bf16, ["reduce_scatter bf16", "got 0, 0", "gets 22, 24"]),
    ("torch.distributed.broadcast", from_rank_0, ["broadcast fp32", "got 1, 2", "gets 11, 12"]),
    ("torch.distributed.all_reduce", raises, ["all_reduce fp32", "got RuntimeError: Backend gloo does not implement"]),
]


def planted_run(job: RankJob) -> str:
    """What `run_rank` raises with the plant whose number is the seed; no step may be made."""
    name, plant, _ = PLANTS[job.spec.seed]
    module = probe_module if name.startswith("cluster.") else dist
    attribute = name.rpartition(".")[2]
    with (
        patch.object(module, attribute, plant(getattr(module, attribute))),
        patch("cluster.rank.steps_of", side_effect=AssertionError("a model was made")),
        pytest.raises(RunError) as caught,
    ):
        run_rank(job)
    assert caught.value.rank == job.rank
    return str(caught.value)


@pytest.mark.parametrize("number", range(len(PLANTS)), ids=lambda n: f"{PLANTS[n][0]}-{PLANTS[n][1].__name__}")
def test_a_wrong_collective_is_named_before_a_model_is_made(rank_pool: RankPool, number: int) -> None:
    said = rank_pool.run(planted_run, spec_of(2, seed=number))[1]
    assert said.startswith("The backend gloo is wrong: ")
    for words in [*PLANTS[number][2], "over 2 ranks", "nothing was trained"]:
        assert words in said


def after_a_failed_coalescing(job: RankJob) -> str:
    """gloo cannot coalesce; torch raises, and from then on makes no collective of this process at all."""
    with joined_group(job):
        with pytest.raises(RuntimeError, match="startCoalescing"), dist._coalescing_manager(device=CPU):
            dist.all_reduce(torch.ones(1))
        with pytest.raises(RunError) as caught:
            GroupCheck(CPU).check()
        return str(caught.value)


def test_a_group_that_went_silent_is_found(rank_pool: RankPool) -> None:
    """The trap is torch's own; nothing is planted. (Each test's workers join a new group, so it ends with this one.)"""
    for rank, said in enumerate(rank_pool.run(after_a_failed_coalescing, spec_of(2))):
        assert f"all_reduce fp32 over 2 ranks, rank {rank} got" in said
    assert set(rank_pool.run(sentences, spec_of(2))[0].values()) == {""}


def wrong_in_a_group_made_later(job: RankJob) -> str:
    """The world's group is right; of two made by the model, one rank's is not."""
    with joined_group(job):
        groups = GroupCheck(CPU)
        groups.check()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        real = dist.broadcast

        def broken(tensor: torch.Tensor, group: Any, **named: Any) -> Any:
            return None if group is pairs[1] else real(tensor, group=group, **named)

        with patch.object(dist, "broadcast", broken):
            try:
                groups.check()
            except RunError as error:
                return str(error)
        with patch.object(dist, "broadcast", nothing_is_done(real)):
            groups.check()  # each group once: these have been tried
        return ""


def test_groups_that_a_model_makes_are_tried_too_and_each_once(rank_pool: RankPool) -> None:
    found = rank_pool.run(wrong_in_a_group_made_later, spec_of(4))
    assert found[:2] == ["", ""]
    assert "broadcast fp32 over 2 ranks, rank 0 got" in found[2]  # its rank in the group; rank 1 sends


def held_by_the_probe(job: RankJob) -> int:
    with joined_group(job):
        before = live_nbytes(CPU)
        GroupCheck(CPU).check()
        after = live_nbytes(CPU)
    assert before is not None and after is not None
    return after - before


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_probe_leaves_nothing_that_a_meter_would_read(rank_pool: RankPool, ranks: int) -> None:
    assert rank_pool.run(held_by_the_probe, spec_of(ranks)) == [0] * ranks


def silent_engine(job: RankJob) -> dict[str, Any]:
    """A rank on an engine whose all-reduce does nothing."""
    with patch.object(dist, "all_reduce", nothing_is_done(dist.all_reduce)):
        return run_rank(job)


def test_a_session_says_which_rank_and_why() -> None:
    with (
        Session(target="tests.dist.test_probe:silent_engine", run_timeout_s=60) as session,
        pytest.raises(
            RunError, match=r"Rank [01] failed with RunError: The backend gloo is wrong: all_reduce fp32"
        ) as c,
    ):
        session.run_sync(spec_of(2))
    assert c.value.rank in (0, 1)


# ---- the probe itself can fail ----


@pytest.mark.parametrize("ranks", [2, 3, 5, NUM_ADDENDS, NUM_ADDENDS + 1, 16, 64])
@pytest.mark.parametrize("dtype", TORCH_DTYPE.values(), ids=str)
def test_no_wrong_result_passes_for_a_right_one(ranks: int, dtype: torch.dtype) -> None:
    """For each probe: the rank's own input, nothing, a sum for a mean, a sum without one rank, the next rank's part.

    Some rank must see it; that is enough, since one rank's error ends the run."""
    for each in (found for found in probes() if found.dtype is dtype):
        right = [expected(each, rank, ranks, CPU) for rank in range(ranks)]
        assert all(_alike(want.to(dtype), want, each, ranks) for want in right)
        inputs = [rank_input(rank, ranks, dtype, CPU).double() for rank in range(ranks)]
        part = (lambda full, rank: full.chunk(ranks)[rank]) if each.op is CollectiveOp.REDUCE_SCATTER else None
        wrong: dict[str, list[torch.Tensor]] = {
            "own": [part(mine, rank) if part else mine for rank, mine in enumerate(inputs)],
            "nothing": [torch.zeros_like(want) for want in right],
        }
        if each.op in (CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER):
            total = torch.stack(inputs).sum(0)
            scale = ranks if each.average else 1
            less = (total - inputs[-1]) / scale
            wrong["one missing"] = [part(less, rank) if part else less for rank in range(ranks)]
            if each.average:
                wrong["sum"] = [part(total, rank) if part else total for rank in range(ranks)]
        if part or each.op is CollectiveOp.ALL_GATHER:
            wrong["elsewhere"] = (
                [right[(rank + 1) % ranks] for rank in range(ranks)] if part else [want.roll(5) for want in right]
            )
        for what, results in wrong.items():
            seen = [_alike(got.to(dtype), want, each, ranks) for got, want in zip(results, right, strict=True)]
            assert not all(seen), (each.name, what)


@pytest.mark.parametrize("ranks", [2, NUM_ADDENDS, 16, 100])
def test_sums_are_exact_in_bf16_for_any_number_of_ranks(ranks: int) -> None:
    """The largest sum: 6 x 9 + 10 x (0 + 1 + ... + 5) = 204 <= 256."""
    want = expected(Probe(CollectiveOp.ALL_REDUCE, torch.bfloat16), 0, ranks, CPU)
    assert want.max().item() == (204 if ranks >= NUM_ADDENDS else 2 * 9 + 10)
    assert torch.equal(want.bfloat16().double(), want)


# ---- field report 25 ----


@pytest.mark.parametrize("strategy", [Strategy.ZERO1, Strategy.ZERO3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_25_gloos_reduce_scatter_clones_its_whole_input(rank_pool: RankPool, strategy: Strategy, ranks: int) -> None:
    """One BACKEND_COPY as large as the whole padded gradient for each unit's reduction, and nothing of it in the peak
    as on NCCL. The wire is counted as a reduce-scatter's, whatever gloo makes of it."""
    spec = spec_of(ranks, strategy=strategy)
    wanted = predict(spec)
    for result, predicted in zip(rank_pool.run(run_rank, spec), wanted.ranks, strict=True):
        rank = rank_from_dict(result)
        scattered = [call for call in rank.collectives if call.op is CollectiveOp.REDUCE_SCATTER]
        clones = [
            event.delta_nbytes
            for event in rank.events
            if event.category is Category.BACKEND_COPY and event.delta_nbytes > 0 and event.op.startswith("reduce")
        ]
        assert clones == [call.payload_nbytes for call in scattered]
        assert Category.BACKEND_COPY not in rank.peak().by_category
        assert rank.peak() == predicted.peak()


def averaged(job: RankJob) -> tuple[torch.Tensor, torch.Tensor]:
    """(the average and the sum of (rank + 1) * 3 over two ranks, by reduce-scatter)."""
    with joined_group(job) as comm:
        found = []
        for average in (True, False):
            shard = torch.zeros(1)
            comm.reduce_scatter(shard, torch.full((2,), 3.0 * (comm.rank + 1)), average=average).wait()
            found.append(shard)
        return found[0], found[1]


def test_26_our_seams_average_is_no_sum(rank_pool: RankPool) -> None:
    """(3 + 6) / 2 = 4.5 and 9. That a backend which sums is caught, in either dtype, stands above."""
    for mean, total in rank_pool.run(averaged, spec_of(2)):
        assert (mean.item(), total.item()) == (4.5, 9.0)
    assert {each.dtype for each in probes() if each.average} == {
        TORCH_DTYPE[dtype] for dtype in (DType.FP32, DType.BF16)
    }


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED])
def test_a_run_after_the_probe_measures_what_is_predicted(rank_pool: RankPool, precision: Precision) -> None:
    spec = spec_of(3, precision=precision)
    for result, predicted in zip(rank_pool.run(run_rank, spec), predict(spec).ranks, strict=True):
        rank = rank_from_dict(result)
        assert (rank.at_rest, rank.peak()) == (predicted.at_rest, predicted.peak())
