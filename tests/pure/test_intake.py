"""What a person gives is taken for what it is, or refused in one sentence that says what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zeroviz.errors import SpecError, TraceError, ZerovizError
from zeroviz.hf_config import MAX_CONFIG_NBYTES
from zeroviz.intake import MAX_TRACE_NBYTES, read_trace, take_in
from zeroviz.models import PRESETS, bare
from zeroviz.policies import UnitPolicy
from zeroviz.predict import predict
from zeroviz.spec import Checkpointing, DType, Implementation, Offload, Optimizer, RunSpec, Strategy
from zeroviz.toggles import spec_of, toggles_of
from zeroviz.trace import Origin, Trace

CONFIG = {
    "model_type": "llama", "hidden_size": 72, "intermediate_size": 200, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 1009, "max_position_embeddings": 128,
}  # fmt: skip


def live(**spec: object) -> Trace:
    """A trace as a run would have written it."""
    return replace(predict(RunSpec(**spec)), origin=Origin.LIVE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "num_params"),
    [("7.5B", 7_500_000_000), (" 7e9 ", 7 * 10**9), ("125 M", 125_000_000), ("7_000_000", 7_000_000), ("72", 72)],
)
def test_a_number_is_a_bare_count(text: str, num_params: int) -> None:
    assert take_in(text).model == bare(num_params)


def test_a_config_is_a_model_and_says_what_was_filled_in() -> None:
    taken = take_in(json.dumps(CONFIG, indent=1), "mine.json")
    assert (taken.model.name, taken.model.hidden, taken.trace) == ("mine", 72, None)
    assert taken.notes and all(note.endswith(".") for note in taken.notes)
    assert take_in(json.dumps(CONFIG)).model.name == "pasted"


def test_a_path_is_read_as_what_the_file_is(tmp_path: Path) -> None:
    config, trace = tmp_path / "my model.json", tmp_path / "trace.json"
    config.write_text(json.dumps(CONFIG))
    trace.write_text(live(model=PRESETS["tiny"], ranks=3).to_json())
    assert take_in(str(config)).model.name == "my model"
    found = take_in(f"  {trace}\n").trace
    assert found is not None and (found.origin, found.spec.ranks) == (Origin.RECORDED, 3)


def test_a_measured_trace_is_recorded_and_a_predicted_one_is_said_to_be() -> None:
    trace = live(model=PRESETS["tiny-llama"], strategy=Strategy.ZERO2, ranks=3)
    taken = take_in(trace.to_json())
    assert taken.trace == replace(trace, origin=Origin.RECORDED) and taken.notes == ()
    predicted = take_in(predict(trace.spec).to_json())
    assert predicted.trace is not None and "is a prediction" in predicted.notes[0]


def test_what_is_wrong_with_it_is_one_sentence(tmp_path: Path) -> None:
    whole = live(model=PRESETS["tiny"]).to_json()
    newer = whole.replace('"schema": "', '"schema": "newer-', 1)
    binary = tmp_path / "weights.json"
    binary.write_bytes(b"\xff\xfe" * 600)
    large = tmp_path / "large.json"
    with large.open("wb") as file:  # 200 MB that take no room on the disk
        file.write(b'{"model_type": "llama"')
        file.truncate(200 * 10**6)
    long_trace = tmp_path / "long.json"
    with long_trace.open("wb") as file:
        file.write(whole[:100].encode())
        file.truncate(MAX_TRACE_NBYTES + 1)
    cases = {
        "": "Nothing was given",
        "   \n": "Nothing was given",
        "hello there": "'hello there' is no config.json",
        "x" * 100: "…' is no config.json",
        "-5": "'-5' is no config.json",
        "1e400": "whole number from 1 to 1e18",
        "0": "whole number from 1 to 1e18",
        "0.5": "whole number from 1 to 1e18",
        "[1, 2]": "must be an object",
        "{": "not valid JSON",
        json.dumps({**CONFIG, "hidden_size": -8}): "hidden_size",
        json.dumps({**CONFIG, "hidden_size": "many"}): "hidden_size",
        json.dumps({**CONFIG, "num_hidden_layers": 10**30}): "num_hidden_layers",
        json.dumps({name: value for name, value in CONFIG.items() if name != "vocab_size"}): "vocab_size",
        json.dumps({**CONFIG, "x": "y" * MAX_CONFIG_NBYTES}): "a config.json is at most",
        whole[: len(whole) // 2]: "not whole JSON",
        newer: "schema is 'newer-",
        whole.replace('"ranks"', '"rinks"', 1): "lacks or garbles",
        str(tmp_path / "nothing.json"): "does not exist",
        str(tmp_path): "config.json",
        str(binary): "cannot be read as a text file",
        str(large): "200,000,000 bytes",
        str(long_trace): "larger than",
        "/dev/zero": "cannot be read",
    }
    for text, words in cases.items():
        with pytest.raises(ZerovizError) as caught:
            take_in(text)
        said = str(caught.value)
        assert words in said and said.endswith((".", "?")) and "\n" not in said, (text[:60], said)
        assert isinstance(caught.value, SpecError | TraceError)


def test_a_trace_that_does_not_add_up_is_refused() -> None:
    """Its figures would be shown as measured ones."""
    trace = live(model=PRESETS["tiny"])
    renumbered = replace(trace, ranks=tuple(replace(rank, rank=5) for rank in trace.ranks))
    with pytest.raises(TraceError):
        take_in(renumbered.to_json())


def test_a_file_is_checked_whoever_reads_it(tmp_path: Path) -> None:
    trace = live(model=PRESETS["tiny"], ranks=2)
    rank, path = trace.ranks[0], tmp_path / "trace.json"
    less = rank.collectives[0]._replace(payload_nbytes=-5)
    for wrong, words in (
        (replace(rank, rest={}), "more was freed than allocated"),
        (
            replace(rank, collectives=(less, *rank.collectives[1:])),
            "Rank 0, collective 0 .all_gather.: -5 bytes among 2",
        ),
    ):
        path.write_text(replace(trace, ranks=(wrong, *trace.ranks[1:])).to_json())
        with pytest.raises(TraceError, match=words):
            read_trace(path)


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(model=PRESETS["tiny"], unit=UnitPolicy.parse("block:2"), checkpointing=Checkpointing(2), ranks=3),
        RunSpec(model=PRESETS["tiny-llama"], strategy=Strategy.HYBRID_SHARD, ranks=6, shard_ranks=3, clip_norm=0.5),
        RunSpec(model=bare(1009), strategy=Strategy.ZERO1, optimizer=Optimizer.SGD, unit=UnitPolicy.parse("model")),
        RunSpec(model=PRESETS["tiny"], offload=Offload.PARAMS, prefetch=2, grad_dtype=DType.BF16, seed=7, steps=5),
        RunSpec(model=PRESETS["tiny"], impl=Implementation.FSDP2, unit=UnitPolicy.parse("layer"), batch=3, seq=17),
    ],
    ids=str,
)
def test_toggles_of_a_spec_ask_for_it(spec: RunSpec) -> None:
    assert spec_of(toggles_of(spec)) == replace(spec, steps=RunSpec.steps, seed=RunSpec.seed)
