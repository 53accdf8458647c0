"""What fits, as a map: ranks across, batch or sequence upward, in each cell what is left of a GPU. Pure: data.

Every cell is the peak of one spec (`zeroviz.peak`, microseconds a cell) against what the reserve leaves of a capacity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from zeroviz.budget import largest_batch, longest_seq
from zeroviz.capacities import RESERVE_COVERS, Capacity
from zeroviz.errors import SpecError
from zeroviz.models import Family
from zeroviz.peak import peak_of
from zeroviz.quantity import format_gb_gib, format_nbytes
from zeroviz.spec import Implementation, RunSpec
from zeroviz.wording import overlap_options, recipe_sum, step_options, strategy_label

RANKS = tuple(2**power for power in range(12))
NUM_ROWS = 12
LEAST_ROWS = 4
MAX_VALUE = 2**24


class Upward(Enum):
    """What the map shows from bottom to top."""

    BATCH = "batch"
    """Sequences on each rank."""
    SEQ = "sequence"
    """Tokens in a sequence."""

    @property
    def field(self) -> str:
        """Its name in a RunSpec."""
        return "batch" if self is Upward.BATCH else "seq"

    def at(self, spec: RunSpec, ranks: int, value: int) -> RunSpec:
        """`spec` with other ranks, and with another batch or sequence."""
        if self is Upward.BATCH:
            return replace(spec, ranks=ranks, batch=value)
        return replace(spec, ranks=ranks, seq=value)


@dataclass(frozen=True, slots=True)
class Cell:
    """One spec of the map. spare_nbytes: what its peak leaves of the budget; less than 0 where it does not fit."""

    ranks: int
    value: int
    peak_nbytes: int
    spare_nbytes: int

    @property
    def fits(self) -> bool:
        return self.spare_nbytes >= 0

    @property
    def words(self) -> str:
        """What is spare or missing, in GB: `+61.3`, `-4.2`, `-12k`, `-6e9`, always with its sign."""
        value = self.spare_nbytes / 10**9
        if abs(value) >= 9_999_500:
            return f"{value:+.0e}".replace("e+0", "e+").replace("e+", "e")
        if abs(value) >= 9999.5:
            return f"{value / 1000:+,.0f}k"
        if abs(value) >= 99.95:
            return f"{value:+.0f}"
        words = f"{value:+.1f}"
        return words if float(words) or not self.spare_nbytes else ("+0" if self.fits else "-0")


@dataclass(frozen=True)
class HeatMap:
    """The map as data. `rows` from the bottom up, each with one cell for every number of `ranks`."""

    spec: RunSpec
    upward: Upward
    capacity: Capacity
    reserve_nbytes: int
    ranks: tuple[int, ...]
    values: tuple[int, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str
    subtitle: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def budget_nbytes(self) -> int:
        return self.capacity.nbytes - self.reserve_nbytes

    @property
    def current(self) -> Cell:
        """The cell of the spec the map was made of."""
        value = getattr(self.spec, self.upward.field)
        return self.rows[self.values.index(value)][self.ranks.index(self.spec.ranks)]

    @property
    def boundary(self) -> tuple[tuple[int, int, int, int], ...]:
        """Edges between a cell that fits and a neighbour that does not, as (column, row) to (column, row) of the grid's
        corners, counted from the lower left."""
        edges = []
        for row, cells in enumerate(self.rows):
            for column, cell in enumerate(cells):
                if column + 1 < len(cells) and cells[column + 1].fits != cell.fits:
                    edges.append((column + 1, row, column + 1, row + 1))
                if row + 1 < len(self.rows) and self.rows[row + 1][column].fits != cell.fits:
                    edges.append((column, row + 1, column + 1, row + 1))
        return tuple(edges)

    @property
    def sentence(self) -> str:
        """The picture in words, for those who do not see it."""
        return " ".join(f"{line}." for line in (self.title, *self.subtitle))


def build_heatmap(spec: RunSpec, upward: Upward, capacity: Capacity, reserve_nbytes: int) -> HeatMap:
    """The map around `spec`: its own ranks and batch or sequence are among the cells, all else stays as it is.

    Raises SpecError for a bare count, which has neither batch nor sequence, for code that is not our own, and for a
    reserve that leaves nothing.
    """
    if spec.model.family is Family.BARE:
        raise SpecError(
            f"{spec.model.name} is a bare parameter count: it has no activations, so no batch and no sequence to map; "
            "name a model."
        )
    if spec.impl is not Implementation.OWN:
        raise SpecError(
            f"The map is of our own code's peaks, and this state's implementation is {spec.impl.value}; choose own."
        )
    if not 0 <= reserve_nbytes < capacity.nbytes:
        raise SpecError(
            f"The reserve of {format_nbytes(reserve_nbytes)} leaves nothing of {format_nbytes(capacity.nbytes)} "
            f"({capacity.name}); give a smaller one, or 0."
        )
    ranks = _with(_ranks(spec), spec.ranks)
    budget = capacity.nbytes - reserve_nbytes
    values = _with(_values(spec, upward, budget), getattr(spec, upward.field))
    rows = tuple(tuple(_cell(upward.at(spec, count, value), value, budget) for count in ranks) for value in values)
    found = HeatMap(spec, upward, capacity, reserve_nbytes, ranks, values, rows, "", (), ())
    return replace(found, title=_title(found), subtitle=_subtitle(found), notes=_notes(found))


def _cell(spec: RunSpec, value: int, budget_nbytes: int) -> Cell:
    peak = peak_of(spec).total
    return Cell(spec.ranks, value, peak, budget_nbytes - peak)


def _with(usual: Iterable[int], value: int) -> tuple[int, ...]:
    return tuple(sorted({*usual, value}))


def _ranks(spec: RunSpec) -> tuple[int, ...]:
    """Powers of two; of shard groups as many."""
    if spec.shard_ranks is None:
        return RANKS
    group = spec.shard_ranks
    return tuple(group * power for power in RANKS if group * power <= RANKS[-1]) or (group,)


def _values(spec: RunSpec, upward: Upward, budget_nbytes: int) -> tuple[int, ...]:
    """Powers of two up to the first that fits on no number of ranks, or to what the model or this map can take."""
    roomiest = replace(spec, ranks=_ranks(spec)[-1])
    is_seq = upward is Upward.SEQ
    limit = spec.model.positions if is_seq and spec.model.family is Family.GPT2 else MAX_VALUE
    answer = longest_seq(roomiest, budget_nbytes) if is_seq else largest_batch(roomiest, budget_nbytes)
    most = max(answer.value or 0, 2 ** (LEAST_ROWS - 2))
    first_beyond = 1 << most.bit_length()
    powers = [power for power in (2**exponent for exponent in range(25)) if power <= min(first_beyond, limit)]
    if first_beyond > limit:
        powers = list(_with(powers, limit))
    return tuple(powers[-NUM_ROWS:])


def _title(found: HeatMap) -> str:
    return f"Does {found.spec.model.name} fit in {found.capacity.name}?"


def _subtitle(found: HeatMap) -> tuple[str, ...]:
    spec = found.spec
    fixed = f"sequence {spec.seq:,}" if found.upward is Upward.BATCH else f"batch {spec.batch:,}"
    groups = "" if spec.shard_ranks is None else f" in groups of {spec.shard_ranks:,}"
    strategy = f"{strategy_label(spec)}{groups}, {spec.precision.value}"
    options = [*overlap_options(spec), *step_options(spec)]
    now = found.current
    verdict = "fits with" if now.fits else "does not fit by"
    spare = f"{format_nbytes(abs(now.spare_nbytes))} {'to spare' if now.fits else ''}".strip()
    peak = f"{spec.ranks:,} rank{'s' * (spec.ranks > 1)} and {found.upward.value} {now.value:,}: peak"
    return (
        ", ".join([f"{strategy}: {recipe_sum(spec, 'bytes a parameter')}; unit {spec.unit}", fixed, *options]),
        f"Framed, {peak} {format_nbytes(now.peak_nbytes)} {verdict} {spare}",
    )


def _notes(found: HeatMap) -> tuple[str, ...]:
    nominal = ", the vendor's nominal figure" if found.capacity.is_nominal else ""
    reserve = f"{format_gb_gib(found.reserve_nbytes)} of it are assumed for {RESERVE_COVERS}"
    kept = reserve if found.reserve_nbytes else "nothing of it is kept in reserve"
    groups = "More ranks are more shard groups, which are copies: none of them makes a rank hold less."
    return (
        *([groups] if found.spec.shard_ranks is not None else []),
        f"{found.capacity.name}: {format_gb_gib(found.capacity.nbytes)}{nominal}; {kept}.",
        f"A peak fits if it is at most {format_gb_gib(found.budget_nbytes)}.",
        "Activations and temporaries are those of torch's CPU kernels; near the edge measure before you rely on it.",
    )
