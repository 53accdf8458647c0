"""What single operators allocate, keep for backward and free, in the order torch does it on CPU.

Functions come in pairs, forward and backward, and work on a `Tape`: a ledger of one sublayer whose keys are names.
`x` is the sublayer's input, `y` its output, `h` the norm's output; `d...` is the gradient of `...`, `grad` that of
`y`, `grad in` that of `x`. Sizes are closed forms in n tokens, e bytes an element, and widths.

[Note: scratch] What an operator borrows and gives back before it returns is KERNEL_SCRATCH, the machine's and not the
step's: here that of torch's CPU kernels on one thread. In fp32 it is all there is; in bf16 oneDNN's matrix products
borrow more, as the processor demands, and that is measured and never predicted.

[Note: weight gradients] In our own code every parameter's gradient is preset to a view of the unit's flat buffer.
Matrices are added to it by the product that makes them (`cluster.own.layers`), without a tensor of their own unless the
recipe's gradient dtype is not the compute dtype; an embedding's has one. For a vector, and for learned positions, a
backward operator makes a fresh gradient in the compute dtype; it is cast if the dtypes differ, added to
the view in place and freed. Elsewhere all gradients are fresh, and stay: see [Note: fresh gradients] in
zeroviz/tape.py. Layers count from 0 in the order of the sublayer's parameters, so that a norm is layer 0.
"""

from __future__ import annotations

from zeroviz.category import Category
from zeroviz.models import Family
from zeroviz.tape import FP32_NBYTES, Place, Ready, Sizes, Tape, add_grads


def output(tape: Tape, s: Sizes, place: Place) -> None:
    """y, kept if it crosses the segment's border or the next norm keeps its input."""
    keeps = place.last or (tape.keeps and norm_saves_input(s))
    if place.dropped:
        keeps = False
    tape.alloc("y", s.rows(s.model.hidden), Category.ACTIVATION if keeps else Category.TEMPORARY)


def branch_output(tape: Tape, s: Sizes, place: Place, projected: str, *held: str) -> None:
    """The projection of `projected` that ends a branch, and y = x + that. held: what the code still holds till then."""
    tape.make("branch", s.rows(s.model.hidden))
    tape.let_go(projected)
    output(tape, s, place)
    tape.let_go(*held)
    tape.free("branch")


def add_input_grad(tape: Tape, s: Sizes, place: Place, part: str) -> None:
    """Add one more part to the gradient of x. The residual connection's part, `grad`, came first."""
    nbytes = s.rows(s.model.hidden)
    if tape.holds("grad in"):
        add_grads(tape, s, "grad in", part, "grad in", nbytes)
    elif tape.holds("grad"):
        add_grads(tape, s, "grad", part, "grad in", nbytes, held=place.output_held)
    else:  # the head has no residual connection
        tape.rename(part, "grad in")


def make_grad(tape: Tape, s: Sizes, key: str, numel: int, itemsize: int | None = None) -> None:
    """Allocate a fresh parameter gradient of `itemsize` (the compute dtype's by default), which may be cast yet."""
    width = itemsize or s.itemsize
    if width == s.recipe.grad.itemsize:
        tape.make_grad(s, key, numel * width)
    else:
        tape.make(key, numel * width)


def cast_grad(tape: Tape, s: Sizes, key: str, numel: int, itemsize: int | None = None) -> None:
    """Bring a fresh parameter gradient of `itemsize` (the compute dtype's by default) to the recipe's dtype."""
    if (itemsize or s.itemsize) != s.recipe.grad.itemsize:
        tape.make_grad(s, "cast", numel * s.recipe.grad.itemsize)
        tape.free(key)
        tape.rename("cast", key)


def linear_backward(
    tape: Tape,
    s: Sizes,
    layer: int,
    num_in: int,
    num_out: int,
    bias: bool,
    grad_in: str,
    *,
    dy: str = "",
    x: str = "",
    keep: str = "",
) -> None:
    """Gradients of a linear layer: input, weight, bias. Forward is one (n, num_out) tensor; its input is saved.

    grad_in: where the input's gradient goes, added to what is there. dy, x: the output's gradient and the input, which
    are freed once the gradients are computed, unless somebody else holds them still.
    keep: hold the weight's gradient back under this name (a tied weight waits for its other use).
    The bias' operator orders all differently: with a bias the input's gradient comes first, and the weight's is used up
    first. Our own code has another operator: see [Note: weight gradients].
    """
    if s.in_place:
        _own_linear_backward(tape, s, num_in, num_out, bias, grad_in, dy, x)
        return
    done = tuple(filter(None, (dy, x)))
    if bias:
        tape.make("part", s.rows(num_in))
    if keep:
        tape.make("dweight", num_in * num_out * s.itemsize)
    else:
        make_grad(tape, s, "dweight", num_in * num_out)
    if not bias:
        tape.make("part", s.rows(num_in))
    if bias:
        make_grad(tape, s, "dbias", num_out)
        cast_grad(tape, s, "dbias", num_out)
        tape.free(*done)
        tape.give_grad(s, "dbias", Ready(layer, is_bias=True))
        _finish_weight(tape, s, layer, num_in * num_out, keep)
    else:
        tape.free(*done)
    if tape.holds(grad_in):
        add_grads(tape, s, grad_in, "part", grad_in, s.rows(num_in))
    else:
        tape.rename("part", grad_in)
        tape.views.add(grad_in)
    if not bias:
        _finish_weight(tape, s, layer, num_in * num_out, keep)


