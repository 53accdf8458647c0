"""Errors meant for a person: one sentence with what was given, what is allowed and what to do."""

from __future__ import annotations


class ZerovizError(Exception):
    """Base class: the message is a whole sentence and is shown without a traceback."""


class SpecError(ZerovizError, ValueError):
    """The request itself is wrong; nothing was started."""


class RunError(ZerovizError, RuntimeError):
    """A run that was well specified failed. `rank` names the first rank that failed, if one did."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class TraceError(ZerovizError, ValueError):
    """A trace or report file cannot be read as one."""
