"""What autograd keeps for one segment between its forward and its backward."""

from __future__ import annotations

from zeroviz.ledger import Ledger
from zeroviz.models import Family, ModelShape, SublayerKind, Sublayer
from zeroviz.partition import Segment
from zeroviz.spec import RunSpec
from zeroviz.trace import Category


def _saved_nbytes(sublayer: Sublayer, m: ModelShape, spec: RunSpec) -> int:
    n, e = spec.num_tokens_per_rank, spec.precision.param.itemsize
    d, f, qd, kd = m.hidden, m.ffn, m.heads * m.head_dim, m.kv_heads * m.head_dim
    if sublayer.kind is SublayerKind.EMBED:
        return e * n * d
    if sublayer.kind is SublayerKind.HEAD:
        return e * n * d + 2 * n * e + 4 * n * m.vocab + 8
    norm = e * n * d + 2 * n * e if m.family is Family.GPT2 else 2 * e * n * d + 4 * n
    if sublayer.kind is SublayerKind.ATTENTION:
        return norm + e * n * (qd + 2 * kd + qd + d) + 4 * n * m.heads
    return norm + e * n * ((2 if m.family is Family.GPT2 else 4) * f + d)


def forward(ledger: Ledger, spec: RunSpec, segment: Segment) -> None:
    for sublayer in segment.sublayers:
        if sublayer.kind is not SublayerKind.BARE:
            ledger.alloc(("saved", sublayer.name), _saved_nbytes(sublayer, spec.model, spec), Category.ACTIVATION)


def backward(ledger: Ledger, spec: RunSpec, segment: Segment) -> None:
    for sublayer in reversed(segment.sublayers):
        if sublayer.kind is not SublayerKind.BARE:
            ledger.free(("saved", sublayer.name))
