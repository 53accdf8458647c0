"""hybrid_shard and megatron_optim by arithmetic: who owns what, what is held, and what goes over which group's wire."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.every import pairs, settings_of
from tests.pure.steps import MODEL, UNEVEN, rest, text_of, units_of
from zeroviz.cli import main
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.errors import SpecError
from zeroviz.memory import rest_by_category, rest_padding_nbytes
from zeroviz.models import PRESETS, bare
from zeroviz.partition import buffers_for, padded_numel, shard_bounds
from zeroviz.predict import predict
from zeroviz.rank_trace import alike, rank_from_dict, rank_to_dict
from zeroviz.spec import Precision, RunSpec, Strategy, parse_enum
from zeroviz.toggles import group_choices
from zeroviz.trace import Category
from zeroviz.wire import Collective, WireTotal

HYBRID, MEGATRON = Strategy.HYBRID_SHARD, Strategy.MEGATRON_OPTIM
GROUPS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (6, 3), (12, 4), (64, 8)]  # N, G


def totals_of(spec: RunSpec) -> dict[tuple[CollectiveOp, str, Group], WireTotal]:
    return {(total.op, total.dtype, total.group): total for total in predict(spec).ranks[0].wire()}


# ---- hybrid_shard ----


def test_20_ranks_that_a_shard_group_does_not_divide_are_refused_with_both_numbers() -> None:
    """Hybrid: N not divisible by the shard group must be refused, with both numbers. Every such pair up to 40."""
    for ranks, group in itertools.product(range(1, 40), range(1, 41)):
        if group <= ranks and ranks % group == 0:
            assert RunSpec(model=bare(8), strategy=HYBRID, ranks=ranks, shard_ranks=group, unit=MODEL)
            continue
        with pytest.raises(SpecError) as refusal:
            RunSpec(model=bare(8), strategy=HYBRID, ranks=ranks, shard_ranks=group, unit=MODEL)
        assert f"shard_ranks is {group}" in str(refusal.value)
        assert str(ranks) in str(refusal.value)


def test_20_in_the_shell_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("predict", "budget"):
        assert main([verb, *["--strategy", "hybrid_shard", "--ranks", "8", "--shard-ranks", "3"]]) == 2
        assert "shard_ranks is 3 with 8 ranks, but 8 is not divisible by 3; use 1, 2, 4 or 8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["FULL_SHARD", "hybrid", "HYBRID_SHARD", "zero4", "", "zero-3", "megatron"])
def test_21_an_unknown_strategy_is_refused_with_those_that_are_known(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown strategy name must be refused; once it fell through to full sharding."""
    known = ", ".join(strategy.value for strategy in Strategy)
    with pytest.raises(SpecError, match=f"Strategy is '{name}'; allowed are {known}"):
        parse_enum(Strategy, name, "Strategy")
    assert main(["predict", "--strategy", name]) == 2
    assert known in capsys.readouterr().err
    spec = {**RunSpec(model=PRESETS["tiny"]).to_dict(), "strategy": name}
    with pytest.raises(SpecError, match=known):
        RunSpec.from_dict(spec)


@pytest.mark.parametrize(("ranks", "group"), GROUPS)
@pytest.mark.parametrize("name", UNEVEN)
def test_a_rank_holds_what_zero3_holds_on_g_ranks(name: str, ranks: int, group: int) -> None:
    """At rest and at the peak, padding included: its group is a whole ZeRO-3 by itself, and the groups are copies."""
    for precision in (Precision.FP32, Precision.BF16_MIXED):
        hybrid = RunSpec(
            model=PRESETS[name], strategy=HYBRID, ranks=ranks, shard_ranks=group, precision=precision, seq=7
        )
        alone = replace(hybrid, strategy=Strategy.ZERO3, ranks=group, shard_ranks=None)
        assert rest_by_category(hybrid) == rest_by_category(alone)
        ours, theirs = predict(hybrid), predict(alone)
        assert ours.ranks[0].peak() == theirs.ranks[0].peak()
        for rank in range(ranks):
            assert rest_padding_nbytes(hybrid, rank) == rest_padding_nbytes(alone, rank % group)
            assert ours.ranks[rank].padding_nbytes == theirs.ranks[rank % group].padding_nbytes
            for unit in units_of(hybrid):
                assert shard_bounds(unit, hybrid, rank) == shard_bounds(unit, alone, rank % group)


