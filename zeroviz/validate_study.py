"""The study pages' claims, each worked out twice: by the claim's own formula, and by zeroviz's functions where it can.

data/study_pages.json holds one claim a line: `formula` with its `inputs` is the arithmetic behind the claim,
`expected` its exact value, `printed` what the page shows, `verdict` how the two compare, `carried` the arithmetic of a
page that went on with rounded figures, and `product` the same figure asked of zeroviz in the words of `_WORDS`.
"""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from importlib.resources import files
from typing import Any

from zeroviz import references
from zeroviz.collectives import CollectiveOp, ring_sent_nbytes
from zeroviz.formula import Function, evaluate
from zeroviz.memory import rest_by_category
from zeroviz.partition import plan_for, shard_numel
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy, Zero1Form
from zeroviz.trace import Category
from zeroviz.validate_rows import Claim, Group, Row, Rule
from zeroviz.validate_tables import bare_spec, rest_nbytes


def study_pages() -> Group:
    rows = tuple(_row(claim) for claim in load_claims())
    num_product = sum(row.is_product for row in rows)
    return Group(
        name="study_pages",
        reference=references.STUDY_PAGES,
        about=f"{len(rows)} claims with a number; zeroviz's own functions give {num_product} of the figures, formulas "
        'the others. Under "page" stands what the page made of its figure',
        rows=rows,
    )


def load_claims() -> list[dict[str, Any]]:
    """The claims as shipped. Numbers with a point become exact decimals."""
    text = files("zeroviz").joinpath("data", "study_pages.json").read_text(encoding="utf-8")
    claims: list[dict[str, Any]] = json.loads(text, parse_float=Decimal)
    return claims


def _row(claim: dict[str, Any]) -> Row:
    inputs = claim["inputs"]
    formula_got = evaluate(claim["formula"], inputs)
    product: str | None = claim.get("product")
    carried: str | None = claim.get("carried")
    return Row(
        id=claim["id"],
        what=claim["what"],
        expected=claim["expected"],
        got=evaluate(product, inputs, _WORDS) if product else formula_got,
        formula=claim["formula"],
        formula_got=formula_got if product else None,
        unit=claim["unit"],
        rule=Rule.CLOSE,
        rel_tol=float(claim["rel_tol"]),
        by=product or claim["formula"],
        is_product=product is not None,
        claim=Claim(
            verdict=claim["verdict"],
            printed=claim.get("printed"),
            carried=evaluate(carried) if carried else None,
        ),
        note=claim.get("note", ""),
    )


# ---- the words: zeroviz's functions, for a bare parameter count as one unit ----


def _spec(strategy: str, recipe: str, num_params: int, ranks: int) -> RunSpec:
    return bare_spec(num_params, ranks, Strategy(strategy), Precision(recipe))


def _rest(strategy: str, recipe: str, num_params: int, ranks: int) -> int:
    """Bytes one rank holds between steps."""
    return rest_nbytes(num_params, ranks, Strategy(strategy), Precision(recipe))


def _held(strategy: str, recipe: str, num_params: int, ranks: int, *categories: str) -> int:
    """Of those, the bytes of some categories. A category that holds nothing is a mistake here, not a zero."""
    rest = rest_by_category(_spec(strategy, recipe, num_params, ranks))
    return sum(rest[Category(name)] for name in categories)


def _sent(strategy: str, recipe: str, num_params: int, ranks: int, zero1_form: str = "reduce-scatter") -> int:
    """Bytes one rank sends in a step."""
    spec = _spec(strategy, recipe, num_params, ranks)
    if Zero1Form(zero1_form) is not spec.zero1_form:
        spec = RunSpec(
            model=spec.model,
            strategy=spec.strategy,
            ranks=ranks,
            precision=spec.precision,
            unit=spec.unit,
            zero1_form=Zero1Form(zero1_form),
        )
    return predict(spec).ranks[0].sent_nbytes


def _calls(strategy: str, op: str) -> int:
    """How many collectives of that kind one unit needs in a step."""
    collectives = predict(_spec(strategy, "fp32", 2**10, 2)).ranks[0].collectives
    return sum(call.op is CollectiveOp(op) for call in collectives)


def _ring(op: str, payload_nbytes: int, ranks: int) -> int:
    """Bytes one rank sends in one collective."""
    return ring_sent_nbytes(CollectiveOp(op), payload_nbytes, ranks)


def _whole(strategy: str) -> int:
    """How many of parameters, gradients and optimizer state are whole on every rank between steps."""
    kept = Strategy(strategy)
    return 3 - kept.shards_param - kept.shards_grad - kept.shards_optimizer


def _shard(numel: int, ranks: int) -> int:
    """Elements one rank owns of a unit."""
    spec = _spec("zero3", "fp32", numel, ranks)
    return shard_numel(plan_for(spec).units[0], spec)


def _width(recipe: str, copy: str) -> int:
    """Bytes an element of one copy: param, grad, master, or moments (each of the two)."""
    return int(getattr(Precision(recipe), copy).itemsize)


def _recipe(recipe: str) -> Fraction:
    """Bytes a parameter of the whole recipe."""
    return Fraction(Precision(recipe).bytes_per_param)


_WORDS: dict[str, Function] = {
    "rest": _rest,
    "held": _held,
    "sent": _sent,
    "calls": _calls,
    "ring": _ring,
    "whole": _whole,
    "shard": _shard,
    "width": _width,
    "recipe": _recipe,
}
