"""The link between a device and its host: what offloading moves over it each step. Not the wire between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zeroviz.members import Members


class Direction(Members):
    """Which way bytes go."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy over the link as a rank made it; `dtype` is that of the elements that travel."""

    direction: Direction
    dtype: str
    nbytes: int
    phase: str
    unit: str


@dataclass(frozen=True, slots=True)
class Copies:
    """Some copies summed."""

    count: int = 0
    nbytes: int = 0


def sum_copies(transfers: Iterable[Transfer]) -> dict[tuple[Direction, str], Copies]:
    """Copies by (direction, dtype), in the order in which they first come."""
    total: dict[tuple[Direction, str], Copies] = {}
    for transfer in transfers:
        key = (transfer.direction, transfer.dtype)
        before = total.get(key, Copies())
        total[key] = Copies(before.count + 1, before.nbytes + transfer.nbytes)
    return total
