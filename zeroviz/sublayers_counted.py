"""Gemma-2 and Mixtral as sequences of kernels: families that are worked out and not run.

[Note: counted] `cluster.model` has no layers of theirs. What is booked here is what torch's operators do, one by one:
tests/dist/counted_layers.py builds each branch after the released models' code, and tests/dist/test_counted_exact.py
compares every allocation and free of its forward and backward. No whole step has been metered. They are worked out for
our own code alone, whose gradients are added in place (`zeroviz.kernels`).

Two choices are ours, and both hold less than the plainest code would:

- Gemma-2 caps its attention's scores. One fused kernel is assumed to do so inside, as FlashAttention does from 2.6 on;
  matrix products and a softmax one by one would keep (seq, seq) matrices for each head.
- Mixtral drops no token, so that whatever the router says, all experts together work on n k rows, k being the experts
  of a token. The rows are sorted by expert once and taken as one batch; the released code goes expert by expert, over
  as many rows in all. No loss of the router's is counted.
"""

from __future__ import annotations

from zeroviz import kernels, norms
from zeroviz import sublayers_llama as llama
from zeroviz.kernels import linear_backward
from zeroviz.tape import FP32_NBYTES, Place, Sizes, Tape, add_grads

INDEX_NBYTES = 8  # torch's indices are int64
AFTER = "after "  # before the names of what the norm at a branch's end keeps


# ---- Gemma-2 ----


def gemma2_embed_backward(tape: Tape, s: Sizes, place: Place) -> None:
    """The gradient of the rows is that of the scaled rows times sqrt(hidden)."""
    tape.make("scaled grad", s.rows(s.model.hidden))
    if not place.output_held:
        tape.free("grad")
    tape.begin_grads()
    kernels.add_made(tape, s, s.model.vocab * s.model.hidden)
    tape.free("scaled grad")


def gemma2_attention(tape: Tape, s: Sizes, place: Place) -> None:
    llama.mix(tape, s)
    _normed_output(tape, s, place, "mixed", "h", "q", "k", "v")


def gemma2_attention_backward(tape: Tape, s: Sizes, place: Place) -> None:
    _after_norm_backward(tape, s, layer=5)
    llama.attention_backward(tape, s, place, dy="dbranch")


def gemma2_mlp(tape: Tape, s: Sizes, place: Place) -> None:
    norms.norm(tape, s)
    llama.gated(tape, s.rows(s.model.ffn))
    _normed_output(tape, s, place, "product", "h")


def gemma2_mlp_backward(tape: Tape, s: Sizes, place: Place) -> None:
    _after_norm_backward(tape, s, layer=4)
    llama.mlp_backward(tape, s, place, dy="dbranch")


def _normed_output(tape: Tape, s: Sizes, place: Place, projected: str, *held: str) -> None:
    """y = x + norm(projection of `projected`). The norm keeps its input, or in a narrow dtype an fp32 copy of it."""
    if kernels.norm_saves_input(s):
        tape.save("branch", s.rows(s.model.hidden))
    else:
        tape.make("branch", s.rows(s.model.hidden))
    tape.let_go(projected)
    norms.rms_norm(tape, s, "normed", AFTER)
    if kernels.norm_saves_input(s):
        tape.let_go("branch")
    else:
        tape.free("branch")
    kernels.output(tape, s, place)
    tape.let_go(*held)
    tape.free("normed")


def _after_norm_backward(tape: Tape, s: Sizes, layer: int) -> None:
    """From the gradient of y, which stays for the residual connection, to "dbranch"."""

    def give(part: str) -> None:
        if tape.holds("dbranch"):
            add_grads(tape, s, "dbranch", part, "dbranch", s.rows(s.model.hidden))
        else:
            tape.rename(part, "dbranch")

    norms.rms_norm_backward(tape, s, give, layer=layer, at=AFTER, x="branch", dh="grad", dh_stays=True)


def cap(tape: Tape, s: Sizes) -> None:
    """cap * tanh(logits / cap), in the compute dtype; tanh keeps its result."""
    nbytes = s.rows(s.model.vocab)
    tape.make("divided", nbytes)
    tape.free("logits")
    tape.save("tanh", nbytes)
    tape.free("divided")
    tape.make("logits", nbytes)
    tape.let_go("tanh")


def cap_backward(tape: Tape, s: Sizes) -> None:
    nbytes = s.rows(s.model.vocab)
    tape.make("dtanh", nbytes)
    tape.free("dlogits")
    tape.make("ddivided", nbytes)
    tape.free("dtanh", "tanh")
    tape.make("dlogits", nbytes)
    tape.free("ddivided")


# ---- Mixtral ----


def experts(tape: Tape, s: Sizes, place: Place) -> None:
    """x + the sum over a token's k experts of weight * w2(silu(w1(row)) * w3(row)), row being the token's h."""
    wide_row = s.model.experts_per_token * s.model.hidden  # a token's rows, for all its experts
    norms.norm(tape, s)
    _route(tape, s)
    tape.save("rows", s.rows(wide_row))
    llama.gated(tape, s.rows(s.model.experts_per_token * s.model.ffn))
    tape.save("out", s.rows(wide_row))
    tape.let_go("product")
    tape.save("weighted", s.rows(wide_row))
    tape.let_go("out", "row weight", "rows")
    tape.make("branch", s.rows(s.model.hidden))  # index_add of the weighted rows, which keeps them
    tape.let_go("weighted", "token")
    kernels.output(tape, s, place)
    tape.let_go("h")
    tape.free("branch")


