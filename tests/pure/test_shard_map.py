"""Who holds what: every interval at its place, and the bytes of all of them those of the predicted trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.every import settings_of
from tests.work import num_calls
from zeroviz.category import Category
from zeroviz.errors import SpecError
from zeroviz.implementations import PAIRS, PRECISIONS
from zeroviz.models import PRESETS, bare
from zeroviz.partition import plan_for, shard_bounds
from zeroviz.predict import predict
from zeroviz.shard_map import MAX_ROWS, Panel, ShardMap, build_shard_map
from zeroviz.shard_rules import Hold, Piece, Slot, TensorClass
from zeroviz.spec import Implementation, Offload, Optimizer, Precision, RunSpec, Settings, Strategy, UnitPolicy
from zeroviz.witness.flat import flat_units
from zeroviz.witness.fsdp2_groups import local_numels, parameter_order
from zeroviz.witness.megatron_buffer import buckets, owned_pieces
from zeroviz.witness.zero_redundancy import owners

EVERY = [(impl, strategy) for impl, strategies in PAIRS.items() for strategy in strategies]
RANKS = (1, 2, 3, 4, 7)
# Nothing divides these: see `zeroviz.models`.
UNEVEN = ("tiny", "tiny-llama")
UNITS = ("model", "block", "block:2", "layer", "numel:30000")


def spec_of(*, ranks: int = 4, strategy: Strategy = Strategy.ZERO3, **fields: Any) -> RunSpec:
    return RunSpec(**{"model": PRESETS["tiny"], "ranks": ranks, **settings_of(strategy, ranks), **fields})


def map_of(**fields: Any) -> ShardMap:
    return build_shard_map(spec_of(**fields))


def specs(impl: Implementation, strategy: Strategy, **fields: Any) -> Iterator[RunSpec]:
    """Those of all uneven models, numbers of ranks, units and recipes that the pair has."""
    for ranks, precision, unit, model in product(RANKS, PRECISIONS[impl], UNITS, UNEVEN):
        try:
            yield spec_of(
                model=PRESETS[model], ranks=ranks, impl=impl, strategy=strategy, precision=precision,
                unit=UnitPolicy.parse(unit), **fields,
            )  # fmt: skip
        except SpecError:
            assert (strategy, impl) in REFUSING  # a recipe that the pair has not


REFUSING = {(Strategy.MEGATRON_OPTIM, Implementation.OWN), (Strategy.DDP, Implementation.DEEPSPEED)}


def assert_exact(spec: RunSpec) -> None:
    """What every drawn rank holds by the map is what it holds at rest by prediction, category by category."""
    shard_map, trace = build_shard_map(spec), predict(spec)
    for number, row in enumerate(shard_map.rows):
        if row.is_folded:
            continue
        held = Counter(shard_map.left_out)
        for panel in shard_map.panels:
            lane = panel.lanes[number]
            numel = sum(piece.stop - piece.start for piece in lane.pieces)
            nbytes = numel * panel.itemsize * panel.copies + lane.scales_nbytes
            assert (
                lane.nbytes == nbytes == panel.nbytes_of(sum(piece.numel for piece in lane.pieces)) + lane.scales_nbytes
            )
            assert panel.category not in held  # a category has one panel, and nothing of it is left out
            held[panel.category] = nbytes
        rank = trace.ranks[row.ranks[0]]
        assert {which: nbytes for which, nbytes in held.items() if nbytes} == {**rank.at_rest, **rank.at_rest_on_host}


# ---- bytes ----


@pytest.mark.parametrize(("impl", "strategy"), EVERY)
def test_the_bytes_are_the_traces(impl: Implementation, strategy: Strategy) -> None:
    found = list(specs(impl, strategy))
    assert len(found) >= len(RANKS) * len(UNITS) * len(UNEVEN) * 2
    for spec in found:
        assert_exact(spec)


@pytest.mark.parametrize(("impl", "strategy"), EVERY)
@pytest.mark.parametrize("optimizer", [each for each in Optimizer if each is not Optimizer.ADAMW])
def test_the_bytes_are_the_traces_whatever_the_optimizer(
    impl: Implementation, strategy: Strategy, optimizer: Optimizer
) -> None:
    if impl is Implementation.MEGATRON and optimizer is not Optimizer.ADAMW_FOREACH:
        with pytest.raises(SpecError, match="shards AdamW only"):
            spec_of(impl=impl, strategy=strategy, optimizer=optimizer)
        return
    for ranks in (1, 3, 4):
        spec = spec_of(impl=impl, strategy=strategy, ranks=ranks, optimizer=optimizer)
        assert_exact(spec)
        classes = {panel.tensors for panel in build_shard_map(spec).panels}
        assert (TensorClass.MOMENTS in classes) == (optimizer is not Optimizer.SGD)


@pytest.mark.parametrize(("impl", "strategy"), EVERY)
@pytest.mark.parametrize("ranks", [4, 64, 1000])
def test_the_bytes_of_the_rows_that_are_drawn_are_the_traces(
    impl: Implementation, strategy: Strategy, ranks: int
) -> None:
    assert_exact(spec_of(model=PRESETS["gpt2" if ranks == 4 else "tiny"], impl=impl, strategy=strategy, ranks=ranks))


@pytest.mark.parametrize(
    "fields",
    [
        {"offload": Offload.OPTIMIZER, "strategy": Strategy.ZERO1},
        {"offload": Offload.OPTIMIZER, "strategy": Strategy.ZERO2, "precision": Precision.BF16},
        {"offload": Offload.OPTIMIZER, "strategy": Strategy.DDP, "precision": Precision.BF16_MIXED},
        {"offload": Offload.PARAMS},
        {"offload": Offload.PARAMS, "precision": Precision.BF16_FP32GRAD, "strategy": Strategy.HYBRID_SHARD},
        {"model": bare(1_000_003), "unit": UnitPolicy.parse("model")},
        {"model": bare(5), "unit": UnitPolicy.parse("model"), "impl": Implementation.FSDP1, "ranks": 7},
        {"impl": Implementation.FSDP1, "settings": Settings(use_orig_params=True)},
        {"impl": Implementation.FSDP1, "settings": Settings(use_orig_params=True), "strategy": Strategy.DDP},
        {"impl": Implementation.DDP, "settings": Settings(bucket_view=True), "strategy": Strategy.DDP},
        {"impl": Implementation.DEEPSPEED, "settings": Settings(persistence_numel=60, bucket_numel=5000)},
        {"impl": Implementation.DEEPSPEED, "settings": Settings(persistence_numel=0)},
        {
            "impl": Implementation.MEGATRON, "settings": Settings(bucket_numel=20_000),
            "strategy": Strategy.MEGATRON_OPTIM, "precision": Precision.BF16_FP32GRAD,
        },
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_bytes_are_the_traces_whatever_the_options(fields: dict[str, Any], ranks: int) -> None:
    assert_exact(spec_of(**{"ranks": ranks, **fields}))


# ---- places ----


def lanes_of(shard_map: ShardMap, tensors: TensorClass) -> list[tuple[Piece, ...]]:
    (panel,) = [panel for panel in shard_map.panels if panel.tensors is tensors]
    return [lane.pieces for lane in panel.lanes]


def inside(slot: Slot, pieces: tuple[Piece, ...], hold: Hold) -> list[tuple[int, int]]:
    """What lies in the slot of a parameter, counted from where it begins."""
    return [
        (max(0, piece.start - slot.start), min(slot.stop, piece.stop) - slot.start)
        for piece in pieces
        if piece.hold is hold and piece.start < slot.stop and piece.stop > slot.start
    ]


def slots_by_name(shard_map: ShardMap) -> dict[str, Slot]:
    """The axis is unit by unit, a unit's parameters in their order."""
    shapes = [shape for unit in plan_for(shard_map.spec).units for shape in unit.params]
    assert [slot.numel for slot in shard_map.slots] == [shape.numel for shape in shapes]
    return {shape.name: slot for shape, slot in zip(shapes, shard_map.slots, strict=True)}


