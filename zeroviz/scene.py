"""Trace -> Scene: every mark of the picture in bytes, with an id, and every word on it. Pure: a picture as data.

A row is one rank seen by one source. From 0 it stacks what the rank holds at rest and at the peak, by category; from
there to `peak_nbytes` what the peak adds, by category; the outline runs from 0 to the peak. What a rank holds at rest
and gives back before the peak (FSDP2 drops its gradients as a step begins) lies beside what the peak adds, up to
`rest_nbytes`. Nothing here knows of points, fonts or colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from zeroviz.axis import Tick, amount, axis_unit, axis_words, ticks
from zeroviz.capacity_line import Beyond, CapacityLine, beyond_of, verdict_lines
from zeroviz.collectives import CollectiveOp, ring_sent_nbytes
from zeroviz.compare import Moment, place_text
from zeroviz.errors import TraceError
from zeroviz.link import Direction
from zeroviz.quantity import format_nbytes
from zeroviz.rank_trace import alike
from zeroviz.spec import RunSpec, Strategy
from zeroviz.trace import CATEGORY_ORDER, Category, Origin, Peak, RankTrace, Trace
from zeroviz.wording import ranks_words, recipe_sum, title, what_text

MAX_ROWS_OF_RANKS = 16
"""Above this many ranks, those with equal figures share a row."""
MIN_SHARE_IN_LEGEND = 1 / 1000
"""Of the axis. A category that is thinner than this in every row is less than a pixel, so it has no swatch."""

SOURCE_LABEL = {
    Origin.PREDICTED: "predicted",
    Origin.LIVE: "measured",
    Origin.RECORDED: "recorded",
    Origin.REHEARSED: "rehearsed",
}


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a bar: `nbytes` of `category` from `start`. PEAK segments hold what the peak adds to rest.

    is_given_back: of a REST segment, whether it is held no longer at the peak; it is in no sum that ends there.
    """

    id: str
    row: int
    ranks: tuple[int, ...]
    origin: Origin
    moment: Moment
    category: Category
    start: int
    nbytes: int
    is_given_back: bool = False


@dataclass(frozen=True, slots=True)
class Padding:
    """How much of a row's bytes at rest is padding. A trace has one sum for it, laid at the end of what is held at rest
    and at the peak."""

    id: str
    row: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One rank, or several equal ones, as one source sees them; also the outline up to the peak.

    name: what the row is called where it is not by its ranks, as when rows are of different specs.
    """

    id: str
    index: int
    ranks: tuple[int, ...]
    origin: Origin
    rest_nbytes: int
    peak_nbytes: int
    peak_place: str
    rest_difference: int | None
    peak_difference: int | None
    name: str = ""

    @property
    def group(self) -> tuple[str, tuple[int, ...]]:
        """Rows of one group stand together, under one label: sources of the same thing."""
        return self.name, self.ranks

    @property
    def rank_label(self) -> str:
        return self.name or ranks_words(self.ranks)

    @property
    def source_label(self) -> str:
        return SOURCE_LABEL[self.origin]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A category as it appears in the picture; `category` None is padding. `held` is false for what only a peak has."""

    category: Category | None
    held: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """A figure to measure all bars against; the axis reaches at least as far."""

    nbytes: int
    label: str


@dataclass(frozen=True)
class Scene:
    """The whole picture as data. beyond: of each bar what lies beyond `capacity`, in the order of the rows."""

    spec: RunSpec
    title: str
    recipe: str
    subtitle: tuple[str, ...]
    rows: tuple[Row, ...]
    segments: tuple[Segment, ...]
    paddings: tuple[Padding, ...]
    legend: tuple[LegendEntry, ...]
    ticks: tuple[Tick, ...]
    axis_label: str
    axis_max: int
    unit: str
    reference: Reference | None
    notes: tuple[str, ...]
    capacity: CapacityLine | None = None
    beyond: tuple[Beyond, ...] = ()

    @property
    def gives_back(self) -> bool:
        """Whether the picture shows anything that is held at rest and not at the peak."""
        return any(s.is_given_back and s.nbytes >= MIN_SHARE_IN_LEGEND * self.axis_max for s in self.segments)

    def amount(self, nbytes: int) -> str:
        """Bytes in the picture's one unit, the axis's, so that figures of one picture compare digit by digit."""
        return amount(nbytes, self.unit)

    @property
    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        return " ".join(f"{line}." for line in (self.title, self.recipe, *self.subtitle))


