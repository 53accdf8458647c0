"""A model as named shapes: presets, Hugging Face config.json files, a bare parameter count.

Nothing here allocates a parameter; `cluster.model` builds the runnable module from the same names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod

from zeroviz.errors import SpecError

# Each block is a list of named shapes; the deepest models published have some two hundred.
MAX_LAYERS = 4096


class Family(Enum):
    """Which architecture the shapes describe."""

    GPT2 = "gpt2"
    """LayerNorm with bias, GELU, learned positions, fused query-key-value projection."""
    LLAMA = "llama"
    """RMSNorm, SwiGLU, rotary positions, grouped-query attention. Mistral's shapes are the same."""
    BARE = "bare"
    """Only a parameter count: no layers, no activations, arithmetic only."""


class SublayerKind(Enum):
    """What a sublayer computes; the chain of sublayers is the whole forward pass in order."""

    EMBED = "embed"
    ATTENTION = "attn"
    MLP = "mlp"
    HEAD = "head"
    BARE = "parameters"


@dataclass(frozen=True, slots=True)
class NamedShape:
    """One parameter: its dotted name and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Sublayer:
    """One link of the forward chain: a residual branch with its norm, the embedding, or the head with its norm.

    `block` is the transformer block it belongs to, None for the embedding and the head. A parameter that two
    sublayers share (a tied embedding) is listed in both.
    """

    name: str
    kind: SublayerKind
    block: int | None
    params: tuple[NamedShape, ...]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that fix every parameter's shape. Lengths are element counts.

    `positions` is the longest sequence; for the Llama family it bounds nothing in memory.
    `epsilon` and `rope_theta` change values, never bytes.
    """

    name: str
    family: Family
    vocab: int = 0
    hidden: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    positions: int = 0
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    epsilon: float = 1e-5
    rope_theta: float = 10000.0
    bare_num_params: int = 0

    def __post_init__(self) -> None:
        if self.family is Family.BARE:
            if self.bare_num_params < 1:
                raise SpecError(f"The parameter count is {self.bare_num_params}; it must be at least 1.")
            return
        for field in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "positions"):
            if getattr(self, field) < 1:
                raise SpecError(f"Model {self.name!r} has {field} = {getattr(self, field)}; it must be at least 1.")
        if self.layers > MAX_LAYERS:
            raise SpecError(f"Model {self.name!r} has layers = {self.layers}; it must be at most {MAX_LAYERS:,}.")
        if self.heads % self.kv_heads:
            raise SpecError(
                f"Model {self.name!r} has {self.heads} attention heads and {self.kv_heads} key-value heads; "
                f"the second must divide the first ({self.heads} % {self.kv_heads} = {self.heads % self.kv_heads})."
            )
        if self.family is Family.GPT2 and self.heads * self.head_dim != self.hidden:
            raise SpecError(
                f"Model {self.name!r} has hidden = {self.hidden} and {self.heads} heads; a GPT-2 model needs hidden "
                f"divisible by heads ({self.hidden} % {self.heads} = {self.hidden % self.heads})."
            )
        if self.family is Family.LLAMA and self.head_dim % 2:
            raise SpecError(
                f"Model {self.name!r} has head_dim = {self.head_dim}; rotary positions turn pairs, so it must be even."
            )

    @cached_property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """The forward chain: embedding, then (attention, MLP) per block, then the head."""
        if self.family is Family.BARE:
            shape = NamedShape("parameters", (self.bare_num_params,))
            return (Sublayer("parameters", SublayerKind.BARE, None, (shape,)),)
        return _gpt2_sublayers(self) if self.family is Family.GPT2 else _llama_sublayers(self)

    @cached_property
    def params(self) -> tuple[NamedShape, ...]:
        """Every parameter once, in the order of first use; a tied embedding counts once."""
        seen: dict[str, NamedShape] = {}
        for sublayer in self.sublayers:
            for shape in sublayer.params:
                seen.setdefault(shape.name, shape)
        return tuple(seen.values())

    @cached_property
    def num_params(self) -> int:
        return sum(shape.numel for shape in self.params)


def _linear(name: str, num_out: int, num_in: int, bias: bool) -> tuple[NamedShape, ...]:
    weight = NamedShape(f"{name}.weight", (num_out, num_in))
    return (weight, NamedShape(f"{name}.bias", (num_out,))) if bias else (weight,)


