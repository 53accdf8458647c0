"""Shared stretches, of changes and of ranks, mean what they stand for spelt out."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest

from tests.every import pairs, settings_of
from zeroviz.category import Category
from zeroviz.errors import TraceError
from zeroviz.events import Changes, Event, Events, as_events
from zeroviz.ledger import Ledger
from zeroviz.memory import rest_padding_nbytes
from zeroviz.models import PRESETS, bare
from zeroviz.partition import alike_stretches, plan_for
from zeroviz.predict import predict
from zeroviz.rank_trace import AlikeRanks, RankTrace, alike
from zeroviz.spec import Precision, RunSpec, UnitPolicy
from zeroviz.trace import MAX_REPORTED, Trace


def drawn_events(seed: int) -> Events:
    """Stretches of up to nine changes, some repeated, of the device, of its kernels and of the host."""
    draw = random.Random(seed)
    categories = (Category.ACTIVATION, Category.TEMPORARY, Category.KERNEL_SCRATCH, Category.HOST_GRAD)
    stretches = [
        Changes((draw.choice(categories), draw.randint(-90, 100)) for _ in range(draw.randint(0, 9))) for _ in range(5)
    ]
    wheres = [("forward", "forward", f"block {number}") for number in range(3)]
    num_parts = draw.randint(0, 12)
    return Events(draw.choices(wheres, k=num_parts), draw.choices(stretches, k=num_parts))


@pytest.mark.parametrize("seed", range(200))
def test_a_peak_by_stretches_is_the_peak_by_events(seed: int) -> None:
    events, rest = drawn_events(seed), {Category.SHARDED_PARAM: 7, Category.HOST_PARAM: 11}
    rank = RankTrace(rank=0, rest=rest, events=events, step_counter_nbytes=4)
    for peak, counted, start in (
        (rank.peak(), [e.delta_nbytes if e.category.on_device else 0 for e in events], 7),
        (rank.machine_peak(), [e.delta_nbytes for e in events], 7 + 11 + 4),
    ):
        totals = list(accumulate(counted, initial=start))
        first = totals.index(max(totals))
        assert peak.total == max(totals)
        assert (peak.phase, peak.op, peak.unit) == (events[first - 1][:3] if first else ("at rest", "", ""))
    assert sum(rank.peak().by_category.values()) == rank.peak().total
    assert sum(rank.machine_peak().by_category.values()) + 4 == rank.machine_peak().total


@pytest.mark.parametrize("seed", range(20))
def test_events_are_a_sequence_equal_to_what_they_stand_for(seed: int) -> None:
    events = drawn_events(seed)
    plain = tuple(events)
    assert len(events) == len(plain) and events == plain and plain == events and hash(events) == hash(plain)
    assert [events[i] for i in range(-len(plain), len(plain))] == [*plain, *plain]
    assert events[1:4] == plain[1:4]
    assert as_events(plain) == events and as_events(events) is events
    assert events != (*plain, Event("forward", "forward", "", Category.INPUT, 1))


def test_a_ledger_keeps_shared_stretches_whole_and_in_their_place() -> None:
    ledger, stretch = Ledger(), Changes([(Category.TEMPORARY, 3), (Category.TEMPORARY, -3)])
    ledger.at("forward", "forward", "a")
    ledger.alloc("x", 5, Category.ACTIVATION)
    ledger.replay(stretch)
    ledger.at("backward", "backward", "a")
    ledger.replay(stretch)
    ledger.free("x")
    assert [event.delta_nbytes for event in ledger.events] == [5, 3, -3, 3, -3, -5]
    assert [event.phase for event in ledger.events] == ["forward"] * 3 + ["backward"] * 3
    assert [changes is stretch for _, changes in ledger.events.parts] == [False, True, True, False]


SPECS = [
    RunSpec(
        model=PRESETS[model],
        precision=precision,
        ranks=ranks,
        unit=UnitPolicy.parse(unit),
        **settings_of(strategy, ranks),
    )
    for model, unit in (("tiny", "block"), ("tiny-llama", "layer"), ("gpt2", "model"))
    for strategy, precision in pairs((Precision.FP32, Precision.BF16_FP32GRAD))
    for ranks in (1, 2, 7, 64, 1000)
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.model.name} {spec.strategy.value} {spec.ranks}")
def test_stretches_of_ranks_are_those_that_pad_alike(spec: RunSpec) -> None:
    """No stretch has two paddings in it; and all ranks are there, each with its own."""
    padding = [rest_padding_nbytes(spec, rank) for rank in range(spec.ranks)]
    for stretch in alike_stretches(spec):
        assert len({padding[rank] for rank in stretch}) == 1
    ranks = predict(spec).ranks
    assert [(rank.rank, rank.padding_nbytes) for rank in ranks] == list(enumerate(padding))
    # Each unit has at most two borders, in each shard group.
    assert len(alike(ranks)) <= (2 * len(plan_for(spec).units) + 1) * spec.num_replicas


def test_alike_ranks_are_a_sequence() -> None:
    first, later = RankTrace(rank=0, rest={}), RankTrace(rank=3, rest={}, padding_nbytes=5)
    ranks = AlikeRanks([(range(3), first), (range(3, 7), later)])
    plain = tuple(replace(first if rank < 3 else later, rank=rank) for rank in range(7))
    assert len(ranks) == 7 and tuple(ranks) == plain and ranks == plain
    assert [ranks[i] for i in range(-7, 7)] == [*plain, *plain]
    assert ranks[2:5] == plain[2:5] and ranks[0] is first and ranks[3] is later
    with pytest.raises(IndexError):
        ranks[7]
    assert alike(ranks) == ((range(3), first), (range(3, 7), later))
    assert [stretch for stretch, _ in alike(plain)] == [range(rank, rank + 1) for rank in range(7)]


def test_a_report_of_very_many_ranks_lists_those_that_differ() -> None:
    """10**15 elements over 2**20 ranks: a shard is 953,674,317; all but the last are full of elements."""
    spec = RunSpec(model=bare(10**15), ranks=2**20, unit=UnitPolicy.parse("model"))
    report = predict(spec).report()
    assert [rank["rank"] for rank in report["ranks"]] == [0, 2**20 - 1]
    assert [rank["at_rest"]["padding_nbytes"] for rank in report["ranks"]] == [0, 16 * (2**20 * 953_674_317 - 10**15)]
    assert "1,048,576 ranks" in report["notes"][-1]
    few = predict(replace(spec, ranks=MAX_REPORTED)).report()
    assert len(few["ranks"]) == MAX_REPORTED and not any("listed" in note for note in few["notes"])


@pytest.mark.parametrize("ranks", [1, 5, 1000, 10**6])
def test_a_traces_file_grows_with_what_differs_and_not_with_the_ranks(ranks: int) -> None:
    """The same events are written once, and alike neighbours as one entry; what is read back is equal."""
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=ranks))
    text = trace.to_json()
    assert len(text) < 60_000
    again = Trace.from_json(text)
    again.check()
    assert alike(again.ranks) == alike(trace.ranks)
    assert replace(again, ranks=()) == replace(trace, ranks=())
    assert again.ranks[ranks - 1] == trace.ranks[ranks - 1]


def test_a_file_that_refers_to_an_entry_it_has_not_got_is_refused() -> None:
    text = predict(RunSpec(model=PRESETS["tiny"], ranks=3)).to_json().replace('{"as": 0}', '{"as": 7}')
    assert '{"as": 7}' in text
    with pytest.raises(TraceError, match="garbles a field"):
        Trace.from_json(text)
