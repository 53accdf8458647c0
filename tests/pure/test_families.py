"""Qwen2, Gemma-2 and Mixtral by arithmetic: what a block keeps, derived by hand; every strategy and unit; refusals.

tests/dist/test_counted_exact.py compares the same account with torch's operators.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cluster.capacity import check_runnable
from tests.every import settings_of
from tests.segments import book
from zeroviz.activations import formula_notes
from zeroviz.budget import budget_row
from zeroviz.capacities import parse_capacity
from zeroviz.errors import SpecError
from zeroviz.ledger import Ledger
from zeroviz.models import PRESETS, Family, ModelShape
from zeroviz.partition import Segment
from zeroviz.peak import peak_of
from zeroviz.predict import predict
from zeroviz.schedule import OpKind
from zeroviz.spec import Checkpointing, Implementation, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.tables_budget import budget_report
from zeroviz.tape import Sizes
from zeroviz.trace import Category, Trace

LLAMA = PRESETS["tiny-llama"]
GEMMA2 = replace(LLAMA, family=Family.GEMMA2, tied=True, caps_logits=True, heads=4, kv_heads=2, head_dim=14)
MIXTRAL = replace(LLAMA, family=Family.MIXTRAL, experts=5, experts_per_token=3, heads=4, kv_heads=2, head_dim=14)
QWEN2 = replace(LLAMA, qkv_bias=True, heads=4, kv_heads=2, head_dim=14)
COUNTED = {"gemma2": GEMMA2, "mixtral": MIXTRAL}
N, D, Q, K, F, A, V = 2 * 7, 47, 4 * 14, 2 * 14, 119, 4, 257  # tokens, and the sizes of these models


def kept_nbytes(model: ModelShape, precision: Precision, first: int, stop: int) -> int:
    """What stands after the forward of the sublayers [first, stop) as one segment, its output included."""
    spec = RunSpec(model=model, precision=precision, batch=2, seq=7)
    ledger = Ledger()
    book(ledger, OpKind.FORWARD, Sizes.of(spec), Segment(0, 0, "segment", model.sublayers[first:stop]))
    return sum(event.delta_nbytes for event in ledger.events if event.category is Category.ACTIVATION)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED], ids=lambda recipe: recipe.value)
def test_gemma2_keeps_what_the_table_says(precision: Precision) -> None:
    """Two norms a branch. The one before keeps x rstd, rstd and h (in bf16 x in fp32 too), the one after x rstd, rstd
    and its input in fp32; and each 1 + weight, which is d fp32 elements whatever the batch."""
    e = precision.param.itemsize
    before = N * 4 * (2 * D + 1) + (N * 2 * D if e == 2 else 0) + 4 * D
    after = N * 4 * (2 * D + 1) + 4 * D
    output = N * e * D
    assert kept_nbytes(GEMMA2, precision, 0, 1) == output
    assert kept_nbytes(GEMMA2, precision, 1, 2) == before + N * (e * (2 * Q + 2 * K) + 4 * A) + after + output
    assert kept_nbytes(GEMMA2, precision, 2, 3) == before + N * e * 4 * F + after + output
    assert kept_nbytes(GEMMA2, precision, 7, 8) == before + N * (e * V + 4 * V) + 8  # tanh, and log probabilities
    assert kept_nbytes(replace(GEMMA2, caps_logits=False), precision, 7, 8) == before + N * 4 * V + 8


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED], ids=lambda recipe: recipe.value)
def test_mixtral_keeps_what_the_table_says(precision: Precision) -> None:
    """k = 3 of 5 experts a token: the rows, what the experts give for them and that times its weight, 3 k d; Llama's
    four tensors of k f; k weights. The router keeps 5 probabilities, the 3 largest and their sum in fp32, and 3 x 3
    indices."""
    e, k = precision.param.itemsize, 3
    norm = N * 4 * (2 * D + 1) + (N * 2 * D if e == 2 else 0)
    router = N * (4 * 5 + 4 * k + 4 + 3 * 8 * k)
    rows = N * e * (3 * k * D + 4 * k * F + k)
    assert kept_nbytes(MIXTRAL, precision, 1, 2) == norm + N * (e * (2 * Q + 2 * K) + 4 * A) + N * e * D
    assert kept_nbytes(MIXTRAL, precision, 2, 3) == norm + router + rows + N * e * D


def test_biases_of_qwen2_keep_nothing() -> None:
    """A bias' gradient is the sum of its output's: nothing more is kept for it."""
    for stop in (2, 3):
        assert kept_nbytes(QWEN2, Precision.BF16, 1, stop) == kept_nbytes(
            replace(QWEN2, qkv_bias=False), Precision.BF16, 1, stop
        )


@pytest.mark.parametrize("checkpointing", ["none", "block", "block:2"])
@pytest.mark.parametrize("unit", ["model", "block", "block:2", "layer", "numel:5e3"])
@pytest.mark.parametrize("strategy", list(Strategy), ids=lambda strategy: strategy.value)
@pytest.mark.parametrize("model", [*COUNTED.values(), QWEN2], ids=[*COUNTED, "qwen2"])
def test_every_strategy_and_unit(model: ModelShape, strategy: Strategy, unit: str, checkpointing: str) -> None:
    """The books close, and the fast peak is the walk's."""
    for precision in (Precision.FP32, Precision.BF16_FP32GRAD):
        spec = RunSpec(
            model=model, ranks=6, precision=precision, unit=UnitPolicy.parse(unit), batch=2, seq=7,
            checkpointing=Checkpointing.parse(checkpointing), **settings_of(strategy, 6),
        )  # fmt: skip
        rank = predict(spec).ranks[0]
        rank.check()
        assert rank.peak() == peak_of(spec)


