"""What the explorer has beside bars, map and film, by mouse and keys, in JupyterLab and as a page of its own: the wire,
the formula, guesses, pins, another model, a recorded trace, advice, the presenter. Figures are those of `predict`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.expect import assert_shows, wait_until
from tests.browser.lab import App, ExplorerPage, Lab, opened
from zeroviz.advice import advise
from zeroviz.capacities import parse_capacity
from zeroviz.guess import Asked, build_question
from zeroviz.models import PRESETS, bare
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy, UnitPolicy
from zeroviz.trace import Origin

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
OPENING = RunSpec(model=PRESETS["tiny"], ranks=4)


@pytest.fixture(scope="module", params=[Lab, App], ids=["lab", "voila"])
def explorer(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ExplorerPage]:
    screenshots = tmp_path_factory.mktemp("screenshots")
    with request.param(tmp_path_factory.mktemp("home")) as server, opened(browser, server, screenshots) as page:
        yield page


@pytest.fixture(autouse=True)
def opening(explorer: ExplorerPage) -> None:
    """Each test begins with the opening state."""
    explorer.control("reset").click()
    assert_shows(explorer, predict(OPENING))


def sent(explorer: ExplorerPage, figure: str) -> int:
    """What the wire's picture says that the first row sends."""
    marks = explorer.root.locator('svg.zeroviz-wire [data-mark^="rank0-predicted"][data-calls]')
    found: list[int] = marks.evaluate_all(f"marks => marks.map(mark => Number(mark.dataset.{figure}))")
    return sum(found)


def test_the_wire_is_drawn_in_bytes_and_in_elements(explorer: ExplorerPage) -> None:
    explorer.press("strategy", "ZeRO-2")
    rank = predict(replace(OPENING, strategy=Strategy.ZERO2)).ranks[0]
    wait_until(explorer, lambda: sent(explorer, "nbytes") == rank.sent_nbytes)
    explorer.press("in-elements", "elements")
    drawing = explorer.root.locator("svg.zeroviz-wire")
    wait_until(explorer, lambda: "in elements" in (drawing.text_content() or ""))
    explorer.press("in-elements", "bytes")


def test_a_term_of_the_formula_lights_its_bars(explorer: ExplorerPage) -> None:
    heading = explorer.root.locator(".zeroviz-formula-section .zeroviz-heading")
    if heading.get_attribute("aria-expanded") == "false":
        heading.click()
    formula = explorer.root.locator(".zeroviz-formula")
    rank = predict(OPENING).ranks[0]
    wait_until(explorer, lambda: formula.count() == 1 and f"{rank.rest_nbytes:,} B" in formula.inner_text())
    assert f"{rank.peak().total:,} B" in formula.inner_text() and f"{rank.sent_nbytes:,} B" in formula.inner_text()
    formula.locator('.zeroviz-term[data-category~="OPTIMIZER_STATE"]').first.focus()
    lit = explorer.root.locator("svg.zeroviz-picture.zeroviz-lighting .zeroviz-lit")
    wait_until(explorer, lambda: lit.count() > 0)
    assert set(lit.evaluate_all("marks => marks.map(mark => mark.dataset.category)")) == {"OPTIMIZER_STATE"}
    explorer.control("reset").focus()
    wait_until(explorer, lambda: explorer.root.locator(".zeroviz-lighting").count() == 0)


def test_predict_first_hides_the_numbers_until_the_guess(explorer: ExplorerPage) -> None:
    picture, switch = explorer.root.locator("svg.zeroviz-picture"), explorer.control("predict-first")
    switch.click()
    wait_until(explorer, lambda: not picture.is_visible())
    assert not explorer.root.locator(".zeroviz-memory").is_visible()
    question = build_question(predict(OPENING), Asked.PEAK)
    number = next(number for number, choice in enumerate(question.choices) if not choice.is_right)
    button = explorer.control(f"choice-{number}")
    assert button.inner_text() == question.choices[number].text
    button.click()
    wait_until(explorer, picture.is_visible)
    said = explorer.root.locator(".zeroviz-guess svg").get_attribute("aria-label") or ""
    assert "You said" in said and question.right.text in said
    explorer.press("strategy", "DDP")
    wait_until(explorer, lambda: not picture.is_visible())
    switch.click()
    wait_until(explorer, picture.is_visible)


