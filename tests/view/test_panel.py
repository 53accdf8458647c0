"""The panel: controls that ask the Explorer, and a page that shows what it says."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from html import unescape
from itertools import product
from typing import Any

import ipywidgets as widgets
import pytest

from tests.view.backends import FakeBackend, in_loop, settled
from tests.work import num_calls
from zeroviz.backend import RunState
from zeroviz.changes import as_plain
from zeroviz.compare import UNEXPLAINED
from zeroviz.errors import RunError, SpecError
from zeroviz.film import build_film
from zeroviz.heatmap import Upward
from zeroviz.implementations import PAIRS, PRECISIONS
from zeroviz.models import PRESETS
from zeroviz.panel import ExplorerPanel, explorer, fit
from zeroviz.panel.controls import UNSET
from zeroviz.panel.tables import tables_html
from zeroviz.predict import predict
from zeroviz.residuals import senders
from zeroviz.scene import build_scene
from zeroviz.settings import SETTINGS, BackwardPrefetch
from zeroviz.spec import DType, Implementation, Offload, Optimizer, Precision, RunSpec, Strategy, UnitKind, Zero1Form
from zeroviz.state import Explorer
from zeroviz.toggles import TOGGLES
from zeroviz.trace import AllocatorReading, Category, Origin, Trace


def panel() -> ExplorerPanel:
    return ExplorerPanel(Explorer(FakeBackend()))


def figures(html: str) -> dict[tuple[str, ...], int]:
    """(rank, moment, category, source) -> bytes of the memory table."""
    pattern = r'data-rank="(\d+)" data-moment="([^"]+)" data-category="([^"]+)" data-source="(\w+)"[^>]*>([^<]+)<'
    return {
        key: int(value.replace(",", "").rstrip("B "))
        for *key, value in re.findall(pattern, html)
        for key in [tuple(key)]
    }


def assert_shows(page: ExplorerPanel, trace: Trace) -> None:
    shown = figures(page.tables.value)
    for rank in trace.ranks:
        name = str(rank.rank)
        assert shown[name, "at rest", "total", "predicted"] == rank.rest_nbytes
        assert shown[name, "peak", "total", "predicted"] == rank.peak().total
        for category, nbytes in rank.peak().by_category.items():
            assert shown[name, "peak", category.value, "predicted"] == nbytes
    assert f'aria-label="{page.state.scene().title}' in page.stage.bars["svg"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategy", Strategy.DDP), ("strategy", Strategy.ZERO2), ("ranks", 8), ("ranks", 1),
        ("precision", Precision.BF16), ("unit", UnitKind.LAYER), ("blocks", 3), ("model", PRESETS["tiny-llama"]),
        ("batch", 8), ("seq", 16), ("prefetch", 2), ("async_reduce", True), ("strategy", Strategy.SHARD_GRAD_OP),
        ("optimizer", Optimizer.SGD_MOMENTUM), ("optimizer", Optimizer.ADAMW_8BIT), ("grad_dtype", DType.BF16),
        ("checkpointing", True), ("offload", Offload.PARAMS), ("accumulation", 3),
    ],
)  # fmt: skip
def test_a_control_moves_state_picture_and_table(name: str, value: Any) -> None:
    page = panel()
    page.controls.widget[name].value = value
    assert getattr(page.state, name) == value
    assert_shows(page, predict(page.state.spec))


def test_the_state_moves_its_controls() -> None:
    page = panel()
    page.state.choose(ranks=12, strategy=Strategy.ZERO1, zero1_form=Zero1Form.ALL_REDUCE, batch=3, seq=77)
    for name in TOGGLES:
        value = getattr(page.state, name)
        if name == "shard_ranks":  # without groups all ranks are one
            value = 12
        assert page.controls.widget[name].value == (UNSET if value is None else value), name
    assert_shows(page, predict(page.state.spec))


def test_a_refused_control_goes_back_and_the_page_says_why() -> None:
    page = panel()
    picture = page.stage.bars["svg"]
    page.controls.widget["seq"].options = (32, 512)
    page.controls.widget["seq"].value = 512
    assert page.controls.widget["seq"].value == 32 == page.state.seq
    assert "130 tokens" in page.news.value and page.stage.bars["svg"] == picture


@pytest.mark.parametrize("strategy", Strategy)
def test_only_what_applies_is_enabled(strategy: Strategy) -> None:
    page = panel()
    page.state.choose(strategy=strategy)
    disabled = {name for name, control in page.controls.widget.items() if control.disabled} - set(SETTINGS)
    expected = {"region", "no_sync", "rank"}
    expected |= set() if strategy.shards_param else {"prefetch"}
    expected |= set() if strategy is Strategy.ZERO1 else {"zero1_form"}
    expected |= set() if strategy is Strategy.HYBRID_SHARD else {"shard_ranks"}
    expected |= {"async_reduce"} if strategy is Strategy.MEGATRON_OPTIM else set()
    assert disabled == expected
    page.state.choose(unit=UnitKind.MODEL, checkpointing=True, accumulation=2)
    disabled = {name for name in ("blocks", "region", "no_sync") if page.controls.widget[name].disabled}
    assert disabled == {"blocks"}


def test_a_shard_group_is_offered_by_the_ranks_divisors_and_follows_them() -> None:
    page = panel()
    control = page.controls.widget["shard_ranks"]
    assert control.disabled and control.value == 4
    page.controls.widget["strategy"].value = Strategy.HYBRID_SHARD
    assert not control.disabled and control.options == (1, 2, 4) and control.value == page.state.shard_ranks == 2
    assert_shows(page, predict(page.state.spec))
    control.value = 4
    assert page.state.spec.shard_ranks == 4
    page.controls.widget["ranks"].value = 6
    assert control.options == (1, 2, 3, 6) and control.value == page.state.shard_ranks == 3
    assert "a shard group is now 3: 6 ranks are not divisible by 4." in page.news.value
    assert_shows(page, predict(page.state.spec))
    text = page.tables.value
    assert "in group" in text and "across groups" in text
    page.controls.widget["strategy"].value = Strategy.ZERO3
    assert page.state.shard_ranks is None and control.disabled and control.value == 6


def test_one_buffer_takes_what_it_cannot_have_away_and_says_so() -> None:
    page = panel()
    page.state.choose(precision=Precision.BF16_MIXED, async_reduce=True, offload=Offload.OPTIMIZER)
    page.controls.widget["strategy"].value = Strategy.MEGATRON_OPTIM
    state = page.state
    assert (state.precision, state.async_reduce, state.offload) == (Precision.BF16_FP32GRAD, False, Offload.NONE)
    for words in ("reduces fp32 gradients", "one buffer on the device", "when the whole backward is done"):
        assert words in page.news.value
    page.controls.widget["precision"].value = Precision.BF16
    assert state.precision is Precision.BF16_FP32GRAD and "use precision fp32 or bf16-fp32grad" in page.news.value


def test_clipping_is_a_control_and_takes_any_norm() -> None:
    page = panel()
    control = page.controls.widget["clip_norm"]
    control.value = 1.0
    assert page.state.spec.clip_norm == 1.0 and "gradient norm clipped at 1" in page.stage.bars["svg"]
    page.state.clip_norm = 0.25
    assert control.value == 0.25 and "0.25" in page.controls.words()["clip-norm"]
    page.state.choose(offload=Offload.PARAMS)
    assert page.state.clip_norm is None and control.value == UNSET
    assert "clipping is now off: gradients that lie on the host are not clipped." in page.news.value
    control.value = 0.1
    assert page.state.offload is Offload.OPTIMIZER


def test_what_is_unset_can_be_set_and_unset_by_its_control() -> None:
    page = panel()
    page.state.choose(accumulation=4)
    for name, value in (("no_sync", False), ("grad_dtype", DType.BF16)):
        control = page.controls.widget[name]
        assert control.value == UNSET and getattr(page.state, name) is None
        control.value = value
        assert getattr(page.state, name) is value
        assert_shows(page, predict(page.state.spec))
        control.value = UNSET
        assert getattr(page.state, name) is None
    # fp32's own gradient dtype is fp32: the same spec, so the control goes back to saying so.
    page.controls.widget["grad_dtype"].value = DType.FP32
    assert page.controls.widget["grad_dtype"].value == UNSET and page.state.grad_dtype is None


@pytest.mark.parametrize("strategy", Strategy)
def test_gradient_by_shows_what_the_wire_says_even_where_it_is_no_choice(strategy: Strategy) -> None:
    page = panel()
    page.state.choose(strategy=strategy, ranks=2)
    ops = {total.op.value.replace("_", "-") for total in page.state.predicted.ranks[0].wire()}
    shown = page.controls.widget["zero1_form"].value
    assert shown.value in ops and (shown is Zero1Form.ALL_REDUCE) == (strategy is Strategy.DDP)
    assert page.state.zero1_form is Zero1Form.REDUCE_SCATTER


def test_the_page_is_told_what_its_controls_will_say() -> None:
    """The script that holds a press of Run compares these words with the visible ones."""
    page = panel()
    page.state.choose(ranks=8, strategy=Strategy.ZERO2, precision=Precision.BF16)
    match = re.search(r'data-controls="([^"]+)"', page.news.value)
    assert match
    said = json.loads(unescape(match[1]))
    assert (said["ranks"], said["strategy"], said["precision"], said["seq"]) == ("8", "ZeRO-2", "bf16", "32")
    assert said["async-reduce"] == "off" and "prefetch" not in said and "zero1-form" not in said


def test_measured_bars_of_the_run_before_are_called_so() -> None:
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=2))
    measured = replace(predicted, origin=Origin.LIVE)
    scene = build_scene(predicted, measured)
    assert "Of the run before" in tables_html(scene, predicted, measured, earlier=True)
    assert "Of the run before" not in tables_html(scene, predicted, measured)


def test_gloos_copies_stand_beside_the_words_to_the_byte() -> None:
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=2))
    grown = [rank.peak().total + extra for rank, extra in zip(predicted.ranks, (0, 7_000), strict=True)]
    measured = replace(
        predicted,
        origin=Origin.LIVE,
        environment={"backend": "gloo"},
        ranks=tuple(
            replace(rank, allocator=AllocatorReading(rank.rest_nbytes, peak, "a test"))
            for rank, peak in zip(predicted.ranks, grown, strict=True)
        ),
    )
    html = tables_html(build_scene(predicted, measured), predicted, measured)
    assert "grew by 7,000 B more than the categories (rank 1, the most of all ranks): gloo" in unescape(html)


def test_ranges_follow_the_model() -> None:
    page = panel()
    assert page.controls.widget["blocks"].max == 3 and page.controls.widget["seq"].options[-1] == 130
    page.state.choose(model=PRESETS["gpt2"])
    assert page.controls.widget["blocks"].max == 12 and page.controls.widget["seq"].options[-1] == 1024


def test_every_control_has_a_name_a_tooltip_and_a_class_of_its_own() -> None:
    page = panel()
    controls = [*page.controls.widget.values(), page.run_button, page.stop_button]
    for control in controls:
        assert control.description and control.tooltip
        assert any(name.startswith("zeroviz-") for name in control._dom_classes)
    assert len({control._dom_classes[0] for control in controls}) == len(controls)


def test_run_and_stop_are_enabled_when_they_mean_something() -> None:
    async def work() -> None:
        backend = FakeBackend(hold=asyncio.Event())
        page = ExplorerPanel(Explorer(backend, asyncio.get_running_loop()))
        assert not page.run_button.disabled and page.stop_button.disabled
        page.run_button.click()
        assert page.run_button.disabled and not page.stop_button.disabled
        await settled(lambda: page.state.run_state is RunState.RUNNING)
        assert "running" in page.news.value
        assert backend.hold is not None
        backend.hold.set()
        await settled(lambda: page.state.run_state is RunState.DONE)
        assert not page.run_button.disabled and not page.stop_button.disabled
        shown = figures(page.tables.value)
        for rank in predict(page.state.spec).ranks:
            assert shown[str(rank.rank), "at rest", "total", "measured"] == rank.rest_nbytes
            assert shown[str(rank.rank), "peak", "total", "difference"] == 0
        assert "measured equals predicted to the byte" in page.tables.value
        assert ">measured<" in page.stage.bars["svg"] and "done in 0.6 s" in page.news.value
        page.state.choose(ranks=2)
        assert ">measured<" not in page.stage.bars["svg"] and "another state" in page.news.value
        assert page.stop_button.description == "Stop engines"
        page.stop_button.click()
        await settled(lambda: page.state.run_state is RunState.STOPPED)
        assert page.stop_button.disabled

    in_loop(work)


def test_a_large_model_is_said_to_be_for_prediction_only() -> None:
    page = panel()
    page.controls.widget["model"].value = PRESETS["llama3-70b"]
    assert "Prediction only" in page.news.value
    assert_shows(page, predict(page.state.spec))


def test_tables_show_zero_plainly_and_mark_what_is_unexplained() -> None:
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=2))
    first = replace(predicted.ranks[0], rest={**predicted.ranks[0].rest, Category.BUCKET: 40}, losses=(5.5, 5.25))
    measured = replace(predicted, ranks=(first, predicted.ranks[1]), origin=Origin.LIVE)
    html = tables_html(build_scene(predicted, measured), predicted, measured)
    assert ">0 B</td>" in html and ">+40 B</td>" in html
    assert 'class="zeroviz-unexplained"' in html and UNEXPLAINED in html
    assert "differ by at most +40 B (rank 0, buckets)" in html
    assert "5.250000" in html
    shown = figures(html)
    assert shown["0", "at rest", "BUCKET", "measured"] == 40 and shown["0", "at rest", "BUCKET", "predicted"] == 0


def test_without_a_run_the_tables_compare_nothing() -> None:
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=1))
    html = tables_html(build_scene(predicted), predicted, None)
    assert "Not run yet" in html and "difference" not in html
    assert "nobody to send to" in html


def test_wire_figures_are_the_traces() -> None:
    predicted = predict(RunSpec(model=PRESETS["tiny"], strategy=Strategy.DDP, ranks=4))
    html = tables_html(build_scene(predicted), predicted, None)
    (total,) = predicted.ranks[0].wire()
    for value in (total.count, total.payload_nbytes, total.sent_nbytes):
        assert f">{value:,}</td>" in html
    assert "ranks 0-3" in html


@pytest.mark.parametrize(
    ("toggles", "words"),
    [
        ({"ranks": 64}, {"ranks 0-63"}),
        ({"ranks": 65}, {"ranks 0-64"}),
        ({"ranks": 64, "strategy": Strategy.HYBRID_SHARD, "shard_ranks": 8}, {"ranks 0-63"}),
        ({"ranks": 64, "impl": Implementation.ZERO_REDUNDANCY, "strategy": Strategy.ZERO1}, None),
    ],
)
def test_every_rank_sends_whether_or_not_the_pictures_draw_it(toggles: dict[str, Any], words: set[str] | None) -> None:
    """Each rank is in one row of each of its collectives: the rows' ranks are those of the trace, and no others."""
    predicted = predict(RunSpec(model=PRESETS["tiny"], **({"strategy": Strategy.ZERO3} | toggles)))
    html = tables_html(build_scene(predicted), predicted, None)
    wire = html.partition('class="zeroviz-wire"')[2]
    assert words is None or set(re.findall(r"ranks? [\d, -]+", wire.partition("</table>")[0])) == words
    whose = senders(predicted)
    assert sorted(rank for ranks in whose.values() for rank in ranks) == [rank.rank for rank in predicted.ranks]
    for first, ranks in whose.items():
        assert all(predicted.ranks[rank].wire() == predicted.ranks[first].wire() for rank in ranks)


