"""What an engine is asked to do: describe itself, and run one rank's job. Runs on the engine.

The owner imports this module to name these functions, so nothing here imports torch at the top.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import traceback
from dataclasses import KW_ONLY, dataclass
from typing import Any

from zeroviz.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine says of itself. gpus: names of the GPUs it sees; every engine of a pool sees all of them."""

    pid: int
    torch: str
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class RankFailure:
    """An exception in a rank, as plain data.

    is_spec_error: the request was wrong. is_connection: the exception only says that another rank could no longer be
    reached, so its cause lies elsewhere.
    """

    kind: str
    message: str
    traceback: str
    _: KW_ONLY
    is_spec_error: bool
    is_connection: bool


def describe(target: str) -> EngineFacts:
    """The engine's facts. Imports torch and the target's module on the way, so that the first run need not."""
    importlib.import_module(target.partition(":")[0])
    import torch

    importlib.import_module("torch._dynamo")  # any torch optimizer imports it when made, a second of work
    return EngineFacts(
        pid=os.getpid(),
        torch=str(torch.__version__),  # it is a str of torch's own, which would make the owner import torch
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
    )


def run_job(target: str, fields: dict[str, Any]) -> dict[str, Any] | RankFailure:
    """Call `target`, written `module:function`, with RankJob(**fields). What it raises is returned as a RankFailure.

    The result is taken through JSON, so that what reaches the owner is plain data and imports nothing there.
    """
    try:
        from cluster.rank import RankJob

        module, _, name = target.partition(":")
        result: dict[str, Any] = json.loads(
            json.dumps(getattr(importlib.import_module(module), name)(RankJob(**fields)))
        )
        return result
    except BaseException as error:  # SystemExit too: an engine serves the next run after this one
        return RankFailure(
            kind=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc(),
            is_spec_error=isinstance(error, SpecError),
            is_connection=_is_connection_error(error),
        )
    finally:
        give_back()


def give_back() -> None:
    """What a run has freed goes back to the machine, where the next run looks for free memory. glibc keeps the pages of
    blocks below 32 MB, as a block of gpt2 is: 2 GB after two runs of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(0)


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
