"""Predict first: every step has its questions, every wrong figure is worked out, a guess is read as it was meant."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from tests.every import settings_of
from zeroviz.category import Category
from zeroviz.errors import SpecError, TraceError
from zeroviz.facts import ZERO_FIGURE1
from zeroviz.guess import APART, Answer, Asked, Question, answer, build_question, factor_text, parse_guess
from zeroviz.guess_case import rest_by_hand
from zeroviz.guess_figure import amounts
from zeroviz.implementations import PAIRS, PRECISIONS
from zeroviz.memory import rest_by_category
from zeroviz.models import PRESETS, bare
from zeroviz.peak import peak_of
from zeroviz.predict import predict
from zeroviz.spec import (
    Checkpointing,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitPolicy,
    Zero1Form,
)
from zeroviz.trace import Origin, RankTrace, Trace

EVERY = [(impl, strategy) for impl, strategies in PAIRS.items() for strategy in strategies]
RANKS = (1, 2, 3, 4, 64)
P = 7_500_000_000
FIGURE1 = {"model": bare(P), "unit": UnitPolicy.parse("model"), "ranks": 64, "precision": Precision.BF16_MIXED}
LLAMA = {"model": PRESETS["llama3-8b"], "ranks": 8, "precision": Precision.BF16_MIXED, "seq": 4096}


def spec_of(*, ranks: int = 4, strategy: Strategy = Strategy.ZERO3, **fields: Any) -> RunSpec:
    return RunSpec(**{"model": PRESETS["tiny"], "ranks": ranks, **settings_of(strategy, ranks), **fields})


def asked(what: Asked, **fields: Any) -> Question:
    return build_question(predict(spec_of(**fields)), what)


def figure(rank: RankTrace, what: Asked) -> int:
    """The figure as every other view reads it off a trace."""
    return {Asked.REST: rank.rest_nbytes, Asked.PEAK: rank.peak().total, Asked.SENT: rank.sent_nbytes}[what]


def wrong(question: Question, name: str) -> int:
    """The bytes of a misconception, whether or not it is a choice."""
    (found,) = [each.nbytes for each in question.known if each.name == name]
    return found


def measured(spec: RunSpec, more: int = 0) -> Trace:
    """A run that held what was predicted, or so many bytes more at rest on rank 0."""
    trace = predict(spec)
    first = trace.ranks[0]
    rest = {**first.rest, Category.TEMPORARY: more}
    return replace(trace, origin=Origin.LIVE, ranks=(replace(first, rest=rest), *trace.ranks[1:]))


# ---- every step ----


@pytest.mark.parametrize(("impl", "strategy"), EVERY)
def test_every_step_has_its_questions_or_a_sentence_why_not(impl: Implementation, strategy: Strategy) -> None:
    for ranks, precision, what in product(RANKS, PRECISIONS[impl], Asked):
        try:
            spec = spec_of(ranks=ranks, impl=impl, strategy=strategy, precision=precision)
        except SpecError:
            continue  # a recipe that the pair has not
        trace = predict(spec)
        if what is Asked.SENT and ranks == 1:
            with pytest.raises(SpecError, match=r"nobody to send to.*\.$"):
                build_question(trace, what)
        else:
            assert_sound(build_question(trace, what), trace)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("ranks", RANKS)
def test_so_has_a_bare_count(strategy: Strategy, ranks: int) -> None:
    precision = Precision.BF16_FP32GRAD if strategy.has_whole_buffer else Precision.BF16_MIXED
    spec = spec_of(**{**FIGURE1, "ranks": ranks, "precision": precision}, strategy=strategy)
    for what in (Asked.REST, Asked.PEAK):
        assert_sound(build_question(predict(spec), what), predict(spec))


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": Optimizer.ADAMW_8BIT},
        {"optimizer": Optimizer.SGD},
        {"offload": Offload.OPTIMIZER},
        {"checkpointing": Checkpointing(1), "clip_norm": 1.0},
        {"accumulation": 4},
        {"accumulation": 4, "no_sync": True},
        {"prefetch": 1, "async_reduce": True, "unit": UnitPolicy.parse("layer")},
        {"strategy": Strategy.ZERO1, "zero1_form": Zero1Form.ALL_REDUCE},
        {"ranks": 2**20},
    ],
    ids=str,
)
def test_so_have_options(fields: dict[str, Any]) -> None:
    for what in Asked:
        trace = predict(spec_of(**fields))
        assert_sound(build_question(trace, what), trace)


def assert_sound(question: Question, trace: Trace) -> None:
    """The right figure is the trace's; the choices are a few, in order, apart, and each wrong one says its error."""
    exact = figure(trace.ranks[0], question.what)
    nbytes = [choice.nbytes for choice in question.choices]
    assert question.model.nbytes == question.right.nbytes == exact
    assert sum(part.nbytes for part in question.model.parts) == exact
    assert 2 <= len(nbytes) <= 4 and sum(choice.is_right for choice in question.choices) == 1
    assert all(larger >= APART * smaller for smaller, larger in pairwise(nbytes))
    assert len({choice.text for choice in question.choices}) == len(nbytes)
    for each in question.known:
        assert each.nbytes > 0 and each.nbytes != exact and each.name
        assert each.sentence.endswith(".") and "  " not in each.sentence and len(each.sentence) < 200, each
    assert question.words.endswith("?") and question.words.count("?") == 1
    assert build_question(trace, question.what) == question


