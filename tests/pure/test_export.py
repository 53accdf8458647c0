"""What is taken away from a trace says what the trace says: the ledger as CSV and Markdown, and the command."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.pure.exported import (
    BARE,
    CONFIG,
    HYBRID,
    MANY,
    MORE,
    OFFLOADED,
    PAIRED,
    RANK,
    SPEC,
    STEP,
    TINY,
    live,
    name,
    trace,
)
from zeroviz.cli import main
from zeroviz.compare import STEP_COUNTERS, UNEXPLAINED
from zeroviz.errors import SpecError, TraceError
from zeroviz.export import Format, export, ledger_csv, ledger_markdown
from zeroviz.hf_config import model_from_config
from zeroviz.implementations import PAIRS
from zeroviz.link import Direction
from zeroviz.predict import predict
from zeroviz.rank_trace import AlikeRanks
from zeroviz.spec import (
    Implementation,
    Precision,
    RunSpec,
    Strategy,
)
from zeroviz.trace import AllocatorReading, Category, Event, Origin

# ---- the ledger as CSV ----


def rows_of(text: str) -> list[dict[str, str]]:
    rows = list(csv.DictReader(StringIO(text)))
    assert all(None not in row and None not in row.values() for row in rows), "a line has another number of cells"
    return rows


def ranks_in(cell: str) -> list[int]:
    spans = [span.partition("-") for span in cell.split(", ")]
    return [rank for first, dash, last in spans for rank in range(int(first), int(last if dash else first) + 1)]


def sums(rows: list[dict[str, str]], column: str = "nbytes") -> Counter[str]:
    """Bytes of all ranks, by moment."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row["moment"]] += int(row["num_ranks"]) * int(row[column])
    return found


def test_a_ledger_by_hand() -> None:
    """Ranks 0 and 2 are alike. The peak is 101 + 203 + 199 + 57, in forward; of 199 bytes a ring of three sends two
    thirds, 132.67, rounded up."""
    where = "predicted,forward,forward,block 0,,"
    text = ledger_csv(trace(RANK, MORE, RANK))
    assert text.splitlines() == [
        "ranks,num_ranks,moment,item,nbytes,origin,phase,op,unit,count,payload_nbytes",
        '"0, 2",2,at rest,SHARDED_PARAM,101,predicted,,,,,',
        '"0, 2",2,at rest,OPTIMIZER_STATE,203,predicted,,,,,',
        f'"0, 2",2,at the peak,SHARDED_PARAM,101,{where}',
        f'"0, 2",2,at the peak,UNSHARDED_PARAM,199,{where}',
        f'"0, 2",2,at the peak,OPTIMIZER_STATE,203,{where}',
        f'"0, 2",2,at the peak,ACTIVATION,57,{where}',
        '"0, 2",2,wire,all_gather fp32,133,predicted,,,,1,199',
        "1,1,at rest,SHARDED_PARAM,103,predicted,,,,,",
        "1,1,at rest,OPTIMIZER_STATE,203,predicted,,,,,",
        f"1,1,at the peak,SHARDED_PARAM,103,{where}",
        f"1,1,at the peak,UNSHARDED_PARAM,199,{where}",
        f"1,1,at the peak,OPTIMIZER_STATE,203,{where}",
        f"1,1,at the peak,ACTIVATION,57,{where}",
        "1,1,wire,all_gather fp32,133,predicted,,,,1,199",
    ]


@pytest.mark.parametrize("spec", PAIRED, ids=name)
def test_rows_add_up_to_the_trace(spec: RunSpec) -> None:
    """No row is the sum of others, so adding up all of a moment's gives what all ranks hold, send or copy then."""
    predicted = predict(spec)
    rows = rows_of(ledger_csv(predicted))
    ranks = predicted.ranks
    assert sums(rows) == Counter(
        {
            "at rest": sum(rank.rest_nbytes for rank in ranks),
            "at rest on the host": sum(sum(rank.at_rest_on_host.values()) for rank in ranks),
            "at the peak": sum(rank.peak().total for rank in ranks),
            "wire": sum(rank.sent_nbytes for rank in ranks),
            "link": sum(transfer.nbytes for rank in ranks for transfer in rank.transfers),
        }
    )
    for rank in (ranks[0], ranks[-1]):
        peak = rank.peak()
        of_rank = [row for row in rows if rank.rank in ranks_in(row["ranks"])]
        at_peak = {row["item"]: int(row["nbytes"]) for row in of_rank if row["moment"] == "at the peak"}
        assert at_peak == {category.value: nbytes for category, nbytes in peak.by_category.items()}
        places = {(row["phase"], row["op"], row["unit"]) for row in of_rank if row["moment"] == "at the peak"}
        assert places == {(peak.phase, peak.op, peak.unit)}
        wire = {
            row["item"]: (int(row["count"]), int(row["payload_nbytes"])) for row in of_rank if row["moment"] == "wire"
        }
        assert wire == {total.label: (total.count, total.payload_nbytes) for total in rank.wire()}
    assert {row["origin"] for row in rows} == {"predicted"}


