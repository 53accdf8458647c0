"""The explorer as a person uses it: JupyterLab in Chromium, real engines, and the numbers on the page."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from playwright.sync_api import Browser

from tests.browser.expect import assert_shows, expected, wait_until
from tests.browser.lab import ROOT, ExplorerPage, Lab
from tests.every import settings_of
from zeroviz.draw_timeline import placed_timeline
from zeroviz.film import Film, build_film
from zeroviz.heatmap import RANKS
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.schedule import OpKind
from zeroviz.spec import (
    Checkpointing,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Settings,
    Strategy,
    UnitPolicy,
)
from zeroviz.style import label_of
from zeroviz.timeline import build_timeline

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

NOTEBOOK = ROOT / "notebooks" / "explorer.ipynb"
WAIT_S = 15.0
COLD_RUN_S, WARM_RUN_S = 120.0, 60.0


def start_state(explorer: ExplorerPage, ranks: int = 2) -> None:
    """tiny, ZeRO-3, fp32, unit block, 32 tokens, 2 ranks or so: set as a person would."""
    explorer.control("model").locator("select").select_option(index=0)
    explorer.control("impl").locator("select").select_option(index=0)
    explorer.press("strategy", "ZeRO-3")
    explorer.press("precision", "fp32")
    explorer.press("unit", "whole model")  # which also puts "blocks a unit" back to 1
    explorer.press("unit", "block")
    explorer.slide("seq", "Home")
    explorer.slide("seq", "ArrowRight")
    explorer.slide("ranks", "Home")
    explorer.slide("ranks", "ArrowRight", ranks - 1)
    assert_shows(explorer, predict(RunSpec(model=PRESETS["tiny"], ranks=ranks)))


def test_it_opens_on_a_prediction(explorer: ExplorerPage) -> None:
    assert_shows(explorer, predict(RunSpec(model=PRESETS["tiny"], ranks=4)))


def test_keys_move_the_ranks(explorer: ExplorerPage) -> None:
    start_state(explorer, ranks=4)
    explorer.slide("ranks", "ArrowRight", 3)
    assert_shows(explorer, predict(RunSpec(model=PRESETS["tiny"], ranks=7)))
    explorer.slide("ranks", "Home")
    assert_shows(explorer, predict(RunSpec(model=PRESETS["tiny"], ranks=1)))


@pytest.mark.parametrize("strategy", Strategy)
def test_each_strategy_shows_its_prediction(explorer: ExplorerPage, strategy: Strategy) -> None:
    start_state(explorer)
    explorer.press("strategy", strategy.label)
    assert_shows(explorer, predict(RunSpec(model=PRESETS["tiny"], ranks=2, **settings_of(strategy, 2))))
    enabled = {name for name in ("zero1-form", "prefetch") if not is_disabled(explorer, name)}
    only_zero1 = {"zero1-form"} if strategy is Strategy.ZERO1 else set()
    assert enabled == only_zero1 | ({"prefetch"} if strategy.shards_param else set())


def test_whose_code_runs_the_step_is_a_toggle(explorer: ExplorerPage) -> None:
    """FSDP2 in place of our own; then DDP, which has no ZeRO-3: strategy and precision follow; its settings come."""
    start_state(explorer)
    impls = list(Implementation)
    explorer.control("impl").locator("select").select_option(index=impls.index(Implementation.FSDP2))
    spec = RunSpec(model=PRESETS["tiny"], ranks=2, impl=Implementation.FSDP2)
    assert_shows(explorer, predict(spec))
    explorer.press("precision", "fsdp-mixed")
    assert_shows(explorer, predict(replace(spec, precision=Precision.FSDP_MIXED)))
    assert not explorer.control("bucket-view").is_visible()
    explorer.control("impl").locator("select").select_option(index=impls.index(Implementation.DDP))
    ddp = RunSpec(model=PRESETS["tiny"], ranks=2, impl=Implementation.DDP, strategy=Strategy.DDP)
    assert_shows(explorer, predict(ddp))
    assert "strategy is now ddp" in explorer.notice() and "precision is now fp32" in explorer.notice()
    explorer.press("bucket-view", "on")
    assert_shows(explorer, predict(replace(ddp, settings=Settings(bucket_view=True))))


def is_disabled(explorer: ExplorerPage, name: str) -> bool:
    control = explorer.control(name)
    if control.locator(".noUi-handle").count():
        return control.locator("[disabled]").count() > 0
    return control.get_by_role("button").first.is_disabled()


def test_precision_unit_and_a_large_model(explorer: ExplorerPage) -> None:
    start_state(explorer)
    explorer.press("precision", "bf16-fp32grad")
    explorer.press("unit", "layer")
    spec = RunSpec(
        model=PRESETS["tiny"], ranks=2, precision=Precision.BF16_FP32GRAD, unit=UnitPolicy.parse("layer")
    )  # fmt: skip
    assert_shows(explorer, predict(spec))
    explorer.press("unit", "block")
    assert_shows(explorer, predict(replace(spec, unit=UnitPolicy.parse("block"))))
    explorer.slide("blocks", "ArrowRight")
    assert_shows(explorer, predict(replace(spec, unit=UnitPolicy.parse("block:2"))))
    large = explorer.control("model").locator("option", has_text="llama3-70b").inner_text()
    explorer.control("model").locator("select").select_option(label=large)
    wait_until(explorer, lambda: "llama3-70b" in explorer.title())
    wait_until(explorer, lambda: "Prediction only" in explorer.notice())


def test_options_of_the_step_move_the_peak(explorer: ExplorerPage) -> None:
    start_state(explorer)
    spec = RunSpec(model=PRESETS["tiny"], ranks=2)
    explorer.press("checkpointing", "blocks")
    spec = replace(spec, checkpointing=Checkpointing(1))
    assert_shows(explorer, predict(spec))
    explorer.slide("region", "ArrowRight")
    spec = replace(spec, checkpointing=Checkpointing(2))
    assert_shows(explorer, predict(spec))
    explorer.press("offload", "optimizer")
    spec = replace(spec, offload=Offload.OPTIMIZER)
    wait_until(explorer, lambda: "offload optimizer" in explorer.title())
    assert explorer.bars() == [rank.peak().total for rank in predict(spec).ranks]
    explorer.press("offload", "none")
    explorer.press("checkpointing", "nothing")
    explorer.control("optimizer").locator("select").select_option(label="sgd")
    assert_shows(explorer, predict(RunSpec(model=PRESETS["tiny"], ranks=2, optimizer=Optimizer.SGD)))
    explorer.control("optimizer").locator("select").select_option(label="adamw")
    explorer.press("strategy", "DDP")
    explorer.press("offload", "params")
    wait_until(explorer, lambda: "keeps its parameters whole" in explorer.error())
    start_state(explorer)


def test_the_timeline_follows_and_its_ops_say_their_bytes(explorer: ExplorerPage) -> None:
    start_state(explorer)
    drawing = explorer.root.locator("svg.zeroviz-timeline")
    explorer.press("strategy", "ZeRO-2")
    timeline = build_timeline(
        predict(RunSpec(model=PRESETS["tiny"], strategy=Strategy.ZERO2, ranks=2)), from_rest=False
    )
    wait_until(explorer, lambda: drawing.get_attribute("aria-label") == timeline.sentence)
    peak, tip = timeline.peak, explorer.root.locator(".zeroviz-tip")
    explorer.root.get_by_role("button", name="to the op that holds the peak").click()
    line = explorer.root.locator(".zeroviz-film-card .zeroviz-cursor-line").bounding_box()
    assert line is not None
    # The line stands on the op's last moment, of which the pointer may be half a pixel off.
    explorer.page.mouse.move(line["x"] + line["width"] / 2 - 0.5, line["y"] + line["height"] / 2)
    wait_until(explorer, tip.is_visible)
    assert f"at most {peak.nbytes:,} B" in tip.inner_text() and "block 2" in tip.inner_text()
    explorer.page.mouse.move(0, 0)
    wait_until(explorer, lambda: not tip.is_visible())
    explorer.press("from-rest", "from rest")
    wait_until(explorer, lambda: "not at 0" in (drawing.text_content() or ""))
    explorer.press("from-rest", "from zero")
    heading = explorer.root.locator(".zeroviz-timeline-section .zeroviz-heading")
    heading.focus()
    explorer.page.keyboard.press("Space")
    wait_until(explorer, lambda: not drawing.is_visible())
    assert heading.get_attribute("aria-expanded") == "false"
    explorer.page.keyboard.press("Space")
    wait_until(explorer, drawing.is_visible)


def assert_at_peak(explorer: ExplorerPage, film: Film) -> None:
    """The cursor is on the pin of the peak in the film, and at the end of a bar."""
    at = build_timeline(predict(film.spec), from_rest=False)
    (x,) = placed_timeline(at, [at.peak.moment])["xs"]
    line = explorer.root.locator(".zeroviz-film-card .zeroviz-cursor-line").get_attribute("d") or ""
    assert float(line.removeprefix("M").split()[0]) == x
    mark = explorer.root.locator(".zeroviz-bars-card .zeroviz-cursor-line").get_attribute("d") or ""
    bar = explorer.root.locator('svg.zeroviz-picture [data-category="outline"]').first
    end = bar.evaluate("bar => bar.getBBox().x + bar.getBBox().width")
    assert abs(float(mark.removeprefix("M").split()[0]) - end) < 1


def test_the_moment_keeps_its_place_from_state_to_state(explorer: ExplorerPage) -> None:
    """Rest, peak, end and an op stay what they are; where a film has no such op, the cursor stays in its phase, and is
    back at the op with the first film."""
    start_state(explorer)
    strategies = Strategy.ZERO3, Strategy.ZERO2, Strategy.DDP
    films = {each: build_film(predict(RunSpec(model=PRESETS["tiny"], strategy=each, ranks=2))) for each in strategies}
    said, slider = explorer.root.locator(".zeroviz-now"), explorer.root.locator("input.zeroviz-cursor")
    first = films[Strategy.ZERO3]

    def goes(number: int, strategy: Strategy, places: range) -> None:
        slider.fill(str(number))
        explorer.press("strategy", strategy.label)
        film = films[strategy]
        sentences = [f"{place} of {len(film.frames) - 1}: {film.frames[place].words}" for place in places]
        wait_until(explorer, lambda: said.inner_text() in sentences)
        explorer.press("strategy", Strategy.ZERO3.label)
        sentence = f"{number} of {len(first.frames) - 1}: {first.frames[number].words}"
        wait_until(explorer, lambda: said.inner_text() == sentence)

    def numbers(film: Film, *op: str) -> list[int]:
        return [number for number, frame in enumerate(film.frames) if frame[1 : 1 + len(op)] == op]

    for strategy in strategies[1:]:
        film = films[strategy]
        last = len(film.frames) - 1
        goes(0, strategy, range(1))
        goes(first.peak, strategy, range(film.peak, film.peak + 1))
        goes(len(first.frames) - 1, strategy, range(last, last + 1))
        op = ("forward", OpKind.FORWARD.label, "block 1")
        (here,), (there,) = numbers(first, *op), numbers(film, *op)
        goes(here, strategy, range(there, there + 1))
        (here,) = numbers(first, "forward", OpKind.UNSHARD.label, "block 1")
        forward = numbers(film, "forward")
        goes(here, strategy, range(forward[0], forward[-1] + 1))


def test_the_film_is_stepped_by_keys_pointer_slider_and_buttons(explorer: ExplorerPage) -> None:
    """Each way ends at the frame that it should, whose words, bytes and place are those of the film by arithmetic."""
    start_state(explorer)
    film = build_film(predict(RunSpec(model=PRESETS["tiny"], ranks=2)))
    last, page = len(film.frames) - 1, explorer.page
    stage = explorer.root.locator(".zeroviz-stage")
    said = explorer.root.locator(".zeroviz-now")
    card = explorer.root.locator(".zeroviz-film-card")

    def assert_at(number: int) -> None:
        assert stage.get_attribute("data-cursor") == str(number)
        assert said.inner_text() == f"{number} of {last}: {film.frames[number].words}"

    card.focus()
    page.keyboard.press("Home")
    wait_until(explorer, lambda: said.inner_text().endswith(film.frames[0].words))
    for key, number in (
        ("ArrowRight", 1), ("Space", 2), ("ArrowLeft", 1), ("End", last), ("ArrowRight", last), ("Home", 0),
        ("ArrowLeft", 0), ("PageDown", 0), ("PageUp", min(10, last)), ("p", film.peak),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert_at(number)
    held = explorer.root.locator(".zeroviz-now-held").inner_text()
    for category, nbytes in zip(film.categories, film.frames[film.peak].held, strict=True):
        said_of = f"{label_of(category, film.spec)} {film.amount(nbytes)}"
        assert (said_of in held) == (nbytes > 0), (said_of, held)
    assert_at_peak(explorer, film)
    explorer.root.get_by_role("button", name="one op on", exact=False).click()
    assert_at(film.peak + 1)
    slider = explorer.root.locator("input.zeroviz-cursor")
    slider.fill("3")
    assert_at(3)
    assert slider.get_attribute("aria-valuetext") == film.frames[3].words
    # A press on the line of a frame, in the picture, ends there.
    slider.fill("5")
    line = card.locator(".zeroviz-cursor-line").bounding_box()
    slider.fill("0")
    assert line is not None
    page.mouse.click(line["x"] + line["width"] / 2, line["y"] + line["height"] / 2)
    assert_at(5)


def test_moving_through_the_step_asks_the_kernel_for_nothing(explorer: ExplorerPage) -> None:
    """Twenty steps faster than the cursor is saved: one message goes out, and none of a picture comes in."""
    start_state(explorer)
    page, card = explorer.page, explorer.root.locator(".zeroviz-film-card")
    before = explorer.root.locator(".zeroviz-stage").get_attribute("data-version")
    card.focus()
    drawn = page.evaluate(
        """async () => {
          const card = document.querySelector(".zeroviz-film-card"), times = [];
          const svg = card.querySelector("svg");
          for (let step = 0; step < 20; step++) {
            const start = performance.now();
            card.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
            card.querySelector(".zeroviz-cursor-line").getBBox();
            times.push(performance.now() - start);
          }
          return svg === card.querySelector("svg") && times.length;
        }"""
    )
    assert drawn == 20
    page.wait_for_timeout(600)
    assert explorer.root.locator(".zeroviz-stage").get_attribute("data-version") == before


def test_the_map_opens_and_takes_another_gpu(explorer: ExplorerPage) -> None:
    start_state(explorer)
    explorer.root.locator(".zeroviz-fit-section .zeroviz-heading").click()
    drawing = explorer.root.locator("svg.zeroviz-heatmap")
    wait_until(explorer, lambda: drawing.count() == 1 and "fit in h100-80gb" in (drawing.text_content() or ""))
    cells = drawing.locator("[data-spare]")
    assert cells.count() == len(RANKS) * len(cells.evaluate_all("cs => [...new Set(cs.map(c => c.dataset.value))]"))
    gpu = explorer.control("gpu").locator("input")
    gpu.fill("24GiB")
    gpu.press("Enter")
    wait_until(explorer, lambda: "fit in 24GiB" in (drawing.text_content() or ""))
    gpu.fill("a toaster")
    gpu.press("Enter")
    wait_until(explorer, lambda: "a toaster" in explorer.error())
    assert gpu.input_value() == "24GiB"
    explorer.root.locator(".zeroviz-fit-section .zeroviz-heading").click()


def hide_side_bar(explorer: ExplorerPage) -> None:
    """Lab's own, by Ctrl-B, which works while no control has the focus."""
    page = explorer.page
    if page.locator("#jp-left-stack").is_visible():
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("Control+b")
        page.locator("#jp-left-stack").wait_for(state="hidden")