def test_the_question_says_all_that_the_figure_depends_on() -> None:
    assert asked(Asked.PEAK, **LLAMA, checkpointing=Checkpointing(1)).words == (
        "ZeRO-3 on 8 ranks, bf16-mixed; llama3-8b, 8,030,261,248 parameters in 34 units (block); 1 x 4,096 tokens on "
        "each rank; checkpointing block: how many bytes does rank 0 hold at the peak of a step?"
    )
    assert asked(Asked.REST, **FIGURE1, strategy=Strategy.ZERO1).words == (
        "ZeRO-1 on 64 ranks, bf16-mixed; 7,500,000,000 parameters in 1 unit (model): how many bytes does rank 0 hold "
        "between two steps?"
    )
    assert "hold at the peak of a step, activations not counted?" in asked(Asked.PEAK, **FIGURE1).words
    assert "how many bytes does the device of rank 0 hold" in asked(Asked.REST, offload=Offload.OPTIMIZER).words
    assert asked(Asked.SENT).words.endswith("how many bytes does rank 0 send in one step?")


def test_another_rank_is_asked_about_its_own_figure() -> None:
    trace = predict(spec_of(impl=Implementation.ZERO_REDUNDANCY, strategy=Strategy.ZERO1, ranks=3))
    assert trace.ranks[0].rest_nbytes != trace.ranks[2].rest_nbytes
    question = build_question(trace, Asked.REST, rank=2)
    assert question.right.nbytes == trace.ranks[2].rest_nbytes and "does rank 2 hold" in question.words
    with pytest.raises(SpecError, match="from 0 to 2"):
        build_question(trace, Asked.REST, rank=3)


def test_what_is_nothing_is_no_question() -> None:
    with pytest.raises(SpecError, match="on the host"):
        asked(Asked.REST, offload=Offload.PARAMS)
    assert asked(Asked.PEAK, offload=Offload.PARAMS).choices


# ---- the choices ----


def test_the_choices_of_zero1_are_figure_1_of_the_paper() -> None:
    """ZeRO, Figure 1: 7.5B parameters on 64 ranks, 120, 31.4, 16.6 and 1.9 GB."""
    question = asked(Asked.REST, **FIGURE1, strategy=Strategy.ZERO1)
    assert [f"{choice.nbytes / 1e9:.1f}" for choice in question.choices] == ["1.9", "16.6", "31.4", "120.0"]
    assert [choice.text for choice in question.choices] == ["1.875 GB", "16.64 GB", "31.41 GB", "120.0 GB"]
    names = [choice.wrong.name if choice.wrong else "right" for choice in question.choices]
    assert names == ["ZeRO-3", "ZeRO-2", "right", "DDP"]


