"""A slider's next step, drawn before it is made: the page shows it before the kernel is asked, and the kernel answers
the same."""

from __future__ import annotations

import pytest

from tests.browser.expect import assert_shows, wait_until
from tests.browser.lab import ExplorerPage
from zeroviz.film import build_film
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
TINY = PRESETS["tiny"]

# A key on a slider and, in the same task, before any message can come: what the pictures say, and the state's number.
_PRESS = """([control, key, names]) => {
  const root = document.querySelector('.zeroviz-explorer');
  const stage = root.querySelector('.zeroviz-stage');
  const handle = root.querySelector(`.zeroviz-${control} .noUi-handle`);
  const said = () => names.map(
    name => stage.querySelector(`.zeroviz-${name}-card svg`).getAttribute('aria-label').split('. ')[0]);
  const before = { version: stage.dataset.version, said: said(), cursor: stage.dataset.cursor };
  handle.focus({ preventScroll: true });
  handle.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
  return Promise.resolve().then(
    () => ({ before, after: { version: stage.dataset.version, said: said(), cursor: stage.dataset.cursor } }));
}"""


def await_ahead(explorer: ExplorerPage, toggle: str, *names: str) -> None:
    """Until the page has what is one step ahead of what it shows, the pictures of these names at least, scrolled to the
    first of them."""
    stage = explorer.root.locator(".zeroviz-stage")
    explorer.root.locator(f".zeroviz-{names[0]}-card svg").scroll_into_view_if_needed()

    def is_there() -> bool:
        ahead, version = stage.get_attribute("data-ahead") or "", stage.get_attribute("data-version")
        return ahead.split()[:2] == [toggle, version] and {*names} <= {*ahead.split()[2:]}

    wait_until(explorer, is_there)


@pytest.mark.parametrize("key, ranks", [("ArrowRight", 5), ("ArrowLeft", 3)])
def test_the_next_step_is_there_before_the_kernel_is_asked(app: ExplorerPage, key: str, ranks: int) -> None:
    app.control("reset").click()
    assert_shows(app, predict(RunSpec(model=TINY, ranks=4)))
    await_ahead(app, "ranks", "bars", "map")
    shown = app.page.evaluate(_PRESS, ["ranks", key, ["bars", "map"]])
    title = f"ZeRO-3 on {ranks} ranks, fp32"
    assert shown["before"]["said"] == ["ZeRO-3 on 4 ranks, fp32", "ZeRO-3 on 4 ranks, fp32: who holds what"]
    assert shown["after"]["version"] == shown["before"]["version"]
    assert shown["after"]["said"] == [title, f"{title}: who holds what"]
    assert_shows(app, predict(RunSpec(model=TINY, ranks=ranks)))


def test_a_film_drawn_ahead_is_at_the_same_place_of_the_step(app: ExplorerPage) -> None:
    """At the peak, whose number is another one on one rank."""
    stage = app.root.locator(".zeroviz-stage")
    two, one = (build_film(predict(RunSpec(model=TINY, ranks=ranks))).peak for ranks in (2, 1))
    assert one != two
    app.control("reset").click()
    app.slide("ranks", "Home")
    app.slide("ranks", "ArrowRight")
    assert_shows(app, predict(RunSpec(model=TINY, ranks=2)))
    app.root.get_by_role("button", name="to the op that holds the peak").click()
    wait_until(app, lambda: stage.get_attribute("data-cursor") == str(two))
    await_ahead(app, "ranks", "film")
    shown = app.page.evaluate(_PRESS, ["ranks", "ArrowLeft", ["film"]])
    assert shown["before"]["version"] == shown["after"]["version"] and "on 1 rank" in shown["after"]["said"][0]
    assert (shown["before"]["cursor"], shown["after"]["cursor"]) == (str(two), str(one))
    assert_shows(app, predict(RunSpec(model=TINY, ranks=1)))
    assert stage.get_attribute("data-cursor") == str(one)


def test_what_is_scrolled_to_is_ahead_as_well(app: ExplorerPage) -> None:
    """What was drawn ahead for one place of the page is not all that another place shows."""
    app.control("reset").click()
    assert_shows(app, predict(RunSpec(model=TINY, ranks=4)))
    await_ahead(app, "ranks", "bars")
    await_ahead(app, "ranks", "wire")
    shown = app.page.evaluate(_PRESS, ["ranks", "ArrowRight", ["wire"]])
    assert shown["before"]["said"][0].startswith("ZeRO-3 on 4 ranks, fp32")
    assert shown["after"]["said"][0].startswith("ZeRO-3 on 5 ranks, fp32")
    assert shown["after"]["version"] == shown["before"]["version"]