def test_the_controls_stay_in_sight_beside_the_timeline(explorer: ExplorerPage) -> None:
    hide_side_bar(explorer)
    explorer.root.locator(".zeroviz-timeline-section").evaluate("part => part.scrollIntoView({ block: 'start' })")
    explorer.page.wait_for_timeout(300)
    desk = explorer.root.locator(".zeroviz-desk").bounding_box()
    assert desk is not None and 0 <= desk["y"] < 400 and desk["height"] > 400
    explorer.root.evaluate("root => root.scrollIntoView({ block: 'start' })")


def test_letters_typed_on_a_control_do_not_edit_the_notebook(explorer: ExplorerPage) -> None:
    cells = explorer.page.locator(".jp-Cell")
    before = cells.count()
    explorer.control("ranks").locator(".noUi-handle").focus()
    for key in "addx":
        explorer.page.keyboard.press(key)
    explorer.page.wait_for_timeout(500)
    assert cells.count() == before


def test_sliders_have_a_name_and_say_their_value(explorer: ExplorerPage) -> None:
    start_state(explorer, ranks=3)
    handle = explorer.control("ranks").locator(".noUi-handle")
    wait_until(explorer, lambda: handle.get_attribute("aria-valuetext") == "3")
    assert handle.get_attribute("aria-label") == "ranks"


