"""Sublayers as sequences of kernels: what each forward makes, what each backward undoes.

Those of GPT-2 and Llama are `cluster.model`'s; Gemma-2's and Mixtral's are counted only (`zeroviz.sublayers_counted`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from zeroviz import kernels, norms
from zeroviz import sublayers_counted as counted
from zeroviz import sublayers_llama as llama
from zeroviz.category import Category
from zeroviz.events import Changes
from zeroviz.kernels import linear_backward
from zeroviz.models import Family, SublayerKind
from zeroviz.tape import FP32_NBYTES, Place, Ready, Sizes, Tape, add_grads


@lru_cache(maxsize=1024)
def passes(sizes: Sizes, kind: SublayerKind, place: Place) -> tuple[Changes, Changes]:
    """One sublayer's forward and its backward. Blocks of a model are alike, so each is worked out once.

    What the caller holds over the segment's border stays: `release` frees it.
    """
    forward, tape = _both_passes(sizes, kind, place)
    return forward, Changes(chain(tape.before_grads or (), tape.take()))


@lru_cache(maxsize=1024)
def backward_halves(sizes: Sizes, kind: SublayerKind, place: Place) -> tuple[Changes, Changes]:
    """The backward of `passes` in our own code, before and from the first parameter's gradient on."""
    _, tape = _both_passes(sizes, kind, place)
    assert tape.before_grads is not None
    return tape.before_grads, tape.take()


@lru_cache(maxsize=1024)
def passes_with_grads(
    sizes: Sizes, kind: SublayerKind, place: Place
) -> tuple[Changes, tuple[tuple[Changes, Ready], ...], Changes]:
    """As `passes` where gradients are handed over: forward; the stretches of backward up to each gradient; the rest."""
    forward, tape = _both_passes(sizes, kind, place)
    return forward, tuple(tape.handed_over), tape.take()


def _both_passes(sizes: Sizes, kind: SublayerKind, place: Place) -> tuple[Changes, Tape]:
    """Forward, and the tape with what backward booked."""
    tape = Tape()
    forward = _pass_forward(tape, sizes, kind, place)
    row = sizes.rows(sizes.model.hidden)

    # From the sublayer after: the gradient of y, and from the head that of a tied embedding. y is that one's to free.
    # In one graph the loss is the caller's.
    if kind is not SublayerKind.HEAD or place.in_graph:
        tape.free("y")
    if kind is not SublayerKind.HEAD:
        tape.make("grad", row)
    if kind is SublayerKind.EMBED and _sums_tied(sizes, place):
        tape.make("tied grad", _embedding_numel(sizes) * sizes.recipe.grad.itemsize)
        if sizes.recipe.grad is sizes.recipe.param:
            tape.views.add("tied grad")  # a cast gradient is a tensor of its own
    tape.take()

    _BACKWARD[sizes.model.family, kind](tape, sizes, place)
    return forward, tape


@lru_cache(maxsize=1024)
def dry_pass(sizes: Sizes, kind: SublayerKind, place: Place) -> Changes:
    """One sublayer's forward without a graph, as in a checkpointed region, whose output goes on to what follows."""
    place = replace(place, dropped=False)
    return _pass_forward(Tape(keeps=False), sizes, kind, place)


def _pass_forward(tape: Tape, sizes: Sizes, kind: SublayerKind, place: Place) -> Changes:
    has_input = kind is not SublayerKind.EMBED
    x_stays = place.first or (tape.keeps and kernels.norm_saves_input(sizes))
    if has_input:
        tape.alloc("x", sizes.rows(sizes.model.hidden), Category.ACTIVATION if x_stays else Category.TEMPORARY)
    tape.take()  # the sublayer before has booked it
    _FORWARD[sizes.model.family, kind](tape, sizes, place)
    if has_input and not x_stays:
        tape.free("x")
    return tape.take()