def marks(shard_map: ShardMap, pieces: Iterator[Piece]) -> tuple[list[int], list[int]]:
    """How often each element of a parameter, and each of padding, is in `pieces`."""
    counts = [0] * shard_map.numel
    for piece in pieces:
        for element in range(piece.start, piece.stop):
            counts[element] += 1
    real, padding = [], []
    for slot in shard_map.slots:
        real += counts[slot.start : slot.start + slot.numel]
        padding += counts[slot.start + slot.numel : slot.stop]
    return real, padding


@pytest.mark.parametrize(("impl", "strategy"), EVERY)
@pytest.mark.parametrize("ranks", [3, 4])
def test_parts_tile_the_axis_and_copies_fill_it(impl: Implementation, strategy: Strategy, ranks: int) -> None:
    """Of a class that is cut each element is held once in a shard group; of one that is whole, by every rank. Padding
    is held as often as that, or by nobody where moments have none."""
    spec = spec_of(model=PRESETS["tiny-llama"], impl=impl, strategy=strategy, ranks=ranks)
    shard_map = build_shard_map(spec)
    for panel in shard_map.panels:
        if panel.tensors is TensorClass.KEPT:
            continue  # the small parameters, none of which is above the limit here
        group = panel.lanes[:1] if panel.is_whole else panel.lanes[: spec.num_shards]
        real, padding = marks(shard_map, (piece for lane in group for piece in lane.pieces))
        assert set(real) == {1}
        assert len(set(padding)) <= 1
        pads = [piece.hold is Hold.PADDING for lane in group for piece in lane.pieces]
        assert any(pads) == any(padding)
        holds = {piece.hold for lane in panel.lanes for piece in lane.pieces} - {Hold.PADDING}
        assert holds == {Hold.WHOLE if panel.is_whole else Hold.OWNED}
        # Every group is a copy of the first one, every whole copy of another.
        step = 1 if panel.is_whole else spec.num_shards
        assert all(a.pieces == b.pieces for a, b in zip(panel.lanes, panel.lanes[step:], strict=False))
        for lane in panel.lanes:  # from left to right, within a unit each
            assert all(a.stop <= b.start for a, b in zip(lane.pieces, lane.pieces[1:], strict=False))
            for piece in lane.pieces:
                column = shard_map.columns[piece.unit]
                assert column.start <= piece.start < piece.stop <= column.stop


