"""Field reports on memory: what surprised people who do this job, each as a test named after the surprise.

A docstring begins with the claim, its source in brackets; test_09_... is about the ninth report. Figures are derived
from sizes and asserted through zeroviz's own functions; what a report printed is compared at the digits it was printed
with. The second test of a report is about its kind: another model, N, recipe, uneven sizes. Reports 7, 8, 12 and later
are in test_field_reports_units.py; tests/dist/test_field_reports_live.py proves some of them on real ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from tests.every import exists, pairs, settings_of
from tests.pure.steps import (
    GB,
    GIB,
    MODEL,
    UNEVEN,
    blocks_made,
    events_of,
    held_at_loads,
    rest,
    rest_nbytes,
    text_of,
    units_of,
)
from zeroviz.errors import SpecError
from zeroviz.estimators import deepspeed_zero3, megatron_fp16
from zeroviz.gathered import divided_nbytes
from zeroviz.models import PRESETS, bare
from zeroviz.partition import buffers_for, padded_numel, shard_numel
from zeroviz.peak import peak_of
from zeroviz.precision import OWN_PRECISIONS
from zeroviz.predict import predict
from zeroviz.schedule import OpKind, schedule
from zeroviz.spec import Checkpointing, DType, Offload, Optimizer, Precision, RunSpec, Strategy
from zeroviz.trace import Category
from zeroviz.wording import recipe_sum

LLAMA = PRESETS["llama3-8b"]


def most_in_update(spec: RunSpec) -> int:
    """The most that the optimizer's temporaries come to."""
    held = most = 0
    for event in events_of(spec):
        if event.phase == "optimizer" and event.category is Category.TEMPORARY:
            held += event.delta_nbytes
            most = max(most, held)
    return most


@pytest.mark.parametrize(("strategy", "precision"), pairs())
def test_02_foreach_needs_a_copy_of_what_a_rank_owns(strategy: Strategy, precision: Precision) -> None:
    """AdamW foreach needs one more copy of the local parameters, the for-loop and fused forms far less [pytorch 97712].

    foreach makes sqrt(v) of all its tensors at once: sum of s_u elements of the moments' width m, where s_u is what a
    rank owns of unit u: all of it under DDP, ceil(numel / N) under ZeRO. The loop makes sqrt(v) and the denominator,
    2 m l_u, one slice after another of l_u = ceil(s_u / ceil(numel / largest parameter)) elements. Fused makes nothing.
    Where the gradient is narrower than what is updated it is cast first, as many elements of the update's width.
    """
    for name, ranks in itertools.product(UNEVEN, (1, 2, 3, 7)):
        spec = RunSpec(model=PRESETS[name], ranks=ranks, precision=precision, **settings_of(strategy, ranks))
        buffers = buffers_for(spec)
        shards = [shard_numel(buffer, spec) for buffer in buffers]
        slices = [
            -(-shard // -(-buffer.numel // max(shape.numel for shape in buffer.params)))
            for buffer, shard in zip(buffers, shards, strict=True)
        ]
        m, cast = spec.recipe.moments.itemsize, spec.recipe.update.itemsize * spec.recipe.casts_grad
        expected = {
            Optimizer.ADAMW_FOREACH: (m + cast) * sum(shards),
            Optimizer.ADAMW: (2 * m + cast) * max(slices),
            Optimizer.ADAMW_FUSED: cast * max(slices),
        }
        for optimizer, nbytes in expected.items():
            assert most_in_update(replace(spec, optimizer=optimizer)) == nbytes


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(model=PRESETS["tiny"], strategy=Strategy.DDP, ranks=2, seq=64),
        RunSpec(model=PRESETS["tiny-llama"], strategy=Strategy.ZERO1, ranks=2, seq=32),
        RunSpec(model=PRESETS["gpt2-xl"], strategy=Strategy.ZERO2, ranks=2, seq=1024),
        RunSpec(model=LLAMA, strategy=Strategy.ZERO3, ranks=2, seq=2048, precision=Precision.BF16_MIXED),
    ],
    ids=lambda spec: f"{spec.model.name}-{spec.strategy.value}",
)
def test_02_without_that_copy_the_peak_moves_into_backward(spec: RunSpec) -> None:
    """Removing it can move the peak to backward rather than lower it by the same amount: say when the peak is
    [pytorch 97712].

    With foreach the peak is rest + copy, in the optimizer. Without it is rest + w, w what backward holds beyond rest,
    and 0 < w < copy. So the peak falls by copy - w, and not by copy. It stands at backward's start where the loss of a
    large vocabulary weighs most, and further on where the gradients that gather do.
    """
    foreach = peak_of(replace(spec, optimizer=Optimizer.ADAMW_FOREACH))
    copy = most_in_update(replace(spec, optimizer=Optimizer.ADAMW_FOREACH))
    assert (foreach.phase, foreach.total) == ("optimizer", rest_nbytes(spec) + copy)
    fused = replace(spec, optimizer=Optimizer.ADAMW_FUSED)
    peak = peak_of(fused)
    assert (peak.phase, peak.op) == ("backward", "backward")
    first = next(op.unit for op in schedule(spec) if op.kind is OpKind.BACKWARD)
    assert first is not None
    assert (peak.unit == units_of(spec)[first].name) == (spec.model.vocab > 10_000)
    assert f"when backward of {peak.unit}" in text_of(fused)
    assert 0 < foreach.total - peak.total < copy
    assert foreach.total - peak.total == copy - (peak.total - rest_nbytes(spec))