def test_the_film_stands_open_under_the_bars_and_follows() -> None:
    page = panel()
    stage = page.stage
    assert (
        stage.is_open["timeline"] and 'aria-label="ZeRO-3 on 4 ranks, fp32: the step of each rank' in stage.film["svg"]
    )
    page.state.choose(strategy=Strategy.ZERO1, checkpointing=True)
    assert "ZeRO-1 on 4 ranks, fp32: the step" in stage.film["svg"] and "checkpointing block" in stage.film["svg"]
    before = stage.film["svg"]
    page.controls.widget["from_rest"].value = True
    assert page.state.from_rest and "not at 0" in stage.film["svg"] != before
    stage.is_open = {**stage.is_open, "timeline": False}
    page.state.choose(ranks=8)
    assert "on 8 ranks" not in stage.film["svg"]  # closed, it costs nothing
    stage.is_open = {**stage.is_open, "timeline": True}
    assert "on 8 ranks" in stage.film["svg"]


def test_the_stage_sends_the_film_of_the_state_and_where_its_frames_lie() -> None:
    """A place on the drawing for every frame, from left to right and inside the plot; sums by category as held."""
    page = panel()
    for toggles in ({}, {"strategy": Strategy.DDP}, {"ranks": 64, "model": PRESETS["gpt2"]}, {"accumulation": 3}):
        assert page.state.choose(**toggles)
        film, sent, xs = build_film(page.state.predicted), page.stage.frames, page.stage.film["xs"]
        assert sent["words"] == [frame.words for frame in film.frames] and len(xs) == len(film.frames)
        assert xs == sorted(xs) and page.stage.film["top"] < page.stage.film["bottom"]
        assert sent["nbytes"] == [sum(held) for held in sent["held"]]
        assert sent["peak"] == film.peak and sent["each"]


