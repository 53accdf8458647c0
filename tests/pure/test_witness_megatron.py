"""Megatron's distributed optimizer by arithmetic: padding, who owns what, rest and wire, derived by hand."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import pytest

from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.errors import SpecError
from zeroviz.models import PRESETS, NamedShape
from zeroviz.predict import predict
from zeroviz.rank_trace import alike
from zeroviz.settings import Settings
from zeroviz.spec import Implementation, Optimizer, Precision, RunSpec, Strategy
from zeroviz.witness import megatron_buffer
from zeroviz.witness.megatron_buffer import Bucket, alike_stretches, buckets, owned_pieces

TINY = PRESETS["tiny"]
SPEC = RunSpec(model=TINY, impl=Implementation.MEGATRON, strategy=Strategy.MEGATRON_OPTIM, ranks=3)
BF16 = replace(SPEC, precision=Precision.BF16_FP32GRAD)


def lay_out(
    monkeypatch: pytest.MonkeyPatch, numels: list[int], ranks: int, bucket_numel: int | None = None
) -> tuple[Bucket, ...]:
    """The buckets of a model whose parameters have these numels, the first one first in the model."""
    shapes = tuple(NamedShape(f"p{number}", (numel,)) for number, numel in enumerate(numels))
    monkeypatch.setattr(megatron_buffer, "parameter_order", lambda spec: shapes)
    return buckets(replace(SPEC, ranks=ranks, settings=Settings(bucket_numel=bucket_numel)))


def places(parts: tuple[Bucket, ...]) -> list[list[tuple[str, int, int]]]:
    return [[(extent.shape.name, extent.start, extent.stop) for extent in part.extents] for part in parts]


def borders(parts: tuple[Bucket, ...]) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in parts]


# ---- the padding rule ----


def test_parameters_lie_in_reverse_order_each_at_a_multiple_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """p2, the last, comes first: 65 elements at 0. p1 begins at 128, the next multiple of 64 after 65, and ends at 129;
    p0 at 192, to 392. lcm(2, 128) = 128, so the bucket ends at 512: 246 of its elements are padding."""
    parts = lay_out(monkeypatch, [200, 1, 65], ranks=2)
    assert places(parts) == [[("p2", 0, 65), ("p1", 128, 129), ("p0", 192, 392)]]
    assert borders(parts) == [(0, 512)]


@pytest.mark.parametrize(
    ("ranks", "multiple"), [(1, 128), (2, 128), (3, 384), (4, 128), (6, 384), (7, 896), (256, 256)]
)
def test_a_bucket_ends_at_a_multiple_of_ranks_and_128(
    monkeypatch: pytest.MonkeyPatch, ranks: int, multiple: int
) -> None:
    """The least that is a multiple of both, so that parts are equal and the next bucket begins at 256 bytes in bf16.
    What ends there already is not padded."""
    assert lcm(ranks, 128) == multiple
    for numel, stop in ((1, multiple), (multiple, multiple), (multiple + 1, 2 * multiple)):
        assert borders(lay_out(monkeypatch, [numel], ranks)) == [(0, stop)]


def test_a_bucket_is_closed_by_the_parameter_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket size 100, counted from the bucket's start with the padding between. p3 (90 elements) does not fill it; p2
    begins at 128 and ends at 129: full. The next begins at 256 and is filled by p1's 100 alone; p0 is left, at 384."""
    parts = lay_out(monkeypatch, [5, 100, 1, 90], ranks=2, bucket_numel=100)
    assert places(parts) == [[("p3", 0, 90), ("p2", 128, 129)], [("p1", 256, 356)], [("p0", 384, 389)]]
    assert borders(parts) == [(0, 256), (256, 384), (384, 512)]
    one_more = lay_out(monkeypatch, [5, 100, 1, 90], ranks=2, bucket_numel=101)
    assert places(one_more) == [[("p3", 0, 90), ("p2", 128, 129)], [("p1", 256, 356), ("p0", 384, 389)]]


# ---- who owns what ----


