"""config.json files of every family: what each field means, what is filled and said, what is refused in a sentence."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from zeroviz.errors import SpecError
from zeroviz.hf_config import MAX_CONFIG_NBYTES, config_from_text, read_config, read_config_notes
from zeroviz.models import PRESETS, Family, ModelShape

# The fields that count, as published with the weights (Qwen/Qwen2-7B, google/gemma-2-9b, mistralai/Mixtral-8x7B-v0.1).
QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 131072, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
GEMMA2_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
    "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16, "num_hidden_layers": 42,
    "num_key_value_heads": 8, "query_pre_attn_scalar": 224, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
CONFIGS = {"qwen2-7b": QWEN2_7B, "gemma2-9b": GEMMA2_9B, "mixtral-8x7b": MIXTRAL_8X7B}

SMALL = {
    "hidden_size": 48, "intermediate_size": 119, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 257,
}  # fmt: skip
GPT2_SMALL = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 55, "n_layer": 3, "n_head": 5}
GONE = object()


def of(config: dict[str, Any], **changes: Any) -> tuple[ModelShape, tuple[str, ...]]:
    """The config with `changes`; GONE removes a field."""
    merged = {key: value for key, value in {**config, **changes}.items() if value is not GONE}
    return config_from_text(json.dumps(merged), "m")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_the_preset(name: str) -> None:
    """Whose parameters are the published number (tests/pure/test_models.py)."""
    model, notes = config_from_text(json.dumps(CONFIGS[name]), name)
    assert model == PRESETS[name]
    assert [note for note in notes if "tie_word_embeddings" not in note and "head_dim" not in note] == []


def test_what_a_published_config_leaves_out_is_said() -> None:
    assert of(QWEN2_7B)[1] == of(MIXTRAL_8X7B)[1]
    assert of(QWEN2_7B)[1] == ("head_dim is not in the config; 128, hidden_size / num_attention_heads, was taken.",)
    assert of(GEMMA2_9B)[1] == ("tie_word_embeddings is not in the config; true, Gemma-2's default, was taken.",)


def test_qwen2_has_biases_on_query_key_and_value_alone() -> None:
    """A block has (heads + 2 kv_heads) head_dim of them: (28 + 2 * 4) * 128 = 4,608. o_proj has none."""
    model, _ = of(QWEN2_7B)
    biases = [shape for shape in model.params if shape.name.endswith(".bias")]
    assert {shape.name.split(".")[-2] for shape in biases} == {"q_proj", "k_proj", "v_proj"}
    assert sum(shape.numel for shape in biases) == 28 * 4_608
    ignored, notes = of(QWEN2_7B, attention_bias=True)
    assert ignored.params == model.params
    assert any(
        "attention_bias = True is not read: a Qwen2 model's layers do not depend on it" in note for note in notes
    )


def test_qwen2_tied_by_hand() -> None:
    """Qwen2-0.5B: 151,936 x 896 once, 24 blocks of 14 heads of 64 with 2 key-value heads and 4,864 in the MLP, a norm.

    Block: q and o 2 x 896^2, k and v 2 x 128 x 896, biases 896 + 2 x 128, MLP 3 x 896 x 4,864, norms 2 x 896.
    """
    model, _ = of(
        QWEN2_7B, hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_hidden_layers=24,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    block = 2 * 896**2 + 2 * 128 * 896 + 896 + 2 * 128 + 3 * 896 * 4864 + 2 * 896
    assert model.num_params == 151936 * 896 + 24 * block + 896 == 494_032_768


def test_gemma2_block_by_hand() -> None:
    """Four norms of 3,584; q and o 2 x 16 x 256 x 3,584; k and v 2 x 8 x 256 x 3,584; MLP 3 x 14,336 x 3,584."""
    model, _ = of(GEMMA2_9B)
    block = 4 * 3584 + 2 * 16 * 256 * 3584 + 2 * 8 * 256 * 3584 + 3 * 14336 * 3584
    assert model.num_params == 256000 * 3584 + 42 * block + 3584
    names = [shape.name for shape in model.params if shape.name.startswith("layers.7.") and "norm" in shape.name]
    assert names == [
        f"layers.7.{name}_layernorm.weight"
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    ]
    assert model.head_dim * model.heads == 4096 != model.hidden


def test_mixtral_block_by_hand() -> None:
    """Attention as Mistral's; 8 experts of 3 x 4,096 x 14,336, a router of 8 x 4,096, two norms."""
    model, _ = of(MIXTRAL_8X7B)
    attention = 2 * 4096 * 4096 + 2 * 1024 * 4096
    block = attention + 8 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096
    assert model.num_params == 2 * 32000 * 4096 + 32 * block + 4096
    names = {shape.name for shape in model.params if shape.name.startswith("layers.31.block_sparse_moe.")}
    assert len(names) == 1 + 8 * 3
    assert {"layers.31.block_sparse_moe.gate.weight", "layers.31.block_sparse_moe.experts.7.w3.weight"} <= names
    assert of(MIXTRAL_8X7B, num_local_experts=GONE, num_experts=8)[0] == model