def test_bytes_lie_on_the_bars_where_the_stage_is_told() -> None:
    """The outline of a predicted bar ends at its peak: the same place by the drawing and by what the stage is sent."""
    page = panel()
    bars = page.stage.bars
    (rank, *_) = page.state.predicted.ranks
    x = bars["left"] + (bars["right"] - bars["left"]) * rank.peak().total / bars["most"]
    outlines = re.findall(r'd="M([0-9.]+) [0-9.]+h([0-9.]+)v[^"]*"[^>]*data-mark="rank0-predicted"', bars["svg"])
    ((left, length),) = [tuple(map(float, found)) for found in outlines]
    assert left == round(bars["left"], 1) and left + length == pytest.approx(x, abs=0.05)
    assert [bar[2] for bar in bars["bars"]] == [True, False, False, False]  # the film's rank


def test_a_toggle_is_one_message_of_the_stage() -> None:
    page = panel()
    sent: list[dict[str, Any]] = []
    page.stage.send_state = lambda key=None: sent.append(dict.fromkeys(key or ()))
    page.state.choose(ranks=8)
    assert len(sent) == 1 and {"bars", "film", "frames", "version"} <= set(sent[0])


def test_a_step_of_too_many_ops_is_a_timeline_without_a_cursor() -> None:
    page = panel()
    assert page.state.choose(model=PRESETS["llama3-70b"], unit=UnitKind.LAYER, accumulation=4)
    assert page.stage.frames == {} and "the step of each rank" in page.stage.film["svg"]