def test_03_a_bf16_model_has_no_fp32_master() -> None:
    """A bf16 model under FSDP has no fp32 master: 2 + 2 + 2 + 2 = 8 bytes a parameter [Lightning 18717].

    Parameter, gradient and two moments of 2 bytes each; nowhere is there a master. With one it is 2 + 2 + 4 + 8 = 16.
    """
    num_params = 7 * GB  # divisible by the 8 ranks: no padding
    for strategy in (Strategy.ZERO3, Strategy.SHARD_GRAD_OP):
        spec = RunSpec(model=bare(num_params), strategy=strategy, ranks=8, unit=MODEL, precision=Precision.BF16)
        assert rest_nbytes(spec) == (2 + 2 + 2 + 2) * num_params // 8
        assert rest_nbytes(replace(spec, precision=Precision.BF16_MIXED)) == (2 + 2 + 4 + 4 + 4) * num_params // 8


@pytest.mark.parametrize("strategy", list(Strategy))
def test_03_a_master_is_held_exactly_where_the_recipe_names_one(strategy: Strategy) -> None:
    """The kind: no strategy, size or option makes a master of its own, except an optimizer on the host without one."""
    for name, precision, ranks in itertools.product(UNEVEN, OWN_PRECISIONS, (1, 3)):
        if not exists(strategy, precision):
            continue
        spec = RunSpec(model=PRESETS[name], precision=precision, ranks=ranks, **settings_of(strategy, ranks))
        owned = sum(shard_numel(buffer, spec) for buffer in buffers_for(spec))
        named = "master" in recipe_sum(spec, "")
        assert rest(spec, Category.MASTER_PARAM) == owned * 4 * named
        assert named == (precision in (Precision.BF16_MIXED, Precision.BF16_FP32GRAD))
        if not exists(strategy, precision, {"offload": Offload.OPTIMIZER}):
            continue
        offloaded = replace(spec, offload=Offload.OPTIMIZER)
        assert rest(offloaded, Category.HOST_MASTER_PARAM) == owned * spec.recipe.update.itemsize


def test_04_sixteen_eighteen_or_twenty_are_all_right_in_different_recipes() -> None:
    """People ask "16 or 18 or 20 bytes?": all right, in different recipes; name the recipe [Megatron-LM 654].

    fp32 4 + 4 + 8 and bf16-mixed 2 + 2 + 4 + 8 are 16; with fp32 gradients 2 + 4 + 4 + 8 = 18; fp16 with gradients in
    both widths 2 + 2 + 4 + 4 + 8 = 20, of which the optimizer's 16 are divided by Megatron: 4 + 16/N.
    """
    num_params, ranks = 1_000_001, 3
    for precision, terms in {
        Precision.FP32: (4, 4, 8),
        Precision.BF16_MIXED: (2, 2, 4, 8),
        Precision.BF16_FP32GRAD: (2, 4, 4, 8),
    }.items():
        spec = RunSpec(model=bare(num_params), strategy=Strategy.DDP, ranks=ranks, unit=MODEL, precision=precision)
        assert rest_nbytes(spec) == sum(terms) * num_params
        # The recipe's name and its sum stand at the head of what is printed.
        assert f"recipe {precision.value}: {recipe_sum(spec, 'bytes/param')}" in text_of(spec)
        assert f"= {sum(terms)} bytes/param" in text_of(spec)
    assert megatron_fp16(ranks) == (2 + 2 + 4 + 4 + 8, 4 + Fraction(4 + 4 + 8, ranks))


