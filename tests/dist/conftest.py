"""Fixtures for tests with real engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.session import Session
from tests.dist.helpers import FAKE_TARGET


@pytest.fixture(scope="module")
def warm() -> Iterator[Session]:
    """One session with real ranks for a module's tests that leave its engines standing."""
    with Session(run_timeout_s=120) as session:
        yield session


@pytest.fixture(scope="module")
def faking() -> Iterator[Session]:
    """One session whose ranks misbehave on request, with a short bound; a test that costs it its engines costs the next
    test a start."""
    with Session(target=FAKE_TARGET, run_timeout_s=3) as session:
        yield session
