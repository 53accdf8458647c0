"""The tables under the picture, as HTML: what each rank holds and sends, predicted beside measured, to the byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from zeroviz.compare import Comparison, LinkRow, Moment, WireRow, compare, outside_words
from zeroviz.labels import Say, say_html
from zeroviz.panel.cells import Ranks, cause_cell, cause_head, difference, figures, signed, source_heads, table
from zeroviz.panel.memory import memory_table
from zeroviz.residuals import alone, op_notes, senders
from zeroviz.scene import Scene
from zeroviz.style import PAINT
from zeroviz.trace import Trace
from zeroviz.wording import ranks_words

MAX_ASIDES = 6
Whose = Mapping[int, Ranks]
"""The ranks that a row stands for, by the one that it is of; of a rank that is not here, itself."""
_HEADS = {
    Moment.REST: "At rest",
    Moment.PEAK: "At the peak, as on NCCL",
    Moment.MACHINE_PEAK: "At the peak, as here",
}


def tables_html(
    scene: Scene, predicted: Trace, measured: Trace | None, *, earlier: bool = False, say: Say = str
) -> str:
    """Every table that the traces can fill. Without a run there is nothing to compare.

    Ranks come in the groups of the picture. earlier: `measured` is not of the last run, which failed. say: what each
    label is put as.
    """
    ran = measured is not None
    groups = list(dict.fromkeys(row.ranks for row in scene.rows))
    whose = {} if ran else senders(predicted)
    comparison = compare(predicted, measured) if measured is not None else alone(predicted, groups, whose)
    parts = [memory_table(comparison, groups, measured or predicted, ran=ran)]
    parts += [_wire(comparison, whose, ran), _link(comparison, whose, ran)]
    if measured is None:
        parts.append("<p>Not run yet: press Run on cluster to see measured bytes beside these.</p>")
    else:
        parts = [
            _summary(comparison, earlier),
            *parts,
            f'<p class="zeroviz-outside">{escape(outside_words(measured.ranks[0]))}</p>',
            _allocator(comparison),
            _losses(measured),
            _environment(measured),
        ]
    return say_html(f'<div class="zeroviz-tables">{"".join(parts)}</div>', say)


def _summary(comparison: Comparison, earlier: bool) -> str:
    """One sentence a moment: whether measured equals predicted, and if not by how much at most.

    Where the allocator's own figure differs, that stands beside it: "to the byte" is said of the categories alone.
    """
    lines = ["Of the run before, because the last one did not end:"] if earlier else []
    for moment, head in _HEADS.items():
        rows = [row for row in comparison.memory if row.moment is moment]
        if not rows:
            continue
        num_ranks = len(comparison.totals(moment))
        worst = max(rows, key=lambda row: abs(row.difference))
        if worst.difference == 0:
            where = "on the only rank" if num_ranks == 1 else f"on each of {num_ranks} ranks"
            lines.append(f"{head}: measured equals predicted to the byte, in every category {where}.")
        else:
            what = "sum" if worst.category is None else PAINT[worst.category].label
            lines.append(
                f"{head}: measured and predicted differ by at most {signed(worst.difference)} B "
                f"(rank {worst.rank}, {what}): {worst.cause}."
            )
    words = f'<p class="zeroviz-summary">{"<br>".join(map(escape, lines))}</p>'
    return words + "".join(f'<p class="zeroviz-aside">{escape(aside)}</p>' for aside in _asides(comparison))


def _asides(comparison: Comparison) -> list[str]:
    """Ops that are not as predicted, by cause, what the step leaves behind, and what the allocator saw besides."""
    asides = []
    for rank in dict.fromkeys(row.rank for row in comparison.ops):
        for note in op_notes(comparison, rank):
            ops = f"{note.num_ops:,} op" + "s" * (note.num_ops > 1)
            asides.append(
                f"Rank {rank}, {note.figure.value}: {ops} not as predicted, by up to {signed(note.largest)} B, first "
                f"in {note.place}: {note.cause}."
            )
    for leak in comparison.leaks:
        held = f"{signed(leak.nbytes)} B of {PAINT[leak.category].label}"
        asides.append(
            f"Rank {leak.rank}: still held when the step is over, {held}, left by {leak.place}: {leak.cause}."
        )
    if len(asides) > MAX_ASIDES:
        asides = [*asides[:MAX_ASIDES], f"And {len(asides) - MAX_ASIDES} more."]
    grown = [row for row in comparison.allocator if row.difference]
    if grown:
        row = max(grown, key=lambda row: abs(row.difference))
        most = ", the most of all ranks" if len(comparison.totals(Moment.PEAK)) > 1 else ""
        asides.append(
            f"In the step the allocator grew by {abs(row.difference):,} B {'more' if row.difference > 0 else 'less'} "
            f"than the categories (rank {row.rank}{most}): {row.cause}."
        )
    return asides


def _wire(comparison: Comparison, whose: Whose, ran: bool) -> str:
    alike: dict[tuple[object, ...], list[WireRow]] = {}
    for row in comparison.wire:
        alike.setdefault((row.predicted, row.measured, row.cause), []).append(row)
    body = []
    for rows in alike.values():
        row = rows[0]
        ranks = _ranks_of(rows, whose)
        lines = (
            ("calls", row.predicted.count, row.measured.count, ""),
            ("payload, the whole array", row.predicted.payload_nbytes, row.measured.payload_nbytes, " B"),
            ("sent by a rank in a ring", row.predicted.sent_nbytes, row.measured.sent_nbytes, " B"),
        )
        for number, (figure, predicted, measured, unit) in enumerate(lines):
            group = row.predicted.group
            data = f'data-rank="{row.rank}" data-op="{row.op.value}" data-group="{group.value}" data-figure="{figure}"'
            name = f"{row.op.value}<br>{row.dtype} {group.words}".rstrip()
            first = f'<th rowspan="3">{ranks_words(ranks)}</th><th rowspan="3">{name}</th>'
            body.append(
                f'<tr>{"" if number else first}<th scope="row">{figure}</th>'
                f"{figures(predicted, measured, ran, data, row.cause, unit)}{cause_cell(row.cause, ran)}</tr>"
            )
    if not body:
        body.append('<tr><td colspan="7" class="zeroviz-words">Nothing: one rank has nobody to send to.</td></tr>')
    head = f"<tr><th>rank</th><th>collective</th><th>figure</th>{source_heads(ran)}{cause_head(ran)}</tr>"
    return table("What each rank sends in one step", "wire", head, body)


def _ranks_of(rows: Sequence[WireRow] | Sequence[LinkRow], whose: Whose) -> Ranks:
    """All that the rows are of: a row's own rank, or those that it stands for."""
    return tuple(sorted(rank for row in rows for rank in whose.get(row.rank, (row.rank,))))


