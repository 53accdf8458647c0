"""Fixtures shared by all groups of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.dist.ranks import RankPool

# What fails in a helper is shown as in a test: what was there beside what was wanted.
pytest.register_assert_rewrite("tests.browser", "tests.dist", "tests.pure", "tests.segments", "tests.view")

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


WITNESSES = (
    "ddp", "deepspeed", "fsdp1", "fsdp2", "fsdp2_options", "fsdp2_predicted", "megatron", "rehearse", "wire",
    "zero_redundancy",
)  # fmt: skip
OURS = ("activations_exact", "checkpoint", "counted_exact", "meter", "parity", "probe", "rank")
ONE_OF = {**dict.fromkeys(WITNESSES, 20), **dict.fromkeys(OURS, 12)}
"""Files of which a clean machine runs a part, to be done in half an hour: other people's implementations op by op, and
what our own does in more cells than a sample needs. One of how many cells runs. That each trains and what it holds at
rest is asked in every cell of the table, in test_grid.py, which is never cut."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the grids every twentieth or twelfth cell, and of each test at least one.

    `ZEROVIZ_WHOLE_GRID=1 make test` runs them all. Which cells differs from test to test, so that models, ranks and
    recipes all occur.
    """
    if os.environ.get("ZEROVIZ_WHOLE_GRID"):
        return
    seen: dict[str, int] = {}
    kept, left_out = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        one_of = ONE_OF.get(item.path.stem.removeprefix("test_"), 1) if "[" in item.nodeid else 1
        number = seen[name] = seen.get(name, -1) + 1
        in_sample = number == 0 or (number + len(name)) % one_of == 0
        (kept if in_sample else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
