"""What `zeroviz predict` says of a step's options: what they mean, what lies on the host, what the link carries."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from tests.every import exists
from tests.pure.steps import rest, text_of
from zeroviz.cli import main
from zeroviz.columns import columns
from zeroviz.link import Direction
from zeroviz.memory import rest_by_category
from zeroviz.models import PRESETS
from zeroviz.partition import plan_for, shard_numel
from zeroviz.precision import OWN_PRECISIONS
from zeroviz.predict import predict
from zeroviz.spec import Checkpointing, Offload, Optimizer, Precision, RunSpec, Strategy
from zeroviz.tables_host import host_peak_nbytes, link_table
from zeroviz.tables_options import scales_nbytes
from zeroviz.trace import Category

WIDTH = 80
TINY = PRESETS["tiny"]


def printed(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["predict", *words.split()]) == 0
    return capsys.readouterr().out


STEPS = ("--checkpointing block:2 --accumulation 64 --grad-dtype bf16", "--accumulation 2 --no-sync true --ranks 1000")


@pytest.mark.parametrize("strategy", [kind.value for kind in Strategy])
def test_every_option_fits_eighty_columns(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = Strategy(strategy)
    common = f"--strategy {strategy} --clip-norm 0.5"
    requests = [f"{common} --optimizer {each.value} --unit model {STEPS[1]}" for each in Optimizer]
    requests.append(f"{common} --model llama3-70b --ranks 1024 --optimizer adamw-8bit --unit layer")
    if exists(kind, settings={"offload": Offload.OPTIMIZER}):
        requests += [f"{common} --offload {offload} {STEPS[0]}" for offload in ("none", "optimizer")]
        requests += [
            f"{common} --model llama3-70b --ranks 1024 --offload optimizer --checkpointing block",
            f"{common} --params 1e15 --ranks 7 --offload optimizer",
        ]
    if kind.shards_param:
        requests.append(f"--strategy {strategy} --offload params {STEPS[0]}")
    if kind.replicates:
        requests = [f"{words} --shard-ranks {1 if '--ranks 7' in words else 2}" for words in requests]
    for words in requests:
        text = printed(capsys, words)
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= WIDTH, words


def test_defaults_say_nothing_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--ranks 4")
    head = text.partition("units (")[0]
    assert re.findall(r"^(\w+)  ", head, re.MULTILINE) == ["strategy", "recipe", "batch"]
    assert "ON THE HOST" not in text
    assert "OVER THE LINK" not in text
    assert "scales" not in text


def test_what_lies_on_the_host_and_what_crosses_the_link_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """tiny, fp32, 3 ranks: shards of (21396 + 3 x 37239) / 3 = 44371 elements. The host holds a copy of the parameters
    and two moments, 12 bytes each. A step moves the gradient's shard down and the parameters' up, a copy a unit.
    At most it holds the largest shard's gradient and two temporaries of a slice more: a block, 37237 elements, is 4
    times its largest parameter, so 4 x 12413 + 8 x 3104.
    """
    shard, largest = (21396 + 3 * 37239) // 3, 37239 // 3
    text = printed(capsys, "--ranks 3 --offload optimizer")
    words = " ".join(text.split())
    assert "offload optimizer: a copy of the owned parameters and the optimizer's state lie on the host" in words
    assert f"HOST_MASTER_PARAM {4 * shard:,}" in words
    assert f"HOST_OPTIMIZER_STATE {8 * shard:,}" in words
    assert f"at most {12 * shard + 4 * largest + 8 * -(-largest // 4):,} B within the step" in words
    assert f"to host fp32 4 {4 * shard:,}" in words
    assert f"to device fp32 4 {4 * shard:,}" in words
    assert "of both, padding ranks 0-1: 0 B; rank 2: " in words
    assert "MASTER_PARAM" not in words.partition("ON THE HOST")[0]


def test_offloaded_parameters_go_up_for_each_gather(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice a unit under ZeRO-3, once under SHARD_GRAD_OP; nothing rests on the device, nor moves in the update."""
    shard = (21396 + 3 * 37239) // 3
    for strategy, gathers in (("zero3", 2), ("shard_grad_op", 1)):
        words = " ".join(printed(capsys, f"--ranks 3 --offload params --strategy {strategy}").split())
        assert "AT REST, each rank bytes decimal binary B/param total 0 0 B" in words
        assert f"to device fp32 {4 * gathers} {4 * shard * gathers:,}" in words
        assert f"to host fp32 4 {4 * shard:,}" in words
        assert f"HOST_PARAM {4 * shard:,}" in words


@pytest.mark.parametrize("offload", [Offload.OPTIMIZER, Offload.PARAMS])
@pytest.mark.parametrize("precision", OWN_PRECISIONS)
def test_the_hosts_peak_is_that_of_the_machine_less_the_device(offload: Offload, precision: Precision) -> None:
    """In the update nothing but what rests is on the device (and, with parameters offloaded, nothing at all), so the
    host's most is the most of all categories in that phase without kernels' scratch, less the device's rest."""
    for model, ranks in itertools.product(("tiny", "tiny-llama"), (1, 3)):
        spec = RunSpec(model=PRESETS[model], ranks=ranks, precision=precision, offload=offload)
        rank = predict(spec).ranks[0]
        held = most = sum(rank.at_rest_on_host.values())
        for event in rank.events:
            if event.phase == "optimizer" and not event.category.is_artefact:
                held += event.delta_nbytes
                most = max(most, held)
        assert host_peak_nbytes(rank) == most > sum(rank.at_rest_on_host.values())


