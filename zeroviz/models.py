"""A model as named shapes: presets, Hugging Face config.json files, a bare parameter count.

Nothing here allocates a parameter; `cluster.model` builds the runnable module from the same names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from zeroviz.errors import SpecError
from zeroviz.members import Members

# Each block is a list of named shapes; the deepest models published have some two hundred.
MAX_LAYERS = 4096
MAX_EXPERTS = 2**16
"""Of all blocks together: each expert is three named shapes. The largest models published have some 23,000."""


class Family(Members):
    """Which architecture the shapes describe."""

    GPT2 = "gpt2"
    """LayerNorm with bias, GELU, learned positions, fused query-key-value projection."""
    LLAMA = "llama"
    """RMSNorm, SwiGLU, rotary positions, grouped-query attention. Mistral's shapes are the same; Qwen2's have biases on
    query, key and value (`ModelShape.qkv_bias`)."""
    GEMMA2 = "gemma2"
    """As Llama with GeGLU, a norm before and after each branch, and capped logits. Arithmetic only."""
    MIXTRAL = "mixtral"
    """As Llama with a router and experts in place of the MLP. Arithmetic only."""
    BARE = "bare"
    """Only a parameter count: no layers, no activations, arithmetic only."""

    @property
    def label(self) -> str:
        """As its authors write it."""
        return _LABELS[self]

    @property
    def runs(self) -> bool:
        """Whether `cluster.model` has its layers; the others are worked out and not run."""
        return self in (Family.GPT2, Family.LLAMA)

    @property
    def is_rotary(self) -> bool:
        """Whether it has RMSNorm and rotary positions: all but GPT-2, as far as layers are known."""
        return self in (Family.LLAMA, Family.GEMMA2, Family.MIXTRAL)


_LABELS = {
    Family.GPT2: "GPT-2",
    Family.LLAMA: "Llama",
    Family.GEMMA2: "Gemma-2",
    Family.MIXTRAL: "Mixtral",
    Family.BARE: "a bare count",
}


class SublayerKind(Members):
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

    `positions` is the longest sequence; where positions are rotary it bounds nothing in memory.
    `attention_bias`: biases on query, key, value and output. `qkv_bias`: on the first three alone, as in Qwen2.
    `experts`, `experts_per_token`: how many MLPs a block of the Mixtral family has, and how many a token goes through.
    `caps_logits`: the head ends in cap * tanh(logits / cap), as in Gemma-2.
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
    qkv_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    caps_logits: bool = False
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
        if self.family.is_rotary and self.head_dim % 2:
            raise SpecError(
                f"Model {self.name!r} has head_dim = {self.head_dim}; rotary positions turn pairs, so it must be even."
            )
        self._check_family()

    def _check_family(self) -> None:
        """What only some families have."""
        if self.qkv_bias and (self.attention_bias or self.family is not Family.LLAMA):
            raise SpecError(
                f"Model {self.name!r} has qkv_bias; it is for the Llama family, and attention_bias has those three too."
            )
        if self.caps_logits and self.family is not Family.GEMMA2:
            raise SpecError(f"Model {self.name!r} has caps_logits; only the Gemma-2 family caps its logits.")
        if self.family is not Family.MIXTRAL:
            if self.experts or self.experts_per_token:
                raise SpecError(f"Model {self.name!r} has experts = {self.experts}; only the Mixtral family has some.")
            return
        if self.mlp_bias:
            raise SpecError(f"Model {self.name!r} has mlp_bias; the experts of the Mixtral family have no biases.")
        if not 1 <= self.experts_per_token <= self.experts:
            raise SpecError(
                f"Model {self.name!r} has {self.experts} experts a block and {self.experts_per_token} for a token; "
                "there must be at least one for a token, and no more than a block has."
            )
        if self.layers * self.experts > MAX_EXPERTS:
            raise SpecError(
                f"Model {self.name!r} has {self.layers} blocks of {self.experts} experts, "
                f"{self.layers * self.experts:,} in all; there must be at most {MAX_EXPERTS:,}."
            )

    @property
    def has_qkv_bias(self) -> bool:
        """Whether query, key and value have biases; the output has one if `attention_bias`."""
        return self.attention_bias or self.qkv_bias

    @cached_property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """The forward chain: embedding, then (attention, MLP) per block, then the head."""
        if self.family is Family.BARE:
            shape = NamedShape("parameters", (self.bare_num_params,))
            return (Sublayer("parameters", SublayerKind.BARE, None, (shape,)),)
        return _gpt2_sublayers(self) if self.family is Family.GPT2 else _rotary_sublayers(self)

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


def _rotary_sublayers(m: ModelShape) -> tuple[Sublayer, ...]:
    """Names as in the released Llama, Qwen2, Gemma-2 and Mixtral checkpoints, without the leading `model.`."""
    token = NamedShape("embed_tokens.weight", (m.vocab, m.hidden))
    chain = [Sublayer("embed", SublayerKind.EMBED, None, (token,))]
    for i in range(m.layers):
        attention, mlp = (_gemma2_block if m.family is Family.GEMMA2 else _llama_block)(m, f"layers.{i}")
        chain.append(Sublayer(f"block {i} attn", SublayerKind.ATTENTION, i, attention))
        chain.append(Sublayer(f"block {i} mlp", SublayerKind.MLP, i, mlp))
    output = token if m.tied else NamedShape("lm_head.weight", (m.vocab, m.hidden))
    chain.append(Sublayer("head", SublayerKind.HEAD, None, (NamedShape("norm.weight", (m.hidden,)), output)))
    return tuple(chain)


_Branches = tuple[tuple[NamedShape, ...], tuple[NamedShape, ...]]


def _llama_block(m: ModelShape, block: str) -> _Branches:
    """A norm before each branch; Mixtral's second branch has a router and experts."""
    second = _experts if m.family is Family.MIXTRAL else _gated
    return (
        (NamedShape(f"{block}.input_layernorm.weight", (m.hidden,)), *_projections(m, block)),
        (NamedShape(f"{block}.post_attention_layernorm.weight", (m.hidden,)), *second(m, block)),
    )


