"""Fixtures shared by all groups of tests."""

from __future__ import annotations

import os

# A local group talks over loopback; the host's name may resolve to an address that is not there. Set before torch is
# imported, here and, by inheritance, in every process a test starts.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("OMP_NUM_THREADS", "1")