def test_what_the_other_options_mean_is_said() -> None:
    def words(strategy: Strategy = Strategy.ZERO3, **settings: object) -> str:
        return text_of(RunSpec(model=TINY, strategy=strategy, ranks=3, **settings))  # type: ignore[arg-type]

    again = "backward runs the forward of all 3 blocks once more"
    assert f"recompute block: each block keeps only the first input; {again}" in words(checkpointing=Checkpointing(1))
    assert f"block:2: 2 blocks at a time keep only the first input; {again}" in words(checkpointing=Checkpointing(2))
    each = "4 micro-batches a step, each of 1 sequence of 32 = 32 tokens on each rank; gradients are reduced in "
    assert f"{each}each" in words(accumulation=4)
    assert f"{each}the last only, and held whole till then" in words(accumulation=4, no_sync=True)
    # DDP holds them whole in any case.
    assert f"{each}the last only units" in words(Strategy.DDP, accumulation=4)
    assert "optimizer sgd: no state; the update makes no temporaries" in words(optimizer=Optimizer.SGD)
    assert "step counters" not in words(optimizer=Optimizer.SGD)
    assert "2 param + 2 grad + 4 master + 4 momentum = 12 bytes/param" in words(
        optimizer=Optimizer.SGD_MOMENTUM, precision=Precision.BF16_MIXED
    )


def test_quantized_moments_come_with_their_scales() -> None:
    """A scale of 4 bytes for 2048 elements of each of two moments, rounded up in every unit: tiny's shards on 3 ranks
    are 7132 and 12413 elements, 4 and 7 scales each, 4 + 3 x 7 = 25; the state is 2 x (44371 + 4 x 25)."""
    spec = RunSpec(model=TINY, ranks=3, optimizer=Optimizer.ADAMW_8BIT)
    assert [shard_numel(unit, spec) for unit in plan_for(spec).units] == [7132, 12413, 12413, 12413]
    scales = 2 * 4 * (4 + 3 * 7)
    assert scales_nbytes(spec) == scales
    assert rest(spec, Category.OPTIMIZER_STATE) == 2 * 44371 + scales
    text = text_of(spec)
    assert "4 param + 4 grad + 2 Adam = 10 bytes/param and scales" in text
    assert "each moment 1 byte an element and an fp32 scale for 2,048 of them" in text
    assert f"of this, scales {scales} B" in text
    assert sum(rest_by_category(spec).values()) == (4 + 4) * 44371 + 2 * 44371 + scales


@pytest.mark.parametrize("offload", [Offload.OPTIMIZER, Offload.PARAMS])
def test_a_copy_that_was_not_predicted_is_seen_beside_the_prediction(offload: Offload) -> None:
    """One more shard that goes up: its bytes are the difference. Without it the two columns are the same."""
    rank = predict(RunSpec(model=TINY, ranks=3, offload=offload)).ranks[0]
    up = [transfer for transfer in rank.transfers if transfer.direction is Direction.TO_DEVICE]
    nbytes, total = up[0].nbytes, sum(transfer.nbytes for transfer in up)
    lines = {row.split("  ")[1]: row.split() for row in link_table("each rank", rank, rank)[1:]}
    assert lines[f"{len(up)} x to device fp32"][5:8] == [f"{total:,}", f"{total:,}", "0"]
    other = replace(rank, transfers=(*rank.transfers, up[0]))
    lines = {row.split("  ")[1]: row.split() for row in link_table("each rank", rank, other)[1:]}
    label = f"{len(up)}/{len(up) + 1} x to device fp32"
    assert lines[label][5:8] == [f"{total:,}", f"{total + nbytes:,}", f"+{nbytes:,}"]


@pytest.mark.parametrize("digits", range(1, 21))
def test_columns_of_any_figures_fit_the_terminal(digits: int) -> None:
    """Beside a title of 26: 15 digits are the most with the short form at the end, 20 without it. 1e18 has 19."""
    figure = "9" * digits
    head = ["PEAK AS ON NCCL, each rank", "predicted", "measured", "difference", "measured"]
    lines = columns([head, ["  total", figure, figure, "0", "158.40 GB"]])
    assert max(map(len, lines)) <= WIDTH
    assert lines[1].split()[:4] == ["total", figure, figure, "0"]
    assert lines[1].endswith("GB") is (digits <= 15)


def test_a_table_too_wide_leaves_out_the_binary_unit_first_wherever_it_stands() -> None:
    """24 for the label, then digits + 1, 11, 12 and 10 in columns one space apart: at rest 22 digits fit with binary
    units, 34 with B/param, 44 without; at the peak, without B/param, 32 and 44."""
    heads = (
        ["AT REST, each rank", "bytes", "decimal", "binary", "B/param"],
        ["AT THE PEAK", "bytes", "decimal", "binary"],
    )
    for digits in range(10, 45):
        cells = ["9" * digits, "1234.56 PB", "1234.56 PiB", "16000.000"]
        rest, peak = (columns([head, ["  total", *cells[: len(head) - 1]]]) for head in heads)
        for lines in (rest, peak):
            assert max(map(len, lines)) <= WIDTH and cells[0] in lines[1] and "1234.56 PB" in lines[1]
            assert ("binary" in lines[0]) is ("PiB" in lines[1])
        shown = "binary" in rest[0], "B/param" in rest[0], "binary" in peak[0]
        assert shown == (digits <= 22, digits <= 34, digits <= 32)
