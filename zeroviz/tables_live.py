"""Text tables of a live run: what was predicted beside what was measured, exact bytes and their difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from textwrap import wrap

from zeroviz.columns import WIDTH, columns, entry
from zeroviz.compare import (
    AllocatorRow,
    Comparison,
    MemoryRow,
    WireRow,
    compare,
    is_unexplained,
    outside_words,
    place_text,
)
from zeroviz.quantity import format_decimal_nbytes
from zeroviz.residuals import ONE_MEMORY, Held, Residual, op_notes, residuals
from zeroviz.tables import header, rank_groups, rank_label
from zeroviz.tables_device import device_section
from zeroviz.tables_host import link_table
from zeroviz.tables_step import step_table
from zeroviz.trace import Peak, RankTrace, Trace
from zeroviz.wording import counters_text

MAX_LOSS_RANKS = 8
MAX_LOSS_STEPS = 5

Names = tuple[str, str]
"""What the two sides are called: predicted and measured, predicted and rehearsed, rehearsed and measured."""


def render_live(predicted: Trace, measured: Trace) -> str:
    """The whole report of a live run beside its prediction, or beside its rehearsal where there is no prediction."""
    lines = header(measured)
    comparison = compare(predicted, measured)
    names = _names(predicted, measured)
    for group in rank_groups(measured):
        every = "each rank" if group.num_ranks == len(measured.ranks) else group.label
        ours, theirs = predicted.ranks[group.first.rank], group.first
        parts = [*rank_tables(every, comparison, ours, theirs, names), wrap(outside_words(theirs), WIDTH)]
        parts += [step_table(every, ours, theirs, names), *wire_tables(every, comparison, ours, theirs, names)]
        lines += [line for part in parts if part for line in ("", *part)]
    lines += [*_allocator(comparison, measured), *device_section(measured)]
    lines += [*_losses(measured), *_step_time(measured), *_environment(measured)]
    for note in measured.notes:
        lines += ["", *wrap(f"Note: {note}", WIDTH)]
    return "\n".join(lines) + "\n"


def _names(*traces: Trace) -> Names:
    """By where they come from; two of one origin by their order too."""
    first, second = (trace.origin.label for trace in traces)
    return (first, second) if first != second else (f"{first} 1", f"{second} 2")


def rank_tables(
    every: str, comparison: Comparison, ours: RankTrace, theirs: RankTrace, names: Names
) -> list[list[str]]:
    """What a rank holds on the two sides, table by table, and the ops that differ."""
    found = residuals(comparison, theirs.rank, theirs.step_counter_nbytes)
    tables = [_residual(every, residual, ours, theirs, names) for residual in found]
    return [*tables, _differing_ops(comparison, theirs, names)]


def wire_tables(
    every: str, comparison: Comparison, ours: RankTrace, theirs: RankTrace, names: Names
) -> list[list[str]]:
    """What a rank sends, and what it moves over its link, on the two sides."""
    rows = [row for row in comparison.wire if row.rank == theirs.rank]
    return [_wire(f"ON THE WIRE, {every}", rows, names), link_table(every, ours, theirs, names)]


def _heads(names: Names) -> list[str]:
    return [*names, "difference", names[1]]


def _pair(label: str, expected: int, got: int) -> list[str]:
    difference = f"{got - expected:+,}" if got != expected else "0"
    return [f"  {label}", f"{expected:,}", f"{got:,}", difference, format_decimal_nbytes(got)]


def _residual(every: str, residual: Residual, ours: RankTrace, theirs: RankTrace, names: Names) -> list[str]:
    """One table: categories, their sum, what of it is unexplained, and the causes of the rest."""
    table = [[f"{residual.held.value.upper()}, {every}", *_heads(names)]]
    table += [_pair(_label(row), row.predicted, row.measured) for row in residual.rows]
    if counters := residual.step_counter_nbytes:
        table.append(_pair("step counters", counters, counters))
    table.append(_pair("total", residual.total.predicted, residual.total.measured))
    table.append(["  unexplained", "", "", f"{residual.unexplained_nbytes:,}", ""])
    lines = columns(table)
    if residual.joins_host:
        lines += entry("  host", ONE_MEMORY)
    for cause, rows in residual.causes:
        lines += entry("  why", f"{', '.join(map(_label, rows))}: {cause}")
    if residual.held is Held.NCCL:
        lines += _when(ours.peak(), theirs.peak(), names)
    elif residual.held is Held.HERE:
        lines += _when(ours.machine_peak(), theirs.machine_peak(), names)
    return lines


def _label(row: MemoryRow) -> str:
    return row.category.value if row.category else "total"


def _when(expected: Peak, got: Peak, names: Names) -> list[str]:
    places = place_text(expected), place_text(got)
    if places[0] == places[1]:
        return entry("  when, both", places[0])
    return [line for name, place in zip(names, places, strict=True) for line in entry(f"  when, {name}", place)]


def _differing_ops(comparison: Comparison, rank: RankTrace, names: Names) -> list[str]:
    """The ops that are not as predicted, by cause, and what is still held when the step is over."""
    lines = []
    for note in op_notes(comparison, rank.rank):
        ops = f"{note.num_ops:,} op" + "s" * (note.num_ops > 1)
        most = f"by up to {note.largest:+,} B" if note.largest else "the most as predicted and something else left"
        words = f"{note.figure.value}, {most}, first in {note.place}: {note.cause}"
        lines += entry(f"NOT AS {names[0].upper()}, {ops}", words, label_width=30)
    for leak in (leak for leak in comparison.leaks if leak.rank == rank.rank):
        words = f"{leak.nbytes:+,} B of {leak.category.value}, left by {leak.place}: {leak.cause}"
        lines += entry("STILL HELD AT THE END", words, label_width=30)
    return lines


def _wire(title: str, rows: Sequence[WireRow], names: Names) -> list[str]:
    if not rows:
        return [f"{title}: nothing; one rank has nobody to send to."]
    table = [[title, *_heads(names)]]
    for row in rows:
        calls = dict.fromkeys((row.predicted.count, row.measured.count))
        label = f"{'/'.join(map(str, calls))} x {row.predicted.label}"
        table.append(_pair(label, row.predicted.sent_nbytes, row.measured.sent_nbytes))
    sent = (sum(row.predicted.sent_nbytes for row in rows), sum(row.measured.sent_nbytes for row in rows))
    table.append(_pair("sent in a ring", *sent))
    unexplained = sum(abs(row.difference) for row in rows if is_unexplained(row.cause))
    table.append(["  unexplained", "", "", f"{unexplained:,}", ""])
    return columns(table)


def _allocator(comparison: Comparison, measured: Trace) -> list[str]:
    """The allocator's figures beside the measured categories: two meters of one process, never mixed."""
    alike: dict[tuple[object, ...], list[AllocatorRow]] = {}
    for row in comparison.allocator:
        rank = measured.ranks[row.rank]
        figures = (replace(row, rank=0), rank.rest_nbytes, rank.step_counter_nbytes)
        alike.setdefault(figures, []).append(row)
    lines: list[str] = []
    for rows in alike.values():
        row = rows[0]
        every = "each rank" if len(rows) == len(measured.ranks) else rank_label([row.rank for row in rows])
        rest = measured.ranks[row.rank].rest_nbytes
        table = [
            [f"ALLOCATOR, {every}", "categories", "allocator", "difference", "allocator"],
            _pair("at rest", rest, rest + row.outside_nbytes),
            _pair("growth to the peak", row.categories_growth_nbytes, row.allocator_growth_nbytes),
        ]
        lines += ["", *columns(table)]
        if row.unattributed_nbytes:
            lines += entry("  unattributed", f"{row.unattributed_nbytes:,} B of the allocator's total without a block")
        if counters := measured.ranks[row.rank].step_counter_nbytes:
            lines += entry("  of it at rest", counters_text(measured.spec, counters))
        lines += entry("  why", row.cause) if row.cause else []
        lines += entry("  read from", row.source)
    return lines