def test_04_another_gradient_or_optimizer_is_another_sum() -> None:
    """The kind: the sum is always that of the table of dtypes, whatever is set."""
    for precision, optimizer, grad in itertools.product(OWN_PRECISIONS, Optimizer, (DType.FP32, DType.BF16)):
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
def test_05_what_falls_with_n_is_said(strategy: Strategy, settings: dict[str, Any]) -> None:
    """The kind: a moment that holds T at N, of which f falls with N, holds T - f/2 at 2 N; the peak at 2 N is that
    moment or a larger one. Each of gpt2's units is padded by at most 3 elements on 2 or 4 ranks, and an element costs
    at most 32 bytes: 16 of states, 2 + 2 whole, and in the update 4 for the cast and 8 for two temporaries.
    """
    if not exists(strategy, settings=settings):
        return

    def of(ranks: int) -> dict[str, Any]:
        """hybrid_shard's N is that of its group."""
        return {"ranks": ranks, "strategy": strategy, "shard_ranks": ranks if strategy.replicates else None}

    precision = Precision.BF16_MIXED if exists(strategy, Precision.BF16_MIXED) else Precision.BF16_FP32GRAD
    spec = RunSpec(model=PRESETS["gpt2"], seq=3, precision=precision, **of(2), **settings)
    few, many = peak_of(spec), peak_of(replace(spec, **of(4)))
    divided, slack = divided_nbytes(spec, few), 3 * 32 * len(units_of(spec))
    assert few.total - divided / 2 - slack <= many.total
    if (few.phase, few.op, few.unit) == (many.phase, many.op, many.unit):
        assert abs(few.total - divided / 2 - many.total) <= slack
    assert (divided > 0) == (strategy is not Strategy.DDP and (strategy.shards_grad or "offload" not in settings))
    # At the peak of bare counts there is no padding at all, and the two parts are exact.
    whole = RunSpec(model=bare(8 * GB), unit=MODEL, **of(2), **settings)
    assert peak_of(whole).total - peak_of(replace(whole, **of(4))).total == divided_nbytes(whole, peak_of(whole)) / 2
    assert f"falls with {'G' if strategy.replicates else 'N'}" in text_of(whole)


def test_09_without_sync_whole_gradients_are_held() -> None:
    """no_sync under FSDP keeps whole gradients: 26B in bf16 on 16 ranks: 3.25 GB sharded, 52 GB whole [tnt PR 1057].

    2 bytes a parameter, divided by 16 or not. From the second micro-batch on they are there while forward runs.
    """
    num_params = 26 * GB
    common: dict[str, Any] = {"model": bare(num_params), "ranks": 16, "unit": MODEL, "precision": Precision.BF16}
    spec = RunSpec(strategy=Strategy.ZERO3, accumulation=3, no_sync=True, **common)
    sharded, whole = 2 * num_params // 16, 2 * num_params
    assert (sharded, whole) == (3.25 * GB, 52 * GB)
    for no_sync, between in ((True, whole), (False, 0), (None, 0)):
        step = replace(spec, no_sync=no_sync)
        assert rest(step, Category.SHARDED_GRAD) == sharded
        assert held_at_loads(step, Category.UNSHARDED_GRAD) == [0, between, between]


@pytest.mark.parametrize("strategy", [s for s in Strategy if s.shards_grad])
@pytest.mark.parametrize("name", ["tiny", "llama3.2-1b"])
def test_09_the_peak_says_what_no_sync_costs(strategy: Strategy, name: str) -> None:
    """The kind: with gradients of width g and padded units w_u, the peak has g sum(w_u) of whole gradients instead of
    the largest few; the wire is spared all reductions but one."""
    common: dict[str, Any] = {"ranks": 3, "seq": 16, "accumulation": 4, "precision": Precision.BF16_FP32GRAD}
    spec = RunSpec(model=PRESETS[name], **common, **settings_of(strategy, 3))
    held = replace(spec, no_sync=True)
    whole = 4 * sum(padded_numel(unit.numel, 3) for unit in units_of(spec))
    assert peak_of(held).by_category[Category.UNSHARDED_GRAD] == whole
    assert peak_of(spec).by_category[Category.UNSHARDED_GRAD] < 0.6 * whole
    scattered = [sum(c.op.value == "reduce_scatter" for c in predict(s).ranks[0].collectives) for s in (spec, held)]
    assert scattered == [4 * len(units_of(spec)), len(units_of(spec))]
    assert "gradients are reduced in each" in text_of(spec)
    assert "gradients are reduced in the last only, and held whole till then" in text_of(held)


