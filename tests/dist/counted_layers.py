"""Gemma-2's and Mixtral's sublayers out of torch's operators, for tests: nothing in `cluster` runs them.

They follow the released models (transformers, modeling_gemma2.py and modeling_mixtral.py), with the two choices that
[Note: counted] in zeroviz/sublayers_counted.py names. Attention is one fused kernel; it caps no scores here, since
torch has none that does on CPU, and one that did would keep the same: its inputs, its output and the logsumexp. And all
experts' rows are sorted once and taken as one batch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cluster.model import (
    META,
    Embed,
    Head,
    Layers,
    LlamaAttention,
    SublayerModule,
    _causal_attention,
    _rotate,
)
from cluster.own.layers import _add_product
from cluster.text import Batch
from zeroviz.models import Family, ModelShape, Sublayer, SublayerKind

CAP = 30.0


class OnePlusNorm(nn.Module):
    """Gemma-2's RMSNorm: multiplied by 1 + weight, in fp32."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(hidden)), eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps) * (1.0 + self.weight.float())
        return normed.type_as(x)


class GemmaEmbed(SublayerModule):
    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.token = layers.embedding(model.vocab, model.hidden)
        self.scale = sqrt(model.hidden)

    def forward(self, x: None, batch: Batch) -> Tensor:
        return self.token(batch.tokens) * self.scale


class GemmaAttention(SublayerModule):
    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        num_query, num_kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.before = OnePlusNorm(model.hidden, model.epsilon)
        self.q_proj = layers.linear(model.hidden, num_query, model.attention_bias)
        self.k_proj = layers.linear(model.hidden, num_kv, model.attention_bias)
        self.v_proj = layers.linear(model.hidden, num_kv, model.attention_bias)
        self.o_proj = layers.linear(num_query, model.hidden, model.attention_bias)
        self.after = OnePlusNorm(model.hidden, model.epsilon)
        self.head_dim = model.head_dim

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        assert batch.rotary is not None
        h = self.before(x)
        query = _rotate(self.q_proj(h).unflatten(-1, (-1, self.head_dim)), *batch.rotary)
        key = _rotate(self.k_proj(h).unflatten(-1, (-1, self.head_dim)), *batch.rotary)
        value = self.v_proj(h).unflatten(-1, (-1, self.head_dim))
        return x + self.after(self.o_proj(_causal_attention(query, key, value)))


class GemmaMLP(SublayerModule):
    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.before = OnePlusNorm(model.hidden, model.epsilon)
        self.gate_proj = layers.linear(model.hidden, model.ffn, model.mlp_bias)
        self.up_proj = layers.linear(model.hidden, model.ffn, model.mlp_bias)
        self.down_proj = layers.linear(model.ffn, model.hidden, model.mlp_bias)
        self.after = OnePlusNorm(model.hidden, model.epsilon)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        h = self.before(x)
        return x + self.after(self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h)))


class GemmaHead(SublayerModule):
    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.norm = OnePlusNorm(model.hidden, model.epsilon)
        self.output = layers.linear(model.hidden, model.vocab, bias=False)
        self.caps = model.caps_logits

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        # In one expression, so that nothing is held longer than an operator needs it.
        return F.cross_entropy(self._logits(self.norm(x)).float().flatten(0, 1), batch.targets.flatten())

    def _logits(self, h: Tensor) -> Tensor:
        return self.output(h).div(CAP).tanh().mul(CAP) if self.caps else self.output(h)


class _Grouped(torch.autograd.Function):
    """rows (num_rows, num_in), sorted by expert, `counts` rows of each; weights (num_out, num_in), one an expert.

    Gradients are added in place, as by the layers of cluster/own/layers.py.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        ctx.counts = counts
        y = rows.new_empty(len(rows), len(weights[0]))
        for part, mine, weight in zip(rows.split(counts), y.split(counts), weights, strict=True):
            torch.mm(part, weight.t(), out=mine)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        parts = list(zip(dy.split(ctx.counts), rows.split(ctx.counts), weights, strict=True))
        for mine, part, weight in parts:
            _add_product(weight.grad, mine.t(), part, is_first=False)
        dx = torch.empty_like(rows)
        for (mine, _, weight), place in zip(parts, dx.split(ctx.counts), strict=True):
            torch.mm(mine, weight, out=place)
        return dx, None, *(None for _ in weights)


class Experts(SublayerModule):
    def __init__(self, model: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden, eps=model.epsilon)
        self.gate = layers.linear(model.hidden, model.experts, bias=False)
        for expert in range(model.experts):
            self.add_module(f"{expert} w1", layers.linear(model.hidden, model.ffn, bias=False))
            self.add_module(f"{expert} w2", layers.linear(model.ffn, model.hidden, bias=False))
            self.add_module(f"{expert} w3", layers.linear(model.hidden, model.ffn, bias=False))
        self.num_experts, self.k = model.experts, model.experts_per_token

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        token, weight, counts = self._route(h)
        rows = h[token]
        product = F.silu(self._each("w1", rows, counts)) * self._each("w3", rows, counts)
        out = self._each("w2", product, counts)
        del product
        weighted = out * weight[:, None]
        del out, weight, rows
        branch = torch.zeros_like(h).index_add_(0, token, weighted)
        del weighted, token
        return x + branch.view_as(x)

    def _route(self, h: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Of each row, in the order of experts: its token and its weight; and how many rows each expert has."""
        value, index = F.softmax(self.gate(h), dim=-1, dtype=torch.float32).topk(self.k, dim=-1)
        weight = (value / value.sum(-1, keepdim=True)).to(h.dtype)
        del value
        chosen = Counter(chain.from_iterable(index.tolist()))
        order = index.flatten().argsort()
        del index
        return order // self.k, weight.flatten()[order], [chosen[expert] for expert in range(self.num_experts)]

    def _each(self, name: str, rows: Tensor, counts: list[int]) -> Tensor:
        weights = [self.get_submodule(f"{expert} {name}").weight for expert in range(self.num_experts)]
        y: Tensor = _Grouped.apply(rows, counts, *weights)
        return y


def build(sublayer: Sublayer, model: ModelShape, layers: Layers) -> SublayerModule:
    """As `cluster.model.build_sublayer`, for the families that it has not got."""
    if model.family is Family.GEMMA2:
        kinds, shape = _GEMMA2, model
    else:
        kinds, shape = _MIXTRAL, model if sublayer.kind is SublayerKind.MLP else as_llama(model)
    with META:
        module = kinds[sublayer.kind](shape, layers)
    module.bind(sublayer)
    return module


_GEMMA2: dict[SublayerKind, Any] = {
    SublayerKind.EMBED: GemmaEmbed,
    SublayerKind.ATTENTION: GemmaAttention,
    SublayerKind.MLP: GemmaMLP,
    SublayerKind.HEAD: GemmaHead,
}
_MIXTRAL: dict[SublayerKind, Any] = {
    SublayerKind.EMBED: Embed,
    SublayerKind.ATTENTION: LlamaAttention,
    SublayerKind.MLP: Experts,
    SublayerKind.HEAD: Head,
}


def as_llama(model: ModelShape) -> ModelShape:
    """The same sizes as a Llama model: its batches have the rotary tables, and its attention is Mixtral's."""
    return replace(model, family=Family.LLAMA, caps_logits=False, experts=0, experts_per_token=0)
