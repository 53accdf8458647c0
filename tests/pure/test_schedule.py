"""The schedule: how often each unit is gathered and reduced, in which order, and what overlaps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.every import exists, settings_of
from zeroviz.models import PRESETS
from zeroviz.partition import plan_for
from zeroviz.schedule import Op, OpKind, Phase, last_wait, schedule
from zeroviz.spec import Checkpointing, Offload, Optimizer, RunSpec, Strategy, UnitKind, UnitPolicy

UNTIED = RunSpec(model=PRESETS["tiny-llama"], ranks=4)
TIED = RunSpec(model=PRESETS["tiny"], ranks=4)
OVERLAPPING = [strategy for strategy in Strategy if exists(strategy, settings={"async_reduce": True})]
POLICIES = [UnitPolicy(UnitKind.MODEL), UnitPolicy(), UnitPolicy(UnitKind.LAYER), UnitPolicy(UnitKind.NUMEL, 1)]


def text(spec: RunSpec, phase: Phase) -> list[str]:
    """The ops of a phase as `unshard block 0`; computing names its segment, the rest its unit. The step's first op,
    which drops the gradients of the step before, is left out."""
    plan = plan_for(spec)

    def name(op: Op) -> str:
        if op.segment is not None:
            return f" {plan.segments[op.segment].name}"
        return "" if op.unit is None else f" {plan.units[op.unit].name}"

    return [op.kind.value + name(op) for op in schedule(spec) if op.phase is phase and op.kind is not OpKind.DROP_GRAD]


def count(spec: RunSpec, kind: OpKind) -> Counter[int | None]:
    return Counter(op.unit for op in schedule(spec) if op.kind is kind)


@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_zero3_gathers_twice_and_reduces_once_a_unit(spec: RunSpec, policy: UnitPolicy) -> None:
    """3P on the wire: one all-gather in forward, one in backward, one reduce-scatter. The tied root is no exception."""
    spec = replace(spec, unit=policy)
    units = [unit.index for unit in plan_for(spec).units]
    assert count(spec, OpKind.UNSHARD) == dict.fromkeys(units, 2)
    assert count(spec, OpKind.WAIT_UNSHARD) == dict.fromkeys(units, 2)
    assert count(spec, OpKind.RESHARD) == dict.fromkeys(units, 2)
    assert count(spec, OpKind.REDUCE_GRAD) == dict.fromkeys(units, 1)
    assert count(spec, OpKind.OPTIMIZER_STEP) == dict.fromkeys(units, 1)
    assert not count(spec, OpKind.SYNC_PARAM)


@pytest.mark.parametrize(("strategy", "num_syncs"), [(Strategy.DDP, 0), (Strategy.ZERO1, 1), (Strategy.ZERO2, 1)])
def test_the_others_gather_nothing_and_sync_after_the_optimizer(strategy: Strategy, num_syncs: int) -> None:
    """2P on the wire: the gradient once, and under ZeRO-1 and ZeRO-2 the updated parameters once."""
    spec = replace(UNTIED, strategy=strategy)
    units = [unit.index for unit in plan_for(spec).units]
    assert not count(spec, OpKind.UNSHARD)
    assert count(spec, OpKind.REDUCE_GRAD) == dict.fromkeys(units, 1)
    assert count(spec, OpKind.SYNC_PARAM) == (dict.fromkeys(units, 1) if num_syncs else {})


def test_forward_of_zero3_in_full() -> None:
    assert text(UNTIED, Phase.FORWARD)[:9] == [
        "load batch",
        "unshard embed",
        "wait unshard embed",
        "forward embed",
        "reshard embed",
        "unshard block 0",
        "wait unshard block 0",
        "forward block 0",
        "reshard block 0",
    ]


def test_backward_goes_the_other_way() -> None:
    ops = text(UNTIED, Phase.BACKWARD)
    assert ops[:6] == [
        "unshard head",
        "wait unshard head",
        "backward head",
        "reshard head",
        "reduce grad head",
        "wait reduce head",
    ]
    backward = [op.removeprefix("backward ") for op in ops if op.startswith("backward ")]
    assert backward == ["head", "block 2", "block 1", "block 0", "embed"]
    assert ops[-1] == "drop batch"


def test_a_tied_root_is_held_through_both_passes() -> None:
    """Embedding and head share a parameter, so the root is gathered first, freed last, and reduced at the very end."""
    forward, backward = text(TIED, Phase.FORWARD), text(TIED, Phase.BACKWARD)
    assert forward[1] == "unshard root"
    assert forward[-2:] == ["forward head", "reshard root"]
    assert backward[0] == "unshard root"
    assert backward[-5:] == ["backward embed", "reshard root", "reduce grad root", "wait reduce root", "drop batch"]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 10])
def test_prefetch_bounds_how_many_units_are_gathered(prefetch: int) -> None:
    """Untied blocks have spans of one segment, so at most the unit in use and `prefetch` more are alive."""
    spec = replace(UNTIED, prefetch=prefetch)
    num_units = len(plan_for(spec).units)
    alive = 0
    most = 0
    for op in schedule(spec):
        alive += (op.kind is OpKind.UNSHARD) - (op.kind is OpKind.RESHARD)
        most = max(most, alive)
    assert alive == 0
    assert most == min(num_units, 1 + prefetch)


def test_prefetch_starts_the_next_gather_before_computing() -> None:
    assert text(replace(UNTIED, prefetch=1), Phase.FORWARD)[1:8] == [
        "unshard embed",
        "wait unshard embed",
        "unshard block 0",
        "forward embed",
        "reshard embed",
        "wait unshard block 0",
        "unshard block 1",
    ]


@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("strategy", OVERLAPPING)
def test_async_reduce_keeps_one_reduction_in_flight_or_all_of_ddp(spec: RunSpec, strategy: Strategy) -> None:
    """DDP's are made in place, of gradients that stay whole: under way they hold nothing that is not held anyway."""
    spec = replace(spec, async_reduce=True, **settings_of(strategy, 4))
    in_flight: list[int | None] = []
    most = 0
    overlapped = 0
    for op in schedule(spec):
        if op.kind in (OpKind.REDUCE_GRAD, OpKind.REDUCE_REPLICAS):
            in_flight.append(op.unit)
        elif op.kind in (OpKind.WAIT_REDUCE, OpKind.WAIT_REPLICAS):
            in_flight.remove(op.unit)
        elif op.kind is OpKind.BACKWARD:
            overlapped += bool(in_flight)
        elif op.kind is OpKind.OPTIMIZER_STEP:
            assert not in_flight, "the optimizer must not read a gradient that is still under way"
        most = max(most, len(in_flight))
    assert most == (len({op.unit for op in schedule(spec) if op.unit is not None}) if strategy is Strategy.DDP else 1)
    assert overlapped > 0


