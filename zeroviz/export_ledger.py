"""The ledger of a step, to be taken away: what each rank holds at its moments and what it sends, as rows and as CSV.

The rows are those of `zeroviz.compare`: with a measured trace beside the prediction every difference has its cause.
Ranks with equal rows are one group. Bytes are whole numbers, and no row is the sum of others: whoever adds up counts
nothing twice.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import StringIO

from zeroviz.category import Category
from zeroviz.compare import UNEXPLAINED, Comparison, Moment, compare
from zeroviz.events import Where
from zeroviz.link import Copies
from zeroviz.rank_trace import RankTrace, alike
from zeroviz.residuals import alone
from zeroviz.tables import stretch_label
from zeroviz.trace import Peak, Trace, WireTotal

STEP_COUNTERS = "step counters"
"""Of what the machine gave out, in no category."""
REST, HOST, ARTEFACTS = "at rest", "at rest on the host", "at rest beside the step"
PEAK, HERE, AFTER = "at the peak", "at the peak as here", "after the step"
WIRE, LINK = "wire", "link"
"""What the moments are called. As here: all that this machine's allocator gave out, where that was read. After the
step: what it leaves behind and should not."""


NOWHERE: Where = ("", "", "")


@dataclass(frozen=True, slots=True)
class Entry:
    """One side of a row. nbytes: held, or sent by this rank in a ring, or copied. where: of the peak (phase, op, unit).

    count, payload_nbytes: of collectives, their number and whole arrays; of copies their number. None elsewhere.
    """

    nbytes: int
    where: Where = NOWHERE
    count: int | None = None
    payload_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One category at one moment, or one collective, predicted and measured; the same twice where nothing is measured.

    cause is empty where they are equal, and never where their bytes differ.
    """

    moment: str
    item: str
    predicted: Entry
    measured: Entry
    cause: str = ""

    @property
    def difference_nbytes(self) -> int:
        """measured - predicted."""
        return self.measured.nbytes - self.predicted.nbytes


@dataclass(frozen=True, slots=True)
class Ledger:
    """The rows of some ranks, which are alike in all of them."""

    stretches: tuple[range, ...]
    rows: tuple[LedgerRow, ...]

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.stretches))

    @property
    def label(self) -> str:
        """`ranks 0-2, 5`."""
        return stretch_label(self.stretches)

    @property
    def moments(self) -> dict[str, list[LedgerRow]]:
        """The rows by moment."""
        found: dict[str, list[LedgerRow]] = {}
        for row in self.rows:
            found.setdefault(row.moment, []).append(row)
        return found


def ledgers(predicted: Trace, measured: Trace | None = None) -> tuple[Ledger, ...]:
    """The rows of every rank, those with equal rows together, in the order of their first ranks.

    Raises TraceError where the two are not of one spec.
    """
    groups: dict[tuple[LedgerRow, ...], list[range]] = {}
    for ranks, rows in _of_each(predicted, measured):
        groups.setdefault(rows, []).append(ranks)
    return tuple(Ledger(tuple(stretches), rows) for rows, stretches in groups.items())


def ledger_csv(predicted: Trace, measured: Trace | None = None) -> str:
    """The ledger as CSV with a line of heads: a line for each row of each group of ranks that are alike.

    ranks: `0-2, 5`, and num_ranks how many these are: each of them holds and sends nbytes. item: a category or a
    collective. A trace alone has nbytes, origin, count and payload_nbytes, and of the peak phase, op and unit; two have
    predicted_nbytes, measured_nbytes, difference_nbytes (measured - predicted) and cause, and the others of either.
    """
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = ["ranks", "num_ranks", "moment", "item"]
    both = ["origin", "phase", "op", "unit", "count", "payload_nbytes"]
    if measured is None:
        heads += ["nbytes", *both]
    else:
        heads += ["predicted_nbytes", "measured_nbytes", "difference_nbytes", "cause"]
        heads += [f"{side}_{name}" for side in ("predicted", "measured") for name in both]
    writer.writerow(heads)
    for ledger in ledgers(predicted, measured):
        for row in ledger.rows:
            cells: list[object] = [ledger.label.partition(" ")[2], ledger.num_ranks, row.moment, row.item]
            if measured is None:
                cells += [row.predicted.nbytes, *_cells(predicted, row.predicted)]
            else:
                cells += [row.predicted.nbytes, row.measured.nbytes, row.difference_nbytes, row.cause]
                cells += [*_cells(predicted, row.predicted), *_cells(measured, row.measured)]
            writer.writerow(cells)
    return text.getvalue()


