"""Read a Hugging Face config.json of the GPT-2 and Llama families. Only JSON is parsed; nothing in it is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zeroviz.errors import SpecError
from zeroviz.models import Family, ModelShape

MAX_CONFIG_NBYTES = 2**20
_LLAMA_TYPES = ("llama", "mistral")
_SUPPORTED = "gpt2, llama, mistral"
_GPT2_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh")
_LLAMA_ACTIVATIONS = ("silu", "swish")


def read_config(path: Path) -> ModelShape:
    """The model of a config.json file. Raises SpecError with one sentence for whatever is wrong with it."""
    try:
        nbytes = path.stat().st_size
        if nbytes > MAX_CONFIG_NBYTES:
            raise SpecError(
                f"{path} holds {nbytes:,} bytes; a config.json is at most {MAX_CONFIG_NBYTES:,}. Is it a weights file?"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist; give a preset's name or the path of a config.json.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read as a text file ({error}); give the path of a config.json.") from None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more digits than Python reads
        raise SpecError(f"{path} is not valid JSON ({error}); give the path of a config.json.") from None
    return model_from_config(config, name=_name(path))


def _name(path: Path) -> str:
    """A checkpoint's folder is named after the model; a config under another file name is named after that."""
    return path.resolve().parent.name or "config" if path.name == "config.json" else path.stem


def model_from_config(config: Any, *, name: str) -> ModelShape:
    """A ModelShape from a parsed config.json.

    Sizes must be there. Other missing fields take the family's default: num_key_value_heads is num_attention_heads (8
    for Mistral, where only null means that), head_dim is hidden_size / num_attention_heads (which must be whole),
    tie_word_embeddings is true for GPT-2 and false for Llama and Mistral. A config with a `text_config` is that one's.
    Raises SpecError for a missing, wrong-typed or impossible field, for another family, for parts whose parameters
    would not be counted, and where the two levels of a nested config contradict each other.
    (Defaults: configuration_llama.py, configuration_mistral.py and configuration_gpt2.py of Hugging Face transformers.)
    """
    if not isinstance(config, dict):
        raise SpecError(f"The config of {name!r} is a JSON {type(config).__name__}; it must be an object with fields.")
    for part in ("vision_config", "audio_config"):
        if config.get(part):
            raise SpecError(
                f"The config of {name!r} has a {part!r}, whose parameters are not counted here; give the part "
                "'text_config' alone as a config.json."
            )
    outside: dict[str, Any] = {}
    if isinstance(config.get("text_config"), dict):
        config, outside = config["text_config"], config
    for key in ("num_local_experts", "num_experts", "add_cross_attention"):
        if config.get(key):
            raise SpecError(
                f"The config of {name!r} has {key} = {config[key]!r}; experts and cross-attention are not supported."
            )
    model_type = config.get("model_type")
    fields = _Fields(config, name)
    if model_type == "gpt2":
        model = _gpt2(fields)
    elif isinstance(model_type, str) and model_type in _LLAMA_TYPES:
        model = _llama(fields)
    else:
        raise SpecError(f"The config of {name!r} has model_type {model_type!r}; supported are {_SUPPORTED}.")
    ties = outside.get("tie_word_embeddings")
    if ties is not None and ties is not model.tied:
        # Which of the two a loader follows depends on its version, and a whole embedding depends on it.
        raise SpecError(
            f"The config of {name!r} has tie_word_embeddings = {ties!r} outside 'text_config' and means {model.tied} "
            "inside it; set it in 'text_config'."
        )
    return model


class _Fields:
    """Typed access to a config's fields; each refusal names the field, its value and what is allowed."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self._config = config
        self.name = name or "config"
        self.is_mistral = config.get("model_type") == "mistral"

    def lacks(self, key: str) -> bool:
        """Whether the field is not there at all; null is there."""
        return key not in self._config

    def count(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None:
            if default is None:
                raise SpecError(f"The config of {self.name!r} lacks {key!r}; add it as a whole number of at least 1.")
            return default
        # bool is an int in Python; `"num_hidden_layers": true` is a mistake, not one layer.
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
            raise SpecError(
                f"The config of {self.name!r} has {key} = {value!r}; it must be a whole number from 1 to 1e9."
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(f"The config of {self.name!r} has {key} = {value!r}; it must be true or false.")
        return value

    def real(self, key: str, default: float) -> float:
        value = self._config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise SpecError(f"The config of {self.name!r} has {key} = {value!r}; it must be a positive number.")
        return float(value)

    def one_of(self, key: str, allowed: tuple[str, ...]) -> None:
        value = self._config.get(key, allowed[0])
        if value not in allowed:
            raise SpecError(f"The config of {self.name!r} has {key} = {value!r}; supported are {', '.join(allowed)}.")

    def quotient(self, numerator: str, denominator: str, values: tuple[int, int]) -> int:
        if values[0] % values[1]:
            raise SpecError(
                f"The config of {self.name!r} has {numerator} = {values[0]} and {denominator} = {values[1]}; "
                f"the second must divide the first ({values[0]} % {values[1]} = {values[0] % values[1]})."
            )
        return values[0] // values[1]


def _gpt2(fields: _Fields) -> ModelShape:
    fields.one_of("activation_function", _GPT2_ACTIVATIONS[1:] + _GPT2_ACTIVATIONS[:1])
    hidden, heads = fields.count("n_embd"), fields.count("n_head")
    return ModelShape(
        name=fields.name,
        family=Family.GPT2,
        vocab=fields.count("vocab_size"),
        hidden=hidden,
        layers=fields.count("n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=fields.quotient("n_embd", "n_head", (hidden, heads)),
        ffn=fields.count("n_inner", 4 * hidden),
        positions=fields.count("n_positions", 1024),
        tied=fields.flag("tie_word_embeddings", True),
        attention_bias=True,
        mlp_bias=True,
        epsilon=fields.real("layer_norm_epsilon", 1e-5),
    )


def _llama(fields: _Fields) -> ModelShape:
    fields.one_of("hidden_act", _LLAMA_ACTIVATIONS)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    # Mistral's 8 is the default of a field that is not there; null means one key-value head a head, as for Llama.
    kv_heads = 8 if fields.is_mistral and fields.lacks("num_key_value_heads") else heads
    # An explicit head_dim need not be hidden / heads; only the default must come out whole.
    head_dim = fields.count("head_dim", 0) or fields.quotient("hidden_size", "num_attention_heads", (hidden, heads))
    return ModelShape(
        name=fields.name,
        family=Family.LLAMA,
        vocab=fields.count("vocab_size"),
        hidden=hidden,
        layers=fields.count("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        ffn=fields.count("intermediate_size"),
        positions=fields.count("max_position_embeddings", 32 * 4096 if fields.is_mistral else 2048),
        tied=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        epsilon=fields.real("rms_norm_eps", 1e-6),
        rope_theta=fields.real("rope_theta", 10000.0),
    )
