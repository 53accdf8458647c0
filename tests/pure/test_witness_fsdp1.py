"""FSDP1 by arithmetic: how a flat parameter is padded and aligned, what each rank owns, and what a step sends.

Derivations are with tiny's root: tokens (257, 55), positions (130, 55) and the last norm's weight and bias of 55, which
are 14,135 + 7,150 + 55 + 55 = 21,395 elements; and its block of 37,237.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroviz.collectives import CollectiveOp, Group
from zeroviz.errors import SpecError
from zeroviz.models import PRESETS, bare
from zeroviz.partition import padding_numel
from zeroviz.predict import predict
from zeroviz.settings import BackwardPrefetch, Settings
from zeroviz.spec import (
    Checkpointing,
    DType,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitPolicy,
)
from zeroviz.trace import Category
from zeroviz.witness.flat import alike, flat_units, owned_at
from zeroviz.witness.fsdp1 import divisors

ORIG = Settings(use_orig_params=True)
ROOT_NUMEL, BLOCK_NUMEL = 21_395, 37_237


def fsdp1(model: str = "tiny", ranks: int = 3, **settings: Any) -> RunSpec:
    """17 tokens: nothing is divisible by anything."""
    return RunSpec(model=PRESETS[model], ranks=ranks, impl=Implementation.FSDP1, **{"seq": 17, **settings})


# ---- how it is cut ----


@pytest.mark.parametrize(("numel", "shards", "padding"), [(72, 7, 5), (72, 8, 0), (5, 4, 3), (1, 3, 2), (7, 7, 0)])
def test_the_padding_is_what_is_missing_to_a_multiple(numel: int, shards: int, padding: int) -> None:
    """Field report 18: (-n) % N, and not n % N, which says 2 for 72 over 7. torch's rule is chunks of ceil(n / N)."""
    model = bare(numel)
    spec = RunSpec(model=model, ranks=shards, impl=Implementation.FSDP1, unit=UnitPolicy.parse("model"))
    (flat,) = flat_units(spec)
    assert flat.gathered_numel - flat.numel == padding == -numel % shards
    assert [owned_at(spec, place).padding_numel for place in range(shards)] == [
        flat.shard_numel - len(range(*slice(place * flat.shard_numel, (place + 1) * flat.shard_numel).indices(numel)))
        for place in range(shards)
    ]


def test_its_padding_is_a_units_and_fsdp2s_a_parameters() -> None:
    """Over 3 ranks FSDP1 adds one element to 21,395 = 3 * 7,132 - 1; FSDP2 one row of 55 tokens, two of positions and
    two elements to each vector of 55."""
    spec = fsdp1()
    root = flat_units(spec)[0]
    assert root.unit.numel == ROOT_NUMEL
    assert root.gathered_numel - ROOT_NUMEL == 1
    assert padding_numel(root.unit, replace(spec, impl=Implementation.FSDP2)) == 55 + 2 * 55 + 2 + 2


def test_19_original_parameters_begin_at_16_bytes() -> None:
    """Field report 19: 4 elements in fp32. 14,135 is padded by 1, 14,136 + 7,150 = 21,286 by 2, 21,288 + 55 = 21,343 by
    1; the end at 21,399 = 3 * 7,133 needs none for 3 ranks."""
    root = flat_units(fsdp1(settings=ORIG))[0]
    assert root.starts == (0, 14_136, 21_288, 21_344)
    assert root.gaps == (1, 2, 1)
    assert root.numel == root.gathered_numel == 21_399


def test_the_alignment_is_of_the_dtype_computed_with() -> None:
    """8 elements in bf16, also where fp32 is held: 14,135 + 1, then 21,286 + 2 and 21,343 + 1."""
    for precision in (Precision.BF16, Precision.FSDP_MIXED):
        root = flat_units(fsdp1(settings=ORIG, precision=precision))[0]
        assert all(start % 8 == 0 for start in root.starts)
        assert root.starts == (0, 14_136, 21_288, 21_344)
    # A block's norm is at 0 and 56 and its first matrix of (165, 55) at 112, in either dtype; that ends at 9,187.
    blocks = [flat_units(fsdp1(settings=ORIG, precision=each))[1] for each in (Precision.FP32, Precision.FSDP_MIXED)]
    assert [block.starts[:4] for block in blocks] == [(0, 56, 112, 9_188), (0, 56, 112, 9_192)]


def test_without_them_a_flat_parameter_has_no_gaps() -> None:
    root = flat_units(fsdp1())[0]
    assert root.starts == (0, 14_135, 21_285, 21_340) and root.gaps == () and root.numel == ROOT_NUMEL


