"""What the explorer's page must show, read from the page and from the arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.browser.lab import ExplorerPage
from zeroviz.spec import Implementation
from zeroviz.trace import Trace

WAIT_S = 30.0


def wait_until(explorer: ExplorerPage, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"the page still shows: {explorer.title()}"
        explorer.page.wait_for_timeout(50)


def expected(trace: Trace) -> dict[tuple[int, str, str], int]:
    """Every cell of the memory table as the trace has it; a category that one moment lacks holds 0 there."""
    cells: dict[tuple[int, str, str], int] = {}
    for rank in trace.ranks:
        rest, peak = rank.at_rest, rank.peak()
        for category in {*rest, *peak.by_category}:
            cells[rank.rank, "at rest", category.value] = rest.get(category, 0)
            cells[rank.rank, "peak", category.value] = peak.by_category.get(category, 0)
        cells[rank.rank, "at rest", "total"] = rank.rest_nbytes
        cells[rank.rank, "peak", "total"] = peak.total
    return cells


def assert_shows(explorer: ExplorerPage, trace: Trace) -> None:
    """Wait until title, table and bars are the trace's, on every rank: a few redraws may be under way."""
    spec = trace.spec
    groups = f" in groups of {spec.shard_ranks}" if spec.shard_ranks else ""
    code = "" if spec.impl is Implementation.OWN else f" ({spec.impl.value})"
    ranks = f"{spec.ranks} rank{'s' * (spec.ranks > 1)}"
    title = f"{spec.strategy.label}{code} on {ranks}{groups}, {spec.precision.value}"
    cells, bars = expected(trace), [rank.peak().total for rank in trace.ranks]

    def shown() -> bool:
        words = explorer.title()
        # Two units may have the same figures, when the same unit makes the peak.
        named = words.startswith(title) and f"({spec.unit});" in words
        figures = {key: nbytes for key, nbytes in explorer.figures().items() if key[1] != "machine peak"}
        # What is only in the machine's peak has a line too, of zeros at the other two moments.
        beyond = [nbytes for key, nbytes in figures.items() if key not in cells]
        same = {key: figures.get(key) for key in cells} == cells and not any(beyond)
        return named and same and explorer.bars() == bars

    wait_until(explorer, shown)