def _losses(trace: Trace) -> list[str]:
    ranks = [rank for rank in trace.ranks if rank.losses]
    if not ranks:
        return []
    num_steps = len(ranks[0].losses)
    steps = list(range(num_steps))
    if num_steps > MAX_LOSS_STEPS:
        steps = [0, *steps[-(MAX_LOSS_STEPS - 1) :]]

    def row(label: str, losses: Sequence[float]) -> list[str]:
        return [f"  {label}", *(f"{losses[step]:.4f}" for step in steps)]

    rows = [["LOSS", *(f"step {step + 1:,}" for step in steps)]]
    if len(ranks) <= MAX_LOSS_RANKS:
        rows += [row(f"rank {rank.rank}", rank.losses) for rank in ranks]
    means = [sum(rank.losses[step] for rank in ranks) / len(ranks) for step in range(num_steps)]
    rows.append(row("mean of the ranks", means))
    return ["", *columns(rows, min_width=11)]


def _step_time(trace: Trace) -> list[str]:
    times = [rank.step_time_ns for rank in trace.ranks if rank.step_time_ns]
    if not times:
        return []
    slowest = [max(step) / 1e6 for step in zip(*times, strict=True)]
    shown = slowest if len(slowest) <= MAX_LOSS_STEPS else slowest[-(MAX_LOSS_STEPS - 1) :]
    which = "each step" if shown is slowest else f"last {len(shown)} steps"
    return ["", *entry("STEP TIME", f"{', '.join(f'{ms:,.1f}' for ms in shown)} ms ({which}, slowest rank)")]


def _environment(trace: Trace) -> list[str]:
    facts = trace.environment
    if not facts:
        return []
    devices = facts.get("gpus") or facts.get("devices") or []
    words = [
        f"torch {facts.get('torch')}",
        f"Python {facts.get('python')}",
        f"{facts.get('backend')} on {', '.join(dict.fromkeys(devices))}",
        f"{facts.get('host_cores')} cores",
        f"{facts.get('engines')} engines, ready after {facts.get('start_s')} s, run in {facts.get('run_s')} s",
    ]
    return ["", *entry("ENVIRONMENT", "; ".join(words))]