def test_a_run_is_measured_beside_its_prediction(explorer: ExplorerPage) -> None:
    start_state(explorer)
    news: list[str] = []
    explorer.control("run").click()
    deadline = time.monotonic() + COLD_RUN_S
    while explorer.run_state() not in ("done", "failed"):
        if explorer.news() not in news:
            news.append(explorer.news())
        assert time.monotonic() < deadline, news
        explorer.page.wait_for_timeout(20)
    assert explorer.run_state() == "done", explorer.error()
    assert any("2 engines" in line for line in news), news
    assert explorer.news().startswith("done in ")
    predicted = predict(RunSpec(model=PRESETS["tiny"], ranks=2))
    wait_until(explorer, lambda: len(explorer.bars("live")) == 2)
    wait_until(explorer, lambda: len(explorer.figures("difference")) > 0)
    measured, differences = explorer.figures("measured"), explorer.figures("difference")
    for (rank, moment, category), nbytes in expected(predicted).items():
        if moment == "at rest":
            assert measured[rank, moment, category] == nbytes
            assert differences[rank, moment, category] == 0
    assert explorer.bars("live") == [measured[rank, "peak", "total"] for rank in (0, 1)]
    assert all(measured[rank, "peak", "total"] > measured[rank, "at rest", "total"] for rank in (0, 1))
    assert explorer.root.locator(".zeroviz-losses td").count() > 0
    unexplained = {key: nbytes for key, nbytes in differences.items() if key[2] == "unexplained"}
    assert set(unexplained.values()) == {0} and len(unexplained) == 2 * len(("at rest", "peak", "machine peak"))
    assert all(measured[rank, "machine peak", "total"] >= measured[rank, "peak", "total"] for rank in (0, 1))
    line = explorer.root.locator("svg.zeroviz-timeline").text_content() or ""
    assert "Measured: " in line and "reach the predicted maximum to the byte" in line
    sent = explorer.root.locator('.zeroviz-wire td[data-source="difference"]').all_inner_texts()
    assert sent and {text.split()[0] for text in sent} == {"0"}


