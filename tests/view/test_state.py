"""The Explorer: toggles, refusals, and runs that land on the state they were asked of."""

from __future__ import annotations

import asyncio
import threading
from itertools import product
from typing import Any

import pytest
from traitlets import TraitError

from cluster import capacity
from tests.every import pairs, settings_of
from tests.view.backends import FakeBackend, in_loop, settled
from zeroviz.backend import RunState
from zeroviz.command import command_line
from zeroviz.errors import RunError, SpecError
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import (
    Checkpointing,
    DType,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitKind,
    UnitPolicy,
    Zero1Form,
)
from zeroviz.state import Explorer
from zeroviz.state_runs import MAX_RUNS_KEPT
from zeroviz.toggles import TOGGLES, spec_of
from zeroviz.trace import Origin


def explorer() -> Explorer:
    return Explorer(FakeBackend())


def test_it_opens_on_four_ranks_of_the_tiny_model() -> None:
    state = explorer()
    assert state.spec == RunSpec(model=PRESETS["tiny"], ranks=4)
    assert state.predicted == predict(state.spec)
    assert state.measured is None and not state.error and not state.notice


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision", "unit"),
    [
        (strategy, ranks, precision, unit)
        for (strategy, precision), ranks, unit in product(pairs(), (1, 4, 64), (UnitKind.MODEL, UnitKind.LAYER))
    ],
)
def test_every_toggle_leads_to_the_prediction_of_that_state(
    strategy: Strategy, ranks: int, precision: Precision, unit: UnitKind
) -> None:
    state = explorer()
    toggles: dict[str, Any] = {"strategy": strategy, "ranks": ranks, "precision": precision, "batch": 1, "seq": 32}
    assert state.choose(unit=unit, **toggles)
    toggles |= settings_of(strategy, ranks)  # a shard group follows
    assert state.predicted is predict(RunSpec(model=PRESETS["tiny"], unit=UnitPolicy(unit), **toggles))


def test_an_assignment_is_a_choice() -> None:
    state = explorer()
    seen: list[Any] = []
    state.observe(lambda change: seen.append(change.new.spec.ranks), "predicted")
    state.ranks = 8
    assert state.spec.ranks == 8 and seen == [8]


def test_toggles_chosen_together_are_predicted_once() -> None:
    state = explorer()
    seen: list[Any] = []
    state.observe(lambda change: seen.append(change.new.spec), "predicted")
    state.choose(strategy=Strategy.ZERO1, ranks=2, zero1_form=Zero1Form.ALL_REDUCE)
    assert seen == [RunSpec(model=PRESETS["tiny"], strategy=Strategy.ZERO1, ranks=2, zero1_form=Zero1Form.ALL_REDUCE)]


@pytest.mark.parametrize(
    ("toggle", "value", "words"),
    [
        ("seq", 131, "130 tokens"),
        ("blocks", 4, "only 3 blocks"),
        ("ranks", 0, "from 1 to"),
        ("batch", 0, "from 1 to"),
        ("prefetch", -1, "from 0 to"),
        ("zero1_form", Zero1Form.ALL_REDUCE, "zero1 only"),
    ],
)
def test_a_refusal_is_one_sentence_and_changes_nothing(toggle: str, value: Any, words: str) -> None:
    state = explorer()
    before, picture = state.toggles, state.predicted
    assert not state.choose(**{toggle: value})
    assert words in state.error and "\n" not in state.error
    assert state.toggles == before and state.predicted is picture
    with pytest.raises(TraitError, match=words):
        setattr(state, toggle, value)
    assert state.toggles == before and state.predicted is picture
    assert state.choose(batch=4) and state.error == ""


def test_the_others_follow_a_smaller_model_and_say_so() -> None:
    state = explorer()
    assert state.choose(model=PRESETS["gpt2"], blocks=12, seq=1024)
    assert state.choose(model=PRESETS["tiny"])
    assert (state.blocks, state.seq) == (3, 130)
    assert "seq is now 130" in state.notice and "blocks is now 3" in state.notice
    assert state.choose(seq=64) and state.notice == ""


