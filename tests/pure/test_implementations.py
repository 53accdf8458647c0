"""What FSDP2 cannot do of what a spec can ask is refused in a sentence; how it cuts parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroviz.errors import SpecError
from zeroviz.models import PRESETS
from zeroviz.partition import chunk_rows, local_rows, padding_numel, plan_for
from zeroviz.spec import (
    Checkpointing,
    DType,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
)

SPEC = RunSpec(model=PRESETS["tiny"], impl=Implementation.FSDP2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": Strategy.DDP}, "has zero3 and shard_grad_op and hybrid_shard here; for ddp use impl own or"),
        ({"strategy": Strategy.ZERO2}, "for zero2 use impl own or deepspeed"),
        ({"precision": Precision.BF16_MIXED}, "use fp32 or bf16 or fsdp-mixed, or impl own"),
        ({"precision": Precision.BF16_FP32GRAD}, "use fp32 or bf16 or fsdp-mixed, or impl own"),
        ({"grad_dtype": DType.BF16}, "grad_dtype is 'bf16'"),
        ({"checkpointing": Checkpointing.parse("block:2")}, "checkpointing is 'block:2'"),
        ({"offload": Offload.PARAMS}, "offload is 'params'"),
        ({"prefetch": 1}, "prefetch is 1"),
        ({"async_reduce": True}, "async_reduce is true"),
    ],
)
def test_a_setting_without_a_counterpart_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as refusal:
        replace(SPEC, **settings)
    assert "fsdp2" in str(refusal.value) and str(refusal.value).endswith(".")


@pytest.mark.parametrize("strategy", [Strategy.ZERO3, Strategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FSDP_MIXED])
@pytest.mark.parametrize("optimizer", [optimizer for optimizer in Optimizer if optimizer.runs])
def test_what_it_has_is_accepted(strategy: Strategy, precision: Precision, optimizer: Optimizer) -> None:
    replace(SPEC, strategy=strategy, precision=precision, optimizer=optimizer)


def test_its_padding_is_by_rows() -> None:
    """5 rows over 3 ranks are chunks of 2: 2, 2 and 1, so one row of padding."""
    assert chunk_rows(5, 3) == 2
    assert [local_rows(5, 3, rank) for rank in range(3)] == [2, 2, 1]
    assert [local_rows(2, 4, rank) for rank in range(4)] == [1, 1, 0, 0]
    # The root of tiny: tokens (257, 55), positions (130, 55), and the last norm's weight and bias of 55.
    root = plan_for(SPEC).units[0]
    assert [shape.shape for shape in root.params] == [(257, 55), (130, 55), (55,), (55,)]
    # Over 3 ranks: 258 - 257 = 1 row and 132 - 130 = 2 rows of 55, and 57 - 55 = 2 elements twice.
    assert padding_numel(root, replace(SPEC, ranks=3)) == 55 + 2 * 55 + 2 + 2
    # The same unit as one flat buffer of 21,395 elements has one: 21,396 = 3 * 7,132.
    assert root.numel == 257 * 55 + 130 * 55 + 2 * 55 == 21395
    assert padding_numel(root, replace(SPEC, ranks=3, impl=Implementation.OWN)) == 1
