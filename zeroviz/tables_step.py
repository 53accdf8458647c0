"""The step as text: the most held in each phase and around the peak. The timeline's twin for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from zeroviz.columns import columns, entry
from zeroviz.course import Course, OpSpan, align, changing, course_of
from zeroviz.quantity import format_binary_nbytes, format_decimal_nbytes
from zeroviz.trace import RankTrace

MAX_OPS = 12
"""Up to so many ops are all listed; of a longer step the phases and the peak's neighbours."""
NEIGHBOURS = 2
_MAX_LABEL = 27

Pair = tuple[OpSpan, OpSpan | None]


def step_table(
    every: str, ours: RankTrace, theirs: RankTrace | None = None, names: tuple[str, str] = ("predicted", "measured")
) -> list[str]:
    """The most held in each phase and near the peak; `theirs` is another account of the step, named second."""
    course, seen = course_of(ours), None if theirs is None else course_of(theirs)
    aligned = [] if seen is None else align(course, seen)
    pairs: list[Pair] = [*aligned] if seen is not None else [(span, None) for span in course.ops]
    if not pairs:
        return []
    peak = course.peak_op
    place = next((number for number, (span, _) in enumerate(pairs) if span is peak), 0)
    head = ["at most", "decimal", "binary"]
    if seen is not None:
        head = [*names, "difference", "as here" if seen.has_artefacts else names[1]]
    rows, shown = [[f"THE STEP, {every}", *head]], range(len(pairs))
    if len(pairs) > MAX_OPS:
        for phase in dict.fromkeys(span.phase for span, _ in pairs):
            within = [pair for pair in pairs if pair[0].phase == phase]
            rows.append(_row(f"  {phase}", _largest(within), seen))
        rows.append(["around the peak", *[""] * len(head)])
        shown = range(max(0, place - NEIGHBOURS), min(len(pairs), place + NEIGHBOURS + 1))
    for number in shown:
        span = pairs[number][0]
        label = f"{'* ' if span is peak else '  '}{span.op} {span.unit}".rstrip()
        rows.append(_row(label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 2]}..", pairs[number], seen))
    lines = columns(rows, min_width=12)
    if seen is not None:
        counted = changing(aligned)
        num_equal = sum(ours.max_nbytes == theirs.max_nbytes for ours, theirs in counted)
        lines += entry("  ops", f"{num_equal:,} of {len(counted):,} reach the {names[0]} maximum to the byte")
    return lines


def _largest(pairs: Sequence[Pair]) -> Pair:
    """The op of each side that reaches the most."""
    measured = [seen for _, seen in pairs if seen is not None]
    return (
        max((span for span, _ in pairs), key=lambda span: span.max_nbytes),
        max(measured, key=lambda span: span.max_nbytes, default=None),
    )


def _row(label: str, pair: Pair, seen: Course | None) -> list[str]:
    expected, got = pair[0].max_nbytes, pair[1]
    if seen is None or got is None:
        return [label, f"{expected:,}", format_decimal_nbytes(expected), format_binary_nbytes(expected)]
    difference = got.max_nbytes - expected
    last = f"{got.max_here_nbytes:,}" if seen.has_artefacts else format_decimal_nbytes(got.max_nbytes)
    return [label, f"{expected:,}", f"{got.max_nbytes:,}", f"{difference:+,}" if difference else "0", last]
