"""Gemma-2 and Mixtral are not run by zeroviz, but what is booked for them is what torch's operators do: the branches of
tests/dist/counted_layers.py, event by event, as tests/dist/test_activations_exact.py does it for the families that run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from cluster.allocator import cpu_counter
from cluster.rehearse import rehearse
from cluster.text import load_batch
from tests.dist import test_activations_exact as exact
from tests.dist.counted_layers import as_llama, build
from tests.segments import book
from zeroviz.errors import SpecError
from zeroviz.ledger import Ledger
from zeroviz.models import Family, Sublayer, SublayerKind
from zeroviz.partition import Segment
from zeroviz.predict import predict
from zeroviz.schedule import OpKind
from zeroviz.spec import Precision, RunSpec, preset
from zeroviz.tape import Sizes
from zeroviz.trace import Category, Event

LLAMA = preset("tiny-llama")
MODELS = {
    "gemma2": replace(LLAMA, family=Family.GEMMA2, tied=True, caps_logits=True, heads=4, kv_heads=2, head_dim=14),
    "gemma2-bias": replace(LLAMA, family=Family.GEMMA2, caps_logits=False, attention_bias=True),
    "mixtral": replace(LLAMA, family=Family.MIXTRAL, experts=5, experts_per_token=3, heads=4, kv_heads=2, head_dim=14),
    "mixtral-one": replace(LLAMA, family=Family.MIXTRAL, experts=3, experts_per_token=1, tied=True),
}


@pytest.fixture(autouse=True)
def counted_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness builds these families' layers, and gives them the batch of a Llama model of their sizes."""

    def load(spec: RunSpec, **which: Any) -> Any:
        return load_batch(replace(spec, model=as_llama(spec.model)), **which)

    assert cpu_counter() is not None  # from now on the allocator knows how large what it frees is
    torch.set_num_threads(1)  # what a kernel borrows grows with its threads
    monkeypatch.setattr(exact, "build_sublayer", build)
    monkeypatch.setattr(exact, "load_batch", load)
    monkeypatch.setattr(exact, "MODELS", MODELS)


@pytest.mark.parametrize("precision", exact.RECIPES, ids=lambda recipe: recipe.value)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("segment", exact.SEGMENTS)
def test_every_allocation_and_free_is_counted(model: str, precision: Precision, segment: str) -> None:
    spec, sublayers = exact.case(model, precision, segment, (2, 7))
    expected = [
        exact.turns((event.category, event.delta_nbytes) for event in events if event.category.on_device)
        for events in exact.predicted(spec, sublayers, watched=True)
    ]
    for name, want, got in zip(("forward", "backward"), expected, exact.measured(spec, sublayers), strict=True):
        assert got == want, name


def without_scratch(changes: Iterable[tuple[Category, int]]) -> list[exact.Turn]:
    """What leaves its operator. What these families' own operators borrow inside is not booked, nor is a Python number,
    8 bytes, of which autograd keeps one at each use of a cap."""
    leaves = ((category, nbytes) for category, nbytes in changes if category.on_device and abs(nbytes) != 8)
    return exact.turns((Category.TEMPORARY, nbytes) for _, nbytes in leaves)


def booked(events: Iterable[Event]) -> list[exact.Turn]:
    return without_scratch((event.category, event.delta_nbytes) for event in events)


def assert_alike(got: list[exact.Turn], want: list[exact.Turn], *, routes: bool) -> None:
    """Turn by turn; where a router's forward is among them, at the largest moment and in the end.

    softmax and argsort are made of operators: what passes between these, some bytes a token, looks like scratch here.
    """
    if routes:
        sums = [list(accumulate(sum(turn.values()) for turn in turns)) for turns in (got, want)]
        assert [(max(held), held[-1]) for held in sums[:1]] == [(max(held), held[-1]) for held in sums[1:]]
    else:
        assert got == want


def routes(sublayers: tuple[Sublayer, ...], spec: RunSpec) -> bool:
    return spec.model.family is Family.MIXTRAL and any(each.kind is SublayerKind.MLP for each in sublayers)


@pytest.mark.parametrize("precision", exact.RECIPES, ids=lambda recipe: recipe.value)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("segment", ["attention", "mlp", "head", "two blocks", "model"])
def test_an_unwatched_step_is_counted(model: str, precision: Precision, segment: str) -> None:
    """As the allocator sees it: gradients are added in place where torch does so."""
    spec, sublayers = exact.case(model, precision, segment, (2, 7))
    run = exact.Run(spec, sublayers)
    in_forward = without_scratch(exact.allocator_changes(run.forward))
    run.drop_output()
    in_backward = without_scratch(exact.allocator_changes(run.backward))
    forward, backward = map(booked, exact.predicted(spec, sublayers, watched=False))
    assert_alike(in_forward, forward, routes=routes(sublayers, spec))
    assert_alike(in_backward, backward, routes=False)


@pytest.mark.parametrize("precision", exact.RECIPES, ids=lambda recipe: recipe.value)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("segment", ["attention", "mlp", "block", "two blocks"])
@pytest.mark.parametrize("alone", [True, False], ids=["whole region", "middle of a region"])
def test_a_checkpointed_segment_is_counted(model: str, precision: Precision, segment: str, alone: bool) -> None:
    """Forward without a graph, where nothing outlives the code that holds it."""
    spec, sublayers = exact.case(model, precision, segment, (2, 7))
    dry = Ledger()
    place = Segment(0, 0, "segment", sublayers, region=0, starts_region=alone, ends_region=alone)
    book(dry, OpKind.FORWARD, Sizes.of(spec), place)
    run = exact.Run(spec, sublayers)
    kept = run.activation
    assert kept is not None
    changes = exact.allocator_changes(lambda: run.forward_without_graph(keeps_input=alone))
    if not alone:  # the test holds the input; the executor would let it go
        changes.append((Category.TEMPORARY, -kept.untyped_storage().nbytes()))
    assert_alike(without_scratch(changes), booked(dry.events), routes=routes(sublayers, spec))


@pytest.mark.parametrize("name", ["gemma2-9b", "mixtral-8x7b"])
def test_a_counted_family_is_not_rehearsed(name: str) -> None:
    with pytest.raises(SpecError, match=rf"neither run nor rehearsed; use `zeroviz predict --model {name} "):
        rehearse(RunSpec(model=preset(name), ranks=8))


def test_qwen2_is_rehearsed_as_predicted() -> None:
    """Real layers with biases on query, key and value: every op's maximum, and what crosses the wire."""
    spec = RunSpec(model=replace(preset("tiny-llama"), name="qwen2", qkv_bias=True, tied=True), ranks=3, seq=17)
    (rank, *_), (expected, *_) = rehearse(spec).ranks, predict(spec).ranks
    assert rank.peak() == expected.peak()
    assert rank.rest == expected.rest
    assert rank.collectives == expected.collectives
