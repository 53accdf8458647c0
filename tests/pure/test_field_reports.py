"""What surprised people who do this job, each as a test named after the surprise, and a generalisation of each.

A docstring begins with the claim, its source in brackets. Figures are derived from sizes and asserted through
zeroviz's own functions; what was printed in a report is compared at the digits it was printed with.
tests/dist/test_field_reports_live.py proves some of them on real ranks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from zeroviz.budget import budget_row
from zeroviz.errors import SpecError
from zeroviz.estimators import deepspeed_zero3, megatron_fp16
from zeroviz.gathered import divided_nbytes, fsdp_root_numel, most_gathered
from zeroviz.memory import rest_by_category, rest_padding_nbytes
from zeroviz.models import PRESETS, ModelShape, bare
from zeroviz.partition import Unit, padded_numel, plan_units, shard_numel
from zeroviz.peak import peak_of
from zeroviz.predict import predict
from zeroviz.schedule import OpKind, schedule
from zeroviz.spec import Checkpointing, DType, Offload, Optimizer, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.tables import render
from zeroviz.trace import Category, Event, Peak
from zeroviz.wording import recipe_sum

GB, GIB = 10**9, 2**30
SHARDED = tuple(strategy for strategy in Strategy if strategy.shards_optimizer)
GATHERED = tuple(strategy for strategy in Strategy if strategy.shards_param)
MODEL = UnitPolicy.parse("model")
LLAMA = PRESETS["llama3-8b"]
# Sizes that nothing divides: uneven shards, padding, an odd number of tokens.
UNEVEN = ("tiny", "tiny-llama")


def rest(spec: RunSpec, category: Category) -> int:
    return rest_by_category(spec).get(category, 0)


def rest_nbytes(spec: RunSpec) -> int:
    return sum(rest_by_category(spec).values())


def units_of(spec: RunSpec) -> tuple[Unit, ...]:
    return plan_units(spec.model, spec.unit).units


def events_of(spec: RunSpec) -> tuple[Event, ...]:
    """Rank 0's; ranks differ in padding alone."""
    return tuple(predict(spec).ranks[0].events)


def blocks_made(spec: RunSpec, categories: tuple[Category, ...]) -> Counter[int]:
    """How many blocks of each size the step allocates in these categories."""
    return Counter(event.delta_nbytes for event in events_of(spec) if event.category in categories)


def held_at_loads(spec: RunSpec, category: Category) -> list[int]:
    """What is held in `category` each time a micro-batch is loaded."""
    held, found = rest(spec, category), []
    for event in events_of(spec):
        if event.op == OpKind.LOAD_BATCH.value:
            found.append(held)
        if event.category is category:
            held += event.delta_nbytes
    return found


def text_of(spec: RunSpec) -> str:
    """What `zeroviz predict` prints, line ends and columns undone."""
    return " ".join(render(predict(spec)).split())


# ---- memory ----


def most_in_update(spec: RunSpec) -> int:
    """The most that the optimizer's temporaries come to."""
    held = most = 0
    for event in events_of(spec):
        if event.phase == "optimizer" and event.category is Category.TEMPORARY:
            held += event.delta_nbytes
            most = max(most, held)
    return most


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("precision", list(Precision))
def test_02_foreach_needs_a_copy_of_what_a_rank_owns(strategy: Strategy, precision: Precision) -> None:
    """AdamW foreach needs one more copy of the local parameters, the for-loop and fused forms far less [pytorch 97712].

    foreach makes sqrt(v) of all its tensors at once: sum of s_u elements of the moments' width m, where s_u is what a
    rank owns of unit u: all of it under DDP, ceil(numel / N) under ZeRO. The loop makes sqrt(v) and the denominator,
    2 m s_u, one unit after another. Fused makes nothing. Where the gradient is narrower than what is updated it is
    cast first, s_u elements of the update's width.
    """
    for name, ranks in itertools.product(UNEVEN, (1, 2, 3, 7)):
        spec = RunSpec(model=PRESETS[name], strategy=strategy, ranks=ranks, precision=precision)
        shards = [shard_numel(unit, spec) for unit in units_of(spec)]
        m, cast = spec.recipe.moments.itemsize, spec.recipe.update.itemsize * spec.recipe.casts_grad
        expected = {
            Optimizer.ADAMW_FOREACH: (m + cast) * sum(shards),
            Optimizer.ADAMW: (2 * m + cast) * max(shards),
            Optimizer.ADAMW_FUSED: cast * max(shards),
        }
        for optimizer, nbytes in expected.items():
            assert most_in_update(replace(spec, optimizer=optimizer)) == nbytes


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(model=PRESETS["tiny"], strategy=Strategy.DDP, ranks=2, seq=7),
        RunSpec(model=PRESETS["tiny-llama"], strategy=Strategy.ZERO1, ranks=2, seq=5),
        RunSpec(model=PRESETS["gpt2"], strategy=Strategy.ZERO2, ranks=3, seq=64),
        RunSpec(model=LLAMA, strategy=Strategy.ZERO3, ranks=2, seq=2048, precision=Precision.BF16_MIXED),
    ],
    ids=lambda spec: f"{spec.model.name}-{spec.strategy.value}",
)
def test_02_without_that_copy_the_peak_moves_to_the_start_of_backward(spec: RunSpec) -> None:
    """Removing it can move the peak to the start of backward rather than lower it by the same amount: say when the
    peak is [pytorch 97712].

    With foreach the peak is rest + copy, in the optimizer. Without it is rest + w, w what backward of the first unit
    holds beyond rest, and 0 < w < copy. So the peak falls by copy - w, and not by copy.
    """
    foreach = peak_of(replace(spec, optimizer=Optimizer.ADAMW_FOREACH))
    copy = most_in_update(replace(spec, optimizer=Optimizer.ADAMW_FOREACH))
    assert (foreach.phase, foreach.total) == ("optimizer", rest_nbytes(spec) + copy)
    first = next(op for op in schedule(spec) if op.kind is OpKind.BACKWARD)
    assert first.unit is not None
    for optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED):
        peak = peak_of(replace(spec, optimizer=optimizer))
        assert (peak.phase, peak.op, peak.unit) == ("backward", "backward", units_of(spec)[first.unit].name)
        assert 0 < foreach.total - peak.total < copy
        assert foreach.total - peak.total == copy - (peak.total - rest_nbytes(spec))


