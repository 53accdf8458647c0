"""Text tables of a rehearsal beside its prediction."""

from __future__ import annotations

from textwrap import wrap

from zeroviz.columns import WIDTH, entry
from zeroviz.compare import compare
from zeroviz.tables import header, rank_groups
from zeroviz.tables_live import rank_tables, wire_tables
from zeroviz.tables_step import step_table
from zeroviz.trace import Trace


def render_rehearsed(rehearsed: Trace, predicted: Trace) -> str:
    """The whole report of a rehearsal."""
    lines = header(rehearsed)
    names = (predicted.origin.label, rehearsed.origin.label)
    for group in rank_groups(rehearsed):
        every = "each rank" if group.num_ranks == len(rehearsed.ranks) else group.label
        # Ranks of a group are alike on both sides, so one of them is compared for all.
        ours, theirs = predicted.ranks[group.first.rank], group.first
        comparison = compare(_only(predicted, ours.rank), _only(rehearsed, theirs.rank))
        parts = rank_tables(every, comparison, ours, theirs, names)
        parts += [step_table(every, ours, theirs, names), *wire_tables(every, comparison, ours, theirs, names)]
        lines += [line for part in parts if part for line in ("", *part)]
    facts = rehearsed.environment or {}
    lines += ["", *entry("REHEARSED WITH", f"torch {facts.get('torch')}; Python {facts.get('python')}")]
    for note in rehearsed.notes:
        lines += ["", *wrap(f"Note: {note}", WIDTH)]
    return "\n".join(lines) + "\n"


def _only(trace: Trace, rank: int) -> Trace:
    return Trace(trace.origin, trace.spec, (trace.ranks[rank],), trace.environment)