@pytest.mark.parametrize("strategy", [strategy for strategy in OVERLAPPING if strategy.syncs_param])
@pytest.mark.parametrize("async_reduce", [False, True])
def test_updated_parameters_travel_while_the_next_unit_is_updated(async_reduce: bool, strategy: Strategy) -> None:
    """Each unit's gather follows its update, one is under way at most, and all are over with the step."""
    ops = schedule(replace(UNTIED, strategy=strategy, async_reduce=async_reduce))
    syncs = [op.kind in (OpKind.SYNC_PARAM, OpKind.WAIT_SYNC) for op in ops]
    under_way: list[int | None] = []
    updated: set[int | None] = set()
    most = overlapped = 0
    for op in ops:
        if op.kind is OpKind.OPTIMIZER_STEP:
            updated.add(op.unit)
            overlapped += len(under_way)
        elif op.kind is OpKind.SYNC_PARAM:
            assert op.unit in updated
            under_way.append(op.unit)
        elif op.kind is OpKind.WAIT_SYNC:
            under_way.remove(op.unit)
        most = max(most, len(under_way))
    num_units = len(updated)
    assert sum(syncs) == 2 * num_units > 2
    assert (most, under_way) == (1, [])
    assert overlapped == (num_units - 1 if async_reduce else 0)


