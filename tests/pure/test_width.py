"""The terminal's 80 columns, over requests drawn at random: no line is longer, no figure too long to be read."""

from __future__ import annotations

import re
from random import Random

import pytest

from tests.every import settings_of
from zeroviz.errors import SpecError
from zeroviz.models import PRESETS, bare
from zeroviz.precision import OWN_PRECISIONS, DType
from zeroviz.predict import predict
from zeroviz.spec import Checkpointing, Implementation, Offload, Optimizer, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.tables import render
from zeroviz.tables_side_by_side import render_side_by_side

NUM_SPECS = 200
COUNTS = (1, 2, 1001, 7 * 10**9, 10**15, 10**18)
LONG = (1, 3, 4096, 2**24, 2**40)


def draw(random: Random) -> RunSpec | None:
    """A spec of any settings; None for what is refused."""
    choose = random.choice
    models = [*PRESETS.values(), *map(bare, COUNTS)]
    ranks = choose((1, 2, 7, 1000, 4096, 1_000_000))
    try:
        return RunSpec(
            model=choose(models),
            ranks=ranks,
            **settings_of(choose(list(Strategy)), ranks),
            precision=choose(OWN_PRECISIONS),
            unit=UnitPolicy.parse(choose(("model", "block", "block:2", "layer", "numel:1e6"))),
            batch=choose(LONG),
            seq=choose(LONG),
            optimizer=choose(list(Optimizer)),
            grad_dtype=choose((None, None, DType.FP32, DType.BF16)),
            checkpointing=choose((Checkpointing(), Checkpointing(), Checkpointing(1), Checkpointing(3))),
            offload=choose(list(Offload)),
            accumulation=choose((1, 1, 2, 3)),
            clip_norm=choose((None, 1.0)),
            prefetch=choose((0, 0, 1)),
        )
    except SpecError:
        return None


def test_no_line_of_any_prediction_is_longer_than_the_terminal() -> None:
    random, num_seen = Random(20), 0
    while num_seen < NUM_SPECS:
        spec = draw(random)
        if spec is None:
            continue
        text = render(predict(spec))
        num_seen += 1
        assert text.isascii() and max(map(len, text.splitlines())) <= 80, spec
        # Four digits before the point and no more, whatever the unit.
        assert not re.search(r"\d\d,\d{3}\.\d\d [kKMGTPEZYRQ]i?B", text), spec


@pytest.mark.parametrize(
    ("impl", "strategy", "ranks", "group"),
    [
        (Implementation.FSDP2, Strategy.HYBRID_SHARD, 64, 4),  # each group's last rank holds more than its others
        (Implementation.FSDP2, Strategy.HYBRID_SHARD, 256, 8),
        (Implementation.MEGATRON, Strategy.MEGATRON_OPTIM, 32, None),
        (Implementation.DEEPSPEED, Strategy.ZERO3, 100, None),
        (Implementation.ZERO_REDUNDANCY, Strategy.ZERO1, 64, None),
    ],
)
@pytest.mark.parametrize("model", ["tiny", "gpt2"])
def test_many_ranks_that_differ_are_named_within_the_terminal(
    impl: Implementation, strategy: Strategy, ranks: int, group: int | None, model: str
) -> None:
    spec = RunSpec(
        model=PRESETS[model],
        impl=impl,
        strategy=strategy,
        ranks=ranks,
        shard_ranks=group,
        precision=Precision.BF16_FP32GRAD if impl is Implementation.MEGATRON else Precision.FP32,
    )
    assert max(map(len, render(predict(spec)).splitlines())) <= 80


def test_states_with_long_names_are_told_apart_within_the_terminal() -> None:
    long = RunSpec(
        model=PRESETS["tiny-llama"], strategy=Strategy.HYBRID_SHARD, ranks=4, shard_ranks=2, accumulation=3,
        precision=Precision.BF16_MIXED, checkpointing=Checkpointing(2),
    )  # fmt: skip
    other = RunSpec(
        model=PRESETS["tiny"], ranks=2, offload=Offload.PARAMS, accumulation=2, unit=UnitPolicy.parse("layer")
    )
    text = render_side_by_side([predict(long), predict(other)])
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"\n  \(1\) tiny-llama, .+\n +peaks in backward of block 1\n", text, re.DOTALL)
    assert re.search(r"total +[\d,]+ +[\d,]+\n", text)  # exact bytes


@pytest.mark.parametrize(
    ("model", "ranks", "title"),
    [
        ("mistral-7b-v0.1", 1000, "PREDICTED: SHARD_GRAD_OP on 1,000 ranks, mistral-7b-v0.1 (7,241,732,096"),
        ("tiny", 1, "PREDICTED: SHARD_GRAD_OP on 1 rank, tiny (133,106 parameters)"),
    ],
)
def test_a_title_is_wrapped_where_it_is_too_long(model: str, ranks: int, title: str) -> None:
    spec = RunSpec(model=PRESETS[model], ranks=ranks, strategy=Strategy.SHARD_GRAD_OP)
    lines = render(predict(spec)).splitlines()
    assert lines[0] == title and lines[1] == ("  parameters)" if ranks > 1 else "")
