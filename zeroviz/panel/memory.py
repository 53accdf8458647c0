"""The residual table under the picture: what each rank holds at rest and at the peak, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence

from zeroviz.category import CATEGORY_ORDER
from zeroviz.compare import Comparison, MemoryRow
from zeroviz.panel.cells import (
    Ranks,
    cause_cell,
    cause_head,
    difference,
    figures,
    source_heads,
    swatch,
    table,
)
from zeroviz.residuals import ONE_MEMORY, Held, Residual, residuals
from zeroviz.trace import Trace
from zeroviz.wording import ranks_words

_MOMENT = {Held.REST: "at rest", Held.HOST: "at rest", Held.NCCL: "peak", Held.HERE: "machine peak"}
_HEAD = {Held.REST: "at rest, bytes", Held.NCCL: "at the peak, as on NCCL", Held.HERE: "at the peak, as here"}


def memory_table(comparison: Comparison, groups: Sequence[Ranks], trace: Trace, *, ran: bool) -> str:
    """One row a category, one group of columns a moment; then sums, and what of them is unexplained.

    groups: ranks that share a row of the picture. trace: whose step counters stand in "as here".
    """
    body: list[str] = []
    shown = [Held.REST, Held.NCCL]
    joins_host = False
    for ranks in groups:
        found = {r.held: r for r in residuals(comparison, ranks[0], trace.ranks[ranks[0]].step_counter_nbytes)}
        if ran and Held.HERE in found:
            shown = [Held.REST, Held.NCCL, Held.HERE]
        lines = _lines(found, shown, ranks[0], trace, ran)
        first = f'<th scope="rowgroup" rowspan="{len(lines)}">{ranks_words(ranks)}</th>'
        for number, (kind, cells) in enumerate(lines):
            body.append(f'<tr class="zeroviz-{kind}">{"" if number else first}{cells}</tr>')
        joins_host = joins_host or any(residual.joins_host for residual in found.values())
    span = 3 if ran else 1
    if joins_host:
        words = f"{_HEAD[Held.HERE]}: {ONE_MEMORY}"
        num_cells = 2 + span * len(shown) + 1
        body.append(f'<tr class="zeroviz-joined"><td class="zeroviz-words" colspan="{num_cells}">{words}</td></tr>')
    heads = "".join(f'<th colspan="{span}">{_HEAD[held]}</th>' for held in shown)
    head = (
        f'<tr><th rowspan="2">rank</th><th rowspan="2">category</th>{heads}{cause_head(ran, rowspan=2)}</tr>'
        f"<tr>{source_heads(ran) * len(shown)}</tr>"
    )
    return table("What each rank holds", "memory", head, body)


def _lines(
    found: dict[Held, Residual], shown: Sequence[Held], rank: int, trace: Trace, ran: bool
) -> list[tuple[str, str]]:
    """(kind, cells) of each line of a rank: categories, sums, step counters, what is unexplained."""
    rows = {held: {row.category: row for row in residual.rows} for held, residual in found.items()}
    rows[Held.REST] |= rows.get(Held.HOST, {})
    categories = [c for c in CATEGORY_ORDER if any(c in rows[held] for held in shown)]

    def cells(name: str, label: str, by_held: dict[Held, MemoryRow | None]) -> str:
        parts = [_cells(by_held.get(held), rank, held, name, ran) for held in shown]
        causes = dict.fromkeys(row.cause for row in by_held.values() if row and row.cause)
        return f'<th scope="row">{label}</th>{"".join(parts)}{cause_cell("; ".join(causes), ran)}'

    lines = [
        (
            "category",
            cells(
                category.value,
                swatch(category, trace.spec, held=category in rows[Held.REST]),
                {held: rows[held].get(category) for held in shown},
            ),
        )
        for category in categories
    ]
    if counters := found[Held.HERE].step_counter_nbytes if Held.HERE in shown else 0:
        row = MemoryRow(rank, found[Held.HERE].total.moment, None, counters, counters, "")
        lines.append(("category", cells("step counters", "step counters", {Held.HERE: row})))
    lines.append(("total", cells("total", "total", {held: found[held].total for held in shown})))
    if Held.HOST in found:
        lines.append(("total", cells("host total", "total on the host", {Held.REST: found[Held.HOST].total})))
    if ran:
        lines.append(("unexplained-line", _unexplained(found, shown, rank)))
    return lines


def _cells(row: MemoryRow | None, rank: int, held: Held, name: str, ran: bool) -> str:
    data = f'data-rank="{rank}" data-moment="{_MOMENT[held]}" data-category="{name}"'
    return figures(row.predicted if row else 0, row.measured if row else 0, ran, data, row.cause if row else "")


def _unexplained(found: dict[Held, Residual], shown: Sequence[Held], rank: int) -> str:
    """0 says that every difference has a name."""
    parts = []
    for held in shown:
        nbytes = found[held].unexplained_nbytes
        data = f'data-rank="{rank}" data-moment="{_MOMENT[held]}" data-category="unexplained"'
        parts.append(f'<td colspan="2"></td>{difference(nbytes, "unexplained" if nbytes else "", data=data)}')
    return f'<th scope="row">unexplained</th>{"".join(parts)}{cause_cell("", True)}'