def _gemma2_block(m: ModelShape, block: str) -> _Branches:
    """Two norms a branch, before and after. What Llama calls post_attention_layernorm comes before the MLP; here it
    ends the attention's branch, as its name says."""

    def norm(name: str) -> NamedShape:
        return NamedShape(f"{block}.{name}_layernorm.weight", (m.hidden,))

    return (
        (norm("input"), *_projections(m, block), norm("post_attention")),
        (norm("pre_feedforward"), *_gated(m, block), norm("post_feedforward")),
    )


def _projections(m: ModelShape, block: str) -> tuple[NamedShape, ...]:
    num_query, num_kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    return (
        *_linear(f"{block}.self_attn.q_proj", num_query, m.hidden, m.has_qkv_bias),
        *_linear(f"{block}.self_attn.k_proj", num_kv, m.hidden, m.has_qkv_bias),
        *_linear(f"{block}.self_attn.v_proj", num_kv, m.hidden, m.has_qkv_bias),
        *_linear(f"{block}.self_attn.o_proj", m.hidden, num_query, m.attention_bias),
    )


def _gated(m: ModelShape, block: str) -> tuple[NamedShape, ...]:
    return (
        *_linear(f"{block}.mlp.gate_proj", m.ffn, m.hidden, m.mlp_bias),
        *_linear(f"{block}.mlp.up_proj", m.ffn, m.hidden, m.mlp_bias),
        *_linear(f"{block}.mlp.down_proj", m.hidden, m.ffn, m.mlp_bias),
    )


def _experts(m: ModelShape, block: str) -> tuple[NamedShape, ...]:
    """The router, then of each expert the gate w1, the output w2 and the input w3: the names' order, not the use's."""
    moe = f"{block}.block_sparse_moe"
    shapes = [*_linear(f"{moe}.gate", m.experts, m.hidden, False)]
    for expert in range(m.experts):
        for name, num_out, num_in in (("w1", m.ffn, m.hidden), ("w2", m.hidden, m.ffn), ("w3", m.ffn, m.hidden)):
            shapes += _linear(f"{moe}.experts.{expert}.{name}", num_out, num_in, False)
    return tuple(shapes)


def bare(num_params: int) -> ModelShape:
    """A model known only by its parameter count."""
    plural = "s" if num_params > 1 else ""
    return ModelShape(name=f"{num_params:,} parameter{plural}", family=Family.BARE, bare_num_params=num_params)


def _gpt2(
    name: str, hidden: int, layers: int, heads: int, *, vocab: int = 50257, ffn: int = 0, positions: int = 1024
) -> ModelShape:
    """ffn: 4 hidden if it is not given."""
    return ModelShape(
        name=name,
        family=Family.GPT2,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=vocab,
        ffn=ffn or 4 * hidden,
        positions=positions,
        tied=True,
        attention_bias=True,
        mlp_bias=True,
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
        replace(
            _llama("qwen2-7b", 152064, 3584, 28, 28, 4, 18944, 131072), qkv_bias=True, epsilon=1e-6, rope_theta=1e6
        ),
        replace(
            _llama("gemma2-9b", 256000, 3584, 42, 16, 8, 14336, 8192, head_dim=256),
            family=Family.GEMMA2,
            tied=True,
            caps_logits=True,
            epsilon=1e-6,
        ),
        replace(
            _llama("mixtral-8x7b", 32000, 4096, 32, 32, 8, 14336, 32768),
            family=Family.MIXTRAL,
            experts=8,
            experts_per_token=2,
            rope_theta=1e6,
        ),
    )
}
