"""How much work something is, counted and not timed: a clock says as much of the machine as of the code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def num_calls(act: Callable[[], object]) -> int:
    """How many Python functions `act()` enters: the same on a busy machine as on an idle one."""
    calls = 0

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls
