"""Models as shapes: published parameter counts, the uneven tiny models, config.json files good and bad."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zeroviz.errors import SpecError
from zeroviz.hf_config import MAX_CONFIG_NBYTES, model_from_config, read_config
from zeroviz.models import PRESETS, Family, ModelShape, bare
from zeroviz.partition import plan_units
from zeroviz.spec import UnitPolicy

# Re-computed from each model's published configuration (its config.json on the Hugging Face hub).
PUBLISHED_NUM_PARAMS = {
    "gpt2": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "gemma2-9b": 9_241_705_984,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED_NUM_PARAMS)
def test_published_parameter_counts(name: str) -> None:
    assert PRESETS[name].num_params == PUBLISHED_NUM_PARAMS[name]


def test_gpt2_count_derived_by_hand() -> None:
    # vocab*d + positions*d + 12 blocks of 12 d^2 + 13 d, + final norm 2 d; the output layer is the tied embedding.
    d = 768
    block = 12 * d * d + 13 * d
    assert PRESETS["gpt2"].num_params == 50257 * d + 1024 * d + 12 * block + 2 * d


def test_tied_embedding_counts_once() -> None:
    # Llama-3.2-1B: counting the tied matrix twice would give 1,235,814,400 + 128256 * 2048 = 1,498,482,688.
    model = PRESETS["llama3.2-1b"]
    assert model.num_params + 128256 * 2048 == 1_498_482_688
    assert [shape.name for shape in model.params].count("embed_tokens.weight") == 1


def test_llama3_8b_root_and_block() -> None:
    # Embedding and head hold 2 x 128256 x 4096 = 1,050,673,152 parameters (and the head's norm 4096 more).
    plan = plan_units(PRESETS["llama3-8b"], UnitPolicy())
    numel = {unit.name: unit.numel for unit in plan.units}
    assert numel["embed"] + numel["head"] == 1_050_673_152 + 4096
    assert numel["block 0"] == 218_112_000


@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_tiny_units_divide_by_nothing(name: str, num_ranks: int) -> None:
    """So that padding is met at the first toggle."""
    model = PRESETS[name]
    units = plan_units(model, UnitPolicy()).units
    uneven = [unit for unit in units if unit.name.startswith("block") or unit.name == "root"]
    assert len(uneven) >= model.layers
    assert all(unit.numel % num_ranks for unit in uneven)


def test_a_bare_count_has_one_parameter_tensor() -> None:
    model = bare(7_000_000_000)
    assert (model.family, model.num_params, len(model.params)) == (Family.BARE, 7_000_000_000, 1)


GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
}


def shape_of(config: dict[str, Any], **changes: Any) -> ModelShape:
    """The config with `changes`; a value of None removes the field."""
    merged = {key: value for key, value in {**config, **changes}.items() if value is not None}
    return model_from_config(merged, name="m")


def test_configs_give_the_published_counts() -> None:
    assert shape_of(GPT2).num_params == PUBLISHED_NUM_PARAMS["gpt2"]
    # Llama-2's config has no num_key_value_heads in its first release: it means num_attention_heads.
    assert shape_of(LLAMA).num_params == PUBLISHED_NUM_PARAMS["llama2-7b"]
    llama3 = shape_of(LLAMA, vocab_size=128256, intermediate_size=14336, num_key_value_heads=8)
    assert llama3.num_params == PUBLISHED_NUM_PARAMS["llama3-8b"]
    mistral = shape_of(LLAMA, model_type="mistral", intermediate_size=14336, num_key_value_heads=8)
    assert mistral.num_params == PUBLISHED_NUM_PARAMS["mistral-7b-v0.1"]


def test_missing_fields_take_the_family_default() -> None:
    llama = shape_of(LLAMA)
    assert (llama.kv_heads, llama.head_dim, llama.tied) == (32, 128, False)
    assert shape_of(GPT2).tied is True
    assert shape_of(GPT2, tie_word_embeddings=False).tied is False
    assert shape_of(GPT2).ffn == 4 * 768
    assert shape_of(GPT2, n_inner=100).ffn == 100
    assert shape_of(LLAMA, tie_word_embeddings=True).tied is True


def test_null_means_missing() -> None:
    config = {**LLAMA, "num_key_value_heads": None, "head_dim": None}
    assert model_from_config(config, name="m").kv_heads == 32


def test_an_explicit_head_dim_need_not_be_the_quotient() -> None:
    model = shape_of(LLAMA, head_dim=64)
    query = next(shape for shape in model.params if shape.name.endswith("q_proj.weight"))
    assert query.shape == (32 * 64, 4096)


def test_nested_text_config_is_the_real_one() -> None:
    nested = {"model_type": "some-vision-model", "text_config": LLAMA}
    assert model_from_config(nested, name="m").num_params == PUBLISHED_NUM_PARAMS["llama2-7b"]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"hidden_size": None}, "lacks 'hidden_size'"),
        (GPT2, {"n_layer": None}, "lacks 'n_layer'"),
        (LLAMA, {"num_hidden_layers": "32"}, "num_hidden_layers = '32'; it must be a whole number"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers = True; it must be a whole number"),
        (LLAMA, {"num_hidden_layers": 1.5}, r"num_hidden_layers = 1\.5"),
        (LLAMA, {"hidden_size": -4096}, "hidden_size = -4096; it must be a whole number from 1"),
        (LLAMA, {"vocab_size": 0}, "vocab_size = 0"),
        (LLAMA, {"vocab_size": 10**30}, "vocab_size = 1000"),
        (LLAMA, {"num_key_value_heads": 5}, r"32 % 5 = 2"),
        (LLAMA, {"hidden_size": 4100}, r"4100 % 32 = 4"),
        (GPT2, {"n_head": 7}, r"768 % 7 = 5"),
        (LLAMA, {"head_dim": 7}, "must be even"),
        (LLAMA, {"tie_word_embeddings": "no"}, "must be true or false"),
        (LLAMA, {"hidden_act": "relu"}, "supported are silu, swish"),
        (LLAMA, {"rms_norm_eps": "small"}, "must be a positive number"),
        (LLAMA, {"model_type": "mamba"}, "model_type 'mamba'; supported are gpt2, llama, mistral"),
        (LLAMA, {"model_type": None}, "model_type None"),
        (LLAMA, {"model_type": ["llama"]}, "supported are"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        shape_of(config, **changes)


def test_a_config_that_is_no_object() -> None:
    with pytest.raises(SpecError, match="is a JSON list"):
        model_from_config([1, 2], name="m")


def test_config_files(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read_config(file).name == "my-llama"
    other = tmp_path / "seven.json"
    other.write_text(json.dumps(LLAMA))
    assert read_config(other).name == "seven"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe\x00weights", "cannot be read as a text file"),
        (b"[" * 200_000, "is not valid JSON"),
        (b"3", "is a JSON int"),
        (b"{" + b" " * MAX_CONFIG_NBYTES + b"}", "Is it a weights file"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_config(file)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        read_config(tmp_path / "config.json")
    with pytest.raises(SpecError, match="cannot be read as a text file"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_local_experts": 8}, "experts and cross-attention are not supported"),
        ({"add_cross_attention": True}, "experts and cross-attention are not supported"),
        ({"vision_config": {"hidden_size": 64}}, "'vision_config', whose parameters are not counted"),
        ({"num_hidden_layers": 5000}, "layers = 5000; it must be at most 4,096"),
    ],
)
def test_what_would_be_left_uncounted_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        model_from_config({**LLAMA, **fields}, name="m")


def test_mistral_without_key_value_heads_has_eight() -> None:
    """The family's default; 7,241,732,096 is the published count of the configuration that says so itself."""
    config = {"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
    config |= {"intermediate_size": 14336, "vocab_size": 32000}
    assert model_from_config(config, name="m").num_params == 7241732096


def test_a_number_of_5000_digits_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"vocab_size": ' + "9" * 5000 + "}")
    with pytest.raises(SpecError, match="is not valid JSON"):
        read_config(path)
