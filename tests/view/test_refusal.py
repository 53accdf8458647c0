"""Refusals on the page: by the labels that the page shows."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

from zeroviz.panel import ExplorerPanel
from zeroviz.panel.refusal import LABELS, page_words
from zeroviz.spec import DType, Implementation, Offload, Precision, Strategy, Zero1Form
from zeroviz.state import Explorer


@pytest.mark.parametrize(
    ("first", "refused", "said"),
    [
        (
            {"impl": Implementation.MEGATRON},
            {"precision": Precision.BF16_MIXED},
            "precision is 'bf16-mixed' and strategy Megatron optim, which reduces fp32 gradients; use precision fp32 "
            "or bf16-fp32grad and gradient as precision, or strategy ZeRO-1.",
        ),
        (
            {},
            {"strategy": Strategy.ZERO2, "zero1_form": Zero1Form.ALL_REDUCE},
            "gradient by is 'all-reduce' with strategy ZeRO-2; it can be set for ZeRO-1 only.",
        ),
        (
            {},
            {"seq": 999},
            "sequence is 999, but tiny has learned positions for 130 tokens; use sequence from 1 to 130.",
        ),
        ({}, {"blocks": 9}, None),
        ({}, {"strategy": Strategy.HYBRID_SHARD, "ranks": 6, "shard_ranks": 4}, None),
        ({"impl": Implementation.FSDP2}, {"clip_norm": 1.0}, None),
        ({}, {"offload": Offload.PARAMS, "strategy": Strategy.ZERO1}, None),
        ({"impl": Implementation.MEGATRON}, {"grad_dtype": DType.BF16}, None),
    ],
)
def test_the_page_calls_what_it_refuses_by_its_labels(
    first: dict[str, Any], refused: dict[str, Any], said: str | None
) -> None:
    page = ExplorerPanel(Explorer())
    assert page.state.choose(**first) and not page.state.choose(**refused)
    (shown,) = re.findall(r'zeroviz-error">(.*?)</div>', page.news.value)
    words = unescape(shown)
    assert words and (said is None or words == said)
    assert not re.findall(rf"\b(?:{'|'.join(LABELS)})\b", words)


def test_commands_files_and_other_senses_stay() -> None:
    for same in (
        "In a terminal, `zeroviz rehearse --strategy zero3 --seq 4096` runs it.",
        "tiny has 3 blocks, rank 2 holds 1.",
        "seq.json and /tmp/zero1/impl do not exist; --seq=3 does.",
    ):
        assert page_words(same) == same