def test_the_question_comes_over_the_window_and_then_its_answer(explorer: ExplorerPage) -> None:
    switch, keys = explorer.control("predict-first"), explorer.page.keyboard
    guess = explorer.root.locator("div.zeroviz-guess")
    switch.click()
    field = explorer.control("guess-number").locator("input")
    field.wait_for()
    room = """e => {
      const style = getComputedStyle(e), pen = document.createElement("canvas").getContext("2d");
      pen.font = `${style.fontSize} ${style.fontFamily}`;
      return e.clientWidth - parseFloat(style.paddingLeft) * 2 - pen.measureText(e.placeholder).width;
    }"""
    assert field.evaluate(room) >= 0
    explorer.control("present").click()
    box = guess.bounding_box()
    assert box is not None and (box["x"], box["y"], box["width"], box["height"]) == (0, 0, 1400, 1300)
    assert field.evaluate(room) >= 0 and not explorer.root.locator("svg.zeroviz-picture").is_visible()
    explorer.control("choice-0").click()
    wait_until(explorer, guess.locator("svg").is_visible)
    keys.press("PageDown")
    wait_until(explorer, explorer.root.locator(".zeroviz-presenting svg.zeroviz-picture").is_visible)
    assert guess.evaluate("e => e.popover") is None
    keys.press("Escape")
    explorer.press("strategy", "DDP")
    explorer.control("present").click()
    keys.press("Escape")
    wait_until(explorer, lambda: (guess.bounding_box() or {"x": 0})["x"] > 0)
    switch.click()
    wait_until(explorer, explorer.root.locator("svg.zeroviz-picture").is_visible)


def test_code_is_legible_in_both_themes(explorer: ExplorerPage) -> None:
    """By WCAG's contrast of its colour on what is behind it, and all of one width."""
    heading = explorer.root.get_by_role("button", name="Take it away")
    if "▸" in heading.inner_text():
        heading.click()
    code = explorer.root.locator("pre.zeroviz-code")
    code.first.wait_for()
    for is_light in ("false", "true"):
        explorer.page.evaluate("is => { document.body.dataset.jpThemeLight = is; }", is_light)
        ratios = code.evaluate_all(
            """all => {
              const light = (color) => {
                const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
                  .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              const behind = (e) => {
                const { backgroundColor } = getComputedStyle(e);
                return backgroundColor === "rgba(0, 0, 0, 0)" ? behind(e.parentElement) : backgroundColor;
              };
              return all.map((e) => {
                const [low, high] = [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => a - b);
                return (high + 0.05) / (low + 0.05);
              });
            }"""
        )
        assert len(ratios) == 2 and min(ratios) >= 7, (is_light, ratios)
    widths = code.first.evaluate(
        """e => ["iiii", "MMMM"].map((text) => {
          const span = document.createElement("span");
          span.textContent = text;
          e.append(span);
          const { width } = span.getBoundingClientRect();
          span.remove();
          return width;
        })"""
    )
    assert widths[0] == widths[1] > 0
    assert code.first.evaluate("e => parseFloat(getComputedStyle(e).lineHeight)") < 20


def test_a_very_wide_page_has_two_columns_of_pictures(explorer: ExplorerPage) -> None:
    bars, plan = (explorer.root.locator(f".zeroviz-{name}-card") for name in ("bars", "map"))

    def places() -> tuple[float, float, float, float]:
        boxes = bars.bounding_box(), plan.bounding_box()
        assert boxes[0] is not None and boxes[1] is not None
        return boxes[0]["x"] + boxes[0]["width"], boxes[1]["x"], boxes[1]["x"] + boxes[1]["width"], boxes[0]["x"]

    explorer.page.set_viewport_size({"width": 3840, "height": 2160})
    wait_until(explorer, lambda: places()[0] < places()[1])
    assert places()[2] > 3300
    explorer.page.set_viewport_size({"width": 1400, "height": 1300})
    wait_until(explorer, lambda: places()[1] == places()[3])