def _gpt2_sublayers(m: ModelShape) -> tuple[Sublayer, ...]:
    """Names as in the released GPT-2; weights are (out, in), as torch's Linear keeps them."""

    def norm(name: str) -> tuple[NamedShape, ...]:
        return (NamedShape(f"{name}.weight", (m.hidden,)), NamedShape(f"{name}.bias", (m.hidden,)))

    token = NamedShape("wte.weight", (m.vocab, m.hidden))
    chain = [Sublayer("embed", SublayerKind.EMBED, None, (token, NamedShape("wpe.weight", (m.positions, m.hidden))))]
    for i in range(m.layers):
        attention = (
            *norm(f"h.{i}.ln_1"),
            *_linear(f"h.{i}.attn.c_attn", 3 * m.hidden, m.hidden, m.attention_bias),
            *_linear(f"h.{i}.attn.c_proj", m.hidden, m.hidden, m.attention_bias),
        )
        mlp = (
            *norm(f"h.{i}.ln_2"),
            *_linear(f"h.{i}.mlp.c_fc", m.ffn, m.hidden, m.mlp_bias),
            *_linear(f"h.{i}.mlp.c_proj", m.hidden, m.ffn, m.mlp_bias),
        )
        chain.append(Sublayer(f"block {i} attn", SublayerKind.ATTENTION, i, attention))
        chain.append(Sublayer(f"block {i} mlp", SublayerKind.MLP, i, mlp))
    output = token if m.tied else NamedShape("lm_head.weight", (m.vocab, m.hidden))
    chain.append(Sublayer("head", SublayerKind.HEAD, None, (*norm("ln_f"), output)))
    return tuple(chain)


def _llama_sublayers(m: ModelShape) -> tuple[Sublayer, ...]:
    """Names as in the released Llama checkpoints, without the leading `model.`."""
    num_query, num_kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    token = NamedShape("embed_tokens.weight", (m.vocab, m.hidden))
    chain = [Sublayer("embed", SublayerKind.EMBED, None, (token,))]
    for i in range(m.layers):
        attention = (
            NamedShape(f"layers.{i}.input_layernorm.weight", (m.hidden,)),
            *_linear(f"layers.{i}.self_attn.q_proj", num_query, m.hidden, m.attention_bias),
            *_linear(f"layers.{i}.self_attn.k_proj", num_kv, m.hidden, m.attention_bias),
            *_linear(f"layers.{i}.self_attn.v_proj", num_kv, m.hidden, m.attention_bias),
            *_linear(f"layers.{i}.self_attn.o_proj", m.hidden, num_query, m.attention_bias),
        )
        mlp = (
            NamedShape(f"layers.{i}.post_attention_layernorm.weight", (m.hidden,)),
            *_linear(f"layers.{i}.mlp.gate_proj", m.ffn, m.hidden, m.mlp_bias),
            *_linear(f"layers.{i}.mlp.up_proj", m.ffn, m.hidden, m.mlp_bias),
            *_linear(f"layers.{i}.mlp.down_proj", m.hidden, m.ffn, m.mlp_bias),
        )
        chain.append(Sublayer(f"block {i} attn", SublayerKind.ATTENTION, i, attention))
        chain.append(Sublayer(f"block {i} mlp", SublayerKind.MLP, i, mlp))
    output = token if m.tied else NamedShape("lm_head.weight", (m.vocab, m.hidden))
    chain.append(Sublayer("head", SublayerKind.HEAD, None, (NamedShape("norm.weight", (m.hidden,)), output)))
    return tuple(chain)


def bare(num_params: int) -> ModelShape:
    """A model known only by its parameter count."""
    plural = "s" if num_params > 1 else ""
    return ModelShape(name=f"{num_params:,} parameter{plural}", family=Family.BARE, bare_num_params=num_params)


def _gpt2(name: str, hidden: int, layers: int, heads: int, **changes: int) -> ModelShape:
    sizes = {"vocab": 50257, "ffn": 4 * hidden, "positions": 1024, **changes}
    return ModelShape(
        name=name,
        family=Family.GPT2,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        tied=True,
        attention_bias=True,
        mlp_bias=True,
        **sizes,
    )


def _llama(
    name: str,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    positions: int,
    head_dim: int | None = None,
) -> ModelShape:
    return ModelShape(
        name=name,
        family=Family.LLAMA,
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        ffn=ffn,
        positions=positions,
    )


# The two tiny models are uneven on purpose: no block's and no root unit's numel is divisible by 2, 3 or 4
# (tests/pure/test_models.py shows it), so padding is met at the first toggle and not in production.
PRESETS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        _gpt2("tiny", 55, 3, 5, vocab=257, ffn=222, positions=130),
        _llama("tiny-llama", 257, 47, 3, 3, 1, 119, 512, head_dim=10),
        # A few million parameters, for measuring: steps of a tenth of a second, in which arithmetic weighs.
        replace(_gpt2("small", 256, 4, 4, vocab=1024), tied=False),
        _gpt2("gpt2", 768, 12, 12),
        _gpt2("gpt2-medium", 1024, 24, 16),
        _gpt2("gpt2-large", 1280, 36, 20),
        _gpt2("gpt2-xl", 1600, 48, 25),
        _llama("llama2-7b", 32000, 4096, 32, 32, 32, 11008, 4096),
        _llama("llama3-8b", 128256, 4096, 32, 32, 8, 14336, 8192),
        _llama("llama3-70b", 128256, 8192, 80, 64, 8, 28672, 8192),
        replace(_llama("llama3.2-1b", 128256, 2048, 16, 32, 8, 8192, 131072), tied=True, rope_theta=500000.0),
        _llama("mistral-7b-v0.1", 32000, 4096, 32, 32, 8, 14336, 32768),
    )
}
