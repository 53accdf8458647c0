"""What each rank sends, as data: the closed forms of each strategy, sums to the byte, differences by name."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.every import settings_of
from tests.work import num_calls
from zeroviz.collectives import CollectiveOp, Group
from zeroviz.errors import SpecError, TraceError
from zeroviz.models import PRESETS, bare
from zeroviz.partition import plan_for
from zeroviz.predict import predict
from zeroviz.rank_trace import RankTrace
from zeroviz.spec import Implementation, Offload, Precision, RunSpec, Settings, Strategy, UnitPolicy, Zero1Form
from zeroviz.trace import Origin, Trace
from zeroviz.wire_scene import WireScene, WireSegment, build_wire_scene
from zeroviz.wire_sums import Measure, kinds_of, short
from zeroviz.wire_words import MAX_KINDS, MAX_NAMED

TINY = PRESETS["tiny"]
ONE_UNIT = UnitPolicy.parse("model")
P = TINY.num_params  # 133,106 = 2 * 66,553: no multiple of 4 or 8, and neither are its units, so there is padding


def spec_of(**fields: Any) -> RunSpec:
    return RunSpec(**{"model": TINY, "ranks": 4, **fields})


def trace_of(**fields: Any) -> Trace:
    return predict(spec_of(**fields))


def grid() -> list[RunSpec]:
    """Every strategy of every implementation that has it, on 1, 2, 3 and 8 ranks."""
    specs = []
    for impl in Implementation:
        for strategy in Strategy:
            for ranks in (1, 2, 3, 8):
                try:
                    specs.append(spec_of(impl=impl, ranks=ranks, **settings_of(strategy, ranks)))
                except SpecError:
                    continue
    return specs


GRID = grid()


def live(trace: Trace, **ranks: RankTrace) -> Trace:
    """A measured trace; rank0=... is another one than predicted."""
    seen = [ranks.get(f"rank{rank.rank}", rank) for rank in trace.ranks]
    return replace(trace, origin=Origin.LIVE, ranks=tuple(seen))


def with_extra_gather(rank: RankTrace, nbytes: int) -> RankTrace:
    call = next(call for call in rank.collectives if call.op is CollectiveOp.ALL_GATHER)
    return replace(rank, collectives=(*rank.collectives, call._replace(payload_nbytes=nbytes)))


def sent(scene: WireScene, group: Group | None = None) -> int:
    return sum(s.sent_nbytes for s in scene.segments if group in (None, s.group))


def moved(scene: WireScene, group: Group | None = None) -> int:
    return sum(s.volume_numel for s in scene.segments if group in (None, s.group))


def padded(spec: RunSpec, num_shards: int) -> int:
    """Elements of all units, each padded so that every rank of a shard group has as much of it."""
    return sum(-(-unit.numel // num_shards) * num_shards for unit in plan_for(spec).units)


def test_every_implementation_is_in_the_grid() -> None:
    assert {spec.impl for spec in GRID} == set(Implementation)
    assert {spec.strategy for spec in GRID} == set(Strategy)


# ---- sums ----


@pytest.mark.parametrize("in_elements", [False, True])
@pytest.mark.parametrize("spec", GRID, ids=str)
def test_segments_add_up_to_what_the_trace_says_each_rank_sends(spec: RunSpec, in_elements: bool) -> None:
    trace = predict(spec)
    scene = build_wire_scene(trace, in_elements=in_elements)
    of_ranks: dict[tuple[range, ...], list[WireSegment]] = defaultdict(list)
    for segment in scene.segments:
        of_ranks[scene.rows[segment.row].ranks].append(segment)
    drawn = set()
    for ranks, segments in of_ranks.items():
        for rank in (rank for stretch in ranks for rank in stretch):
            drawn.add(rank)
            assert sum(segment.sent_nbytes for segment in segments) == trace.ranks[rank].sent_nbytes
            assert [(s.calls, s.payload_nbytes) for s in segments] == [
                (total.count, total.payload_nbytes)
                for group in Group
                for total in trace.ranks[rank].wire()
                if total.group is group
            ]
    assert drawn == (set(range(spec.ranks)) if spec.ranks > 1 else set())
    assert all(type(s.sent_nbytes) is type(s.volume_numel) is type(s.length) is int for s in scene.segments)


@pytest.mark.parametrize("in_elements", [False, True])
@pytest.mark.parametrize("spec", GRID, ids=str)
def test_lanes_segments_and_phases_lie_end_to_end(spec: RunSpec, in_elements: bool) -> None:
    scene = build_wire_scene(predict(spec), in_elements=in_elements)
    stop, ranks = 0, None
    for row in scene.rows:
        stop = 0 if row.ranks != ranks else stop
        ranks = row.ranks
        assert row.start == stop and row.difference is None
        for segment in (segment for segment in scene.segments if segment.row == row.index):
            assert segment.start == stop and segment.group is row.group and segment.difference is None
            assert segment.length == (segment.volume_numel if in_elements else segment.sent_nbytes)
            for part in segment.parts:
                assert part.start == stop and part.length >= 0
                stop += part.length
            assert stop == segment.start + segment.length
            assert sum(part.calls for part in segment.parts) == segment.calls
            assert sum(part.payload_nbytes for part in segment.parts) == segment.payload_nbytes
        assert stop == row.start + row.length <= scene.axis_max
        assert row.in_all in (None, stop)
    ids = [mark.id for mark in (*scene.rows, *scene.segments, *(p for s in scene.segments for p in s.parts))]
    assert len(ids) == len(set(ids))


# ---- closed forms ----


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("precision", "itemsize"), [(Precision.FP32, 4), (Precision.BF16_MIXED, 2)])
def test_ddp_sends_two_n_minus_one_over_n_of_the_gradient(ranks: int, precision: Precision, itemsize: int) -> None:
    for impl in (Implementation.OWN, Implementation.DDP, Implementation.DEEPSPEED):
        try:
            spec = spec_of(impl=impl, strategy=Strategy.DDP, ranks=ranks, precision=precision)
        except SpecError:
            continue  # torch's DDP is fp32 here
        scene = build_wire_scene(predict(spec))
        assert moved(scene) == 2 * P
        assert sent(scene) == -(-2 * (ranks - 1) * P * itemsize // ranks)  # rounded up, once
        # The bar ends where DDP's line stands.
        assert scene.reference is not None
        assert (scene.reference.sent_nbytes, scene.reference.volume_numel) == (sent(scene), 2 * P)
        assert scene.reference.at == scene.axis_max == scene.rows[0].length


# Times a whole array, padding included: gather in forward, gather in backward, reduce-scatter, gather of the updated.
ONCE_OR_MORE = {
    Strategy.ZERO1: 2,
    Strategy.ZERO2: 2,
    Strategy.ZERO3: 3,
    Strategy.SHARD_GRAD_OP: 2,
}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("strategy", "times"), ONCE_OR_MORE.items())
def test_zero_moves_2p_and_zero3_3p_of_padded_units(strategy: Strategy, times: int, ranks: int) -> None:
    spec = spec_of(strategy=strategy, ranks=ranks)
    scene = build_wire_scene(predict(spec))
    whole = padded(spec, ranks)
    assert moved(scene) == times * whole
    assert sent(scene) == times * (ranks - 1) * whole * 4 // ranks  # padded, so N divides it
    in_elements = build_wire_scene(predict(spec), in_elements=True)
    assert in_elements.amount(in_elements.rows[0].length) == f"{times}P"
    assert f"Predicted: {times}P moved by each rank in one step, against DDP's 2P" in in_elements.subtitle


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_megatrons_buffer_moves_2p(ranks: int) -> None:
    scene = build_wire_scene(trace_of(strategy=Strategy.MEGATRON_OPTIM, ranks=ranks))
    whole = -(-P // ranks) * ranks  # one buffer over the whole model
    assert moved(scene) == 2 * whole and sent(scene) == 2 * (ranks - 1) * whole * 4 // ranks


def test_the_naive_form_of_zero1_moves_3p() -> None:
    """An all-reduce of which each rank uses its slice, 2P, and the gather of the parameters, P."""
    for trace in (
        trace_of(strategy=Strategy.ZERO1, zero1_form=Zero1Form.ALL_REDUCE),
        trace_of(strategy=Strategy.ZERO1, impl=Implementation.ZERO_REDUNDANCY),
        trace_of(strategy=Strategy.ZERO1, impl=Implementation.DEEPSPEED),
    ):
        scene = build_wire_scene(trace, in_elements=True)
        assert scene.amount(scene.rows[0].length) == "3P"


def test_hybrid_shard_in_group_and_across_groups_apart() -> None:
    """8 ranks in 2 groups of 4. In the group ZeRO-3's 3P; across, an all-reduce of the shard, 2P/4."""
    spec = spec_of(strategy=Strategy.HYBRID_SHARD, ranks=8, shard_ranks=4)
    scene = build_wire_scene(predict(spec))
    whole = padded(spec, 4)
    assert moved(scene, Group.SHARD) == 3 * whole and moved(scene, Group.REPLICA) == 2 * whole // 4
    assert sent(scene, Group.SHARD) == 3 * 3 * whole * 4 // 4  # (G-1)/G = 3/4
    assert sent(scene, Group.REPLICA) == 2 * 1 * whole // 4 * 4 // 2  # (R-1)/R = 1/2
    inside, across = scene.rows
    assert (inside.lane, across.lane) == ("in group", "across groups")
    assert across.start == inside.length and across.in_all == inside.length + across.length
    assert inside.in_all is None and scene.times_words(inside) == ""
    notes = " ".join(scene.notes)
    assert "3/4 in group, 1/2 across groups" in notes
    assert "among 4 neighbours" in notes and "among the 2 ranks" in notes