def _cells(trace: Trace, entry: Entry) -> tuple[object, ...]:
    return trace.origin.value, *entry.where, entry.count, entry.payload_nbytes  # csv writes nothing for None


def _of_each(predicted: Trace, measured: Trace | None) -> Iterator[tuple[range, tuple[LedgerRow, ...]]]:
    """The rows of each stretch of ranks that are known to be alike, on both sides where there are two."""
    for ranks in _stretches(predicted, measured):
        ours = predicted.ranks[ranks.start]
        if measured is None:
            yield ranks, tuple(_rows(alone(predicted, [(ranks.start,)]), ours, ours))
        else:
            theirs = measured.ranks[ranks.start]
            # Of very many ranks that are alike one is compared for all.
            comparison = compare(replace(predicted, ranks=(ours,)), replace(measured, ranks=(theirs,)))
            yield ranks, tuple(_rows(comparison, ours, theirs))


def _stretches(predicted: Trace, measured: Trace | None) -> Iterable[range]:
    stretches = [ranks for ranks, _ in alike(predicted.ranks)]
    if measured is None:
        return stretches
    starts = {ranks.start for ranks in stretches} | {ranks.start for ranks, _ in alike(measured.ranks)}
    edges = [*sorted(starts), len(predicted.ranks)]
    return map(range, edges, edges[1:])


def _rows(comparison: Comparison, ours: RankTrace, theirs: RankTrace) -> Iterator[LedgerRow]:
    """All rows of the one rank that is compared, moment by moment."""
    here = _where(ours.machine_peak()), _where(theirs.machine_peak())
    places = {Moment.PEAK: (_where(ours.peak()), _where(theirs.peak())), Moment.MACHINE_PEAK: here}
    for row in comparison.memory:
        if row.category is not None:
            there = places.get(row.moment, (NOWHERE, NOWHERE))
            left, right = Entry(row.predicted, there[0]), Entry(row.measured, there[1])
            yield LedgerRow(_name(row.moment, row.category), row.category.value, left, right, row.cause)
    counters = ours.step_counter_nbytes, theirs.step_counter_nbytes
    if any(counters) and any(row.moment is Moment.MACHINE_PEAK for row in comparison.memory):
        left, right = Entry(counters[0], here[0]), Entry(counters[1], here[1])
        yield LedgerRow(HERE, STEP_COUNTERS, left, right, "" if counters[0] == counters[1] else UNEXPLAINED)
    for leak in comparison.leaks:
        cause = f"{leak.cause}; left by {leak.place}"
        yield LedgerRow(AFTER, leak.category.value, Entry(0), Entry(leak.nbytes), cause)
    for call in comparison.wire:
        yield LedgerRow(WIRE, call.predicted.label, _calls(call.predicted), _calls(call.measured), call.cause)
    for copy in comparison.link:
        item = f"{copy.direction.value} {copy.dtype}"
        yield LedgerRow(LINK, item, _copies(copy.predicted), _copies(copy.measured), copy.cause)


def _name(moment: Moment, category: Category) -> str:
    if moment is not Moment.REST:
        return PEAK if moment is Moment.PEAK else HERE
    if category.on_host:
        return HOST
    return REST if category.on_device else ARTEFACTS


def _where(peak: Peak) -> Where:
    return peak.phase, peak.op, peak.unit


def _calls(total: WireTotal) -> Entry:
    return Entry(total.sent_nbytes, count=total.count, payload_nbytes=total.payload_nbytes)


def _copies(copies: Copies) -> Entry:
    return Entry(copies.nbytes, count=copies.count)