def test_ranks_that_differ_can_be_chosen_for_the_film() -> None:
    page = panel()
    choice = page.controls.widget["rank"]
    assert choice.disabled
    predicted = page.state.predicted
    leak = predicted.ranks[2].events[-1]._replace(delta_nbytes=8)
    events = (*predicted.ranks[2].events, leak, leak._replace(delta_nbytes=-8))
    odd = replace(predicted.ranks[2], events=events)
    ranks = (*predicted.ranks[:2], odd, predicted.ranks[3])
    page.state.measured = replace(predicted, origin=Origin.LIVE, ranks=ranks)
    assert [rank for _, rank in choice.options] == [0, 2] and not choice.disabled
    choice.value = 2
    assert page.state.rank == 2 and "the step of rank 2" in page.stage.film["svg"]
    page.state.choose(ranks=2)
    assert page.state.rank == 1 and "the step of each rank" in page.stage.film["svg"]


def test_the_map_of_what_fits_is_drawn_when_it_is_opened() -> None:
    page = panel()
    assert not page.fit.is_open and page.fit.picture.value == ""
    page.fit.button.value = True
    assert "Does tiny fit in h100-80gb?" in page.fit.picture.value
    gpu = page.controls.widget["gpu"]
    gpu.value = "24GiB"
    assert "Does tiny fit in 24GiB?" in page.fit.picture.value and "Fits 24GiB" in page.stage.bars["svg"]
    page.fit.upward.value = Upward.SEQ
    assert ">sequence</text>" in page.fit.picture.value
    page.state.choose(model=PRESETS["llama3-8b"])
    assert "Does llama3-8b fit" in page.fit.picture.value
    gpu.value = "<b>"
    assert "&lt;b&gt;" in page.news.value and gpu.value == page.state.gpu == "24GiB"
    gpu.value = "a100-40gb"
    assert "Does llama3-8b fit in a100-40gb" in page.fit.picture.value and "&lt;b&gt;" not in page.news.value


