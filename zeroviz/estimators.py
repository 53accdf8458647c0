"""Formulas that others publish and zeroviz does not use itself, written out term by term to be compared with print.

They are other implementations' accounts: DeepSpeed's estimator, Megatron's optimizer, Korthikanti et al.'s activations.
Results are exact, in bytes; nothing is rounded and nothing is called a GB.
"""

from __future__ import annotations

from fractions import Fraction

from zeroviz.models import NamedShape


def deepspeed_zero2(num_params: int, ranks: int, *, offload: str, form: str = "code") -> Fraction:
    """Bytes on one GPU by DeepSpeed's estimator. offload: `none` or `optimizer`. Source: references.DEEPSPEED_MEMORY.

    code: 2 fp16 parameters stay whole; 2 fp16 gradients + 4 fp32 gradients + 4 master + 8 Adam = 18 are divided.
    docs: 4 = 2 parameters + 2 gradients stay whole and 16 are divided: what the code computed before 2024.
    """
    if offload == "optimizer":
        return Fraction(2 * num_params)
    if form == "docs":
        return 4 * num_params + Fraction(16 * num_params, ranks)
    return 2 * num_params + Fraction((2 + 4 + 4 + 8) * num_params, ranks)


def deepspeed_zero3(num_params: int, largest_layer_params: int, ranks: int, *, offload: str) -> Fraction:
    """Bytes on one GPU by DeepSpeed's estimator. offload: `none`, `optimizer` or `params` (which takes both away).

    The largest layer is whole for a moment, 2 bytes of fp16 parameters and 2 of gradients. Of the rest a GPU keeps
    18P/N, or the fp16 parameters 2P/N, or nothing: the last figure does not depend on N at all.
    """
    bytes_per_param = {"none": 18, "optimizer": 2, "params": 0}[offload]
    return 4 * largest_layer_params + Fraction(bytes_per_param * num_params, ranks)


def megatron_fp16(ranks: int) -> tuple[Fraction, Fraction]:
    """Bytes a parameter with fp16 gradients, without and with Megatron's distributed optimizer.

    2 parameter + 2 gradient, of which every rank needs all, and 4 fp32 gradient + 4 master + 8 Adam = 16 that only
    the owner needs: 4 + 16 = 20, and 4 + 16/d. zeroviz has no recipe with both gradients.
    """
    whole, owned = 2 + 2, 4 + 4 + 8
    return Fraction(whole + owned), whole + Fraction(owned, ranks)


def korthikanti_layer_nbytes(seq: int, batch: int, hidden: int, heads: int) -> int:
    """Bytes that one transformer layer keeps for backward, 16-bit, term by term. Source: references.ACTIVATIONS.

    Attention 11 sbh + 5 a s^2 b, MLP 19 sbh, two LayerNorms 4 sbh; dropout masks take one byte an element.
    """
    sbh, scores = seq * batch * hidden, heads * seq * seq * batch
    # input of query-key-value 2, query and key 2 + 2, value 2, input of the projection 2, mask of its dropout 1
    attention = (2 + 2 + 2 + 2 + 2 + 1) * sbh
    # softmax 2, mask of its dropout 1, output of that dropout 2
    softmax = (2 + 1 + 2) * scores
    # input of the first linear 2, of GELU 2 * 4, of the second linear 2 * 4, mask of the dropout 1
    mlp = (2 + 8 + 8 + 1) * sbh
    norms = 2 * 2 * sbh
    return attention + softmax + mlp + norms


def bert_flat_parameters(
    *, vocab: int, hidden: int, layers: int, ffn: int, positions: int, types: int, classes: int
) -> dict[str, tuple[NamedShape, ...]]:
    """BERT with a classification head in three FSDP1 units: the word embedding, the encoder, and the rest in the root.

    Source of the grouping: references.FSDP_BLOG. Each parameter once, in the order of the module tree.
    """

    def linear(name: str, num_out: int, num_in: int) -> tuple[NamedShape, ...]:
        return NamedShape(f"{name}.weight", (num_out, num_in)), NamedShape(f"{name}.bias", (num_out,))

    def norm(name: str) -> tuple[NamedShape, ...]:
        return NamedShape(f"{name}.weight", (hidden,)), NamedShape(f"{name}.bias", (hidden,))

    root = (
        NamedShape("embeddings.position_embeddings.weight", (positions, hidden)),
        NamedShape("embeddings.token_type_embeddings.weight", (types, hidden)),
        *norm("embeddings.LayerNorm"),
        *linear("pooler.dense", hidden, hidden),
        *linear("classifier", classes, hidden),
    )
    encoder: list[NamedShape] = []
    for i in range(layers):
        name = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            encoder += linear(f"{name}.attention.self.{part}", hidden, hidden)
        encoder += linear(f"{name}.attention.output.dense", hidden, hidden)
        encoder += norm(f"{name}.attention.output.LayerNorm")
        encoder += linear(f"{name}.intermediate.dense", ffn, hidden)
        encoder += linear(f"{name}.output.dense", hidden, ffn)
        encoder += norm(f"{name}.output.LayerNorm")
    words = (NamedShape("embeddings.word_embeddings.weight", (vocab, hidden)),)
    return {"root": root, "word_embeddings": words, "encoder": tuple(encoder)}
