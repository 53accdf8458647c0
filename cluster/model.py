"""The runnable causal transformer, sublayer by sublayer, from the named shapes of `zeroviz.models`.

Modules are built on the meta device: they have shapes and no storage, so a 70B model is built in milliseconds. An
executor puts views of its flat buffers into them (`SublayerModule.install`); `Reference` puts ordinary parameters.

What each sublayer keeps for backward is derived in `zeroviz.activations`. Two kernels are chosen on purpose:

- Attention runs the flash kernel, pinned on CPU: another one would save a (seq, seq) softmax and change the memory
  silently; this way it would raise. It takes grouped-query keys and values as they are (`enable_gqa`): they are not
  repeated per query head, neither in the saved tensors nor as a temporary.
- The loss is computed in fp32 whatever the recipe: `logits.float()` costs 4 bytes a logit in bf16 recipes.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cluster.text import Batch
from zeroviz.models import Family, ModelShape, NamedShape, Sublayer, SublayerKind

META = torch.device("meta")


class Layers(NamedTuple):
    """Which classes the sublayers with weights of two dimensions are made of."""

    linear: type[nn.Linear] = nn.Linear
    embedding: type[nn.Embedding] = nn.Embedding


TORCH = Layers()


class SublayerModule(nn.Module):
    """One link of the forward chain: `module(x, batch) -> x`, x being (batch, seq, hidden) in the compute dtype.

    slots: parameter name as in `Sublayer.params`, in that order -> (module that owns it, attribute).
    """

    slots: dict[str, tuple[nn.Module, str]]

    def bind(self, sublayer: Sublayer) -> None:
        """Name the parameters of the children, which were added in the order of `sublayer.params`."""
        found = [(owner, attribute) for owner in self.children() for attribute in dict(owner.named_parameters())]
        for shape, (owner, attribute) in zip(sublayer.params, found, strict=True):
            parameter = owner.get_parameter(attribute)
            if tuple(parameter.shape) != shape.shape or not shape.name.endswith(f".{attribute}"):
                raise RuntimeError(f"{sublayer.name}: {shape} was bound to {attribute} of shape {parameter.shape}.")
        self.slots = {shape.name: slot for shape, slot in zip(sublayer.params, found, strict=True)}

    def install(self, name: str, parameter: nn.Parameter) -> None:
        """Use `parameter` as the parameter called `name`."""
        owner, attribute = self.slots[name]
        setattr(owner, attribute, parameter)

    def __call__(self, x: Tensor | None, batch: Batch) -> Tensor:
        y: Tensor = super().__call__(x, batch)
        return y


class Embed(SublayerModule):
    """Token rows, plus position rows where positions are learned. Ignores x and reads batch.tokens."""

    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.token = layers.embedding(model.vocab, model.hidden)
        learned = model.family is Family.GPT2
        self.position = nn.Embedding(model.positions, model.hidden) if learned else None

    def forward(self, x: None, batch: Batch) -> Tensor:
        if self.position is None:
            rows: Tensor = self.token(batch.tokens)
            return rows
        # narrow and not [:seq]: the latter is skipped, and its backward with it, when seq is the table's length.
        positions = self.position.weight.narrow(0, 0, batch.tokens.shape[1])
        sum_of_rows: Tensor = self.token(batch.tokens) + positions
        return sum_of_rows


class GPT2Attention(SublayerModule):
    """x + c_proj(attention(c_attn(ln_1(x)))); query, key and value are three views of one (batch, seq, 3 hidden)."""

    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.ln_1 = _norm(model)
        self.c_attn = layers.linear(model.hidden, 3 * model.hidden, model.attention_bias)
        self.c_proj = layers.linear(model.hidden, model.hidden, model.attention_bias)
        self.heads = model.heads

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in self.c_attn(self.ln_1(x)).chunk(3, -1))
        branch: Tensor = self.c_proj(_causal_attention(query, key, value))
        return x + branch


class GPT2MLP(SublayerModule):
    """x + c_proj(gelu(c_fc(ln_2(x)))), with GPT-2's tanh form of GELU."""

    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.ln_2 = _norm(model)
        self.c_fc = layers.linear(model.hidden, model.ffn, model.mlp_bias)
        self.c_proj = layers.linear(model.ffn, model.hidden, model.mlp_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        branch: Tensor = self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return x + branch


class LlamaAttention(SublayerModule):
    """x + o_proj(attention(rotate(q_proj(h)), rotate(k_proj(h)), v_proj(h))) with h = input_layernorm(x)."""

    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        num_query, num_kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.input_layernorm = _norm(model)
        self.q_proj = layers.linear(model.hidden, num_query, model.has_qkv_bias)
        self.k_proj = layers.linear(model.hidden, num_kv, model.has_qkv_bias)
        self.v_proj = layers.linear(model.hidden, num_kv, model.has_qkv_bias)
        self.o_proj = layers.linear(num_query, model.hidden, model.attention_bias)
        self.heads, self.kv_heads = model.heads, model.kv_heads

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if batch.rotary is None:
            raise ValueError("This batch has no rotary tables; it was loaded for a model with learned positions.")
        h = self.input_layernorm(x)
        query = _rotate(self.q_proj(h).unflatten(-1, (self.heads, -1)), *batch.rotary)
        key = _rotate(self.k_proj(h).unflatten(-1, (self.kv_heads, -1)), *batch.rotary)
        value = self.v_proj(h).unflatten(-1, (self.kv_heads, -1))
        branch: Tensor = self.o_proj(_causal_attention(query, key, value))
        return x + branch


class LlamaMLP(SublayerModule):
    """x + down_proj(silu(gate_proj(h)) * up_proj(h)) with h = post_attention_layernorm(x)."""

    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.post_attention_layernorm = _norm(model)
        self.gate_proj = layers.linear(model.hidden, model.ffn, model.mlp_bias)
        self.up_proj = layers.linear(model.hidden, model.ffn, model.mlp_bias)
        self.down_proj = layers.linear(model.ffn, model.hidden, model.mlp_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        h = self.post_attention_layernorm(x)
        branch: Tensor = self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return x + branch


class Head(SublayerModule):
    """The loss: mean cross-entropy over this rank's tokens, a scalar in fp32."""

    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.norm = _norm(model)
        self.output = layers.linear(model.hidden, model.vocab, bias=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(self.output(self.norm(x)).float().flatten(0, 1), batch.targets.flatten())


def build_sublayer(sublayer: Sublayer, model: ModelShape, layers: Layers = TORCH) -> SublayerModule:
    """The module of one sublayer, on the meta device, with its parameters named."""
    kinds = {
        SublayerKind.EMBED: Embed,
        SublayerKind.ATTENTION: LlamaAttention if model.family is Family.LLAMA else GPT2Attention,
        SublayerKind.MLP: LlamaMLP if model.family is Family.LLAMA else GPT2MLP,
        SublayerKind.HEAD: Head,
    }
    if sublayer.kind not in kinds:
        raise ValueError(f"{model.name} is a bare parameter count; it has no sublayers to run.")
    if not model.family.runs:
        raise ValueError(f"{model.name} is a {model.family.label} model; its layers are not built here.")
    with META:
        module: SublayerModule = kinds[sublayer.kind](model, layers)
    module.bind(sublayer)
    return module


def initial_value(model: ModelShape, shape: NamedShape, seed: int) -> Tensor:
    """The parameter's starting value, fp32, of (name, seed) alone: any rank can make any parameter by itself.

    As in GPT-2: norms 1, biases 0, weights normal(0, 0.02); the projections that end a residual branch have their
    deviation divided by sqrt(2 * layers), the number of branches that add up.
    """
    if shape.name.endswith(".bias"):
        return torch.zeros(shape.shape)
    if len(shape.shape) == 1:
        return torch.ones(shape.shape)
    ends_branch = shape.name.endswith(("c_proj.weight", "o_proj.weight", "down_proj.weight"))
    deviation = 0.02 / sqrt(2 * model.layers) if ends_branch else 0.02
    digest = hashlib.sha256(f"{seed} {shape.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape.shape).normal_(0.0, deviation, generator=generator)


class Reference(nn.Module):
    """The whole model with ordinary parameters: `forward(batch) -> loss`, the oracle of parity tests.

    `named_parameters` gives the names of `ModelShape.params`, in that order; a tied embedding is one parameter.
    """

    def __init__(self, model: ModelShape, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        # A tuple hides the sublayers from nn.Module; the tree below holds their parts under the published names.
        self.chain = tuple(build_sublayer(sublayer, model) for sublayer in model.sublayers)
        parameters = {shape.name: nn.Parameter(initial_value(model, shape, seed).to(dtype)) for shape in model.params}
        for sublayer in self.chain:
            for name, (owner, _) in sublayer.slots.items():
                sublayer.install(name, parameters[name])
                _graft(self, name.split(".")[:-1], owner)

    def forward(self, batch: Batch) -> Tensor:
        x = None
        for sublayer in self.chain:
            x = sublayer(x, batch)
        assert x is not None
        return x

    def __call__(self, batch: Batch) -> Tensor:
        loss: Tensor = super().__call__(batch)
        return loss


def _graft(tree: nn.Module, path: list[str], leaf: nn.Module) -> None:
    """Make `leaf` reachable as tree.path; what is there already, as for a tied head, stays."""
    for part in path[:-1]:
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        tree = tree.get_submodule(part)
    if path[-1] not in tree._modules:
        tree.add_module(path[-1], leaf)


def _norm(model: ModelShape) -> nn.Module:
    """LayerNorm with bias, or RMSNorm; (..., hidden) to the same."""
    kind = nn.RMSNorm if model.family is Family.LLAMA else nn.LayerNorm
    return kind(model.hidden, eps=model.epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. x: (batch, seq, heads, head_dim); the pairs are (i, i + head_dim / 2), as in Llama."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # (seq, 1, head_dim / 2): the same for every head
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(batch, seq, heads, head_dim) with fewer heads in key and value if grouped -> (batch, seq, heads * head_dim)."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if query.device.type == "cpu" else nullcontext():
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=query.shape[2] != key.shape[2],
        )
    return mixed.transpose(1, 2).flatten(2)
