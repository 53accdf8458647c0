"""The text table of `zeroviz validate`, 80 columns wide, grouped by source."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from textwrap import wrap

from zeroviz.validate import mismatches
from zeroviz.validate_rows import Group, Row

WIDTH = 80
NUM_DIGITS = 8
# A claim that is right needs no comment; one that is not is followed by what the page prints and why.
RIGHT = "right"


def render_validation(groups: Sequence[Group]) -> str:
    """Every row with its verdict, and a closing line that counts them."""
    lines: list[str] = []
    for group in groups:
        lines += [*_group(group), ""]
    return "\n".join([*lines, *_closing(groups)]) + "\n"


def _group(group: Group) -> list[str]:
    lines = [f"{group.name}, {len(group.rows)} rows"]
    for text in (f"{group.source}.", f"{group.about}."):
        lines += wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    lines.append("")
    has_claims = any(row.claim for row in group.rows)
    cells = [_cells(row) for row in group.rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    widths = [max(width, least) for width, least in zip(widths, (24, 8, 8, 0, 2), strict=True)]

    def line(label: str, expected: str, got: str, unit: str, verdict: str, page: str = "") -> str:
        figures = f"{expected.rjust(widths[1])}  {got.rjust(widths[2])}"
        return f"  {label.ljust(widths[0])}  {figures} {unit.ljust(widths[3])}  {verdict.ljust(2)} {page}".rstrip()

    lines.append(line("", "expected", "got", "", "", "page" if has_claims else ""))
    for row, row_cells in zip(group.rows, cells, strict=True):
        lines += [line(*row_cells, row.claim.verdict if row.claim else ""), *_comment(row)]
    return lines


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    label = f"{row.id:6} {row.what}" if row.claim else row.what
    verdict = "ok" if row.holds else "NO"
    if isinstance(row.got, str):
        return label, row.expected, row.got, row.unit, verdict
    # A fraction is shown as it was printed. Claims have one column more than 80 would hold with commas.
    commas = "" if row.claim else ","
    is_as_printed = row.claim is None and not row.expected.isdigit()
    expected = row.expected if is_as_printed else _short(Fraction(row.expected), commas)
    return label, expected, _short(Fraction(row.got), commas), row.unit, verdict


def _short(value: Fraction, commas: str = ",") -> str:
    """At most eight digits, and all of a whole number's unless there are very many."""
    if value.denominator == 1 and abs(value) < 10**15:
        return f"{int(value):{commas}}"
    return f"{float(value):{commas}.{NUM_DIGITS}g}"


def _comment(row: Row) -> list[str]:
    """Below a claim that is not plainly right: what the page prints. Below a row that does not hold: why not."""
    texts = []
    if row.claim and row.claim.verdict != RIGHT:
        texts.append(f"page: {row.claim.printed}; {row.note}" if row.note else f"page: {row.claim.printed}")
    if not row.holds:
        how = f"got is by {row.by}"
        texts.append(how if row.formula_got is None else f"{how}; {row.formula} gives {_short(row.formula_got)}")
    return [
        line
        for text in texts
        for line in wrap(text, WIDTH, initial_indent=" " * 9, subsequent_indent=" " * 15, break_on_hyphens=False)
    ]


def _closing(groups: Sequence[Group]) -> list[str]:
    rows = [row for group in groups for row in group.rows]
    wrong = mismatches(groups)
    lines = []
    by_verdict: dict[str, list[str]] = {}
    for row in rows:
        if row.claim:
            by_verdict.setdefault(row.claim.verdict, []).append(row.id)
    if by_verdict:
        lines.append("Claims of the study pages")
    for verdict, ids in sorted(by_verdict.items(), key=lambda item: -len(item[1])):
        text = f"{verdict:15}{len(ids):4}  " + (", ".join(ids) if verdict != RIGHT else "")
        lines += wrap(text, WIDTH, initial_indent="  ", subsequent_indent=" " * 23, break_on_hyphens=False)
    for group in groups:
        lines += [f"Mismatch: {group.name}, {row.id}" for row in group.rows if not row.holds]
    own = sum(row.is_product for row in rows)
    sources = f"{len(groups)} source{'s' * (len(groups) > 1)}"
    outcome = f"{len(rows) - len(wrong):,} hold, not {len(wrong):,}" if wrong else "all hold"
    return [
        *lines,
        f"Worked out by zeroviz's own functions: {own:,}; by formulas written out: {len(rows) - own:,}.",
        f"{len(rows):,} rows from {sources}: {outcome}.",
    ]
