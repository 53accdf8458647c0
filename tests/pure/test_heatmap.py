"""The map of what fits: every cell the peak of its spec, the boundary between what fits and what does not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from zeroviz.budget import largest_batch, longest_seq
from zeroviz.capacities import DEFAULT_RESERVE_NBYTES, Capacity, parse_capacity
from zeroviz.errors import SpecError
from zeroviz.heatmap import LEAST_ROWS, NUM_ROWS, RANKS, Cell, HeatMap, Upward, build_heatmap
from zeroviz.models import PRESETS, bare
from zeroviz.predict import predict
from zeroviz.quantity import format_nbytes
from zeroviz.spec import Checkpointing, Precision, RunSpec, Strategy, UnitPolicy

H100 = parse_capacity("h100-80gb")


def map_of(upward: Upward, capacity: Capacity = H100, reserve: int = DEFAULT_RESERVE_NBYTES, **fields: Any) -> HeatMap:
    spec = {"model": PRESETS["llama3-8b"], "ranks": 8, "precision": Precision.BF16_MIXED, "seq": 4096, **fields}
    return build_heatmap(RunSpec(**spec), upward, capacity, reserve)


MAPS = {
    "batch": map_of(Upward.BATCH),
    "sequence": map_of(Upward.SEQ),
    "odd ranks": map_of(Upward.SEQ, ranks=3, seq=777, batch=3),
    "ddp": map_of(Upward.BATCH, strategy=Strategy.DDP),
    "tiny": map_of(Upward.BATCH, model=PRESETS["tiny"], seq=32),
    "learned positions": map_of(Upward.SEQ, model=PRESETS["gpt2"], seq=1000),
    "recomputed": map_of(Upward.SEQ, checkpointing=Checkpointing(1)),
    "one buffer": map_of(Upward.BATCH, strategy=Strategy.MEGATRON_OPTIM, precision=Precision.FP32),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_cell_is_the_peak_of_its_spec_against_the_budget(name: str) -> None:
    found = MAPS[name]
    assert found.budget_nbytes == found.capacity.nbytes - found.reserve_nbytes
    assert len(found.rows) == len(found.values) and all(len(row) == len(found.ranks) for row in found.rows)
    for value, row in list(zip(found.values, found.rows, strict=True))[::4]:
        for ranks, cell in list(zip(found.ranks, row, strict=True))[::5]:
            spec = found.upward.at(found.spec, ranks, value)
            assert (spec.ranks, getattr(spec, found.upward.field)) == (cell.ranks, cell.value) == (ranks, value)
            assert cell.peak_nbytes == predict(spec).ranks[0].peak().total
            assert cell.spare_nbytes == found.budget_nbytes - cell.peak_nbytes
            assert cell.fits == (cell.peak_nbytes <= found.budget_nbytes)


@pytest.mark.parametrize("name", MAPS)
def test_axes_ascend_and_hold_the_present_state(name: str) -> None:
    found = MAPS[name]
    for axis in (found.ranks, found.values):
        assert all(low < high for low, high in pairwise(axis))
    assert set(RANKS) <= set(found.ranks) and len(found.values) <= NUM_ROWS + 1
    assert found.current.peak_nbytes == predict(found.spec).ranks[0].peak().total
    assert (found.current.ranks, found.current.value) == (
        found.spec.ranks, getattr(found.spec, found.upward.field),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["batch", "sequence", "odd ranks", "tiny", "recomputed"])
def test_the_rows_reach_just_beyond_what_fits_anywhere(name: str) -> None:
    found = MAPS[name]
    search = largest_batch if found.upward is Upward.BATCH else longest_seq
    most = search(replace(found.spec, ranks=RANKS[-1]), found.budget_nbytes).value
    assert most is not None and most < found.values[-1] <= max(2 * most, 2 ** (LEAST_ROWS - 1))
    assert not any(cell.fits for cell in found.rows[-1])


def test_learned_positions_are_the_end_of_the_sequences() -> None:
    assert MAPS["learned positions"].values[-1] == 1024


@pytest.mark.parametrize("name", MAPS)
def test_the_boundary_is_every_edge_between_the_two(name: str) -> None:
    found = MAPS[name]
    fits = {(c, r): cell.fits for r, row in enumerate(found.rows) for c, cell in enumerate(row)}
    edges = set(found.boundary)
    assert len(edges) == len(found.boundary)
    for (column, row), inside in fits.items():
        right, above = fits.get((column + 1, row)), fits.get((column, row + 1))
        assert ((column + 1, row, column + 1, row + 1) in edges) == (right is not None and right != inside)
        assert ((column, row + 1, column + 1, row + 1) in edges) == (above is not None and above != inside)


@pytest.mark.parametrize(
    ("spare", "words"),
    [
        (61_340_000_000, "+61.3"), (-4_210_000_000, "-4.2"), (0, "+0.0"), (1, "+0"), (-1, "-0"),
        (99_949_999_999, "+99.9"), (99_950_000_000, "+100"), (-9_999_499_999_999, "-9999"),
        (-9_999_500_000_000, "-10k"), (-74_200_000_000_000, "-74k"),
    ],
)  # fmt: skip
def test_what_is_spare_or_missing_is_said_in_few_letters_and_with_its_sign(spare: int, words: str) -> None:
    cell = Cell(1, 1, 1, spare)
    assert cell.words == words and (cell.words[0] == "+") == cell.fits


def test_words_say_capacity_reserve_and_what_the_present_state_leaves() -> None:
    found = MAPS["batch"]
    assert found.title == "Does llama3-8b fit in h100-80gb?"
    now = found.current
    assert f"{format_nbytes(now.spare_nbytes)} to spare" in found.subtitle[1] and "fits with" in found.subtitle[1]
    notes = " ".join(found.notes)
    # 80 GiB = 85.90 GB, 2 GiB = 2.15 GB, 78 GiB = 83.75 GB.
    for words in ("85.90 GB (80.00 GiB)", "nominal", "2.15 GB (2.00 GiB)", "assumed", "83.75 GB (78.00 GiB)"):
        assert words in notes
    assert "checkpointing block" in MAPS["recomputed"].subtitle[0]
    custom = map_of(Upward.BATCH, parse_capacity("24GB"), 0)
    assert "does not fit by" in custom.subtitle[1] and "nominal" not in " ".join(custom.notes)
    assert "nothing of it is kept in reserve" in custom.notes[0]


def test_what_has_no_map_is_refused_in_a_sentence() -> None:
    spec = RunSpec(model=bare(10**9), unit=UnitPolicy.parse("model"))
    with pytest.raises(SpecError, match="name a model"):
        build_heatmap(spec, Upward.BATCH, H100, 0)
    with pytest.raises(SpecError, match="leaves nothing"):
        map_of(Upward.BATCH, parse_capacity("2GiB"), 2 * 2**30)


@pytest.mark.parametrize(("ranks", "group"), [(8, 4), (6, 3), (4096, 4096)])
def test_more_shard_groups_are_columns_that_are_alike_and_a_note_says_so(ranks: int, group: int) -> None:
    found = map_of(Upward.BATCH, strategy=Strategy.HYBRID_SHARD, ranks=ranks, shard_ranks=group)
    assert ranks in found.ranks and all(count % group == 0 for count in found.ranks)
    assert all(len({cell.peak_nbytes for cell in row}) == 1 for row in found.rows)
    assert any("copies" in note for note in found.notes)
    assert found.current.peak_nbytes == predict(found.spec).ranks[0].peak().total
    assert not any("copies" in note for note in MAPS["batch"].notes)