def test_a_rank_owns_the_pieces_in_its_part_of_every_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 elements over 4 ranks are parts of 128. p2 is in [0, 65) and p1 is 128: rank 0 owns p2, rank 1 p1 and p0's
    first 64, rank 2 the next 128, rank 3 the last 8."""
    parts = lay_out(monkeypatch, [200, 1, 65], ranks=4)
    assert [owned_pieces(parts, 4, rank) for rank in range(4)] == [(65,), (1, 64), (128,), (8,)]
    # The buckets above in parts of 128, 64 and 64: padding alone may fall to a rank.
    parts = lay_out(monkeypatch, [5, 100, 1, 90], ranks=2, bucket_numel=100)
    assert [owned_pieces(parts, 2, rank) for rank in range(2)] == [(90, 64, 5), (1, 36)]


def test_a_rank_may_own_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = lay_out(monkeypatch, [5], ranks=4)
    assert [owned_pieces(parts, 4, rank) for rank in range(4)] == [(5,), (), (), ()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("bucket_numel", [None, 20_000, 1])
def test_ranks_in_a_stretch_own_alike_and_all_together_everything(ranks: int, bucket_numel: int | None) -> None:
    parts = buckets(replace(SPEC, ranks=ranks, settings=Settings(bucket_numel=bucket_numel)))
    stretches = alike_stretches(parts, ranks)
    assert [rank for stretch in stretches for rank in stretch] == list(range(ranks))
    pieces = [owned_pieces(parts, ranks, rank) for rank in range(ranks)]
    for stretch in stretches:
        assert all(pieces[rank] == pieces[stretch.start] for rank in stretch)
    assert sum(map(sum, pieces)) == TINY.num_params


# ---- at rest and on the wire ----


def test_6_plus_12_over_n_bytes_a_parameter_with_padding_in_the_6_only() -> None:
    """bf16 parameters and fp32 gradients whole, fp32 master and two moments sharded. Over all ranks 6 times the padded
    buffer each, and 12P together."""
    for ranks in (1, 2, 3, 8, 100):
        spec = replace(BF16, ranks=ranks)
        padding = buckets(spec)[-1].stop - TINY.num_params
        traces = predict(spec).ranks
        assert all(trace.padding_nbytes == 6 * padding for trace in traces)
        assert (
            sum(trace.rest_nbytes for trace in traces) == ranks * 6 * (TINY.num_params + padding) + 12 * TINY.num_params
        )


def test_in_fp32_parameters_are_their_own_master() -> None:
    trace = predict(replace(SPEC, ranks=1)).ranks[0]
    padded = buckets(replace(SPEC, ranks=1))[-1].stop
    assert trace.rest == {
        Category.UNSHARDED_PARAM: 4 * padded,
        Category.UNSHARDED_GRAD: 4 * padded,
        Category.OPTIMIZER_STATE: 8 * TINY.num_params,
    }


def test_step_counters_are_one_a_piece_and_the_librarys_flags() -> None:
    """Of one rank a piece is a parameter. Two flags in fp32, loss scale and overflow; in bf16 the first."""
    for spec, flags in ((SPEC, 2), (BF16, 1)):
        assert predict(replace(spec, ranks=1)).ranks[0].step_counter_nbytes == 4 * (len(TINY.params) + flags)


def test_4_and_2_bytes_a_parameter_cross_the_wire() -> None:
    """Reduce-scatter of fp32 gradients, all-gather of bf16 parameters, each of the padded buffer, bucket by bucket; one
    rank sends nothing."""
    for bucket_numel in (None, 20_000):
        spec = replace(BF16, settings=Settings(bucket_numel=bucket_numel))
        parts = buckets(spec)
        calls = predict(spec).ranks[0].collectives
        assert [call.op for call in calls] == [CollectiveOp.REDUCE_SCATTER] * len(parts) + [
            CollectiveOp.ALL_GATHER
        ] * len(parts)
        assert [call.payload_nbytes for call in calls[len(parts) :]] == [2 * part.numel for part in parts]
        assert sum(call.payload_nbytes for call in calls) == (4 + 2) * parts[-1].stop
    assert predict(replace(BF16, ranks=1)).ranks[0].collectives == ()


def test_buckets_go_out_in_backward_and_one_buffer_after_it() -> None:
    whole = predict(SPEC).ranks[0].collectives
    assert (whole[0].phase, whole[0].unit) == ("backward", "")
    apart = predict(replace(SPEC, settings=Settings(bucket_numel=1))).ranks[0].collectives
    # One bucket a parameter: the tied embedding's last, when the embedding has added its part.
    assert len(apart) == 2 * len(TINY.params)
    assert {call.unit for call in apart[: len(TINY.params)]} == {"root", *(f"block {block}" for block in range(3))}
    assert apart[len(TINY.params) - 1].unit == "root"


def test_every_rank_ends_where_it_began_and_many_ranks_are_few_traces() -> None:
    spec = RunSpec(
        model=PRESETS["llama3-8b"],
        impl=Implementation.MEGATRON,
        strategy=Strategy.MEGATRON_OPTIM,
        precision=Precision.BF16_FP32GRAD,
        ranks=100_000,
    )
    ranks = predict(spec).ranks
    assert len(ranks) == 100_000
    # Only ranks around a parameter's ends differ from the one before: at most four borders a parameter.
    assert len(alike(ranks)) <= 4 * len(spec.model.params) + 1
    for _, first in alike(ranks)[::50]:
        first.check()


# ---- what it refuses ----


def test_what_it_has_not_got_is_refused_by_name() -> None:
    for settings, words in (
        ({"precision": Precision.BF16}, "bf16-fp32grad"),
        ({"precision": Precision.BF16_MIXED}, "bf16-fp32grad"),
        ({"optimizer": Optimizer.SGD}, "adamw"),
        ({"strategy": Strategy.ZERO1}, "megatron_optim"),
        ({"prefetch": 1}, "prefetch"),
        ({"settings": Settings(bucket_nbytes=1)}, "bucket_nbytes"),
    ):
        with pytest.raises(SpecError, match=words):
            replace(SPEC, **settings)
