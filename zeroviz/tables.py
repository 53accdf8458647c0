"""Text tables for the terminal, 80 columns wide: what a Trace says, for a person.

Ranks that hold and send the same are one table. Exact bytes stand beside a decimal unit (GB, MB) and a binary one
(GiB, MiB), each under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap

from zeroviz.collectives import CollectiveOp, Group
from zeroviz.columns import WIDTH, columns, entry
from zeroviz.compare import place_text
from zeroviz.gathered import divided_nbytes
from zeroviz.models import Family
from zeroviz.partition import Unit, padding_numel, plan_for
from zeroviz.quantity import format_binary_nbytes, format_decimal_nbytes
from zeroviz.rank_trace import alike
from zeroviz.spec import Implementation, RunSpec, Strategy
from zeroviz.tables_host import host_table, link_table
from zeroviz.tables_options import batch_text, option_entries, scales_nbytes, unit_entries
from zeroviz.tables_step import step_table
from zeroviz.trace import Category, RankTrace, Trace, WireTotal
from zeroviz.witness.flat import flat_units
from zeroviz.wording import counters_text, overlap_options, parameters_text, ranks_text, recipe_sum, strategy_label

MAX_UNIT_LINES = 12
_HEADER_LABEL_WIDTH = 10

_HELD = {
    Strategy.DDP: "parameters, gradients and optimizer state whole on every rank",
    Strategy.ZERO1: "optimizer state 1/N; parameters and gradients whole",
    Strategy.ZERO2: "optimizer state and gradients 1/N; parameters whole",
    Strategy.ZERO3: "all states 1/N; a unit's parameters are gathered while it is used",
    Strategy.SHARD_GRAD_OP: "all states 1/N at rest; parameters gathered in forward, kept to backward",
    Strategy.HYBRID_SHARD: "all states 1/G in groups of G ranks, which are copies; units gathered while used",
    Strategy.MEGATRON_OPTIM: "optimizer state 1/N of one buffer; parameters and gradients whole",
}


@dataclass(frozen=True)
class RankGroup:
    """Ranks that hold the same bytes at rest and at the peak and send the same; `first` stands for all of them."""

    stretches: tuple[range, ...]
    first: RankTrace

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.stretches))

    @property
    def label(self) -> str:
        return stretch_label(self.stretches)


def render(trace: Trace) -> str:
    """The whole report of one trace."""
    lines = header(trace)
    for group in rank_groups(trace):
        every = "each rank" if group.num_ranks == len(trace.ranks) else group.label
        parts = [
            _at_rest(trace, group, every),
            _at_peak(trace.spec, group, every),
            step_table(every, group.first),
            _wire(group, every),
            link_table(every, group.first),
        ]
        lines += [line for part in parts if part for line in ("", *part)]
    for note in trace.notes:
        lines += ["", *wrap(f"Note: {note}", WIDTH)]
    return "\n".join(lines) + "\n"


def header(trace: Trace) -> list[str]:
    """Origin, strategy, model, recipe and units."""
    spec = trace.spec
    model = spec.model
    sizes = "" if model.family is Family.BARE else f" ({parameters_text(model)})"
    ranks = ranks_text(spec)
    title = f"{trace.origin.value.upper()}: {strategy_label(spec)} on {ranks}, {model.name}{sizes}"
    lines = [*wrap(title, WIDTH, subsequent_indent="  "), ""]
    lines += entry("strategy", _HELD[spec.strategy], _HEADER_LABEL_WIDTH)
    lines += entry("recipe", f"{spec.precision.value}: {recipe_sum(spec, 'bytes/param')}", _HEADER_LABEL_WIDTH)
    if options := ", ".join(overlap_options(spec)):
        lines += entry("options", options, _HEADER_LABEL_WIDTH)
    for label, text in (*option_entries(spec), ("batch", batch_text(spec))):
        lines += entry(label, text, _HEADER_LABEL_WIDTH)
    return [*lines, "", *_units(spec)]


def rank_label(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2`, `ranks 0-2, 5`."""
    return stretch_label([range(rank, rank + 1) for rank in ranks])


