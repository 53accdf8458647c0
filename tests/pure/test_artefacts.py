"""What the machine borrows, in closed form: gloo's copies, the numbers beside tensors, kernels' tiles."""

from __future__ import annotations

from itertools import accumulate

import pytest

from tests.every import pairs, settings_of
from zeroviz import artefacts
from zeroviz.collectives import CollectiveOp
from zeroviz.ledger import Ledger
from zeroviz.models import PRESETS
from zeroviz.precision import DType, Optimizer
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy
from zeroviz.trace import Category

COPY, SCRATCH, BRIEF = Category.BACKEND_COPY, Category.KERNEL_SCRATCH, Category.TEMPORARY


def test_a_gather_is_copied_twice_and_a_reduction_cloned_once() -> None:
    ledger = Ledger()
    artefacts.start_copies(ledger, CollectiveOp.ALL_GATHER, 100, "unit")
    assert [event.delta_nbytes for event in ledger.events] == [100, -100, 100, -100]  # never both at a time
    artefacts.start_copies(ledger, CollectiveOp.REDUCE_SCATTER, 30, "unit")
    artefacts.start_copies(ledger, CollectiveOp.ALL_REDUCE, 1000, "another")
    artefacts.end_copies(ledger, "another")  # in place: there is nothing to let go
    artefacts.end_copies(ledger, "unit")
    assert [event.delta_nbytes for event in ledger.events][4:] == [30, -30]
    assert {event.category for event in ledger.events} == {COPY}


def test_ring_scratch_is_the_ranks_part_and_at_most_2_mib() -> None:
    assert artefacts.ring_scratch_nbytes(CollectiveOp.ALL_REDUCE, 1001, 2) == 501
    assert artefacts.ring_scratch_nbytes(CollectiveOp.REDUCE_SCATTER, 2**40, 8) == 2 * 2**20
    assert artefacts.ring_scratch_nbytes(CollectiveOp.ALL_GATHER, 2**40, 8) == 0
    assert artefacts.ring_scratch_nbytes(CollectiveOp.ALL_REDUCE, 2**40, 1) == 0


# Elements of two tensors in fp32 and the most an update holds, with what it borrows: 8 + 4 for a number.
@pytest.mark.parametrize(
    ("optimizer", "most", "temporaries"),
    [
        (Optimizer.ADAMW, 2 * 40 + 12, 2 * 40),  # sqrt(v) and the denominator of the larger one
        (Optimizer.ADAMW_FOREACH, 40 + 20 + 12, 40 + 20),  # sqrt(v) of both
        (Optimizer.ADAMW_FUSED, 12, 0),
        (Optimizer.SGD_MOMENTUM, 12, 0),
        (Optimizer.SGD, 0, 0),
    ],
)
def test_an_updates_most_is_its_temporaries_and_a_number(optimizer: Optimizer, most: int, temporaries: int) -> None:
    changes = list(artefacts.update(optimizer, [10, 5], DType.FP32, BRIEF))
    assert max(accumulate((nbytes for _, nbytes in changes), initial=0)) == most
    assert max(accumulate((nbytes for category, nbytes in changes if category is BRIEF), initial=0)) == temporaries
    assert sum(nbytes for _, nbytes in changes) == 0
    assert {category for category, _ in changes} <= {BRIEF, SCRATCH}


@pytest.mark.parametrize("model", ["tiny", "tiny-llama", "gpt2", "llama3-8b"])
def test_what_is_borrowed_is_given_back_within_its_op(model: str) -> None:
    """And so it is in no figure for another machine: at rest and peak do not know of it."""
    for strategy, precision in pairs((Precision.FP32, Precision.BF16_MIXED)):
        spec = RunSpec(model=PRESETS[model], precision=precision, ranks=4, clip_norm=1, **settings_of(strategy, 4))
        rank = predict(spec).ranks[0]
        held: dict[tuple[str, str, str], int] = {}
        for event in rank.events:
            if event.category is SCRATCH:
                held[event[:3]] = held.get(event[:3], 0) + event.delta_nbytes
        assert held and not any(held.values())
        assert not any(category.is_artefact for category in (*rank.at_rest, *rank.peak().by_category))
        assert rank.machine_peak().total >= rank.peak().total + rank.step_counter_nbytes


def test_one_rank_copies_nothing() -> None:
    for strategy in Strategy:
        events = predict(RunSpec(model=PRESETS["tiny"], ranks=1, **settings_of(strategy, 1))).ranks[0].events
        assert not any(event.category is COPY for event in events)
