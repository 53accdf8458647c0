"""What fits, as text of 80 columns and as a report: each answer with the ledger behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from decimal import Decimal
from textwrap import wrap
from typing import Any

from zeroviz.activations import formula_notes
from zeroviz.budget import MAX_COUNT, MAX_RANKS, Answer, Row
from zeroviz.capacities import RESERVE_COVERS, Capacity
from zeroviz.columns import WIDTH, entry
from zeroviz.models import Family
from zeroviz.quantity import DECIMAL_UNITS, format_binary_nbytes, format_decimal_nbytes
from zeroviz.spec import RunSpec
from zeroviz.wording import step_options

BUDGET_SCHEMA = "zeroviz.budget/1"

CPU_NOTE = (
    "Activations and temporaries are those of this implementation on torch's CPU kernels. GPU "
    "kernels keep and borrow other tensors, so near the edge measure before you rely on an answer."
)
BARE_NOTE = (
    "A bare parameter count has no layers. So it has no activations, largest batch and longest sequence are not asked, "
    "and the model is one unit, whose whole buffers and temporaries are counted. Name a model for smaller ones."
)

_LABEL_WIDTH, _VALUE_WIDTH, _CELL_WIDTH, _HEADER_WIDTH = 15, 11, 9, 10
_CELLS = ("at rest", "gathered", "grads", "activ.", "temp.", "spare")


def render_budget(rows: Sequence[Row], capacity: Capacity, reserve_nbytes: int, *, is_seq_default: bool) -> str:
    """The whole answer: what there is to spend, then one table a question."""
    spec = rows[0].spec
    lines = _header(rows, capacity, reserve_nbytes)
    lines += ["", *_table(f"SMALLEST N up to {MAX_RANKS:,}, for {_batch(spec)}", "N", rows, _smallest_ranks)]
    if spec.model.family is not Family.BARE:
        ranks = f"{spec.ranks:,} rank" + "s" * (spec.ranks > 1)
        lines += ["", *_table(f"LARGEST BATCH on each of {ranks}, seq {spec.seq:,}", "batch", rows, _largest_batch)]
        lines += ["", *_table(f"LONGEST SEQUENCE on {ranks}, batch {spec.batch:,}", "seq", rows, _longest_seq)]
        lines += _positions_note(spec, rows)
    lines += [
        "",
        *wrap(
            "Each line is the peak of one rank: of the states at rest what is there then (before backward no gradient "
            "is), and what is held beyond: gathered parameters, whole "
            "gradients, activations, temporaries with the batch. spare is what is left of the budget.",
            WIDTH,
        ),
    ]
    notes = _notes(spec)
    if is_seq_default and spec.model.family is not Family.BARE:
        longest = spec.model.positions
        notes.append(f"seq {spec.seq:,} is the default; --seq {longest} is the full length of {spec.model.name}.")
    for note in notes:
        lines += ["", *wrap(f"Note: {note}", WIDTH)]
    return "\n".join(lines) + "\n"


def budget_report(rows: Sequence[Row], capacity: Capacity, reserve_nbytes: int) -> dict[str, Any]:
    """The same for programs: whole bytes, and every answer's reason and place of the peak."""
    spec = rows[0].spec
    return {
        "schema": BUDGET_SCHEMA,
        "model": {"name": spec.model.name, "num_params": spec.model.num_params},
        "gpu": {"name": capacity.name, "capacity_nbytes": capacity.nbytes, "is_nominal": capacity.is_nominal},
        "reserve_nbytes": reserve_nbytes,
        "budget_nbytes": capacity.nbytes - reserve_nbytes,
        "step": {
            "ranks": spec.ranks,
            "batch": spec.batch,
            "seq": spec.seq,
            "unit": str(spec.unit),
            "optimizer": spec.optimizer.value,
            "grad_dtype": spec.recipe.grad.value,
            "checkpointing": str(spec.checkpointing),
            "offload": spec.offload.value,
            "accumulation": spec.accumulation,
            "no_sync": spec.no_sync,
            "clip_norm": spec.clip_norm,
        },
        "max_ranks": MAX_RANKS,
        "rows": [
            {
                "strategy": row.spec.strategy.value,
                "shard_ranks": row.spec.shard_ranks,
                "precision": row.spec.precision.value,
                "prefetch": row.spec.prefetch,
                "async_reduce": row.spec.async_reduce,
                "smallest_ranks": _answer_report(row.smallest_ranks),
                "largest_batch": _answer_report(row.largest_batch),
                "longest_seq": _answer_report(row.longest_seq),
            }
            for row in rows
        ],
        "notes": _notes(spec),
    }


def _notes(spec: RunSpec) -> list[str]:
    return [BARE_NOTE] if spec.model.family is Family.BARE else [CPU_NOTE, *formula_notes(spec.model)]


def _answer_report(answer: Answer | None) -> dict[str, Any] | None:
    if answer is None:
        return None
    spec, peak = answer.spec, answer.peak
    return {
        "value": answer.value,
        "reason": answer.reason or None,
        "at": {"ranks": spec.ranks, "batch": spec.batch, "seq": spec.seq},
        "peak": {"total": peak.total, "phase": peak.phase, "op": peak.op, "unit": peak.unit},
        "ledger": {f"{part}_nbytes": nbytes for part, nbytes in asdict(answer.ledger).items()},
        "spare_nbytes": answer.spare_nbytes,
        "host_nbytes": answer.host_nbytes,
    }


