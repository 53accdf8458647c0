"""Which fields of a config.json fix a family's shapes, and what a family takes where they are missing.

Defaults are those of Hugging Face transformers, configuration_gpt2.py, configuration_llama.py and so on; which layers
have biases is from the modeling files beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zeroviz.errors import SpecError
from zeroviz.hf_config_fields import Fields
from zeroviz.models import Family, ModelShape

_GPT2_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu")
_SILU = ("silu", "swish")
_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu")


_GPT2_ALIASES = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}  # fmt: skip


def _gpt2(fields: Fields) -> ModelShape:
    for other, key in _GPT2_ALIASES.items():
        fields.same(key, other)
    hidden, heads = fields.size("n_embd"), fields.size("n_head")
    vocab, layers = fields.size("vocab_size"), fields.size("n_layer")
    fields.one_of("activation_function", _GPT2_ACTIVATIONS, "gelu_new")
    return ModelShape(
        name=fields.name,
        family=Family.GPT2,
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=fields.quotient("n_embd", "n_head", (hidden, heads)),
        ffn=fields.count("n_inner", 4 * hidden, "4 x n_embd"),
        positions=fields.count("n_positions", 1024),
        tied=fields.flag("tie_word_embeddings", True),
        attention_bias=True,
        mlp_bias=True,
        epsilon=fields.real("layer_norm_epsilon", 1e-5),
    )


def _llama(fields: Fields) -> ModelShape:
    return ModelShape(
        **_decoder(fields, kv_heads=None, positions=2048),
        family=Family.LLAMA,
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(fields: Fields) -> ModelShape:
    return ModelShape(
        **_decoder(fields, kv_heads=8, positions=32 * 4096),
        family=Family.LLAMA,
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _qwen2(fields: Fields) -> ModelShape:
    """Biases on query, key and value, none elsewhere, whatever the config says of them."""
    return ModelShape(**_decoder(fields, kv_heads=32, positions=32768), family=Family.LLAMA, qkv_bias=True)


def _gemma2(fields: Fields) -> ModelShape:
    """Heads are 256 wide unless the config says otherwise, not hidden / heads."""
    caps = not fields.is_null("final_logit_softcapping")
    if fields.has("final_logit_softcapping"):
        fields.real("final_logit_softcapping", 30.0)
    elif caps:
        fields.fill("final_logit_softcapping", "30")
    return ModelShape(
        **_decoder(
            fields, kv_heads=4, positions=8192, head_dim=256, tied=True, act=("hidden_activation", _GELU, _GELU[0])
        ),
        family=Family.GEMMA2,
        attention_bias=fields.flag("attention_bias", False),
        caps_logits=caps,
    )


def _mixtral(fields: Fields) -> ModelShape:
    """Every expert counts, whether a token goes through it or not."""
    experts, other = fields.value("num_local_experts"), fields.value("num_experts")
    key = "num_experts" if experts is None and other is not None else "num_local_experts"
    fields.same("num_local_experts", "num_experts")
    return ModelShape(
        **_decoder(fields, kv_heads=8, positions=32 * 4096, epsilon=1e-5, theta=1e6),
        family=Family.MIXTRAL,
        experts=fields.count(key, 8),
        experts_per_token=fields.count("num_experts_per_tok", 2),
    )


def _decoder(
    fields: Fields,
    *,
    kv_heads: int | None,
    positions: int,
    head_dim: int | None = None,
    tied: bool = False,
    act: tuple[str, tuple[str, ...], str] = ("hidden_act", _SILU, "silu"),
    epsilon: float = 1e-6,
    theta: float = 1e4,
) -> dict[str, Any]:
    """What all families with rotary positions have in common; the other arguments are a family's defaults. None: the
    number of heads for `kv_heads`, the quotient for `head_dim`."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    vocab, layers, ffn = fields.size("vocab_size"), fields.size("num_hidden_layers"), fields.size("intermediate_size")
    fields.one_of(*act)
    return {
        "name": fields.name,
        "vocab": vocab,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": _kv_heads(fields, heads, kv_heads),
        "head_dim": _head_dim(fields, hidden, heads, head_dim),
        "ffn": ffn,
        "positions": fields.positions("max_position_embeddings", positions),
        "tied": fields.flag("tie_word_embeddings", tied),
        "epsilon": fields.real("rms_norm_eps", epsilon),
        "rope_theta": fields.real("rope_theta", theta, inside="rope_parameters"),
    }


def _kv_heads(fields: Fields, heads: int, default: int | None) -> int:
    """A default that is a number is that of a field that is not there; null means one key-value head a head. Gemma-2
    knows no null."""
    key = "num_key_value_heads"
    if fields.is_null(key) and fields.family == Family.GEMMA2.label:
        raise SpecError(f"The config of {fields.name!r} has {key} = null; Gemma-2 needs a whole number there.")
    if default is None or fields.is_null(key):
        return fields.count(key, heads, "as many as num_attention_heads")
    return fields.count(key, default)


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    """An explicit head_dim need not be hidden / heads; only where that is taken must it come out whole."""
    if default is not None or fields.has("head_dim"):
        return fields.count("head_dim", default or 0)
    quotient = fields.quotient("hidden_size", "num_attention_heads", (hidden, heads))
    return fields.count("head_dim", quotient, "hidden_size / num_attention_heads")


READERS: Mapping[str, tuple[str, Callable[[Fields], ModelShape]]] = {
    "gpt2": ("GPT-2", _gpt2),
    "llama": ("Llama", _llama),
    "mistral": ("Mistral", _mistral),
    "qwen2": ("Qwen2", _qwen2),
    "gemma2": ("Gemma-2", _gemma2),
    "mixtral": ("Mixtral", _mixtral),
}
"""By `model_type`: the family as its authors write it, and what reads its fields."""

UNREAD: Mapping[str, tuple[str, ...]] = {
    "gpt2": (),
    "llama": (),
    "mistral": (),
    "qwen2": ("attention_bias", "mlp_bias"),
    "gemma2": ("mlp_bias",),
    "mixtral": ("attention_bias", "mlp_bias"),
}
"""Fields of other families that this one's code does not look at, though they would change shapes."""