def test_keys_of_the_presenter_move_the_state() -> None:
    page = panel()
    page.stage.asked("strategy")
    assert page.state.strategy is Strategy.SHARD_GRAD_OP
    page.stage.asked("strategy back")
    page.stage.asked("more ranks")
    assert (page.state.strategy, page.state.ranks) == (Strategy.ZERO3, 8)
    page.stage.asked("undo")
    page.stage.asked("fewer ranks")
    assert page.state.ranks == 2
    page.stage.asked("fewer ranks")
    page.stage.asked("fewer ranks")
    assert page.state.ranks == 1
    before = page.state.toggles
    page.stage.asked("what nobody asks")
    assert page.state.toggles == before
    page.state.choose(impl=Implementation.DDP)
    page.stage.asked("strategy")  # of which it has one
    assert page.state.strategy is Strategy.DDP and not page.state.error


def test_the_wire_is_in_bytes_or_elements_and_the_formula_is_drawn_when_it_is_open() -> None:
    page = panel()
    assert ">each rank, in bytes<" in page.stage.wire["svg"] and page.stage.formula == {}
    page.controls.widget["in_elements"].value = True
    assert ">each rank, in elements<" in page.stage.wire["svg"]
    page.stage.is_open = {**page.stage.is_open, "formula": True}
    assert 'data-category="OPTIMIZER_STATE"' in page.stage.formula["svg"]
    rest = page.state.predicted.ranks[0].rest_nbytes
    assert f"{rest:,} B" in page.stage.formula["svg"]


