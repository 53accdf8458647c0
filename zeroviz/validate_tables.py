"""The published tables, worked out by zeroviz's own arithmetic where it has it, else by a formula written out."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from zeroviz import estimators, facts, references
from zeroviz.collectives import CollectiveOp, ring_sent_nbytes
from zeroviz.formula import evaluate
from zeroviz.memory import rest_by_category
from zeroviz.models import bare
from zeroviz.partition import Unit, plan_for, shard_bounds, shard_numel
from zeroviz.quantity import GB, GIB
from zeroviz.spec import Precision, RunSpec, Strategy, UnitKind, UnitPolicy
from zeroviz.trace import Category
from zeroviz.validate_rows import Group, Row, Rule, figure_text

WHOLE_MODEL = UnitPolicy(UnitKind.MODEL)


def bare_spec(num_params: int, ranks: int, strategy: Strategy, precision: Precision) -> RunSpec:
    """A bare count as one unit, as the papers' formulas have it."""
    return RunSpec(model=bare(num_params), ranks=ranks, strategy=strategy, precision=precision, unit=WHOLE_MODEL)


def rest_nbytes(num_params: int, ranks: int, strategy: Strategy, precision: Precision) -> int:
    """Bytes one rank holds between steps."""
    return sum(rest_by_category(bare_spec(num_params, ranks, strategy, precision)).values())


def zero_table1() -> Group:
    def rows(num_params: int, label: str, table: dict[int, tuple[str, str, str]], rule: Rule) -> Iterator[Row]:
        for ranks, printed in table.items():
            for (strategy, formula), expected in zip(facts.ZERO_FORMULAS.items(), printed, strict=True):
                nbytes = rest_nbytes(num_params, ranks, Strategy(strategy), Precision.BF16_MIXED)
                yield Row(
                    id=f"{label} N={ranks} {strategy}",
                    what=f"{label}, N={ranks}, {Strategy(strategy).label}",
                    expected=expected,
                    got=Fraction(nbytes, GB),
                    formula=formula,
                    formula_got=evaluate(formula, {"P": num_params, "N": ranks}) / GB,
                    unit="GB",
                    rule=rule,
                    by="memory.rest_by_category",
                )

    return Group(
        name="zero_paper_table1",
        reference=references.ZERO,
        place="Table 1",
        about="Bytes of model states on one rank at 2 + 2 + 12 bytes a parameter; 7.5B rounded, 1T cut off, as printed",
        rows=(
            *rows(7_500_000_000, "7.5B", facts.ZERO_TABLE1_ROUNDED, Rule.ROUND),
            *rows(10**12, "1T", facts.ZERO_TABLE1_TRUNCATED, Rule.TRUNCATE),
        ),
    )


def zero_figure1() -> Group:
    return Group(
        name="zero_paper_figure1",
        reference=references.ZERO,
        place="Figure 1",
        about="7.5B parameters on 64 ranks, rounded",
        rows=tuple(
            Row(
                id=strategy,
                what=Strategy(strategy).label,
                expected=printed,
                got=Fraction(rest_nbytes(7_500_000_000, 64, Strategy(strategy), Precision.BF16_MIXED), GB),
                unit="GB",
                rule=Rule.ROUND,
                by="memory.rest_by_category",
            )
            for strategy, printed in facts.ZERO_FIGURE1.items()
        ),
    )


# Megatron's optimizer shards what ZeRO-1 shards; its dtypes are these recipes'.
_MEGATRON_RECIPES = {("bf16", "fp32"): Precision.BF16_FP32GRAD, ("fp32", "fp32"): Precision.FP32}
_NUM_PARAMS = 2**20  # any count that 64 divides: bytes a parameter do not depend on it


def megatron_optimizer() -> Group:
    rows = []
    for dtypes, (plain, formula) in facts.MEGATRON_OPTIMIZER.items():
        label = f"{dtypes[0]} param, {dtypes[1]} grad"
        rows.append(_megatron_row(f"{label}, plain", plain, dtypes, 8, Strategy.DDP))
        for ranks in (1, 8, 64):
            expected = figure_text(evaluate(formula, {"d": ranks}))
            rows.append(_megatron_row(f"{label}, {formula}, d={ranks}", expected, dtypes, ranks, Strategy.ZERO1))
    numel, ranks = facts.MEGATRON_EXAMPLE_NUMEL, len(facts.MEGATRON_EXAMPLE_OWNED)
    spec = bare_spec(numel, ranks, Strategy.ZERO1, Precision.BF16_FP32GRAD)
    (unit,) = plan_for(spec).units
    for rank, owned in enumerate(facts.MEGATRON_EXAMPLE_OWNED):
        start, stop = shard_bounds(unit, spec, rank)
        what = f"{numel} elements, {ranks} ranks: rank {rank} owns"
        rows.append(Row(id=what, what=what, expected=owned, got=f"[{start}:{stop}]", by="partition.shard_bounds"))
    grad_numel = Fraction(rest_by_category(spec)[Category.UNSHARDED_GRAD], spec.recipe.grad.itemsize)
    rows.append(
        Row(
            id="gradient buffer",
            what="its gradient buffer stays",
            expected=str(numel),
            got=grad_numel,
            unit="elements",
            by="memory.rest_by_category",
        )
    )
    return Group(
        name="megatron_distributed_optimizer",
        reference=references.MEGATRON_OPTIMIZER,
        about="Bytes a parameter on one of d data-parallel ranks; ZeRO-1 in zeroviz's words",
        rows=tuple(rows),
    )