def test_five_of_seventy_seven_are_padding() -> None:
    """72 over 7 ranks: (-72) % 7 = 5, so 77 = 7 * 11, and rank 6 owns 66..77, of which 72..77 is padding."""
    shard_map = map_of(model=bare(72), unit=UnitPolicy.parse("model"), ranks=7)
    lanes = lanes_of(shard_map, TensorClass.PARAM)
    assert lanes[5] == (Piece(55, 66, 0, Hold.OWNED),)
    assert lanes[6] == (Piece(66, 72, 0, Hold.OWNED), Piece(72, 77, 0, Hold.PADDING))
    assert shard_map.numel == 77 and shard_map.columns[0].numel == 72


def test_of_three_elements_over_five_ranks_two_ranks_hold_padding_alone() -> None:
    lanes = lanes_of(map_of(model=bare(3), unit=UnitPolicy.parse("model"), ranks=5), TensorClass.MOMENTS)
    assert [lane[0].hold for lane in lanes] == [Hold.OWNED] * 3 + [Hold.PADDING] * 2


@pytest.mark.parametrize("strategy", [Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3, Strategy.HYBRID_SHARD])
def test_our_own_shards_are_where_partition_says(strategy: Strategy) -> None:
    spec = spec_of(strategy=strategy, ranks=6)
    shard_map = build_shard_map(spec)
    for rank, pieces in enumerate(lanes_of(shard_map, TensorClass.MOMENTS)):
        for unit, column in zip(plan_for(spec).units, shard_map.columns, strict=True):
            here = [piece for piece in pieces if piece.unit == unit.index]
            first, stop = shard_bounds(unit, spec, rank)
            assert (here[0].start - column.start, here[-1].stop - column.start) == (first, stop)


def test_what_is_whole_and_what_is_cut_follows_the_stage() -> None:
    """The paper's figure: stage by stage one class more is cut."""
    whole = {
        strategy: {panel.tensors for panel in map_of(strategy=strategy).panels if panel.is_whole}
        for strategy in (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3)
    }
    param, grad, moments = TensorClass.PARAM, TensorClass.GRAD, TensorClass.MOMENTS
    assert list(whole.values()) == [{param, grad, moments}, {param, grad}, {param}, set()]


