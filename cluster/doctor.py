"""The doctor: what this machine has, whether each collective is right on a real group, and what was left behind."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import wrap
from typing import Any

import psutil

from cluster.reaper import marked_processes
from cluster.session import Session
from zeroviz.backend import OnProgress
from zeroviz.errors import ZerovizError
from zeroviz.extras import EXTRAS
from zeroviz.models import PRESETS
from zeroviz.quantity import format_gb_gib
from zeroviz.spec import Implementation, RunSpec

SCHEMA = "zeroviz.doctor/1"
NUM_RANKS = 2
PROBE_TIMEOUT_S = 60.0
WIDTH = 80
_NAME_WIDTH, _STATUS_WIDTH = 29, 8


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's table. word: what stands there for "ok"."""

    name: str
    ok: bool
    detail: str
    word: str = "ok"


@dataclass(frozen=True, slots=True)
class Findings:
    """All checks, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        checks = [{"name": check.name, "ok": check.ok, "detail": check.detail} for check in self.checks]
        return {"schema": SCHEMA, "ok": self.ok, "checks": checks}

    def render(self) -> str:
        """The table, 80 columns wide, and a closing sentence."""
        lines: list[str] = []
        for check in self.checks:
            first, *rest = wrap(check.detail, WIDTH - _NAME_WIDTH - _STATUS_WIDTH) or [""]
            status = check.word if check.ok else "FAILED"
            lines.append(f"{check.name:<{_NAME_WIDTH}}{status:<{_STATUS_WIDTH}}{first}".rstrip())
            lines += [" " * (_NAME_WIDTH + _STATUS_WIDTH) + line for line in rest]
        failed = [check.name for check in self.checks if not check.ok]
        if failed:
            closing = f"{len(failed)} of {len(self.checks)} checks failed: {', '.join(failed)}."
        else:
            closing = f"All {len(self.checks)} checks passed; `zeroviz run` will work here."
        return "\n".join([*lines, "", *wrap(closing, WIDTH)])


async def examine_machine(on_progress: OnProgress) -> Findings:
    """Make every check. What fails becomes a finding; nothing is raised but cancellation."""
    leftovers = _leftovers()  # before our own engines are there
    return Findings((*_machine(), *implementations(), *await _group(on_progress), leftovers))


def _machine() -> list[Check]:
    memory = psutil.virtual_memory()
    return [
        Check("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Check("cores", True, str(os.cpu_count())),
        Check("memory", True, f"{format_gb_gib(memory.available)} available"),
        _package("jupyterlab", "zeroviz explore"),
    ]


def _package(name: str, needed_by: str) -> Check:
    try:
        return Check(name, True, version(name))
    except PackageNotFoundError:
        return Check(name, False, f"not installed; `{needed_by}` needs it: pip install -c constraints.txt -e .")


def implementations() -> list[Check]:
    """Whose code can be run here. One that is not installed is no fault."""
    return [_implementation(impl) for impl in Implementation]


def _implementation(impl: Implementation) -> Check:
    name, extra = f"impl {impl.value}", EXTRAS.get(impl)
    if extra is None:
        return Check(name, True, "this repository" if impl is Implementation.OWN else f"torch {version('torch')}")
    if (release := extra.version) is None:
        return Check(name, True, f"install it with {extra.line}", word="absent")
    return Check(name, True, f"{extra.package} {release}")


async def _group(on_progress: OnProgress) -> list[Check]:
    """Start a group of two, let it probe the collectives, and stop it."""
    session = Session(target="cluster.probe:probe", run_timeout_s=PROBE_TIMEOUT_S)
    try:
        done = await session.run(RunSpec(model=PRESETS["tiny"], ranks=NUM_RANKS), on_progress)
    except ZerovizError as error:
        return [Check("engines", False, str(error))]
    finally:
        await session.stop()
    gpus = ", ".join(done.facts.gpus) or "no GPU; ranks run on the CPU"
    return [
        Check("torch", True, done.facts.torch),
        Check("devices", True, gpus),
        Check("engines", True, f"{NUM_RANKS} started in {done.start_s:.1f} s, probed in {done.run_s:.1f} s"),
        *collective_checks(done.placement.backend, [rank["failures"] for rank in done.ranks]),
    ]


def collective_checks(backend: str, failures: Iterable[dict[str, str]]) -> list[Check]:
    """One check for each collective and dtype, failed if it failed on any rank."""
    merged: dict[str, list[str]] = {}
    for rank in failures:
        for name, failure in rank.items():
            merged.setdefault(name, []).extend([failure] if failure else [])
    fine = f"{backend}, {NUM_RANKS} ranks, equal to one process"
    return [
        Check(name, not found, f"{backend}: {'; '.join(found)}" if found else fine) for name, found in merged.items()
    ]


def _leftovers() -> Check:
    """Processes of a pool whose guard is gone. A guard outlives its owner until it has swept the pool."""
    guarded = set(_guarded_directories())
    pids = sorted(process.pid for directory, process in marked_processes() if directory not in guarded)
    if not pids:
        return Check("leftover engines", True, "none")
    # An engine in the middle of a step hears nothing but SIGKILL.
    numbers = " ".join(map(str, pids))
    found = f"{len(pids)} processes whose owner is gone; end them with: kill -9 {numbers}"
    return Check("leftover engines", False, found)


def _guarded_directories() -> Iterable[Path]:
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
        # python -P -m cluster.reaper DIRECTORY OWNER_PID
        if "cluster.reaper" in words:
            yield Path(words[words.index("cluster.reaper") + 1])