def _header(rows: Sequence[Row], capacity: Capacity, reserve_nbytes: int) -> list[str]:
    spec = rows[0].spec
    model = spec.model
    sizes = "" if model.family is Family.BARE else f" ({model.num_params:,} parameters)"
    nominal = ", the vendor's nominal figure" if capacity.is_nominal else ""
    lines = [*wrap(f"BUDGET: {model.name}{sizes} on {capacity.name}", WIDTH), ""]
    reserve = f"{_both(reserve_nbytes)} assumed for {RESERVE_COVERS}; --reserve sets it" if reserve_nbytes else "none"
    for label, text in (
        ("capacity", f"{_both(capacity.nbytes)}{nominal}"),
        ("reserve", reserve),
        ("budget", f"{_both(capacity.nbytes - reserve_nbytes)} for the peak of one rank"),
        ("step", "; ".join([_batch(spec), f"unit {spec.unit}", *_overlap(rows), *step_options(spec)])),
    ):
        lines += entry(label, text, _HEADER_WIDTH)
    return lines


def _overlap(rows: Sequence[Row]) -> list[str]:
    prefetch = max(row.spec.prefetch for row in rows)
    overlap = [f"prefetch {prefetch} (where parameters are sharded)"] if prefetch else []
    return [*overlap, "async reduce"] if rows[0].spec.async_reduce else overlap


def _both(nbytes: int) -> str:
    """`85.90 GB (80.00 GiB)`."""
    return f"{format_decimal_nbytes(nbytes)} ({format_binary_nbytes(nbytes)})"


def _batch(spec: RunSpec) -> str:
    if spec.model.family is Family.BARE:
        return "the model as one unit, without activations"
    return f"batch {spec.batch:,} and seq {spec.seq:,} on each rank"


def _table(title: str, what: str, rows: Sequence[Row], answer_of: Callable[[Row], Answer]) -> list[str]:
    heads = "".join(cell.rjust(_CELL_WIDTH) for cell in _CELLS)
    lines = [*wrap(title, WIDTH, subsequent_indent="  "), f"{'':{_LABEL_WIDTH}}{what:>{_VALUE_WIDTH}}{heads}"]
    without: dict[str, list[RunSpec]] = {}
    strategy = None
    for row in rows:
        if row.spec.strategy is not strategy:
            strategy = row.spec.strategy
            groups = row.spec.shard_ranks
            lines.append(strategy.label if groups is None else f"{strategy.label}, groups of {groups:,} ranks")
        answer = answer_of(row)
        lines.append(_line(row, answer))
        if answer.reason:
            without.setdefault(answer.reason, []).append(row.spec)
    if any(row.spec.offload.moves_optimizer for row in rows):
        held = ((f"{row.spec.strategy.label} {row.spec.precision.value}", answer_of(row).host_nbytes) for row in rows)
        text = "; ".join(f"{name} {_figure(nbytes)}" for name, nbytes in held)
        lines += wrap(f"on the host of each rank, beside that: {text}.", WIDTH, subsequent_indent="      ")
    for reason, specs in without.items():
        lines += wrap(f"none: {_names(specs)}: {reason}.", WIDTH, subsequent_indent="      ")
    return lines


def _line(row: Row, answer: Answer) -> str:
    ledger = answer.ledger
    value = "none" if answer.value is None else f"{answer.value:,}"
    if answer.value == MAX_COUNT:
        value = ">= 2**40"  # where the search ends
    cells = (
        ledger.at_rest,
        ledger.gathered,
        ledger.gradients,
        ledger.activations,
        ledger.update + ledger.temporaries + ledger.inputs,
        answer.spare_nbytes,
    )
    figures = "".join(_figure(nbytes).rjust(_CELL_WIDTH) for nbytes in cells)
    return f"{'  ' + row.spec.precision.value:{_LABEL_WIDTH}}{value:>{_VALUE_WIDTH}}{figures}"


def _figure(nbytes: int) -> str:
    """Three digits and a decimal unit: `83.7 GB`, `-1.3 TB`, `512 B`, `0`. A report has whole bytes."""
    for unit, scale in DECIMAL_UNITS:
        if abs(nbytes) >= scale:
            value = Decimal(nbytes) / scale
            places = max(0, 2 - value.adjusted())
            return f"{value:,.{places}f} {unit}"
    return f"{nbytes} B" if nbytes else "0"


def _names(specs: Iterable[RunSpec]) -> str:
    """`DDP fp32, bf16; ZeRO-1 fp32`."""
    recipes: dict[str, list[str]] = {}
    for spec in specs:
        recipes.setdefault(spec.strategy.label, []).append(spec.precision.value)
    return "; ".join(f"{strategy} {', '.join(names)}" for strategy, names in recipes.items())


def _positions_note(spec: RunSpec, rows: Sequence[Row]) -> list[str]:
    """Where a sequence ends for another reason than memory, or could be longer than the model was made for."""
    model = spec.model
    longest = max((answer.value or 0 for row in rows if (answer := row.longest_seq)), default=0)
    if model.family is Family.GPT2 and longest == model.positions:
        return wrap(f"{model.positions:,} tokens is all that {model.name} has positions for.", WIDTH)
    if longest > model.positions:
        text = f"{model.name} was made for {model.positions:,} tokens; beyond them the figure is one of memory alone."
        return wrap(text, WIDTH)
    return []


def _smallest_ranks(row: Row) -> Answer:
    return row.smallest_ranks


def _largest_batch(row: Row) -> Answer:
    assert row.largest_batch is not None
    return row.largest_batch


def _longest_seq(row: Row) -> Answer:
    assert row.longest_seq is not None
    return row.longest_seq