def test_toggles_that_no_longer_apply_go_back_to_their_default() -> None:
    state = explorer()
    assert state.choose(prefetch=2)
    assert state.choose(strategy=Strategy.ZERO1)
    assert state.prefetch == 0 and "prefetch" in state.notice
    assert state.choose(zero1_form=Zero1Form.ALL_REDUCE)
    assert state.choose(strategy=Strategy.DDP) and state.zero1_form is Zero1Form.REDUCE_SCATTER
    assert state.choose(blocks=2) and state.choose(unit=UnitKind.LAYER) and state.blocks == 1


@pytest.mark.parametrize(
    ("toggles", "field", "value"),
    [
        ({"optimizer": Optimizer.SGD}, "optimizer", Optimizer.SGD),
        ({"grad_dtype": DType.BF16}, "grad_dtype", DType.BF16),
        ({"checkpointing": True}, "checkpointing", Checkpointing(1)),
        ({"checkpointing": True, "region": 3}, "checkpointing", Checkpointing(3)),
        ({"offload": Offload.PARAMS}, "offload", Offload.PARAMS),
        ({"accumulation": 3}, "accumulation", 3),
        ({"accumulation": 2, "no_sync": True}, "no_sync", True),
        ({"strategy": Strategy.SHARD_GRAD_OP, "prefetch": 2}, "prefetch", 2),
    ],
)
def test_the_steps_options_reach_the_spec(toggles: dict[str, Any], field: str, value: Any) -> None:
    state = explorer()
    assert state.choose(**toggles) and state.notice == ""
    assert getattr(state.spec, field) == value
    assert state.spec == spec_of(state.toggles) and state.predicted == predict(state.spec)


@pytest.mark.parametrize(
    ("first", "then", "follows", "words"),
    [
        ({"offload": Offload.PARAMS}, {"strategy": Strategy.ZERO2}, {"offload": Offload.OPTIMIZER}, "offload is now"),
        (
            {"offload": Offload.OPTIMIZER},
            {"optimizer": Optimizer.ADAMW_8BIT},
            {"offload": Offload.NONE},
            "offload is now none",
        ),
        (
            {"optimizer": Optimizer.ADAMW_8BIT},
            {"offload": Offload.OPTIMIZER},
            {"optimizer": Optimizer.ADAMW},
            "optimizer is now adamw",
        ),
        ({"accumulation": 2, "no_sync": False}, {"strategy": Strategy.ZERO1}, {"no_sync": None}, "as usual"),
        ({"accumulation": 2, "no_sync": True}, {"accumulation": 1}, {"no_sync": None}, ""),
        ({"checkpointing": True, "region": 2}, {"checkpointing": False}, {"region": 1}, ""),
        (
            {"model": PRESETS["gpt2"], "checkpointing": True, "region": 12},
            {"model": PRESETS["tiny"]},
            {"region": 3},
            "recomputed together is now 3",
        ),
        (
            {"grad_dtype": DType.FP32, "precision": Precision.BF16},
            {"precision": Precision.FP32},
            {"grad_dtype": None},
            "",
        ),
    ],
)
def test_options_follow_what_they_depend_on(
    first: dict[str, Any], then: dict[str, Any], follows: dict[str, Any], words: str
) -> None:
    state = explorer()
    assert state.choose(**first)
    assert state.choose(**then), state.error
    assert {name: getattr(state, name) for name in follows} == follows
    assert words in state.notice and bool(words) == bool(state.notice)


