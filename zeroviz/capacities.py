"""How much memory a device has: by name, as 80GB or 80GiB, or as a number of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from zeroviz.errors import SpecError
from zeroviz.facts import GPU_CAPACITY_NBYTES
from zeroviz.quantity import GIB

DEFAULT_GPU = "h100-80gb"

# An assumption, not a measurement, and always printed as one: a process that trains on a GPU also holds a driver
# context with its kernels, NCCL's buffers, and gaps that the caching allocator cannot hand out.
DEFAULT_RESERVE_NBYTES = 2 * GIB
RESERVE_COVERS = "driver context, NCCL's buffers and the allocator's gaps"

_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtpe", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtpe", 1)},
}


@dataclass(frozen=True, slots=True)
class Capacity:
    """A device's memory and what it was asked for as. `is_nominal`: a vendor's figure, of which a driver keeps some."""

    name: str
    nbytes: int
    is_nominal: bool


def parse_capacity(text: str) -> Capacity:
    """From `h100-80gb`, `80GB`, `80GiB` or `85899345920`. SpecError listing the names otherwise."""
    name = text.strip().lower()
    if name in GPU_CAPACITY_NBYTES:
        return Capacity(name, GPU_CAPACITY_NBYTES[name], True)
    nbytes = _nbytes(text)
    if not nbytes:
        raise SpecError(
            f"--gpu is {text!r}; allowed are {', '.join(GPU_CAPACITY_NBYTES)}, or a capacity such as 80GB, 80GiB or "
            "85899345920 (bytes)."
        )
    return Capacity(text.strip(), nbytes, False)


def parse_reserve(text: str) -> int:
    """From `2GiB`, `1.5GB`, `0` or a number of bytes."""
    nbytes = _nbytes(text)
    if nbytes is None:
        raise SpecError(f"--reserve is {text!r}; it must be a number of bytes, such as 2GiB, 1.5GB, 1000000000 or 0.")
    return nbytes


def _nbytes(text: str) -> int | None:
    """Whole bytes from a number and an optional unit; None for anything else, fractions of a byte and 1e21 or more."""
    cleaned = text.strip().lower().replace("_", "").replace(",", "")
    digits = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = cleaned[len(digits) :].strip() or "b"
    try:
        number = Decimal(digits)
        # A huge exponent would otherwise be expanded into that many digits before it is refused.
        if unit not in _UNITS or not number.is_finite() or number < 0 or abs(number.adjusted()) > 24:
            return None
        nbytes = number * _UNITS[unit]
    except InvalidOperation:
        return None
    return int(nbytes) if nbytes == nbytes.to_integral_value() and nbytes < 10**21 else None
