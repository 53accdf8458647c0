"""The tables under the picture, as HTML: what each rank holds and sends, predicted beside measured, to the byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from zeroviz.compare import UNEXPLAINED, Comparison, Moment, WireRow, compare
from zeroviz.scene import Scene
from zeroviz.spec import Strategy
from zeroviz.style import PAINT, label_of
from zeroviz.trace import CATEGORY_ORDER, Category, Trace

Ranks = tuple[int, ...]


def tables_html(scene: Scene, predicted: Trace, measured: Trace | None, *, earlier: bool = False) -> str:
    """Every table that the traces can fill. Without a run there is nothing to compare.

    Ranks come in the groups of the picture. earlier: `measured` is not of the last run, which failed.
    """
    ran = measured is not None
    # Compared with itself, a trace lists its categories; the differences are not shown then.
    comparison = compare(predicted, measured or predicted)
    groups = list(dict.fromkeys(row.ranks for row in scene.rows))
    parts = [_memory(comparison, groups, predicted.spec.strategy, ran), _wire(comparison, ran)]
    if measured is None:
        parts.append("<p>Not run yet: press Run on cluster to see measured bytes beside these.</p>")
    else:
        parts = [
            _summary(comparison, earlier),
            *parts,
            _allocator(comparison),
            _losses(measured),
            _environment(measured),
        ]
    return f'<div class="zeroviz-tables">{"".join(parts)}</div>'


def _summary(comparison: Comparison, earlier: bool) -> str:
    """One sentence a moment: whether measured equals predicted, and if not by how much at most.

    Where the allocator's own figure differs, that stands beside it: "to the byte" is said of the categories alone.
    """
    lines = ["Of the run before, because the last one did not end:"] if earlier else []
    for moment in (Moment.REST, Moment.PEAK):
        rows = [row for row in comparison.memory if row.moment is moment]
        num_ranks = len(comparison.totals(moment))
        worst = max(rows, key=lambda row: abs(row.difference))
        head = "At rest" if moment is Moment.REST else "At the peak"
        if worst.difference == 0:
            where = "on the only rank" if num_ranks == 1 else f"on each of {num_ranks} ranks"
            lines.append(f"{head}: measured equals predicted to the byte, in every category {where}.")
        else:
            what = "sum" if worst.category is None else PAINT[worst.category].label
            lines.append(
                f"{head}: measured and predicted differ by at most {_signed(worst.difference)} B "
                f"(rank {worst.rank}, {what}): {worst.cause}."
            )
    words = f'<p class="zeroviz-summary">{"<br>".join(map(escape, lines))}</p>'
    grown = [row for row in comparison.allocator if row.difference]
    if not grown:
        return words
    row = max(grown, key=lambda row: abs(row.difference))
    aside = (
        f"In the step the allocator grew by {abs(row.difference):,} B {'more' if row.difference > 0 else 'less'} than "
        f"the categories (rank {row.rank}"
        f"{', the most of all ranks' if len(comparison.totals(Moment.PEAK)) > 1 else ''}): {row.cause}."
    )
    return f'{words}<p class="zeroviz-aside">{escape(aside)}</p>'


def _memory(comparison: Comparison, groups: Sequence[Ranks], strategy: Strategy, ran: bool) -> str:
    body = []
    for ranks in groups:
        rest = {row.category: row for row in comparison.of_rank(ranks[0], Moment.REST)}
        peak = {row.category: row for row in comparison.of_rank(ranks[0], Moment.PEAK)}
        lines: list[Category | None] = [c for c in CATEGORY_ORDER if c in rest or c in peak]
        for category in [*lines, None]:
            rows = [(Moment.REST, rest.get(category)), (Moment.PEAK, peak.get(category))]
            name = "total" if category is None else category.value
            cells = "".join(
                _figures(
                    row.predicted if row else 0,
                    row.measured if row else 0,
                    ran,
                    f'data-rank="{ranks[0]}" data-moment="{moment.value}" data-category="{name}"',
                    row.cause if row else "",
                )
                for moment, row in rows
            )
            causes = dict.fromkeys(row.cause for _, row in rows if row and row.cause)
            words = "total" if category is None else _swatch(category, strategy, held=category in rest)
            first = f'<th scope="rowgroup" rowspan="{len(lines) + 1}">{_rank_words(ranks)}</th>'
            body.append(
                f'<tr class="zeroviz-{"total" if category is None else "category"}">'
                f"{first if category == [*lines, None][0] else ''}"
                f'<th scope="row">{words}</th>{cells}'
                f"{_words('; '.join(causes), ran)}</tr>"
            )
    span = 3 if ran else 1
    head = (
        f'<tr><th rowspan="2">rank</th><th rowspan="2">category</th><th colspan="{span}">at rest, bytes</th>'
        f'<th colspan="{span}">at the peak, bytes</th>{_cause_head(ran, rowspan=2)}</tr>'
        f"<tr>{_source_heads(ran) * 2}</tr>"
    )
    return _table("What each rank holds", "memory", head, body)


def _wire(comparison: Comparison, ran: bool) -> str:
    alike: dict[tuple[object, ...], list[WireRow]] = {}
    for row in comparison.wire:
        alike.setdefault((row.predicted, row.measured, row.cause), []).append(row)
    body = []
    for rows in alike.values():
        row = rows[0]
        ranks = tuple(each.rank for each in rows)
        figures = (
            ("calls", row.predicted.count, row.measured.count, ""),
            ("payload, the whole array", row.predicted.payload_nbytes, row.measured.payload_nbytes, " B"),
            ("sent by a rank in a ring", row.predicted.sent_nbytes, row.measured.sent_nbytes, " B"),
        )
        for number, (figure, predicted, measured, unit) in enumerate(figures):
            data = f'data-rank="{row.rank}" data-op="{row.op.value}" data-figure="{figure}"'
            first = f'<th rowspan="3">{_rank_words(ranks)}</th><th rowspan="3">{row.op.value}<br>{row.dtype}</th>'
            body.append(
                f'<tr>{"" if number else first}<th scope="row">{figure}</th>'
                f"{_figures(predicted, measured, ran, data, row.cause, unit)}{_words(row.cause, ran)}</tr>"
            )
    if not body:
        body.append('<tr><td colspan="7" class="zeroviz-words">Nothing: one rank has nobody to send to.</td></tr>')
    head = f"<tr><th>rank</th><th>collective</th><th>figure</th>{_source_heads(ran)}{_cause_head(ran)}</tr>"
    return _table("What each rank sends in one step", "wire", head, body)


def _allocator(comparison: Comparison) -> str:
    if not comparison.allocator:
        return ""
    body = [
        f"<tr><th>rank {row.rank}</th>"
        f"<td>{row.categories_growth_nbytes:,}</td><td>{row.allocator_growth_nbytes:,}</td>"
        f"{_difference(row.difference, row.cause)}{_words(row.cause, True)}"
        f"{_difference(row.outside_nbytes, row.outside_cause)}{_words(row.outside_cause, True)}</tr>"
        for row in comparison.allocator
    ]
    source = escape(", ".join(dict.fromkeys(row.source for row in comparison.allocator)))
    head = (
        '<tr><th rowspan="2">rank</th><th colspan="4">growth from rest to the peak, bytes</th>'
        '<th colspan="2">at rest beyond the categories</th></tr>'
        "<tr><th>categories</th><th>allocator</th><th>difference</th><th>cause</th><th>bytes</th><th>cause</th></tr>"
    )
    return _table(f"The allocator's own figures ({source})", "allocator", head, body)


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
    return _table("Loss of each rank on its own batch", "losses", head, body)


def _environment(measured: Trace) -> str:
    facts = measured.environment
    if not facts:
        return ""
    known = {name: facts[name] for name in ("backend", "torch", "python", "platform", "engines") if facts.get(name)}
    words = "; ".join(f"{name} {value}" for name, value in known.items())
    return f'<p class="zeroviz-environment">Measured on: {escape(words)}.</p>'


def _table(caption: str, name: str, head: str, body: Iterable[str]) -> str:
    return (
        f'<div class="zeroviz-scroll" tabindex="0"><table class="zeroviz-{name}"><caption>{caption}</caption>'
        f"<thead>{head}</thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _figures(predicted: int, measured: int, ran: bool, data: str, cause: str, unit: str = " B") -> str:
    """Cells: predicted and, after a run, measured and difference. `data` marks them for whoever reads by machine."""
    ours = f'<td {data} data-source="predicted">{predicted:,}</td>'
    if not ran:
        return ours
    theirs = f'<td {data} data-source="measured">{measured:,}</td>'
    return ours + theirs + _difference(measured - predicted, cause, unit, data)


def _difference(difference: int, cause: str, unit: str = " B", data: str = "") -> str:
    kind = "unexplained" if UNEXPLAINED in cause else "differs" if difference else "zero"
    return f'<td {data} data-source="difference" class="zeroviz-{kind}">{_signed(difference)}{unit}</td>'


def _words(text: str, ran: bool) -> str:
    return f'<td class="zeroviz-words">{escape(text) or "none"}</td>' if ran else ""


def _source_heads(ran: bool) -> str:
    return "<th>predicted</th><th>measured</th><th>difference</th>" if ran else "<th>predicted</th>"


def _cause_head(ran: bool, rowspan: int = 1) -> str:
    return f'<th rowspan="{rowspan}">cause of the difference</th>' if ran else ""


def _signed(difference: int) -> str:
    return f"{difference:+,}" if difference else "0"


def _rank_words(ranks: Ranks) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _swatch(category: Category, strategy: Strategy, *, held: bool) -> str:
    """Solid for what is held at rest, hatched for the rest, as in the picture."""
    paint = PAINT[category]
    background = paint.color if held else f"{_stripes(paint.hatch)}, {paint.color}"
    return f'<i style="background:{background}"></i>{escape(label_of(category, strategy))}'


def _stripes(hatch: str) -> str:
    """A hatch as CSS gradients, one a direction."""
    angles = {"/": "-45deg", "\\": "45deg", "|": "90deg", "-": "0deg"}
    crossed = {"x": "/\\", "+": "|-"}.get(hatch[0], hatch[0])
    return ", ".join(
        f"repeating-linear-gradient({angles[mark]}, #1a1a1a 0 1px, transparent 1px 4px)" for mark in crossed
    )
