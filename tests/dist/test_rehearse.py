"""A rehearsal holds what a live run holds, to the byte, without holding anything.

Our own code is rehearsed beside the arithmetic, in every op and for every option, and beside real ranks. What makes the
two equal is tested by itself: gradients are added in place where autograd would, and an operator that has been seen
before is answered as torch's fake tensors answer it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.allocator import cpu_counter
from cluster.fake import FakeTensors
from cluster.meter import Meter
from cluster.pace import LONG_S, Pace, duration, expected_operators
from cluster.rank import run_rank
from cluster.record_fake import FakeRecorder
from cluster.rehearse import CPU, MAX_TOKENS, fake_group, rehearse
from tests.dist.helpers import Messages
from tests.dist.ranks import RankPool
from tests.every import exists, settings_of
from zeroviz.backend import RunState
from zeroviz.errors import RunError, SpecError
from zeroviz.implementations import PAIRS, can_rehearse
from zeroviz.maxima import maxima
from zeroviz.models import PRESETS, bare
from zeroviz.precision import OWN_PRECISIONS
from zeroviz.predict import predict
from zeroviz.spec import (
    Checkpointing,
    DType,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitKind,
    UnitPolicy,
    Zero1Form,
)
from zeroviz.trace import Event, Origin, RankTrace, merge, rank_from_dict

MODELS = {
    "tiny": PRESETS["tiny"],
    "tiny-llama": PRESETS["tiny-llama"],
    "untied, no biases": replace(
        PRESETS["tiny"], heads=1, kv_heads=1, head_dim=55, attention_bias=False, mlp_bias=False, tied=False
    ),
    "llama, tied": replace(PRESETS["tiny-llama"], tied=True),
    "llama, grouped, biases": replace(
        PRESETS["tiny-llama"], heads=4, kv_heads=2, head_dim=14, attention_bias=True, mlp_bias=True
    ),
}
UNITS = ["model", "block", "block:2", "layer", "numel:3e4"]
# Settings on top of the rest, one or several at a time; each is legal for every strategy or for the one it names.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"checkpointing": Checkpointing.parse("block")},
    {"checkpointing": Checkpointing.parse("block:2"), "accumulation": 2},
    {"accumulation": 3, "no_sync": True, "grad_dtype": DType.FP32},
    {"offload": Offload.OPTIMIZER},
    {"optimizer": Optimizer.ADAMW_FOREACH, "async_reduce": True},
    {"optimizer": Optimizer.ADAMW_FUSED, "grad_dtype": DType.BF16},
    {"optimizer": Optimizer.SGD, "offload": Offload.OPTIMIZER, "accumulation": 2},
    {"optimizer": Optimizer.SGD_MOMENTUM},
    {"strategy": Strategy.ZERO3, "offload": Offload.PARAMS, "accumulation": 2},
    {"strategy": Strategy.SHARD_GRAD_OP, "offload": Offload.PARAMS, "prefetch": 1},
    {"strategy": Strategy.ZERO3, "prefetch": 2, "async_reduce": True},
    {"strategy": Strategy.ZERO1, "zero1_form": Zero1Form.ALL_REDUCE},
    {"strategy": Strategy.ZERO2, "accumulation": 2, "no_sync": False},
    {"strategy": Strategy.HYBRID_SHARD, "accumulation": 2, "clip_norm": 0.5},
    {"strategy": Strategy.MEGATRON_OPTIM, "precision": Precision.BF16_FP32GRAD, "clip_norm": 0.5},
    {"clip_norm": 0.5},
]


def assert_same(got: RankTrace, want: RankTrace, what: object) -> None:
    """At rest, the peak with its place and categories, every op's most, the wire, the link and what is named apart."""
    assert (got.at_rest, got.at_rest_on_host) == (want.at_rest, want.at_rest_on_host), what
    assert got.peak() == want.peak(), what
    assert maxima(got) == maxima(want), what
    assert got.wire() == want.wire(), what
    assert got.transfers == want.transfers, what
    assert (got.padding_nbytes, got.step_counter_nbytes) == (want.padding_nbytes, want.step_counter_nbytes), what


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_every_op_is_as_predicted(name: str, number: int) -> None:
    """Strategies, units, recipes and numbers of ranks go round with the options, so that all of them meet."""
    place = list(MODELS).index(name) * len(OPTIONS) + number
    for turn in range(2):
        strategy = OPTIONS[number].get("strategy") or list(Strategy)[(place + 2 * turn) % len(Strategy)]
        precision = OPTIONS[number].get("precision") or OWN_PRECISIONS[(place + turn) % len(OWN_PRECISIONS)]
        ranks = (1, 2, 3, 5, 4)[(place + 2 * turn) % 5]
        if not exists(strategy, precision, OPTIONS[number]):
            strategy = Strategy.HYBRID_SHARD
        spec = RunSpec(
            model=MODELS[name],
            unit=UnitPolicy.parse(UNITS[(place + turn) % len(UNITS)]),
            ranks=ranks,
            batch=1 + place % 2,
            seq=(17, 3, 40)[(place + turn) % 3],
            **{"precision": precision, **settings_of(strategy, ranks), **OPTIONS[number]},
        )
        rehearsed, predicted = rehearse(spec), predict(spec)
        assert rehearsed.origin is Origin.REHEARSED
        rehearsed.check()
        for got, want in zip(rehearsed.ranks, predicted.ranks, strict=True):
            assert_same(got, want, (spec, got.rank))