@pytest.mark.parametrize(("ranks", "group"), GROUPS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_hybrid_gathers_and_scatters_in_its_group_and_sums_shards_across(
    ranks: int, group: int, accumulation: int
) -> None:
    """With W padded elements of all units: in the group 2 W gathered and W reduce-scattered a micro-batch, (G-1)/G of
    each sent; across groups the shards, W/G, all-reduced: 2 (R-1)/R of that. A group of one rank sends nothing.
    """
    spec = RunSpec(
        model=PRESETS["tiny"], strategy=HYBRID, ranks=ranks, shard_ranks=group, accumulation=accumulation,
        precision=Precision.BF16_FP32GRAD,
    )  # fmt: skip
    whole = sum(padded_numel(unit.numel, group) for unit in units_of(spec))
    num_units, replicas = len(units_of(spec)), ranks // group
    expected = {}
    if group > 1:
        gathered, scattered = 2 * 2 * whole * accumulation, 4 * whole * accumulation
        for op, dtype, times, payload in (
            (CollectiveOp.ALL_GATHER, "bf16", 2, gathered),
            (CollectiveOp.REDUCE_SCATTER, "fp32", 1, scattered),
        ):
            sent = -(-payload * (group - 1) // group)
            count = times * num_units * accumulation
            expected[op, dtype, Group.SHARD] = WireTotal(op, dtype, count, payload, sent, group, Group.SHARD)
    if replicas > 1:
        op, payload = CollectiveOp.ALL_REDUCE, 4 * whole // group * accumulation
        sent = -(-2 * payload * (replicas - 1) // replicas)
        total = WireTotal(op, "fp32", num_units * accumulation, payload, sent, replicas, Group.REPLICA)
        expected[op, "fp32", Group.REPLICA] = total
    assert totals_of(spec) == expected


def test_one_group_is_zero3_and_groups_of_one_are_ddp_on_the_wire() -> None:
    spec = RunSpec(model=PRESETS["tiny-llama"], strategy=HYBRID, ranks=6, shard_ranks=6)
    zero3 = replace(spec, strategy=Strategy.ZERO3, shard_ranks=None)
    assert predict(spec).ranks[0].sent_nbytes == predict(zero3).ranks[0].sent_nbytes
    ddp = replace(zero3, strategy=Strategy.DDP)
    assert predict(replace(spec, shard_ranks=1)).ranks[0].sent_nbytes == predict(ddp).ranks[0].sent_nbytes


def test_the_tables_show_in_group_and_across_groups_apart() -> None:
    text = text_of(RunSpec(model=PRESETS["tiny"], strategy=HYBRID, ranks=6, shard_ranks=3))
    assert "HYBRID_SHARD on 6 ranks in groups of 3" in text
    for words in ("all_gather fp32 in group 8", "reduce_scatter fp32 in group 4", "all_reduce fp32 across groups 4"):
        assert words in text
    assert "in group: 2/3 of the payload; across groups: 2 x 1/2 of the payload" in text
    many = text_of(RunSpec(model=PRESETS["tiny"], strategy=HYBRID, ranks=4096, shard_ranks=8))
    assert "of this, padding ranks 0-6 of each group: 0 B; rank 7 of each group: 224 B" in many  # 14 elements of 16 B
    assert "falls with G" in many


def test_a_trace_with_groups_survives_plain_data_and_one_without_reads_as_all() -> None:
    rank = predict(RunSpec(model=PRESETS["tiny"], strategy=HYBRID, ranks=4, shard_ranks=2)).ranks[1]
    data = json.loads(json.dumps(rank_to_dict(rank)))
    assert rank_from_dict(data).collectives == rank.collectives
    assert {call.group for call in rank.collectives} == {Group.SHARD, Group.REPLICA}
    older = {**data, "collectives": [call[:6] for call in data["collectives"]]}
    assert {call.group for call in rank_from_dict(older).collectives} == {Group.ALL}


def test_a_spec_from_before_there_were_groups_is_read() -> None:
    spec = RunSpec(model=PRESETS["tiny"], clip_norm=0.5, strategy=HYBRID, ranks=4, shard_ranks=2)
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    older = {key: value for key, value in RunSpec(model=PRESETS["tiny"]).to_dict().items()
             if key not in ("shard_ranks", "clip_norm")}  # fmt: skip
    assert RunSpec.from_dict(older) == RunSpec(model=PRESETS["tiny"])


def test_many_groups_are_stretches_of_few_ranks_each_with_its_padding() -> None:
    spec = RunSpec(model=PRESETS["tiny"], strategy=HYBRID, ranks=4096, shard_ranks=8)
    ranks = predict(spec).ranks
    assert len(ranks) == 4096 and sum(len(stretch) for stretch, _ in alike(ranks)) == 4096
    for rank in (0, 7, 8, 15, 4095):
        assert (ranks[rank].rank, ranks[rank].padding_nbytes) == (rank, rest_padding_nbytes(spec, rank))


# ---- megatron_optim ----


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_FP32GRAD])
@pytest.mark.parametrize("unit", ["model", "block", "layer"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_megatron_holds_whole_buffers_and_one_nth_of_the_states(precision: Precision, unit: str, ranks: int) -> None:
    """4 + 2 bytes a parameter whole and 12/N sharded in bf16-fp32grad; 8 whole and 8/N in fp32. One padding in all."""
    for name in UNEVEN:
        spec = RunSpec(
            model=PRESETS[name], strategy=MEGATRON, ranks=ranks, precision=precision, unit=type(MODEL).parse(unit)
        )
        whole = padded_numel(spec.model.num_params, ranks)
        assert rest(spec, Category.UNSHARDED_PARAM) == precision.param.itemsize * whole
        assert rest(spec, Category.UNSHARDED_GRAD) == 4 * whole
        master = 4 if precision is Precision.BF16_FP32GRAD else 0
        assert rest(spec, Category.MASTER_PARAM) == master * whole // ranks
        assert rest(spec, Category.OPTIMIZER_STATE) == 8 * whole // ranks


def test_megatrons_shards_cut_units_and_parameters_wherever_they_fall() -> None:
    """tiny's units and 133,106 elements on 3 ranks: shards end at 44,369 and 88,738, inside two blocks."""
    spec = RunSpec(model=PRESETS["tiny"], strategy=MEGATRON, ranks=3)
    (buffer,) = buffers_for(spec)
    assert buffer.params == tuple(shape for unit in units_of(spec) for shape in unit.params)
    borders = [shard_bounds(buffer, spec, rank)[1] for rank in range(3)]
    assert borders == [44369, 88738, 133107]
    ends = set(itertools.accumulate(shape.numel for shape in buffer.params))
    assert not ends & set(borders[:2])
    assert [rest_padding_nbytes(spec, rank) for rank in range(3)] == [8, 8, 8 + 8]


def test_the_tables_pad_the_buffer_and_no_unit() -> None:
    text = text_of(RunSpec(model=PRESETS["tiny"], strategy=MEGATRON, ranks=3))
    assert "root 21,395 - block 0 37,237 - largest" in text
    assert "in one buffer 133,107 elements, 1 of them padding" in text
    assert "of this, padding ranks 0-1: 8 B; rank 2: 16 B" in text
    assert "40 B of step counters, one scalar a slice" in text


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("settings", [{}, {"accumulation": 3}, {"accumulation": 3, "no_sync": True}], ids=str)
def test_megatron_sends_four_and_two_bytes_a_parameter(ranks: int, settings: dict[str, Any]) -> None:
    """One reduce-scatter of the fp32 gradients and one all-gather of the bf16 parameters, (N-1)/N of each."""
    spec = RunSpec(
        model=PRESETS["tiny-llama"], strategy=MEGATRON, ranks=ranks, precision=Precision.BF16_FP32GRAD, **settings
    )
    whole = padded_numel(spec.model.num_params, ranks)
    scatter, gather = predict(spec).ranks[0].collectives
    assert scatter == Collective(CollectiveOp.REDUCE_SCATTER, "fp32", ranks, 4 * whole, "backward", "")
    assert gather == Collective(CollectiveOp.ALL_GATHER, "bf16", ranks, 2 * whole, "optimizer", "")
    assert predict(spec).ranks[0].sent_nbytes == (4 + 2) * whole * (ranks - 1) // ranks


def test_megatron_is_zero1_of_one_unit() -> None:
    """What a rank holds at rest and sends is ZeRO-1's with the whole model as its unit; units change nothing of it. At
    the peak it holds no less, for its gradient buffer stays while forward fills up."""
    for ranks, precision in itertools.product((1, 2, 5), (Precision.FP32, Precision.BF16_FP32GRAD)):
        megatron = RunSpec(model=PRESETS["tiny"], strategy=MEGATRON, ranks=ranks, precision=precision, unit=MODEL)
        zero1 = replace(megatron, strategy=Strategy.ZERO1)
        assert rest_by_category(megatron) == rest_by_category(zero1)
        assert predict(megatron).ranks[0].sent_nbytes == predict(zero1).ranks[0].sent_nbytes
        for seq in (32, 64):
            stays, goes = (predict(replace(spec, seq=seq)).ranks[0].peak() for spec in (megatron, zero1))
            assert stays.total >= goes.total
            assert (stays.phase == goes.phase == "optimizer") == (stays.total == goes.total)


# ---- clipping ----


@pytest.mark.parametrize(("strategy", "precision"), pairs())
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_clipping_sends_one_number_among_those_who_own_different_parts(
    strategy: Strategy, precision: Precision, ranks: int
) -> None:
    """Four bytes, all-reduced once a step; nothing under DDP, whose ranks all have the whole gradient."""
    plain = RunSpec(model=PRESETS["tiny"], ranks=ranks, precision=precision, **settings_of(strategy, ranks))
    clipped = replace(plain, clip_norm=0.5)
    before, after = predict(plain).ranks[0].collectives, predict(clipped).ranks[0].collectives
    more = [call for call in after if call.payload_nbytes == 4]
    assert [call for call in after if call.payload_nbytes != 4] == list(before)
    if strategy is Strategy.DDP or plain.num_shards == 1:
        assert more == []
        return
    group = Group.SHARD if strategy is HYBRID else Group.ALL
    assert more == [Collective(CollectiveOp.ALL_REDUCE, "fp32", plain.num_shards, 4, "optimizer", "", group)]


@pytest.mark.parametrize(("strategy", "precision"), pairs())
def test_clipping_holds_two_numbers_and_nothing_when_it_is_over(strategy: Strategy, precision: Precision) -> None:
    """The sum of squares and one buffer's norm, 4 bytes each: no copy of a gradient beside what a kernel borrows."""
    spec = RunSpec(model=PRESETS["tiny"], ranks=3, precision=precision, clip_norm=0.5, **settings_of(strategy, 3))
    rank = predict(spec).ranks[0]
    held = most = 0
    for event in rank.events:
        if event.op == "clip grad" and event.category.on_device:
            assert event.category is Category.TEMPORARY
            held += event.delta_nbytes
            most = max(most, held)
    assert (held, most) == (0, 8)
    rank.check()


def test_the_choices_of_a_group_are_the_divisors_of_however_many_ranks() -> None:
    for ranks in range(-1, 400):
        assert group_choices(ranks) == tuple(number for number in range(1, ranks + 1) if ranks % number == 0)
    assert len(group_choices(10**12)) == 13 * 13  # 2^12 5^12: a loop as long as the square root
