"""The dtype of each copy by itself: every choice from every state leads to bytes of that width, or is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any

import pytest

from zeroviz.category import Category
from zeroviz.dtypes_apart import Copy, Dtypes, asides, dtypes_of, sum_words, with_dtype
from zeroviz.errors import SpecError
from zeroviz.implementations import PAIRS
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import DType, Implementation, Offload, Optimizer, Precision, RunSpec, Strategy
from zeroviz.toggles import settle, spec_of, toggles_of
from zeroviz.wording import recipe_sum

HELD = {
    Copy.PARAM: (Category.SHARDED_PARAM, Category.UNSHARDED_PARAM),
    Copy.GRAD: (Category.SHARDED_GRAD, Category.UNSHARDED_GRAD),
    Copy.MASTER: (Category.MASTER_PARAM,),
    Copy.MOMENTS: (Category.OPTIMIZER_STATE,),
}
CODES = [(impl, strategy) for impl, strategies in PAIRS.items() for strategy in strategies]
CHOICES = [(copy, dtype) for copy in Copy for dtype in copy.choices]


def opening(impl: Implementation = Implementation.OWN, strategy: Strategy = Strategy.ZERO3) -> dict[str, Any]:
    """The toggles of fp32, three ranks of tiny so that shards have padding."""
    ranks = 4 if strategy.replicates else 3
    spec = RunSpec(model=PRESETS["tiny"], impl=impl, strategy=strategy, ranks=ranks,
                   shard_ranks=2 if strategy.replicates else None)  # fmt: skip
    return toggles_of(spec)


def followed(toggles: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """`toggles` with others set, as the explorer sets them. Raises SpecError for what does not exist."""
    wanted = {**toggles, **given}
    settle(wanted, given=given)
    return toggles_of(spec_of(wanted))


def states(impl: Implementation, strategy: Strategy) -> Iterator[dict[str, Any]]:
    """Every recipe of a pair, under every optimizer."""
    grads = (None, DType.FP32, DType.BF16)
    for precision, grad, optimizer in product(Precision, grads, Optimizer):
        try:
            yield followed(opening(impl, strategy), precision=precision, grad_dtype=grad, optimizer=optimizer)
        except SpecError:
            continue


def chosen(toggles: Mapping[str, Any], copy: Copy, dtype: DType | None) -> dict[str, Any]:
    return followed(toggles, **with_dtype(toggles, copy, dtype).toggles)


def dtypes(toggles: Mapping[str, Any]) -> Dtypes:
    return dtypes_of(spec_of(toggles))


def nbytes_at_rest(spec: RunSpec, copy: Copy) -> tuple[int, ...]:
    return tuple(sum(rank.at_rest.get(category, 0) for category in HELD[copy]) for rank in predict(spec).ranks)


@lru_cache(maxsize=256)
def numels_at_rest(impl: Implementation, strategy: Strategy, copy: Copy) -> tuple[int, ...]:
    """Elements of a copy on each rank, padding included, from states whose widths are known: fp32 for parameters and
    gradients; for what is updated the 8 bytes of two fp32 moments."""
    per = 8 if copy in (Copy.MASTER, Copy.MOMENTS) else 4
    held = Copy.MOMENTS if copy is Copy.MASTER else copy
    nbytes = nbytes_at_rest(spec_of(opening(impl, strategy)), held)
    assert all(number % per == 0 for number in nbytes)
    return tuple(number // per for number in nbytes)


def assert_holds(toggles: Mapping[str, Any], copy: Copy, dtype: DType | None) -> None:
    """At rest each rank holds `dtype.itemsize` bytes for each element of `copy`, as the trace has it."""
    spec = spec_of(toggles)
    numels, nbytes = numels_at_rest(spec.impl, spec.strategy, copy), nbytes_at_rest(spec, copy)
    if copy is Copy.MOMENTS and dtype is DType.INT8:
        for numel, held in zip(numels, nbytes, strict=True):  # 1 byte each, and an fp32 scale for 2,048 of a tensor
            scales = held - 2 * numel
            assert 2 * 4 * (numel // 2048) <= scales <= 2 * 4 * (numel // 2048 + len(spec.model.params))
        return
    if copy is Copy.GRAD and not any(nbytes):  # DeepSpeed's stages 0, 1 and 2 let the gradient go before the step ends
        assert spec.impl is Implementation.DEEPSPEED
        return
    times = spec.optimizer.num_moments if copy is Copy.MOMENTS else 1
    width = dtype.itemsize * times if dtype else 0
    if copy is Copy.GRAD and not any(numels):  # fp32 gradients of bf16 parameters are a buffer there, of fp32 ones not
        numels = numels_at_rest(spec.impl, spec.strategy, Copy.PARAM)
    assert nbytes == tuple(numel * width for numel in numels)


@pytest.mark.parametrize(("impl", "strategy"), CODES)
def test_every_choice_from_every_state_leads_to_that_dtype_or_is_refused(
    impl: Implementation, strategy: Strategy
) -> None:
    num_reached = 0
    for toggles, (copy, dtype) in product(states(impl, strategy), CHOICES):
        before = dict(toggles)
        try:
            change = with_dtype(toggles, copy, dtype)
        except SpecError as refusal:
            assert toggles == before
            assert re.fullmatch(r"[^\n]+ with [^\n]+; [^\n]+\.", str(refusal)), refusal
            continue
        now = followed(toggles, **change.toggles)
        assert dtypes(now)[copy] is dtype
        assert_holds(now, copy, dtype)
        assert with_dtype(now, copy, dtype) == ({}, ())  # a second time nothing changes
        kept = {name for name in now if now[name] == before[name]}
        assert {*now} - kept <= {"precision", "grad_dtype", "optimizer"}
        for other in set(Copy) - {copy}:  # what else changed is said, and nothing else is
            is_said = any(note.startswith(f"{other.value} {other.verb} now ") for note in change.notes)
            assert is_said == (dtypes(now)[other] is not dtypes(before)[other])
        assert any(note.startswith("optimizer is now") for note in change.notes) == ("optimizer" not in kept)
        num_reached += 1
    assert num_reached


@pytest.mark.parametrize(("impl", "strategy"), CODES)
def test_no_nearer_state_exists_and_what_is_said_not_to_exist_does_not(
    impl: Implementation, strategy: Strategy
) -> None:
    """Against a search through all states of the pair, which knows no order of copies."""
    all_states = list(states(impl, strategy))
    all_dtypes = [dtypes(other) for other in all_states]
    for toggles, (copy, dtype) in product(all_states, CHOICES):
        before = dtypes(toggles)
        pool = [
            has
            for other, has in zip(all_states, all_dtypes, strict=True)
            if has[copy] is dtype and (copy is Copy.MOMENTS or other["optimizer"] is toggles["optimizer"])
        ]
        try:
            change = with_dtype(toggles, copy, dtype)
        except SpecError:
            assert not pool or not toggles["optimizer"].num_moments
            continue
        after = dtypes(followed(toggles, **change.toggles))
        assert num_changed(before, after) == min(num_changed(before, has) for has in pool)
        for note in change.notes:
            if found := re.search(r"has no (\w+) (\w+) (with|without) (?:a master|(\w+) (\w+)) here", note):
                first, of, beside, second, of_second = found.groups()
                with_it = {
                    DTYPES[first]: Copy(of),
                    **({DTYPES[second]: Copy(of_second)} if second else {}),
                }
                assert not [
                    has
                    for has in all_dtypes
                    if all(has[which] is which_dtype for which_dtype, which in with_it.items())
                    and (second or (has[Copy.MASTER] is not None) == (beside == "with"))
                ], note


DTYPES = {dtype.value: dtype for dtype in DType}


def num_changed(before: Dtypes, after: Dtypes) -> int:
    return sum(before[copy] is not after[copy] for copy in Copy)


@pytest.mark.parametrize("strategy", [strategy for strategy in Strategy if not strategy.has_whole_buffer])
@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW, Optimizer.ADAMW_8BIT])
def test_there_and_back_in_our_own_code(strategy: Strategy, optimizer: Optimizer) -> None:
    """Gradients always; the parameters' dtype where there is no master to lose; the master, whose moments follow."""
    for toggles in states(Implementation.OWN, strategy):
        if toggles["optimizer"] is not optimizer:
            continue
        before = dtypes(toggles)
        trips: list[tuple[Copy, DType | None]] = [(Copy.GRAD, DType.BF16), (Copy.GRAD, DType.FP32)]
        if before[Copy.MASTER] is None:
            trips += [(Copy.PARAM, DType.BF16), (Copy.PARAM, DType.FP32)]
        if before[Copy.PARAM] is DType.BF16:
            trips += [(Copy.MASTER, None), (Copy.MASTER, DType.FP32)]
        trips += [(Copy.MOMENTS, DType.INT8)]
        for copy, dtype in trips:
            back = chosen(chosen(toggles, copy, dtype), copy, before[copy])
            assert dtypes(back) == before


