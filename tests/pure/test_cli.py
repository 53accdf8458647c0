"""The command line: published figures through the front door, refusals in words, no needless imports."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zeroviz.backend import Progress, RunState
from zeroviz.cli import main
from zeroviz.cli_run import ProgressLine
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy
from zeroviz.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 80


def zeroviz(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints on stdout; it must succeed and say nothing on stderr."""
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(zeroviz(capsys, "predict", "--json", *words))
    return data


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence on stderr of a request that is wrong."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("zeroviz: ")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith(".\n")
    return captured.err


def rest_total(capsys: pytest.CaptureFixture[str], *words: str) -> int:
    (total,) = {rank["at_rest"]["total"] for rank in report(capsys, *words)["ranks"]}
    assert isinstance(total, int)
    return total


# ---- published figures ----

# ZeRO (Rajbhandari et al., arXiv 1910.02054), section 5: with 2 + 2 + 12 bytes a parameter and N ranks
# 16P, 4P + 12P/N, 2P + 14P/N, 16P/N. P = 7e9, N = 8:
#   112e9 = 16 * 7e9;  38.5e9 = (4 + 12/8) * 7e9;  26.25e9 = (2 + 14/8) * 7e9;  14e9 = 16/8 * 7e9.
ZERO_7B = {"ddp": 112_000_000_000, "zero1": 38_500_000_000, "zero2": 26_250_000_000, "zero3": 14_000_000_000}
# Megatron Core's 18 bytes (bf16 parameters, fp32 gradients): 18, 6 + 12/8 = 7.5, 2 + 16/8 = 4, 18/8 = 2.25 a parameter.
MEGATRON_BYTES = {"ddp": 18.0, "zero1": 7.5, "zero2": 4.0, "zero3": 2.25}