def assert_same_events(got: RankTrace, want: RankTrace, what: object) -> None:
    """What the device holds, event by event in one order: place, category and bytes."""
    assert_same(got, want, what)
    ours, theirs = ([event for event in trace.events if event.category.on_device] for trace in (got, want))
    assert ours == theirs, what


def live(rank_pool: RankPool, spec: RunSpec) -> list[RankTrace]:
    results = rank_pool.run(run_rank, spec)
    return list(merge(Origin.LIVE, spec, [rank_from_dict(result) for result in results]).ranks)


@pytest.mark.parametrize("model", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("precision", OWN_PRECISIONS)
def test_real_ranks_hold_what_was_rehearsed(rank_pool: RankPool, model: str, ranks: int, precision: Precision) -> None:
    for strategy in (Strategy.ZERO3, Strategy.SHARD_GRAD_OP):
        spec = RunSpec(model=PRESETS[model], ranks=ranks, precision=precision, strategy=strategy, seq=17, steps=2)
        for got, want in zip(rehearse(spec).ranks, live(rank_pool, spec), strict=True):
            assert_same_events(got, want, (spec, got.rank))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("strategy", "precision"), [(Strategy.ZERO3, Precision.FP32), (Strategy.SHARD_GRAD_OP, Precision.BF16_MIXED)]
)
def test_real_ranks_hold_what_was_rehearsed_of_gpt2(
    rank_pool: RankPool, ranks: int, strategy: Strategy, precision: Precision
) -> None:
    spec = RunSpec(model=PRESETS["gpt2"], ranks=ranks, strategy=strategy, precision=precision, seq=33, steps=2)
    for got, want in zip(rehearse(spec).ranks, live(rank_pool, spec), strict=True):
        assert_same_events(got, want, (spec, got.rank))


def test_a_large_model_takes_no_memory() -> None:
    """8,030,261,248 parameters in fp32 over 8 ranks: 16 GB at rest on each, and not one of them from the allocator."""
    spec = RunSpec(model=PRESETS["llama3-8b"], ranks=8, seq=512)
    counter = cpu_counter()
    assert counter is not None
    before = counter()
    most = before

    def poll() -> None:
        nonlocal most
        most = max(most, counter())

    rehearsed = rehearse(spec, poll=poll)
    assert rehearsed.ranks[0].rest_nbytes == 16 * 8030261248 // 8
    # What is really made are batches, as Python writes them down: tokens, targets and the rotary tables.
    assert most - before <= 2 * 8 * 512 + 2 * 4 * 512 * 64
    assert_same(rehearsed.ranks[7], predict(spec).ranks[7], spec)


REHEARSED = [impl for impl in Implementation if can_rehearse(impl)]

# ---- sums, see [Note: sums] in cluster/fake.py ----

Graph = Callable[[torch.Tensor], torch.Tensor]


def fresh(y: torch.Tensor) -> torch.Tensor:
    """Each gradient of y is made for its sum: the first one can be added into."""
    return (y * 3).sum() + (y * 5).sum()