def test_the_slider_that_moved_last_is_ahead(app: ExplorerPage) -> None:
    app.control("reset").click()
    app.slide("batch", "ArrowRight")
    assert_shows(app, predict(RunSpec(model=TINY, ranks=4, batch=2)))
    await_ahead(app, "batch", "bars")
    before = app.root.locator(".zeroviz-bars-card svg").get_attribute("aria-label")
    app.page.evaluate(_PRESS, ["batch", "ArrowRight", ["bars"]])
    now = app.root.locator(".zeroviz-bars-card svg").get_attribute("aria-label")
    assert before and now and "2 x 32 tokens" in before and "4 x 32 tokens" in now
    assert_shows(app, predict(RunSpec(model=TINY, ranks=4, batch=4)))


def test_another_toggle_leaves_nothing_ahead_of_an_old_state(app: ExplorerPage) -> None:
    """ZeRO-2 is chosen and, before anything is drawn for it, the slider moves: what comes is ZeRO-2's."""
    app.control("reset").click()
    app.slide("ranks", "ArrowRight")
    assert_shows(app, predict(RunSpec(model=TINY, ranks=5)))
    await_ahead(app, "ranks", "bars")
    app.press("strategy", "ZeRO-2")
    app.slide("ranks", "ArrowRight")
    assert_shows(app, predict(RunSpec(model=TINY, ranks=6, strategy=Strategy.ZERO2)))


def test_a_slider_that_offers_more_moves_nothing(app: ExplorerPage) -> None:
    """12 ranks have six shard groups, 11 two. ipywidgets used to leave the slider of the groups at its first length and
    to send the end of that back: a choice that nobody had made."""
    group = app.control("shard-ranks").locator(".widget-readout")
    app.control("reset").click()
    app.slide("ranks", "Home")
    app.page.evaluate("""() => { window.zerovizSaid = []; new MutationObserver(() => {
      const said = document.querySelector('.zeroviz-error').textContent;
      if (said) window.zerovizSaid.push(said);
    }).observe(document.querySelector('.zeroviz-live'), { subtree: true, childList: true, characterData: true }); }""")
    for ranks in range(2, 13):
        app.slide("ranks", "ArrowRight")
        assert_shows(app, predict(RunSpec(model=TINY, ranks=ranks)))
        assert group.inner_text() == str(ranks)
    app.press("strategy", "HYBRID_SHARD")
    for key, shard_ranks in (("Home", 1), *(("ArrowRight", number) for number in (2, 3, 4, 6, 12))):
        app.slide("shard-ranks", key)
        spec = RunSpec(model=TINY, ranks=12, strategy=Strategy.HYBRID_SHARD, shard_ranks=shard_ranks)
        assert_shows(app, predict(spec))
        assert group.inner_text() == str(shard_ranks)
    app.page.wait_for_timeout(500)
    assert app.page.evaluate("window.zerovizSaid") == [] and app.error() == ""


def type_in(explorer: ExplorerPage, control: str, text: str, key: str = "Enter") -> None:
    """Type a number beside a slider."""
    field = explorer.control(control).locator(".widget-readout")
    field.click()
    explorer.page.keyboard.press("Control+a")
    explorer.page.keyboard.type(text)
    explorer.page.keyboard.press(key)


@pytest.mark.parametrize("key", ["Enter", "Tab"])
def test_a_number_may_be_typed_beside_a_slider(app: ExplorerPage, key: str) -> None:
    """One along the slider, one that is not, one for the batch; what is no number is said, and is not left there."""
    app.control("reset").click()
    for control, text, spec in (
        ("ranks", "16", RunSpec(model=TINY, ranks=16)),
        ("ranks", "13", RunSpec(model=TINY, ranks=13)),
        ("batch", "3", RunSpec(model=TINY, ranks=13, batch=3)),
    ):
        type_in(app, control, text, key)
        assert_shows(app, predict(spec))
        assert app.control(control).locator(".widget-readout").inner_text() == text
    for text, sentence in (
        ("abc", "ranks is 'abc'; type a whole number"),
        ("0", "ranks is 0; it must be a whole number"),
    ):
        type_in(app, "ranks", text, key)
        wait_until(app, lambda: app.error().startswith(sentence))  # noqa: B023
        assert app.control("ranks").locator(".widget-readout").inner_text() == "13"
    assert_shows(app, predict(RunSpec(model=TINY, ranks=13, batch=3)))


@pytest.mark.parametrize("key, ranks", [("End", 4096), ("PageUp", 9), ("PageDown", 1), ("Home", 1)])
def test_one_key_is_one_change(app: ExplorerPage, key: str, ranks: int) -> None:
    """End used to go through the next state, which lost the shard group and was one more to undo."""
    app.control("reset").click()
    assert_shows(app, predict(RunSpec(model=TINY, ranks=4)))
    app.press("strategy", "HYBRID_SHARD")
    before = predict(RunSpec(model=TINY, ranks=4, strategy=Strategy.HYBRID_SHARD, shard_ranks=2))
    assert_shows(app, before)
    app.slide("ranks", key)
    shard_ranks = 2 if ranks % 2 == 0 else 1
    title = f"HYBRID_SHARD on {ranks:,} rank{'s' * (ranks > 1)} in groups of {shard_ranks}"
    wait_until(app, lambda: app.title().startswith(title))
    app.control("undo").click()
    assert_shows(app, before)
