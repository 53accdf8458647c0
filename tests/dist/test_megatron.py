"""megatron-core's distributed optimizer as a witness: it trains what one process trains, and every byte of it is
predicted. What gloo's thread does with its copies beside the step is its own matter, and is named where it shows.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from cluster.allocator import live_nbytes
from cluster.meter import Meter
from cluster.rank import RankJob, joined_group, run_rank
from cluster.steps import steps_of
from tests.dist.plain_steps import CPU, live, rest, turns
from tests.dist.ranks import RankPool
from tests.dist.references import BOUND, distance, megatron_reference
from tests.dist.trained import of_pieces, train
from tests.every import crossed
from zeroviz.collectives import CollectiveOp
from zeroviz.compare import compare
from zeroviz.models import PRESETS, ModelShape
from zeroviz.predict import predict
from zeroviz.settings import Settings
from zeroviz.spec import DType, Implementation, Optimizer, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.trace import Category, Event, Trace, rank_from_dict
from zeroviz.witness.megatron_buffer import alike_stretches, buckets, owned_pieces

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="pip install zeroviz[megatron]")

TINY, LLAMA = PRESETS["tiny"], PRESETS["tiny-llama"]
UNTIED = replace(TINY, attention_bias=False, mlp_bias=False, tied=False)
RECIPES = (Precision.FP32, Precision.BF16_FP32GRAD)
BUCKETS = (None, 20_000, 1)


def megatron(model: ModelShape = TINY, ranks: int = 2, **settings: Any) -> RunSpec:
    """17 tokens: nothing is divisible by anything."""
    fixed = {"strategy": Strategy.MEGATRON_OPTIM, "impl": Implementation.MEGATRON}
    return RunSpec(model=model, ranks=ranks, **fixed, **{"seq": 17, "steps": 2, **settings})


# ---- it trains ----


def assert_trains(rank_pool: RankPool, spec: RunSpec, bound: float) -> None:
    parts = [rank.parts for rank in rank_pool.run(train, spec)]
    got, owner = of_pieces(spec, parts)
    want, start = megatron_reference(spec, owner)
    assert distance(got, want, start) <= bound, spec


@pytest.mark.parametrize(("model", "ranks"), crossed([TINY, LLAMA], [1, 2, 3, 4]))
def test_it_trains_as_one_process_with_the_same_casts(rank_pool: RankPool, model: ModelShape, ranks: int) -> None:
    """To the last bit, in both recipes: the reference adds in gloo's order."""
    for precision in RECIPES:
        assert_trains(rank_pool, megatron(model, ranks, batch=2, precision=precision), 0.0)


def test_buckets_micro_batches_and_clipping_train_as_one_process_does(rank_pool: RankPool) -> None:
    """A bucket is cut and added as the whole buffer is. The bound on the norm is far below it, so that it clips; the
    norm is a sum in another order than one process's, so that the scale may differ in its last bit, and whether it does
    depends on the processor. Adam then amplifies that as it does a sum of three in another order (2.5e-6 was seen): the
    bound of clipped steps is the one of test_parity.py."""
    overlapping = Settings(bucket_numel=20_000)
    assert_trains(rank_pool, megatron(TINY, 3, settings=overlapping), 0.0)
    assert_trains(rank_pool, megatron(LLAMA, 3, settings=overlapping, accumulation=3), 0.0)
    assert_trains(rank_pool, megatron(LLAMA, 2, clip_norm=0.01), BOUND[3])


# ---- every byte is predicted ----


def assert_as_predicted(measured: Trace) -> None:
    """At rest, on the wire and in every op, without gloo's copies, which its thread lets go when it gets to it; in bf16
    kernels' scratch too. What is left out is compared as well, and has a cause."""
    spec, predicted = measured.spec, predict(measured.spec)
    exact = spec.recipe.compute is DType.FP32
    for want, got in zip(predicted.ranks, measured.ranks, strict=True):
        want.check()
        what = (spec, got.rank)
        assert rest(got) == rest(want), what
        assert got.step_counter_nbytes == want.step_counter_nbytes, what
        assert got.padding_nbytes == want.padding_nbytes, what
        assert got.collectives == want.collectives, what
        assert got.peak() == want.peak(), what
        assert got.leftover() == {}, what
        ours, theirs = (
            turns([event for event in trace.events if not _by_gloo(event)], with_scratch=exact) for trace in (want, got)
        )
        assert ours == theirs, what
        reading = got.allocator
        assert reading is not None and reading.unattributed_nbytes == 0, what
        assert reading.rest_nbytes == got.rest_nbytes + got.step_counter_nbytes, what
    assert compare(predicted, measured).unexplained == (), spec


def _by_gloo(event: Event) -> bool:
    return event.category is Category.BACKEND_COPY


UNITS = ("model", "block", "layer", "block:2")