def stretch_label(stretches: Sequence[range]) -> str:
    """The same of stretches of ranks, in order; neighbours are joined."""
    joined: list[range] = []
    for ranks in stretches:
        if joined and joined[-1].stop == ranks.start:
            joined[-1] = range(joined[-1].start, ranks.stop)
        else:
            joined.append(ranks)
    spans = [str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}" for span in joined]
    many = len(joined) > 1 or len(joined[0]) > 1
    return f"rank{'s' * many} {', '.join(spans)}"


def rank_groups(trace: Trace) -> tuple[RankGroup, ...]:
    """Fold ranks that are alike."""
    groups: dict[tuple[object, ...], list[tuple[range, RankTrace]]] = {}
    seen: dict[tuple[int, int, int], tuple[object, ...]] = {}
    for ranks, rank in alike(trace.ranks):
        # Predicted ranks share their lists, so identity spares a walk over the same events for each of 1,024 ranks.
        identity = (id(rank.rest), id(rank.events), id(rank.collectives))
        if identity not in seen:
            peak = rank.peak()
            held = (tuple(rank.at_rest.items()), peak.total, peak.phase, peak.op, peak.unit)
            seen[identity] = (*held, tuple(peak.by_category.items()), rank.wire())
        groups.setdefault(seen[identity], []).append((ranks, rank))
    return tuple(RankGroup(tuple(ranks for ranks, _ in group), group[0][1]) for group in groups.values())


def _padding_lines(trace: Trace) -> list[str]:
    """How much of the rest, the host's included, is padding, ranks that pad alike folded; nothing if there is none."""
    by_nbytes: dict[int, list[range]] = {}
    num_shards = trace.spec.num_shards
    for ranks, rank in alike(trace.ranks):
        if ranks.start >= num_shards:  # the other shard groups are copies
            break
        by_nbytes.setdefault(rank.padding_nbytes, []).append(range(ranks.start, min(ranks.stop, num_shards)))
    if set(by_nbytes) == {0}:
        return []
    if len(by_nbytes) > 4:
        text = f"from {min(by_nbytes):,} B to {max(by_nbytes):,} B a rank"
    else:
        each = " of each group" if trace.spec.num_replicas > 1 else ""
        text = "; ".join(f"{stretch_label(ranks)}{each}: {nbytes:,} B" for nbytes, ranks in by_nbytes.items())
    has_host = bool(trace.ranks[0].at_rest_on_host)
    return entry("  of both, padding" if has_host else "  of this, padding", text)


def _at_rest(trace: Trace, group: RankGroup, every: str) -> list[str]:
    num_params = trace.spec.model.num_params
    lines = _held_table(f"AT REST, {every}", group.first.at_rest, num_params)
    lines += host_table(every, group.first, num_params)
    if scales := scales_nbytes(trace.spec):
        lines += entry("  of this, scales", f"{scales:,} B, fp32, of the quantized moments")
    lines += _padding_lines(trace)
    if counters := group.first.step_counter_nbytes:
        lines += entry("  not counted", counters_text(trace.spec, counters))
    return lines


def _at_peak(spec: RunSpec, group: RankGroup, every: str) -> list[str]:
    peak = group.first.peak()
    lines = [*_held_table(f"AT THE PEAK, {every}", peak.by_category), *entry("  when", place_text(peak))]
    divided = divided_nbytes(spec, peak)
    text = f"{format_decimal_nbytes(divided)}; {format_decimal_nbytes(peak.total - divided)} do not"
    name = "N" if spec.shard_ranks is None else "G"  # more shard groups hold no less
    return lines + entry(f"  falls with {name}", text if divided else f"nothing: it is the same whatever {name}")


def _held_table(title: str, held: Mapping[Category, int], num_params: int | None = None) -> list[str]:
    def row(label: str, nbytes: int) -> list[str]:
        share = [f"{nbytes / num_params:.3f}"] if num_params else []
        return [f"  {label}", f"{nbytes:,}", format_decimal_nbytes(nbytes), format_binary_nbytes(nbytes), *share]

    rows = [[title, "bytes", "decimal", "binary", *(["B/param"] if num_params else [])]]
    rows += [row(category.value, nbytes) for category, nbytes in held.items()]
    rows.append(row("total", sum(held.values())))
    return columns(rows)