@pytest.mark.parametrize("name", ZERO_FIGURE1)
def test_the_right_figure_is_the_papers_and_its_neighbours_are_known(name: str) -> None:
    question = asked(Asked.REST, **FIGURE1, strategy=Strategy(name))
    known = {f"{nbytes / 1e9:.1f}" for nbytes in (question.right.nbytes, *(each.nbytes for each in question.known))}
    assert f"{question.right.nbytes / 1e9:.1f}" == f"{float(ZERO_FIGURE1[name]):.1f}"
    assert known >= {f"{float(printed):.1f}" for printed in ZERO_FIGURE1.values()}


def test_the_right_figure_is_not_always_the_smallest() -> None:
    """The likeliest three of ZeRO-3's are above it, so the last of them gives way to one below."""
    for what in Asked:
        question = asked(what, **FIGURE1)
        assert question.choices[0].wrong and question.choices[-1].wrong
    names = {choice.wrong.name for choice in asked(Asked.REST, **FIGURE1).choices if choice.wrong}
    assert names == {"ZeRO-2", "DDP", "no optimizer"}


def test_states_by_hand_are_those_at_rest_but_for_padding() -> None:
    """64 divides 7.5 billion, so nothing is padded."""
    for strategy in (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3, Strategy.SHARD_GRAD_OP):
        spec = spec_of(**FIGURE1, strategy=strategy)
        assert rest_by_hand(spec, strategy) == sum(rest_by_category(spec).values())


# ---- the wrong figures, derived ----