def test_a_pinned_state_stands_beside_another_one(explorer: ExplorerPage) -> None:
    heading = explorer.root.get_by_role("button", name="Compare")
    if "▸" in heading.inner_text():
        heading.click()
    explorer.control("pin").click()
    explorer.press("strategy", "DDP")
    table = explorer.root.locator(".zeroviz-differences")
    here, other = predict(replace(OPENING, strategy=Strategy.DDP)).ranks[0], predict(OPENING).ranks[0]
    difference = other.peak().total - here.peak().total
    wait_until(explorer, lambda: table.count() == 1 and f"{difference:+,} B" in table.inner_text())
    explorer.control("go-to-pin").click()
    assert_shows(explorer, predict(OPENING))
    explorer.control("unpin").click()
    wait_until(explorer, lambda: table.count() == 0)


def test_a_number_of_parameters_and_a_recorded_trace_are_taken_in(explorer: ExplorerPage, tmp_path: Path) -> None:
    heading = explorer.root.locator(".zeroviz-intake .zeroviz-heading")
    if heading.get_attribute("aria-expanded") == "false":
        heading.click()
    field = explorer.root.locator(".zeroviz-intake-text")
    field.fill("7.5B")
    field.press("Enter")
    spec = RunSpec(model=bare(7_500_000_000), ranks=4, unit=UnitPolicy.parse("model"))
    wait_until(explorer, lambda: explorer.bars() == [predict(spec).ranks[0].peak().total] * 4)
    title = explorer.title()
    field.fill("no model at all")
    explorer.root.get_by_role("button", name="Use it").click()
    wait_until(explorer, lambda: "'no model at all' is no config.json" in explorer.error())
    assert explorer.title() == title
    trace = replace(predict(RunSpec(model=PRESETS["tiny-llama"], ranks=3)), origin=Origin.LIVE)
    whole, half = tmp_path / "trace.json", tmp_path / "half.json"
    whole.write_text(trace.to_json())
    half.write_text(trace.to_json()[:-1000])
    picker = explorer.root.locator(".zeroviz-intake-file")
    picker.set_input_files(half)
    wait_until(explorer, lambda: "not whole JSON" in explorer.error())
    picker.set_input_files(whole)
    wait_until(explorer, lambda: len(explorer.bars("recorded")) == 3)
    assert explorer.bars("recorded") == [rank.peak().total for rank in trace.ranks]
    explorer.control("undo").click()
    wait_until(explorer, lambda: explorer.title() == title)


def test_a_file_is_dropped_anywhere_on_the_page(explorer: ExplorerPage) -> None:
    config = {
        "model_type": "llama", "hidden_size": 72, "intermediate_size": 200, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 1009, "max_position_embeddings": 128,
    }  # fmt: skip
    transfer = explorer.page.evaluate_handle(
        """text => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([text], "dropped.json", { type: "application/json" }));
          return transfer;
        }""",
        json.dumps(config),
    )
    explorer.root.locator("svg.zeroviz-picture").dispatch_event("drop", {"dataTransfer": transfer})
    wait_until(explorer, lambda: "dropped, " in explorer.title())


def test_advice_is_pressed(explorer: ExplorerPage) -> None:
    heading = explorer.root.locator(".zeroviz-advice-section .zeroviz-heading")
    if heading.get_attribute("aria-expanded") == "false":
        heading.click()
    explorer.control("model").locator("select").select_option(label="llama3-8b, 8,030,261,248 parameters")
    explorer.press("strategy", "DDP")  # 16 bytes of each parameter are beyond 80 GB
    spec = replace(OPENING, model=PRESETS["llama3-8b"], strategy=Strategy.DDP)
    assert_shows(explorer, predict(spec))
    change = advise(spec, parse_capacity("h100-80gb").nbytes).changes[0]
    button = explorer.root.locator("button.zeroviz-change", has_text=change.words).first
    button.wait_for()
    button.click()
    wait_until(explorer, lambda: explorer.bars()[:1] == [change.peak_nbytes])


