"""Fixtures shared by all groups of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.dist.ranks import RankPool

# A local group talks over loopback; the host's name may resolve to an address that is not there. Set before torch is
# imported, here and, by inheritance, in every process a test starts.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Worker processes that run a function as N ranks."""
    from tests.dist.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


GRIDS = (
    "ddp", "deepspeed", "fsdp1", "fsdp2", "fsdp2_options", "fsdp2_predicted", "megatron", "rehearse", "wire",
    "zero_redundancy",
)  # fmt: skip
"""Files of which a clean machine runs a part, to be done in half an hour: other people's implementations mostly."""
ONE_OF = 6


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the grids every sixth cell, and of each test at least one.

    `ZEROVIZ_WHOLE_GRID=1 make test` runs them all. Which sixth differs from test to test, so that models, ranks and
    recipes all occur.
    """
    if os.environ.get("ZEROVIZ_WHOLE_GRID"):
        return
    seen: dict[str, int] = {}
    kept, left_out = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        is_cell = "[" in item.nodeid and item.path.stem.removeprefix("test_") in GRIDS
        number = seen[name] = seen.get(name, -1) + 1
        in_sample = number == 0 or (number + len(name)) % ONE_OF == 0
        (kept if in_sample or not is_cell else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
