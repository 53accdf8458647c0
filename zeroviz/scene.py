"""Trace -> Scene: every mark of the picture in bytes, with an id, and every word on it. Pure: a picture as data.

A row is one rank seen by one source. From 0 to `rest_nbytes` it stacks what the rank holds at rest, by category;
from there to `peak_nbytes` what the peak adds, by category; the outline runs from 0 to the peak. Nothing here knows of
points, fonts or colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zeroviz.compare import Moment, place_text
from zeroviz.errors import TraceError
from zeroviz.models import Family
from zeroviz.partition import plan_for
from zeroviz.quantity import format_nbytes
from zeroviz.spec import RunSpec
from zeroviz.trace import CATEGORY_ORDER, Category, Origin, Peak, RankTrace, Trace

MAX_ROWS_OF_RANKS = 16
"""Above this many ranks, neighbours with equal figures share a row."""
NUM_TICKS = 8

SOURCE_LABEL = {
    Origin.PREDICTED: "predicted",
    Origin.LIVE: "measured",
    Origin.RECORDED: "recorded",
    Origin.REHEARSED: "rehearsed",
}
_AXIS_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a bar: `nbytes` of `category` from `start`. PEAK segments hold what the peak adds to rest."""

    id: str
    row: int
    ranks: tuple[int, ...]
    origin: Origin
    moment: Moment
    category: Category
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Padding:
    """How much of a row's bytes at rest is padding. A trace has one sum for it, laid at the end of what is held."""

    id: str
    row: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One rank, or several equal ones, as one source sees them; also the outline up to the peak."""

    id: str
    index: int
    ranks: tuple[int, ...]
    origin: Origin
    rest_nbytes: int
    peak_nbytes: int
    peak_place: str
    rest_difference: int | None
    peak_difference: int | None

    @property
    def rank_label(self) -> str:
        return f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]}-{self.ranks[-1]}"

    @property
    def source_label(self) -> str:
        return SOURCE_LABEL[self.origin]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A category as it appears in the picture; `category` None is padding. `held` is false for what only a peak has."""

    category: Category | None
    held: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the axis."""

    nbytes: int
    label: str


@dataclass(frozen=True, slots=True)
class Reference:
    """A figure to measure all bars against; the axis reaches at least as far."""

    nbytes: int
    label: str


@dataclass(frozen=True)
class Scene:
    """The whole picture as data."""

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
    reference: Reference | None
    notes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        return " ".join(f"{line}." for line in (self.title, self.recipe, *self.subtitle))


def build_scene(predicted: Trace, measured: Trace | None = None, *, reference: Reference | None = None) -> Scene:
    """The picture of a trace, with a second one of the same spec beside it. Raises TraceError for another spec.

    Pictures that are to be compared by eye are given the same `reference`.
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
            row = _row(len(rows), ranks, trace.origin, seen, None if trace is predicted else ours)
            rows.append(row)
            segments += _segments(row, seen)
            if seen.padding_nbytes:
                start = seen.rest_nbytes - seen.padding_nbytes
                paddings.append(Padding(f"{row.id}-padding", row.index, start, seen.padding_nbytes))
    axis_max = max(reference.nbytes if reference else 0, *(row.peak_nbytes for row in rows))
    ticks, axis_label = _axis(axis_max)
    return Scene(
        spec=predicted.spec,
        title=title(predicted.spec),
        recipe=recipe_text(predicted.spec),
        subtitle=_subtitle(predicted, measured),
        rows=tuple(rows),
        segments=tuple(segments),
        paddings=tuple(paddings),
        legend=_legend(segments, paddings),
        ticks=ticks,
        axis_label=axis_label,
        axis_max=axis_max,
        reference=reference,
        notes=_notes(predicted, measured, groups),
    )


def _groups(predicted: Trace, measured: Trace | None) -> list[tuple[int, ...]]:
    """Ranks by row: one each, or runs of neighbours with equal figures when there are many."""
    if len(predicted.ranks) <= MAX_ROWS_OF_RANKS:
        return [(rank.rank,) for rank in predicted.ranks]
    groups: list[list[int]] = []
    last_key: object = None
    for index, ours in enumerate(predicted.ranks):
        key = [_figures(ours), None if measured is None else _figures(measured.ranks[index])]
        if key == last_key:
            groups[-1].append(ours.rank)
        else:
            groups.append([ours.rank])
        last_key = key
    return [tuple(group) for group in groups]


def _figures(rank: RankTrace) -> tuple[object, ...]:
    peak = rank.peak()
    return rank.at_rest, peak.by_category, place_text(peak), rank.padding_nbytes


def _row(index: int, ranks: tuple[int, ...], origin: Origin, seen: RankTrace, ours: RankTrace | None) -> Row:
    peak = seen.peak()
    name = f"rank{ranks[0]}" if len(ranks) == 1 else f"rank{ranks[0]}-{ranks[-1]}"
    return Row(
        id=f"{name}-{SOURCE_LABEL[origin]}",
        index=index,
        ranks=ranks,
        origin=origin,
        rest_nbytes=seen.rest_nbytes,
        peak_nbytes=peak.total,
        peak_place=place_text(peak),
        rest_difference=None if ours is None else seen.rest_nbytes - ours.rest_nbytes,
        peak_difference=None if ours is None else peak.total - ours.peak().total,
    )