@lru_cache(maxsize=1024)
def release(sizes: Sizes, first: SublayerKind, last: SublayerKind) -> Changes:
    """What the caller lets go when a segment's backward is over: the segment's input, and the gradient it was given."""
    row = sizes.rows(sizes.model.hidden)
    given = (Category.TEMPORARY, -(FP32_NBYTES if last is SublayerKind.HEAD else row))
    return Changes([given] if first is SublayerKind.EMBED else [(Category.ACTIVATION, -row), given])


def _embedding_numel(s: Sizes) -> int:
    return s.model.vocab * s.model.hidden


def _embed(tape: Tape, s: Sizes, place: Place) -> None:
    """GPT-2 adds positions to the tokens' rows, and Gemma-2 multiplies them by sqrt(hidden)."""
    if s.model.family not in (Family.GPT2, Family.GEMMA2):
        kernels.output(tape, s, place)
        return
    tape.make("token rows", s.rows(s.model.hidden))
    kernels.output(tape, s, place)
    tape.free("token rows")


def _sums_tied(s: Sizes, place: Place) -> bool:
    """Whether the head's gradient of a tied weight waits for the embedding's; in our own code neither waits."""
    return place.tied and not s.in_place


def _embed_backward(tape: Tape, s: Sizes, place: Place) -> None:
    learned = s.model.family is Family.GPT2
    if learned:
        tape.make("dpositions", s.seq * s.model.hidden * s.itemsize)  # summed over the batch
    if s.in_place:
        _own_tokens_backward(tape, s, place)
    else:
        _tokens_backward(tape, s, place)
    if learned:
        # The table's gradient is zero outside the rows used.
        kernels.make_grad(tape, s, "dtable", s.model.positions * s.model.hidden)
        kernels.cast_grad(tape, s, "dtable", s.model.positions * s.model.hidden)
        tape.free("dpositions")
        tape.give_grad(s, "dtable", Ready(1))


def _own_tokens_backward(tape: Tape, s: Sizes, place: Place) -> None:
    """See [Note: weight gradients] in `zeroviz.kernels`."""
    tape.begin_grads()
    kernels.add_made(tape, s, _embedding_numel(s))
    if not place.output_held:
        tape.free("grad")


def _tokens_backward(tape: Tape, s: Sizes, place: Place) -> None:
    if place.tied:
        tape.make("dtokens", _embedding_numel(s) * s.itemsize)
    else:
        kernels.make_grad(tape, s, "dtokens", _embedding_numel(s))
    kernels.cast_grad(tape, s, "dtokens", _embedding_numel(s))
    if not place.output_held:
        tape.free("grad")
    if place.tied:
        nbytes = _embedding_numel(s) * s.recipe.grad.itemsize
        add_grads(tape, s, "tied grad", "dtokens", "dtokens", nbytes, category=s.fresh or Category.TEMPORARY)
    tape.give_grad(s, "dtokens", Ready(0))


def _gpt2_attention(tape: Tape, s: Sizes, place: Place) -> None:
    norms.norm(tape, s)
    tape.save("qkv", s.rows(3 * s.model.hidden))
    tape.let_go("h")
    kernels.attention(tape, s)
    kernels.branch_output(tape, s, place, "mixed", "qkv")


def _gpt2_attention_backward(tape: Tape, s: Sizes, place: Place) -> None:
    hidden, bias = s.model.hidden, s.model.attention_bias
    linear_backward(tape, s, 2, hidden, hidden, bias, "dmixed")
    kernels.attention_backward(tape, s, ("qkv",))
    tape.make("dqkv", s.rows(3 * hidden))
    tape.free("dq", "dk", "dv")
    linear_backward(tape, s, 1, hidden, 3 * hidden, bias, "dh", dy="dqkv", x="h")
    norms.norm_backward(tape, s, place)


def _gpt2_mlp(tape: Tape, s: Sizes, place: Place) -> None:
    norms.norm(tape, s)
    tape.save("up", s.rows(s.model.ffn))
    tape.let_go("h")
    tape.save("gelu", s.rows(s.model.ffn))
    tape.let_go("up")
    kernels.branch_output(tape, s, place, "gelu")