@pytest.mark.parametrize("strategy", ZERO_7B)
def test_rest_of_seven_billion_parameters(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--params", "7e9", "--ranks", "8", "--precision", "bf16-mixed", "--strategy", strategy)
    assert rest_total(capsys, *words) == ZERO_7B[strategy]


@pytest.mark.parametrize("strategy", MEGATRON_BYTES)
def test_rest_with_fp32_gradients(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--params", "7e9", "--ranks", "8", "--precision", "bf16-fp32grad", "--strategy", strategy)
    assert rest_total(capsys, *words) == MEGATRON_BYTES[strategy] * 7_000_000_000


# ZeRO, Table 1: GB a rank for zero1, zero2, zero3. The 7.5B rows are rounded as printed, the 1T rows truncated.
ZERO_TABLE_1 = {
    ("7.5e9", 1): (120, 120, 120),
    ("7.5e9", 4): (52.5, 41.3, 30),
    ("7.5e9", 16): (35.6, 21.6, 7.5),
    ("7.5e9", 64): (31.4, 16.6, 1.88),
    ("7.5e9", 256): (30.4, 15.4, 0.47),
    ("7.5e9", 1024): (30.1, 15.1, 0.12),
    ("1e12", 1): (16000, 16000, 16000),
    ("1e12", 4): (7000, 5500, 4000),
    ("1e12", 16): (4750, 2875, 1000),
    ("1e12", 64): (4187, 2218, 250),
    ("1e12", 256): (4046, 2054, 62.5),
    ("1e12", 1024): (4011, 2013, 15.6),
}


@pytest.mark.parametrize(("params", "ranks"), ZERO_TABLE_1)
def test_table_1_of_the_zero_paper(params: str, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    for strategy, printed in zip(("zero1", "zero2", "zero3"), ZERO_TABLE_1[params, ranks], strict=True):
        words = ("--params", params, "--ranks", str(ranks), "--precision", "bf16-mixed", "--strategy", strategy)
        last_place = 10 ** -len(str(printed).partition(".")[2])
        assert abs(rest_total(capsys, *words) / 1e9 - printed) < last_place, strategy


def test_one_rank_rests_alike_in_every_strategy_and_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for strategy in ZERO_7B:
        data = report(capsys, "--ranks", "1", "--strategy", strategy)
        (rank,) = data["ranks"]
        assert rank["at_rest"]["total"] == 16 * data["model"]["num_params"]
        assert rank["wire"] == {"sent_nbytes": 0, "collectives": []}


@pytest.mark.parametrize(
    ("words", "elements"),
    [
        (("--strategy", "ddp"), 2),
        (("--strategy", "zero1"), 2),
        (("--strategy", "zero1", "--zero1-form", "all-reduce"), 3),
        (("--strategy", "zero2"), 2),
        (("--strategy", "zero3"), 3),
    ],
)
def test_wire_is_two_or_three_times_the_parameters(
    words: tuple[str, ...], elements: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """2P, 2P, 3P, 2P, 3P times (N-1)/N, in fp32: 4 bytes an element. 8e9 parameters on 8 ranks need no padding."""
    for rank in report(capsys, "--params", "8e9", "--ranks", "8", *words)["ranks"]:
        assert rank["wire"]["sent_nbytes"] == elements * 7 * 10**9 * 4


def test_a_bf16_gather_with_an_fp32_reduction_moves_as_much_as_ddp_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    """2 + 2 + 4 = 8 bytes a parameter against 2 * 4 = 8: elements do not tell, bytes do."""
    common = ("--params", "8e9", "--ranks", "8")
    mixed = report(capsys, *common, "--strategy", "zero3", "--precision", "bf16-fp32grad")["ranks"][0]["wire"]
    ddp = report(capsys, *common, "--strategy", "ddp", "--precision", "fp32")["ranks"][0]["wire"]
    assert mixed["sent_nbytes"] == ddp["sent_nbytes"]


# ---- the report and the table ----


def test_json_is_the_report_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    data = report(capsys, "--ranks", "3", "--strategy", "zero2", "--prefetch", "0", "--async-reduce", "true")
    assert data["schema"] == "zeroviz.report/1"
    assert data["origin"] == "predicted"
    assert data["spec"]["async_reduce"] is True
    assert data["environment"] is None
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1, 2]
    for rank in data["ranks"]:
        assert rank["at_rest"]["total"] == sum(rank["at_rest"]["by_category"].values())
        assert rank["peak"]["total"] == sum(rank["peak"]["by_category"].values()) >= rank["at_rest"]["total"]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--ranks", "4", "--unit", "layer"),
        ("--model", "llama3-70b", "--ranks", "64", "--precision", "bf16-mixed"),
        ("--model", "llama3-70b", "--ranks", "64", "--strategy", "zero1", "--zero1-form", "all-reduce"),
        ("--params", "1e12", "--ranks", "1000"),
        ("--ranks", "1", "--precision", "bf16-fp32grad", "--async-reduce", "true", "--prefetch", "3"),
    ],
)
def test_the_table_fits_eighty_columns(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    text = zeroviz(capsys, "predict", *words)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.isascii()


def test_the_table_says_what_it_must(capsys: pytest.CaptureFixture[str]) -> None:
    text = zeroviz(capsys, "predict", "--ranks", "4")
    assert text.startswith("PREDICTED: ZeRO-3 on 4 ranks, tiny (133,106 parameters)\n")
    assert "fp32: 4 param + 4 grad + 8 Adam = 16 bytes/param" in text
    assert "largest" in text
    # Four units padded to multiples of 4: 21,396 + 3 * 37,240 = 133,116 elements; a quarter of them, 4 bytes each.
    assert "133,116    133.12 kB   130.00 KiB        1.000" in text
    # Ten padding elements fall to the last rank, each in 16 bytes of states.
    assert "ranks 0-2: 0 B; rank 3: 160 B" in text
    assert "3/4 of the payload" in text


def test_many_units_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    text = zeroviz(capsys, "predict", "--model", "llama3-8b", "--precision", "bf16-mixed")
    assert "32 x block 0 .. block 31  218,112,000" in text
    assert len(text.splitlines()) < 55


def test_gb_and_gib_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    text = zeroviz(
        capsys, "predict", "--params", "7e9", "--ranks", "8", "--precision", "bf16-mixed", "--strategy", "zero1"
    )
    # 38.5e9 / 2**30 = 35.856.
    assert "38,500,000,000     38.50 GB    35.86 GiB        5.500" in text


def test_trace_file_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    shown = report(capsys, "--ranks", "3", "--trace", str(file))
    trace = Trace.from_json(file.read_text())
    trace.check()
    assert trace.report() == shown


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".PDF", b"%PDF")])
def test_figure_file(suffix: str, start: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"picture{suffix}"
    zeroviz(capsys, "predict", "--figure", str(file))
    assert file.read_bytes().startswith(start)


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".PNG", b"\x89PNG"), (".pdf", b"%PDF")])
def test_timeline_file(suffix: str, start: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"step{suffix}"
    zeroviz(capsys, "predict", "--strategy", "zero2", "--ranks", "3", "--timeline", str(file))
    assert file.read_bytes().startswith(start)


def test_the_table_has_the_step_phase_by_phase(capsys: pytest.CaptureFixture[str]) -> None:
    text = zeroviz(capsys, "predict", "--ranks", "4")
    part = text.partition("THE STEP, each rank")[2].partition("ON THE WIRE")[0]
    peak = predict(RunSpec(model=PRESETS["tiny"], ranks=4)).ranks[0].peak()
    cells = [re.split(r" {2,}", line[2:]) for line in part.splitlines()[1:] if line.strip()]
    rows = {label: figures[0] for label, *figures in cells if figures}
    assert rows["backward"] == rows[f"{peak.op} {peak.unit}"] == f"{peak.total:,}"
    assert {"forward", "optimizer"} <= set(rows)


# ---- refusals ----


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((), ("allowed are predict, run, rehearse, validate, budget, compare, bench, doctor, explore",)),
        (("frobnicate",), ("frobnicate", "predict")),
        (("predict", "--frob", "3"), ("'--frob 3'", "--model", "--strategy", "--figure")),
        (("predict", "extra"), ("'extra'", "--model")),
        (("predict", "--rank", "3"), ("'--rank 3'", "--ranks")),
        (("predict", "--ranks"), ("--ranks", "expected one argument")),
        (("predict", "--ranks", "x"), ("--ranks is 'x'", "whole number")),
        (("predict", "--ranks", "2.5"), ("--ranks is '2.5'",)),
        (("predict", "--ranks", "0"), ("ranks is 0", "from 1 to")),
        (("predict", "--ranks", "-3"), ("ranks is -3",)),
        (("predict", "--ranks", ""), ("--ranks is ''",)),
        (("predict", "--strategy", "FULL_SHARD"), ("'FULL_SHARD'", "ddp, zero1, zero2, zero3")),
        (("predict", "--strategy", ""), ("--strategy is ''",)),
        (("budget", "--impl", "fsdp2"), ("'fsdp2'", "own", "`zeroviz predict --impl fsdp2`")),
        (("predict", "--precision", "fp16"), ("'fp16'", "bf16-mixed, bf16-fp32grad, bf16")),
        (("predict", "--unit", "blocks"), ("'blocks'", "block:K")),
        (("predict", "--unit", "block:0"), ("'block:0'", "at least 1, such as block:2")),
        (("predict", "--unit", "numel:x"), ("'numel:x'", "at least 1, such as numel:1e6")),
        (("predict", "--optimizer", "lion"), ("'lion'", "adamw-8bit", "sgd-momentum")),
        (("predict", "--grad-dtype", "int8"), ("'int8'", "fp32 and bf16")),
        (("predict", "--grad-dtype", "fp16"), ("'fp16'", "fp32 and bf16")),
        (("predict", "--checkpointing", "layer"), ("'layer'", "none, block, block:K")),
        (("predict", "--checkpointing", "block:0"), ("'block:0'", "1 or more")),
        (("predict", "--checkpointing", "block:9"), ("'block:9'", "only 3")),
        (("predict", "--params", "7e9", "--checkpointing", "block"), ("a bare parameter count has no blocks",)),
        (("predict", "--offload", "disk"), ("'disk'", "none, optimizer, params")),
        (("predict", "--offload", "params", "--strategy", "zero2"), ("whole on the device", "zero3")),
        (("predict", "--optimizer", "adamw-8bit", "--offload", "optimizer"), ("adamw-8bit", "offload none")),
        (("run", "--optimizer", "adamw-8bit"), ("adamw-8bit", "worked out and not run", "zeroviz predict")),
        (("predict", "--accumulation", "0"), ("accumulation is 0", "from 1 to 64")),
        (("predict", "--no-sync", "true"), ("one micro-batch", "accumulation")),
        (
            ("predict", "--no-sync", "false", "--accumulation", "2", "--strategy", "zero1"),
            ("once a step", "use zero2"),
        ),
        (("predict", "--reshard-after-forward", "no"), ("'no'", "true or false")),
        (("predict", "--reshard-after-forward", "true", "--strategy", "ddp"), ("zero3 and shard_grad_op only",)),
        (
            ("predict", "--reshard-after-forward", "false", "--strategy", "zero3"),
            ("that is --strategy shard_grad_op",),
        ),
        (("predict", "--async-reduce", "yes"), ("'yes'", "true or false")),
        (("predict", "--zero1-form", "all-reduce"), ("zero1 only",)),
        (("predict", "--strategy", "ddp", "--prefetch", "1"), ("zero3, shard_grad_op and hybrid_shard only",)),
        (("predict", "--model", "gpt5"), ("'gpt5'", "tiny", "llama3-8b", "config.json", "--params")),
        (("predict", "--model", "no/such/config.json"), ("does not exist",)),
        (("predict", "--model", "tiny", "--params", "7e9"), ("Both --model tiny and --params 7e9",)),
        (("predict", "--params", "lots"), ("--params is 'lots'", "7e9")),
        (("predict", "--params", "7e9", "--unit", "block"), ("no blocks or layers", "use unit model")),
        (("predict", "--seq", "131"), ("131", "130")),
        (("predict", "--figure", "picture.gif"), ("'picture.gif'", ".svg, .png, .pdf")),
        (("predict", "--figure", "picture"), ("'picture'",)),
        (("predict", "--figure", "no/such/folder/a.svg"), ("cannot be written", "No such file")),
        (("predict", "--timeline", "step.gif"), ("--timeline is 'step.gif'", ".svg, .png, .pdf")),
        (("run", "--timeline", "no/such/folder/a.svg"), ("--timeline", "cannot be written")),
        (("predict", "--timeline", "a.svg", "--figure", "./a.svg"), ("both", "--figure", "--timeline")),
        (("predict", "--trace", "/"), ("cannot be written", "Is a directory")),
        (("run", "--params", "7e9"), ("no layers to run", "zeroviz predict")),
        (("run", "--steps", "1"), ("steps is 1",)),
        (("run", "--figure", "a.jpg"), ("'a.jpg'",)),
        (("run", "--trace", "/no/such/folder/t.json"), ("cannot be written",)),
    ],
)
def test_a_wrong_request_is_one_sentence(
    words: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refusal(capsys, *words)
    assert [part for part in parts if part not in sentence] == []


def test_a_refused_request_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure, trace = tmp_path / "a.svg", tmp_path / "no" / "t.json"
    refusal(capsys, "predict", "--figure", str(figure), "--trace", str(trace))
    assert list(tmp_path.iterdir()) == []


def test_a_config_file_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    config = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["predict", "--json", "--model", str(folder / "config.json")]) == 0
    said = capsys.readouterr()
    data = json.loads(said.out)
    assert said.err.startswith("Note: ") and "n_inner" in said.err and max(map(len, said.err.splitlines())) <= 80
    # 100*8 + 64*8 + 2 * (12 * 64 + 13 * 8) + 2*8 = 3,072
    assert data["model"] == {"name": "small", "num_params": 3072}


