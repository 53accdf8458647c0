"""Errors meant for a person: one sentence with what was given, what is allowed and what to do."""

from __future__ import annotations

import re

_LONG_WORD = re.compile(r"""([^\s'"]{80})[^\s'"]{80,}""")
"""No path or name that a person gave is as long."""


class ZerovizError(Exception):
    """Base class: the message is a whole sentence and is shown without a traceback. What it quotes is cut short."""

    def __init__(self, message: str) -> None:
        super().__init__(_LONG_WORD.sub(r"\1…", message))


class SpecError(ZerovizError, ValueError):
    """The request itself is wrong; nothing was started."""


class RunError(ZerovizError, RuntimeError):
    """A run that was well specified failed. `rank` names the first rank that failed, if one did."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class TraceError(ZerovizError, ValueError):
    """A trace or report file cannot be read as one."""