def test_groups_are_told_apart_on_the_wire() -> None:
    items = {row["item"] for row in rows_of(ledger_csv(predict(HYBRID))) if row["moment"] == "wire"}
    assert items == {"all_gather fp32 in group", "reduce_scatter fp32 in group", "all_reduce fp32 across groups"}


def test_what_lies_on_the_host_has_a_moment_of_its_own() -> None:
    """A third of 21,396 + 3 * 37,239 elements, 4 bytes each: as many of parameters as of gradients, twice of Adam."""
    shard = 4 * (21_396 + 3 * 37_239) // 3
    rows = [row for row in rows_of(ledger_csv(predict(OFFLOADED))) if row["moment"] == "at rest on the host"]
    assert {row["item"]: int(row["nbytes"]) for row in rows} == {
        "HOST_PARAM": shard, "HOST_GRAD": shard, "HOST_OPTIMIZER_STATE": 2 * shard,
    }  # fmt: skip


@pytest.mark.parametrize("impl", [Implementation.OWN, Implementation.FSDP2, Implementation.ZERO_REDUNDANCY])
def test_of_4096_ranks_the_alike_are_one_group(impl: Implementation) -> None:
    spec = RunSpec(model=TINY, impl=impl, ranks=MANY, strategy=PAIRS[impl][0])
    predicted = predict(spec)
    text = ledger_csv(predicted)
    rows = rows_of(text)
    assert len(text) < 20_000
    for moment in ("at rest", "at the peak"):
        cells = {row["ranks"]: int(row["num_ranks"]) for row in rows if row["moment"] == moment}
        assert sorted(rank for cell in cells for rank in ranks_in(cell)) == list(range(MANY))
        assert all(len(ranks_in(cell)) == num_ranks for cell, num_ranks in cells.items())
    assert sums(rows)["at rest"] == sum(rank.rest_nbytes for rank in predicted.ranks)


# ---- measured beside predicted ----


def test_a_difference_stands_beside_its_cause() -> None:
    """Rank 1 holds 2 bytes more, from nowhere, and 8 bytes of step counters among its optimizer's state."""
    odd = replace(RANK, rest={Category.SHARDED_PARAM: 103, Category.OPTIMIZER_STATE: 211})
    rows = rows_of(ledger_csv(trace(RANK, RANK, RANK), live(RANK, odd, RANK)))
    found = {(row["ranks"], row["moment"], row["item"]): row for row in rows}
    for moment in ("at rest", "at the peak"):
        row = found["1", moment, "SHARDED_PARAM"]
        assert [row[f"{what}_nbytes"] for what in ("predicted", "measured", "difference")] == ["101", "103", "2"]
        assert row["cause"] == UNEXPLAINED
        assert found["1", moment, "OPTIMIZER_STATE"]["cause"] == STEP_COUNTERS
        assert found["0, 2", moment, "SHARDED_PARAM"]["cause"] == ""
    assert {(row["predicted_origin"], row["measured_origin"]) for row in rows} == {("predicted", "live")}
    assert all(bool(row["cause"]) == (row["difference_nbytes"] != "0") for row in rows)
    assert sums(rows, "difference_nbytes") == Counter({"at rest": 10, "at the peak": 10, "wire": 0})


def test_what_is_left_when_the_step_is_over_is_a_row() -> None:
    leaky = replace(RANK, events=(*STEP[:2], STEP[2]._replace(delta_nbytes=-50), *STEP[3:]))
    rows = rows_of(ledger_csv(trace(RANK, RANK, RANK), live(leaky, RANK, RANK)))
    (row,) = [row for row in rows if row["moment"] == "after the step"]
    assert (row["ranks"], row["item"], row["predicted_nbytes"], row["measured_nbytes"]) == ("0", "ACTIVATION", "0", "7")
    assert row["cause"] == f"{UNEXPLAINED}; left by backward of block 0"


