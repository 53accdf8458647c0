"""DDP and ZeroRedundancyOptimizer by arithmetic: buckets, owners, rest and wire as derived by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.errors import SpecError
from zeroviz.models import PRESETS, NamedShape
from zeroviz.predict import predict
from zeroviz.rank_trace import RankTrace, alike
from zeroviz.settings import MIB, Settings
from zeroviz.spec import Checkpointing, Implementation, Optimizer, Precision, RunSpec, Strategy, Zero1Form
from zeroviz.witness.ddp import buckets
from zeroviz.witness.graph import Graph
from zeroviz.witness.zero_redundancy import owners

TINY, LLAMA = PRESETS["tiny"], PRESETS["tiny-llama"]
DDP = RunSpec(model=TINY, impl=Implementation.DDP, strategy=Strategy.DDP, ranks=3)
ZRO = RunSpec(model=TINY, impl=Implementation.ZERO_REDUNDANCY, strategy=Strategy.ZERO1, ranks=3)


def first(spec: RunSpec) -> RankTrace:
    return predict(spec).ranks[0]


# ---- buckets ----


def names(spec: RunSpec, *numels: int) -> list[list[str]]:
    shapes = [NamedShape(f"p{number}", (numel,)) for number, numel in enumerate(numels)]
    return [[shape.name for shape in bucket] for bucket in buckets(spec, shapes)]


def test_a_bucket_is_closed_by_the_parameter_that_fills_it() -> None:
    """40 bytes a bucket are ten fp32 elements: 4 + 5 are not enough and 4 + 5 + 9 are; 12 alone are; 1 is left."""
    spec = replace(DDP, settings=Settings(bucket_nbytes=40))
    assert names(spec, 4, 5, 9, 12, 1) == [["p0", "p1", "p2"], ["p3"], ["p4"]]
    # Exactly ten fill it; in bf16 they fill half.
    assert names(spec, 4, 6, 1) == [["p0", "p1"], ["p2"]]
    assert names(replace(spec, precision=Precision.BF16), 4, 6, 10) == [["p0", "p1", "p2"]]


def test_the_first_bucket_has_a_limit_of_its_own_unless_one_is_given() -> None:
    """1 MiB are 262,144 fp32 elements, 25 MiB 25 times as many; a size that is given holds for the first as well."""
    one = MIB // 4
    assert names(DDP, one, one, 24 * one, 1) == [["p0"], ["p1", "p2"], ["p3"]]
    assert names(DDP, one - 1, 1, 5) == [["p0", "p1"], ["p2"]]
    assert names(replace(DDP, settings=Settings(bucket_nbytes=25 * MIB)), one, 24 * one, 1) == [["p0", "p1"], ["p2"]]


def test_gradients_become_ready_from_the_head_and_a_tied_one_last() -> None:
    """Each parameter once; of a layer with a bias the bias first; the tied table when the embedding has added to it."""
    for model in (TINY, LLAMA, replace(TINY, tied=False), replace(LLAMA, tied=True, mlp_bias=True)):
        order = Graph(replace(DDP, model=model), fresh=Category.UNSHARDED_GRAD).ready_order
        assert sorted(shape.name for shape in order) == sorted(shape.name for shape in model.params)
        block = max(position for position, shape in enumerate(order) if ".2." in shape.name)
        assert all(".1." not in shape.name and ".0." not in shape.name for shape in order[:block])
    tiny = [shape.name for shape in Graph(DDP, fresh=Category.UNSHARDED_GRAD).ready_order]
    assert tiny[:4] == ["ln_f.weight", "ln_f.bias", "h.2.mlp.c_proj.bias", "h.2.mlp.c_proj.weight"]
    assert tiny[-2:] == ["wte.weight", "wpe.weight"]


# ---- DDP ----


@pytest.mark.parametrize("model", [TINY, LLAMA], ids=lambda model: model.name)
@pytest.mark.parametrize(("precision", "width"), [(Precision.FP32, 4), (Precision.BF16, 2)])
def test_01_the_buckets_are_a_second_copy_of_the_gradient_at_rest(model: Any, precision: Precision, width: int) -> None:
    """Field report 1: parameters, gradients, their second copy, and two moments; one step counter a parameter."""
    num = model.num_params
    for view in (False, True):
        rank = first(replace(DDP, model=model, precision=precision, settings=Settings(bucket_view=view)))
        assert rank.rest == {
            Category.UNSHARDED_PARAM: width * num,
            Category.UNSHARDED_GRAD: width * num,
            **({} if view else {Category.BUCKET: width * num}),
            Category.OPTIMIZER_STATE: 2 * width * num,
        }
        assert rank.step_counter_nbytes == 4 * len(model.params)
        assert rank.padding_nbytes == 0


def test_01_views_lower_the_peak_by_the_copy_they_leave_out_or_say_where_it_stands_now() -> None:
    """With views the gradients are there from the start of the step, so that the peak may come earlier and higher."""
    copied, viewed = (first(replace(DDP, settings=Settings(bucket_view=view))).peak() for view in (False, True))
    size = 4 * TINY.num_params
    assert 0 < copied.total - viewed.total <= size
    assert (copied.phase, viewed.phase) == ("optimizer", "backward")


def test_no_sync_brings_the_second_copy_back_even_with_views() -> None:
    """Gradients of the first micro-batches are tensors of their own until the last one's are copied into buckets."""
    spec = replace(DDP, settings=Settings(bucket_view=True), accumulation=2)
    for no_sync, own in ((None, 4 * TINY.num_params), (False, 0)):
        most = held = 0
        for event in first(replace(spec, no_sync=no_sync)).events:
            held += event.delta_nbytes if event.category is Category.UNSHARDED_GRAD else 0
            most = max(most, held)
        assert (most, held) == (own, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_every_spec_ends_where_it_began(ranks: int) -> None:
    for spec in (DDP, ZRO):
        for settings in (Settings(), Settings(bucket_view=True, bucket_nbytes=1)):
            for accumulation in (1, 3):
                for rank in predict(replace(spec, ranks=ranks, settings=settings, accumulation=accumulation)).ranks:
                    rank.check()


def test_one_rank_sends_nothing() -> None:
    for spec in (DDP, ZRO):
        assert first(replace(spec, ranks=1)).collectives == ()


def test_a_bucket_is_sent_from_where_its_last_gradient_became_ready() -> None:
    """One byte a bucket is a bucket a parameter: 40 all-reduces, those of the last norm in the root's backward."""
    calls = first(replace(DDP, settings=Settings(bucket_nbytes=1))).collectives
    assert len(calls) == len(TINY.params) == 40
    assert {call.op for call in calls} == {CollectiveOp.ALL_REDUCE}
    units = [call.unit for call in calls]
    assert units == ["root"] * 2 + ["block 2"] * 12 + ["block 1"] * 12 + ["block 0"] * 12 + ["root"] * 2


# ---- ZeroRedundancyOptimizer ----


def test_the_largest_parameter_goes_first_each_to_the_least_loaded_rank() -> None:
    """By hand, of tiny over 3 ranks: 14,135 to rank 0, 12,210 six times, and so on; every parameter once."""
    owned = owners(ZRO)
    assert sorted(shape.name for shapes in owned for shape in shapes) == sorted(shape.name for shape in TINY.params)
    assert [shapes[0].numel for shapes in owned] == [257 * 55, 222 * 55, 222 * 55]
    # 14,135 | 12,210 | 12,210: the next 12,210 goes to rank 1, the one after to rank 2, and then rank 0 has the least.
    assert [shape.name for shape in owned[0]][:2] == ["wte.weight", "h.2.mlp.c_fc.weight"]
    assert [shape.name for shape in owned[1]][:2] == ["h.0.mlp.c_fc.weight", "h.1.mlp.c_fc.weight"]
    assert [shape.name for shape in owned[2]][:2] == ["h.0.mlp.c_proj.weight", "h.1.mlp.c_proj.weight"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_ranks_are_uneven_and_hold_moments_of_whole_parameters(ranks: int) -> None:
    spec = replace(ZRO, ranks=ranks)
    trace = predict(spec)
    moments = [rank.rest[Category.OPTIMIZER_STATE] for rank in trace.ranks]
    assert moments == [8 * sum(shape.numel for shape in shapes) for shapes in owners(spec)]
    assert sum(moments) == 8 * TINY.num_params
    assert sum(rank.step_counter_nbytes for rank in trace.ranks) == 4 * len(TINY.params)
    if ranks > 1:
        assert len(set(moments)) > 1


def test_more_ranks_than_parameters_leave_some_with_nothing() -> None:
    """Tiny has 40 parameters; of 1,000 ranks 960 own none, and no rank less than its largest parameter."""
    trace = predict(replace(ZRO, ranks=1000))
    moments = [rank.rest[Category.OPTIMIZER_STATE] for rank in trace.ranks]
    assert sum(1 for nbytes in moments if not nbytes) == 1000 - 40
    assert max(moments) == 8 * 257 * 55
    assert len(alike(trace.ranks)) <= 41


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_its_wire_is_3p(ranks: int) -> None:
    """An all-reduce of every gradient, 2P, and a broadcast of every parameter, P; times (N-1)/N, each rounded up."""
    size = 4 * TINY.num_params
    for rank in predict(replace(ZRO, ranks=ranks)).ranks:
        wire = {total.op: total for total in rank.wire()}
        assert wire[CollectiveOp.ALL_REDUCE].sent_nbytes == -(-2 * (ranks - 1) * size // ranks)
        assert wire[CollectiveOp.BROADCAST].payload_nbytes == size
        assert wire[CollectiveOp.BROADCAST].count == len(TINY.params)
        assert wire[CollectiveOp.BROADCAST].sent_nbytes == -(-(ranks - 1) * size // ranks)


# ---- refusals ----


@pytest.mark.parametrize(
    ("spec", "settings", "words"),
    [
        (DDP, {"precision": Precision.BF16_MIXED}, "use fp32 or bf16"),
        (DDP, {"checkpointing": Checkpointing.parse("block")}, "checkpointing is 'block'"),
        (DDP, {"prefetch": 1, "strategy": Strategy.ZERO3}, "has ddp here"),
        (DDP, {"settings": Settings(bucket_numel=5)}, "bucket_numel is 5 with impl ddp"),
        (DDP, {"settings": Settings(bucket_nbytes=0)}, "bucket_nbytes is 0"),
        (ZRO, {"strategy": Strategy.DDP}, "has zero1 here"),
        (ZRO, {"zero1_form": Zero1Form.ALL_REDUCE}, "zero1_form is 'all-reduce'"),
        (ZRO, {"precision": Precision.BF16_FP32GRAD}, "use fp32 or bf16"),
    ],
)
def test_what_they_have_not_is_refused(spec: RunSpec, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as refusal:
        replace(spec, **settings)
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_every_optimizer_is_worked_out(optimizer: Optimizer) -> None:
    for spec in (DDP, ZRO):
        trace = predict(replace(spec, optimizer=optimizer))
        assert all(rank.peak().total > rank.rest_nbytes for rank in trace.ranks)