def test_03_a_bf16_model_has_no_fp32_master() -> None:
    """A bf16 model under FSDP has no fp32 master: 2 + 2 + 2 + 2 = 8 bytes a parameter [Lightning 18717].

    Parameter, gradient and two moments of 2 bytes each; nowhere is there a master. With one it is 2 + 2 + 4 + 8 = 16.
    """
    num_params = 7 * GB  # divisible by the 8 ranks: no padding
    for strategy in GATHERED:
        spec = RunSpec(model=bare(num_params), strategy=strategy, ranks=8, unit=MODEL, precision=Precision.BF16)
        assert rest_nbytes(spec) == (2 + 2 + 2 + 2) * num_params // 8
        assert rest_nbytes(replace(spec, precision=Precision.BF16_MIXED)) == (2 + 2 + 4 + 4 + 4) * num_params // 8


@pytest.mark.parametrize("strategy", list(Strategy))
def test_03_a_master_is_held_exactly_where_the_recipe_names_one(strategy: Strategy) -> None:
    """The kind: no strategy, size or option makes a master of its own, except an optimizer on the host without one."""
    for name, precision, ranks in itertools.product(UNEVEN, Precision, (1, 3)):
        spec = RunSpec(model=PRESETS[name], strategy=strategy, precision=precision, ranks=ranks)
        owned = sum(shard_numel(unit, spec) for unit in units_of(spec))
        named = "master" in recipe_sum(spec, "")
        assert rest(spec, Category.MASTER_PARAM) == owned * 4 * named
        assert named == (precision in (Precision.BF16_MIXED, Precision.BF16_FP32GRAD))
        offloaded = replace(spec, offload=Offload.OPTIMIZER)
        assert rest(offloaded, Category.HOST_MASTER_PARAM) == owned * spec.recipe.update.itemsize


def test_04_sixteen_eighteen_or_twenty_are_all_right_in_different_recipes() -> None:
    """"16 or 18 or 20 bytes?": all right, in different recipes; name the recipe [Megatron-LM 654].

    fp32 4 + 4 + 8 and bf16-mixed 2 + 2 + 4 + 8 are 16; with fp32 gradients 2 + 4 + 4 + 8 = 18; fp16 with gradients in
    both widths 2 + 2 + 4 + 4 + 8 = 20, of which the optimizer's 16 are divided by Megatron: 4 + 16/N.
    """
    num_params, ranks = 1_000_001, 3
    for precision, terms in {
        Precision.FP32: (4, 4, 8),
        Precision.BF16_MIXED: (2, 2, 4, 8),
        Precision.BF16_FP32GRAD: (2, 4, 4, 8),
    }.items():
        spec = RunSpec(
            model=bare(num_params), strategy=Strategy.DDP, ranks=ranks, unit=MODEL, precision=precision
        )
        assert rest_nbytes(spec) == sum(terms) * num_params
        # The recipe's name and its sum stand at the head of what is printed.
        assert f"recipe {precision.value}: {recipe_sum(spec, 'bytes/param')}" in text_of(spec)
        assert f"= {sum(terms)} bytes/param" in text_of(spec)
    assert megatron_fp16(ranks) == (2 + 2 + 4 + 4 + 8, 4 + (4 + 4 + 8) / ranks)


def test_04_another_gradient_or_optimizer_is_another_sum() -> None:
    """The kind: the sum is always that of the table of dtypes, whatever is set."""
    for precision, optimizer, grad in itertools.product(Precision, Optimizer, (DType.FP32, DType.BF16)):
        if optimizer is Optimizer.ADAMW_8BIT:
            continue  # its scales are rounded up to whole blocks
        model = bare(999_983)
        spec = RunSpec(
            model=model, strategy=Strategy.DDP, unit=MODEL, precision=precision, optimizer=optimizer, grad_dtype=grad
        )
        assert rest_nbytes(spec) == spec.recipe.bytes_per_param * model.num_params
        assert f"= {spec.recipe.bytes_per_param} bytes" in recipe_sum(spec, "bytes")