@pytest.mark.parametrize("name", COUNTED)
def test_checkpointing_keeps_a_row_a_block(name: str) -> None:
    """At the end of forward: the input of each of 3 blocks and of the head, d a token, and what the head keeps."""
    model = COUNTED[name]
    spec = RunSpec(model=model, ranks=3, batch=2, seq=7, checkpointing=Checkpointing.parse("block"))
    events = [event for event in predict(spec).ranks[0].events if event.phase == "forward"]
    held = sum(event.delta_nbytes for event in events if event.category is Category.ACTIVATION)
    assert held == 4 * N * 4 * D + kept_nbytes(model, Precision.FP32, 7, 8)


def test_wire_and_rest_are_the_parameters() -> None:
    """ZeRO-3 gathers every unit twice and reduces it once; experts are gathered whether tokens go to them or not."""
    spec = RunSpec(model=PRESETS["mixtral-8x7b"], ranks=8, precision=Precision.BF16_MIXED, seq=4096)
    rank = predict(spec).ranks[0]
    payload: Counter[str] = Counter()
    for call in rank.collectives:
        payload[call.op.value] += call.payload_nbytes
    assert payload == {"all_gather": 2 * 2 * 46_702_792_704, "reduce_scatter": 2 * 46_702_792_704}
    assert sum(rank.rest.values()) == 2 * 46_702_792_704  # 16 bytes a parameter over 8 ranks


@pytest.mark.parametrize("name", COUNTED)
def test_a_prediction_says_which_formula_was_used(name: str) -> None:
    spec = RunSpec(model=COUNTED[name], ranks=2)
    trace = predict(spec)
    (note,) = trace.notes
    label = COUNTED[name].family.label
    assert note.startswith(f"Activations of {label} are counted tensor by tensor")
    assert "arXiv 2205.05198" in note
    assert "No step of this family is run here" in note
    assert {"gemma2": "one fused kernel that caps its scores", "mixtral": "work on 3 rows a token"}[name] in note
    assert Trace.from_json(trace.to_json()).notes == trace.notes
    report = budget_report([budget_row(spec, 10**12)], parse_capacity("h100-80gb"), 0)
    assert note in report["notes"]


def test_what_runs_needs_no_note() -> None:
    assert all(formula_notes(model) == () for model in PRESETS.values() if model.family.runs)
    assert formula_notes(QWEN2) == ()


@pytest.mark.parametrize("model", [*COUNTED.values(), QWEN2], ids=[*COUNTED, "qwen2"])
def test_to_json_and_back(model: ModelShape) -> None:
    spec = RunSpec(model=model)
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_spec_of_before_these_families_reads_as_it_was() -> None:
    data = RunSpec(model=LLAMA).to_dict()
    for field in ("qkv_bias", "experts", "experts_per_token", "caps_logits"):
        del data["model_shape"][field]
    assert RunSpec.from_dict(data) == RunSpec(model=LLAMA)


@pytest.mark.parametrize("name", ["gemma2-9b", "mixtral-8x7b"])
def test_counted_families_are_not_run(name: str) -> None:
    spec = RunSpec(model=PRESETS[name], ranks=2)
    with pytest.raises(SpecError) as caught:
        check_runnable(spec)
    label = PRESETS[name].family.label
    assert str(caught.value) == (
        f"{name} is a {label} model, and that family's layers are not built here, so it is worked out and neither run "
        f"nor rehearsed; use `zeroviz predict --model {name} --strategy zero3 --ranks 2`."
    )
    check_runnable(RunSpec(model=PRESETS["qwen2-7b"], ranks=2))


@pytest.mark.parametrize("impl", [impl for impl in Implementation if impl is not Implementation.OWN])
@pytest.mark.parametrize("name", COUNTED)
def test_other_implementations_are_refused(name: str, impl: Implementation) -> None:
    strategy = {
        Implementation.DDP: Strategy.DDP,
        Implementation.ZERO_REDUNDANCY: Strategy.ZERO1,
        Implementation.MEGATRON: Strategy.MEGATRON_OPTIM,
    }.get(impl, Strategy.ZERO3)
    with pytest.raises(SpecError, match="that family is worked out for our own code only, so use impl own"):
        RunSpec(model=COUNTED[name], impl=impl, strategy=strategy)
    RunSpec(model=QWEN2, impl=impl, strategy=strategy)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (QWEN2, {"attention_bias": True}, "has qkv_bias"),
        (GEMMA2, {"qkv_bias": True}, "has qkv_bias"),
        (LLAMA, {"caps_logits": True}, "only the Gemma-2 family caps its logits"),
        (LLAMA, {"experts": 8}, "only the Mixtral family has some"),
        (MIXTRAL, {"experts": 0}, "has 0 experts a block and 3 for a token"),
        (MIXTRAL, {"experts_per_token": 0}, "5 experts a block and 0 for a token"),
        (MIXTRAL, {"mlp_bias": True}, "experts of the Mixtral family have no biases"),
        (MIXTRAL, {"head_dim": 7}, "must be even"),
    ],
)  # fmt: skip
def test_shapes_that_no_family_has(model: ModelShape, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(model, **changes)