def a_view(y: torch.Tensor) -> torch.Tensor:
    """Nodes made later run earlier: the first gradient is a view of a matrix product's result."""
    other = (y * 3).sum()
    return other + (y.view(1, 6) @ y.new_ones(6, 2)).sum()


def expanded(y: torch.Tensor) -> torch.Tensor:
    """The first gradient is six places in the memory of one element."""
    other = (y * 3).sum()
    return other + y.sum()


def residual(y: torch.Tensor) -> torch.Tensor:
    """The first gradient is the one that backward was given, which the caller holds; as over a segment's border."""
    return y + (y * 3).exp()


def inner_residual(y: torch.Tensor) -> torch.Tensor:
    """The same within a segment: nobody holds the first gradient once the branch has used it."""
    return (y + (y * 3).exp()) * 2


def hooked(y: torch.Tensor) -> torch.Tensor:
    """The same, with a hook of Python's on the first gradient: it has seen it, and does not hold it."""
    output = y + (y * 3).exp()
    output.register_hook(lambda gradient: None)
    return output * 2


def backward_events(graph: Graph, meter: Meter) -> list[Event]:
    """What backward of the graph allocates and frees, recorded by `meter`: numbers left out, which real operators make
    into tensors below the dispatcher."""
    with meter.recording([], CPU) as recording:
        with meter.op("forward", "forward", "graph"):
            y = torch.ones(6, requires_grad=True) * 2
            loss = graph(y)
            seed = torch.ones_like(loss)
        with meter.op("backward", "backward", "graph"):
            torch.autograd.backward(loss, seed)
    rows = [event for event in recording.events if abs(event.delta_nbytes) >= 6 * 4]
    return [event for event in rows if event.category.on_device and event.phase == "backward"]


