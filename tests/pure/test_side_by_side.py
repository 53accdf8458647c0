"""Two to five specs on one axis: names, rows, figures and the command that prints them.

Every figure is compared with the trace it comes from; the traces are compared with real ranks elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeroviz.cli import main
from zeroviz.errors import TraceError
from zeroviz.models import PRESETS, bare
from zeroviz.partition import padded_numel, plan_for
from zeroviz.predict import predict
from zeroviz.scene import build_scene
from zeroviz.side_by_side import heading, names_of, side_by_side
from zeroviz.spec import Implementation, RunSpec, Settings, Strategy, UnitPolicy
from zeroviz.tables_side_by_side import render_side_by_side
from zeroviz.trace import Category, Origin, Trace

BASE = RunSpec(model=PRESETS["tiny"], strategy=Strategy.DDP, ranks=3)
DDP = replace(BASE, impl=Implementation.DDP)
HYBRID = replace(BASE, strategy=Strategy.HYBRID_SHARD, ranks=4, shard_ranks=2)


def specs(**settings: Any) -> list[RunSpec]:
    return [replace(BASE, **{**settings, "strategy": strategy}) for strategy in (Strategy.DDP, Strategy.ZERO3)]


def live(trace: Trace) -> Trace:
    return replace(trace, origin=Origin.LIVE)


# ---- names ----


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([BASE, DDP], ["own", "ddp"]),
        ([DDP, replace(DDP, settings=Settings(bucket_view=True))], ["1", "2: bucket_view true"]),
        (specs(), ["DDP", "ZeRO-3"]),
        ([BASE, replace(BASE, model=PRESETS["tiny-llama"])], ["tiny", "tiny-llama"]),
        (
            [BASE, replace(BASE, ranks=2), replace(BASE, seq=17)],
            ["3 ranks, 1 x 32", "2 ranks, 1 x 32", "3 ranks, 1 x 17"],
        ),
    ],
)
def test_a_spec_is_called_by_what_sets_it_apart(given: list[RunSpec], names: list[str]) -> None:
    assert names_of(given) == names


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([BASE], "1 were given to be compared; a picture takes 2 to 5"),
        ([replace(BASE, ranks=n) for n in range(1, 7)], "6 were given"),
        ([BASE, DDP, BASE], "Two of the traces are of the same spec"),
    ],
)
def test_what_cannot_share_a_picture_is_refused(given: list[RunSpec], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        names_of(given)


# ---- the picture as data ----


def test_a_row_is_the_rank_that_peaks_highest() -> None:
    traces = [predict(spec) for spec in specs()]
    scene = side_by_side(traces)
    assert [row.rank_label for row in scene.rows] == ["DDP", "ZeRO-3"]
    for row, trace in zip(scene.rows, traces, strict=True):
        assert row.peak_nbytes == max(rank.peak().total for rank in trace.ranks)
        held = {s.category: s.nbytes for s in scene.segments if s.row == row.index and s.moment.value == "at rest"}
        assert held == trace.ranks[row.ranks[0]].at_rest
    assert scene.axis_max == max(row.peak_nbytes for row in scene.rows)
    assert scene.title == "tiny, 3 ranks, fp32: DDP and ZeRO-3"


@pytest.mark.parametrize(
    ("given", "title"),
    [
        ([BASE, HYBRID], "tiny, fp32: 2 side by side"),
        ([BASE, HYBRID, replace(HYBRID, ranks=8)], "tiny, fp32: 3 side by side"),
        ([HYBRID, replace(HYBRID, ranks=8)], "tiny, HYBRID_SHARD, groups of 2, fp32: 4 ranks and 8 ranks"),
        ([HYBRID, replace(HYBRID, shard_ranks=4)], "tiny, HYBRID_SHARD, 4 ranks, fp32: groups of 2 and groups of 4"),
        ([replace(BASE, ranks=4), HYBRID], "tiny, 4 ranks, fp32: 2 side by side"),
        ([BASE, replace(BASE, batch=1024)], "tiny, DDP, 3 ranks, fp32: 1 x 32 and 1,024 x 32"),
        ([BASE, replace(BASE, accumulation=2)], "tiny, DDP, 3 ranks, fp32: 1 micro-batch and 2 micro-batches"),
    ],
)
def test_a_title_says_of_all_only_what_all_have(given: list[RunSpec], title: str) -> None:
    """A group of one of them is in its name; most have none."""
    assert heading(given, names_of(given)) == title
    for spec, name in zip(given, names_of(given), strict=True):
        said = spec.shard_ranks is not None and f"groups of {spec.shard_ranks}" in f"{title} {name}"
        assert said == (spec.shard_ranks is not None)


def test_a_bare_count_is_said_once() -> None:
    """It is called by its count, which is what is said of other models after their names."""
    count = replace(BASE, model=bare(7_500_000_000), unit=UnitPolicy.parse("model"))
    scene = side_by_side([predict(count), predict(BASE)])
    assert scene.subtitle[0] == f"7,500,000,000 parameters; tiny, {BASE.model.num_params:,} parameters"
    assert build_scene(predict(count)).subtitle[0] == "7,500,000,000 parameters in 1 unit (model)"


def test_a_run_lies_under_its_prediction() -> None:
    traces = [predict(spec) for spec in specs()]
    scene = side_by_side(traces, {traces[1].spec: live(traces[1])})
    assert [(row.rank_label, row.source_label) for row in scene.rows] == [
        ("DDP", "predicted"),
        ("ZeRO-3", "predicted"),
        ("ZeRO-3", "measured"),
    ]
    assert [row.peak_difference for row in scene.rows] == [None, None, 0]
    assert len({segment.id for segment in scene.segments}) == len(scene.segments)


def test_ddps_second_copy_of_the_gradients_is_in_the_picture() -> None:
    """torch's buckets are as large as the gradients: 4 bytes a parameter beside own's 4 + 4 + 8."""
    scene = side_by_side([predict(BASE), predict(DDP)])
    own, theirs = scene.rows
    assert theirs.rest_nbytes - own.rest_nbytes == 4 * PRESETS["tiny"].num_params
    (bucket,) = (s for s in scene.segments if s.category is Category.BUCKET and s.row == theirs.index)
    assert bucket.nbytes == 4 * PRESETS["tiny"].num_params


def test_ranks_that_differ_are_said() -> None:
    """ZeroRedundancyOptimizer gives each rank whole parameters, so its ranks are uneven."""
    uneven = predict(replace(BASE, strategy=Strategy.ZERO1, impl=Implementation.ZERO_REDUNDANCY))
    scene = side_by_side([predict(replace(BASE, strategy=Strategy.ZERO1)), uneven])
    assert any("zero_redundancy: ranks differ at rest, from" in note for note in scene.notes)
    assert not any(note.startswith("own: ranks differ") for note in scene.notes)


# ---- the command ----


def test_the_text_is_the_picture_s_twin_in_80_columns() -> None:
    traces = [
        predict(replace(BASE, strategy=s)) for s in (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3)
    ]
    text = render_side_by_side(traces)
    assert max(map(len, text.splitlines())) <= 80
    for trace in traces:
        assert f"{max(rank.peak().total for rank in trace.ranks):,}" in text
        assert f"{trace.ranks[0].sent_nbytes:,}" in text
    large = [predict(replace(spec, model=PRESETS["llama3-70b"])) for spec in [*specs(), *specs(ranks=64)]]
    assert max(map(len, render_side_by_side(large).splitlines())) <= 80


def test_the_command_compares_by_arithmetic(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "picture.svg"
    words = ["compare", "--impls", "own,ddp", "--strategy", "ddp", "--ranks", "3"]
    assert main([*words, "--figure", str(figure)]) == 0
    assert capsys.readouterr().out.strip() == render_side_by_side([predict(BASE), predict(DDP)]).strip()
    assert figure.stat().st_size > 1000
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["spec"]["impl"] for each in report["reports"]] == ["own", "ddp"]


def test_the_command_compares_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two of a spec are an expectation and what was found; others are side by side, a run under its prediction."""
    files = []
    for number, trace in enumerate((predict(BASE), live(predict(BASE)), predict(DDP))):
        files.append(str(tmp_path / f"{number}.json"))
        Path(files[-1]).write_text(trace.to_json())
    assert main(["compare", files[1], files[0]]) == 0
    assert "difference" in capsys.readouterr().out
    assert main(["compare", *files]) == 0
    out = capsys.readouterr().out
    assert "MEASURED LESS PREDICTED" in out and "own and ddp" in out