def _segments(row: Row, seen: RankTrace) -> list[Segment]:
    """At rest from 0 up, then what the peak adds.

    Our own implementation holds at the peak all that it holds at rest. Where something is given back before the peak,
    the additions end at the peak all the same, and so begin below the end of the bar at rest.
    """
    rest, peak = seen.at_rest, seen.peak().by_category
    added = {c: peak.get(c, 0) - rest.get(c, 0) for c in CATEGORY_ORDER if peak.get(c, 0) > rest.get(c, 0)}
    start_added = row.peak_nbytes - sum(added.values())
    return [*_stack(row, Moment.REST, rest, 0), *_stack(row, Moment.PEAK, added, start_added)]


def _stack(row: Row, moment: Moment, held: Mapping[Category, int], start: int) -> Iterable[Segment]:
    word = "rest" if moment is Moment.REST else "peak"
    for category, nbytes in held.items():
        ident = f"{row.id}-{word}-{category.value}"
        yield Segment(ident, row.index, row.ranks, row.origin, moment, category, start, nbytes)
        start += nbytes


def _legend(segments: list[Segment], paddings: list[Padding]) -> tuple[LegendEntry, ...]:
    held = {segment.category for segment in segments if segment.moment is Moment.REST}
    present = {segment.category for segment in segments}
    entries = [LegendEntry(category, category in held) for category in CATEGORY_ORDER if category in present]
    return (*entries, LegendEntry(None, True)) if paddings else tuple(entries)


def _axis(largest: int) -> tuple[tuple[Tick, ...], str]:
    """Ticks at 1, 2, 2.5 or 5 times a power of ten, in one decimal unit named on the axis."""
    unit, scale = next((pair for pair in _AXIS_UNITS if largest >= pair[1]), ("B", 1))
    power = 10
    while power * NUM_TICKS < largest:
        power *= 10
    # The steps of the last decade, smallest first: the first that needs at most NUM_TICKS of itself.
    steps = (power * tenths // 100 for tenths in (10, 20, 25, 50, 100))
    step = next(step for step in steps if step * NUM_TICKS >= largest)
    ticks = tuple(Tick(at, f"{at / scale:g}") for at in range(0, largest + 1, step))
    meaning = f" (1 {unit} = {scale:,} bytes)" if scale > 1 else ""
    return ticks, f"{unit} held by a rank{meaning}"


def title(spec: RunSpec) -> str:
    """A spec in a few words: `ZeRO-3 on 4 ranks, bf16-mixed`."""
    ranks = "1 rank" if spec.ranks == 1 else f"{spec.ranks} ranks"
    return f"{spec.strategy.label} on {ranks}, {spec.precision.value}"


def recipe_text(spec: RunSpec) -> str:
    """The precision recipe as a sum: `2 + 2 + 4 + 8 = 16 bytes a parameter`."""
    recipe = spec.precision
    master = [recipe.master.itemsize] if recipe.master else []
    widths = [recipe.param.itemsize, recipe.grad.itemsize, *master, 2 * recipe.moments.itemsize]
    return f"{' + '.join(map(str, widths))} = {recipe.bytes_per_param} bytes a parameter"


def _subtitle(predicted: Trace, measured: Trace | None) -> tuple[str, ...]:
    spec = predicted.spec
    units = len(plan_for(spec).units)
    what = f"{spec.model.name}, {spec.model.num_params:,} parameters in {units} {'unit' if units == 1 else 'units'}"
    batch = "" if spec.model.family is Family.BARE else f"; {spec.batch} x {spec.seq} tokens on each rank"
    lines = [f"{what} ({spec.unit}){batch}", _peak_line("Predicted", predicted)]
    if measured is not None:
        lines.append(_peak_line(SOURCE_LABEL[measured.origin].capitalize(), measured))
    return tuple(lines)


def _peak_line(source: str, trace: Trace) -> str:
    """The rank with the largest peak, and where it stands."""
    highest = max(trace.ranks, key=lambda rank: rank.peak().total)
    peak: Peak = highest.peak()
    whose = "every rank" if len({rank.peak().total for rank in trace.ranks}) == 1 else f"rank {highest.rank}"
    return (
        f"{source}: {format_nbytes(highest.rest_nbytes)} at rest, peak {format_nbytes(peak.total)} "
        f"in {place_text(peak)}, {whose if len(trace.ranks) > 1 else 'the only rank'}"
    )


def _notes(predicted: Trace, measured: Trace | None, groups: list[tuple[int, ...]]) -> tuple[str, ...]:
    notes = list(predicted.notes)
    if len(groups) < len(predicted.ranks):
        notes.append(f"{len(predicted.ranks)} ranks in {len(groups)} rows: neighbours with equal figures share one.")
    padding = [rank.padding_nbytes for rank in predicted.ranks]
    if any(padding):
        least, most = min(padding), max(padding)
        amount = f"{most:,} B" if least == most else f"{least:,} to {most:,} B"
        notes.append(f"Padding is {amount} of what a rank holds at rest.")
    if measured is not None:
        notes += [note for note in measured.notes if note not in notes]
    return tuple(notes)