def _gpt2_mlp_backward(tape: Tape, s: Sizes, place: Place) -> None:
    hidden, ffn, bias = s.model.hidden, s.model.ffn, s.model.mlp_bias
    linear_backward(tape, s, 2, ffn, hidden, bias, "dgelu", x="gelu")
    tape.make("dup", s.rows(ffn))
    tape.free("dgelu", "up")
    linear_backward(tape, s, 1, hidden, ffn, bias, "dh", dy="dup", x="h")
    norms.norm_backward(tape, s, place)


def _head(tape: Tape, s: Sizes, place: Place) -> None:
    norms.norm(tape, s)
    tape.make("logits", s.rows(s.model.vocab))
    if s.model.caps_logits:
        counted.cap(tape, s)
    kernels.cross_entropy(tape, s)


def _head_backward(tape: Tape, s: Sizes, place: Place) -> None:
    if not place.in_graph:
        tape.make("seed", FP32_NBYTES)  # the gradient of the loss by itself: one
        tape.free("y")
    kernels.cross_entropy_backward(tape, s)
    if s.model.caps_logits:
        counted.cap_backward(tape, s)
    keep = "tied grad" if _sums_tied(s, place) else ""
    linear_backward(tape, s, 1, s.model.hidden, s.model.vocab, False, "dh", dy="dlogits", x="h", keep=keep)
    norms.norm_backward(tape, s, place)


_Pass = Callable[[Tape, Sizes, Place], None]
_FORWARD: Mapping[tuple[Family, SublayerKind], _Pass] = {
    (Family.GPT2, SublayerKind.EMBED): _embed,
    (Family.GPT2, SublayerKind.ATTENTION): _gpt2_attention,
    (Family.GPT2, SublayerKind.MLP): _gpt2_mlp,
    (Family.GPT2, SublayerKind.HEAD): _head,
    (Family.LLAMA, SublayerKind.EMBED): _embed,
    (Family.LLAMA, SublayerKind.ATTENTION): llama.attention,
    (Family.LLAMA, SublayerKind.MLP): llama.mlp,
    (Family.LLAMA, SublayerKind.HEAD): _head,
    (Family.GEMMA2, SublayerKind.EMBED): _embed,
    (Family.GEMMA2, SublayerKind.ATTENTION): counted.gemma2_attention,
    (Family.GEMMA2, SublayerKind.MLP): counted.gemma2_mlp,
    (Family.GEMMA2, SublayerKind.HEAD): _head,
    (Family.MIXTRAL, SublayerKind.EMBED): _embed,
    (Family.MIXTRAL, SublayerKind.ATTENTION): llama.attention,
    (Family.MIXTRAL, SublayerKind.MLP): counted.experts,
    (Family.MIXTRAL, SublayerKind.HEAD): _head,
}
_BACKWARD: Mapping[tuple[Family, SublayerKind], _Pass] = {
    (Family.GPT2, SublayerKind.EMBED): _embed_backward,
    (Family.GPT2, SublayerKind.ATTENTION): _gpt2_attention_backward,
    (Family.GPT2, SublayerKind.MLP): _gpt2_mlp_backward,
    (Family.GPT2, SublayerKind.HEAD): _head_backward,
    (Family.LLAMA, SublayerKind.EMBED): _embed_backward,
    (Family.LLAMA, SublayerKind.ATTENTION): llama.attention_backward,
    (Family.LLAMA, SublayerKind.MLP): llama.mlp_backward,
    (Family.LLAMA, SublayerKind.HEAD): _head_backward,
    (Family.GEMMA2, SublayerKind.EMBED): counted.gemma2_embed_backward,
    (Family.GEMMA2, SublayerKind.ATTENTION): counted.gemma2_attention_backward,
    (Family.GEMMA2, SublayerKind.MLP): counted.gemma2_mlp_backward,
    (Family.GEMMA2, SublayerKind.HEAD): _head_backward,
    (Family.MIXTRAL, SublayerKind.EMBED): _embed_backward,
    (Family.MIXTRAL, SublayerKind.ATTENTION): llama.attention_backward,
    (Family.MIXTRAL, SublayerKind.MLP): counted.experts_backward,
    (Family.MIXTRAL, SublayerKind.HEAD): _head_backward,
}