def _link(comparison: Comparison, whose: Whose, ran: bool) -> str:
    """What offloading copies; nothing where nothing is offloaded."""
    alike: dict[tuple[object, ...], list[LinkRow]] = {}
    for row in comparison.link:
        alike.setdefault((row.direction, row.dtype, row.predicted, row.measured, row.cause), []).append(row)
    body = []
    for rows in alike.values():
        row = rows[0]
        ranks = _ranks_of(rows, whose)
        lines = (
            ("copies", row.predicted.count, row.measured.count, ""),
            ("copied", row.predicted.nbytes, row.measured.nbytes, " B"),
        )
        for number, (figure, predicted, measured, unit) in enumerate(lines):
            data = f'data-rank="{row.rank}" data-direction="{row.direction.value}" data-figure="{figure}"'
            name = f"{row.direction.value}<br>{row.dtype}"
            first = f'<th rowspan="2">{ranks_words(ranks)}</th><th rowspan="2">{name}</th>'
            body.append(
                f'<tr>{"" if number else first}<th scope="row">{figure}</th>'
                f"{figures(predicted, measured, ran, data, row.cause, unit)}{cause_cell(row.cause, ran)}</tr>"
            )
    if not body:
        return ""
    head = f"<tr><th>rank</th><th>direction</th><th>figure</th>{source_heads(ran)}{cause_head(ran)}</tr>"
    return table("What a rank copies between device and host in one step", "link", head, body)


def _allocator(comparison: Comparison) -> str:
    if not comparison.allocator:
        return ""
    body = [
        f"<tr><th>rank {row.rank}</th>"
        f"<td>{row.categories_growth_nbytes:,}</td><td>{row.allocator_growth_nbytes:,}</td>"
        f"{difference(row.difference, row.cause)}{cause_cell(row.cause, True)}"
        f"{difference(row.outside_nbytes, row.outside_cause)}{cause_cell(row.outside_cause, True)}</tr>"
        for row in comparison.allocator
    ]
    source = escape(", ".join(dict.fromkeys(row.source for row in comparison.allocator)))
    head = (
        '<tr><th rowspan="2">rank</th><th colspan="4">growth from rest to the peak, bytes</th>'
        '<th colspan="2">at rest beyond the categories</th></tr>'
        "<tr><th>categories</th><th>allocator</th><th>difference</th><th>cause</th><th>bytes</th><th>cause</th></tr>"
    )
    return table(f"The allocator's own figures ({source})", "allocator", head, body)


def _losses(measured: Trace) -> str:
    ranks = [rank for rank in measured.ranks if rank.losses]
    if not ranks:
        return ""
    steps = range(len(ranks[0].losses))
    body = [
        f"<tr><th>rank {rank.rank}</th>{''.join(f'<td>{loss:.6f}</td>' for loss in rank.losses)}</tr>"
        for rank in ranks
    ]  # fmt: skip
    means = (sum(rank.losses[step] for rank in ranks) / len(ranks) for step in steps)
    body.append(f'<tr class="zeroviz-total"><th>mean</th>{"".join(f"<td>{mean:.6f}</td>" for mean in means)}</tr>')
    head = f"<tr><th>rank</th>{''.join(f'<th>step {step + 1}</th>' for step in steps)}</tr>"
    return table("Loss of each rank on its own batch", "losses", head, body)


def _environment(measured: Trace) -> str:
    facts = measured.environment
    if not facts:
        return ""
    known = {name: facts[name] for name in ("backend", "torch", "python", "platform", "engines") if facts.get(name)}
    words = "; ".join(f"{name} {value}" for name, value in known.items())
    return f'<p class="zeroviz-environment">Measured on: {escape(words)}.</p>'
