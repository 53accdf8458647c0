"""An axis of bytes: its one unit, its ticks, and how an amount is said in that unit. Shared by every picture."""

from __future__ import annotations

from dataclasses import dataclass

from zeroviz.quantity import DECIMAL_UNITS

NUM_TICKS = 8
_SCALES = dict(DECIMAL_UNITS)


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the axis."""

    nbytes: int
    label: str


def axis_unit(largest_nbytes: int) -> tuple[str, int]:
    """The unit of an axis that ends at `largest_nbytes`, and how many bytes it has."""
    # 1,137 GB rather than 1.137 TB: most bars are shorter than the axis, and 0.2822 TB is harder to read than 282.2 GB.
    return next((pair for pair in DECIMAL_UNITS if largest_nbytes >= 2 * pair[1]), ("B", 1))


def axis_words(unit: str, scale: int, what: str) -> str:
    """`GB held by a rank (1 GB = 1,000,000,000 bytes)`, so that nobody takes it for GiB."""
    return f"{unit} {what}" + (f" (1 {unit} = {scale:,} bytes)" if scale > 1 else "")


def ticks(start_nbytes: int, largest_nbytes: int, scale: int, most: int = NUM_TICKS) -> tuple[Tick, ...]:
    """Ticks from start to largest at 1, 2, 2.5 or 5 times a power of ten, about `most` of them."""
    length = max(1, largest_nbytes - start_nbytes)
    power = 10
    while power * most < length:
        power *= 10
    # The steps of the last decade, smallest first: the first that needs at most `most` of itself.
    steps = (power * tenths // 100 for tenths in (10, 20, 25, 50, 100))
    step = next(step for step in steps if step * most >= length)
    first = -(-start_nbytes // step) * step
    return tuple(Tick(at, f"{at / scale:,g}") for at in range(first, largest_nbytes + 1, step))


def amount(nbytes: int, unit: str) -> str:
    """Four significant digits in `unit`, and never an exponent. What is less than a tenth of it is in the largest unit
    of which it is one or more, and thus begins with no zeros."""
    scale = _SCALES.get(unit, 1)
    if abs(nbytes) * 10 < scale:
        unit, scale = next((pair for pair in DECIMAL_UNITS if abs(nbytes) >= pair[1]), ("B", 1))
    if scale == 1:
        return f"{nbytes:,} B"
    value = nbytes / scale
    return f"{value:,.0f} {unit}" if abs(value) >= 999.95 else f"{value:#.4g} {unit}"