def test_05_an_estimate_that_was_the_largest_layer_only() -> None:
    """An estimator said 0.77 GB for a 6B model on 2 and on 4 GPUs: that row was the largest layer only
    (50400 x 4096 x 4 bytes = 0.769 GiB) and did not depend on N [DeepSpeed 4093].

    4 bytes: 2 of parameters and 2 of gradients of the layer that is whole for a moment. With parameters and optimizer
    offloaded nothing else is left on the GPU; every other row has a term in P/N.
    """
    largest, num_params = 50400 * 4096, 6 * GB
    rows = {
        offload: [deepspeed_zero3(num_params, largest, ranks, offload=offload) for ranks in (2, 4, 64)]
        for offload in ("params", "optimizer", "none")
    }
    assert set(rows["params"]) == {4 * largest}
    assert f"{float(rows['params'][0]) / GIB:.3f}" == "0.769"
    for offload in ("optimizer", "none"):
        assert rows[offload][0] > rows[offload][1] > rows[offload][2] > 4 * largest


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("settings", [{}, {"optimizer": Optimizer.ADAMW_FOREACH}, {"offload": Offload.OPTIMIZER}])
def test_05_what_falls_with_n_is_said(strategy: Strategy, settings: dict[str, Optimizer | Offload]) -> None:
    """The kind: with f bytes of the peak at N that fall with N, the peak at 2 N is lower by f/2, if it is at the same
    place. gpt2's units are padded at N = 2 and 4 by at most 4 elements, 16 bytes of state each, and 14 units.
    """
    spec = RunSpec(model=PRESETS["gpt2"], strategy=strategy, ranks=2, seq=3, precision=Precision.BF16_MIXED, **settings)  # type: ignore[arg-type]
    few, many = peak_of(spec), peak_of(replace(spec, ranks=4))
    assert (few.phase, few.op, few.unit) == (many.phase, many.op, many.unit)
    divided = divided_nbytes(spec, few)
    assert abs((few.total - many.total) - divided / 2) <= 4 * 24 * len(units_of(spec))
    assert (divided > 0) == (strategy is not Strategy.DDP and (strategy.shards_grad or "offload" not in settings))
    # At the peak of bare counts there is no padding at all, and the two parts are exact.
    whole = RunSpec(model=bare(8 * GB), strategy=strategy, ranks=2, unit=MODEL, **settings)  # type: ignore[arg-type]
    assert peak_of(whole).total - peak_of(replace(whole, ranks=4)).total == divided_nbytes(whole, peak_of(whole)) / 2
    assert "falls with N" in text_of(whole)


def test_07_the_root_holds_embedding_and_head_and_is_the_largest_unit() -> None:
    """The root unit holds embedding and head and is the largest: Llama-3-8B root 2 x 128256 x 4096 = 1,050,673,152
    parameters against 218,112,000 in a block. List units with sizes, flag it, show the re-wrapped alternative
    [torchtitan PR 182].

    FSDP's root is what no wrapped module holds: both matrices and the last norm. Here embedding and head are units of
    their own, the re-wrapped alternative, unless they are tied. A block is query and output 2 h h, key and value
    2 h (h heads_kv/heads), the MLP's 3 h f, and two norms 2 h.
    """
    h, vocab, ffn = LLAMA.hidden, LLAMA.vocab, LLAMA.ffn
    block = 2 * h * h + 2 * h * LLAMA.kv_heads * LLAMA.head_dim + 3 * h * ffn + 2 * h
    assert (2 * vocab * h, block) == (1_050_673_152, 218_112_000)
    spec = RunSpec(model=LLAMA, ranks=8, precision=Precision.BF16_MIXED)
    root = 2 * vocab * h + h
    assert fsdp_root_numel(spec) == root
    sizes = {unit.name: unit.numel for unit in units_of(spec)}
    assert sizes == {"embed": vocab * h, **{f"block {i}": block for i in range(32)}, "head": vocab * h + h}
    text = text_of(spec)
    assert f"32 x block 0 .. block 31 {block:,}" in text
    assert f"head {vocab * h + h:,} 0 largest, 7%" in text
    assert f"FSDP's root {root:,} elements, 13%, if its blocks alone are wrapped" in text
    # Smaller blocks do not help against a root, and larger ones soon hide it.
    largest = {unit: max(units_of(replace(spec, unit=UnitPolicy.parse(unit))), key=numel) for unit in WRAPPINGS}
    assert [largest[unit].name for unit in WRAPPINGS] == ["head", "head", "blocks 0-3", FIVE_BLOCKS, "model"]
    assert largest["block:4"].numel == 4 * block
    assert largest["numel:1e9"].numel == 5 * block  # the first whole number of blocks that reaches 1e9


WRAPPINGS = ("layer", "block", "block:4", "numel:1e9", "model")
FIVE_BLOCKS = "block 0 attn to block 4 attn"


def numel(unit: Unit) -> int:
    return unit.numel
