"""Watch a run until every rank has answered; when one fails, say which failed first.

When a rank fails, its peers fail after it with "connection closed", or hang. Those are consequences; the cause is a
process that died, or an exception of another kind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ipyparallel import AsyncResult

from cluster.engine import RankFailure
from cluster.pool import POLL_S, Pool, exit_text
from zeroviz.errors import RunError, SpecError, ZerovizError

CAUSE_GRACE_S = 1.0  # how long a consequence waits for its cause to come to light

Answer = dict[str, Any] | RankFailure | None


class RemoteTracebackError(Exception):
    """The traceback of a rank's exception as text; the `__cause__` of the error that names the rank."""


async def wait_for_answers(pool: Pool, calls: Sequence[AsyncResult], timeout_s: float) -> list[dict[str, Any]]:
    """Every rank's answer, in rank order. Raises the first failure, or RunError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    grace_ends: float | None = None
    while True:
        exits = pool.exits
        deaths = {
            rank: exit_text(exits[facts.pid])
            for rank, facts in enumerate(pool.facts[: len(calls)])
            if facts.pid in exits
        }
        answers = [_answer(call) for call in calls]
        if cause := find_cause(answers, deaths):
            raise cause
        now = time.monotonic()
        waiting = [rank for rank, answer in enumerate(answers) if answer is None]
        if consequence := find_consequence(answers):
            grace_ends = grace_ends or now + CAUSE_GRACE_S
            if not waiting or now > grace_ends:
                raise consequence
        elif not waiting:
            pool.forget(calls)
            return [answer for answer in answers if isinstance(answer, dict)]
        if pool.controller_is_gone:
            raise RunError("The controller of the engines died during the run; run again for fresh ones.")
        if now > deadline:
            raise RunError(
                f"The run was not done after {timeout_s:.0f} s; ranks {waiting} have not answered.", rank=waiting[0]
            )
        await asyncio.sleep(POLL_S)


def _answer(call: AsyncResult) -> Answer:
    if not call.ready():
        return None
    if call.successful():
        answer: Answer = call.get()
        return answer
    # ipyparallel's own failure: the call could not be unpacked, or the controller gave the engine up.
    error = call.exception()
    kind = type(error).__name__
    return RankFailure(kind, str(error), "", is_spec_error=False, is_connection=kind == "EngineError")


async def all_ready(calls: Sequence[AsyncResult]) -> bool:
    """Whether all calls are answered, well or badly, within the grace."""
    deadline = time.monotonic() + CAUSE_GRACE_S
    while not all(call.ready() for call in calls):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


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