def test_fsdp2_cuts_each_parameter_by_rows() -> None:
    """tiny's token embedding has 257 rows of 55: over 3 ranks 86, 86 and 85, and one row of padding."""
    spec = spec_of(impl=Implementation.FSDP2, ranks=3)
    shard_map = build_shard_map(spec)
    slots = slots_by_name(shard_map)
    token = slots["wte.weight"]
    assert (token.numel, token.padding) == (257 * 55, 55)
    lanes = lanes_of(shard_map, TensorClass.PARAM)
    assert [inside(token, lane, Hold.OWNED) for lane in lanes] == [
        [(0, 86 * 55)], [(86 * 55, 172 * 55)], [(172 * 55, 257 * 55)],
    ]  # fmt: skip
    assert [inside(token, lane, Hold.PADDING) for lane in lanes] == [[], [], [(257 * 55, 258 * 55)]]
    for rank, lane in enumerate(lanes_of(shard_map, TensorClass.MOMENTS)):
        assert not [piece for piece in lane if piece.hold is Hold.PADDING]
        held = tuple(
            sum(stop - start for start, stop in inside(slots[shape.name], lane, Hold.OWNED))
            for shape in parameter_order(spec)
        )
        assert held == local_numels(spec, rank)


def test_fsdp2_leaves_ranks_without_a_row() -> None:
    """A bias of 3 * 55 = 165 over 7 ranks: 24 each, the last has 21. A norm of 55 over 60 ranks has one a rank, so that
    the last five hold padding."""
    shard_map = map_of(impl=Implementation.FSDP2, ranks=7)
    lanes = lanes_of(shard_map, TensorClass.PARAM)
    slot = slots_by_name(shard_map)["h.0.attn.c_attn.bias"]
    assert slot.numel == 165 and slot.padding == 7 * 24 - 165
    assert [sum(b - a for a, b in inside(slot, lane, Hold.OWNED)) for lane in lanes] == [24] * 6 + [21]
    large = map_of(impl=Implementation.FSDP2, ranks=60)
    norm = slots_by_name(large)["ln_f.weight"]
    last = lanes_of(large, TensorClass.PARAM)[-1]
    assert inside(norm, last, Hold.OWNED) == [] and inside(norm, last, Hold.PADDING) == [(59, 60)]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_cuts_flat_parameters(use_orig_params: bool) -> None:
    """Pieces of each parameter as the flat parameter has them; with `use_orig_params` at multiples of 16 bytes, and no
    moments of padding."""
    spec = spec_of(impl=Implementation.FSDP1, ranks=3, settings=Settings(use_orig_params=use_orig_params))
    shard_map = build_shard_map(spec)
    slots = slots_by_name(shard_map)
    for rank, lane in enumerate(lanes_of(shard_map, TensorClass.PARAM)):
        for flat in flat_units(spec):
            held = [
                sum(stop - start for start, stop in inside(slots[shape.name], lane, Hold.OWNED))
                for shape in flat.unit.params
            ]
            assert tuple(held) == flat.pieces(rank)
    for flat, column in zip(flat_units(spec), shard_map.columns, strict=True):
        starts = tuple(slots[shape.name].start - column.start for shape in flat.unit.params)
        assert starts == flat.starts and column.stop - column.start == flat.gathered_numel
    pads = any(piece.hold is Hold.PADDING for lane in lanes_of(shard_map, TensorClass.MOMENTS) for piece in lane)
    assert pads is not use_orig_params


def test_zero_redundancy_deals_out_whole_parameters() -> None:
    spec = spec_of(impl=Implementation.ZERO_REDUNDANCY, strategy=Strategy.ZERO1, ranks=3)
    shard_map = build_shard_map(spec)
    slots = slots_by_name(shard_map)
    lanes = lanes_of(shard_map, TensorClass.MOMENTS)
    for shapes, lane in zip(owners(spec), lanes, strict=True):
        owned = {shape.name for shape in shapes}
        for name, slot in slots.items():
            assert inside(slot, lane, Hold.OWNED) == ([(0, slot.numel)] if name in owned else [])
    numels = [sum(piece.numel for piece in lane) for lane in lanes]
    assert len(set(numels)) == 3  # uneven