@pytest.mark.parametrize(
    ("first", "copy", "dtype", "words", "notes"),
    [
        ({}, Copy.PARAM, DType.BF16, "2 + 4 + 0 + 4 = 10", "moments are now bf16: they follow what is updated, the "),
        ({}, Copy.MASTER, DType.FP32, "2 + 4 + 4 + 8 = 18", "parameters are now bf16: fp32 parameters need no master."),
        ({}, Copy.GRAD, DType.BF16, "4 + 2 + 0 + 8 = 14", ""),
        ({"precision": Precision.BF16_MIXED}, Copy.GRAD, DType.FP32, "2 + 4 + 4 + 8 = 18", ""),
        ({"precision": Precision.BF16_MIXED}, Copy.MASTER, None, "2 + 2 + 0 + 4 = 8", "the parameters"),
        ({"precision": Precision.BF16_MIXED}, Copy.PARAM, DType.FP32, "4 + 2 + 0 + 8 = 14", "updated themselves"),
        ({"precision": Precision.BF16}, Copy.MOMENTS, DType.FP32, "2 + 2 + 4 + 8 = 16", "master is now fp32"),
        ({"precision": Precision.BF16_MIXED}, Copy.MOMENTS, DType.INT8, "2 + 2 + 4 + 2 = 10", "now adamw-8bit"),
        ({"optimizer": Optimizer.SGD_MOMENTUM}, Copy.GRAD, DType.BF16, "4 + 2 + 0 + 4 = 10", ""),
        ({"optimizer": Optimizer.SGD}, Copy.GRAD, DType.BF16, "4 + 2 + 0 + 0 = 6", ""),
        ({"optimizer": Optimizer.SGD}, Copy.MOMENTS, DType.INT8, "4 + 4 + 0 + 2 = 10", "it alone has int8 moments"),
        ({"offload": Offload.OPTIMIZER}, Copy.MOMENTS, DType.INT8, "4 + 4 + 0 + 2 = 10", "now adamw-8bit"),
    ],
)
def test_what_a_parameter_then_costs(
    first: dict[str, Any], copy: Copy, dtype: DType | None, words: str, notes: str
) -> None:
    toggles = followed(opening(), **first)
    change = with_dtype(toggles, copy, dtype)
    assert sum_words(spec_of(followed(toggles, **change.toggles))) == words
    assert notes in " ".join(change.notes) and bool(notes) == bool(change.notes)