def test_hybrid_shard_in_one_group_has_one_lane() -> None:
    scene = build_wire_scene(trace_of(strategy=Strategy.HYBRID_SHARD, shard_ranks=4))
    assert [row.group for row in scene.rows] == [Group.SHARD]
    assert sent(scene) == sent(build_wire_scene(trace_of()))


def test_a_unit_that_is_resharded_among_fewer_is_a_lane_of_its_own() -> None:
    """FSDP2 gathers among all 8 ranks in forward, among 2 in backward: 7/8 and 1/2 of it are sent."""
    scene = build_wire_scene(trace_of(impl=Implementation.FSDP2, ranks=8, settings=Settings(reshard_ranks=2)))
    assert [(row.group, row.lane) for row in scene.rows] == [(Group.ALL, "among all"), (Group.SHARD, "in group")]
    gathers = [segment for segment in scene.segments if segment.op is CollectiveOp.ALL_GATHER]
    whole = gathers[0].payload_nbytes
    assert [segment.sent_nbytes for segment in gathers] == [7 * whole // 8, whole // 2]


def test_phases_of_zero3_are_three_ps() -> None:
    """Why 3P: a gather in forward, one in backward, and a reduction."""
    scene = build_wire_scene(trace_of(), in_elements=True)
    parts = [
        (segment.op, part.phase, scene.amount(part.length)) for segment in scene.segments for part in segment.parts
    ]
    assert parts == [
        (CollectiveOp.ALL_GATHER, "forward", "P"),
        (CollectiveOp.ALL_GATHER, "backward", "P"),
        (CollectiveOp.REDUCE_SCATTER, "backward", "P"),
    ]


def test_elements_do_not_depend_on_the_dtype_and_bytes_do() -> None:
    full, half = (build_wire_scene(trace_of(precision=p)) for p in (Precision.FP32, Precision.BF16_MIXED))
    assert moved(full) == moved(half) and sent(full) == 2 * sent(half)


def test_ddp_beside_it_reduces_in_the_gradients_dtype_once_a_step() -> None:
    scene = build_wire_scene(trace_of(precision=Precision.BF16_FP32GRAD, accumulation=4))
    assert scene.reference is not None and scene.reference.detail == "one all-reduce of the fp32 gradient"
    assert scene.reference.sent_nbytes == 2 * 3 * P * 4 // 4
    assert any("the last of 4 micro-batches" in note for note in scene.notes)
    assert build_wire_scene(trace_of(precision=Precision.BF16_MIXED)).reference.sent_nbytes == 2 * 3 * P * 2 // 4  # type: ignore[union-attr]


# ---- one rank, many ranks ----


@pytest.mark.parametrize("in_elements", [False, True])
def test_one_rank_sends_nothing_and_that_is_said(in_elements: bool) -> None:
    for spec in (spec for spec in GRID if spec.ranks == 1):
        trace = predict(spec)
        for scene in (
            build_wire_scene(trace, in_elements=in_elements),
            build_wire_scene(trace, live(trace), in_elements=in_elements),
        ):
            assert (scene.rows, scene.segments, scene.entries, scene.reference) == ((), (), (), None)
            assert "Nothing is sent: one rank has nobody to send to" in scene.subtitle
            assert "Nothing is sent" in scene.sentence


def test_ranks_that_send_the_same_share_a_row_and_that_is_said() -> None:
    for impl, strategy in ((Implementation.OWN, Strategy.ZERO3), (Implementation.MEGATRON, Strategy.MEGATRON_OPTIM)):
        trace = trace_of(impl=impl, strategy=strategy, ranks=4096)
        scene = build_wire_scene(trace)
        assert [(row.rank_label, row.ranks) for row in scene.rows] == [("each rank", (range(4096),))]
        assert "All 4,096 ranks send the same and share a row." in scene.notes


def test_many_ranks_cost_as_much_as_few() -> None:
    """In calls: 4 stretches of alike ranks or 5, however long they are."""
    few, many = trace_of(ranks=64), trace_of(ranks=2**20)
    costs = [num_calls(lambda trace=trace: build_wire_scene(trace)) for trace in (few, many)]  # type: ignore[misc]
    assert costs[1] < 1.5 * costs[0]


def test_many_calls_are_walked_once() -> None:
    """A prediction's 300 calls are summed at the first picture; a toggle of the unit asks for no walk."""
    trace = trace_of(model=PRESETS["llama3-8b"], impl=Implementation.DEEPSPEED, ranks=64)
    assert len(trace.ranks[0].collectives) > 300
    build_wire_scene(trace)
    assert num_calls(lambda: build_wire_scene(trace, in_elements=True)) < 600


# ---- measured beside predicted ----


@pytest.mark.parametrize("spec", [spec for spec in GRID if spec.ranks == 3], ids=str)
@pytest.mark.parametrize("in_elements", [False, True])
def test_what_is_measured_as_predicted_differs_by_0(spec: RunSpec, in_elements: bool) -> None:
    trace = predict(spec)
    scene = build_wire_scene(trace, live(trace), in_elements=in_elements)
    lanes = len(scene.rows) // 2
    assert [row.source_label for row in scene.rows] == ["predicted"] * lanes + ["measured"] * lanes
    measured = scene.rows[lanes:]
    assert [row.difference for row in measured] == [0] * lanes
    assert [(row.start, row.length) for row in measured] == [(row.start, row.length) for row in scene.rows[:lanes]]
    assert all(s.difference == 0 for s in scene.segments if scene.rows[s.row].origin is Origin.LIVE)
    assert all((e.measured, e.measured_calls) == (e.predicted, e.calls) for e in scene.entries)
    assert "Measured: the same, to the call and to the byte" in scene.subtitle


def test_what_is_not_as_predicted_is_said_by_name() -> None:
    trace = trace_of()
    measured = live(trace, rank2=with_extra_gather(trace.ranks[2], 4000))
    scene = build_wire_scene(trace, measured)
    assert [(row.rank_label, row.origin, row.difference) for row in scene.rows] == [
        ("ranks 0-1, 3", Origin.PREDICTED, None),
        ("ranks 0-1, 3", Origin.LIVE, 0),
        ("rank 2", Origin.PREDICTED, None),
        ("rank 2", Origin.LIVE, 3000),  # 3/4 of it
    ]
    (gather,) = (s for s in scene.segments if s.row == 3 and s.op is CollectiveOp.ALL_GATHER)
    assert gather.difference == 3000 and gather.calls == 9
    assert scene.measure.difference(3000) == "+3 kB"
    named = "Measured, rank 2: all-gather fp32, 3,000 B more than predicted, 9 calls, predicted 8; unexplained."
    assert named in scene.notes
    assert "Ranks that send the same share a row: 2 for 4 ranks." in scene.notes
    at_most = next(line for line in scene.subtitle if line.startswith("Measured"))
    assert (
        at_most.startswith("Measured: at most 1,201 kB sent in one step, by rank 2") and "not as predicted" in at_most
    )
    elements = build_wire_scene(trace, measured, in_elements=True)
    assert any("all-gather fp32, 1,000 elements more than predicted" in note for note in elements.notes)


def test_what_only_one_side_sends_is_in_the_table() -> None:
    trace = trace_of()
    first = trace.ranks[0]
    scatter = tuple(call for call in first.collectives if call.op is CollectiveOp.REDUCE_SCATTER)
    other = tuple(call._replace(op=CollectiveOp.ALL_REDUCE) for call in scatter)
    gathers = tuple(call for call in first.collectives if call.op is CollectiveOp.ALL_GATHER)
    scene = build_wire_scene(trace, live(trace, rank0=replace(first, collectives=(*gathers, *other))))
    entries = {
        entry.op: (entry.calls, entry.measured_calls, entry.predicted, entry.measured) for entry in scene.entries
    }
    reduced = sum(call.sent_nbytes for call in scatter)
    assert entries[CollectiveOp.REDUCE_SCATTER] == (4, 0, reduced, 0)
    assert entries[CollectiveOp.ALL_REDUCE] == (0, 4, 0, 2 * reduced)
    assert scene.rows[1].difference == reduced
    named = [note for note in scene.notes if note.startswith("Measured, rank 0: ")]
    assert len(named) == 2 and any("less than predicted, 0 calls, predicted 4" in note for note in named)


def test_as_many_bytes_in_other_calls_are_a_difference_of_calls() -> None:
    trace = trace_of(strategy=Strategy.DDP)
    first = trace.ranks[0]
    merged = first.collectives[0]._replace(
        payload_nbytes=sum(call.payload_nbytes for call in first.collectives), unit=""
    )
    scene = build_wire_scene(trace, live(trace, rank0=replace(first, collectives=(merged,))))
    assert scene.rows[1].difference == 0
    assert any("0 B more than predicted, 1 call, predicted 4" in note for note in scene.notes)


def test_more_kinds_of_ranks_than_are_drawn_are_counted() -> None:
    trace = trace_of(ranks=8)
    wrong = {f"rank{rank}": with_extra_gather(trace.ranks[rank], 4000 * (rank + 1)) for rank in range(7)}
    scene = build_wire_scene(trace, live(trace, **wrong))
    assert len({row.ranks for row in scene.rows}) == MAX_KINDS
    assert f"Not drawn: {8 - MAX_KINDS} more kinds of ranks." in scene.notes
    assert sum("unexplained" in note for note in scene.notes) == MAX_NAMED
    assert f"And {7 - MAX_NAMED} more differences." in scene.notes


def test_ranks_that_are_not_neighbours_share_a_row() -> None:
    trace = trace_of(ranks=8)
    odd = {f"rank{rank}": with_extra_gather(trace.ranks[rank], 4000) for rank in (1, 3, 5, 7)}
    labels = [kind.label(8) for kind in kinds_of(trace, live(trace, **odd))]
    assert labels == ["ranks 0, 2, 4, ...", "ranks 1, 3, 5, ..."]


def test_stretches_of_both_sides_are_laid_over_each_other() -> None:
    """Predicted in stretches of alike ranks, measured rank by rank."""
    trace = trace_of(ranks=64)
    wrong = live(trace, rank63=with_extra_gather(trace.ranks[63], 4000))
    assert [kind.ranks for kind in kinds_of(trace, wrong)] == [[range(63)], [range(63, 64)]]


def test_a_trace_of_another_spec_is_refused() -> None:
    with pytest.raises(TraceError, match="another spec"):
        build_wire_scene(trace_of(), live(trace_of(ranks=2)))


def test_a_dtype_that_is_none_of_ours_has_no_elements() -> None:
    trace = trace_of(strategy=Strategy.DDP, ranks=2)
    calls = tuple(call._replace(dtype="fp8") for call in trace.ranks[0].collectives)
    with pytest.raises(TraceError, match=r"'fp8'; known are fp32, bf16"):
        build_wire_scene(trace, live(trace, rank0=replace(trace.ranks[0], collectives=calls)))


# ---- axis and words ----


@pytest.mark.parametrize("accumulation", [1, 2, 3, 10, 64])
def test_the_axis_of_elements_has_ticks_at_whole_ps(accumulation: int) -> None:
    scene = build_wire_scene(trace_of(accumulation=accumulation), in_elements=True)
    ticks = [tick.at for tick in scene.ticks]
    assert 2 <= len(ticks) <= 9 and ticks[0] == 0 and ticks[-1] <= scene.axis_max
    assert all(at % P == 0 for at in ticks)
    assert len({b - a for a, b in pairwise(ticks)}) == 1
    if accumulation == 1:
        assert [tick.label for tick in scene.ticks] == ["0", "P", "2P", "3P"]


def test_the_axis_of_bytes_says_its_unit() -> None:
    scene = build_wire_scene(trace_of(model=PRESETS["llama3-8b"], ranks=64))
    assert scene.axis_label == "GB sent by a rank in one step, in a ring (1 GB = 1,000,000,000 bytes)"
    assert scene.axis_max == scene.rows[0].length and scene.amount(scene.axis_max) == "94.86 GB"


@pytest.mark.parametrize(
    ("numel", "words"),
    [(0, "0"), (1, "1 element"), (7, "7 elements"), (10**6, "P"), (3 * 10**6, "3P"), (2_718_281, "2.72P"),
     (250_000, "0.25P"), (10**9, "1,000P"), (10**11, "100,000P")],
)  # fmt: skip
def test_elements_are_said_in_parameters(numel: int, words: str) -> None:
    assert Measure(True, 10**6).amount(numel) == words


@pytest.mark.parametrize(
    ("in_elements", "length", "words"),
    [(True, 0, "0"), (True, 1, "+1 element"), (True, -1200, "-1,200 elements"), (False, 0, "0 B"),
     (False, 1024, "+1.024 kB"), (False, -8, "-8 B")],
)  # fmt: skip
def test_differences_are_signed_and_0_is_plain(in_elements: bool, length: int, words: str) -> None:
    assert Measure(in_elements, P, "kB").difference(length) == words


def test_no_figure_has_an_exponent() -> None:
    assert [short(value) for value in (0.5, 1.4999, 92.44, 999.6, 12345.6)] == ["0.5", "1.5", "92.4", "1,000", "12,346"]


def test_the_sentence_says_who_sends_what_and_what_ddp_would() -> None:
    sentence = build_wire_scene(trace_of(), in_elements=True).sentence
    assert "Each rank, predicted: all-gather fp32 2P, reduce-scatter fp32 P." in sentence
    assert "DDP, one all-reduce of the fp32 gradient: 2P." in sentence
    hybrid = build_wire_scene(trace_of(strategy=Strategy.HYBRID_SHARD, ranks=8, shard_ranks=4)).sentence
    assert "Each rank, predicted, across groups: all-reduce fp32" in hybrid


def test_what_is_left_out_and_what_is_a_mean_is_said() -> None:
    offloaded = build_wire_scene(trace_of(strategy=Strategy.ZERO2, offload=Offload.OPTIMIZER))
    assert "What goes over the link to the host is not drawn here." in offloaded.notes
    broadcasts = build_wire_scene(trace_of(strategy=Strategy.ZERO1, impl=Implementation.ZERO_REDUNDANCY))
    assert any("broadcast" in note and "mean" in note for note in broadcasts.notes)
    assert not any("link" in note or "broadcast" in note for note in build_wire_scene(trace_of()).notes)


def test_a_bare_count_of_one_parameter_and_a_huge_one_have_a_picture() -> None:
    for count in (1, 10**18):
        for in_elements in (False, True):
            scene = build_wire_scene(trace_of(model=bare(count), unit=ONE_UNIT, ranks=8), in_elements=in_elements)
            assert sent(scene) == predict(scene.spec).ranks[0].sent_nbytes and len(scene.ticks) <= 9