def test_a_second_run_is_warm_and_another_state_drops_the_measured_bars(explorer: ExplorerPage) -> None:
    start_state(explorer)
    explorer.control("run").click()
    explorer.wait_run("done", timeout_s=COLD_RUN_S)
    explorer.press("strategy", "DDP")
    wait_until(explorer, lambda: explorer.bars("live") == [])
    wait_until(explorer, lambda: "another state" in explorer.notice())
    started = time.monotonic()
    explorer.control("run").click()
    explorer.page.wait_for_timeout(100)
    explorer.wait_run("done", timeout_s=WARM_RUN_S)
    assert time.monotonic() - started < WARM_RUN_S
    # The table is painted a moment after the picture.
    wait_until(explorer, lambda: set(explorer.figures("difference").values()) == {0})
    assert len(explorer.bars("live")) == 2


def test_run_runs_what_the_controls_show_however_soon_it_is_pressed(explorer: ExplorerPage) -> None:
    """A slider's moves wait for the kernel, one by one; a press that did not wait with them would overtake them."""
    start_state(explorer, ranks=1)
    run = explorer.control("run")
    handle = explorer.control("ranks").locator(".noUi-handle")
    handle.evaluate(
        """(handle) => {
          for (let turn = 0; turn < 3; turn += 1)
            handle.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }));
          document.querySelector('.zeroviz-run').click();
        }"""
    )
    explorer.wait_run("starting", "running", timeout_s=3)  # sooner than the script gives up holding the press
    assert "ZeRO-3 on 4 ranks, fp32" in explorer.news()
    explorer.wait_run("done", timeout_s=COLD_RUN_S)
    wait_until(explorer, lambda: len(explorer.bars("live")) == 4)
    explorer.slide("ranks", "ArrowLeft", 3)
    run.click()  # this time by the pointer, right behind the keys; one rank may be done before its news can be read
    wait_until(explorer, lambda: len(explorer.bars("live")) == 1)


