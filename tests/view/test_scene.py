"""The scene: the picture as data, checked against the trace it was made of."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest

from tests.every import pairs, settings_of
from zeroviz.axis import amount
from zeroviz.capacities import DEFAULT_RESERVE_NBYTES, parse_capacity
from zeroviz.capacity_line import CapacityLine, both
from zeroviz.compare import Moment
from zeroviz.errors import SpecError, TraceError
from zeroviz.heatmap import Upward, build_heatmap
from zeroviz.models import PRESETS, bare
from zeroviz.precision import OWN_PRECISIONS, WHOLE_BUFFER_PRECISIONS
from zeroviz.predict import predict
from zeroviz.quantity import format_nbytes
from zeroviz.scene import Reference, Segment, build_scene
from zeroviz.spec import Offload, Precision, RunSpec, Strategy, UnitPolicy
from zeroviz.trace import Category, Event, Origin, Trace
from zeroviz.wording import ranks_words

GRID = [
    RunSpec(
        model=PRESETS["tiny"],
        ranks=ranks,
        precision=precision,
        unit=UnitPolicy.parse(unit),
        **settings_of(strategy, ranks),
    )
    for (strategy, precision), ranks, unit in product(pairs(), (1, 2, 3, 4, 8), ("model", "block", "block:2", "layer"))
]


def live(trace: Trace) -> Trace:
    return replace(trace, origin=Origin.LIVE)


@pytest.mark.parametrize("spec", GRID, ids=str)
def test_bars_are_the_trace(spec: RunSpec) -> None:
    trace = predict(spec)
    scene = build_scene(trace)
    assert [row.ranks for row in scene.rows] == [(rank,) for rank in range(spec.ranks)]
    by_row: dict[int, list[Segment]] = defaultdict(list)
    for segment in scene.segments:
        by_row[segment.row].append(segment)
    for rank, row in zip(trace.ranks, scene.rows, strict=True):
        at_rest = [segment for segment in by_row[row.index] if segment.moment is Moment.REST]
        at_peak = [segment for segment in by_row[row.index] if not segment.is_given_back]
        peak = rank.peak()
        for segments, sums in ((at_rest, rank.at_rest), (at_peak, peak.by_category)):
            held: dict[Category, int] = defaultdict(int)
            position = 0  # one unbroken bar: each segment starts where the one before it ends
            for segment in segments:
                assert segment.start == position
                position += segment.nbytes
                held[segment.category] += segment.nbytes
            assert held == sums and position == sum(sums.values()) <= scene.axis_max
        assert (row.rest_nbytes, row.peak_nbytes) == (rank.rest_nbytes, peak.total)
    padding = {p.row: p.nbytes for p in scene.paddings}
    assert padding == {rank.rank: rank.padding_nbytes for rank in trace.ranks if rank.padding_nbytes}


@pytest.mark.parametrize("spec", GRID[::7], ids=str)
def test_ids_are_unique_and_say_what_they_mark(spec: RunSpec) -> None:
    trace = predict(spec)
    scene = build_scene(trace, live(trace))
    ids = [mark.id for mark in (*scene.rows, *scene.segments, *scene.paddings)]
    assert len(set(ids)) == len(ids)
    for segment in scene.segments:
        source = "predicted" if segment.origin is Origin.PREDICTED else "measured"
        assert segment.id.startswith(f"rank{segment.ranks[0]}-{source}-")
        assert segment.id.endswith(segment.category.value)


def test_measured_stands_under_predicted_and_says_how_far_off_it_is() -> None:
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=2))
    first = predicted.ranks[0]
    heavier = replace(first, rest={**first.rest, Category.BUCKET: 1000})
    scene = build_scene(predicted, live(replace(predicted, ranks=(heavier, predicted.ranks[1]))))
    assert [(row.source_label, row.ranks) for row in scene.rows] == [
        ("predicted", (0,)),
        ("measured", (0,)),
        ("predicted", (1,)),
        ("measured", (1,)),
    ]
    assert [(row.rest_difference, row.peak_difference) for row in scene.rows] == [
        (None, None), (1000, 1000), (None, None), (0, 0),
    ]  # fmt: skip
    assert any(line.startswith("Measured: ") for line in scene.subtitle)


def test_words_name_ranks_recipe_units_and_the_peaks_place() -> None:
    spec = RunSpec(model=PRESETS["tiny"], ranks=4, precision=Precision.BF16_FP32GRAD, unit=UnitPolicy.parse("layer"))
    trace = predict(spec)
    scene = build_scene(trace)
    peak = trace.ranks[0].peak()
    assert scene.title == "ZeRO-3 on 4 ranks, bf16-fp32grad"
    assert scene.recipe == "2 param + 4 grad + 4 master + 8 Adam = 18 bytes a parameter"
    assert f"{spec.model.num_params:,} parameters" in scene.subtitle[0] and "(layer)" in scene.subtitle[0]
    assert peak.phase in scene.subtitle[1] and peak.unit in scene.subtitle[1]
    assert scene.title in scene.sentence
    assert "1 rank," in build_scene(predict(replace(spec, ranks=1))).title


@pytest.mark.parametrize("ranks", [16, 17, 64])
def test_many_ranks_fold_into_rows_of_equal_ones(ranks: int) -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=ranks))
    scene = build_scene(trace)
    covered = [rank for row in scene.rows for rank in row.ranks]
    assert sorted(covered) == list(range(ranks))
    if ranks <= 16:
        assert len(scene.rows) == ranks
        return
    assert len(scene.rows) < 16
    rows = "1 row" if len(scene.rows) == 1 else f"{len(scene.rows)} rows"
    assert any(f"{ranks} ranks in {rows}: those with equal bytes and" in note for note in scene.notes)
    for row in scene.rows:
        figures = {(trace.ranks[r].rest_nbytes, trace.ranks[r].padding_nbytes) for r in row.ranks}
        assert len(figures) == 1


def test_equal_ranks_of_many_groups_share_a_row() -> None:
    """1,024 groups of 4, and units that 4 does not divide: the last shard of each group has the padding, so there are
    two kinds of rank, however many groups. Drawn one by one they would be a picture of 60,000 points."""
    trace = predict(
        RunSpec(
            model=PRESETS["tiny"],
            strategy=Strategy.HYBRID_SHARD,
            ranks=4096,
            shard_ranks=4,
            unit=UnitPolicy.parse("block"),
        )
    )
    scene = build_scene(trace)
    assert [row.ranks[:4] for row in scene.rows] == [(0, 1, 2, 4), (3, 7, 11, 15)]
    assert [row.rank_label for row in scene.rows] == ["ranks 0-2, 4-6, …", "ranks 3, 7, …"]
    assert sum(len(row.ranks) for row in scene.rows) == 4096
    assert any("4096 ranks in 2 rows" in note for note in scene.notes)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((3,), "rank 3"), ((0, 1), "ranks 0-1"), ((0, 2), "ranks 0, 2"), ((0, 1, 5), "ranks 0-1, 5"),
     ((1, 2, 4, 6), "ranks 1-2, 4, …"), ((0, 1, 2, 4, 5, 6), "ranks 0-2, 4-6")],
)  # fmt: skip
def test_ranks_are_named_by_their_stretches(ranks: tuple[int, ...], words: str) -> None:
    assert ranks_words(ranks) == words


def test_a_rank_that_differs_only_when_measured_is_not_folded_away() -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=20))
    odd = replace(trace.ranks[5], rest={**trace.ranks[5].rest, Category.BUCKET: 3})
    scene = build_scene(trace, live(replace(trace, ranks=(*trace.ranks[:5], odd, *trace.ranks[6:]))))
    assert (5,) in [row.ranks for row in scene.rows]


def test_what_is_freed_before_the_peak_does_not_lengthen_the_bar() -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], strategy=Strategy.DDP, ranks=1))
    held = trace.ranks[0].rest[Category.UNSHARDED_GRAD]
    events = (
        Event("forward", "zero grad", "model", Category.UNSHARDED_GRAD, -held),
        Event("forward", "forward", "model", Category.ACTIVATION, 3 * held),
        Event("backward", "backward", "model", Category.ACTIVATION, -3 * held),
        Event("backward", "backward", "model", Category.UNSHARDED_GRAD, held),
    )
    scene = build_scene(replace(trace, ranks=(replace(trace.ranks[0], events=events),)))
    last = scene.segments[-1]
    assert last.start + last.nbytes == scene.rows[0].peak_nbytes == trace.ranks[0].rest_nbytes + 2 * held


@pytest.mark.parametrize("model", ["tiny", "gpt2-xl", "llama3-70b"])
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_the_axis_is_in_one_named_decimal_unit_with_few_round_ticks(model: str, ranks: int) -> None:
    scene = build_scene(predict(RunSpec(model=PRESETS[model], ranks=ranks)))
    assert scene.axis_max == max(row.peak_nbytes for row in scene.rows)
    assert 3 <= len(scene.ticks) <= 9
    assert scene.ticks[0].nbytes == 0 and scene.ticks[-1].nbytes <= scene.axis_max
    unit = scene.axis_label.split()[0]
    scale = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert f"{scale:,} bytes" in scene.axis_label
    assert all(float(tick.label.replace(",", "")) * scale == tick.nbytes for tick in scene.ticks)


def test_a_reference_stretches_the_axis_and_never_cuts_a_bar() -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=2))
    peak = trace.ranks[0].peak().total
    assert build_scene(trace, reference=Reference(2 * peak, "twice")).axis_max == 2 * peak
    assert build_scene(trace, reference=Reference(1, "little")).axis_max == peak


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize(("strategy", "precision"), pairs())
def test_the_wire_line_is_the_traces_against_ddps(strategy: Strategy, precision: Precision, ranks: int) -> None:
    spec = RunSpec(model=PRESETS["tiny"], ranks=ranks, precision=precision, **settings_of(strategy, ranks))
    scene, sent = build_scene(predict(spec)), predict(spec).ranks[0].sent_nbytes
    line = scene.subtitle[-1]
    if ranks == 1:
        assert line.startswith("Wire: nothing") and sent == 0
        return
    assert scene.amount(sent) in line
    ddp = predict(replace(spec, **settings_of(Strategy.DDP, ranks))).ranks[0].sent_nbytes
    assert line.endswith("in one step" if strategy is Strategy.DDP else f", {sent / ddp:.3g} x DDP's")


AMOUNTS = {
    0: "0 B", 999: "999 B", 1_088: "1.088 kB", -931_812: "-931.8 kB", 2_000_000: "2.000 MB", 99_999_999: "100.0 MB",
    100_000_000: "0.1000 GB", 14 * 10**9: "14.00 GB", 282_214_825_984: "282.2 GB", 1_137 * 10**9: "1,137 GB",
}  # fmt: skip
"""In GB."""


def test_amounts_are_in_the_axiss_unit_and_small_ones_in_their_own() -> None:
    """Small is what would begin with a zero behind its point: less than a tenth of the unit."""
    scene = build_scene(predict(RunSpec(model=PRESETS["llama3-70b"], ranks=4)))
    assert scene.unit == "GB"
    assert {nbytes: scene.amount(nbytes) for nbytes in AMOUNTS} == AMOUNTS
    assert amount(1_999, "B") == "1,999 B"


def test_a_line_is_kept_for_a_run_to_come() -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=2))
    before, after = build_scene(trace, expects_run=True), build_scene(trace, live(trace), expects_run=True)
    assert "Measured: not run yet" in before.subtitle and len(before.subtitle) == len(after.subtitle)


def test_what_is_offloaded_is_in_no_bar_and_in_a_note() -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=2, offload=Offload.OPTIMIZER))
    scene = build_scene(trace)
    assert all(segment.category.on_device for segment in scene.segments)
    # Moments, 8 bytes, and the host's copy of the parameters, 4 bytes, of half the 266,220 / 4 * 2 padded elements.
    held = 12 * trace.ranks[0].at_rest[Category.SHARDED_PARAM] // 4
    assert any("In the host's memory" in note and format_nbytes(held) in note for note in scene.notes)
    # Each step the gradient shard goes down and the updated parameters come up, 4 bytes an element each.
    shard = scene.amount(trace.ranks[0].at_rest[Category.SHARDED_PARAM])
    assert scene.subtitle[-1].endswith(f"{shard} down and {shard} up in one step")
    assert scene.subtitle[-2].startswith("Wire: ")


def test_padding_is_named_by_rank() -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=4))
    (note,) = build_scene(trace).notes
    assert note == f"Padding within what is held at rest: none on rank 0, {trace.ranks[3].padding_nbytes} B on rank 3."


def test_legend_lists_what_is_drawn_and_nothing_else() -> None:
    scene = build_scene(predict(RunSpec(model=PRESETS["tiny"], ranks=4)))
    visible = {s.category for s in scene.segments if s.nbytes >= scene.axis_max / 1000}
    assert {entry.category for entry in scene.legend} == visible
    assert Category.INPUT not in visible  # 512 B of tokens and targets: no pixel wide
    held = {s.category for s in scene.segments if s.moment is Moment.REST}
    assert {entry.category for entry in scene.legend if entry.held} == held
    # tiny is uneven on purpose; in units of layers on 64 ranks its padding is wide enough to be seen.
    padded = build_scene(predict(RunSpec(model=PRESETS["tiny"], ranks=64, unit=UnitPolicy.parse("layer"))))
    assert padded.legend[-1].category is None
    whole = build_scene(predict(RunSpec(model=PRESETS["tiny"], strategy=Strategy.DDP, ranks=4)))
    assert all(entry.category for entry in whole.legend)


def test_a_bare_count_says_that_it_knows_no_activations() -> None:
    scene = build_scene(predict(RunSpec(model=bare(10**9), unit=UnitPolicy.parse("model"), ranks=2)))
    assert any("activations" in note for note in scene.notes)
    assert "tokens" not in scene.subtitle[0]


def test_two_specs_cannot_share_a_picture() -> None:
    spec = RunSpec(model=PRESETS["tiny"], ranks=2)
    with pytest.raises(TraceError, match="another spec"):
        build_scene(predict(spec), live(predict(replace(spec, batch=3))))


@pytest.mark.parametrize("precision", OWN_PRECISIONS)
def test_what_is_given_back_before_the_peak_is_no_part_of_it_and_ends_at_the_mark(precision: Precision) -> None:
    """Half way through backward some of the gradient is there. Megatron's buffer never goes."""
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=3, precision=precision, batch=2, seq=128))
    scene = build_scene(trace)
    assert scene.gives_back
    for rank, row in zip(trace.ranks, scene.rows, strict=True):
        mine = [segment for segment in scene.segments if segment.row == row.index]
        at_rest = [segment for segment in mine if segment.moment is Moment.REST]
        (given_back,) = [segment for segment in mine if segment.is_given_back]
        gone = rank.rest[Category.SHARDED_GRAD] - rank.peak().by_category.get(Category.SHARDED_GRAD, 0)
        assert (given_back.category, given_back.nbytes) == (Category.SHARDED_GRAD, gone)
        assert given_back.start + given_back.nbytes == row.rest_nbytes == rank.rest_nbytes
        # What hatched segments begin at is where the solid ones end, so that padding lies among the solid ones.
        solid = sum(segment.nbytes for segment in at_rest if not segment.is_given_back)
        assert all(p.start + p.nbytes == solid for p in scene.paddings if p.row == row.index)
    if precision in WHOLE_BUFFER_PRECISIONS:
        assert not build_scene(predict(replace(trace.spec, strategy=Strategy.MEGATRON_OPTIM))).gives_back