@pytest.mark.parametrize(
    ("first", "given", "words"),
    [
        ({"strategy": Strategy.DDP}, {"offload": Offload.PARAMS}, "keeps its parameters whole"),
        ({}, {"checkpointing": True, "region": 4}, "has only 3"),
        ({}, {"no_sync": True}, "one micro-batch"),
        ({}, {"accumulation": 65}, "from 1 to 64"),
        ({"strategy": Strategy.ZERO1, "accumulation": 2}, {"no_sync": False}, "no_sync is false"),
    ],
)
def test_an_option_that_was_asked_for_and_cannot_be_is_refused(
    first: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    state = explorer()
    assert state.choose(**first)
    before = state.toggles
    assert not state.choose(**given)
    assert words in state.error and "\n" not in state.error and state.toggles == before


def test_an_option_moves_the_bars_and_not_the_axis() -> None:
    state = explorer()
    state.choose(model=PRESETS["tiny-llama"], batch=8, seq=128)
    scene = state.scene()
    assert scene.reference is not None and scene.reference.label == "peak of DDP"
    state.choose(checkpointing=True, optimizer=Optimizer.SGD)
    lighter = state.scene()
    assert lighter.axis_max == scene.axis_max and lighter.rows[0].peak_nbytes < scene.rows[0].peak_nbytes
    assert lighter.reference is not None and lighter.reference.label == "peak of plain DDP"


def test_the_timeline_is_of_the_chosen_rank_and_start() -> None:
    state = explorer()
    assert state.timeline().rank == 0 and state.timeline().parts[0].axis_min == 0
    state.rank, state.from_rest = 3, True
    assert state.timeline().rank == 3 and state.timeline().parts[0].axis_min == state.predicted.ranks[0].rest_nbytes
    state.choose(ranks=2)  # rank 3 is no more
    assert state.rank == 1 and state.timeline().rank == 1


def test_the_map_is_of_this_state_and_the_chosen_gpu() -> None:
    state = explorer()
    state.choose(model=PRESETS["llama3-8b"], seq=4096, precision=Precision.BF16_MIXED)
    assert state.heatmap().current.peak_nbytes == state.predicted.ranks[0].peak().total
    fits = state.heatmap().current.fits
    state.gpu = "24GB"
    assert fits and not state.heatmap().current.fits
    for wrong, sentence in (
        ("a toaster", "GPU is 'a toaster'; allowed are"),
        ("0GB", "GPU is '0GB'; allowed are"),
        ("80", "GPU is '80', 80 B; it must be more than the 2.147 GB that are kept"),
        ("2GB", "GPU is '2GB', 2 GB; it must be more than the 2.147 GB that are kept"),
    ):
        assert not state.choose_gpu(wrong) and state.gpu == "24GB"
        assert state.error.startswith(sentence) and state.error.endswith(".")
        with pytest.raises(TraitError):
            state.gpu = wrong
    assert state.choose_gpu("h200-141gb") and not state.error


@pytest.mark.parametrize("strategy", Strategy)
def test_what_applies_is_what_the_spec_accepts(strategy: Strategy) -> None:
    state = explorer()
    state.choose(strategy=strategy)
    for toggle, value in (("zero1_form", Zero1Form.ALL_REDUCE), ("prefetch", 1), ("blocks", 2), ("async_reduce", True)):
        applies = state.applies(toggle)
        assert state.choose(**{toggle: value}) == applies
        state.choose(strategy=strategy, zero1_form=Zero1Form.REDUCE_SCATTER, prefetch=0, blocks=1, async_reduce=False)
    assert set(TOGGLES) == set(state.toggles)


def test_a_model_beyond_this_machine_is_predicted_and_said_to_be_too_large() -> None:
    state = explorer()
    assert state.too_large == ""
    state.choose(model=PRESETS["llama3-70b"], ranks=64)
    assert state.too_large.startswith("Prediction only") and "TB" in state.too_large
    assert f"`{command_line('rehearse', state.spec)}`" in state.too_large


def test_the_axis_stays_when_the_strategy_changes_and_zooms_on_demand() -> None:
    state = explorer()
    reach = set()
    for strategy in Strategy:
        state.choose(strategy=strategy)
        reach.add(state.scene().axis_max)
    assert len(reach) == 1
    state.zoom = True
    assert state.scene().axis_max == state.predicted.ranks[0].peak().total


def test_a_run_lands_beside_its_prediction() -> None:
    async def work() -> None:
        backend = FakeBackend()
        state = Explorer(backend, asyncio.get_running_loop())
        messages: list[str] = []
        state.observe(lambda change: messages.append(change.new), "message")
        state.choose(ranks=2)
        state.run()
        assert state.run_state is RunState.STARTING and state.busy and state.can_stop
        await settled(lambda: state.run_state is RunState.DONE)
        assert backend.specs == [state.spec]
        assert state.measured is not None and state.measured.spec == state.spec
        assert state.measured.origin is Origin.LIVE
        what = "ZeRO-3 on 2 ranks, fp32"  # a run is named, because the toggles may move while it is under way
        assert messages == [
            f"{what}: asking for 2 engines", f"{what}: starting 0/2 engines", f"{what}: running", "done in 0.6 s",
        ]  # fmt: skip
        assert state.can_stop  # its engines are warm

    in_loop(work)


def test_measured_bars_never_stand_beside_another_state() -> None:
    async def work() -> None:
        state = Explorer(FakeBackend(), asyncio.get_running_loop())
        state.run()
        await settled(lambda: state.run_state is RunState.DONE)
        measured = state.measured
        state.choose(ranks=2)
        assert state.measured is None
        assert "another state (ZeRO-3 on 4 ranks" in state.other_run
        state.choose(ranks=4)
        assert state.measured is measured and state.other_run == ""

    in_loop(work)


def test_what_was_said_of_a_run_goes_with_its_state_and_comes_back_with_it() -> None:
    async def work() -> None:
        state = Explorer(FakeBackend(), asyncio.get_running_loop())
        state.run()
        await settled(lambda: state.run_state is RunState.DONE)
        state.choose(ranks=2)
        assert (state.run_state, state.message) == (RunState.IDLE, "")
        assert not state.choose(ranks=0) and state.error and state.message == ""
        state.choose(ranks=4)
        assert (state.run_state, state.message) == (RunState.DONE, "done in 0.6 s")
        state.stop()
        await settled(lambda: state.run_state is RunState.STOPPED)
        state.choose(ranks=2)  # of engines, not of a state
        assert state.message.startswith("stopped")

    in_loop(work)


def test_changes_during_a_run_are_allowed_and_it_lands_on_its_own_state() -> None:
    async def work() -> None:
        backend = FakeBackend(hold=asyncio.Event())
        state = Explorer(backend, asyncio.get_running_loop())
        state.run()
        await settled(lambda: state.run_state is RunState.RUNNING)
        assert state.choose(strategy=Strategy.DDP)
        assert backend.hold is not None
        backend.hold.set()
        await settled(lambda: state.run_state is RunState.DONE)
        assert state.measured is None and "ZeRO-3 on 4 ranks" in state.other_run
        assert state.message == "ZeRO-3 on 4 ranks, fp32: done in 0.6 s"
        state.choose(strategy=Strategy.ZERO3)
        assert state.measured is not None and state.measured.spec.strategy is Strategy.ZERO3

    in_loop(work)


def test_a_second_press_while_a_run_is_under_way_does_nothing() -> None:
    async def work() -> None:
        backend = FakeBackend(hold=asyncio.Event())
        state = Explorer(backend, asyncio.get_running_loop())
        state.run()
        state.run()
        assert state.error == ""
        assert backend.hold is not None
        backend.hold.set()
        await settled(lambda: state.run_state is RunState.DONE)
        assert len(backend.specs) == 1 and state.error == ""

    in_loop(work)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (SpecError("It needs 3 GB and 2 GB are free."), "not started"),
        (RunError("Rank 1 failed.", rank=1), "failed"),
        (ValueError("a bug"), "failed"),
    ],
)
def test_a_failed_run_is_one_sentence_and_the_picture_stays(
    failure: Exception, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        state = Explorer(FakeBackend(failure=failure), asyncio.get_running_loop())
        picture = state.predicted
        state.run()
        await settled(lambda: state.run_state is RunState.FAILED)
        assert str(failure) in state.error and state.message == f"{message}: ZeRO-3 on 4 ranks, fp32"
        assert state.predicted is picture and state.measured is None and not state.busy
        # A bug leaves its traceback in the log; what was foreseen does not.
        assert [record.exc_info is not None for record in caplog.records] == [True] * (type(failure) is ValueError)
        assert not state.can_stop
        # The next toggle takes the sentence away, and with it the bare word that it failed.
        assert state.choose(ranks=2)
        assert (state.run_state, state.message, state.error, state.other_run) == (RunState.IDLE, "", "", "")

    in_loop(work)


def test_a_model_that_is_too_large_to_run_is_offered_a_rehearsal() -> None:
    async def work() -> None:
        spec = RunSpec(model=PRESETS["llama3-70b"], ranks=64)
        with pytest.raises(SpecError) as refused:
            capacity.check_capacity(spec, num_warm=64)
        state = Explorer(FakeBackend(failure=refused.value), asyncio.get_running_loop())
        assert state.choose(model=spec.model, ranks=spec.ranks)
        command = f"`{command_line('rehearse', spec)}`"
        assert "--model llama3-70b" in command and command in state.too_large
        state.run()
        await settled(lambda: state.run_state is RunState.FAILED)
        assert "under ZeRO-3" in state.error and command in state.error

    in_loop(work)


def test_a_refusal_does_not_send_a_reader_of_the_page_to_a_prediction() -> None:
    """The picture is the prediction. What cannot be run at all is refused in words that say so."""

    async def work() -> None:
        with pytest.raises(SpecError, match="Use `zeroviz predict`, or") as refused:
            capacity.check_runnable(RunSpec(model=PRESETS["tiny"], optimizer=Optimizer.ADAMW_8BIT))
        state = Explorer(FakeBackend(failure=refused.value), asyncio.get_running_loop())
        state.run()
        await settled(lambda: state.run_state is RunState.FAILED)
        assert "zeroviz predict" not in state.error
        assert state.error.endswith("Its prediction is the picture; to run it, use optimizer adamw.")

    in_loop(work)


def test_bars_that_ddps_axis_makes_unreadable_come_with_a_hint() -> None:
    state = explorer()
    assert state.short_bars == ""
    state.choose(model=PRESETS["llama3-70b"], ranks=64)
    assert "axis" in state.short_bars
    state.zoom = True
    assert state.short_bars == ""


def test_warm_engines_are_asked_of_a_backend_that_knows() -> None:
    """A notebook's cell that is run again, or a second explorer, finds engines that it did not start."""
    backend = FakeBackend()
    backend.is_warm = True  # type: ignore[attr-defined]
    assert Explorer(backend).can_stop


def test_a_failed_run_leaves_an_earlier_measurement_in_place_and_says_so() -> None:
    async def work() -> None:
        backend = FakeBackend()
        state = Explorer(backend, asyncio.get_running_loop())
        state.run()
        await settled(lambda: state.run_state is RunState.DONE)
        measured, backend.failure = state.measured, SpecError("no memory")
        assert not state.earlier
        state.run()
        await settled(lambda: state.run_state is RunState.FAILED)
        assert state.measured is measured and state.can_stop  # the engines still stand
        assert state.earlier and any("in an earlier run" in line for line in state.scene().subtitle)
        state.choose(ranks=2)
        assert not state.earlier
        state.choose(ranks=4)
        assert state.earlier
        backend.failure = None
        state.run()
        await settled(lambda: state.run_state is RunState.DONE)
        assert not state.earlier and state.measured is not measured

    in_loop(work)


def test_stop_ends_a_run_without_an_error() -> None:
    async def work() -> None:
        backend = FakeBackend(hold=asyncio.Event())
        state = Explorer(backend, asyncio.get_running_loop())
        state.run()
        await settled(lambda: state.run_state is RunState.RUNNING)
        state.stop()
        await settled(lambda: state.run_state is RunState.STOPPED)
        assert state.error == "" and state.message.startswith("stopped") and backend.num_stops == 1
        await settled(lambda: not state.can_stop)
        backend.hold = None
        state.run()
        await settled(lambda: state.run_state is RunState.DONE)

    in_loop(work)


def test_stop_after_a_run_ends_its_warm_engines() -> None:
    async def work() -> None:
        backend = FakeBackend()
        state = Explorer(backend, asyncio.get_running_loop())
        state.run()
        await settled(lambda: state.run_state is RunState.DONE)
        state.stop()
        await settled(lambda: state.run_state is RunState.STOPPED)
        assert not state.can_stop and backend.num_stops == 1
        assert state.measured is not None  # what was measured stays measured

    in_loop(work)


def test_old_runs_are_forgotten() -> None:
    async def work() -> None:
        state = Explorer(FakeBackend(), asyncio.get_running_loop())
        for batch in range(1, MAX_RUNS_KEPT + 2):
            state.choose(batch=batch)
            state.run()
            await settled(lambda: not state.busy)
        state.choose(batch=1)
        assert state.measured is None
        state.choose(batch=2)
        assert state.measured is not None

    in_loop(work)


def test_pressed_from_another_thread_it_runs_on_the_loop_and_blocks_nobody() -> None:
    async def work() -> None:
        loop_thread = threading.get_ident()
        backend = FakeBackend(hold=asyncio.Event())
        state = Explorer(backend, asyncio.get_running_loop())
        landed: list[int] = []
        state.observe(lambda _: landed.append(threading.get_ident()), "measured")
        presser = threading.Thread(target=state.run)
        presser.start()
        presser.join(5)  # this blocks the loop, so the press cannot have waited for it
        assert not presser.is_alive()
        await settled(lambda: state.run_state is RunState.RUNNING)
        assert backend.hold is not None
        backend.hold.set()
        await settled(lambda: state.run_state is RunState.DONE)
        assert landed == [loop_thread]

    in_loop(work)


def test_toggles_from_a_thread_and_runs_on_the_loop_never_mix() -> None:
    async def work() -> None:
        state = Explorer(FakeBackend(), asyncio.get_running_loop())
        mixed: list[object] = []

        def check(_: object) -> None:
            if state.measured is not None and state.measured.spec != state.predicted.spec:
                mixed.append((state.measured.spec, state.predicted.spec))

        state.observe(check, ["measured", "predicted"])

        def toggle() -> None:
            for turn in range(150):
                state.choose(ranks=turn % 4 + 1)

        toggler = threading.Thread(target=toggle)
        toggler.start()
        while toggler.is_alive():
            if not state.busy:
                state.run()
            await asyncio.sleep(0)
        await settled(lambda: not state.busy)
        assert not mixed and not state.error

    in_loop(work)


def test_without_a_loop_it_predicts_and_refuses_to_run() -> None:
    state = explorer()
    with pytest.raises(RunError, match="notebook cell"):
        state.run()
    assert state.run_state is RunState.IDLE and state.choose(ranks=3)


@pytest.mark.parametrize(("unit", "blocks"), [(UnitKind.BLOCK, 2), (UnitKind.LAYER, 1), (UnitKind.MODEL, 1)])
def test_the_units_that_a_bare_count_overruled_come_back_with_a_model_that_has_blocks(
    unit: UnitKind, blocks: int
) -> None:
    """Whatever is counted in between, and however the model comes; what is chosen with it stands."""
    state = explorer()
    state.choose(unit=unit, blocks=blocks)
    assert state.take_in("7.5B") and state.unit is UnitKind.MODEL
    assert state.take_in("8B") and state.unit is UnitKind.MODEL
    assert state.beside(model=PRESETS["gpt2"]).unit is unit  # type: ignore[union-attr]
    state.choose(ranks=8)
    state.choose(model=PRESETS["gpt2"])
    assert (state.unit, state.blocks) == (unit, blocks)
    state.take_in("7.5B")
    state.choose(model=PRESETS["gpt2"], unit=UnitKind.LAYER)
    assert state.unit is UnitKind.LAYER
    state.undo()
    state.undo()
    assert (state.unit, state.blocks) == (unit, blocks)


def test_blocks_of_a_unit_that_a_smaller_model_has_not_do_not_come_back() -> None:
    """A number that was cut to a model's blocks is not what was overruled, and stays cut."""
    state = explorer()
    state.choose(model=PRESETS["gpt2"], blocks=12)
    state.choose(model=PRESETS["tiny"])
    assert state.blocks == 3
    state.choose(model=PRESETS["gpt2"])
    assert state.blocks == 3