def test_as_here_is_what_the_allocator_gave_out() -> None:
    """Where its events were read: every category and the step counters make up the machine's peak, on both sides."""
    copies = (STEP[0], Event("forward", "unshard", "block 0", Category.BACKEND_COPY, 31), *STEP[1:])
    copies = (*copies, Event("backward", "reshard", "block 0", Category.BACKEND_COPY, -31))
    read = replace(RANK, events=copies, allocator=AllocatorReading(312, 599, "the allocator", num_events=7))
    mine = replace(RANK, events=copies)
    rows = rows_of(ledger_csv(trace(mine, mine, mine), live(read, read, read)))
    here = [row for row in rows if row["moment"] == "at the peak as here"]
    assert {row["item"]: row["measured_nbytes"] for row in here if "PARAM" not in row["item"]} == {
        "OPTIMIZER_STATE": "203", "ACTIVATION": "57", "BACKEND_COPY": "31", "step counters": "8",
    }  # fmt: skip
    assert (
        sum(int(row["measured_nbytes"]) for row in here) == read.machine_peak().total == 101 + 203 + 199 + 57 + 31 + 8
    )


def test_copies_over_the_link_stand_beside_each_other() -> None:
    """A rank that takes one gradient down twice: one copy more."""
    predicted = predict(replace(OFFLOADED, ranks=1))
    (rank,) = predicted.ranks
    down = next(transfer for transfer in rank.transfers if transfer.direction is Direction.TO_HOST)
    twice = replace(predicted, origin=Origin.LIVE, ranks=(replace(rank, transfers=(*rank.transfers, down)),))
    (row,) = [row for row in rows_of(ledger_csv(predicted, twice)) if row["cause"]]
    assert (row["moment"], row["item"], row["cause"]) == ("link", "to host fp32", UNEXPLAINED)
    assert int(row["measured_count"]) - int(row["predicted_count"]) == 1
    assert int(row["difference_nbytes"]) == down.nbytes


@pytest.mark.parametrize("spec", PAIRED, ids=name)
def test_a_trace_beside_itself_differs_nowhere(spec: RunSpec) -> None:
    predicted = predict(spec)
    rows = rows_of(ledger_csv(predicted, replace(predicted, origin=Origin.REHEARSED)))
    alone = rows_of(ledger_csv(predicted))
    assert {(row["difference_nbytes"], row["cause"]) for row in rows} == {("0", "")}
    assert [row["measured_nbytes"] for row in rows] == [row["nbytes"] for row in alone]
    assert [row["ranks"] for row in rows] == [row["ranks"] for row in alone]


def test_what_belongs_to_the_machine_is_no_part_of_the_rest() -> None:
    """Seven bytes at rest that no block explains: beside the step, as they are in no sum of `RankTrace`."""
    odd = replace(RANK, rest={**RANK.rest, Category.UNATTRIBUTED: 7})
    rows = rows_of(ledger_csv(trace(RANK, RANK, RANK), live(odd, odd, odd)))
    (row,) = [row for row in rows if row["item"] == "UNATTRIBUTED"]
    assert (row["moment"], row["measured_nbytes"]) == ("at rest beside the step", "7")
    assert row["cause"] == UNEXPLAINED
    assert sums(rows, "measured_nbytes")["at rest"] == 3 * odd.rest_nbytes


@pytest.mark.parametrize("of_ours", [False, True])
def test_ranks_known_to_be_alike_on_one_side_may_differ_on_the_other(of_ours: bool) -> None:
    known, single = AlikeRanks([(range(3), RANK)]), trace(RANK, MORE, RANK)
    folded = replace(trace(RANK), ranks=known)
    pair = (folded, replace(single, origin=Origin.LIVE)) if of_ours else (single, replace(folded, origin=Origin.LIVE))
    rows = rows_of(ledger_csv(*pair))
    differ = [(row["ranks"], row["difference_nbytes"]) for row in rows if row["difference_nbytes"] != "0"]
    assert differ == [("1", "2" if of_ours else "-2")] * 2


def test_two_specs_are_no_pair() -> None:
    for form in (Format.CSV, Format.MARKDOWN):
        with pytest.raises(TraceError, match=r"batch \(1 and 4\)"):
            export(form, predict(SPEC), predict(replace(SPEC, batch=4)))