# ---- what a GPU has ----


def line_of(text: str, reserve_nbytes: int = DEFAULT_RESERVE_NBYTES) -> CapacityLine:
    return CapacityLine.of(parse_capacity(text), reserve_nbytes)


LLAMA = RunSpec(model=PRESETS["llama3-8b"], ranks=8, precision=Precision.BF16_MIXED, seq=4096)


def test_without_a_capacity_there_is_no_line() -> None:
    scene = build_scene(predict(LLAMA))
    assert (scene.capacity, scene.beyond) == (None, ())
    assert not any("fit" in line for line in (*scene.subtitle, *scene.notes))


@pytest.mark.parametrize("spec", GRID[::5], ids=str)
@pytest.mark.parametrize("percent", [30, 99, 100, 101, 149, 151, 10_000])
def test_what_lies_beyond_the_line_is_what_does_not_fit(spec: RunSpec, percent: int) -> None:
    trace = predict(spec)
    peak = max(rank.peak().total for rank in trace.ranks)
    line = CapacityLine("a GPU", peak * percent // 100 + 7, 7)
    scene, plain = build_scene(trace, live(trace), capacity=line), build_scene(trace, live(trace))
    assert {mark.row: mark.nbytes for mark in scene.beyond} == {
        row.index: row.peak_nbytes - line.budget_nbytes for row in scene.rows if row.peak_nbytes > line.budget_nbytes
    }
    for mark in scene.beyond:
        assert mark.start == line.budget_nbytes
        assert mark.start + mark.nbytes == scene.rows[mark.row].peak_nbytes <= scene.axis_max
    assert bool(scene.beyond) == (percent < 100)
    # Bars keep two thirds of their length at least; a line further off leaves the axis as it was.
    assert scene.axis_max == (line.budget_nbytes if 100 < percent < 150 else plain.axis_max)
    assert (scene.rows, scene.segments, scene.paddings) == (plain.rows, plain.segments, plain.paddings)


def test_an_axis_that_ends_at_a_reference_is_made_no_longer_than_by_half() -> None:
    trace = predict(LLAMA)
    ends = [
        build_scene(trace, reference=Reference(10**11, "far"), capacity=line_of(text, 0)).axis_max
        for text in ("99GB", "149GB", "150GB", "151GB")
    ]
    assert ends == [10**11, 149 * 10**9, 150 * 10**9, 10**11]


@pytest.mark.parametrize(("gpu", "reserve"), [("a100-40gb", DEFAULT_RESERVE_NBYTES), ("h100-80gb", 0), ("24GB", 10**9)])
def test_the_line_is_the_maps_budget_and_says_what_the_reserve_is(gpu: str, reserve: int) -> None:
    line, found = line_of(gpu, reserve), build_heatmap(LLAMA, Upward.BATCH, parse_capacity(gpu), reserve)
    assert line.budget_nbytes == found.budget_nbytes
    scene = build_scene(predict(LLAMA), capacity=line)
    # The map's sentences on capacity and reserve, word for word.
    assert scene.notes[0] == " ".join(note for note in found.notes if note.startswith((gpu, "A peak fits")))
    assert both(line.budget_nbytes) in line.words and ("less its reserve" in line.words) == bool(reserve)
    (verdict,) = [words for words in scene.subtitle if words.startswith(("Fits", "Does not fit"))]
    assert verdict.startswith("Fits") == found.current.fits and both(abs(found.current.spare_nbytes)) in verdict
    assert verdict in scene.sentence


def test_the_verdict_says_by_how_much_at_the_peak_and_at_rest() -> None:
    """16.06 GB at rest, 51.16 GB at the peak."""
    for text, verdict in (
        ("60GB", "Fits 60GB with 8.84 GB (8.24 GiB) to spare"),
        ("10GB", "Does not fit 10GB by 41.16 GB (38.33 GiB) at the peak, nor at rest by 6.06 GB (5.64 GiB)"),
    ):
        assert verdict in build_scene(predict(LLAMA), capacity=line_of(text, 0)).subtitle, text
    peak = predict(LLAMA).ranks[0].peak().total
    for more, words in (
        (0, "Fits it with 0 B to spare"),
        (1, "Fits it with 1 B to spare"),
        (-1, "Does not fit it by 1 B at the peak"),
        (-1_470_000, "Does not fit it by 1.47 MB (1.40 MiB) at the peak"),
    ):
        line = CapacityLine("it", peak + more, 0)
        assert words in build_scene(predict(LLAMA), capacity=line).subtitle


def test_a_measured_peak_that_fits_otherwise_is_said() -> None:
    trace = predict(RunSpec(model=PRESETS["tiny"], ranks=2))
    first, peak = trace.ranks[0], trace.ranks[0].peak().total
    heavier = live(replace(trace, ranks=(replace(first, rest={**first.rest, Category.BUCKET: 1000}), trace.ranks[1])))
    for line, words in (
        (
            CapacityLine("it", peak, 0),
            "Fits it with 0 B to spare; the measured peak is too much, by 1.00 kB (0.98 KiB)",
        ),
        (CapacityLine("it", peak + 1000, 0), "Fits it with 1.00 kB (0.98 KiB) to spare"),
    ):
        scene = build_scene(trace, heavier, capacity=line)
        assert words in scene.subtitle
        assert [scene.rows[mark.row].origin for mark in scene.beyond] == [Origin.LIVE] * (line.budget_nbytes == peak)


def test_a_reserve_that_leaves_nothing_is_refused_in_the_maps_words() -> None:
    with pytest.raises(SpecError, match=r"leaves nothing of 2\.147 GB \(2GiB\); give a smaller one, or 0"):
        line_of("2GiB")
    with pytest.raises(SpecError, match="0 or more"):
        CapacityLine("it", 10, -1)