def _wire(group: RankGroup, every: str) -> list[str]:
    totals = group.first.wire()
    if not totals:
        return [f"ON THE WIRE, {every}: nothing; one rank has nobody to send to."]
    rows = [[f"ON THE WIRE, {every}", "calls", "payload", "sent", "sent"]]
    rows += [
        [
            f"  {total.label}",
            f"{total.count:,}",
            format_decimal_nbytes(total.payload_nbytes),
            format_decimal_nbytes(total.sent_nbytes),
            format_binary_nbytes(total.sent_nbytes),
        ]
        for total in totals
    ]
    sent = group.first.sent_nbytes
    rows.append(
        ["  total", f"{sum(t.count for t in totals):,}", "", format_decimal_nbytes(sent), format_binary_nbytes(sent)]
    )
    return [*columns(rows, min_width=11), *entry("  sent in a ring", _ring_text(totals))]


def _ring_text(totals: Sequence[WireTotal]) -> str:
    """`2/3 of the payload, all_reduce 2 x 2/3`; of several groups each with its name."""
    parts = []
    for group, num_ranks in dict.fromkeys((total.group, total.num_ranks) for total in totals):
        ops = {total.op for total in totals if total.group is group}
        ring = f"{num_ranks - 1:,}/{num_ranks:,}"
        if ops == {CollectiveOp.ALL_REDUCE} and group is Group.REPLICA:
            text = f"2 x {ring} of the payload"
        else:
            text = f"{ring} of the payload" + f", all_reduce 2 x {ring}" * (CollectiveOp.ALL_REDUCE in ops)
        parts.append(f"{group.words}: {text}" if group.words else text)
    return "; ".join(parts)


def _units(spec: RunSpec) -> list[str]:
    units = plan_for(spec).units
    largest = max(units, key=lambda unit: unit.numel)
    rows = [[f"units ({spec.unit})", "elements", "padding", ""]]
    for run in _runs(units):
        first, last = run[0], run[-1]
        name = first.name if len(run) == 1 else f"{len(run)} x {first.name} .. {last.name}"
        mark = f"largest, {largest.numel / spec.model.num_params:.0%}" if largest in run and len(units) > 1 else ""
        rows.append([f"  {name}", f"{first.numel:,}", _padding_text(first, spec), mark])
    if len(rows) > MAX_UNIT_LINES + 1:
        middle = rows[MAX_UNIT_LINES - 1 : -1]
        folded = [row for row in middle if row[3]]
        gap = [[f"  .. {len(middle) - len(folded)} lines more", "", "", ""]]
        rows = [*rows[: MAX_UNIT_LINES - 1], *gap, *folded, rows[-1]]
    lines = columns(rows)
    for label, text in unit_entries(spec):
        lines += entry(label, text)
    return lines


def _padding_text(unit: Unit, spec: RunSpec) -> str:
    """Elements of padding in the unit; a dash where not units are padded, but what holds all of them."""
    if spec.impl is Implementation.OWN and spec.strategy.has_whole_buffer:
        return "-"
    if spec.impl in (Implementation.OWN, Implementation.FSDP2):
        return f"{padding_numel(unit, spec):,}"
    if spec.impl is Implementation.FSDP1:
        return f"{flat_units(spec)[unit.index].gathered_numel - unit.numel:,}"
    whole = spec.impl in (Implementation.DDP, Implementation.ZERO_REDUNDANCY)
    return "0" if whole else "-"


def _runs(units: Sequence[Unit]) -> list[list[Unit]]:
    """Neighbours of equal numel as one, once there are more than a dozen units."""
    if len(units) <= MAX_UNIT_LINES:
        return [[unit] for unit in units]
    return [list(run) for _, run in groupby(units, lambda unit: unit.numel)]
