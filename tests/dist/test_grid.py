"""Every implementation x strategy x ranks x precision recipe x unit, each on real ranks: the table of the README.

Each cell trains to parity with one process on the global batch, with the same casts, and holds at rest, rank by rank
and category by category, the bytes that `predict` says: the allocator's own figure, and nothing beside what is named.
Nothing is divisible by anything: 55 and 47 wide, a vocabulary of 257, 17 tokens, and a bias of one element.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from tests.dist.ranks import MAX_RANKS, RankPool
from tests.dist.references import bound, distance, megatron_reference, one_process
from tests.dist.trained import of_pieces, train, whole
from tests.every import exists
from zeroviz.errors import SpecError
from zeroviz.implementations import PAIRS, PRECISIONS
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.settings import Settings
from zeroviz.spec import Implementation, RunSpec, Strategy, UnitPolicy, Zero1Form
from zeroviz.toggles import group_choices

UNEVEN = replace(PRESETS["tiny"], name="uneven", ffn=1)
LLAMA = PRESETS["tiny-llama"]
UNITS = ("model", "block")
RANKS = range(1, MAX_RANKS + 1)
EXTRAS = {Implementation.DEEPSPEED: "deepspeed", Implementation.MEGATRON: "megatron"}


def variants(impl: Implementation, strategy: Strategy, ranks: int) -> list[dict[str, Any]]:
    """The forms of a row: shard groups of every size, resharding to a group, ZeRO-1 with an all-reduce."""
    if strategy.replicates:
        return [{"shard_ranks": shard_ranks} for shard_ranks in group_choices(ranks)]
    forms: list[dict[str, Any]] = [{}]
    if impl is Implementation.FSDP2 and strategy is Strategy.ZERO3:
        forms += [{"settings": Settings(reshard_ranks=number)} for number in group_choices(ranks)[1:-1]]
    if impl is Implementation.OWN and strategy is Strategy.ZERO1:
        forms.append({"zero1_form": Zero1Form.ALL_REDUCE})
    return forms


def cells(impl: Implementation, strategy: Strategy, ranks: int) -> list[RunSpec]:
    """Of a row of the table and a number of ranks: each recipe it has, by the model and by the block. The two families
    of models take turns."""
    found = []
    for precision in PRECISIONS[impl]:
        if impl is Implementation.OWN and not exists(strategy, precision):
            continue
        for unit in UNITS:
            for form in variants(impl, strategy, ranks):
                model = (UNEVEN, LLAMA)[(len(found) + ranks) % 2]
                given = {"model": model, "ranks": ranks, "precision": precision, "unit": UnitPolicy.parse(unit)}
                try:
                    found.append(RunSpec(impl=impl, strategy=strategy, batch=2, seq=17, **given, **form))
                except SpecError:
                    continue
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("impl", "strategy"), [(impl, strategy) for impl, strategies in PAIRS.items() for strategy in strategies]
)
def test_every_cell(rank_pool: RankPool, impl: Implementation, strategy: Strategy, ranks: int) -> None:
    if impl in EXTRAS and find_spec(EXTRAS[impl]) is None:
        pytest.skip(f"pip install zeroviz[{EXTRAS[impl]}]")
    for spec in cells(impl, strategy, ranks):
        results = rank_pool.run(train, spec)
        for want, got in zip(predict(spec).ranks, results, strict=True):
            assert got.rest == {category: nbytes for category, nbytes in want.rest.items() if nbytes}, (spec, want.rank)
            assert got.step_counter_nbytes == want.step_counter_nbytes, (spec, want.rank)
            assert got.padding_nbytes == want.padding_nbytes, (spec, want.rank)
            assert got.allocator_nbytes == want.rest_nbytes + want.step_counter_nbytes, (spec, want.rank)
        parts = [result.parts for result in results]
        if impl is Implementation.MEGATRON:
            want_trained, start = megatron_reference(spec, of_pieces(spec, parts)[1])
        else:
            want_trained, start = one_process(replace(spec, unit=UnitPolicy.parse("model")))
        for copy in whole(spec, parts):
            assert distance(copy, want_trained, start) <= bound(spec), spec
