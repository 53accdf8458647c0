"""Every published figure, worked out again: source, expected, got, verdict.

Each table of `zeroviz.facts` is a Group, made anew at every call, so that a change in the arithmetic or in a fact is
seen. The figures come from zeroviz's own functions wherever it has them; the others from formulas written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from zeroviz.errors import SpecError
from zeroviz.validate_models import activation_formula, gpu_capacity, param_counts
from zeroviz.validate_rows import Group, Row
from zeroviz.validate_study import study_pages
from zeroviz.validate_tables import (
    deepspeed_estimator,
    fsdp1_flat_parameter,
    megatron_optimizer,
    nccl_busbw,
    zero_figure1,
    zero_table1,
)

SCHEMA = "zeroviz.validation/1"

GROUPS: dict[str, Callable[[], Group]] = {
    "zero_paper_table1": zero_table1,
    "zero_paper_figure1": zero_figure1,
    "megatron_distributed_optimizer": megatron_optimizer,
    "deepspeed_estimator": deepspeed_estimator,
    "fsdp1_flat_parameter_bert_base_uncased": fsdp1_flat_parameter,
    "nccl_tests_busbw": nccl_busbw,
    "param_counts": param_counts,
    "activation_formula": activation_formula,
    "gpu_capacity_bytes": gpu_capacity,
    "study_pages": study_pages,
}


def validate(only: str | None = None) -> tuple[Group, ...]:
    """All groups, or the one named. Raises SpecError for a name that is none."""
    if only is not None and only not in GROUPS:
        raise SpecError(f"--only is {only!r}; allowed are {', '.join(GROUPS)}.")
    return tuple(make() for name, make in GROUPS.items() if only in (None, name))


def mismatches(groups: Sequence[Group]) -> tuple[Row, ...]:
    return tuple(row for group in groups for row in group.rows if not row.holds)


def report(groups: Sequence[Group]) -> dict[str, Any]:
    """Plain data: one entry a row, with everything the table shows and what worked the figure out."""
    return {
        "schema": SCHEMA,
        "ok": not mismatches(groups),
        "num_rows": sum(len(group.rows) for group in groups),
        "num_mismatches": len(mismatches(groups)),
        "rows": [_entry(group, row) for group in groups for row in group.rows],
    }


def _entry(group: Group, row: Row) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "group": group.name,
        "id": row.id,
        "what": row.what,
        "source": group.source,
        "url": group.reference.url,
        "expected": row.expected if isinstance(row.got, str) else _number(Fraction(row.expected)),
        "got": row.got if isinstance(row.got, str) else _number(Fraction(row.got)),
        "unit": row.unit,
        "rule": row.rule.value,
        "computed_by": row.by,
        "by_zeroviz": row.is_product,
        "verdict": "ok" if row.holds else "mismatch",
    }
    if row.formula:
        entry["formula"] = row.formula
    if row.formula_got is not None:
        entry["formula_got"] = _number(row.formula_got)
    if row.claim is not None:
        entry |= {"page_verdict": row.claim.verdict, "page_printed": row.claim.printed}
    if row.note:
        entry["note"] = row.note
    return entry


def _number(value: Fraction) -> int | float:
    """A number as JSON readers know it: whole where a double holds it exactly."""
    return int(value) if value.denominator == 1 and abs(value) < 2**53 else float(value)
