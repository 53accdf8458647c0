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
