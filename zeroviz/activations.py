"""What a step keeps of its activations, and what its batch takes.

[Note: what autograd saves] Bytes a token that a sublayer keeps from forward to backward besides its input, which is
the sublayer before's output and costs d e. d hidden, q = heads head_dim, k = kv_heads head_dim, f ffn, a heads,
V vocab, e bytes of the compute dtype.

| sublayer | kept | of that |
|---|---|---|
| embedding | 0 | token ids are the batch's |
| GPT-2 attention | e (5 d + 2) + 4 a | h d, mean and rstd 2, query key value 3 d, mixed d; logsumexp 4 a |
| GPT-2 MLP | e (d + 2 f + 2) | h d, mean and rstd 2, before and after GELU 2 f |
| RMSNorm, fp32 | 4 (2 d + 1) | x rstd d, h d, rstd 1 |
| RMSNorm, bf16 | 4 (2 d + 1) + 2 d | x in fp32 d, x rstd in fp32 d, rstd 1; h d. The input itself is not kept |
| Llama attention | RMSNorm + e (2 q + 2 k) + 4 a | rotated query q, rotated key k, value k, mixed q; logsumexp 4 a |
| Llama MLP | RMSNorm + e 4 f | gate, silu(gate), up, their product |
| Gemma-2's branches | as Llama's + 4 (2 d + 1) | of the norm at its end: x in fp32, x rstd, rstd |
| Mixtral MLP | RMSNorm + e k (3 d + 4 f + 1) + 28 k + 4 E + 4 | rows, results, weighted ones; Llama's; weights |
| head and loss | norm + 4 V, and 8 bytes in all | h; fp32 log probabilities V; total weight and the loss 4 each |
| the head's cap, Gemma-2 | e V | tanh(logits / cap) |

k experts of a token's, E of a block's; 28 k + 4 E + 4 is the router's: E probabilities, the k largest and their sum in
fp32, and 3 k indices. Each norm of Gemma-2's keeps 4 d bytes more in all, 1 + weight. The norm of the head is e (d + 2)
in GPT-2. A GPT-2 block in bf16 with f = 4 d so keeps 32 d + 4 a + 8 bytes a token,
its two inputs included. Korthikanti et al. (arXiv 2205.05198, section 4.1) count 34 d + 5 a seq: 2 d of it are the
masks of two dropouts, and 5 a seq is the (seq, seq) softmax with its dropout, which the flash kernel does not keep.

Sources: the list of saved tensors and the order of frees were read off torch's CPU operators (2.13), and
tests/dist/test_activations_exact.py compares them with live storages, event by event, of GPT-2 and Llama. Gemma-2 and
Mixtral are not run: [Note: counted] in `zeroviz.sublayers_counted`. Operators' inner scratch (the
flash kernel's tiles, oneDNN's packing) is not counted here. CUDA's kernels keep other things: LayerNorm's statistics
are fp32 there, and RMSNorm is one fused operator that keeps x and rstd alone (from its source, not measured here).
"""

from __future__ import annotations

from zeroviz.models import Family, ModelShape
from zeroviz.spec import RunSpec

NBYTES_PER_TOKEN_ID = 8  # torch indexes embeddings and targets with int64

_COUNTED = (
    "Activations of {label} are counted tensor by tensor, by zeroviz's own list of what torch's operators keep, and "
    "not by the published formula (Korthikanti et al., arXiv 2205.05198), which knows no {unknown}. No step of this "
    "family is run here, so no measurement stands beside them. {assumed}"
)
_ASSUMED = {
    Family.GEMMA2: (
        "GeGLU, no grouped-query attention and no norm at a branch's end",
        "Attention is one fused kernel that caps its scores inside; one that does not, such as eager attention, keeps "
        "(seq, seq) matrices for each head besides.",
    ),
    Family.MIXTRAL: (
        "experts, no SwiGLU and no grouped-query attention",
        "No token is dropped: all experts together work on {k} a token, whatever the router says, and a router's "
        "loss is not counted.",
    ),
}


def formula_notes(model: ModelShape) -> tuple[str, ...]:
    """By which count a model's activations are worked out, where no run can confirm it; nothing for what runs."""
    if model.family not in _ASSUMED:
        return ()
    unknown, assumed = _ASSUMED[model.family]
    assumed = assumed.format(k=f"{(k := model.experts_per_token):,} row{'s' * (k > 1)}")
    return (_COUNTED.format(label=model.family.label, unknown=unknown, assumed=assumed),)


def input_nbytes(spec: RunSpec) -> int:
    """Bytes of one rank's batch: tokens and targets, and for rotary models the (seq, head_dim/2) cos and sin tables."""
    model = spec.model
    if model.family is Family.BARE:
        return 0
    tables = 2 * spec.seq * (model.head_dim // 2) * spec.recipe.compute.itemsize
    return 2 * NBYTES_PER_TOKEN_ID * spec.num_tokens_per_rank + (tables if model.family.is_rotary else 0)
