"""What a GPU has, as a line across the bars: where it stands, what of a bar lies beyond it, and all of it in words.

The line is the budget: the capacity less the reserve, as in `zeroviz budget` and on the map. A peak fits if it is at
most that. Pure: bytes and words, no points.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from zeroviz.capacities import RESERVE_COVERS, Capacity
from zeroviz.errors import SpecError
from zeroviz.quantity import BINARY_UNITS, DECIMAL_UNITS, format_nbytes

STRETCH = 3, 2
"""An axis is made longer to show the line, up to 3/2 of what it would be: bars keep two thirds of their length. A line
further off is an arrow at the axis's end."""


def both(nbytes: int) -> str:
    """`83.75 GB (78.00 GiB)`: the decimal unit and its binary sibling side by side; plainly `12 B` below a kilobyte."""
    for (decimal, scale), (binary, binary_scale) in zip(DECIMAL_UNITS, BINARY_UNITS, strict=True):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:,.2f} {decimal} ({nbytes / binary_scale:,.2f} {binary})"
    return f"{nbytes} B"


@dataclass(frozen=True, slots=True)
class CapacityLine:
    """`nbytes` of a device called `label`, of which `reserve_nbytes` are kept for what is no tensor.

    is_nominal: whether it is a vendor's figure. Raises SpecError for a reserve that leaves nothing.
    """

    label: str
    nbytes: int
    reserve_nbytes: int
    is_nominal: bool = False

    def __post_init__(self) -> None:
        if refusal := nothing_left(self.nbytes, self.reserve_nbytes, self.label):
            raise SpecError(refusal)

    @classmethod
    def of(cls, capacity: Capacity, reserve_nbytes: int) -> CapacityLine:
        return cls(capacity.name, capacity.nbytes, reserve_nbytes, capacity.is_nominal)

    @property
    def budget_nbytes(self) -> int:
        """What a peak may be at most."""
        return self.nbytes - self.reserve_nbytes

    @property
    def words(self) -> str:
        """At the line: `h100-80gb less its reserve: 83.75 GB (78.00 GiB)`."""
        return f"{self.label}{' less its reserve' if self.reserve_nbytes else ''}: {both(self.budget_nbytes)}"

    @property
    def note(self) -> str:
        """Capacity, reserve and rule, in the map's words."""
        nominal = ", the vendor's nominal figure" if self.is_nominal else ""
        kept = f"{both(self.reserve_nbytes)} of it are assumed for {RESERVE_COVERS}"
        return (
            f"{self.label}: {both(self.nbytes)}{nominal}; "
            f"{kept if self.reserve_nbytes else 'nothing of it is kept in reserve'}. "
            f"A peak fits if it is at most {both(self.budget_nbytes)}."
        )

    def verdict(self, rest_nbytes: int, peak_nbytes: int) -> str:
        """Whether a rank with these figures fits, and by how much: `Fits h100-80gb with 22.46 GB (20.92 GiB) to
        spare`."""
        spare = self.budget_nbytes - peak_nbytes
        if spare >= 0:
            return f"Fits {self.label} with {both(spare)} to spare"
        at_rest = rest_nbytes - self.budget_nbytes
        nor = f", nor at rest by {both(at_rest)}" if at_rest > 0 else ""
        return f"Does not fit {self.label} by {both(-spare)} at the peak{nor}"

    def end_of_axis(self, axis_max: int) -> int:
        """Where an axis ends that would end at `axis_max` without this line."""
        times, over = STRETCH
        return self.budget_nbytes if axis_max < self.budget_nbytes <= axis_max * times // over else axis_max


@dataclass(frozen=True, slots=True)
class Beyond:
    """What of a row's bar lies beyond the line: `nbytes` from `start`, which is the budget."""

    id: str
    row: int
    start: int
    nbytes: int


class Bar(Protocol):
    """What is asked of a scene's row."""

    @property
    def id(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def rest_nbytes(self) -> int: ...
    @property
    def peak_nbytes(self) -> int: ...


def beyond_of(line: CapacityLine | None, bars: Iterable[Bar]) -> tuple[Beyond, ...]:
    """Of every bar what does not fit."""
    if line is None:
        return ()
    end = line.budget_nbytes
    return tuple(
        Beyond(f"{bar.id}-beyond", bar.index, end, bar.peak_nbytes - end) for bar in bars if bar.peak_nbytes > end
    )


def verdict_lines(line: CapacityLine | None, predicted: Sequence[Bar], measured: Sequence[Bar]) -> tuple[str, ...]:
    """The verdict on the bar that peaks highest, predicted; and on a measured one where that says otherwise."""
    if line is None:
        return ()
    first, *others = (max(bars, key=lambda bar: bar.peak_nbytes) for bars in (predicted, measured) if bars)
    words = line.verdict(first.rest_nbytes, first.peak_nbytes)
    for other in others:
        if (first.peak_nbytes <= line.budget_nbytes) != (other.peak_nbytes <= line.budget_nbytes):
            what = "is too much" if other.peak_nbytes > line.budget_nbytes else "fits"
            words += f"; the measured peak {what}, by {both(abs(other.peak_nbytes - line.budget_nbytes))}"
    return (words,)


def nothing_left(capacity_nbytes: int, reserve_nbytes: int, label: str = "") -> str:
    """A sentence where the reserve leaves nothing of the capacity, or is no reserve at all; else empty."""
    if 0 <= reserve_nbytes < capacity_nbytes:
        return ""
    if reserve_nbytes < 0:
        return f"A reserve of {reserve_nbytes:,} bytes was given; it must be 0 or more."
    named = f" ({label})" if label else ""
    return (
        f"The reserve of {format_nbytes(reserve_nbytes)} leaves nothing of {format_nbytes(capacity_nbytes)}{named}; "
        "give a smaller one, or 0."
    )
