"""Members: an Enum whose members are quick to look up, for walks count and remember by them thousands of times."""

from __future__ import annotations

from enum import Enum


class Members(Enum):
    """Members are single objects, so their identity is their hash; Enum's own is a call into Python."""

    __hash__ = object.__hash__
