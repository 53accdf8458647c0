"""What is offloaded, as text: the host's share between steps and at most, and what crosses its link to the device."""

from __future__ import annotations

from collections import Counter

from zeroviz.columns import columns, entry
from zeroviz.events import as_events
from zeroviz.link import Transfer
from zeroviz.quantity import format_binary_nbytes, format_decimal_nbytes
from zeroviz.trace import RankTrace


def host_table(every: str, rank: RankTrace, num_params: int) -> list[str]:
    """What lies in the host's memory between steps; nothing where nothing is offloaded."""
    held = rank.at_rest_on_host
    if not held:
        return []
    rows = [[f"HOST AT REST, {every}", "bytes", "decimal", "binary", "B/param"]]
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


def link_table(every: str, rank: RankTrace) -> list[str]:
    """What a step copies between host and device, by direction and dtype; nothing where nothing is offloaded."""
    if not rank.transfers:
        return []
    count: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    for transfer in rank.transfers:
        count[_kind(transfer)] += 1
        moved[_kind(transfer)] += transfer.nbytes
    rows = [[f"OVER THE LINK, {every}", "copies", "bytes", "decimal", "binary"]]
    for (direction, dtype), nbytes in moved.items():
        rows.append(_row(f"{direction} {dtype}", count[direction, dtype], nbytes))
    rows.append(_row("total", sum(count.values()), sum(moved.values())))
    return columns(rows, min_width=11)


def _kind(transfer: Transfer) -> tuple[str, str]:
    return transfer.direction.value, transfer.dtype


def _row(label: str, num_copies: int, nbytes: int) -> list[str]:
    figures = [f"{nbytes:,}", format_decimal_nbytes(nbytes), format_binary_nbytes(nbytes)]
    return [f"  {label}", f"{num_copies:,}", *figures]
