"""Llama's two branches as sequences of kernels, and the parts of them that its relatives share."""

from __future__ import annotations

from zeroviz import kernels, norms
from zeroviz.kernels import linear_backward
from zeroviz.tape import Place, Sizes, Tape


def attention(tape: Tape, s: Sizes, place: Place) -> None:
    mix(tape, s)
    kernels.branch_output(tape, s, place, "mixed", "h", "q", "k", "v")


def mix(tape: Tape, s: Sizes) -> None:
    """From x to what the output projection takes; the code still holds h, q, k and v."""
    num_query, num_kv = s.model.heads * s.model.head_dim, s.model.kv_heads * s.model.head_dim
    norms.norm(tape, s)
    for key, width in (("q", num_query), ("k", num_kv)):
        tape.make(key, s.rows(width))
        kernels.rotate(tape, s, key, width)
    tape.save("v", s.rows(num_kv))
    kernels.attention(tape, s)


def attention_backward(tape: Tape, s: Sizes, place: Place, dy: str = "") -> None:
    """h was used three times: value, key and query add up their gradients, and the last of them lets h go.

    dy: the gradient of the branch's output, where it is not y's own and is freed.
    """
    hidden, bias = s.model.hidden, s.model.has_qkv_bias
    num_query, num_kv = s.model.heads * s.model.head_dim, s.model.kv_heads * s.model.head_dim
    linear_backward(tape, s, 4, num_query, hidden, s.model.attention_bias, "dmixed", dy=dy)
    kernels.attention_backward(tape, s, ("q", "k", "v"))
    linear_backward(tape, s, 3, hidden, num_kv, bias, "dh", dy="dv")
    kernels.rotate_backward(tape, s, "dk", num_kv)
    linear_backward(tape, s, 2, hidden, num_kv, bias, "dh", dy="dk")
    kernels.rotate_backward(tape, s, "dq", num_query)
    linear_backward(tape, s, 1, hidden, num_query, bias, "dh", dy="dq", x="h")
    norms.norm_backward(tape, s, place)


def mlp(tape: Tape, s: Sizes, place: Place) -> None:
    norms.norm(tape, s)
    gated(tape, s.rows(s.model.ffn))
    kernels.branch_output(tape, s, place, "product", "h")


def gated(tape: Tape, nbytes: int) -> None:
    """act(gate) * up, four tensors of `nbytes` that are kept; any activation keeps what it was given."""
    tape.save("gate", nbytes)
    tape.save("act", nbytes)
    tape.let_go("gate")
    tape.save("up", nbytes)
    tape.save("product", nbytes)
    tape.let_go("act", "up")


def mlp_backward(tape: Tape, s: Sizes, place: Place, dy: str = "") -> None:
    """dy: as in `attention_backward`."""
    hidden, ffn, bias = s.model.hidden, s.model.ffn, s.model.mlp_bias
    linear_backward(tape, s, 3, ffn, hidden, bias, "dproduct", dy=dy, x="product")
    tape.make("dup", s.rows(ffn))
    tape.make("dact", s.rows(ffn))
    tape.free("dproduct", "up", "act")
    linear_backward(tape, s, 2, hidden, ffn, bias, "dh", dy="dup")
    tape.make("dgate", s.rows(ffn))
    tape.free("dact", "gate")
    linear_backward(tape, s, 1, hidden, ffn, bias, "dh", dy="dgate", x="h")
    norms.norm_backward(tape, s, place)
