"""What one segment allocates, keeps and frees in its forward and its backward, operator by operator.

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
| head and loss | norm + 4 V, and 8 bytes in all | h; fp32 log probabilities V; total weight and the loss 4 each |

The norm of the head is e (d + 2) in GPT-2. A GPT-2 block in bf16 with f = 4 d so keeps 32 d + 4 a + 8 bytes a token,
its two inputs included. Korthikanti et al. (arXiv 2205.05198, section 4.1) count 34 d + 5 a seq: 2 d of it are the
masks of two dropouts, and 5 a seq is the (seq, seq) softmax with its dropout, which the flash kernel does not keep.

Sources: the list of saved tensors and the order of frees were read off torch's CPU operators (2.13), and
tests/dist/test_activations_exact.py compares them with live storages, event by event. Operators' inner scratch (the
flash kernel's tiles, oneDNN's packing) is not counted here.
"""

from __future__ import annotations

from functools import lru_cache

from zeroviz import kernels
from zeroviz.kernels import FP32_NBYTES, Change, Place, Sizes, Tape
from zeroviz.ledger import Ledger
from zeroviz.models import Family, SublayerKind
from zeroviz.partition import Segment, plan_for
from zeroviz.schedule import OpKind, Phase
from zeroviz.spec import RunSpec
from zeroviz.trace import Category, Event


def forward(ledger: Ledger, spec: RunSpec, segment: Segment, *, watched: bool = True) -> None:
    """Book the segment's forward. What it keeps is ACTIVATION, its output included; what it frees again TEMPORARY.

    watched: whether the step runs under a TorchDispatchMode, which changes backward, see [Note: sums] in kernels.
    """
    sizes = Sizes(spec.model, spec.precision, spec.batch, spec.seq, watched)
    for kind, place in _places(segment):
        _book(ledger, spec, segment, OpKind.FORWARD, Phase.FORWARD, _passes(sizes, kind, place)[0])


def backward(ledger: Ledger, spec: RunSpec, segment: Segment, *, watched: bool = True) -> None:
    """Book the segment's backward. It frees what forward kept; the gradient it leaves for the segment before, and
    every gradient on its way, is TEMPORARY.
    """
    sizes = Sizes(spec.model, spec.precision, spec.batch, spec.seq, watched)
    for kind, place in reversed(_places(segment)):
        _book(ledger, spec, segment, OpKind.BACKWARD, Phase.BACKWARD, _passes(sizes, kind, place)[1])


def _places(segment: Segment) -> list[tuple[SublayerKind, Place]]:
    sublayers = segment.sublayers
    last = len(sublayers) - 1
    # A parameter in the segment's first and last sublayer is a tied embedding with the whole model around it.
    tied = last > 0 and not {shape.name for shape in sublayers[0].params}.isdisjoint(
        shape.name for shape in sublayers[last].params
    )
    return [(sublayer.kind, Place(i == 0, i == last, tied)) for i, sublayer in enumerate(sublayers)]


def _book(
    ledger: Ledger, spec: RunSpec, segment: Segment, op: OpKind, phase: Phase, changes: tuple[Change, ...]
) -> None:
    unit = plan_for(spec).units[segment.unit].name
    ledger.events += [Event(phase.value, op.value, unit, category, nbytes) for category, nbytes in changes]


@lru_cache(maxsize=1024)
def _passes(sizes: Sizes, kind: SublayerKind, place: Place) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    """One sublayer's forward and its backward. Blocks of a model are alike, so each is worked out once."""
    match kind, sizes.model.family:
        case SublayerKind.EMBED, _:
            run_forward, run_backward = _embed, _embed_backward
        case SublayerKind.HEAD, _:
            run_forward, run_backward = _head, _head_backward
        case SublayerKind.ATTENTION, Family.LLAMA:
            run_forward, run_backward = _llama_attention, _llama_attention_backward
        case SublayerKind.MLP, Family.LLAMA:
            run_forward, run_backward = _llama_mlp, _llama_mlp_backward
        case SublayerKind.ATTENTION, _:
            run_forward, run_backward = _gpt2_attention, _gpt2_attention_backward
        case SublayerKind.MLP, _:
            run_forward, run_backward = _gpt2_mlp, _gpt2_mlp_backward
        case _:
            return (), ()  # a bare parameter count has no activations

    tape, row = Tape(), sizes.rows(sizes.model.hidden)
    x_is_saved = place.first or kernels.norm_saves_input(sizes)
    if kind is not SublayerKind.EMBED:
        tape.alloc("x", row, Category.ACTIVATION if x_is_saved else Category.TEMPORARY)
    tape.take()  # the sublayer before has booked it
    run_forward(tape, sizes, place)
    if tape.holds("x") and not x_is_saved:
        tape.free("x")
    forward_changes = tape.take()

    # What comes from and goes to the neighbours: the gradient of y, and a tied embedding's gradient from the head.
    if kind is not SublayerKind.HEAD:
        tape.free("y")
        tape.make("grad", row)
        if kind is SublayerKind.EMBED and place.tied:
            tape.make("tied grad", sizes.model.vocab * sizes.model.hidden * sizes.precision.grad.itemsize)
        tape.take()
    run_backward(tape, sizes, place)
    backward_changes = tape.take()
    return forward_changes, backward_changes
