"""What is offloaded, as text: the host's share between steps and at most, and what crosses its link to the device."""

from __future__ import annotations

from zeroviz.columns import columns, entry
from zeroviz.compare import link_rows
from zeroviz.events import as_events
from zeroviz.quantity import format_binary_nbytes, format_decimal_nbytes
from zeroviz.trace import RankTrace


def host_table(every: str, rank: RankTrace, num_params: int) -> list[str]:
    """What lies in the host's memory between steps; nothing where nothing is offloaded."""
    held = rank.at_rest_on_host
    if not held:
        return []
    rows = [[f"ON THE HOST, {every}", "bytes", "decimal", "binary", "B/param"]]
    lines = {category.value: nbytes for category, nbytes in held.items()}
    for label, nbytes in {**lines, "total": sum(held.values())}.items():
        figures = [f"{nbytes:,}", format_decimal_nbytes(nbytes), format_binary_nbytes(nbytes)]
        rows.append([f"  {label}", *figures, f"{nbytes / num_params:.3f}"])
    most = host_peak_nbytes(rank)
    return ["", *columns(rows), *entry("  at most", f"{most:,} B within the step, temporaries included")]


def host_peak_nbytes(rank: RankTrace) -> int:
    """The most that lies on the host during the step."""
    held = most = sum(rank.at_rest_on_host.values())
    for _, changes in as_events(rank.events).parts:
        for category, nbytes in changes:
            if category.on_host:
                held += nbytes
                most = max(most, held)
    return most


def link_table(
    every: str, ours: RankTrace, theirs: RankTrace | None = None, names: tuple[str, str] = ("predicted", "measured")
) -> list[str]:
    """What a step copies between host and device, by direction and dtype; nothing where nothing is offloaded.

    theirs: another account of the step, named second.
    """
    links = link_rows(ours, theirs or ours)
    if not links:
        return []
    if theirs is None:
        rows = [[f"OVER THE LINK, {every}", "copies", "bytes", "decimal", "binary"]]
        for row in links:
            rows.append(_row(f"{row.direction.value} {row.dtype}", row.predicted.count, row.predicted.nbytes))
        rows.append(
            _row("total", sum(row.predicted.count for row in links), sum(row.predicted.nbytes for row in links))
        )
        return columns(rows, min_width=11)
    rows = [[f"OVER THE LINK, {every}", *names, "difference", names[1]]]
    for row in links:
        expected, got = row.predicted, row.measured
        copies = "/".join(map(str, dict.fromkeys((expected.count, got.count))))
        difference = f"{got.nbytes - expected.nbytes:+,}" if got.nbytes != expected.nbytes else "0"
        label = f"  {copies} x {row.direction.value} {row.dtype}"
        figures = (f"{expected.nbytes:,}", f"{got.nbytes:,}", difference, format_decimal_nbytes(got.nbytes))
        rows.append([label, *figures])
    return [*columns(rows), *(line for row in links if row.cause for line in entry("  why", row.cause))]


def _row(label: str, num_copies: int, nbytes: int) -> list[str]:
    figures = [f"{nbytes:,}", format_decimal_nbytes(nbytes), format_binary_nbytes(nbytes)]
    return [f"  {label}", f"{num_copies:,}", *figures]
