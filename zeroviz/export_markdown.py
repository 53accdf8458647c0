"""The ledger as GitHub-flavoured Markdown: what it is of, then a table for each moment of each group of alike ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from zeroviz.command import command_line
from zeroviz.compare import where_text
from zeroviz.export_ledger import HERE, LINK, PEAK, WIRE, Entry, Ledger, LedgerRow, ledgers
from zeroviz.quantity import format_decimal_nbytes
from zeroviz.trace import Trace
from zeroviz.wording import overlap_options, recipe_sum, title, what_text

_HEADS = {WIRE: "on the wire", LINK: "over the link to the host"}
_ITEM = {WIRE: "collective", LINK: "direction"}
_COUNT = {WIRE: "calls", LINK: "copies"}
_FACTS = ("torch", "python", "backend", "devices", "host_cores")
"""What is said of the machine that a step ran on, where its environment knows it."""


def ledger_markdown(predicted: Trace, measured: Trace | None = None) -> str:
    """The ledger as a page: title, recipe and options, the tables with exact bytes beside a decimal unit, the notes.

    With a measured trace its bytes, the differences (measured - predicted) and their causes stand beside the predicted
    ones. Raises TraceError where the two are not of one spec.
    """
    spec = predicted.spec
    names = [trace.origin.label for trace in (predicted, measured) if trace]
    lines = [f"# {_plain(title(spec))}: {' beside '.join(names)}", "", f"- {_plain(what_text(spec))}"]
    lines.append(f"- {spec.precision.value}: {recipe_sum(spec, 'bytes a parameter')}")
    settings = [f"{name} {value}" for name, value in spec.settings.to_dict().items()]
    if options := [*overlap_options(spec), *settings]:
        lines.append(f"- {_plain(', '.join(options))}")
    lines.append(f"- `{command_line('predict', spec)}`")
    if facts := _facts(measured or predicted):
        lines.append(f"- on {_plain(facts)}")
    for ledger in ledgers(predicted, measured):
        lines += ["", f"## {_heading(ledger, len(predicted.ranks))}"]
        for moment, rows in ledger.moments.items():
            lines += ["", f"### {_capital(_HEADS.get(moment, moment))}", "", *_table(moment, rows, names)]
            if moment in (PEAK, HERE):
                lines += ["", _plain(_where(rows[0], names))]
    for note in dict.fromkeys((*predicted.notes, *(measured.notes if measured else ()))):
        lines += ["", f"Note: {_plain(note)}"]
    return "\n".join(lines) + "\n"


def _heading(ledger: Ledger, num_ranks: int) -> str:
    if ledger.num_ranks == num_ranks:
        return "Each rank" if num_ranks > 1 else "The only rank"
    return _capital(ledger.label)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _table(moment: str, rows: Sequence[LedgerRow], names: Sequence[str]) -> list[str]:
    """One table with its sum, but of copies over the link: these go two ways."""
    sums = [] if moment == LINK else [_sum(rows)]
    count = _COUNT.get(moment)
    paid = moment == WIRE
    what = "sent" if paid else "bytes"
    heads = [_ITEM.get(moment, "category"), *([count] if count else []), *(["payload"] if paid else [])]
    if len(names) == 1:
        heads += [what, "decimal"]
    else:
        heads += [*(f"{name}, {what}" for name in names), "difference", f"{names[1]}, decimal", "cause"]
    body = [_row(row, names, count is not None, paid) for row in rows]
    body += [[f"**{cell}**" if cell else "" for cell in _row(row, names, count is not None, paid)] for row in sums]
    last = "---" if heads[-1] == "cause" else "--:"
    rule = ["---", *["--:"] * (len(heads) - 2), last]
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *body)]


def _row(row: LedgerRow, names: Sequence[str], counted: bool, paid: bool) -> list[str]:
    cells = [_plain(row.item)]
    if counted:
        cells.append(_either(row, lambda entry: entry.count))
    if paid:
        cells.append(_either(row, lambda entry: entry.payload_nbytes))
    if len(names) == 1:
        return [*cells, f"{row.predicted.nbytes:,}", format_decimal_nbytes(row.predicted.nbytes)]
    difference = f"{row.difference_nbytes:+,}" if row.difference_nbytes else "0"
    figures = [f"{row.predicted.nbytes:,}", f"{row.measured.nbytes:,}", difference]
    return [*cells, *figures, format_decimal_nbytes(row.measured.nbytes), _plain(row.cause)]


def _either(row: LedgerRow, of: Callable[[Entry], int | None]) -> str:
    """One figure for both sides where it is the same, else `8/9`."""
    return "/".join(f"{value:,}" for value in dict.fromkeys((of(row.predicted), of(row.measured))) if value is not None)


def _sum(rows: Sequence[LedgerRow]) -> LedgerRow:
    """Bytes alone, of both sides."""
    predicted, measured = (
        Entry(sum(entry.nbytes for entry in side))
        for side in ([row.predicted for row in rows], [row.measured for row in rows])
    )
    return LedgerRow(rows[0].moment, "total", predicted, measured)


def _where(row: LedgerRow, names: Sequence[str]) -> str:
    places = [where_text(*entry.where) for entry in (row.predicted, row.measured)]
    if len(names) == 1 or places[0] == places[1]:
        return f"When: {places[0]}."
    return f"When: {names[0]} in {places[0]}, {names[1]} in {places[1]}."


def _facts(trace: Trace) -> str:
    words = []
    for name in _FACTS:
        value = (trace.environment or {}).get(name)
        if value:
            each = ", ".join(dict.fromkeys(map(str, value))) if isinstance(value, list) else value
            words.append(f"{name.replace('_', ' ')} {each}")
    return "; ".join(words)


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is, on one line: a model may be called anything. Underscores within words do."""
    return re.sub(r"([\\`*\[\]<>|~&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", " ".join(text.split()))