@pytest.mark.parametrize("strategy", [Strategy.ZERO2, Strategy.ZERO3, Strategy.HYBRID_SHARD])
def test_async_reduce_holds_two_full_gradients_at_most(strategy: Strategy) -> None:
    """The unit in backward and the one whose reduction is under way: the price of the overlap."""
    for async_reduce, bound in ((False, 1), (True, 2)):
        spec = replace(UNTIED, async_reduce=async_reduce, **settings_of(strategy, 4))
        alive: set[int | None] = set()
        most = 0
        for op in schedule(spec):
            if op.kind is OpKind.BACKWARD:
                alive.add(op.unit)
            elif op.kind is last_wait(strategy):
                alive.remove(op.unit)
            most = max(most, len(alive))
        assert (alive, most) == (set(), bound)


@pytest.mark.parametrize("strategy", OVERLAPPING)
def test_every_start_is_waited_for_before_its_use(strategy: Strategy) -> None:
    prefetch = 2 if strategy.reshards_after_forward else 0
    spec = replace(TIED, async_reduce=True, prefetch=prefetch, **settings_of(strategy, 4))
    ready: set[int | None] = set()
    for op in schedule(spec):
        if op.kind is OpKind.WAIT_UNSHARD:
            ready.add(op.unit)
        elif op.kind is OpKind.RESHARD:
            ready.remove(op.unit)
        elif op.kind in (OpKind.FORWARD, OpKind.BACKWARD) and strategy.reshards_after_forward:
            assert op.unit in ready
    assert not ready


def test_ranks_do_not_change_the_order() -> None:
    assert schedule(UNTIED) == schedule(replace(UNTIED, ranks=64))


# ---- SHARD_GRAD_OP, checkpointing, micro-batches ----


@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_shard_grad_op_gathers_once_and_frees_after_backward(spec: RunSpec, policy: UnitPolicy) -> None:
    """2P on the wire, as DDP; FSDP's reshard_after_forward=False."""
    spec = replace(spec, unit=policy, strategy=Strategy.SHARD_GRAD_OP)
    units = [unit.index for unit in plan_for(spec).units]
    assert {op.phase for op in schedule(spec) if op.kind is OpKind.UNSHARD} == {Phase.FORWARD}
    assert {op.phase for op in schedule(spec) if op.kind is OpKind.RESHARD} == {Phase.BACKWARD}
    for kind in (OpKind.UNSHARD, OpKind.RESHARD, OpKind.REDUCE_GRAD):
        assert count(spec, kind) == dict.fromkeys(units, 1)


def test_a_checkpointed_block_is_recomputed_in_the_window_of_its_backward() -> None:
    """Where units are the checkpointed blocks, recomputing costs no gather: the schedule is ZeRO-3's with one op more
    a block."""
    plain, checkpointed = text(UNTIED, Phase.BACKWARD), text(checkpointing(UNTIED, 1), Phase.BACKWARD)
    assert [op for op in checkpointed if not op.startswith("recompute")] == plain
    for block in range(3):
        assert checkpointed[checkpointed.index(f"recompute block {block}") + 1] == f"backward block {block}"


def checkpointing(spec: RunSpec, blocks: int, unit: str = "block") -> RunSpec:
    return replace(spec, checkpointing=Checkpointing(blocks), unit=UnitPolicy.parse(unit))


def test_a_region_of_two_units_in_full() -> None:
    """Blocks 0 and 1 are recomputed together, so block 0 is gathered for that and once more for its backward."""
    ops = text(checkpointing(UNTIED, 2), Phase.BACKWARD)
    start, stop = ops.index("recompute block 0") - 2, ops.index("unshard embed")
    assert ops[start:stop] == [
        "unshard block 0",
        "wait unshard block 0",
        "recompute block 0",
        "reshard block 0",
        "unshard block 1",
        "wait unshard block 1",
        "recompute block 1",
        "backward block 1",
        "reshard block 1",
        "reduce grad block 1",
        "wait reduce block 1",
        "unshard block 0",
        "wait unshard block 0",
        "backward block 0",
        "reshard block 0",
        "reduce grad block 0",
        "wait reduce block 0",
    ]


def test_units_finer_than_the_checkpointed_block_are_gathered_once_more() -> None:
    """4P of the attention layers and 3P of the rest: the classic wrong nesting of FSDP inside a checkpoint."""
    spec = checkpointing(UNTIED, 1, "layer")
    gathers = {plan_for(spec).units[unit or 0].name: times for unit, times in count(spec, OpKind.UNSHARD).items()}
    assert gathers == {name: 3 if name.endswith("attn") else 2 for name in (unit.name for unit in plan_for(spec).units)}


@pytest.mark.parametrize("prefetch", [0, 1, 2, 100])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("unit", ["model", "block", "block:2", "layer", "numel:1"])
@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=["untied", "tied"])
def test_a_unit_is_there_when_it_computes_and_never_gathered_twice(
    spec: RunSpec, unit: str, blocks: int, prefetch: int
) -> None:
    for strategy in (Strategy.ZERO3, Strategy.SHARD_GRAD_OP):
        held: set[int | None] = set()
        ready: set[int | None] = set()
        for op in schedule(replace(checkpointing(spec, blocks, unit), strategy=strategy, prefetch=prefetch)):
            if op.kind is OpKind.UNSHARD:
                assert op.unit not in held
                held.add(op.unit)
            elif op.kind is OpKind.WAIT_UNSHARD:
                assert op.unit in held
                ready.add(op.unit)
            elif op.kind is OpKind.RESHARD:
                held.remove(op.unit)
                ready.remove(op.unit)
            elif op.kind in (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD):
                assert op.unit in ready
        assert not held


@pytest.mark.parametrize(
    ("strategy", "no_sync", "num_gathers", "num_reduced"),
    [
        # Three micro-batches. Whole gradients are reduced once; sharded ones each time.
        (Strategy.DDP, None, 0, 1),
        (Strategy.DDP, False, 0, 3),
        (Strategy.ZERO1, None, 0, 1),
        (Strategy.ZERO2, None, 0, 3),
        (Strategy.ZERO2, True, 0, 1),
        (Strategy.ZERO3, None, 6, 3),
        (Strategy.ZERO3, True, 6, 1),
        (Strategy.SHARD_GRAD_OP, None, 3, 3),
    ],
)
def test_what_three_micro_batches_gather_and_reduce(
    strategy: Strategy, no_sync: bool | None, num_gathers: int, num_reduced: int
) -> None:
    spec = replace(UNTIED, strategy=strategy, accumulation=3, no_sync=no_sync)
    units = [unit.index for unit in plan_for(spec).units]
    for kind, times in (
        (OpKind.UNSHARD, num_gathers),
        (OpKind.REDUCE_GRAD, num_reduced),
        (OpKind.OPTIMIZER_STEP, 1),
    ):
        assert count(spec, kind) == (dict.fromkeys(units, times) if times else {}), kind


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("offload", Offload)
def test_a_step_begins_by_dropping_the_gradients_unless_they_stay(strategy: Strategy, offload: Offload) -> None:
    """Megatron's one buffer stays, and so does what lies on the host. Once a step, not once a micro-batch."""
    if not exists(strategy, settings={"offload": offload}) or (offload.moves_params and not strategy.shards_param):
        return
    spec = replace(UNTIED, accumulation=2, offload=offload, **settings_of(strategy, 4))
    stays = strategy is Strategy.MEGATRON_OPTIM or offload is Offload.PARAMS
    dropped = [position for position, op in enumerate(schedule(spec)) if op.kind is OpKind.DROP_GRAD]
    assert dropped == ([] if stays else [0])


