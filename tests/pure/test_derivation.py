"""The formulas' figures are the trace's, to the byte; the paper's; and every implementation has some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import lcm, prod
from typing import Any

import pytest

from tests.every import crossed, pairs, settings_of
from tests.work import num_calls
from zeroviz import facts
from zeroviz.category import Category
from zeroviz.derivation import HOST, LINK, PEAK, REST, WIRE, build_formula
from zeroviz.derivation_terms import LEVELS, Formula, Line
from zeroviz.errors import SpecError, TraceError
from zeroviz.formula import evaluate
from zeroviz.implementations import PAIRS, PRECISIONS
from zeroviz.memory import rest_by_category
from zeroviz.models import PRESETS, bare
from zeroviz.notation import Ceil, Frac, Node, Num, Product, Sigma, Sum, Sym, Word, arithmetic, text
from zeroviz.notation import product as times
from zeroviz.notation import symbols as symbols_of
from zeroviz.partition import plan_for
from zeroviz.predict import predict
from zeroviz.quantity import GB
from zeroviz.rank_trace import RankTrace
from zeroviz.spec import (
    Checkpointing,
    DType,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Settings,
    Strategy,
    UnitPolicy,
    Zero1Form,
)
from zeroviz.trace import Trace
from zeroviz.validate_rows import Rule, is_printed_as

UNEVEN = ("tiny", "tiny-llama")
UNITS = ("model", "block", "block:2", "layer", "numel:3e4")
WITNESSES = [(impl, strategy) for impl, those in PAIRS.items() if impl is not Implementation.OWN for strategy in those]


def spec_of(*, ranks: int = 4, strategy: Strategy = Strategy.ZERO3, unit: str = "block", **fields: Any) -> RunSpec:
    given = {"model": PRESETS["tiny"], "unit": UnitPolicy.parse(unit), **settings_of(strategy, ranks), **fields}
    return RunSpec(ranks=ranks, **given)


def formula_of(rank: int = 0, **fields: Any) -> Formula:
    return build_formula(predict(spec_of(**fields)), rank)


def line_of(formula: Formula, name: str) -> Line:
    (line,) = (line for line in formula.lines if line.name.startswith(name))
    return line


def texts(formula: Formula, name: str) -> list[str]:
    return [expression.text for expression in line_of(formula, name).levels]


def figures_of(rank: RankTrace) -> dict[str, int]:
    """What each line must come to, by its name."""
    on_host, has_host = sum(rank.at_rest_on_host.values()), bool(rank.at_rest_on_host)
    figures = {
        f"{REST}, on the device" if has_host else REST: rank.rest_nbytes,
        PEAK: rank.peak().total,
        WIRE: rank.sent_nbytes,
        HOST: on_host,
        LINK: sum(transfer.nbytes for transfer in rank.transfers),
    }
    return {name: nbytes for name, nbytes in figures.items() if nbytes or name not in (HOST, LINK)}


def assert_adds_up(spec: RunSpec, rank: int = 0) -> Formula:
    """Each line is the trace's figure; on each level its terms add up to it; its numbers, worked out, are that figure,
    bracket by bracket; no term had to be named for what is missed; categories are those of the trace."""
    trace = predict(spec)
    formula, seen = build_formula(trace, rank), trace.ranks[rank]
    present = {*seen.rest, *seen.peak().by_category}
    assert {line.name: line.nbytes for line in formula.lines} == figures_of(seen)
    for line in formula.lines:
        assert line.exact
        for expression in line.levels:
            assert sum(term.nbytes for term in expression.terms) == line.nbytes
            assert all(present.issuperset(term.categories) and term.tip for term in expression.terms)
        for part in line.levels[-1].parts:
            assert evaluate(part.arithmetic) == sum(term.nbytes for term in part.terms)
    assert_explained(formula)
    return formula


def assert_explained(formula: Formula) -> None:
    """Every letter of the first two levels is said what it stands for; that of a unit is its `P_u`."""
    explained = {meaning.symbol.name for meaning in formula.meanings}
    for line in formula.lines:
        for expression in line.levels[:2]:
            for part in expression.parts:
                for node in (part.prefix, part.factor, *(term.node for term in part.terms)):
                    assert node is None or {symbol.name for symbol in symbols_of(node)} <= explained
    assert len({meaning.symbol for meaning in formula.meanings}) == len(formula.meanings)


# ---- our own code ----


@pytest.mark.parametrize("strategy", facts.ZERO_FIGURE1)
def test_the_first_level_is_the_papers(strategy: str) -> None:
    """Rajbhandari et al., ZeRO, arXiv 1910.02054, Figure 1: 7.5B parameters on 64 ranks, 2 + 2 + K = 12 bytes."""
    formula = formula_of(
        model=bare(7_500_000_000), ranks=64, strategy=Strategy(strategy), precision=Precision.BF16_MIXED, unit="model"
    )
    symbols = line_of(formula, REST).levels[0]
    got = evaluate(symbols.arithmetic, {"p": 2, "g": 2, "k": 12, "P": 7_500_000_000, "N": 64})
    assert is_printed_as(got / GB, facts.ZERO_FIGURE1[strategy], Rule.ROUND)
    if strategy in facts.ZERO_FORMULAS:  # section 5's own formulas, with K = 12
        assert got == evaluate(facts.ZERO_FORMULAS[strategy], {"P": 7_500_000_000, "N": 64})
    # P/N is whole here but for rounding up, so the paper's figure is the trace's too.
    assert 0 <= line_of(formula, REST).nbytes - got < 16


@pytest.mark.parametrize(
    ("strategy", "rest", "wire"),
    [
        # The docstring of zeroviz.memory, from section 5 of the ZeRO paper; 2P, 2P, 2P and 3P from its section 7.
        (Strategy.DDP, "(p + g + k) P", "2 (N - 1)/N g P"),
        (Strategy.ZERO1, "(p + g) P + k P/N", "(N - 1)/N (p + g) P"),
        (Strategy.ZERO2, "p P + (g + k) P/N", "(N - 1)/N (p + g) P"),
        (Strategy.ZERO3, "(p + g + k) P/N", "(N - 1)/N (2 p + g) P"),
        (Strategy.SHARD_GRAD_OP, "(p + g + k) P/N", "(N - 1)/N (p + g) P"),
        (Strategy.HYBRID_SHARD, "(p + g + k) P/G", "(G - 1)/G (2 p + g) P + 2 (R - 1)/R g P/G"),
        (Strategy.MEGATRON_OPTIM, "(p + g) P + k P/N", "(N - 1)/N (p + g) P"),
    ],
)
def test_what_a_lecturer_writes_first(strategy: Strategy, rest: str, wire: str) -> None:
    formula = formula_of(strategy=strategy)
    assert texts(formula, REST)[0] == rest
    assert texts(formula, WIRE)[0] == wire


@pytest.mark.parametrize(("strategy", "precision"), pairs())
@pytest.mark.parametrize("unit", UNITS)
def test_the_third_level_is_the_prediction(strategy: Strategy, precision: Precision, unit: str) -> None:
    """Our own code on one to four ranks, both families, to the byte, and every line a closed form."""
    for ranks, model in product((1, 2, 3, 4), UNEVEN):
        spec = spec_of(model=PRESETS[model], ranks=ranks, strategy=strategy, precision=precision, unit=unit)
        formula = assert_adds_up(spec, ranks - 1)
        assert all(line.is_closed for line in formula.lines)


OPTIONS: list[dict[str, Any]] = [
    {"strategy": Strategy.ZERO3, "prefetch": 2, "async_reduce": True},
    {"strategy": Strategy.ZERO3, "checkpointing": Checkpointing(2), "prefetch": 1, "clip_norm": 1.0},
    {"strategy": Strategy.ZERO3, "accumulation": 5, "no_sync": True},
    {"strategy": Strategy.ZERO2, "accumulation": 3, "optimizer": Optimizer.ADAMW_FOREACH},
    {"strategy": Strategy.ZERO2, "async_reduce": True, "batch": 3, "seq": 7},
    {"strategy": Strategy.ZERO1, "grad_dtype": DType.BF16, "optimizer": Optimizer.SGD_MOMENTUM, "seq": 1},
    {"strategy": Strategy.ZERO1, "zero1_form": Zero1Form.ALL_REDUCE, "clip_norm": 1.0},
    {"strategy": Strategy.DDP, "optimizer": Optimizer.ADAMW_8BIT, "checkpointing": Checkpointing(1)},
    {"strategy": Strategy.ZERO3, "optimizer": Optimizer.ADAMW_8BIT, "seq": 1},
    {"strategy": Strategy.DDP, "optimizer": Optimizer.SGD, "seq": 1},
    {"strategy": Strategy.HYBRID_SHARD, "prefetch": 1, "clip_norm": 0.5},
    {"strategy": Strategy.MEGATRON_OPTIM, "accumulation": 2, "clip_norm": 1.0},
    {"strategy": Strategy.MEGATRON_OPTIM, "optimizer": Optimizer.ADAMW_FOREACH, "seq": 1},
    {"strategy": Strategy.DDP, "offload": Offload.OPTIMIZER},
    {"strategy": Strategy.ZERO2, "offload": Offload.OPTIMIZER, "precision": Precision.BF16},
    {"strategy": Strategy.ZERO3, "offload": Offload.PARAMS, "precision": Precision.BF16_MIXED},
    {"strategy": Strategy.HYBRID_SHARD, "offload": Offload.PARAMS, "accumulation": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_change_the_terms_and_not_that_they_add_up(options: dict[str, Any]) -> None:
    for ranks, unit in product((1, 3, 6), ("model", "block", "layer")):
        formula = assert_adds_up(spec_of(ranks=ranks, unit=unit, **options))
        assert all(line.is_closed for line in formula.lines)


def test_the_readmes_example_term_by_term() -> None:
    """ZeRO-3 on four ranks: the root and a block are whole at the peak, 58,636 elements with padding, of 133,116."""
    formula = formula_of()
    assert texts(formula, REST) == [
        "(p + g + k) P/N",
        "(p + g + 2 m) sum_u ceil(P_u/N)",
        "(4 + 4 + 2*4)*33,279",
    ]
    assert 4 * 33279 == 133116 and line_of(formula, REST).nbytes == 532464
    peak = line_of(formula, PEAK)
    assert peak.place == "backward of block 2"
    assert texts(formula, PEAK) == [
        "(p + k) P/N + (p + g) P_W + activations + temporaries + input",
        "(p + 2 m) sum_u ceil(P_u/N) + (p + g) sum[u in {root, block 2}] N ceil(P_u/N) + a_act n + a_temp n + c_temp"
        " + a_in n",
        "(4 + 2*4)*33,279 + (4 + 4)*58,636 + 10,716*32 + 1,108*32 + 220 + 16*32",
    ]
    assert peak.nbytes == 1247536 == 12 * 33279 + 8 * 58636 + 342912 + 35676 + 512
    assert [term.categories for term in peak.levels[0].terms] == [
        (Category.SHARDED_PARAM,),
        (Category.OPTIMIZER_STATE,),
        (Category.UNSHARDED_PARAM,),
        (Category.UNSHARDED_GRAD,),
        (Category.ACTIVATION,),
        (Category.TEMPORARY,),
        (Category.INPUT,),
    ]


def test_a_papers_k_stands_for_master_and_moments() -> None:
    """One letter on the first level and two terms on the second; it lights both."""
    line = line_of(formula_of(precision=Precision.BF16_MIXED), REST)
    *_, k = line.levels[0].terms
    *_, master, moments = line.levels[1].terms
    assert k.categories == (*master.categories, *moments.categories)
    assert k.nbytes == master.nbytes + moments.nbytes
    assert [text(term.node) for term in (k, master, moments)] == ["k", "w", "2 m"]


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"unit": "model"}, "p P"),
        ({"strategy": Strategy.SHARD_GRAD_OP}, "p P"),
        ({"strategy": Strategy.ZERO3, "prefetch": 1, "model": PRESETS["tiny-llama"]}, "p P_W"),
        ({"strategy": Strategy.ZERO3, "model": PRESETS["tiny-llama"], "seq": 512}, "p P_u"),
    ],
)
def test_the_window_names_the_units_that_are_whole(fields: dict[str, Any], window: str) -> None:
    """All of them, one, or those around the place of the peak."""
    formula = formula_of(**fields)
    first = texts(formula, PEAK)[0].replace("(p + g)", "p")
    assert window in first.split(" + ")
    if window.endswith("W"):
        words = next(each.words for each in formula.meanings if each.symbol == Sym("P", "W"))
        assert words.startswith("parameters of the units that are whole at the peak: ")


def test_the_update_is_a_slice_with_its_temporaries() -> None:
    """A bare count under DDP on one token: two of m for the largest slice, a cast where the gradient is another."""
    formula = formula_of(strategy=Strategy.DDP, model=bare(10**9), unit="model", precision=Precision.BF16_MIXED)
    assert line_of(formula, PEAK).place == "optimizer step of model"
    assert texts(formula, PEAK) == ["(p + g + k) P + (2 m + w) l_u", "(p + g + w + 2 m) P + (2 m + w) P", LAST]
    assert line_of(formula, PEAK).nbytes == (16 + 12) * 10**9


LAST = "(2 + 2 + 4 + 2*4)*1,000,000,000 + (2*4 + 4)*1,000,000,000"


def test_padding_and_step_counters_are_said() -> None:
    formula = formula_of(ranks=3, rank=2)
    padding, counters = line_of(formula, REST).notes
    spec = spec_of(ranks=3)
    numel = sum(-unit.numel % 3 for unit in plan_for(spec).units)
    seen = predict(spec).ranks[2]
    assert padding == (
        f"Padding: {numel:,} elements, for every unit is rounded up to a multiple of 3; {seen.padding_nbytes:,} B of "
        "what rank 2 holds are padding."
    )
    assert counters == f"Not counted: {seen.step_counter_nbytes:,} B of step counters, one scalar a slice."
    assert not any("Padding" in note for note in line_of(formula_of(strategy=Strategy.DDP), REST).notes)


def test_the_host_stands_apart() -> None:
    formula = assert_adds_up(spec_of(offload=Offload.PARAMS, precision=Precision.BF16_MIXED))
    assert [line.name for line in formula.lines] == [f"{REST}, on the device", HOST, PEAK, WIRE, LINK]
    assert line_of(formula, f"{REST}, on the device").nbytes == 0
    assert line_of(formula, f"{REST}, on the device").notes[0] == "Nothing: every state lies on the host."
    assert texts(formula, HOST)[0] == "(p + g + k) P/N"
    assert all(category.on_host for term in line_of(formula, HOST).levels[0].terms for category in term.categories)
    assert texts(formula, LINK)[0] == "(2 p + g) P/N"
    formula = assert_adds_up(spec_of(offload=Offload.OPTIMIZER, strategy=Strategy.ZERO1))
    assert texts(formula, f"{REST}, on the device")[0] == "(p + g) P"
    assert texts(formula, HOST)[0] == "k P/N"


def test_one_rank_sends_nothing() -> None:
    for strategy in Strategy:
        line = line_of(assert_adds_up(spec_of(ranks=1, strategy=strategy)), WIRE)
        assert (line.nbytes, line.notes) == (0, ("Nothing: one rank has nobody to send to.",))
        assert all(expression.text == "0" for expression in line.levels)


def test_what_is_recomputed_is_gathered_again() -> None:
    """A region of two blocks: what backward does not follow at once is gathered a third time, so units differ."""
    formula = assert_adds_up(spec_of(checkpointing=Checkpointing(2)))
    assert texts(formula, WIRE)[0] == "(N - 1)/N p sum_u x_u P_u + (N - 1)/N g P"
    (times_gathered,) = (each.words for each in formula.meanings if each.symbol == Sym("x", "u"))
    assert times_gathered == "how often unit u is gathered: 2 for 3 units, 3 for block 0"


# ---- sizes, counts and speed ----


@pytest.mark.parametrize("ranks", [1, 64, 4096, 2**20])
@pytest.mark.parametrize("model", ["llama3-8b", "a bare count"])
def test_large_models_and_many_ranks(model: str, ranks: int) -> None:
    shape = bare(7 * 10**9 + 1) if model == "a bare count" else PRESETS[model]
    for strategy in Strategy:
        fields = {"precision": Precision.BF16_FP32GRAD, "unit": "block" if shape.layers else "model", "seq": 4096}
        formula = assert_adds_up(spec_of(model=shape, ranks=ranks, strategy=strategy, **fields), ranks - 1)
        assert all(line.is_closed for line in formula.lines)


def test_ranks_cost_nothing() -> None:
    """Counted in calls: nothing is worked out rank by rank, whatever their number."""
    work = {}
    for ranks in (4, 64, 4096):
        trace = predict(spec_of(model=PRESETS["llama3-8b"], ranks=ranks, seq=4096))
        build_formula(trace)  # what is remembered of the order of the step
        work[ranks] = num_calls(lambda trace=trace: build_formula(trace))
    assert max(work.values()) - min(work.values()) <= 20
    assert max(work.values()) < 3000


def test_units_cost_little() -> None:
    """Twice as many blocks are less than half as much work again: blocks are alike."""
    work = []
    for name in ("gpt2", "gpt2-medium"):
        trace = predict(spec_of(model=PRESETS[name], seq=128))
        build_formula(trace)
        work.append(num_calls(lambda trace=trace: build_formula(trace)))
    assert work[1] < 1.5 * work[0]


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(TraceError, match="Rank 4 was asked for; the trace has ranks 0 to 3"):
        formula_of(rank=4)


def test_what_the_formula_misses_is_a_term_of_its_own() -> None:
    """A trace that holds five bytes more than the rule says: they are named, and the sum is still the trace's."""
    trace = predict(spec_of())
    seen = trace.ranks[0]
    grown = replace(seen, rest={**seen.rest, Category.SHARDED_PARAM: seen.rest[Category.SHARDED_PARAM] + 5})
    line = line_of(build_formula(Trace(trace.origin, trace.spec, (grown,))), REST)
    assert not line.exact and line.nbytes == seen.rest_nbytes + 5
    assert line.levels[2].text.endswith("+ 5")
    assert line.levels[0].terms[-1].tip == "the trace holds +5 B that the formula misses"
    assert sum(term.nbytes for term in line.levels[0].terms) == line.nbytes