def test_of_more_ranks_than_parameters_the_last_own_nothing() -> None:
    spec = spec_of(impl=Implementation.ZERO_REDUNDANCY, strategy=Strategy.ZERO1, ranks=2**20)
    shard_map = build_shard_map(spec)
    assert lanes_of(shard_map, TensorClass.MOMENTS)[-1] == ()
    num_params = len(spec.model.params)
    assert f"ranks from {num_params} on own nothing" in " ".join(shard_map.notes)
    # The largest parameter, 257 x 55, is the first rank's, the next ones of 222 x 55 the next one's, and so on.
    assert [sum(p.numel for p in lane) for lane in lanes_of(shard_map, TensorClass.MOMENTS)[:3]] == [
        257 * 55, 222 * 55, 222 * 55,
    ]  # fmt: skip


@pytest.mark.parametrize("bucket_numel", [None, 20_000])
def test_megatron_owns_pieces_of_a_buffer_that_runs_backwards(bucket_numel: int | None) -> None:
    spec = spec_of(
        impl=Implementation.MEGATRON, strategy=Strategy.MEGATRON_OPTIM, ranks=3,
        precision=Precision.BF16_FP32GRAD, settings=Settings(bucket_numel=bucket_numel),
    )  # fmt: skip
    shard_map, parts = build_shard_map(spec), buckets(spec)
    slots = slots_by_name(shard_map)
    assert shard_map.numel == parts[-1].stop
    assert (len(parts) > 1) == (bucket_numel is not None)
    for rank, lane in enumerate(lanes_of(shard_map, TensorClass.MASTER)):
        held = [
            stop - start
            for bucket in parts
            for extent in bucket.extents
            for start, stop in inside(slots[extent.shape.name], lane, Hold.OWNED)
        ]
        assert tuple(held) == owned_pieces(parts, 3, rank)
    if bucket_numel is None:  # rank 0 has the last block's MLP, the last rank the embedding
        first, *_, last = lanes_of(shard_map, TensorClass.MASTER)
        assert max(piece.stop for piece in first) == slots["h.2.mlp.c_proj.bias"].start + 55
        assert last[0].start == slots["wte.weight"].start
    whole = lanes_of(shard_map, TensorClass.PARAM)[0]
    assert sum(p.numel for p in whole if p.hold is Hold.PADDING) == shard_map.numel - spec.model.num_params


def test_deepspeeds_flat_tensor_is_in_order_of_use() -> None:
    """tiny's final norm is in the root unit, first on the axis, and last in memory: so the last rank owns it, and the
    padding behind it. 133,106 over 7 ranks, padded to a multiple of 14: 133,112 = 14 * 9,508."""
    spec = spec_of(impl=Implementation.DEEPSPEED, strategy=Strategy.ZERO2, ranks=7)
    shard_map = build_shard_map(spec)
    slots, lanes = slots_by_name(shard_map), lanes_of(shard_map, TensorClass.MASTER)
    assert shard_map.numel == 133_112
    assert [sum(piece.numel for piece in lane) for lane in lanes] == [19_016] * 7
    last = slots["ln_f.bias"]
    assert last.unit == 0 and last.padding == 6
    assert inside(last, lanes[6], Hold.OWNED) == [(0, 55)] and inside(last, lanes[6], Hold.PADDING) == [(55, 61)]
    assert lanes[0][0].start == slots["wte.weight"].start == 0


def test_deepspeeds_stage_3_keeps_small_parameters_whole_besides() -> None:
    spec = spec_of(impl=Implementation.DEEPSPEED, settings=Settings(persistence_numel=100))
    shard_map = build_shard_map(spec)
    (kept,) = set(lanes_of(shard_map, TensorClass.KEPT))
    for shape, slot in zip(
        (shape for unit in plan_for(spec).units for shape in unit.params), shard_map.slots, strict=True
    ):
        assert bool(inside(slot, kept, Hold.WHOLE)) == (shape.numel <= 100)
    # A norm of 55 in 4 chunks of 14: rank 3 has 13 and one of padding.
    norm = slots_by_name(shard_map)["ln_f.weight"]
    lanes = lanes_of(shard_map, TensorClass.PARAM)
    assert [inside(norm, lane, Hold.OWNED) for lane in lanes] == [[(0, 14)], [(14, 28)], [(28, 42)], [(42, 55)]]
    assert inside(norm, lanes[3], Hold.PADDING) == [(55, 56)]


