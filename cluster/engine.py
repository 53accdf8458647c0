"""What an engine is asked to do: describe itself, and run one rank's job. Runs on the engine.

The owner imports this module to name these functions, so nothing here imports torch at the top.
"""

from __future__ import annotations

import importlib
import os
import traceback
from dataclasses import dataclass
from typing import Any

from zeroviz.errors import SpecError
from zeroviz.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """One rank's part of a run.

    store_path: the file of a torch FileStore, fresh for each run, at which the ranks meet. backend: `gloo` or `nccl`.
    device: `cpu` or `cuda:0`. timeout_s: bound of a single collective.
    """

    spec: RunSpec
    rank: int
    store_path: str
    backend: str
    device: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine says of itself. gpus: the names of the GPUs it sees, all of which every local engine sees."""

    pid: int
    torch: str
    gpus: tuple[str, ...]
    gpus_have_bf16: bool


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """An exception in a rank, as plain data.

    is_spec_error: the request was wrong. is_connection: the exception only says that another rank could no longer be
    reached, so its cause lies elsewhere.
    """

    kind: str
    message: str
    traceback: str
    is_spec_error: bool
    is_connection: bool


def describe() -> EngineFacts:
    """The engine's facts; imports torch and the code of a rank on the way, which makes the first run as fast as the next."""
    import torch

    importlib.import_module("cluster.rank")
    num_gpus = torch.cuda.device_count()
    return EngineFacts(
        pid=os.getpid(),
        torch=torch.__version__,
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(num_gpus)),
        gpus_have_bf16=all(torch.cuda.get_device_capability(index) >= (8, 0) for index in range(num_gpus)),
    )


def run_job(target: str, job: RankJob) -> dict[str, Any] | RankFailure:
    """Call `target`, written `module:function`, with the job. What it raises is returned as a RankFailure."""
    try:
        module, _, name = target.partition(":")
        result: dict[str, Any] = getattr(importlib.import_module(module), name)(job)
        return result
    except BaseException as error:  # SystemExit too: an engine serves the next run after this one
        return RankFailure(
            kind=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc(),
            is_spec_error=isinstance(error, SpecError),
            is_connection=_is_connection_error(error),
        )


_CONNECTION_WORDS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "timeout caused pair closure",
    "remote process exited",
    "socket timeout",
)


def _is_connection_error(error: BaseException) -> bool:
    """Whether the exception is what gloo or NCCL raise when a peer is gone. gloo's are bare RuntimeErrors."""
    if type(error).__name__ in ("DistNetworkError", "DistStoreError"):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _CONNECTION_WORDS)