# ---- other people's implementations ----


def witness_specs(impl: Implementation, strategy: Strategy) -> Iterator[RunSpec]:
    for (ranks, unit), precision in product(crossed((1, 3, 4, 7), UNITS), PRECISIONS[impl]):
        try:
            yield spec_of(
                model=PRESETS[UNEVEN[ranks % 2]],
                ranks=ranks,
                impl=impl,
                strategy=strategy,
                precision=precision,
                unit=unit,
            )
        except SpecError:
            assert (impl, strategy, precision) == (Implementation.DEEPSPEED, Strategy.DDP, Precision.BF16_FP32GRAD)


@pytest.mark.parametrize(("impl", "strategy"), WITNESSES)
def test_every_implementation_has_lines_that_add_up(impl: Implementation, strategy: Strategy) -> None:
    for spec in witness_specs(impl, strategy):
        for rank in {0, spec.ranks - 1}:
            formula = assert_adds_up(spec, rank)
            rest, peak = line_of(formula, REST), line_of(formula, PEAK)
            assert rest.is_closed and not peak.is_closed
            assert peak.notes[0].startswith(f"Read off the walk through the step of {impl.label}, at {peak.place}")
            assert "no closed form" in peak.notes[0]


@pytest.mark.parametrize(("impl", "strategy"), WITNESSES)
@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAMW_8BIT, Optimizer.ADAMW_FOREACH])
def test_every_implementation_whatever_the_optimizer(
    impl: Implementation, strategy: Strategy, optimizer: Optimizer
) -> None:
    if impl is Implementation.MEGATRON and optimizer is not Optimizer.ADAMW_FOREACH:
        return
    formula = assert_adds_up(spec_of(impl=impl, strategy=strategy, ranks=3, optimizer=optimizer), 2)
    # Quantized moments have a scale a block of each tensor: the rule is not said in symbols.
    assert line_of(formula, REST).is_closed == (optimizer is not Optimizer.ADAMW_8BIT)