def test_10_adams_state_is_made_in_the_first_step() -> None:
    """Adam's state is made in the first step: an 8B model over 8 GPUs read 69.5 GiB in step 1 and 77.3 from step 2 on.
    Measure from step 2 [pytorch PR 132445].

    In fp32 the two moments are 8 P/N bytes: 7.48 of the 7.8 GiB between the two readings, 96 %, is this state; what the
    rest was, the readings of another machine do not say.
    """
    spec = RunSpec(model=LLAMA, ranks=8)
    state = rest(spec, Category.OPTIMIZER_STATE)
    assert state == 8 * LLAMA.num_params // 8
    assert round(state / GIB / (77.3 - 69.5), 2) == 0.96
    with pytest.raises(SpecError, match="steps is 1; it must be a whole number from 2"):
        RunSpec(model=LLAMA, steps=1)


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_10_the_first_step_differs_by_the_state_and_nothing_else(optimizer: Optimizer) -> None:
    """The kind: from the second step on every moment before the update holds the state, whole under DDP, 1/N under
    ZeRO: as many moments as the optimizer has, and none at all for plain SGD, whose first step is like any other."""
    for strategy, name, ranks in itertools.product(Strategy, UNEVEN, (1, 3)):
        spec = RunSpec(model=PRESETS[name], ranks=ranks, optimizer=optimizer, **settings_of(strategy, ranks))
        owned = [shard_numel(buffer, spec) for buffer in buffers_for(spec)]
        width = 1 if optimizer is Optimizer.ADAMW_8BIT else 4
        scales = sum(-(-count // 2048) for count in owned) * 4 * (width == 1)
        state = optimizer.num_moments * (width * sum(owned) + scales)
        assert rest(spec, Category.OPTIMIZER_STATE) == state
        plain = peak_of(replace(spec, optimizer=Optimizer.SGD))
        if peak_of(spec).phase == plain.phase:
            assert peak_of(spec).total == plain.total + state


def test_11_fp32_logits_dominate_and_no_rank_divides_them() -> None:
    """FP32 logits dominate: 4096 x 248320 x 4 bytes = 3.79 GiB, not divided by N. 16k x 248320 in bf16 is 8.1 GB; a
    thread that said 16 meant fp32 [Megatron-Bridge PR 5508].

    The loss keeps the logarithms of the probabilities in fp32 from forward to backward, and forward and backward make
    more tensors of that size: logits, and the gradients of both.
    """
    tokens, vocab = 4096, 248320
    model = replace(PRESETS["tiny-llama"], name="large-vocabulary", vocab=vocab)
    fp32 = tokens * vocab * 4
    assert f"{fp32 / GIB:.2f}" == "3.79"
    for strategy, ranks in itertools.product(Strategy, (1, 64)):
        spec = RunSpec(model=model, ranks=ranks, seq=tokens, **settings_of(strategy, ranks))
        made = [blocks_made(spec, (category,))[fp32] for category in (Category.ACTIVATION, Category.TEMPORARY)]
        assert made == [1, 3]  # log probabilities; logits, and in backward the gradients of both
    half, whole = 16384 * vocab * 2, 16384 * vocab * 4
    assert (f"{half / GB:.1f}", f"{whole / GB:.0f}") == ("8.1", "16")
    mixed = RunSpec(model=model, strategy=Strategy.ZERO3, ranks=64, seq=16384, precision=Precision.BF16_MIXED)
    made = blocks_made(mixed, (Category.ACTIVATION, Category.TEMPORARY))
    # In bf16 the matrix product makes the logits, and its gradient leaves; the loss widens them to fp32 all the same.
    assert (made[half], made[whole]) == (2, 4)


@pytest.mark.parametrize("name", ["tiny", "gpt2", "llama3-8b"])
def test_11_the_logits_grow_with_tokens_and_vocabulary_alone(name: str) -> None:
    """The kind: n tokens and V words are 4 n V bytes for every model, N, recipe and unit; checkpointing keeps them."""
    model = PRESETS[name]
    for precision, checkpointing, batch, seq in itertools.product(
        OWN_PRECISIONS, (Checkpointing(0), Checkpointing(1)), (1, 3), (7, 64)
    ):
        for ranks in (2, 5):
            spec = RunSpec(
                model=model, ranks=ranks, precision=precision, checkpointing=checkpointing, batch=batch, seq=seq
            )
            assert blocks_made(spec, (Category.ACTIVATION,))[batch * seq * model.vocab * 4] == 1