def test_foreach_updates_all_units_in_one_op_and_offload_moves_the_update() -> None:
    assert text(replace(UNTIED, optimizer=Optimizer.ADAMW_FOREACH), Phase.OPTIMIZER) == ["optimizer step"]
    on_host = text(replace(UNTIED, offload=Offload.OPTIMIZER), Phase.OPTIMIZER)
    assert on_host == [f"optimizer step on host {unit.name}" for unit in plan_for(UNTIED).units]


# ---- shard groups, one buffer, clipping ----


@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("settings", [{}, {"prefetch": 1, "async_reduce": True}, {"accumulation": 2}], ids=str)
def test_hybrid_shard_is_zero3_with_a_sum_across_groups_after_each_reduction(
    spec: RunSpec, policy: UnitPolicy, settings: dict[str, Any]
) -> None:
    """Taken out, the two ops leave ZeRO-3's step, op by op."""
    zero3 = replace(spec, unit=policy, **settings)
    hybrid = replace(zero3, strategy=Strategy.HYBRID_SHARD, shard_ranks=2)
    across = (OpKind.REDUCE_REPLICAS, OpKind.WAIT_REPLICAS)
    assert tuple(op for op in schedule(hybrid) if op.kind not in across) == schedule(zero3)
    ops = schedule(hybrid)
    for op, start, wait in zip(ops, ops[1:], ops[2:], strict=False):
        assert (op.kind is OpKind.WAIT_REDUCE) == (start.kind is OpKind.REDUCE_REPLICAS)
        if op.kind is OpKind.WAIT_REDUCE:
            assert (start.unit, wait.unit, wait.kind) == (op.unit, op.unit, OpKind.WAIT_REPLICAS)


def test_neither_groups_nor_their_number_change_the_order() -> None:
    hybrid = replace(UNTIED, strategy=Strategy.HYBRID_SHARD, shard_ranks=2)
    assert schedule(hybrid) == schedule(replace(hybrid, ranks=64, shard_ranks=16))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_one_buffer_is_zeroed_reduced_updated_and_gathered_once_whatever_the_units(policy: UnitPolicy) -> None:
    spec = replace(UNTIED, unit=policy, strategy=Strategy.MEGATRON_OPTIM, accumulation=2)
    compute = (OpKind.LOAD_BATCH, OpKind.FORWARD, OpKind.BACKWARD, OpKind.DROP_BATCH)
    assert [(op.kind, op.unit) for op in schedule(spec) if op.kind not in compute] == [
        (OpKind.ZERO_GRAD, None),
        (OpKind.REDUCE_GRAD, None),
        (OpKind.WAIT_REDUCE, None),
        (OpKind.OPTIMIZER_STEP, None),
        (OpKind.SYNC_PARAM, None),
        (OpKind.WAIT_SYNC, None),
    ]
    forward, backward = text(spec, Phase.FORWARD), text(spec, Phase.BACKWARD)
    half = len(forward) // 2
    assert forward[:half] == forward[half:] and forward[0] == "load batch"
    assert backward[0] == "zero grad" and backward[-3:] == ["reduce grad", "wait reduce", "drop batch"]


@pytest.mark.parametrize("strategy", Strategy)
def test_clipping_is_one_op_before_the_first_update(strategy: Strategy) -> None:
    plain = replace(UNTIED, **settings_of(strategy, 4))
    clipped = text(replace(plain, clip_norm=0.5), Phase.OPTIMIZER)
    assert clipped == ["clip grad", *text(plain, Phase.OPTIMIZER)]