def test_advice_is_worked_out_when_it_is_open_and_a_press_makes_the_change() -> None:
    page = panel()
    page.state.choose(model=PRESETS["llama3-8b"], ranks=2, seq=4096)
    assert page.advice.html == ""
    page.advice.is_open = True
    assert 'data-fits="false"' in page.advice.html and "Does not fit h100-80gb" in page.advice.html
    change = page.state.advice().changes[0]
    page.advice.pressed(json.dumps(as_plain(change.toggles)))
    assert page.state.predicted.ranks[0].peak().total == change.peak_nbytes
    page.controls.widget["gpu"].value = "h200-141gb"
    assert "h200-141gb" in page.advice.html
    before = page.state.toggles
    for wrong in ("{", "[]", '{"model": "x"}', '{"ranks": "many"}', '{"ranks": -1}'):
        page.advice.pressed(wrong)
        assert page.state.error and page.state.toggles == before


def test_sections_say_what_they_are_open_or_closed() -> None:
    page = panel()
    for section in (page.fit,):
        assert section.button.tooltip and "zeroviz-section" in section._dom_classes
        for is_open in (True, False):
            section.button.value = is_open
            assert section.button.description.startswith("▾" if is_open else "▸")


def test_as_here_stands_beside_as_on_nccl_with_unexplained_as_a_line() -> None:
    """A rank whose allocator was read event by event, and 24 bytes in it that nobody predicted."""
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=1))
    first = predicted.ranks[0]
    place = next(i for i, event in enumerate(first.events) if event.op == "backward") + 1
    extra = first.events[place]._replace(category=Category.TEMPORARY, delta_nbytes=24)
    events = (*first.events[:place], extra, *first.events[place:], extra._replace(delta_nbytes=-24))
    reading = AllocatorReading(first.rest_nbytes, first.peak().total + 24, "a test", num_events=len(events))
    measured = replace(
        predicted,
        origin=Origin.LIVE,
        ranks=(replace(first, events=events, allocator=reading),),
        environment={"backend": "gloo", "devices": ["cpu"]},
    )
    html = tables_html(build_scene(predicted, measured), predicted, measured)
    assert "as on NCCL" in html and "as here" in html
    shown = figures(html)
    for moment in ("peak", "machine peak"):
        assert shown["0", moment, "unexplained", "difference"] == 24
        assert shown["0", moment, "TEMPORARY", "difference"] == shown["0", moment, "total", "difference"] == 24
    assert shown["0", "at rest", "unexplained", "difference"] == 0
    machine = first.machine_peak().total
    assert shown["0", "machine peak", "total", "predicted"] == machine
    assert shown["0", "machine peak", "step counters", "measured"] == first.step_counter_nbytes
    assert "not as predicted" in html and "torch's allocator, and in no figure here" in unescape(html)
    assert "%" not in re.sub(r"<[^>]*>", "", html)