def test_the_whole_one_of_no_shard_is_padded_with_original_parameters_only() -> None:
    """And then to a multiple of all ranks, although nobody cuts it."""
    plain, padded = (flat_units(fsdp1(strategy=Strategy.DDP, ranks=4, settings=each))[0] for each in (Settings(), ORIG))
    assert plain.shard_numel == ROOT_NUMEL
    assert padded.shard_numel == padded.numel == 21_400  # 21,399 and one


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("settings", [Settings(), ORIG])
def test_shards_are_every_element_once(ranks: int, settings: Settings) -> None:
    spec = fsdp1(ranks=ranks, settings=settings)
    for unit in flat_units(spec):
        pieces = [unit.pieces(place) for place in range(unit.num_shards)]
        assert [sum(column) for column in zip(*pieces, strict=True)] == [shape.numel for shape in unit.unit.params]


@pytest.mark.parametrize("settings", [Settings(), ORIG])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64, 300])
def test_ranks_of_a_stretch_own_the_same(settings: Settings, ranks: int) -> None:
    spec = fsdp1("tiny-llama", ranks, settings=settings)
    for stretch, owned in alike(spec):
        assert all(owned_at(spec, rank) == owned for rank in stretch)
    assert [rank for stretch, _ in alike(spec) for rank in stretch] == list(range(ranks))


def test_shard_groups_are_copies() -> None:
    spec = fsdp1(ranks=6, strategy=Strategy.HYBRID_SHARD, shard_ranks=3, settings=ORIG)
    owned = [each for stretch, each in alike(spec) for _ in stretch]
    assert len(owned) == 6 and owned[:3] == owned[3:] and owned[0] != owned[1]


# ---- what is held ----


def test_at_rest_a_shard_of_each_unit() -> None:
    """ceil(21,395 / 3) = 7,132 and three times ceil(37,237 / 3) = 12,413: 44,371 elements of each state, 4 counters."""
    for rank in predict(fsdp1()).ranks:
        shard = 7_132 + 3 * 12_413
        assert rank.rest == {
            Category.SHARDED_PARAM: 4 * shard,
            Category.SHARDED_GRAD: 4 * shard,
            Category.OPTIMIZER_STATE: 8 * shard,
        }
        assert rank.step_counter_nbytes == 4 * 4
    # One element of each of the four units, all on the last rank: 37,237 = 3 * 12,413 - 2 has two.
    assert [rank.padding_nbytes for rank in predict(fsdp1()).ranks] == [0, 0, 16 * (1 + 3 * 2)]


def test_with_original_parameters_ranks_have_other_moments() -> None:
    ranks = predict(fsdp1(settings=ORIG)).ranks
    moments = [rank.rest[Category.OPTIMIZER_STATE] for rank in ranks]
    assert len(set(moments)) == 3
    assert sum(moments) == 8 * PRESETS["tiny"].num_params  # no padding among them
    assert len({rank.rest[Category.SHARDED_PARAM] for rank in ranks}) == 1


def test_one_rank_holds_all_whole() -> None:
    """Field report 13: as NO_SHARD, which torch switches to. Nothing is sent."""
    want = predict(fsdp1(ranks=1, strategy=Strategy.DDP)).ranks[0]
    for strategy in (Strategy.ZERO3, Strategy.SHARD_GRAD_OP):
        got = predict(fsdp1(ranks=1, strategy=strategy)).ranks[0]
        assert got == want and got.collectives == ()


def test_backward_prefetch_decides_what_is_whole_together() -> None:
    """Before a unit's backward two blocks are whole; after it, one beside its gradients; unless told, one alone."""

    def most_whole(prefetch: BackwardPrefetch) -> int:
        spec = fsdp1("tiny-llama", settings=Settings(backward_prefetch=prefetch))
        whole = most = 0
        for event in predict(spec).ranks[0].events:
            whole += event.delta_nbytes if event.category is Category.UNSHARDED_PARAM else 0
            most = max(most, whole)
        return most

    head, block = (
        unit.gathered_numel for unit in (flat_units(fsdp1("tiny-llama"))[-1], flat_units(fsdp1("tiny-llama"))[1])
    )
    assert block > head
    assert most_whole(BackwardPrefetch.PRE) == 2 * 4 * block
    assert most_whole(BackwardPrefetch.POST) == most_whole(BackwardPrefetch.NONE) == 4 * block


def test_limiting_gathers_changes_nothing_on_cpu() -> None:
    assert predict(fsdp1(settings=Settings(limit_all_gathers=False))).ranks == predict(fsdp1()).ranks


@pytest.mark.parametrize("model", ["tiny", "tiny-llama", "gpt2", "llama3-8b"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FSDP_MIXED])
def test_every_step_ends_where_it_began(model: str, precision: Precision) -> None:
    for unit in ("model", "block", "layer"):
        for settings in (Settings(), ORIG, Settings(reduce_dtype=DType.FP32, backward_prefetch=BackwardPrefetch.POST)):
            for strategy in (Strategy.ZERO3, Strategy.SHARD_GRAD_OP, Strategy.DDP):
                spec = fsdp1(
                    model, 3, precision=precision, strategy=strategy, settings=settings, unit=UnitPolicy.parse(unit)
                )
                for rank in predict(spec).ranks:
                    rank.check()