DEFAULTS = {
    "llama": (8, 6, False, "8, as many as num_attention_heads, was taken"),
    "mistral": (8, 6, False, "8, Mistral's default, was taken"),
    "qwen2": (32, 6, False, "32, Qwen2's default, was taken"),
    "gemma2": (4, 256, True, "4, Gemma-2's default, was taken"),
    "mixtral": (8, 6, False, "8, Mixtral's default, was taken"),
}


@pytest.mark.parametrize("family", DEFAULTS)
def test_every_default_is_said(family: str) -> None:
    """Only sizes are given; 32 key-value heads need at least as many heads. 48 / 8 heads = 6."""
    heads = 32 if family == "qwen2" else 8
    config = {**SMALL, "model_type": family, "num_attention_heads": heads, "hidden_size": 6 * heads}
    model, notes = of(config)
    kv_heads, head_dim, tied, words = DEFAULTS[family]
    assert (model.kv_heads, model.head_dim, model.tied) == (kv_heads, head_dim, tied)
    text = "\n".join(notes)
    assert f"num_key_value_heads is not in the config; {words}." in text
    assert "head_dim is not in the config; " in text
    assert f"tie_word_embeddings is not in the config; {str(tied).lower()}, " in text
    assert "of no matter to memory" in notes[-1]
    for key in ("max_position_embeddings", "rms_norm_eps", "rope_theta"):
        assert key in notes[-1]
    # With everything there, nothing is said.
    whole = {
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "tie_word_embeddings": tied, "hidden_act": "silu",
        "hidden_activation": "gelu", "max_position_embeddings": 77, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "final_logit_softcapping": 30.0, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    if family in ("llama", "mistral", "gemma2"):
        whole |= {"attention_bias": False}
    if family in ("llama", "mistral"):
        whole |= {"mlp_bias": False}
    if family != "mixtral":
        del whole["num_local_experts"]
    model, notes = of({**config, **whole})
    assert notes == ()
    assert model.positions == 77


def test_null_is_said_as_null() -> None:
    notes = of({**SMALL, "model_type": "mixtral"}, num_key_value_heads=None)[1]
    assert "num_key_value_heads is null in the config; 8, as many as num_attention_heads, was taken." in notes


def test_gpt2_defaults_are_said() -> None:
    """n_inner is 4 x 55 = 220, and 1,024 positions."""
    model, notes = of(GPT2_SMALL)
    assert (model.ffn, model.positions, model.tied) == (220, 1024, True)
    assert notes[:3] == (
        "n_inner is not in the config; 220, 4 x n_embd, was taken.",
        "n_positions is not in the config; 1,024, GPT-2's default, was taken.",
        "tie_word_embeddings is not in the config; true, GPT-2's default, was taken.",
    )
    assert notes[3].startswith("Not in the config either, and of no matter to memory: activation_function gelu_new, ")


def test_newer_files_keep_theta_in_rope_parameters() -> None:
    model, notes = of(QWEN2_7B, rope_theta=GONE, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert model.rope_theta == 5e5
    assert not any("rope_theta" in note for note in notes)


def test_gemma2_without_a_cap_keeps_no_capped_logits() -> None:
    assert of(GEMMA2_9B, final_logit_softcapping=None)[0].caps_logits is False
    model, notes = of(GEMMA2_9B, final_logit_softcapping=GONE)
    assert model.caps_logits is True
    assert "final_logit_softcapping is not in the config; 30, Gemma-2's default, was taken." in notes


def test_what_stands_there_and_is_not_counted_is_said() -> None:
    changes = {
        "auto_map": {"AutoModel": "modeling_evil.Model"}, "trust_remote_code": True, "attention_dropout": 0.1,
        "quantization_config": {"bits": 4}, "architectures": ["Qwen2ForSequenceClassification"],
    }  # fmt: skip
    before = set(sys.modules)
    model, notes = of(QWEN2_7B, **changes)
    assert set(sys.modules) == before  # nothing that a config names is imported
    assert model == of(QWEN2_7B)[0]
    text = " ".join(notes)
    assert "auto_map names code that comes with the model; it is never run" in text
    assert "Dropout is not counted (attention_dropout 0.1)" in text
    assert "quantization_config is not read" in text
    assert "architectures is ['Qwen2ForSequenceClassification']; what is counted is the model with its" in text


def test_what_the_model_has_beside_its_text_and_another_class_are_said() -> None:
    of_text = config_from_text(json.dumps({"model_type": "llava", "text_config": GEMMA2_9B}))
    assert of_text.notes[-1] == (
        "What is counted is the text_config alone; whatever else the model of model_type 'llava' has is not."
    )
    other = config_from_text(json.dumps({**GEMMA2_9B, "architectures": ["GPT2LMHeadModel"]}))
    assert other.notes[-1].endswith("what is counted is a Gemma-2 model, as model_type says.")
    assert other.model.num_params == of_text.model.num_params


def test_gpt2_has_two_names_for_some_numbers() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}
    same = config_from_text(json.dumps({**gpt2, "hidden_size": 768}))
    assert same.model.num_params == PRESETS["gpt2"].num_params
    with pytest.raises(SpecError, match="n_embd = 768 and hidden_size = 512; they are one number"):
        config_from_text(json.dumps({**gpt2, "hidden_size": 512}))


def test_a_number_of_too_many_digits_is_refused_without_advice_for_programmers() -> None:
    with pytest.raises(SpecError, match=r"value has 5000 digits\); paste a whole config.json\.$"):
        config_from_text(f'{{"n_embd": {"9" * 5000}}}')


def test_nested_text_config() -> None:
    nested = {"model_type": "some-vision-model", "text_config": {**GEMMA2_9B, "tie_word_embeddings": True}}
    assert of(nested)[0].num_params == PRESETS["gemma2-9b"].num_params
    with pytest.raises(SpecError, match="tie_word_embeddings = False outside 'text_config' and means True inside it"):
        of(nested, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN2_7B, {"hidden_size": GONE}, "lacks 'hidden_size'; add it as a whole number"),
        (GEMMA2_9B, {"vocab_size": None}, "lacks 'vocab_size'"),
        (MIXTRAL_8X7B, {"intermediate_size": "14336"}, "intermediate_size = '14336'; it must be a whole number"),
        (GEMMA2_9B, {"head_dim": 0}, "head_dim = 0; it must be a whole number from 1 to 1e9"),
        (GEMMA2_9B, {"head_dim": 255}, "must be even"),
        (GEMMA2_9B, {"num_key_value_heads": None}, "num_key_value_heads = null; Gemma-2 needs a whole number"),
        (GEMMA2_9B, {"hidden_activation": "silu"}, "hidden_activation = 'silu'; supported are gelu_pytorch_tanh"),
        (GEMMA2_9B, {"final_logit_softcapping": -1}, "final_logit_softcapping = -1; it must be a positive number"),
        (QWEN2_7B, {"num_key_value_heads": GONE}, r"28 attention heads and 32 key-value heads"),
        (QWEN2_7B, {"vocab_size": 10**15}, "vocab_size = 1000000000000000; it must be"),
        (QWEN2_7B, {"vocab_size": 1e15}, r"vocab_size = 1000000000000000\.0; it must be"),
        (QWEN2_7B, {"vocab_size": -3}, "vocab_size = -3"),
        (QWEN2_7B, {"num_local_experts": 8}, "experts and cross-attention are not supported in a Qwen2 model"),
        (QWEN2_7B, {"model_type": "qwen2_moe"}, "supported are gpt2, llama, mistral, qwen2, gemma2, mixtral, and"),
        (QWEN2_7B, {"model_type": "x" * 5000}, r"model_type 'x{59}\.\.\.; supported"),
        (MIXTRAL_8X7B, {"num_experts": 4}, "num_local_experts = 8 and num_experts = 4; they are one number"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "8 experts a block and 9 for a token"),
        (MIXTRAL_8X7B, {"num_local_experts": 10**6}, r"32,000,000 in all; there must be at most 65,536"),
        (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts = 0"),
        (MIXTRAL_8X7B, {"vision_config": {"a": 1}}, "'vision_config', whose parameters are not counted"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_used_is_one_sentence(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        of(config, **changes)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": NaN}', "has NaN in it, which is no number in JSON"),
        ('{"a": [{"b": -Infinity}]}', "has -Infinity in it"),
        ('{"model_type": "llama", "vocab_size": 3, "vocab_size": 4}', "has the field 'vocab_size' twice in one object"),
        ('{"text_config": {"a": 1, "a": 1}}', "has the field 'a' twice"),
        ('\ufeff{"model_type": "llama"}', "begins with a byte order mark"),
        ("[1, 2]", "is a JSON list; it must be an object"),
        ("null", "is a JSON NoneType"),
        ("", "is not valid JSON"),
        ("{'model_type': 'llama'}", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a":' * 100_000, "is not valid JSON"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "is not valid JSON"),
        ('{"a": "\ud800"}', "has model_type None"),
        ('{"a": "' + "x" * MAX_CONFIG_NBYTES + '"}', "holds 1,048,585 bytes; a config.json is at most 1,048,576"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_config_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        config_from_text(text, "m")
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_a_huge_sparse_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as sparse:
        sparse.truncate(200 * 10**6)
    with pytest.raises(SpecError, match=r"holds 200,000,000 bytes; .* Is it a weights file"):
        read_config(file)


@pytest.mark.parametrize("content", [b'{"model_type": "\xff"}', '{"model_type": "llama"}'.encode("utf-16")])
def test_a_file_that_is_not_utf_8(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(SpecError, match="cannot be read as a text file"):
        read_config(file)


def test_a_file_with_a_mark_says_how_to_save_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(json.dumps(QWEN2_7B).encode("utf-8-sig"))
    with pytest.raises(SpecError, match="begins with a byte order mark, which JSON does not have; save it as UTF-8"):
        read_config(file)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path / "config.json", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(SpecError, match="cannot be read as a text file"):
            read_config(path)


def test_a_file_gives_its_notes(tmp_path: Path) -> None:
    (tmp_path / "my-gemma").mkdir()
    file = tmp_path / "my-gemma" / "config.json"
    file.write_text(json.dumps(GEMMA2_9B))
    model, notes = read_config_notes(file)
    assert (model.name, model.family, len(notes)) == ("my-gemma", Family.GEMMA2, 1)
    assert read_config(file) == model


def test_a_pasted_text_needs_no_name() -> None:
    assert config_from_text(json.dumps(QWEN2_7B)).model.name == "config"
    assert config_from_text(json.dumps(QWEN2_7B), "  ").model.name == "config"