def _route(tape: Tape, s: Sizes) -> None:
    """The k largest probabilities of each token, scaled to a sum of one; then for each row, in the order of experts,
    its token and its weight."""
    num_experts, k = s.model.experts, s.model.experts_per_token
    tape.make("router logits", s.rows(num_experts))
    if s.is_narrow:
        tape.make("wide logits", s.rows(num_experts, FP32_NBYTES))
    tape.save("probabilities", s.rows(num_experts, FP32_NBYTES))
    tape.free("router logits", *(("wide logits",) if s.is_narrow else ()))
    tape.save("value", s.rows(k, FP32_NBYTES))
    tape.save("index", s.rows(k, INDEX_NBYTES))
    tape.let_go("probabilities")
    tape.save("value sum", s.rows(1, FP32_NBYTES))
    tape.make("weight", s.rows(k, FP32_NBYTES))
    tape.let_go("value sum", "value")
    if s.is_narrow:
        tape.make("narrow", s.rows(k))
        tape.free("weight")
        tape.rename("narrow", "weight")
    tape.make("sorted", s.rows(k, INDEX_NBYTES))
    tape.save("order", s.rows(k, INDEX_NBYTES))
    tape.free("sorted")
    tape.let_go("index")
    tape.save("token", s.rows(k, INDEX_NBYTES))
    tape.save("row weight", s.rows(k))
    tape.free("weight")
    tape.let_go("order")


def experts_backward(tape: Tape, s: Sizes, place: Place) -> None:
    hidden, ffn, k = s.model.hidden, s.model.ffn, s.model.experts_per_token
    tape.make("dweighted", s.rows(k * hidden))
    tape.free("weighted")
    tape.make("dout", s.rows(k * hidden))
    tape.make("dweighted out", s.rows(k * hidden))
    tape.make("drow weight", s.rows(k))
    tape.free("dweighted", "dweighted out", "out", "row weight")
    _all_experts_backward(tape, s, ffn, "dproduct", dy="dout", x="product")
    tape.make("dup", s.rows(k * ffn))
    tape.make("dact", s.rows(k * ffn))
    tape.free("dproduct", "up", "act")
    _all_experts_backward(tape, s, hidden, "drows", dy="dup")
    tape.make("dgate", s.rows(k * ffn))
    tape.free("dact", "gate")
    _all_experts_backward(tape, s, hidden, "drows", dy="dgate", x="rows")
    _put(tape, s, "dh", s.rows(hidden), "drows", "token")  # of a token, the sum over its rows
    _route_backward(tape, s)
    linear_backward(tape, s, 1, hidden, s.model.experts, False, "dh", dy="drouter", x="h")
    norms.norm_backward(tape, s, place)


def _all_experts_backward(tape: Tape, s: Sizes, num_in: int, grad_in: str, *, dy: str, x: str = "") -> None:
    """One of the three matrices of every expert, as `linear_backward` of our own code on n k rows. A weight's gradient
    that is not made in its place is made for one expert after the other."""
    tape.begin_grads()
    if s.recipe.grad.itemsize != s.itemsize:
        for _ in range(s.model.experts):
            kernels.add_made(tape, s, s.model.ffn * s.model.hidden)
    nbytes = s.rows(s.model.experts_per_token * num_in)
    tape.make("part", nbytes)
    tape.free(*filter(None, (dy, x)))
    if tape.holds(grad_in):
        add_grads(tape, s, grad_in, "part", grad_in, nbytes)
    else:
        tape.rename("part", grad_in)


def _route_backward(tape: Tape, s: Sizes) -> None:
    """From the rows' weights to the router's logits, by the values' and the probabilities' gradients."""
    num_experts, k = s.model.experts, s.model.experts_per_token
    values, probabilities = s.rows(k, FP32_NBYTES), s.rows(num_experts, FP32_NBYTES)
    _put(tape, s, "dweight", s.rows(k), "drow weight", "order")
    if s.is_narrow:
        tape.make("wide dweight", values)
        tape.free("dweight")
        tape.rename("wide dweight", "dweight")
    # Of value / sum: -dweight (value / sum) / sum for the sum, dweight / sum for the value.
    for part in ("ratio", "ratio / sum", "-dweight", "product"):
        tape.make(part, values)
    tape.free("ratio", "ratio / sum", "-dweight")
    tape.make("dvalue", values)
    if k == 1:  # nothing to sum
        tape.rename("product", "dvalue sum")
    else:
        tape.make("dvalue sum", s.rows(1, FP32_NBYTES))
        tape.free("product")
    tape.free("dweight", "value", "value sum")
    add_grads(tape, s, "dvalue", "dvalue sum", "dvalue", values)
    _put(tape, s, "dprobabilities", probabilities, "dvalue", "index")
    tape.make("drouter", probabilities)
    tape.free("dprobabilities", "probabilities")
    if s.is_narrow:
        tape.make("narrow", s.rows(num_experts))
        tape.free("drouter")
        tape.rename("narrow", "drouter")


def _put(tape: Tape, s: Sizes, key: str, nbytes: int, *used: str) -> None:
    """Zeros of `nbytes`, and what is `used` put into them: out of place while a TorchDispatchMode is active."""
    if s.watched:
        tape.make("zeros", nbytes)
    tape.make(key, nbytes)
    if s.watched:
        tape.free("zeros")
    tape.free(*used)