def test_a_bare_count_has_states_and_no_activations() -> None:
    spec = RunSpec(model=bare(1001), ranks=2, impl=Implementation.FSDP1, unit=UnitPolicy.parse("model"))
    (rank, _) = predict(spec).ranks
    rank.check()
    assert rank.rest[Category.SHARDED_PARAM] == 4 * 501


# ---- what is sent ----


def test_the_root_is_not_gathered_again() -> None:
    """Blocks twice and reduced once, 3P of them; the root's own stays whole from forward to the end of backward: 2P."""
    totals = {total.op: total for total in predict(fsdp1()).ranks[0].wire()}
    root, block = 21_396, 37_239
    assert totals[CollectiveOp.ALL_GATHER].payload_nbytes == 4 * (root + 2 * 3 * block)
    assert totals[CollectiveOp.REDUCE_SCATTER].payload_nbytes == 4 * (root + 3 * block)


def test_shard_grad_op_gathers_once() -> None:
    totals = {total.op: total for total in predict(fsdp1(strategy=Strategy.SHARD_GRAD_OP)).ranks[0].wire()}
    assert totals[CollectiveOp.ALL_GATHER].payload_nbytes == totals[CollectiveOp.REDUCE_SCATTER].payload_nbytes


def test_hybrid_shard_sums_shards_across_the_replicas() -> None:
    spec = fsdp1(ranks=4, strategy=Strategy.HYBRID_SHARD, shard_ranks=2)
    by_group = {(total.op, total.group): total for total in predict(spec).ranks[0].wire()}
    shard = 10_698 + 3 * 18_619
    assert by_group[CollectiveOp.REDUCE_SCATTER, Group.SHARD].payload_nbytes == 4 * 2 * shard
    assert by_group[CollectiveOp.ALL_REDUCE, Group.REPLICA].payload_nbytes == 4 * shard
    assert by_group[CollectiveOp.ALL_REDUCE, Group.REPLICA].num_ranks == 2


def test_mixed_precision_sends_8_bytes_a_parameter() -> None:
    """Field report 23: 2 + 2 + 4, as DDP's fp32 all-reduce (but for the root, which is gathered once)."""
    spec = fsdp1("tiny-llama", 2, precision=Precision.FSDP_MIXED, settings=Settings(reduce_dtype=DType.FP32))
    payload = sum(total.payload_nbytes for total in predict(spec).ranks[0].wire())
    assert payload == 8 * sum(unit.gathered_numel for unit in flat_units(spec))


@pytest.mark.parametrize(
    ("ranks", "before", "after"), [(1, 1, 1), (2, 2, 1), (3, 2, 1.5), (4, 2, 2), (6, 4, 1.5), (8, 4, 2), (16, 4, 4)]
)
def test_sums_are_divided_before_and_after(ranks: int, before: int, after: float) -> None:
    """Powers of two from 1 while they divide N and are less than N over themselves."""
    assert divisors(ranks) == (before, after)


# ---- what it has not ----


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": Strategy.ZERO1}, "for zero1 use impl own or zero_redundancy or deepspeed"),
        ({"strategy": Strategy.HYBRID_SHARD, "shard_ranks": 1, "ranks": 2}, "leaves out the sum over the replicas"),
        ({"strategy": Strategy.HYBRID_SHARD, "shard_ranks": 2, "ranks": 3}, "3 is not divisible by 2"),
        ({"precision": Precision.BF16_MIXED}, "use fp32 or bf16 or fsdp-mixed"),
        ({"checkpointing": Checkpointing.parse("block:2")}, "checkpointing is 'block:2'"),
        ({"offload": Offload.PARAMS}, "offload is 'params'"),
        ({"settings": Settings(bucket_view=True)}, "bucket_view is true with impl fsdp1"),
        ({"settings": Settings(backward_prefetch="later")}, "it must be pre or post or none"),
    ],
)
def test_what_it_has_not_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        fsdp1(**settings)


@pytest.mark.parametrize("optimizer", [optimizer for optimizer in Optimizer if optimizer.runs])
def test_every_optimizer_that_runs_is_accepted(optimizer: Optimizer) -> None:
    predict(fsdp1(optimizer=optimizer))


def test_its_settings_survive_plain_data() -> None:
    spec = fsdp1(
        settings=Settings(backward_prefetch=BackwardPrefetch.POST, reduce_dtype=DType.BF16, use_orig_params=True)
    )
    assert RunSpec.from_dict(spec.to_dict()) == spec
