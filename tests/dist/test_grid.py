"""Every implementation x strategy x ranks x precision recipe x unit, each on real ranks: the table of the README.

Each cell trains to parity with one process on the global batch, with the same casts, and holds at rest, rank by rank
and category by category, the bytes that `predict` says: the allocator's own figure, and nothing beside what is named.
Nothing is divisible by anything: 55 and 47 wide, a vocabulary of 257, 17 tokens, and a bias of one element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
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
from zeroviz.spec import Implementation, Precision, RunSpec, Strategy, UnitPolicy, Zero1Form
from zeroviz.toggles import group_choices

UNEVEN = replace(PRESETS["tiny"], name="uneven", ffn=1)
LLAMA = PRESETS["tiny-llama"]
UNITS = ("model", "block")
RANKS = range(1, MAX_RANKS + 1)
ROWS = [(impl, strategy, ranks) for impl, has in PAIRS.items() for strategy in has for ranks in RANKS]
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


def asked(impl: Implementation, strategy: Strategy, ranks: int) -> Iterator[dict[str, Any]]:
    """Of a row of the table and a number of ranks: each recipe it has, by the model and by the block. The two families
    of models take turns."""
    found = product(PRECISIONS[impl], UNITS, variants(impl, strategy, ranks))
    had = (each for each in found if impl is not Implementation.OWN or exists(strategy, each[0]))
    for number, (precision, unit, form) in enumerate(had):
        model = (UNEVEN, LLAMA)[(number + ranks) % 2]
        given = {"model": model, "ranks": ranks, "precision": precision, "unit": UnitPolicy.parse(unit), **form}
        yield {"impl": impl, "strategy": strategy, "batch": 2, "seq": 17, **given}


def cells(impl: Implementation, strategy: Strategy, ranks: int) -> list[RunSpec]:
    """Of these what is not refused."""
    return [RunSpec(**each) for each in asked(impl, strategy, ranks) if not is_refused(**each)]


def is_refused(impl: Implementation, strategy: Strategy, ranks: int, precision: Precision, **form: Any) -> bool:
    """In shard groups of one rank torch's FSDP1 would let the replicas train apart; DeepSpeed's stage 0 has no fp32
    gradients of bf16 parameters."""
    is_alone = impl is Implementation.FSDP1 and form.get("shard_ranks") == 1 < ranks
    is_wide = (impl, strategy) == (Implementation.DEEPSPEED, Strategy.DDP) and precision is Precision.BF16_FP32GRAD
    return is_alone or is_wide


@pytest.mark.parametrize(("impl", "strategy", "ranks"), ROWS)
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
            want_trained, start = one_process(spec)
        for copy in whole(spec, parts):
            assert distance(copy, want_trained, start) <= bound(spec), spec


def test_what_is_left_out_is_refused() -> None:
    """All others run, so every row has cells with every number of ranks. Of 638 these are left out: FSDP1's 3 recipes
    by 2 units with 2, 3 and 4 ranks, and 2 units of DeepSpeed's stage 0 with 1 to 4 ranks."""
    every = [each for row in ROWS for each in asked(*row)]
    left_out = [each for each in every if is_refused(**each)]
    sentence = r"shard_ranks is 1 with impl fsdp1|no fp32 gradients of bf16 parameters"
    for each in left_out:
        with pytest.raises(SpecError, match=sentence):
            RunSpec(**each)
    assert all(cells(*row) for row in ROWS)
    assert (len(every), len(left_out)) == (638, 3 * 2 * 3 + 2 * 4)