def test_an_option_that_only_one_side_has_is_that_sides(capsys: pytest.CaptureFixture[str]) -> None:
    """A shard group is HYBRID_SHARD's, a bucket DDP's: the others are asked without."""
    assert main(["compare", *["--strategies", "ddp,hybrid_shard", "--ranks", "4", "--shard-ranks", "2"]]) == 0
    shard = sum(padded_numel(unit.numel, 2) for unit in plan_for(RunSpec(model=PRESETS["tiny"])).units) // 2
    line = next(line for line in capsys.readouterr().out.splitlines() if "SHARDED_GRAD" in line)
    assert line.split() == ["SHARDED_GRAD", "-", f"{4 * shard:,}"]
    assert main(["compare", *["--impls", "own,ddp", "--strategy", "ddp", "--bucket-view", "true"]]) == 0
    assert "BUCKET" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Nothing to compare"),
        (["--impls", "own"], "names 1; a comparison takes 2 to 5"),
        (["--impls", "own,torch", "--strategy", "ddp"], "--impl is 'torch'; allowed are own"),
        (["--impls", "own,ddp", "--strategy", "zero2"], "impl is 'ddp' with strategy zero2"),
        (["--impls", "own,ddp", "--strategies", "ddp,zero1"], "give one of the two lists"),
        (["missing.json", "other.json", "--ranks", "4"], "Files and --ranks were given"),
        (["--strategies", "ddp,zero1", "--shard-ranks", "2"], "shard_ranks is 2 with strategy ddp"),
        (["--impls", "own,fsdp1", "--bucket-numel", "5"], "bucket_numel is 5 with impl own"),
        (["--strategies", "ddp,zero1", "--strategy", "ddp"], "leave --strategy out"),
        (["missing.json", "--impls", "own,ddp"], "Files and --impls were given"),
        (["missing.json", "other.json"], "missing.json cannot be read"),
    ],
)
def test_a_wrong_request_is_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["compare", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_file_that_is_no_trace_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole = predict(BASE).to_json()
    for name, content in (("half.json", whole[: len(whole) // 2].encode()), ("picture.png", b"\x89PNG\xff\xfe")):
        path = tmp_path / name
        path.write_bytes(content)
        assert main(["compare", str(path), str(path)]) == 2
        assert name in capsys.readouterr().err
