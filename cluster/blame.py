"""Who failed first: one sentence and one rank out of what all ranks reported.

When a rank fails, its peers fail after it with "connection closed" or hang. Those are consequences; the cause is a
process that died, or an exception of another kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.engine import RankFailure
from zeroviz.errors import RunError, SpecError, ZerovizError

Answer = dict[str, Any] | RankFailure | None


class RemoteTracebackError(Exception):
    """The traceback of a rank's exception as text; the `__cause__` of the error that names the rank."""


def find_cause(answers: Sequence[Answer], deaths: Mapping[int, str]) -> ZerovizError | None:
    """The failure to report, or None while there is none or only consequences are in.

    answers: each rank's, None while it is still out. deaths: ranks whose process ended, and how (`signal 9`).
    """
    for rank, how in deaths.items():
        if answers[rank] is None:
            hint = " (the system's answer to memory running out, among others)" if how == "signal 9" else ""
            return RunError(
                f"Rank {rank} died during the run: its process ended with {how}{hint}; run again for fresh engines.",
                rank=rank,
            )
    for rank, answer in enumerate(answers):
        if isinstance(answer, RankFailure) and not answer.is_connection:
            return _blame(rank, answer)
    return None


def find_consequence(answers: Sequence[Answer]) -> ZerovizError | None:
    """The first rank that reports a lost connection; to be told when no cause has come to light."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, RankFailure):
            return _blame(rank, answer)
    return None


def _blame(rank: int, failure: RankFailure) -> ZerovizError:
    sentence = failure.message.strip().partition("\n")[0].rstrip(".")
    error: ZerovizError
    if failure.is_spec_error:
        error = SpecError(f"{sentence}.")
    else:
        error = RunError(
            f"Rank {rank} failed with {failure.kind}: {sentence}."
            if sentence
            else f"Rank {rank} failed with {failure.kind}.",
            rank=rank,
        )
    error.__cause__ = RemoteTracebackError(failure.traceback)
    return error