# ---- rows ----


def test_rows_are_ranks_up_to_sixteen() -> None:
    assert [row.label for row in map_of(ranks=3).rows] == ["rank 0", "rank 1", "rank 2"]
    assert len(map_of(ranks=MAX_ROWS).rows) == MAX_ROWS and not any(row.is_folded for row in map_of(ranks=16).rows)


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        # 218,112,000 of a block and 525,336,576 of the embedding divide by 4096, and so does all else.
        ({"model": PRESETS["llama3-8b"], "ranks": 4096}, [*range(7), "ranks 7 to 4,094", 4095]),
        # tiny's blocks of 37,237 are 38 a rank, so that of 1000 ranks those from 980 on hold padding alone.
        ({"ranks": 1000}, [*range(7), "ranks 7 to 995", 996, 997, 998, 999]),
        ({"ranks": 1000, "strategy": Strategy.DDP}, [*range(7), "ranks 7 to 998", 999]),
    ],
)
def test_many_ranks_share_a_row(fields: dict[str, Any], labels: list[int | str]) -> None:
    shard_map = map_of(**fields)
    assert [row.label for row in shard_map.rows] == [
        label if isinstance(label, str) else f"rank {label:,}" for label in labels
    ]
    (folded,) = [row for row in shard_map.rows if row.is_folded]
    assert f"{len(folded.ranks):,} ranks share one row, {folded.label}" in " ".join(shard_map.notes)


def test_groups_stand_in_the_rows_and_small_ones_are_not_torn() -> None:
    few = build_shard_map(spec_of(strategy=Strategy.HYBRID_SHARD, ranks=8, shard_ranks=4))
    assert [(row.group, row.shard) for row in few.rows] == [(g, s) for g in range(2) for s in range(4)]
    assert few.rows[5].label == "rank 5, group 1, shard 1"
    assert "2 groups, each a replica" in few.notes[0]
    for panel in few.panels:
        assert [lane.pieces for lane in panel.lanes[:4]] == [lane.pieces for lane in panel.lanes[4:]]
    many = build_shard_map(spec_of(strategy=Strategy.HYBRID_SHARD, ranks=60, shard_ranks=3))
    assert [row.ranks[0] for row in many.rows] == [0, 1, 2, 3, 4, 5, 6, 57, 58, 59]
    assert [row.group for row in many.rows] == [0, 0, 0, 1, 1, 1, None, 19, 19, 19]


@pytest.mark.parametrize(
    ("ranks", "group", "parts"),
    [
        (64, 8, "replicas of ranks 0 to 7"),
        (60, 3, "replicas of ranks 0 to 2"),
        (64, 16, "each its own part of its group"),
        (64, 64, "each its own part"),
        (64, 1, "replicas of rank 0"),
    ],
)
def test_a_folded_row_tells_replicas_from_parts(ranks: int, group: int, parts: str) -> None:
    """Rank n holds what rank n mod G does: that is drawn for all of a group, or it is not."""
    fields = {"strategy": Strategy.HYBRID_SHARD, "ranks": ranks, "shard_ranks": group}
    shard_map = map_of(**fields)
    (folded,) = [row for row in shard_map.rows if row.is_folded]
    assert folded.parts == parts
    drawn = {row.ranks[0] for row in shard_map.rows if row.ranks[0] < folded.ranks[0]}
    assert parts.startswith("replicas") == all(rank % group in drawn for rank in folded.ranks)


@pytest.mark.parametrize(("impl", "strategy"), EVERY)
def test_a_million_ranks_cost_what_sixty_four_do(impl: Implementation, strategy: Strategy) -> None:
    """The work follows the rows that are drawn: ten times fewer calls than there are ranks."""
    spec = spec_of(impl=impl, strategy=strategy, ranks=2**20, model=PRESETS["gpt2"])
    assert num_calls(lambda: build_shard_map(spec)) < spec.ranks / 10
    shard_map = build_shard_map(spec)
    num_params = len(shard_map.slots)
    assert len(shard_map.rows) <= MAX_ROWS
    for panel in shard_map.panels:
        assert all(len(lane.pieces) <= 2 * num_params for lane in panel.lanes)
        folded = next(lane for lane in panel.lanes if shard_map.rows[lane.row].is_folded)
        assert (folded.nbytes is None) == (not panel.is_whole) == (folded.pieces == ())