def numbers_at_rest(formula: Formula) -> dict[Category, int]:
    """Elements by category, as the third level has them."""
    found = {}
    for part in line_of(formula, REST).levels[2].parts:
        factor = part.factor
        for term in part.terms:
            if isinstance(factor, Num):
                (category,) = term.categories
                found[category] = factor.value
    return found


def test_fsdp2s_rows() -> None:
    """ceil(h/N) rows of c elements of every parameter; of moments those that the rank has."""
    shapes = [shape.shape for shape in PRESETS["tiny"].params]
    for rank in range(3):
        formula = formula_of(rank=rank, impl=Implementation.FSDP2, ranks=3)
        padded = sum(-(-rows // 3) * prod(rest) for rows, *rest in shapes)
        mine = sum(max(0, min(-(-rows // 3), rows - rank * -(-rows // 3))) * prod(rest) for rows, *rest in shapes)
        assert numbers_at_rest(formula) == {
            Category.SHARDED_PARAM: padded,
            Category.SHARDED_GRAD: padded,
            Category.OPTIMIZER_STATE: mine,
        }
        assert texts(formula, REST)[1] == "(p + g) sum_i ceil(h_i/N) c_i + 2 m sum_i h[i,r] c_i"


def test_fsdp1s_flat_parameters() -> None:
    units = plan_for(spec_of()).units
    formula = formula_of(impl=Implementation.FSDP1, ranks=3)
    assert set(numbers_at_rest(formula).values()) == {sum(-(-unit.numel // 3) for unit in units)}
    assert texts(formula, REST)[1] == "(p + g + 2 m) sum_u ceil(F_u/N)"


def test_deepspeeds_flat_tensor_and_chunks() -> None:
    num_params = PRESETS["tiny"].num_params
    formula = formula_of(
        impl=Implementation.DEEPSPEED, strategy=Strategy.ZERO2, ranks=3, precision=Precision.BF16_MIXED
    )
    part = -(-num_params // 6) * 2
    assert numbers_at_rest(formula) == {
        Category.UNSHARDED_PARAM: 3 * part,
        Category.MASTER_PARAM: part,
        Category.OPTIMIZER_STATE: part,
    }
    formula = formula_of(impl=Implementation.DEEPSPEED, ranks=3, settings=Settings(persistence_numel=100))
    shapes = PRESETS["tiny"].params
    chunks = sum(-(-shape.numel // 3) for shape in shapes)
    numbers = numbers_at_rest(formula)
    assert numbers[Category.SHARDED_PARAM] == numbers[Category.MASTER_PARAM] == chunks
    small = sum(-(-shape.numel // 3) * 3 for shape in shapes if shape.numel <= 100)
    assert numbers[Category.UNSHARDED_PARAM] == small
    assert numbers[Category.BUCKET] == 500_000_000


def test_megatrons_one_buffer_and_a_ranks_pieces() -> None:
    """Each parameter begins at a multiple of 64 elements, the buffer ends at one of lcm(N, 128)."""
    end = 0
    for shape in reversed(PRESETS["tiny"].params):
        end = -(-end // 64) * 64 + shape.numel
    end = -(-end // lcm(3, 128)) * lcm(3, 128)
    specs = [
        formula_of(rank=rank, impl=Implementation.MEGATRON, strategy=Strategy.MEGATRON_OPTIM, ranks=3)
        for rank in range(3)
    ]
    found = [numbers_at_rest(formula) for formula in specs]
    assert {numbers[Category.UNSHARDED_PARAM] for numbers in found} == {end}
    assert sum(numbers[Category.OPTIMIZER_STATE] for numbers in found) == PRESETS["tiny"].num_params


def test_zero_redundancys_ranks_are_uneven() -> None:
    formulas = [
        formula_of(rank=rank, impl=Implementation.ZERO_REDUNDANCY, strategy=Strategy.ZERO1, ranks=3)
        for rank in range(3)
    ]
    owned = [numbers_at_rest(formula)[Category.OPTIMIZER_STATE] for formula in formulas]
    assert sum(owned) == PRESETS["tiny"].num_params and len(set(owned)) > 1
    assert texts(formulas[0], REST)[0] == "(p + g + b) P + k P_r"
    assert texts(formulas[0], WIRE)[0] == "2 (N - 1)/N g P + (N - 1)/N p P"


# ---- notation ----


@pytest.mark.parametrize(
    ("node", "words", "spelt"),
    [
        (Product((Sym("p"), Frac(Sym("P"), Sym("N")))), "p P/N", "p*((P)/(N))"),
        (Frac(Sum((Sym("N"), Num(-1))), Sym("N")), "(N - 1)/N", "(((N + -1))/(N))"),
        (Product((Num(2), Num(-4))), "2*-4", "2*-4"),
        (Sum((Num(5), Product((Num(-2), Sym("n"))), Num(-1))), "5 - 2 n - 1", "(5 + -2*n + -1)"),
        (Ceil(Frac(Sym("P", "block 0"), Product((Num(2), Sym("N"))), is_inline=True)), "ceil(P[block 0]/(2 N))",
         "ceil(((P_block_0)/(2*N)))"),
        (Sigma("u in D", Sum((Sym("P", "u"), Num(1)))), "sum[u in D] (P_u + 1)", "sum_u_in_D__P_u_1_"),
        (Word("whole parameters", "head"), "whole parameters[head]", "whole_parameters_head"),
        (times(Num(1), Sym("g")), "g", "g"),
        (times(Num(1)), "1", "1"),
    ],
)  # fmt: skip
def test_text_and_arithmetic(node: Node, words: str, spelt: str) -> None:
    assert text(node) == words
    assert arithmetic(node) == spelt


def test_there_are_three_levels() -> None:
    for line in formula_of().lines:
        assert len(line.levels) == len(LEVELS) == 3


def test_the_closed_form_is_memorys() -> None:
    """The sums by category are those of `zeroviz.memory.rest_by_category`, which knows nothing of terms."""
    for strategy, precision in pairs():
        spec = spec_of(ranks=3, strategy=strategy, precision=precision)
        found: dict[Category, Fraction] = {}
        for term in line_of(build_formula(predict(spec)), REST).levels[1].terms:
            (category,) = term.categories
            found[category] = found.get(category, Fraction(0)) + term.nbytes
        assert found == rest_by_category(spec)
