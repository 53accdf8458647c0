"""Predicted activations: the closed forms, and that every segment's books close."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest

from tests.segments import book
from tests.work import num_calls
from zeroviz.ledger import Ledger
from zeroviz.models import Sublayer, bare
from zeroviz.partition import Segment, plan_for
from zeroviz.precision import OWN_PRECISIONS
from zeroviz.predict import predict
from zeroviz.schedule import OpKind
from zeroviz.spec import Precision, RunSpec, Strategy, UnitPolicy, preset
from zeroviz.sublayers import passes
from zeroviz.tape import Sizes
from zeroviz.trace import Category


def kept_nbytes(spec: RunSpec, first: int, stop: int) -> int:
    """What stands after the forward of the sublayers [first, stop) as one segment."""
    ledger = Ledger()
    book(ledger, OpKind.FORWARD, Sizes.of(spec), Segment(0, 0, "segment", spec.model.sublayers[first:stop]))
    held: Counter[Category] = Counter()
    for event in ledger.events:
        held[event.category] += event.delta_nbytes
    assert held.pop(Category.TEMPORARY, 0) == 0
    return held[Category.ACTIVATION]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED], ids=lambda recipe: recipe.value)
def test_gpt2_block_is_the_classical_count_without_dropout_and_softmax(precision: Precision) -> None:
    """Korthikanti et al. count 34 d + 5 a seq bytes a token at 2 bytes an element.

    Our kernels have no dropout (2 d of mask) and keep no (seq, seq) softmax (5 a seq); they add the logsumexp (4 a)
    and the two norms' statistics (2 * 2 elements): 32 d + 4 a + 8 = 32 * 768 + 4 * 12 + 8 = 24,632.
    """
    spec = RunSpec(model=preset("gpt2"), precision=precision, batch=2, seq=128)
    e, tokens = precision.param.itemsize, 256
    assert kept_nbytes(spec, 1, 3) == tokens * (16 * 768 * e + 4 * 12 + 4 * e)
    if e == 2:
        assert kept_nbytes(spec, 1, 3) == 256 * 24_632


def test_llama_sublayers_keep_what_the_table_says() -> None:
    model = preset("llama3-8b")
    tokens, d, q, k, f, heads, vocab = 2 * 64, 4096, 32 * 128, 8 * 128, 14336, 32, 128256
    for precision, norm in ((Precision.FP32, 4 * (2 * d + 1)), (Precision.BF16_MIXED, 4 * (2 * d + 1) + 2 * d)):
        spec = RunSpec(model=model, precision=precision, batch=2, seq=64)
        e = precision.param.itemsize
        assert kept_nbytes(spec, 0, 1) == tokens * e * d
        assert kept_nbytes(spec, 1, 2) == tokens * (norm + e * (2 * q + 2 * k) + 4 * heads + e * d)
        assert kept_nbytes(spec, 2, 3) == tokens * (norm + e * 4 * f + e * d)
        head = len(model.sublayers) - 1
        assert kept_nbytes(spec, head, head + 1) == tokens * (norm + 4 * vocab) + 8


def test_inside_a_segment_bf16_rmsnorm_drops_its_input() -> None:
    """It keeps an fp32 copy, so the narrow input between attention and MLP is not needed: d bf16 elements a token."""
    spec = RunSpec(model=preset("tiny-llama"), precision=Precision.BF16, batch=2, seq=7)
    apart = kept_nbytes(spec, 1, 2) + kept_nbytes(spec, 2, 3)
    assert apart - kept_nbytes(spec, 1, 3) == 14 * 47 * 2


@pytest.mark.parametrize("unit", ["model", "block", "block:2", "layer"])
@pytest.mark.parametrize("precision", OWN_PRECISIONS, ids=lambda recipe: recipe.value)
@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("watched", [True, False])
def test_backward_frees_all_that_forward_kept(name: str, precision: Precision, unit: str, watched: bool) -> None:
    spec = RunSpec(model=preset(name), precision=precision, unit=UnitPolicy.parse(unit), batch=2, seq=7)
    segments = plan_for(spec).segments
    ledger, held = Ledger(), Counter()
    for segment in segments:
        book(ledger, OpKind.FORWARD, Sizes.of(spec, watched=watched), segment)
    for segment in reversed(segments):
        book(ledger, OpKind.BACKWARD, Sizes.of(spec, watched=watched), segment)
    for event in ledger.events:
        held[event.category] += event.delta_nbytes
        assert held[event.category] >= 0
    assert not any(held.values())


@pytest.mark.parametrize("in_place", [False, True], ids=["autograd's layers", "our layers"])
def test_the_tied_embeddings_gradient_from_the_head_waits_for_the_embedding(in_place: bool) -> None:
    """In one graph autograd adds both uses before they reach the parameter, so 257 * 55 fp32 elements stand all along.
    Our layers add each to its place at once, and nothing waits."""
    spec = RunSpec(model=preset("tiny"), unit=UnitPolicy.parse("model"), batch=2, seq=7)
    (segment,) = plan_for(spec).segments

    def temporary_amid_backward(sublayers: tuple[Sublayer, ...]) -> int:
        """The least that is held by temporaries in the middle third of backward's events."""
        ledger = Ledger()
        sizes = replace(Sizes.of(spec), in_place=in_place)
        for kind, place in reversed(Segment(0, 0, "segment", sublayers).places):
            ledger.replay(passes(sizes, kind, place)[1])
        changes = [e.delta_nbytes if e.category is Category.TEMPORARY else 0 for e in ledger.events]
        held = list(accumulate(changes))
        return min(held[len(held) // 3 : 2 * len(held) // 3])

    # Without the embedding in the segment, the head's weight gradient is gone at once; all else is the same.
    alone, together = temporary_amid_backward(segment.sublayers[1:]), temporary_amid_backward(segment.sublayers)
    assert together == alone + (0 if in_place else 257 * 55 * 4)


def test_a_watched_step_holds_one_more_tensor_at_a_sum() -> None:
    spec = RunSpec(model=preset("tiny"), batch=2, seq=7)
    segment = Segment(0, 0, "segment", spec.model.sublayers[1:5])
    counts = {}
    for watched in (True, False):
        ledger = Ledger()
        book(ledger, OpKind.BACKWARD, Sizes.of(spec, watched=watched), segment)
        counts[watched] = sum(event.delta_nbytes for event in ledger.events if event.delta_nbytes > 0)
    # Four residual connections; the last one's gradient came over the border and is added out of place either way.
    assert counts[True] - counts[False] == 3 * 14 * 55 * 4


def test_a_bare_count_has_no_activations() -> None:
    spec = RunSpec(model=bare(1000), unit=UnitPolicy.parse("model"))
    assert not any(event.category is Category.ACTIVATION for event in predict(spec).ranks[0].events)


def test_a_large_model_is_predicted_while_one_looks() -> None:
    spec = RunSpec(model=preset("llama3-70b"), strategy=Strategy.ZERO3, ranks=64, batch=1, seq=4096)
    # Some 20 thousand calls: a matter of milliseconds.
    assert num_calls(lambda: predict(spec)) < 100_000
    predict(spec).ranks[0].check()