def test_the_sum_is_the_recipes_but_for_a_master_that_one_library_always_keeps() -> None:
    for impl, strategy in CODES:
        for toggles in states(impl, strategy):
            spec = spec_of(toggles)
            total = int(sum_words(spec).rpartition(" = ")[2])
            always = impl is Implementation.DEEPSPEED and strategy is not Strategy.DDP
            extra = 4 if always and not spec.recipe.master else 0
            assert total == spec.recipe.bytes_per_param + extra
            assert f" = {total} bytes" in recipe_sum(spec, "bytes"), "every table says the same"


def test_a_recipe_with_a_name_is_called_by_it() -> None:
    mixed = followed(opening(), precision=Precision.BF16_MIXED)
    assert with_dtype(mixed, Copy.GRAD, DType.FP32).toggles == {
        "precision": Precision.BF16_FP32GRAD, "grad_dtype": None, "optimizer": Optimizer.ADAMW,
    }  # fmt: skip


@pytest.mark.parametrize("impl", [Implementation.FSDP1, Implementation.FSDP2])
def test_fsdp_mixed_is_fp32_at_rest_and_computed_in_bf16(impl: Implementation) -> None:
    toggles = followed(opening(impl), precision=Precision.FSDP_MIXED)
    assert dtypes(toggles) == {
        Copy.PARAM: DType.FP32, Copy.GRAD: DType.FP32, Copy.MASTER: None, Copy.MOMENTS: DType.FP32,
    }  # fmt: skip
    assert "Parameters are fp32 at rest, gathered and computed with in bf16." in asides(spec_of(toggles))
    assert with_dtype(toggles, Copy.MOMENTS, DType.INT8).toggles["precision"] is Precision.FSDP_MIXED
    plain = chosen(chosen(toggles, Copy.PARAM, DType.BF16), Copy.PARAM, DType.FP32)
    assert plain["precision"] is Precision.FP32 and len(asides(spec_of(plain))) == 1


