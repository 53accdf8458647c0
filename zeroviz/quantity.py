"""Bytes and counts: integers inside, units spelt out at the edge.

GB is 1e9 bytes and GiB is 2**30 bytes; no function here prints one under the name of the other.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from zeroviz.errors import SpecError

GB = 10**9
GIB = 2**30

DECIMAL_UNITS = tuple((f"{letter}B", 1000**power) for power, letter in enumerate("kMGTPEZYRQ", 1))[::-1]
"""(name, bytes), the largest first: an absurd request stays readable, and nothing has five digits before its point."""
BINARY_UNITS = tuple((f"{letter}iB", 1024**power) for power, letter in enumerate("KMGTPEZYRQ", 1))[::-1]
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def format_nbytes(nbytes: int) -> str:
    """A decimal-unit text for a person, e.g. `38.50 GB`, `14.21 MB`, `512 B`; four significant digits."""
    for unit, scale in DECIMAL_UNITS:
        if abs(nbytes) >= scale:
            return f"{Decimal(nbytes) / scale:,.4g} {unit}"
    return f"{nbytes} B"


def format_decimal_nbytes(nbytes: int) -> str:
    """Decimal unit with two decimals, `38.50 GB`, to stand in a column."""
    return _in_column(nbytes, DECIMAL_UNITS)


def format_binary_nbytes(nbytes: int) -> str:
    """Binary unit with two decimals, `35.86 GiB`, to stand in a column: what drivers and allocators print."""
    return _in_column(nbytes, BINARY_UNITS)


def _in_column(nbytes: int, units: tuple[tuple[str, int], ...]) -> str:
    for unit, scale in units:
        if abs(nbytes) >= scale:
            value = nbytes / scale
            return f"{value:,.2f} {unit}" if abs(value) < 9999.995 else f"{value:.2e} {unit}"
    return f"{nbytes} B"


def format_gb_gib(nbytes: int) -> str:
    """Both units side by side, so that neither can be taken for the other: `38.50 GB (35.86 GiB)`."""
    return f"{nbytes / GB:,.2f} GB ({nbytes / GIB:,.2f} GiB)"


def parse_count(text: str, what: str) -> int:
    """A whole positive count from `7e9`, `7_000_000`, `7,000,000` or `7B`. Raises SpecError naming `what`."""
    cleaned = text.strip().replace("_", "").replace(",", "")
    scale = 1
    if cleaned and cleaned[-1].lower() in _SUFFIXES:
        scale = _SUFFIXES[cleaned[-1].lower()]
        cleaned = cleaned[:-1]
    try:
        # A huge exponent would otherwise be expanded into that many digits before it is refused.
        value = Decimal(cleaned)
        if not value.is_finite() or value.adjusted() > 18:
            raise InvalidOperation
        value *= scale
    except InvalidOperation:
        raise SpecError(
            f"{what} is {text!r}; it must be a whole number from 1 to 1e18, such as 7e9, 7B or 7_000_000."
        ) from None
    if value != value.to_integral_value() or not 1 <= value <= 10**18:
        raise SpecError(f"{what} is {text!r}; it must be a whole number from 1 to 1e18, such as 7e9, 7B or 7_000_000.")
    return int(value)
