"""RunSpec and its parts: what is refused, in which words, and the way to plain data and back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from zeroviz.errors import SpecError
from zeroviz.models import PRESETS, bare
from zeroviz.spec import (
    DType,
    Offload,
    Precision,
    RunSpec,
    Strategy,
    UnitKind,
    UnitPolicy,
    Zero1Form,
    parse_enum,
    preset,
)

TINY = RunSpec(model=PRESETS["tiny"])
HYBRID: dict[str, Any] = {"strategy": Strategy.HYBRID_SHARD, "ranks": 4}
MEGATRON: dict[str, Any] = {"strategy": Strategy.MEGATRON_OPTIM}


@pytest.mark.parametrize(
    ("precision", "widths"),
    [
        # parameter, gradient, master, both moments: the tables of the ZeRO paper, Megatron Core and torch's own AdamW.
        (Precision.FP32, (4, 4, 0, 8)),
        (Precision.BF16_MIXED, (2, 2, 4, 8)),
        (Precision.BF16_FP32GRAD, (2, 4, 4, 8)),
        (Precision.BF16, (2, 2, 0, 4)),
        (Precision.FSDP_MIXED, (4, 4, 0, 8)),
    ],
)
def test_recipes(precision: Precision, widths: tuple[int, int, int, int]) -> None:
    master = precision.master.itemsize if precision.master else 0
    assert (precision.param.itemsize, precision.grad.itemsize, master, 2 * precision.moments.itemsize) == widths
    assert precision.bytes_per_param == sum(widths)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("model", UnitPolicy(UnitKind.MODEL)),
        ("block", UnitPolicy(UnitKind.BLOCK)),
        ("block:2", UnitPolicy(UnitKind.BLOCK, 2)),
        ("layer", UnitPolicy(UnitKind.LAYER)),
        ("numel:1e6", UnitPolicy(UnitKind.NUMEL, 1_000_000)),
    ],
)
def test_unit_policies(text: str, policy: UnitPolicy) -> None:
    assert UnitPolicy.parse(text) == policy
    assert UnitPolicy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    "text", ["", "blocks", "block:", "block:0", "block:-1", "numel", "numel:x", "model:2", "layer:1", "block:1.5"]
)
def test_other_unit_policies_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        UnitPolicy.parse(text)


def test_a_count_where_none_belongs_is_refused() -> None:
    with pytest.raises(SpecError, match="takes no count"):
        UnitPolicy(UnitKind.MODEL, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks is 0; it must be a whole number from 1"),
        ({"ranks": True}, "ranks is True"),
        ({"ranks": 2.0}, r"ranks is 2\.0"),
        ({"ranks": 2**20 + 1}, "to 1048576"),
        ({"batch": -1}, "batch is -1"),
        ({"steps": 1}, "steps is 1; it must be a whole number from 2"),
        ({"seed": -1}, "seed is -1"),
        ({"seq": 131}, "learned positions for 130 tokens"),
        ({"unit": UnitPolicy(UnitKind.BLOCK, 4)}, "has only 3 blocks"),
        ({"unit": UnitPolicy(UnitKind.NUMEL, 10**9)}, "has only 133,106 parameters"),
        ({"model": bare(100)}, "a bare parameter count has no blocks or layers"),
        ({"zero1_form": Zero1Form.ALL_REDUCE}, "it can be set for zero1 only"),
        ({"strategy": Strategy.DDP, "prefetch": 1}, "it can be set for zero3, shard_grad_op and hybrid_shard only"),
        ({"shard_ranks": 2}, "shard_ranks is 2 with strategy zero3, which has no groups of ranks"),
        ({**HYBRID, "shard_ranks": None}, "without shard_ranks; say how many ranks shard together, of 4: 1, 2 or 4"),
        ({**HYBRID, "shard_ranks": 3}, "shard_ranks is 3 with 4 ranks, but 4 is not divisible by 3; use 1, 2 or 4"),
        ({**HYBRID, "shard_ranks": 5}, "shard_ranks is 5; it must be a whole number from 1 to ranks, 4"),
        ({**HYBRID, "shard_ranks": 0}, "shard_ranks is 0"),
        ({**HYBRID, "shard_ranks": True}, "shard_ranks is True"),
        ({**MEGATRON, "precision": Precision.BF16_MIXED}, "use precision fp32 or bf16-fp32grad"),
        ({**MEGATRON, "grad_dtype": DType.BF16}, "which reduces fp32 gradients"),
        ({**MEGATRON, "offload": Offload.OPTIMIZER}, "whose states are one buffer on the device"),
        ({**MEGATRON, "async_reduce": True}, "reduced when the whole backward is done"),
        ({**MEGATRON, "accumulation": 2, "no_sync": False}, "no_sync is false with strategy megatron_optim"),
        ({"clip_norm": 0}, "clip_norm is 0; it must be a number above 0"),
        ({"clip_norm": True}, "clip_norm is True"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"clip_norm": 1.0, "offload": Offload.PARAMS}, "whose gradients are clipped on the device"),
    ],
)
def test_refusals_name_the_value_and_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(TINY, **changes)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(SpecError, match="allowed are ddp, zero1, zero2, zero3"):
        parse_enum(Strategy, "FULL_SHARD", "--strategy")
    with pytest.raises(SpecError, match="allowed are tiny, tiny-llama, small, gpt2"):
        preset("gpt5")


SPECS = [
    TINY,
    RunSpec(model=bare(7_000_000_000), unit=UnitPolicy(UnitKind.MODEL), ranks=8, precision=Precision.BF16_MIXED),
    RunSpec(
        model=PRESETS["tiny-llama"],
        strategy=Strategy.ZERO1,
        zero1_form=Zero1Form.ALL_REDUCE,
        unit=UnitPolicy(UnitKind.NUMEL, 5000),
        async_reduce=True,
        steps=5,
        seed=7,
    ),
    replace(TINY, prefetch=2, batch=3, seq=17),
]


@pytest.mark.parametrize("spec", SPECS)
def test_plain_data_and_back(spec: RunSpec) -> None:
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("field", ["model_shape", "strategy", "ranks", "precision", "unit", "seed"])
def test_a_spec_that_lacks_a_field_is_refused(field: str) -> None:
    data = TINY.to_dict()
    del data[field]
    with pytest.raises(SpecError, match=f"lacks or garbles.*{field}"):
        RunSpec.from_dict(data)


@pytest.mark.parametrize(
    ("field", "value"), [("model_shape", 3), ("strategy", 7), ("unit", None), ("ranks", "2"), ("async_reduce", "yes")]
)
def test_a_spec_of_the_wrong_types_is_refused(field: str, value: Any) -> None:
    with pytest.raises(SpecError):
        RunSpec.from_dict({**TINY.to_dict(), field: value})


def test_specs_are_hashable_and_frozen() -> None:
    assert len({TINY, replace(TINY), replace(TINY, ranks=3)}) == 2
    with pytest.raises(AttributeError):
        TINY.ranks = 3  # type: ignore[misc]