# ---- words ----


def labels(panels: tuple[Panel, ...]) -> list[str]:
    return [panel.label for panel in panels]


def test_panels_are_named_after_what_is_held_and_how() -> None:
    mixed = map_of(strategy=Strategy.ZERO1, precision=Precision.BF16_MIXED)
    assert labels(mixed.panels) == [
        "Parameters, whole copy", "Gradients, whole copy", "Master copy, own shard", "Adam m and v, own shard",
    ]  # fmt: skip
    assert [panel.detail for panel in mixed.panels] == [
        "bf16, 2 B an element", "bf16, 2 B an element", "fp32, 4 B an element", "fp32, 2 x 4 B an element",
    ]  # fmt: skip
    momentum = map_of(optimizer=Optimizer.SGD_MOMENTUM).panels[-1]
    assert (momentum.label, momentum.detail) == ("Momentum, own shard", "fp32, 4 B an element")
    dealt = map_of(impl=Implementation.ZERO_REDUNDANCY, strategy=Strategy.ZERO1).panels[-1]
    assert dealt.label == "Adam m and v, of own parameters"


def test_what_lies_on_the_host_is_said() -> None:
    shard_map = map_of(strategy=Strategy.ZERO2, offload=Offload.OPTIMIZER)
    hosts = {panel.tensors: "in the host's memory" in panel.detail for panel in shard_map.panels}
    param, grad, master, moments = TensorClass.PARAM, TensorClass.GRAD, TensorClass.MASTER, TensorClass.MOMENTS
    assert hosts == {param: False, grad: False, master: True, moments: True}
    assert "the host's memory included" in shard_map.sentence
    assert all("in the host's memory" in panel.detail for panel in map_of(offload=Offload.PARAMS).panels)


def test_what_has_no_place_is_left_out_and_said() -> None:
    ddp = map_of(impl=Implementation.DDP, strategy=Strategy.DDP)
    assert ddp.left_out == {Category.BUCKET: 4 * 133_106}
    assert "532.4 kB of gradient buckets" in ddp.notes[-1]
    stage3 = map_of(impl=Implementation.DEEPSPEED)
    assert "2 GB of gradient buckets and 9 B of norms and flags" in stage3.notes[-1]
    assert map_of().left_out == {}
    stage2 = map_of(impl=Implementation.DEEPSPEED, strategy=Strategy.ZERO2)
    assert "No gradient is held between two steps." in stage2.notes
    assert "Plain SGD holds no state." in map_of(optimizer=Optimizer.SGD).notes
    scales = map_of(optimizer=Optimizer.ADAMW_8BIT)
    assert any("of scales of the quantized moments" in note for note in scales.notes)


def test_the_sentence_says_who_holds_what() -> None:
    """133,106 parameters in units of 21,395 and three of 37,237, over 4 ranks: 5,349 + 3 * 9,310 = 33,279 a rank."""
    sentence = map_of(strategy=Strategy.ZERO1).sentence
    assert sentence.startswith("ZeRO-1 on 4 ranks, fp32: who holds what.")
    assert f"Parameters: a whole copy on every rank, {4 * 4 * 33_279:,} B each." in sentence
    assert f"Adam m and v: each rank its own shard, {8 * 33_279:,} B each." in sentence
    # Of FSDP2's 3 ranks the last has fewer rows: what moments differ by is said.
    uneven = map_of(impl=Implementation.FSDP2, ranks=3)
    first, *_, last = lanes_of(uneven, TensorClass.MOMENTS)
    most, least = (8 * sum(piece.numel for piece in lane) for lane in (first, last))
    assert f"{least:,} B on rank 2 to {most:,} B on rank 0." in uneven.sentence
    assert "the only rank holds" in map_of(ranks=1).sentence
    assert "dealt out to the ranks" in map_of(impl=Implementation.ZERO_REDUNDANCY, strategy=Strategy.ZERO1).sentence