# ---- the ledger as Markdown ----


def tables_of(text: str) -> list[list[list[str]]]:
    """The cells of every table, without the rule; each has as many cells in each line, or GitHub shows no table."""
    tables: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        if not inside:
            tables.append([])
        inside = True
        cells = line.replace("\\|", "\0").split("|")
        assert cells[0] == cells[-1] == ""
        tables[-1].append([cell.strip() for cell in cells[1:-1]])
    for table in tables:
        assert len({len(row) for row in table}) == 1
        assert set("".join(table[1])) <= set("-:")
        del table[1]
    return tables


@pytest.mark.parametrize("spec", PAIRED, ids=name)
def test_the_page_has_every_figure_of_the_ledger(spec: RunSpec) -> None:
    """Row by row the same bytes; of each table the sum, but of copies, which go two ways."""
    predicted = predict(spec)
    page = [row for table in tables_of(ledger_markdown(predicted)) for row in table[1:]]
    figures = [(row[0], row[-2].replace(",", "")) for row in page if not row[0].startswith("**")]
    assert figures == [(row["item"], row["nbytes"]) for row in rows_of(ledger_csv(predicted))]
    for table in tables_of(ledger_markdown(predicted)):
        rows = [int(row[-2].replace(",", "")) for row in table[1:] if not row[0].startswith("**")]
        totals = [row[-2] for row in table[1:] if row[0] == "**total**"]
        assert totals == ([] if table[0][0] == "direction" else [f"**{sum(rows):,}**"])


def test_the_page_says_what_it_is_of() -> None:
    text = ledger_markdown(predict(replace(BARE, precision=Precision.BF16_MIXED, async_reduce=True)))
    assert text.startswith("# ZeRO-2 on 3 ranks, bf16-mixed: predicted\n")
    assert "\n- bf16-mixed: 2 param + 2 grad + 4 master + 8 Adam = 16 bytes a parameter\n" in text
    assert "\n- async reduce\n" in text
    assert "--params 7000000001" in text
    assert "\nNote: A bare parameter count says nothing of layers" in text
    assert "\n## Each rank\n" in text
    # 2 bytes a parameter whole, 2 + 4 + 8 of the third that a rank owns: 7,000,000,002 / 3.
    assert "| UNSHARDED_PARAM | 14,000,000,004 | 14.00 GB |" in text
    assert "| **total** | **46,666,666,680** | **46.67 GB** |" in text


def test_measured_stands_beside_predicted_on_the_page() -> None:
    text = ledger_markdown(trace(RANK, RANK, RANK), live(RANK, MORE, RANK))
    assert text.startswith("# ZeRO-3 on 3 ranks, fp32: predicted beside measured\n")
    assert "\n- on backend gloo\n" in text
    assert "\n## Ranks 0, 2\n" in text and "\n## Rank 1\n" in text
    first, *_ = tables_of(text.partition("## Rank 1")[2])
    assert first == [
        ["category", "predicted, bytes", "measured, bytes", "difference", "measured, decimal", "cause"],
        ["SHARDED_PARAM", "101", "103", "+2", "103 B", UNEXPLAINED],
        ["OPTIMIZER_STATE", "203", "203", "0", "203 B", ""],
        ["**total**", "**304**", "**306**", "**+2**", "**306 B**", ""],
    ]


def test_a_name_cannot_break_the_page() -> None:
    model = replace(TINY, name="a|b <i>*x*</i>\n# `c`")
    text = ledger_markdown(predict(RunSpec(model=model)))
    assert r"- a\|b \<i\>\*x\*\</i\> # \`c\`, 133,106 parameters" in text
    assert len(tables_of(text)) == len(tables_of(ledger_markdown(predict(RunSpec(model=TINY)))))


# ---- the command ----