@pytest.mark.parametrize("model", [TINY, LLAMA, UNTIED], ids=["tiny", "llama", "untied"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_rank_holds_and_sends_what_is_predicted(
    rank_pool: RankPool, model: ModelShape, bucket: int | None
) -> None:
    """Ranks, recipes and units go round, so that all of them meet."""
    turn = [TINY, LLAMA, UNTIED].index(model) * len(BUCKETS) + BUCKETS.index(bucket)
    for precision in RECIPES:
        place = 2 * turn + (precision is not Precision.FP32)
        spec = megatron(
            model,
            1 + (place + turn) % 4,
            precision=precision,
            unit=UnitPolicy.parse(UNITS[turn % 4]),
            batch=1 + turn % 2,
            settings=Settings(bucket_numel=bucket),
        )
        assert_as_predicted(live(rank_pool, spec))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_hold_what_is_predicted_in_both_recipes(rank_pool: RankPool, ranks: int) -> None:
    for model in (TINY, LLAMA):
        for precision in RECIPES:
            assert_as_predicted(live(rank_pool, megatron(model, ranks, precision=precision)))


def test_options_hold_and_send_what_is_predicted(rank_pool: RankPool) -> None:
    for spec in (
        megatron(TINY, 2, optimizer=Optimizer.ADAMW_FOREACH),
        megatron(LLAMA, 3, accumulation=3),
        megatron(TINY, 3, accumulation=2, settings=Settings(bucket_numel=20_000)),
        megatron(LLAMA, 2, clip_norm=0.01),
        megatron(TINY, 3, clip_norm=0.01, precision=Precision.BF16_FP32GRAD),
    ):
        assert_as_predicted(live(rank_pool, spec))


def layout(job: RankJob) -> tuple[list[tuple[str, int, int, int]], list[tuple[int, int]], list[int]]:
    """(name, start, stop, bucket) of every parameter in the library's buffer, its buckets, what it updates."""
    with joined_group(job) as comm:
        steps: Any = steps_of(job.spec, comm, CPU)(Meter())
        names = {parameter: name for name, parameter in steps.plain.by_name.items()}
        (buffer,) = steps._ddp.buffers
        extents = [(names[parameter], *where) for parameter, where in buffer.param_index_map.items()]
        pieces = [piece.numel() for group in steps.optimizer.param_groups for piece in group["params"]]
        return extents, buffer.bucket_indices, pieces


def test_the_librarys_own_map_of_its_buffer_is_the_predicted_one(rank_pool: RankPool) -> None:
    for model in (TINY, LLAMA):
        for ranks in (1, 2, 3, 4):
            for bucket in BUCKETS:
                spec = megatron(model, ranks, settings=Settings(bucket_numel=bucket))
                parts = buckets(spec)
                want = [
                    (extent.shape.name, extent.start, extent.stop, number)
                    for number, part in enumerate(parts)
                    for extent in part.extents
                ]
                for rank, (extents, indices, pieces) in enumerate(rank_pool.run(layout, spec)):
                    assert extents == want
                    assert indices == [(part.start, part.stop) for part in parts]
                    assert tuple(pieces) == owned_pieces(parts, ranks, rank)
                assert sum(map(len, alike_stretches(parts, ranks))) == ranks


# ---- what it is known for ----


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_it_holds_6_plus_12_over_n_bytes_a_parameter_and_padding(rank_pool: RankPool, ranks: int) -> None:
    """Field report 4. bf16 parameters 2 and fp32 gradients 4, whole; fp32 master and two moments, 12, sharded. The
    padding of the two buffers is on top, on every rank; the states have none, so over all ranks they are 12P exactly.
    A rank's own share differs from P/N by what of the padding falls to it."""
    numel = TINY.num_params
    spec = megatron(ranks=ranks, precision=Precision.BF16_FP32GRAD)
    padding = buckets(spec)[-1].stop - numel
    states = []
    for rank in live(rank_pool, spec).ranks:
        held = rest(rank)
        whole = held.pop(Category.UNSHARDED_PARAM) + held.pop(Category.UNSHARDED_GRAD)
        assert (whole, rank.padding_nbytes) == (6 * (numel + padding), 6 * padding)
        assert held.keys() == {Category.MASTER_PARAM, Category.OPTIMIZER_STATE}
        assert held[Category.OPTIMIZER_STATE] == 2 * held[Category.MASTER_PARAM]
        states.append(sum(held.values()))
    assert sum(states) == 12 * numel
    assert all(abs(state - 12 * numel / ranks) <= 12 * padding for state in states)


def test_bytes_a_parameter_depend_on_the_recipe(rank_pool: RankPool) -> None:
    """Field report 4 (Megatron-LM 654): on one rank 16 in fp32, 18 with bf16 parameters and fp32 gradients."""
    for precision, per_parameter in ((Precision.FP32, 16), (Precision.BF16_FP32GRAD, 18)):
        (rank,) = live(rank_pool, megatron(ranks=1, precision=precision)).ranks
        assert rank.rest_nbytes - rank.padding_nbytes == per_parameter * TINY.num_params


def test_it_sends_4_and_2_bytes_a_parameter(rank_pool: RankPool) -> None:
    """Field report 24: gradients are reduce-scattered and parameters gathered, 2P in elements and not the 3P of an
    all-reduce and a gather. In bytes of the padded buffer 4 + 2, whatever the buckets."""
    for bucket in BUCKETS:
        settings = Settings(bucket_numel=bucket)
        spec = megatron(ranks=3, precision=Precision.BF16_FP32GRAD, settings=settings)
        numel = buckets(spec)[-1].stop
        for rank in live(rank_pool, spec).ranks:
            wire = {(total.op, total.dtype): total.payload_nbytes for total in rank.wire()}
            assert wire == {
                (CollectiveOp.REDUCE_SCATTER, "fp32"): 4 * numel,
                (CollectiveOp.ALL_GATHER, "bf16"): 2 * numel,
            }


def test_clipping_sends_one_number_more(rank_pool: RankPool) -> None:
    """The norm's square, fp32. Without clipping nothing small is sent: bf16 needs no loss scale, so no flag either."""
    plain, clipped = (live(rank_pool, megatron(clip_norm=norm)).ranks[0] for norm in (None, 0.01))
    (norm,) = (call for call in clipped.collectives if call not in plain.collectives)
    assert (norm.op, norm.dtype, norm.payload_nbytes) == (CollectiveOp.ALL_REDUCE, "fp32", 4)
    assert len(clipped.collectives) == len(plain.collectives) + 1


@pytest.mark.parametrize("precision", RECIPES)
def test_our_own_form_of_it_differs_in_padding_only(rank_pool: RankPool, precision: Precision) -> None:
    """Ours pads the buffer once, to N; without padding both hold the same, by category, on all ranks together."""
    ranks = 3
    theirs = live(rank_pool, megatron(ranks=ranks, precision=precision))
    ours = live(rank_pool, replace(theirs.spec, impl=Implementation.OWN))
    totals = []
    for trace in (ours, theirs):
        held = [rest(rank) for rank in trace.ranks]
        total = sum(sum(each.values()) for each in held) - sum(rank.padding_nbytes for rank in trace.ranks)
        totals.append((total, {category for each in held for category in each}))
    assert totals[0] == totals[1]


# ---- it leaves nothing behind ----


def leftovers(job: RankJob) -> dict[str, Any]:
    """What a process has after two runs that it had not before: patches, modes, bytes, process groups."""
    asked = torch.cuda.current_device
    run_rank(replace(job, store_path=f"{job.store_path}-first"))  # the library's import leaves some of its own
    gc.collect()
    before = live_nbytes(CPU)
    run_rank(job)
    gc.collect()
    return {
        "patched": torch.cuda.current_device is not asked,
        "modes": len(_get_current_function_mode_stack()),
        "bytes": (live_nbytes(CPU) or 0) - (before or 0),
        "group": torch.distributed.is_initialized(),
    }


def test_nothing_is_left_patched_held_or_joined(rank_pool: RankPool) -> None:
    clean = {"patched": False, "modes": 0, "bytes": 0, "group": False}
    for spec in (megatron(ranks=3), megatron(ranks=2, clip_norm=0.01, settings=Settings(bucket_numel=1))):
        assert rank_pool.run(leftovers, spec) == [clean] * spec.ranks


def run_as_if_cuda(job: RankJob) -> dict[str, Any]:
    """The whole of every step under the mode that otherwise stands around construction only."""
    from cluster.witness import megatron as library

    original = library.Megatron.step

    def step(self: Any) -> float:
        with library.as_if_cuda(CPU):
            return original(self)

    library.Megatron.step = step  # type: ignore[method-assign]
    try:
        return run_rank(job)
    finally:
        library.Megatron.step = original  # type: ignore[method-assign]


@pytest.mark.parametrize("precision", RECIPES)
def test_answering_for_cuda_changes_no_allocation_and_no_number(rank_pool: RankPool, precision: Precision) -> None:
    spec = megatron(ranks=2, precision=precision)
    for under, without in zip(rank_pool.run(run_as_if_cuda, spec), rank_pool.run(run_rank, spec), strict=True):
        ours, theirs = rank_from_dict(under), rank_from_dict(without)
        assert ours.losses == theirs.losses
        assert ours.rest == theirs.rest
        assert [event for event in ours.events if event.category is not Category.BACKEND_COPY] == [
            event for event in theirs.events if event.category is not Category.BACKEND_COPY
        ]