def _own_linear_backward(
    tape: Tape, s: Sizes, num_in: int, num_out: int, bias: bool, grad_in: str, dy: str, x: str
) -> None:
    """The operator of `cluster.own.layers`; arguments as in `linear_backward`."""
    tape.begin_grads()
    if s.recipe.grad.itemsize != s.itemsize:
        add_made(tape, s, num_in * num_out)
    tape.make("part", s.rows(num_in))
    if bias:
        make_grad(tape, s, "dbias", num_out)
    if dy:
        tape.free(dy)
    if bias:
        cast_grad(tape, s, "dbias", num_out)
    if x:
        tape.free(x)
    if tape.holds(grad_in):
        add_grads(tape, s, grad_in, "part", grad_in, s.rows(num_in))
    else:
        tape.rename("part", grad_in)
    if bias:
        tape.give_grad(s, "dbias", Ready(0, is_bias=True))


def add_made(tape: Tape, s: Sizes, numel: int) -> None:
    """A gradient of `numel` elements is made in the compute dtype and added to what is there in the recipe's."""
    tape.make("dweight", numel * s.itemsize)
    if s.recipe.grad.itemsize != s.itemsize:
        wide = numel * FP32_NBYTES  # of what is added; and of the sum, if that is the narrow one
        with tape.scratch(*[wide] * (1 if s.is_narrow else 2)):
            pass
    tape.free("dweight")


def _finish_weight(tape: Tape, s: Sizes, layer: int, numel: int, keep: str) -> None:
    cast_grad(tape, s, "dweight", numel)
    if keep:
        tape.rename("dweight", keep)
    else:
        tape.give_grad(s, "dweight", Ready(layer))


def norm_saves_input(s: Sizes) -> bool:
    """Whether the norm keeps x itself. RMSNorm in a narrow dtype keeps an fp32 copy instead."""
    return s.model.family is Family.GPT2 or not s.is_narrow


def rotate(tape: Tape, s: Sizes, key: str, width: int) -> None:
    """Rotary positions of `key`, a temporary (n, width); keeps the result, not what it came from."""
    half = s.rows(width // 2)
    for one, other, result in (("first cos", "second sin", "left"), ("second cos", "first sin", "right")):
        tape.make(one, half)
        tape.make(other, half)
        tape.make(result, half)
        tape.free(one, other)
    tape.save("rotated", s.rows(width))
    tape.free("left", "right", key)
    tape.rename("rotated", key)


def rotate_backward(tape: Tape, s: Sizes, key: str, width: int) -> None:
    """The gradient `key` before rotation from the one after. Each half was used twice, so each is a sum."""
    half = s.rows(width // 2)
    tape.make("dfirst", half)
    tape.make("dsecond", half)
    tape.make("-dleft", half)
    tape.make("part", half)
    tape.free("-dleft")
    add_grads(tape, s, "dsecond", "part", "dsecond", half)
    tape.make("part", half)
    tape.free(key)
    add_grads(tape, s, "dfirst", "part", "dfirst", half)
    tape.make(key, s.rows(width))
    tape.free("dfirst", "dsecond")


def _tile(s: Sizes) -> tuple[int, int]:
    """Queries and keys the flash kernel works on at a time (torch's FlashAttentionKernel.cpp)."""
    query = 256 if s.seq >= 768 else 64 if s.seq >= 192 else 32
    return min(s.seq, query), min(s.seq, 512)


def attention(tape: Tape, s: Sizes) -> None:
    """Flash attention keeps its inputs, its output and one fp32 logarithm a head and token; nothing (seq, seq)."""
    tape.save("mixed", s.rows(s.model.heads * s.model.head_dim))
    tape.save("logsumexp", s.rows(s.model.heads, FP32_NBYTES))
    query, key = _tile(s)
    # Scores, a maximum and a sum a row, and the output, in fp32; in a narrow dtype the probabilities in that as well.
    fp32 = query * key + 2 * query + query * s.model.head_dim
    with tape.scratch(fp32 * FP32_NBYTES, *((query * key * s.itemsize,) if s.is_narrow else ())):
        pass
    tape.let_go("logsumexp")


def attention_backward(tape: Tape, s: Sizes, inputs: tuple[str, ...]) -> None:
    num_query, num_kv = s.model.heads * s.model.head_dim, s.model.kv_heads * s.model.head_dim
    tape.make("dq", s.rows(num_query))
    tape.make("dk", s.rows(num_kv))
    tape.make("dv", s.rows(num_kv))
    query, key = _tile(s)
    # Probabilities and their gradient, in fp32 and once more in a narrow dtype; a sum a row.
    narrow = (2 * query * key * s.itemsize,) if s.is_narrow else ()
    with tape.scratch(2 * query * key * FP32_NBYTES, *narrow, query * FP32_NBYTES):
        pass
    tape.free("dmixed", *sorted(inputs), "logsumexp", "mixed")  # in the order torch lets go of what it saved


def cross_entropy(tape: Tape, s: Sizes) -> None:
    """The loss of `logits`, in fp32. Keeps the logarithms of the probabilities and the sum of weights, one number."""
    wide = s.rows(s.model.vocab, FP32_NBYTES)
    if s.is_narrow:
        tape.make("wide logits", wide)
        tape.free("logits")
        tape.rename("wide logits", "logits")
    tape.save("log probabilities", wide)
    tape.save("y", FP32_NBYTES)
    tape.save("total weight", FP32_NBYTES)
    tape.free("logits")


def cross_entropy_backward(tape: Tape, s: Sizes) -> None:
    wide = s.rows(s.model.vocab, FP32_NBYTES)
    tape.make("dlog", wide)
    tape.free("total weight")
    tape.make("dlogits", wide)
    tape.free("dlog", "log probabilities")
    if s.is_narrow:
        tape.make("narrow", s.rows(s.model.vocab))
        tape.free("dlogits")
        tape.rename("narrow", "dlogits")