def test_wrong_at_rest() -> None:
    """P parameters of 2 + 2 + 12 bytes on N = 64 ranks."""
    zero1 = asked(Asked.REST, **FIGURE1, strategy=Strategy.ZERO1)
    assert wrong(zero1, "DDP") == 16 * P
    assert wrong(zero1, "ZeRO-2") == 2 * P + 14 * P // 64
    assert wrong(zero1, "ZeRO-3") == 16 * P // 64
    assert wrong(zero1, "no optimizer") == 4 * P
    assert wrong(zero1, "no gradients") == 2 * P + 12 * P // 64
    assert wrong(zero1, "parameters alone") == 2 * P
    assert wrong(zero1, "fp32 gradients") == 6 * P + 12 * P // 64
    assert wrong(zero1, "pure bf16") == 4 * P + 4 * P // 64
    assert wrong(zero1, "one moment") == 4 * P + 8 * P // 64
    assert wrong(zero1, "elements") == P
    fp32 = asked(Asked.REST, **{**FIGURE1, "precision": Precision.FP32}, strategy=Strategy.ZERO2)
    assert wrong(fp32, "with a master") == 4 * P + 16 * P // 64
    # SHARD_GRAD_OP is not the paper's ZeRO-2: its parameters are sharded at rest.
    assert wrong(asked(Asked.REST, **FIGURE1, strategy=Strategy.SHARD_GRAD_OP), "ZeRO-2") == 2 * P + 14 * P // 64
    hybrid = build_question(predict(RunSpec(**FIGURE1, strategy=Strategy.HYBRID_SHARD, shard_ranks=8)), Asked.REST)
    assert (hybrid.right.nbytes, wrong(hybrid, "ZeRO-3")) == (16 * P // 8, 16 * P // 64)


def test_wrong_at_the_peak() -> None:
    spec = spec_of(**LLAMA)
    question, rank = build_question(predict(spec), Asked.PEAK), predict(spec).ranks[0]
    peak = rank.peak()
    activations = (Category.ACTIVATION, Category.TEMPORARY, Category.INPUT)
    assert wrong(question, "at rest") == rank.rest_nbytes
    assert wrong(question, "no activations") == peak.total - sum(peak.by_category[c] for c in activations)
    assert wrong(question, "all divided") == -(-peak_of(replace(spec, strategy=Strategy.DDP)).total // 8)
    assert wrong(question, "one unit") == peak_of(replace(spec, unit=UnitPolicy.parse("model"))).total
    assert wrong(question, "checkpointing") == peak_of(replace(spec, checkpointing=Checkpointing(1))).total
    assert wrong(question, "ZeRO-2") == peak_of(replace(spec, strategy=Strategy.ZERO2)).total
    assert wrong(question, "SHARD_GRAD_OP") == peak_of(replace(spec, strategy=Strategy.SHARD_GRAD_OP)).total
    kept = build_question(predict(replace(spec, checkpointing=Checkpointing(1))), Asked.PEAK)
    assert wrong(kept, "no checkpointing") == peak.total
    # In the update there are no activations, and what it borrows is left out.
    update = asked(Asked.PEAK, **FIGURE1, strategy=Strategy.DDP)
    assert "no activations" not in {each.name for each in update.known}


def test_wrong_on_the_wire() -> None:
    """2 P bytes of bf16 on 64 ranks: a pass of a ring sends 63/64 of them."""
    one_pass = 2 * P * 63 // 64
    zero3 = asked(Asked.SENT, **FIGURE1)
    assert zero3.right.nbytes == 3 * one_pass
    assert wrong(zero3, "DDP") == 2 * one_pass
    assert wrong(zero3, "all-reduced") == 4 * one_pass
    assert wrong(zero3, "gradient alone") == one_pass
    assert wrong(zero3, "own part") == 3 * one_pass // 63
    assert wrong(zero3, "whole payload") == 3 * 2 * P
    assert wrong(zero3, "to each other") == 3 * 2 * P * 63
    assert wrong(zero3, "in fp32") == 6 * one_pass
    ddp = asked(Asked.SENT, **FIGURE1, strategy=Strategy.DDP)
    assert (wrong(ddp, "ZeRO-3"), wrong(ddp, "all-reduce once")) == (3 * one_pass, one_pass)
    naive = asked(Asked.SENT, **FIGURE1, strategy=Strategy.ZERO1, zero1_form=Zero1Form.ALL_REDUCE)
    assert (naive.right.nbytes, wrong(naive, "reduce-scatter")) == (3 * one_pass, 2 * one_pass)
    zero2 = asked(Asked.SENT, **FIGURE1, strategy=Strategy.ZERO2, accumulation=4)
    assert (zero2.right.nbytes, wrong(zero2, "one micro-batch")) == (5 * one_pass, 2 * one_pass)
    assert wrong(zero2, "every micro-batch") == 8 * one_pass
    # Three passes inside groups of 8, then an all-reduce of an eighth of the gradient among 8 groups.
    hybrid = build_question(predict(RunSpec(**FIGURE1, strategy=Strategy.HYBRID_SHARD, shard_ranks=8)), Asked.SENT)
    assert wrong(hybrid, "inside groups") == 3 * 2 * P * 7 // 8
    assert hybrid.right.nbytes == wrong(hybrid, "inside groups") + 2 * (2 * P // 8) * 7 // 8


def test_what_lies_on_the_host_is_not_the_devices() -> None:
    """Offloading moves an fp32 copy and the moments of the shard: 12 of 16 bytes."""
    question = asked(Asked.REST, **FIGURE1, offload=Offload.OPTIMIZER)
    assert (question.right.nbytes, wrong(question, "with the host's")) == (4 * P // 64, 16 * P // 64)


def test_other_code_is_asked_about_by_its_own_figures() -> None:
    """FSDP2 has no DDP and our own code no fsdp-mixed, so DDP's states are counted by hand."""
    model = PRESETS["gpt2"]
    fields: dict[str, Any] = {"model": model, "impl": Implementation.FSDP2, "precision": Precision.FSDP_MIXED}
    assert wrong(asked(Asked.REST, **fields), "DDP") == 16 * model.num_params
    # With a recipe that both have, ZeRO-2 is our own, and is called so.
    fields["precision"] = Precision.FP32
    (rival,) = [each for each in asked(Asked.PEAK, **fields).known if each.name == "ZeRO-2"]
    assert rival.nbytes == peak_of(spec_of(model=model, strategy=Strategy.ZERO2)).total
    assert "ZeRO-2 in our own code" in rival.sentence
    # DeepSpeed's ZeRO-3 keeps a bucket of its own, which the book does not know.
    deepspeed = asked(Asked.REST, impl=Implementation.DEEPSPEED, precision=Precision.BF16_MIXED)
    book = spec_of(precision=Precision.BF16_MIXED)
    assert wrong(deepspeed, "ZeRO-3 by the book") == sum(rest_by_category(book).values())
    assert "no buffers" in {each.name for each in deepspeed.known}


@pytest.mark.parametrize(
    ("what", "fields", "name", "sentence"),
    [
        (Asked.REST, {"strategy": Strategy.ZERO3}, "ZeRO-2", "that of ZeRO-2: parameters are not divided there."),
        (Asked.REST, {"strategy": Strategy.ZERO1}, "DDP", "that of DDP: nothing is divided there."),
        (
            Asked.REST,
            {"strategy": Strategy.ZERO1},
            "ZeRO-3",
            "that of ZeRO-3: gradients and parameters are divided by 64 there, and whole here.",
        ),
        (
            Asked.SENT,
            {"strategy": Strategy.ZERO3},
            "DDP",
            "that of DDP: 29.53 GB all-reduce; here it is 29.53 GB all-gather + 14.77 GB reduce-scatter.",
        ),
        (Asked.PEAK, {}, "at rest", "what is held between two steps; the peak is in backward of model."),
    ],
)
def test_the_error_is_named(what: Asked, fields: dict[str, Any], name: str, sentence: str) -> None:
    (found,) = [each for each in asked(what, **FIGURE1, **fields).known if each.name == name]
    assert found.sentence == f"Your figure is {sentence}"


def test_a_library_that_holds_more_for_other_reasons_is_not_explained_by_what_it_divides() -> None:
    """DeepSpeed's ZeRO-3 divides more than its ZeRO-2 and holds more all the same: its buckets."""
    fields: dict[str, Any] = {"impl": Implementation.DEEPSPEED, "precision": Precision.BF16_MIXED}
    question = asked(Asked.REST, **fields, strategy=Strategy.ZERO2)
    (rival,) = [each for each in question.known if each.name == "ZeRO-3"]
    assert rival.nbytes > question.right.nbytes
    assert rival.sentence.startswith("Your figure is that of ZeRO-3, which holds ") and "more." in rival.sentence


# ---- answers ----


def said(text: str, what: Asked = Asked.REST, **fields: Any) -> Answer:
    return answer(asked(what, **{**FIGURE1, **fields}), parse_guess(text))


def test_an_answer_says_by_how_much_and_why() -> None:
    result = said("120 GB", strategy=Strategy.ZERO1)
    assert result.words == "You said 120.0 GB, the model says 31.41 GB: off by a factor of 3.82."
    assert result.factor == pytest.approx(120 / 31.40625) and result.difference_words == "88.59 GB too much"
    assert result.why == "Your figure is that of DDP: nothing is divided there."
    assert not result.is_right and result.measured is None and result.measured_words == ""


def test_every_choice_is_answered_by_its_own_sentence() -> None:
    for what in Asked:
        question = asked(what, **LLAMA)
        for choice in question.choices:
            result = answer(question, choice.nbytes)
            assert result.is_right is choice.is_right and result.wrong is choice.wrong
            assert result.factor >= 1
            assert result.why == (choice.wrong.sentence if choice.wrong else "")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("31406250000", "right to the byte"),
        ("31.4 GB", "right within 0.1 %"),
        ("31 GB", "right within 1.3 %"),
        ("32.1GB", "off by a factor of 1.02"),
        ("12 GB", "off by a factor of 2.62"),
        ("1 GB", "off by a factor of 31.4"),
        ("1 MB", "off by a factor of 31,400"),
        ("1 kB", "off by a factor of more than a million"),
    ],
)
def test_verdicts(text: str, verdict: str) -> None:
    result = said(text, strategy=Strategy.ZERO1)
    assert result.verdict == verdict and result.is_right is verdict.startswith("right")


def test_a_guess_is_held_against_more_than_the_choices() -> None:
    """4 P bytes, 30 GB, is too near the right figure to be a choice; whoever says so forgot the optimizer."""
    for text, name in (("30 GB", "no optimizer"), ("30.1 GB", "no optimizer"), ("15.1 GB", "parameters alone")):
        result = said(text, strategy=Strategy.ZERO1)
        assert result.wrong is not None and result.wrong.name == name
        assert name not in {choice.wrong.name for choice in result.question.choices if choice.wrong}
    none = said("23 GB", strategy=Strategy.ZERO1)
    assert none.wrong is None
    assert none.why == "The largest part of the model's figure is parameters, whole, 15.00 GB."


def test_gb_and_gib_are_told_apart() -> None:
    """31.41 GB are 29.25 GiB. Either number in the other unit is 7 % off and gets told so."""
    for text, name in (("29.25 GB", "GiB called GB"), ("31.41 GiB", "GB called GiB")):
        result = said(text, strategy=Strategy.ZERO1)
        assert result.wrong is not None and result.wrong.name == name
        assert result.why == "The bytes are right and the unit is not: 31.41 GB are 29.25 GiB."
    assert said("29.25 GiB", strategy=Strategy.ZERO1).is_right


def test_the_models_figure_is_said_as_a_sum() -> None:
    assert said("1 GB", strategy=Strategy.ZERO2).sum_words == (
        "The model's 16.64 GB are 15.00 GB (parameters, whole) + 0.2344 GB (gradients, own shard) + 0.4688 GB (fp32 "
        "master, own shard) + 0.9375 GB (Adam m and v, own shard)."
    )
    assert said("1 GB", Asked.SENT, strategy=Strategy.DDP).sum_words == "The model's 29.53 GB are all-reduce alone."


def test_what_was_measured_stands_beside_it() -> None:
    spec = spec_of(strategy=Strategy.ZERO1)
    question, rest = build_question(predict(spec), Asked.REST), predict(spec).ranks[0].rest_nbytes
    same = answer(question, question.choices[0].nbytes, measured(spec))
    assert same.measured is not None and same.measured.nbytes == rest
    assert same.measured_words == f"Measured: {same.texts[2]}, the model's figure to the byte."
    more = answer(question, question.choices[0].nbytes, measured(spec, 24))
    assert more.measured_words == f"Measured: {more.texts[2]}, 24 B more than the model says."
    assert more.measured_words in more.sentence and question.words in more.sentence
    with pytest.raises(TraceError, match="another spec"):
        answer(question, 1, measured(spec_of(strategy=Strategy.ZERO2)))


def test_a_guess_of_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="at least 1"):
        answer(asked(Asked.REST), 0)


def test_amounts_share_a_unit_unless_they_are_far_apart() -> None:
    assert amounts(120 * 10**9, 1_875_000_000) == ("120.0 GB", "1.875 GB")
    assert amounts(120 * 10**9, 10**6) == ("120.0 GB", "1.000 MB")
    assert amounts(1_875_000_000) == ("1.875 GB",)
    assert amounts(512, 3) == ("512 B", "3 B")
    factors = (1.02, 3.821, 64, 999.6, 31406.2, 1e18)
    texts = ["1.02", "3.82", "64", "1,000", "31,400", "more than a million"]
    assert list(map(factor_text, factors)) == texts


# ---- what a guess may look like ----


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1.5 GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        (" 120 MB ", 120_000_000),
        ("120 mb", 120_000_000),
        ("7e9", 7_000_000_000),
        ("7e9 B", 7_000_000_000),
        ("7E9", 7_000_000_000),
        ("1e-3 GB", 1_000_000),
        ("1,500,000", 1_500_000),
        ("1_500_000 bytes", 1_500_000),
        ("31.4gb", 31_400_000_000),
        ("2 TiB", 2**41),
        ("512", 512),
        ("0.5 kB", 500),
        (".5 kB", 500),
        ("5. GB", 5_000_000_000),
        ("1 byte", 1),
        ("1 EB", 10**18),
        ("0.3333333333 kB", 333),
    ],
)
def test_guesses_that_are_read(text: str, nbytes: int) -> None:
    assert parse_guess(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "idk", "GB", "1.5 G", "1.5G", "7B params", "1,5 GB", "1,50,000", "-3 GB", "+3 GB", "0", "0 GB",
        "0.2 B", "1e400", "1e999999", "1e30 GB", "nan", "inf", "1.5.2 GB", "1 GB 2", "~120 GB", "1e GB", "1.5 Gbit",
        "0x10", "\u0663 GB", "16P/N",
    ],
)  # fmt: skip
def test_guesses_that_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_guess(text)
    words = str(caught.value)
    assert repr(text) in words and words.endswith(".")
    assert "1.5 GB, 1.5 GiB, 120 MB or 7e9" in words or "from 1 byte to 1e24 bytes" in words