def test_a_double_click_on_run_is_one_run_without_a_complaint(explorer: ExplorerPage) -> None:
    start_state(explorer)
    explorer.control("run").dblclick()
    explorer.page.wait_for_timeout(100)
    explorer.wait_run("done", timeout_s=COLD_RUN_S)
    explorer.page.wait_for_timeout(300)
    assert explorer.run_state() == "done" and explorer.error() == ""


def test_end_goes_to_the_end_of_a_range_that_followed_the_model(explorer: ExplorerPage) -> None:
    start_state(explorer)
    large = explorer.control("model").locator("option", has_text="llama3-70b").inner_text()
    explorer.control("model").locator("select").select_option(label=large)
    wait_until(explorer, lambda: "llama3-70b" in explorer.title())
    explorer.slide("seq", "End")
    explorer.slide("blocks", "End")
    spec = RunSpec(model=PRESETS["llama3-70b"], ranks=2, seq=8192, unit=UnitPolicy.parse("block:80"))
    assert_shows(explorer, predict(spec))


@pytest.mark.parametrize(("width", "height"), [(1920, 1080), (1280, 720)])
def test_controls_and_bars_of_four_ranks_share_a_projectors_screen(
    explorer: ExplorerPage, width: int, height: int
) -> None:
    """At 720 lines without Lab's side bar, which Ctrl-B hides."""
    page = explorer.page
    usual = page.viewport_size
    start_state(explorer, ranks=4)
    explorer.control("run").click()
    explorer.wait_run("done", timeout_s=COLD_RUN_S)
    wait_until(explorer, lambda: len(explorer.bars("live")) == 4)
    try:
        page.set_viewport_size({"width": width, "height": height})
        hide_side_bar(explorer)
        page.wait_for_timeout(500)
        explorer.root.evaluate("root => root.scrollIntoView({ block: 'start' })")
        page.wait_for_timeout(300)
        bottom = page.locator("#jp-bottom-panel, .jp-StatusBar-Widget").first.bounding_box()
        for part in (explorer.control("strategy"), explorer.control("run"), explorer.root.locator(".zeroviz-picture")):
            box = part.bounding_box()
            assert box and bottom and box["y"] >= 0 and box["y"] + box["height"] <= bottom["y"], (box, bottom)
    finally:
        assert usual
        page.set_viewport_size(usual)