def test_the_presenter_shows_one_picture_by_keys(explorer: ExplorerPage) -> None:
    explorer.control("present").click()
    stage = explorer.root.locator(".zeroviz-stage")
    keys = explorer.page.keyboard

    def shown() -> list[str]:
        seen: list[str] = stage.locator("svg.zeroviz-drawing:visible").evaluate_all(
            "drawings => drawings.map(drawing => drawing.classList[1])"
        )
        return seen

    wait_until(explorer, lambda: shown() == ["zeroviz-picture"])
    box = stage.bounding_box()
    assert box is not None and (box["x"], box["y"], box["width"]) == (0, 0, 1400)
    for key, name in (("2", "shard-map"), ("PageDown", "timeline"), ("PageDown", "wire"), ("PageUp", "timeline")):
        keys.press(key)
        wait_until(explorer, lambda name=name: shown() == [f"zeroviz-{name}"])  # type: ignore[misc]
    keys.press("Home")
    keys.press("ArrowRight")
    wait_until(explorer, lambda: stage.get_attribute("data-cursor") == "1")
    keys.press("+")
    wait_until(explorer, lambda: explorer.title().startswith("ZeRO-3 on 8 ranks"))
    keys.press("s")
    wait_until(explorer, lambda: explorer.title().startswith("SHARD_GRAD_OP on 8 ranks"))
    keys.press("b")
    wait_until(explorer, explorer.root.locator(".zeroviz-blank").is_visible)
    keys.press("s")  # any key brings the picture back, and does nothing unseen
    wait_until(explorer, explorer.root.locator(".zeroviz-blank").is_hidden)
    assert explorer.title().startswith("SHARD_GRAD_OP on 8 ranks")
    keys.press("5")  # what is longer than the window is scrolled through
    formula = explorer.root.locator(".zeroviz-formula-card")
    wait_until(explorer, formula.locator(".zeroviz-formula").is_visible)
    explorer.page.set_viewport_size({"width": 1400, "height": 600})
    is_at_end = "e => e.scrollHeight > e.clientHeight && e.scrollTop + e.clientHeight >= e.scrollHeight - 2"
    formula.hover()
    explorer.page.mouse.wheel(0, 20_000)
    wait_until(explorer, lambda: bool(formula.evaluate(is_at_end)))
    keys.press("Home")
    assert formula.evaluate("e => e.scrollTop") == 0
    keys.press("ArrowDown")
    assert formula.evaluate("e => e.scrollTop") > 0
    keys.press("End")
    assert formula.evaluate(is_at_end)
    explorer.page.set_viewport_size({"width": 1920, "height": 1080})
    keys.press("1")  # a wide window has longer bars
    rows = explorer.root.locator("svg.zeroviz-picture")
    wait_until(explorer, lambda: float((rows.get_attribute("viewBox") or "").split()[2]) > 1000)
    keys.press("5")  # here all of it is to be seen, and the smallest words are read from the last row
    assert formula.evaluate("e => e.scrollHeight <= e.clientHeight")
    sizes = formula.locator("th, li, dd").evaluate_all("all => all.map(e => parseFloat(getComputedStyle(e).fontSize))")
    assert min(sizes) >= 18
    explorer.page.set_viewport_size({"width": 1400, "height": 1300})
    keys.press("Escape")
    wait_until(explorer, lambda: float((rows.get_attribute("viewBox") or "").split()[2]) < 1000)
    wait_until(explorer, lambda: len(shown()) > 3)
    assert explorer.page.evaluate("document.activeElement.className").endswith("zeroviz-present")
