"""The text twin of a side-by-side picture: what two to five specs hold and send, column by column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from zeroviz.columns import WIDTH, columns, entry
from zeroviz.compare import place_text
from zeroviz.quantity import format_decimal_nbytes
from zeroviz.scene import SOURCE_LABEL
from zeroviz.side_by_side import heading, highest, names_of
from zeroviz.spec import RunSpec
from zeroviz.trace import CATEGORY_ORDER, Category, RankTrace, Trace

_LABEL = 24


def render_side_by_side(traces: Sequence[Trace], measured: Mapping[RunSpec, Trace] | None = None) -> str:
    """The whole report. TraceError for traces that cannot share a picture."""
    names, runs = names_of([trace.spec for trace in traces]), measured or {}
    lines = wrap(heading([trace.spec for trace in traces], names), WIDTH, subsequent_indent="  ")
    ranks = [highest(trace) for trace in traces]
    sources = "/".join(dict.fromkeys(SOURCE_LABEL[trace.origin] for trace in traces))
    lines += wrap(f"{sources[:1].upper()}{sources[1:]}, bytes; each the rank that peaks highest.", WIDTH)
    lines += _tables(names, ranks)
    ran = [(name, run, rank) for name, trace, rank in zip(names, traces, ranks, strict=True)
           if (run := runs.get(trace.spec)) is not None]  # fmt: skip
    if ran:
        theirs = [run.ranks[rank.rank] for _, run, rank in ran]
        lines += ["", "Measured in a run, the same ranks."]
        lines += _tables([name for name, _, _ in ran], theirs)
        differences = [(m.rest_nbytes - p.rest_nbytes, m.peak().total - p.peak().total)
                       for m, (_, _, p) in zip(theirs, ran, strict=True)]  # fmt: skip
        lines += _table("MEASURED LESS PREDICTED", [name for name, _, _ in ran], {
            "  at rest": [rest for rest, _ in differences],
            "  at the peak": [peak for _, peak in differences],
        }, none="0")  # fmt: skip
    lines.append("")
    for name, trace in zip(names, traces, strict=True):
        for note in trace.notes:
            lines += wrap(f"Note on {name}: {note}", WIDTH)
    return "\n".join(lines).rstrip() + "\n"


def side_by_side_report(traces: Sequence[Trace], measured: Mapping[RunSpec, Trace] | None = None) -> dict[str, Any]:
    """The reports of all of them, as plain data."""
    names_of([trace.spec for trace in traces])
    return {
        "schema": "zeroviz.compare/1",
        "reports": [trace.report() for trace in traces],
        "measured": [run.report() for run in (measured or {}).values()],
    }


def _tables(names: Sequence[str], ranks: Sequence[RankTrace]) -> list[str]:
    peaks = [rank.peak() for rank in ranks]
    lines = _table("AT REST", names, _held([rank.at_rest for rank in ranks]))
    lines += _table("AT THE PEAK", names, _held([peak.by_category for peak in peaks]))
    lines.append("")
    for head, name, peak in zip(_heads(names), names, peaks, strict=True):
        lines += entry(f"  {name if head == name else f'{head} {name}'}", f"peaks in {place_text(peak)}")
    sent: dict[str, list[int]] = {}
    for position, rank in enumerate(ranks):
        for total in rank.wire():
            sent.setdefault(f"  {total.op.value} {total.dtype}", [0] * len(ranks))[position] += total.sent_nbytes
    if not sent:
        return [*lines, "", *entry("SENT IN A STEP", "nothing: one rank has nobody to send to")]
    return lines + _table("SENT IN A STEP", names, {**sent, "  total": [rank.sent_nbytes for rank in ranks]})


def _held(held: Sequence[Mapping[Category, int]]) -> dict[str, list[int]]:
    rows = {
        f"  {category.value}": [each.get(category, 0) for each in held]
        for category in CATEGORY_ORDER
        if any(each.get(category) for each in held)
    }
    return {**rows, "  total": [sum(each.values()) for each in held]}


def _table(head: str, names: Sequence[str], rows: Mapping[str, Sequence[int]], none: str = "-") -> list[str]:
    """Exact bytes where the columns hold them, else a decimal unit: never fewer columns."""
    shown: Callable[[int], str] = "{:,}".format
    widest = max(len(shown(value)) for values in rows.values() for value in values)
    if _LABEL + len(names) * (max(widest, *map(len, _heads(names))) + 1) > WIDTH:
        shown = format_decimal_nbytes
    numbers = [(label, *(shown(value) if value else none for value in values)) for label, values in rows.items()]
    return ["", *columns([(head, *_heads(names)), *numbers])]


def _heads(names: Sequence[str]) -> list[str]:
    """The names, or their numbers where they are too long for a column."""
    most = (WIDTH - _LABEL) // len(names) - 1
    return list(names) if max(map(len, names)) <= most else [f"({number})" for number in range(1, len(names) + 1)]