# ---- as a process ----


def run_python(code: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, **kwargs)


def test_predict_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'ipyparallel', 'numpy', 'matplotlib', 'cluster', 'zmq'}"
    code = (
        "import sys; from zeroviz.cli import main; main(['predict', '--json']); "
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    result = run_python(code)
    assert (result.returncode, result.stderr) == (0, "[]\n")
    json.loads(result.stdout)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """`zeroviz predict | head -1`: no traceback, whatever is still to be written."""
    code = "import sys; from zeroviz.cli import main; sys.exit(main(['predict', '--json', '--ranks', '500']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"{\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(30) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        code = "import sys; from zeroviz.cli import main; sys.exit(main(['predict']))"
        result = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60
        )
    assert result.returncode == 1
    assert result.stderr == "zeroviz: the output could not be written (No space left on device).\n"


@pytest.mark.parametrize("words", [["--help"], ["predict", "--help"], ["run", "--help"], ["doctor", "--help"]])
def test_help_is_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 0
    assert "usage: zeroviz" in capsys.readouterr().out


def test_files_that_would_overwrite_each_other_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.json"
    text = json.dumps({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11})
    config.write_text(text)
    same = tmp_path / "a.svg"
    for words in (
        ["--model", str(config), "--seq", "8", "--trace", str(config)],
        ["--figure", str(same), "--trace", str(tmp_path / "." / "a.svg")],
    ):
        assert main(["predict", *words]) == 2
        assert "give each a file of its own" in capsys.readouterr().err
    assert config.read_text() == text and not same.exists()


def test_a_closed_or_full_stderr_does_not_cost_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """News that nobody reads is no reason to throw a finished run away."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    for stream in (None, Full()):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressLine() as line:
            line.show(Progress(RunState.RUNNING, "running"))


def test_many_ranks_answer_at_once() -> None:
    """16,384 ranks share one list of events, and so one peak: the report is made without walking it for each."""
    trace = predict(RunSpec(model=PRESETS["llama3-8b"], ranks=16384, strategy=Strategy.ZERO3))
    first, *others = trace.ranks
    assert all(rank.peak() is first.peak() and rank.wire() is first.wire() for rank in others)


def test_being_terminated_is_being_interrupted_whatever_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM while a report is being printed, outside the part that watches a run: 130 and one sentence."""
    before = signal.getsignal(signal.SIGTERM)

    def dumps(*_: object, **__: object) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not delivered")

    monkeypatch.setattr("zeroviz.cli.json.dumps", dumps)
    assert main(["predict", "--json"]) == 130
    assert capsys.readouterr().err == "zeroviz: interrupted; nothing was left running.\n"
    assert signal.getsignal(signal.SIGTERM) is before