def exported(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["export", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence on stderr of a request that is wrong."""
    assert main(["export", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.endswith(".\n")
    return captured.err


@pytest.mark.parametrize("form", Format)
def test_a_prediction_is_printed_or_written(form: Format, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--format", form.value, "--ranks", "3", "--strategy", "zero2")
    text = exported(capsys, *words)
    assert text == export(form, predict(replace(SPEC, strategy=Strategy.ZERO2)))
    assert text.endswith("\n") and not text.endswith("\n\n")
    file = tmp_path / "taken"
    file.write_text("what was there before")
    assert exported(capsys, *words, "--out", str(file)) == ""
    assert file.read_text() == text


def test_a_file_is_exported_as_its_trace_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    predicted = predict(HYBRID)
    file.write_text(predicted.to_json())
    for form in Format:
        assert exported(capsys, str(file), "--format", form.value) == export(form, predicted)


def test_a_measured_file_stands_beside_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a format has room for two. Two files stand beside each other, whichever is named first."""
    predicted = predict(SPEC)
    more = [replace(rank, rest={**rank.rest, Category.BUCKET: 7}) for rank in predicted.ranks]
    measured = replace(predicted, origin=Origin.LIVE, ranks=tuple(more), environment={"backend": "gloo"})
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    ours.write_text(predicted.to_json())
    theirs.write_text(measured.to_json())
    for form in Format:
        alone = exported(capsys, str(theirs), "--format", form.value)
        if form.compares:
            assert alone == export(form, predicted, measured)
            assert exported(capsys, str(theirs), str(ours), "--format", form.value) == alone
        else:
            assert alone == export(form, measured)
    (row,) = [row for row in rows_of(exported(capsys, str(theirs), "--format", "csv")) if row["moment"] == "at rest"
              and row["difference_nbytes"] != "0"]  # fmt: skip
    assert (row["ranks"], row["item"], row["difference_nbytes"], row["cause"]) == ("0-2", "BUCKET", "7", UNEXPLAINED)


def test_a_config_is_exported_as_its_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(CONFIG))
    names: dict[str, Any] = {}
    assert main(["export", "--format", "python", "--model", str(file)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("Note: tie_word_embeddings is not in the config; false, Llama's default")
    exec(said.out, names)
    assert names["spec"] == RunSpec(model=model_from_config(CONFIG, name="mine"))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((), ("No --format was given", "csv, markdown, chrome, json, python")),
        (("--format", "xml"), ("--format is 'xml'", "csv, markdown, chrome, json, python")),
        (("--format", "csv", "--ranks", "0"), ("ranks is 0",)),
        (("--format", "csv", "--frob"), ("'--frob'", "--format", "--out")),
        (("--format", "csv", "no-such.json"), ("no-such.json cannot be read",)),
        (("--format", "csv", "TRACE", "--ranks", "3"), ("A file and --ranks", "leave --ranks out")),
        (("--format", "csv", "TRACE", "--zero1-form", ""), ("A file and --zero1-form",)),
        (("--format", "csv", "TRACE", "TRACE", "TRACE"), ("3 files were given", "one trace, or two")),
        (("--format", "chrome", "TRACE", "TRACE"), ("Two traces were given", "chrome is of one", "csv and markdown")),
        (("--format", "markdown", "TRACE", "OTHER"), ("Only traces of one spec", "ranks (3 and 6)")),
        (("--format", "csv", "REPORT"), ("zeroviz.report/1", "zeroviz.trace/1")),
        (("--format", "csv", "BROKEN"), ("more was freed than allocated",)),
        (("--format", "csv", "TRACE", "--out", "TRACE"), ("FILE and --out are both", "a file of its own")),
        (("--format", "csv", "--out", "/no/such/folder/a.csv"), ("--out", "cannot be written", "No such file")),
        (("--format", "csv", "--out", "/"), ("cannot be written", "Is a directory")),
        (("--format", "csv", "--model", "CONFIG", "--out", "CONFIG"), ("--model and --out are both",)),
    ],
)
def test_a_wrong_request_is_one_sentence(
    words: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = predict(SPEC)
    broken = replace(RANK, events=(STEP[0]._replace(delta_nbytes=-1), *STEP[1:]))
    files = {
        "TRACE": predicted.to_json(),
        "OTHER": predict(replace(SPEC, ranks=6)).to_json(),
        "REPORT": json.dumps(predicted.report()),
        "BROKEN": trace(broken, broken, broken).to_json(),
        "CONFIG": json.dumps(CONFIG),
    }
    for file, text in files.items():
        (tmp_path / f"{file}.json").write_text(text)
    sentence = refusal(capsys, *(str(tmp_path / f"{word}.json") if word in files else word for word in words))
    assert [part for part in parts if part not in sentence] == []
    assert {path.stem: path.read_text() for path in tmp_path.iterdir()} == files


def test_two_traces_are_too_many_for_some_formats() -> None:
    for form in Format:
        if not form.compares:
            with pytest.raises(SpecError, match=f"{form.value} is of one"):
                export(form, predict(SPEC), predict(SPEC))