def build_scene(
    predicted: Trace,
    measured: Trace | None = None,
    *,
    reference: Reference | None = None,
    earlier: bool = False,
    expects_run: bool = False,
    capacity: CapacityLine | None = None,
) -> Scene:
    """The picture of a trace, with a second one of the same spec beside it. Raises TraceError for another spec.

    Pictures that are to be compared by eye are given the same `reference`. earlier: `measured` is not of the last run,
    which failed. expects_run: a line is kept for a run to come, so that the picture does not jump when it lands.
    capacity: a line across the bars; the axis reaches it where that leaves the bars readable.
    """
    if measured is not None and measured.spec != predicted.spec:
        raise TraceError("The measured trace is of another spec than the predicted one; they cannot share a picture.")
    rows: list[Row] = []
    segments: list[Segment] = []
    paddings: list[Padding] = []
    groups = _groups(predicted, measured)
    for ranks in groups:
        ours = predicted.ranks[ranks[0]]
        for trace in (predicted, measured) if measured is not None else (predicted,):
            seen = trace.ranks[ranks[0]]
            row = row_of(len(rows), ranks, trace.origin, seen, None if trace is predicted else ours)
            held = segments_of(row, seen)
            rows.append(row)
            segments += held
            paddings += paddings_of(row, seen, held)
    axis_max = max(reference.nbytes if reference else 0, *(row.peak_nbytes for row in rows))
    axis_max = capacity.end_of_axis(axis_max) if capacity else axis_max
    unit, scale = axis_unit(axis_max)
    ran = [row for row in rows if row.peak_difference is not None]
    verdict = verdict_lines(capacity, [row for row in rows if row.peak_difference is None], ran)
    return Scene(
        spec=predicted.spec,
        title=title(predicted.spec),
        recipe=recipe_sum(predicted.spec, "bytes a parameter"),
        subtitle=_subtitle(predicted, measured, unit, verdict, earlier=earlier, expects_run=expects_run),
        rows=tuple(rows),
        segments=tuple(segments),
        paddings=tuple(paddings),
        legend=legend_of(segments, paddings, axis_max),
        ticks=ticks(0, axis_max, scale),
        axis_label=axis_words(unit, scale, "held by a rank"),
        axis_max=axis_max,
        unit=unit,
        reference=reference,
        notes=((capacity.note,) if capacity else ()) + _notes(predicted, measured, groups),
        capacity=capacity,
        beyond=beyond_of(capacity, rows),
    )


def _groups(predicted: Trace, measured: Trace | None) -> list[tuple[int, ...]]:
    """Ranks by row: one each, or those with equal figures when there are many; they need not be neighbours, as the
    same shards of several groups are not."""
    if len(predicted.ranks) <= MAX_ROWS_OF_RANKS:
        return [(rank.rank,) for rank in predicted.ranks]
    groups: dict[object, list[int]] = {}
    for ranks, ours in alike(predicted.ranks) if measured is None else _one_by_one(predicted):
        key = _figures(ours), None if measured is None else _figures(measured.ranks[ranks.start])
        groups.setdefault(key, []).extend(ranks)
    return [tuple(group) for group in groups.values()]


def _one_by_one(trace: Trace) -> Iterator[tuple[range, RankTrace]]:
    return ((range(rank.rank, rank.rank + 1), rank) for rank in trace.ranks)


def _figures(rank: RankTrace) -> tuple[object, ...]:
    peak = rank.peak()
    held = frozenset(rank.at_rest.items()), frozenset(peak.by_category.items())
    return *held, place_text(peak), rank.padding_nbytes


def row_of(
    index: int, ranks: tuple[int, ...], origin: Origin, seen: RankTrace, ours: RankTrace | None, name: str = ""
) -> Row:
    """The row of what `seen` holds; `ours` is what it is compared with."""
    peak = seen.peak()
    ident = f"rank{ranks[0]}" if len(ranks) == 1 else f"rank{ranks[0]}-{ranks[-1]}"
    ident = f"{name.replace(' ', '-')}-{ident}" if name else ident
    return Row(
        id=f"{ident}-{SOURCE_LABEL[origin]}",
        index=index,
        ranks=ranks,
        origin=origin,
        rest_nbytes=seen.rest_nbytes,
        peak_nbytes=peak.total,
        peak_place=place_text(peak),
        rest_difference=None if ours is None else seen.rest_nbytes - ours.rest_nbytes,
        peak_difference=None if ours is None else peak.total - ours.peak().total,
        name=name,
    )


def paddings_of(row: Row, seen: RankTrace, segments: Iterable[Segment]) -> list[Padding]:
    """The row's padding, if there is any, at the end of what is held at rest and at the peak. segments: the row's."""
    if not seen.padding_nbytes:
        return []
    stays = sum(s.nbytes for s in segments if s.moment is Moment.REST and not s.is_given_back)
    return [Padding(f"{row.id}-padding", row.index, max(0, stays - seen.padding_nbytes), seen.padding_nbytes)]


def segments_of(row: Row, seen: RankTrace) -> list[Segment]:
    """What is held at rest and at the peak from 0 up; then, from the same place on, what is held at rest alone and what
    the peak adds. The gradient is the usual case: a step drops it before it comes to its peak."""
    rest, peak = seen.at_rest, seen.peak().by_category
    both = {c: min(nbytes, peak.get(c, 0)) for c, nbytes in rest.items()}
    given_back = {c: nbytes - both[c] for c, nbytes in rest.items()}
    added = {c: nbytes - both.get(c, 0) for c, nbytes in peak.items()}
    start = sum(both.values())
    return [
        *_stack(row, "rest", both, 0),
        *_stack(row, "given-back", given_back, start),
        *_stack(row, "peak", added, start),
    ]