@pytest.mark.parametrize("offload", Offload)
def test_the_table_says_that_host_and_device_are_one_memory_where_anything_is_offloaded(offload: Offload) -> None:
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=2, offload=offload))
    ranks = []
    for rank in predicted.ranks:
        rest = sum(rank.rest.values()) + rank.step_counter_nbytes
        reading = AllocatorReading(rest, rank.machine_peak().total, "a test", num_events=len(rank.events))
        ranks.append(replace(rank, allocator=reading))
    environment = {"backend": "gloo", "devices": ["cpu", "cpu"]}
    run = replace(predicted, origin=Origin.LIVE, ranks=tuple(ranks), environment=environment)
    html = tables_html(build_scene(predicted, run), predicted, run)
    assert html.count("host and device are one memory here") == (offload is not Offload.NONE)
    # Without a run nothing was given out here.
    assert "one memory" not in tables_html(build_scene(predicted), predicted, None)


def test_names_are_text_and_never_markup() -> None:
    page = panel()
    page.state.choose(model=replace(PRESETS["tiny"], name="<img src=x onerror=alert(1)>"))
    for part in (page.stage.bars["svg"], page.tables.value, page.news.value):
        assert "<img" not in part
    assert not page.state.choose(seq=4096) and "<img" not in page.news.value


def test_a_toggle_redraws_within_a_blink() -> None:
    """Counted and not timed, for a shared machine; `benchmarks/` has the times."""
    page = panel()
    page.state.choose(ranks=8)
    calls = [num_calls(lambda s=strategy: page.state.choose(strategy=s)) for strategy in list(Strategy)[1:4]]
    assert max(calls) < 200_000


def test_the_map_alone_has_controls_and_runs_nothing() -> None:
    page = fit(model=PRESETS["llama3-8b"], ranks=8, seq=4096)
    assert page.fit.is_open and "Does llama3-8b fit in h100-80gb?" in page.fit.picture.value
    assert "zoom" not in page.controls.widget
    page.controls.widget["strategy"].value = Strategy.DDP
    assert ">DDP, fp32: " in page.fit.picture.value
    page.controls.widget["prefetch"].max = 9
    page.controls.widget["prefetch"].value = 3  # which DDP has no use for
    assert "prefetch is 3 with strategy DDP" in page.news.value and page.state.prefetch == 0
    with pytest.raises(RunError):
        page.state.run()
    with pytest.raises(SpecError, match="ranks is 0"):
        fit(ranks=0)


def test_outside_a_notebook_it_says_where_it_belongs() -> None:
    with pytest.raises(RunError, match="notebook cell"):
        explorer(FakeBackend())


