"""A spec as a command line: what a message offers can be pasted, and asks for the same spec again."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace

import pytest

from zeroviz.cli_spec import add_spec_options, spec_from_args
from zeroviz.command import CONFIG, command_line
from zeroviz.models import PRESETS
from zeroviz.spec import (
    Checkpointing,
    DType,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitPolicy,
    Zero1Form,
)

SPECS = [
    RunSpec(model=PRESETS["tiny"]),
    RunSpec(model=PRESETS["llama3-70b"], ranks=1024, precision=Precision.BF16_MIXED, seq=8192, prefetch=1),
    RunSpec(model=PRESETS["gpt2"], strategy=Strategy.ZERO1, zero1_form=Zero1Form.ALL_REDUCE, batch=3),
    RunSpec(model=PRESETS["tiny"], impl=Implementation.FSDP2, strategy=Strategy.SHARD_GRAD_OP, seed=5, steps=2),
    RunSpec(model=PRESETS["gpt2"], strategy=Strategy.HYBRID_SHARD, ranks=16, shard_ranks=8, clip_norm=0.5),
    RunSpec(model=PRESETS["tiny"], strategy=Strategy.MEGATRON_OPTIM, precision=Precision.BF16_FP32GRAD),
    RunSpec(
        model=PRESETS["tiny-llama"],
        unit=UnitPolicy.parse("block:2"),
        optimizer=Optimizer.SGD_MOMENTUM,
        grad_dtype=DType.BF16,
        checkpointing=Checkpointing.parse("block"),
        offload=Offload.PARAMS,
        accumulation=2,
        no_sync=False,
        async_reduce=True,
    ),
]


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_the_line_asks_for_the_spec(spec: RunSpec) -> None:
    program, verb, *words = shlex.split(command_line("rehearse", spec))
    assert (program, verb) == ("zeroviz", "rehearse")
    parser = argparse.ArgumentParser()
    add_spec_options(parser)
    assert spec_from_args(parser.parse_args(words)) == spec


def test_only_what_is_not_the_default_is_said() -> None:
    spec = RunSpec(model=PRESETS["llama3-70b"], ranks=1024)
    assert command_line("rehearse", spec) == "zeroviz rehearse --model llama3-70b --strategy zero3 --ranks 1024"


def test_a_model_that_is_no_preset_is_named_as_a_file() -> None:
    spec = RunSpec(model=replace(PRESETS["tiny"], hidden=110, head_dim=22))
    assert f"--model {CONFIG} " in command_line("rehearse", spec)