@pytest.mark.parametrize(
    ("graph", "in_place"),
    [(fresh, True), (a_view, False), (expanded, False), (residual, False), (inner_residual, True), (hooked, True)],
)
def test_gradients_add_up_in_place_exactly_where_autograd_would(
    graph: Graph, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real events against the fake ones; a sum out of place makes one tensor more, as any other mode would."""
    real = backward_events(graph, Meter())

    def rehearsed() -> list[Event]:
        tensors = FakeTensors()
        meter = Meter(FakeRecorder(tensors))
        with tensors:
            return backward_events(graph, meter)

    def num_births(events: list[Event]) -> int:
        return sum(event.delta_nbytes > 0 for event in events)

    assert rehearsed() == real
    ask = FakeTensors._adds_in_place
    monkeypatch.setattr(FakeTensors, "_adds_in_place", lambda self, *pair: ask(self, *pair) and False)
    assert num_births(rehearsed()) == num_births(real) + in_place


@pytest.mark.parametrize("impl", [impl for impl in Implementation if impl not in REHEARSED])
def test_code_that_only_runs_for_real_is_refused(impl: Implementation) -> None:
    strategy = PAIRS[impl][0]
    with pytest.raises(SpecError, match="is not rehearsed here: our own code and fsdp2 are; use 'zeroviz predict"):
        rehearse(RunSpec(model=PRESETS["tiny"], ranks=2, impl=impl, strategy=strategy))


# ---- answers from a plan ----


def test_a_plan_answers_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plans every operator is worked out anew by torch's fake tensors: the same events, one by one."""
    for impl in REHEARSED:
        spec = RunSpec(model=PRESETS["tiny-llama"], ranks=3, seq=17, precision=Precision.BF16, impl=impl)
        with_plans = rehearse(spec)
        with monkeypatch.context() as patch:
            patch.setattr(FakeTensors, "_answer", FakeTensors.dispatch)
            assert rehearse(spec).ranks[0].events == with_plans.ranks[0].events


def test_views_made_by_plan_share_their_storage() -> None:
    """The second time a plan answers; a view then is one of the new tensor, and what is no view has its own memory."""
    with FakeTensors():
        for _ in range(2):
            x = torch.empty(6, 4)
            t, rows, copy = x.t(), x[2:], x.t().clone(memory_format=torch.contiguous_format)
            storages = [tensor.untyped_storage()._cdata for tensor in (x, t, rows, copy)]
            assert storages[0] == storages[1] == storages[2] != storages[3]
            assert (t.stride(), rows.storage_offset(), copy.stride()) == ((1, 4), 8, (6, 1))
            assert x.add_(1) is x
            left, right = x.split(3)
            assert right.untyped_storage()._cdata == storages[0] and left.shape == (3, 4)


# ---- what it takes, and how it ends ----


class Stopped(Exception):
    """Raised by a poll."""


def test_a_poll_ends_it_at_once_and_the_next_one_runs() -> None:
    spec = RunSpec(model=PRESETS["llama3-8b"], ranks=8)
    num_polls = 0

    def poll() -> None:
        nonlocal num_polls
        num_polls += 1
        if num_polls == 20:
            raise Stopped

    with pytest.raises(Stopped):
        rehearse(spec, poll=poll)
    assert num_polls == 20
    assert not dist.is_initialized()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    tiny = RunSpec(model=PRESETS["tiny"], ranks=3)
    assert_same(rehearse(tiny).ranks[0], predict(tiny).ranks[0], tiny)


def test_in_a_process_group_it_is_refused() -> None:
    spec = RunSpec(model=PRESETS["tiny"])
    with fake_group(spec, 0), pytest.raises(RunError, match="leave that first"):
        rehearse(spec)
    assert not dist.is_initialized()


def test_what_has_no_layers_or_no_end_is_refused() -> None:
    model = UnitPolicy(UnitKind.MODEL)
    with pytest.raises(SpecError, match="has no layers to run"):
        rehearse(RunSpec(model=bare(7 * 10**9), unit=model))
    with pytest.raises(SpecError, match=r"adamw-8bit.*worked out and not run"):
        rehearse(RunSpec(model=PRESETS["tiny"], optimizer=Optimizer.ADAMW_8BIT))
    with pytest.raises(SpecError, match=f"use at most {MAX_TOKENS:,}, or `zeroviz predict`"):
        rehearse(RunSpec(model=PRESETS["tiny-llama"], batch=MAX_TOKENS, seq=2))


def test_progress_has_a_beginning_and_an_end() -> None:
    messages = Messages()
    rehearse(RunSpec(model=PRESETS["tiny"], ranks=3), messages)
    assert messages.texts[0] == "rehearsing ZeRO-3 on 3 ranks, fp32"
    assert messages.texts[-1].startswith("rehearsed in ")
    assert [progress.state for progress in messages] == [RunState.RUNNING, RunState.DONE]


class Clock:
    """Time that passes as it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("ms_each", [0.1, 10.0])
def test_an_estimate_comes_first_if_it_is_long(ms_each: float) -> None:
    """Every operator takes `ms_each`; the number of them is that of llama3-8b: 2 or 200 seconds in all."""
    spec, messages, clock = RunSpec(model=PRESETS["llama3-8b"]), Messages(), Clock()
    num_operators = expected_operators(spec)
    whole_s = num_operators * ms_each / 1000
    with Pace(spec, messages, None, clock) as pace:
        for _ in range(num_operators):
            clock.now += ms_each / 1000
            pace.operator()
    news = messages.texts[1:-1]
    if whole_s < LONG_S:
        assert not any("takes about" in text for text in news)
        return
    assert news[0].startswith(f"rehearsing: this takes about {duration(whole_s)}")
    # From then on two seconds apart, rounded up to the next look at the clock: every 32 operators, 0.32 s.
    every_s = 0.32 * 7
    assert len(news) == pytest.approx(whole_s / every_s, abs=2)
    assert all(text.startswith("rehearsing: ") and text.endswith(" left") for text in news[1:])


@pytest.mark.parametrize("impl", REHEARSED)
def test_the_expected_number_of_operators_is_near(impl: Implementation) -> None:
    """The estimate is a rough one: within a quarter for a model of many blocks, whatever the recipe."""
    for precision in (Precision.FP32, Precision.BF16):
        spec = RunSpec(model=PRESETS["llama3-8b"], ranks=8, precision=precision, impl=impl)
        num_polls = 0

        def poll() -> None:
            nonlocal num_polls
            num_polls += 1

        rehearse(spec, poll=poll)
        assert 0.75 < num_polls * 32 / expected_operators(spec) < 1.25


def test_durations_are_for_people() -> None:
    assert [duration(seconds) for seconds in (0.2, 59, 90, 91, 4000, 9000)] == [
        "1 s",
        "59 s",
        "90 s",
        "2 min",
        "67 min",
        "2 h 30 min",
    ]