def _megatron_row(what: str, expected: str, dtypes: tuple[str, str], ranks: int, strategy: Strategy) -> Row:
    """One figure of the table. strategy: DDP without the distributed optimizer, ZERO1 with it."""
    recipe = _MEGATRON_RECIPES.get(dtypes)
    if recipe is None:
        got = estimators.megatron_fp16(ranks)[strategy is Strategy.ZERO1]
    else:
        got = Fraction(rest_nbytes(_NUM_PARAMS, ranks, strategy, recipe), _NUM_PARAMS)
    return Row(
        id=what,
        what=what,
        expected=expected,
        got=got,
        unit="B/param",
        by="memory.rest_by_category" if recipe else "estimators.megatron_fp16",
        is_product=recipe is not None,
    )


def deepspeed_estimator() -> Group:
    num_params, ranks = facts.DEEPSPEED_NUM_PARAMS, facts.DEEPSPEED_RANKS

    def row(stage: str, offload: str, printed: str) -> Row:
        if stage == "zero3":
            nbytes = estimators.deepspeed_zero3(num_params, facts.DEEPSPEED_LARGEST_LAYER, ranks, offload=offload)
        else:
            form = "docs" if stage == "zero2 docs" else "code"
            nbytes = estimators.deepspeed_zero2(num_params, ranks, offload=offload, form=form)
        away = {"none": "no offload", "optimizer": "optimizer offloaded", "params": "params and optimizer offloaded"}
        what = {"zero3": "ZeRO-3", "zero2": "ZeRO-2", "zero2 docs": "ZeRO-2, old formula", "zero2 code": "ZeRO-2, code"}
        return Row(
            id=f"{stage} {offload}",
            what=f"{what[stage]}, {away[offload]}",
            expected=printed,
            got=nbytes / GIB,
            unit="GiB",
            rule=Rule.ROUND,
            by=f"estimators.deepspeed_{stage.split()[0]}",
            is_product=False,
        )

    rows = [row(stage, offload, printed) for (stage, offload), printed in facts.DEEPSPEED_PRINTED.items()]
    rows.append(row("zero2 code", "none", facts.DEEPSPEED_ZERO2_CODE))
    return Group(
        name="deepspeed_estimator",
        reference=references.DEEPSPEED_MEMORY,
        about='2851M parameters, largest layer 32M, 8 GPUs; what it prints as "GB" is GiB. Its documentation shows '
        "4P + 16P/N for ZeRO-2, its code computes 2P + 18P/N",
        rows=tuple(rows),
    )


def fsdp1_flat_parameter() -> Group:
    spec = RunSpec(model=bare(1), ranks=facts.FSDP1_RANKS, strategy=Strategy.ZERO3, unit=WHOLE_MODEL)
    rows = []
    for index, (name, shapes) in enumerate(estimators.bert_flat_parameters(**facts.BERT).items()):
        unit = Unit(index, name, shapes, sum(shape.numel for shape in shapes))
        rows.append(
            Row(
                id=name,
                what=f"{name}, {unit.numel:,} / {spec.ranks}",
                expected=facts.FSDP1_NUMEL[name],
                got=shard_numel(unit, spec),
                unit="elements",
                by="partition.shard_numel",
            )
        )
    return Group(
        name="fsdp1_flat_parameter_bert_base_uncased",
        reference=references.FSDP_BLOG,
        about="Elements of each unit's flat parameter on one of 2 ranks, from BERT-base-uncased's shapes; a flat "
        "parameter is padded to a multiple of the ranks, and here none needs it",
        rows=tuple(rows),
    )


def nccl_busbw() -> Group:
    rows = []
    for name, formula in facts.BUSBW_FACTORS.items():
        for ranks in (1, 2, 8, 64):
            rows.append(
                Row(
                    id=f"{name} n={ranks}",
                    what=f"{name}, n={ranks}",
                    expected=figure_text(evaluate(formula, {"n": ranks})),
                    # A payload that every n divides, so that no rank's chunk is longer than another's.
                    got=Fraction(ring_sent_nbytes(CollectiveOp(name), 2**20, ranks), 2**20),
                    unit="x S",
                    by="collectives.ring_sent_nbytes",
                )
            )
    return Group(
        name="nccl_tests_busbw",
        reference=references.NCCL_TESTS,
        about="2(n-1)/n and (n-1)/n of the whole array S: what a rank sends in a ring",
        rows=tuple(rows),
    )
