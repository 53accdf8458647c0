"""The text table of what a GPU holds beside the step: the ladder from what tensors asked for to what is in use."""

from __future__ import annotations

from zeroviz.columns import columns, entry
from zeroviz.device_lines import DeviceLines
from zeroviz.quantity import format_binary_nbytes, format_decimal_nbytes
from zeroviz.tables import rank_label
from zeroviz.trace import Trace


def device_section(trace: Trace) -> list[str]:
    """A table for each group of ranks whose device looks alike; nothing where no rank has such lines."""
    alike: dict[DeviceLines, list[int]] = {}
    for rank in trace.ranks:
        if rank.device_lines is not None:
            alike.setdefault(rank.device_lines, []).append(rank.rank)
    section: list[str] = []
    for lines, ranks in alike.items():
        section += ["", *device_table("each rank" if len(ranks) == len(trace.ranks) else rank_label(ranks), lines)]
    return section


def device_table(every: str, lines: DeviceLines) -> list[str]:
    """The ladder at rest, then what of it has another name, the step's own figures, and what the checks found."""
    rungs = [
        ("  asked for", lines.requested_nbytes),
        ("  + rounding to 512 B", lines.rounding_nbytes),
        ("  + awaiting a stream", lines.awaiting_nbytes),
        ("  + cached", lines.cached_nbytes),
        ("  = reserved", lines.reserved_nbytes),
        ("  + outside allocator", lines.outside_nbytes),
        ("  = in use on device", lines.device_used_nbytes),
    ]
    table = [[f"DEVICE AT REST, {every}", "bytes", "decimal", "binary"]]
    table += [[label, f"{n:,}", format_decimal_nbytes(n), format_binary_nbytes(n)] for label, n in rungs]
    result = columns(table)
    if lines.workspace_nbytes:
        result += entry("  of what is asked for", f"{lines.workspace_nbytes:,} B are cuBLAS's workspaces")
    if lines.unnamed_nbytes:
        result += entry("  of what is asked for", f"{lines.unnamed_nbytes:,} B have no name")
    result += entry("  during the step", f"at most {lines.peak_reserved_nbytes:,} B reserved")
    if lines.peak_awaiting_nbytes:
        result += entry("  during the step", f"at most {lines.peak_awaiting_nbytes:,} B awaiting another stream")
    result += entry("  outside allocator", "the CUDA context, NCCL, and every other process on the device")
    for fault in lines.faults:
        result += entry("  beware", fault)
    return result