@pytest.mark.parametrize(
    ("impl", "strategy", "optimizer", "copy", "dtype", "words"),
    [
        (
            Implementation.DDP, Strategy.DDP, Optimizer.ADAMW, Copy.MASTER, DType.FP32,
            "master is fp32 with impl ddp and strategy ddp, where there is none; leave it out, or use impl own or "
            "deepspeed.",
        ),
        (
            Implementation.DEEPSPEED, Strategy.ZERO1, Optimizer.ADAMW, Copy.MASTER, None,
            "master is none with impl deepspeed and strategy zero1, where there is always one; leave it fp32, or use "
            "impl own or zero_redundancy.",
        ),
        (
            Implementation.DEEPSPEED, Strategy.ZERO2, Optimizer.ADAMW, Copy.MOMENTS, DType.BF16,
            "moments are bf16 with impl deepspeed and strategy zero2, where they can be fp32 or int8 only; leave them "
            "so, or use impl own.",
        ),
        (
            Implementation.OWN, Strategy.MEGATRON_OPTIM, Optimizer.ADAMW, Copy.GRAD, DType.BF16,
            "gradients are bf16 with impl own and strategy megatron_optim, where they can be fp32 only; leave them so, "
            "or use strategy ddp or zero1 or zero2 or zero3 or shard_grad_op or hybrid_shard.",
        ),
        (
            Implementation.MEGATRON, Strategy.MEGATRON_OPTIM, Optimizer.ADAMW, Copy.GRAD, DType.BF16,
            "gradients are bf16 with impl megatron and strategy megatron_optim, where they can be fp32 only; leave "
            "them so.",
        ),
        (
            Implementation.OWN, Strategy.ZERO3, Optimizer.SGD, Copy.MOMENTS, DType.FP32,
            "moments are fp32 with optimizer sgd, which keeps none; use optimizer adamw or sgd-momentum.",
        ),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_refused_in_a_sentence(
    impl: Implementation, strategy: Strategy, optimizer: Optimizer, copy: Copy, dtype: DType | None, words: str
) -> None:
    with pytest.raises(SpecError) as refusal:
        with_dtype(followed(opening(impl, strategy), optimizer=optimizer), copy, dtype)
    assert str(refusal.value) == words


def test_a_dtype_that_no_recipe_has_is_refused() -> None:
    with pytest.raises(SpecError, match="gradients are int8; allowed are fp32 or bf16"):
        with_dtype(opening(), Copy.GRAD, DType.INT8)
    with pytest.raises(SpecError, match="master is bf16; allowed are none or fp32"):
        with_dtype(opening(), Copy.MASTER, DType.BF16)
