"""The link between a device and its host: what offloading moves over it each step. Not the wire between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
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