def test_a_cell_that_is_run_again_finds_its_engines_warm(explorer: ExplorerPage) -> None:
    """The cell runs again and again in a lecture; its engines must not pile up."""
    start_state(explorer)
    explorer.control("run").click()
    explorer.wait_run("done", timeout_s=COLD_RUN_S)
    cell = explorer.page.locator(".jp-CodeCell .cm-content").first
    cell.click()
    explorer.page.keyboard.press("Shift+Enter")
    wait_until(explorer, lambda: explorer.root.count() == 1 and explorer.run_state() == "idle")
    wait_until(explorer, lambda: explorer.title().startswith("ZeRO-3 on 4 ranks"))
    assert explorer.control("stop").inner_text() == "Stop engines" and not explorer.control("stop").is_disabled()
    start_state(explorer)
    explorer.control("run").click()
    explorer.wait_run("done", timeout_s=WARM_RUN_S)
    assert "started" not in explorer.news()


def test_the_page_stays_usable_during_a_run_and_stop_ends_it(explorer: ExplorerPage) -> None:
    start_state(explorer)
    explorer.slide("ranks", "ArrowRight", 2)
    assert_shows(explorer, predict(RunSpec(model=PRESETS["tiny"], ranks=4)))
    explorer.control("run").click()
    explorer.wait_run("starting", "running", timeout_s=WAIT_S)
    explorer.press("strategy", "ZeRO-2")
    assert_shows(explorer, predict(RunSpec(model=PRESETS["tiny"], strategy=Strategy.ZERO2, ranks=4)))
    explorer.control("stop").click()
    explorer.wait_run("stopped", timeout_s=WARM_RUN_S)
    wait_until(explorer, lambda: explorer.control("stop").is_disabled())
    assert not explorer.control("run").is_disabled()
    assert explorer.error() == ""


def test_a_refused_run_is_one_sentence_and_the_picture_stays(explorer: ExplorerPage) -> None:
    start_state(explorer)
    large = explorer.control("model").locator("option", has_text="llama3-70b").inner_text()
    explorer.control("model").locator("select").select_option(label=large)
    wait_until(explorer, lambda: "llama3-70b" in explorer.title())
    title = explorer.title()
    explorer.control("run").click()
    explorer.wait_run("failed", timeout_s=WARM_RUN_S)
    assert "llama3-70b" in explorer.error()
    assert explorer.title() == title and not explorer.control("run").is_disabled()


def test_shift_enter_twice_is_all_the_keyboard_needs(browser: Browser, lab: Lab) -> None:
    """As the notebook's own words promise."""
    page = browser.new_page()
    page.goto(lab.url("keyboard"))
    page.locator(".jp-CodeCell .cm-content").first.wait_for(timeout=60_000)
    page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for(timeout=60_000)
    for _ in range(2):
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(300)
    page.locator("svg.zeroviz-picture").first.wait_for(timeout=60_000)
    page.close()