def test_the_panel_is_one_widget_that_shows_its_state() -> None:
    page = panel()
    assert isinstance(page, widgets.VBox) and page.state.spec.ranks == 4
    page.state.zoom = True
    assert page.controls.widget["zoom"].value is True


SETTINGS_OF = {
    Implementation.DDP: ({}, {"bucket_view": True}, {"bucket_nbytes": 100_000}),
    Implementation.ZERO_REDUNDANCY: ({}, {"bucket_view": True}),
    Implementation.FSDP1: ({}, {"use_orig_params": True}, {"backward_prefetch": BackwardPrefetch.POST}),
    Implementation.FSDP2: ({}, {"reduce_dtype": DType.FP32}),
    Implementation.DEEPSPEED: ({}, {"bucket_numel": 100_000}),
    Implementation.MEGATRON: ({}, {"bucket_numel": 100_000}),
}


@pytest.mark.parametrize("impl", [impl for impl in Implementation if impl is not Implementation.OWN])
def test_every_state_of_an_implementation_draws_or_says_why_not(impl: Implementation) -> None:
    """Each pair x recipe x ranks x unit x setting, from the state before: the page has the prediction, or an error."""
    page = panel()
    num_drawn = 0
    for strategy, precision, ranks, unit, settings in product(
        PAIRS[impl], PRECISIONS[impl], (1, 3, 4), (UnitKind.MODEL, UnitKind.BLOCK), SETTINGS_OF[impl]
    ):
        plain = dict.fromkeys(SETTINGS)
        asked = {"impl": impl, "strategy": strategy, "precision": precision, "ranks": ranks, "unit": unit}
        if page.state.choose(**{**plain, **asked, **settings}):
            assert (page.state.spec.impl, page.state.spec.strategy) == (impl, strategy)
            assert_shows(page, page.state.predicted)
            num_drawn += 1
        else:
            assert impl.value in page.state.error and page.state.error.endswith(".")
    assert num_drawn >= 6 * len(PAIRS[impl])


def test_an_implementation_takes_what_it_lacks_away_and_says_so() -> None:
    page = panel()
    assert page.state.choose(checkpointing=True, prefetch=1, precision=Precision.BF16_MIXED)
    page.controls.widget["impl"].value = Implementation.FSDP2
    assert page.state.spec.impl is Implementation.FSDP2 and not page.state.error
    for words in ("precision is now fp32", "checkpointing is now", "prefetch is now 0", "torch's fully_shard (FSDP2)"):
        assert words in page.state.notice
    assert page.controls.widget["reduce_dtype"].layout.display is None
    assert page.controls.widget["bucket_view"].layout.display == "none"
    page.controls.widget["strategy"].value = Strategy.ZERO1
    assert page.state.spec.impl is Implementation.OWN and "the implementation is now own" in page.state.notice


def test_what_is_out_of_sight_is_drawn_when_the_page_rests() -> None:
    """As the page says what is within its window, a toggle draws that at once; the rest when asked, or when seen."""
    page = panel()
    stage = page.stage
    assert stage.seen is None and not stage.has_due  # nobody looks yet: all is drawn
    stage.seen = ["bars", "map"]
    film, wire, version = stage.film, stage.wire, stage.version
    page.state.choose(strategy=Strategy.DDP)
    assert "DDP on" in stage.bars["svg"] and "DDP on" in stage.map["svg"] and stage.has_due
    assert stage.film is film and stage.wire is wire and stage.version == version + 1
    assert stage.bars["of"] == stage.map["of"] != stage.frames["of"]  # so the page joins no cursor of another state
    stage.seen = ["map", "film"]
    assert "DDP on" in stage.film["svg"] and stage.bars["of"] == stage.frames["of"] and stage.wire is wire
    stage._told({"rest": True})
    assert "DDP on" in stage.wire["svg"] and not stage.has_due and stage.version == version + 1
    page.state.choose(ranks=3)
    stage._told({"rest": True})
    for picture in (stage.bars, stage.map, stage.film, stage.wire):
        assert "on 3 ranks" in picture["svg"]