def _stack(row: Row, word: str, held: Mapping[Category, int], start: int) -> Iterable[Segment]:
    moment = Moment.PEAK if word == "peak" else Moment.REST
    for category in (category for category in CATEGORY_ORDER if held.get(category)):
        ident, nbytes = f"{row.id}-{word}-{category.value}", held[category]
        yield Segment(ident, row.index, row.ranks, row.origin, moment, category, start, nbytes, word == "given-back")
        start += nbytes


def legend_of(segments: list[Segment], paddings: list[Padding], axis_max: int) -> tuple[LegendEntry, ...]:
    """What can be seen. Where an axis leaves all bars too short for that, what is there."""
    held = {segment.category for segment in segments if segment.moment is Moment.REST}
    visible = {segment.category for segment in segments if segment.nbytes >= MIN_SHARE_IN_LEGEND * axis_max}
    present = visible or {segment.category for segment in segments}
    entries = [LegendEntry(category, category in held) for category in CATEGORY_ORDER if category in present]
    if any(padding.nbytes >= MIN_SHARE_IN_LEGEND * axis_max for padding in paddings):
        entries.append(LegendEntry(None, True))
    return tuple(entries)


def _subtitle(
    predicted: Trace, measured: Trace | None, unit: str, verdict: tuple[str, ...], *, earlier: bool, expects_run: bool
) -> tuple[str, ...]:
    lines = [what_text(predicted.spec), _peak_line(SOURCE_LABEL[predicted.origin].capitalize(), predicted, unit)]
    if measured is not None:
        source = SOURCE_LABEL[measured.origin].capitalize()
        lines.append(_peak_line(f"{source} in an earlier run" if earlier else source, measured, unit))
    elif expects_run:
        lines.append("Measured: not run yet")
    return (*lines, *verdict, wire_line(predicted, unit), *_link_line(predicted, unit))


def wire_line(trace: Trace, unit: str) -> str:
    """What a rank sends in a step, and how many times what DDP's one all-reduce of the gradient sends."""
    spec, sent = trace.spec, max(rank.sent_nbytes for _, rank in alike(trace.ranks))
    if spec.ranks == 1:
        return "Wire: nothing; one rank has nobody to send to"
    gradient = spec.model.num_params * spec.recipe.grad.itemsize
    ratio = sent / ring_sent_nbytes(CollectiveOp.ALL_REDUCE, gradient, spec.ranks)
    times = "" if spec.strategy is Strategy.DDP else f", {ratio:.3g} x DDP's"
    return f"Wire: {amount(sent, unit)} sent by each rank in one step{times}"


def _link_line(trace: Trace, unit: str) -> tuple[str, ...]:
    """What offloading moves between a device and its host; nothing without it."""
    transfers = trace.ranks[0].transfers
    if not transfers:
        return ()
    down, up = (
        amount(sum(t.nbytes for t in transfers if t.direction is direction), unit)
        for direction in (Direction.TO_HOST, Direction.TO_DEVICE)
    )
    return (f"Link of each rank's device to its host: {down} down and {up} up in one step",)


def _peak_line(source: str, trace: Trace, unit: str) -> str:
    """The rank with the largest peak, and where it stands."""
    distinct = [rank for _, rank in alike(trace.ranks)]
    highest = max(distinct, key=lambda rank: rank.peak().total)
    peak: Peak = highest.peak()
    whose = "every rank" if len({rank.peak().total for rank in distinct}) == 1 else f"rank {highest.rank}"
    return (
        f"{source}: {amount(highest.rest_nbytes, unit)} at rest, peak {amount(peak.total, unit)} "
        f"in {place_text(peak)}, {whose if len(trace.ranks) > 1 else 'the only rank'}"
    )


def _notes(predicted: Trace, measured: Trace | None, groups: list[tuple[int, ...]]) -> tuple[str, ...]:
    notes = list(predicted.notes)
    if len(groups) < len(predicted.ranks):
        rows = "1 row" if len(groups) == 1 else f"{len(groups)} rows"
        notes.append(f"{len(predicted.ranks)} ranks in {rows}: those with equal bytes and equal padding share one.")
    if on_host := sum(predicted.ranks[0].at_rest_on_host.values()):
        notes.append(
            f"In the host's memory and not in the bars: {format_nbytes(on_host)} of states at rest, each rank."
        )
    padding = [rank.padding_nbytes for ranks, rank in alike(predicted.ranks) for _ in ranks]
    if any(padding):
        notes.append(f"Padding within what is held at rest: {_padding_text(padding)}.")
    if measured is not None:
        notes += [note for note in measured.notes if note not in notes]
    return tuple(notes)


def _padding_text(padding: list[int]) -> str:
    """The least and the most that a rank holds, each with the first rank that does."""
    if len(set(padding)) == 1:
        return f"{padding[0]:,} B on {'every rank' if len(padding) > 1 else 'the only rank'}"
    least, most = min(padding), max(padding)
    low = f"{least:,} B" if least else "none"
    return f"{low} on rank {padding.index(least)}, {most:,} B on rank {padding.index(most)}"
