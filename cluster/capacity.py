"""Refuse what cannot fit before anything is started: the host's free memory against what a run needs.

An out-of-memory kill takes a rank, or the notebook, without a word; a refusal says what is missing and what to do.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from zeroviz.command import command_line
from zeroviz.errors import SpecError
from zeroviz.extras import check_installed
from zeroviz.implementations import can_rehearse
from zeroviz.memory import rest_by_category
from zeroviz.models import Family
from zeroviz.partition import plan_for
from zeroviz.peak import peak_of
from zeroviz.predict import predict
from zeroviz.quantity import format_nbytes
from zeroviz.rank_trace import alike
from zeroviz.spec import Implementation, RunSpec
from zeroviz.wording import strategy_label

# Memory an engine has to itself once it has imported torch and run steps of the tiny model: 260 MB of 370 MB resident
# (psutil's uss and rss; CPU build of torch 2.13, Linux). The rest is library text that all engines share.
ENGINE_NBYTES = 260 * 10**6

INIT_ITEMSIZE = 4  # a unit is initialised in fp32 before it is cast and cut into shards


def _advice(spec: RunSpec | None) -> str:
    advice = "Use a smaller model, or fewer ranks where each holds a copy"
    if spec is None or not can_rehearse(spec.impl):
        return f"{advice}."
    return f"{advice}, or `{command_line('rehearse', spec)}`, which runs the same code on tensors without memory."


def check_runnable(spec: RunSpec) -> None:
    """Raise SpecError for what is worked out only: a bare parameter count, a family without layers here, an optimizer
    torch has no kernels of, an implementation that is not installed."""
    check_installed(spec.impl)
    if spec.model.family is Family.BARE:
        raise SpecError(
            f"A bare count of {spec.model.num_params:,} parameters has no layers to run; name a model, or use "
            "`zeroviz predict`."
        )
    if not spec.model.family.runs:
        raise SpecError(
            f"{spec.model.name} is a {spec.model.family.label} model, and that family's layers are not built here, so "
            f"it is worked out and neither run nor rehearsed; use `{command_line('predict', spec)}`."
        )
    if not spec.optimizer.runs:
        raise SpecError(
            f"optimizer is {spec.optimizer.value!r}, which is worked out and not run: its kernels are not part of "
            "torch. Use `zeroviz predict`, or optimizer adamw."
        )


def check_engines(num_new: int, spec: RunSpec | None = None) -> None:
    """Raise SpecError unless `num_new` more engines, wanted for `spec`, fit in the host's free memory."""
    need, free = max(0, num_new) * ENGINE_NBYTES, free_nbytes()
    if need > free:
        raise SpecError(
            f"Starting {num_new} engines takes {format_nbytes(need)} ({format_nbytes(ENGINE_NBYTES)} each), but "
            f"{format_nbytes(free)} of memory are free. {_advice(spec)}"
        )


def check_capacity(spec: RunSpec, *, num_warm: int, beside: RunSpec | None = None) -> None:
    """Raise SpecError unless all ranks of `spec` fit in the host's free memory. `num_warm` engines are there already.
    beside: what each rank holds at the same time.

    need = new engines * ENGINE_NBYTES + ranks * (predicted peak + offloaded states + fp32 elements of the largest unit)
    """
    num_new = max(0, spec.ranks - num_warm)
    check_engines(num_new, spec)
    states = sum(each.ranks * _step_nbytes(each) for each in (spec, beside) if each)
    need, free = num_new * ENGINE_NBYTES + states, free_nbytes()
    if need > free:
        raise SpecError(
            f"Running {spec.model.name} under {strategy_label(spec)} on {spec.ranks} ranks takes {format_nbytes(need)} "
            f"({format_nbytes(states)} for the step at its peak, the rest for processes), but {format_nbytes(free)} of "
            f"memory are free. {_advice(spec)}"
        )


def _step_nbytes(spec: RunSpec) -> int:
    """What a rank takes at most, its model's making included."""
    # A library that wraps a whole model is given one: every rank has all parameters before it cuts them.
    whole = spec.impl not in (Implementation.OWN, Implementation.FSDP2)
    made_at_once = spec.model.num_params if whole else max(unit.numel for unit in plan_for(spec).units)
    return _peak_nbytes(spec) + INIT_ITEMSIZE * made_at_once


def _peak_nbytes(spec: RunSpec) -> int:
    """What a rank holds at most, on device and host together: the largest of all ranks."""
    if spec.impl is Implementation.OWN:  # ranks differ in padding only, which is inside the total
        on_host = sum(nbytes for category, nbytes in rest_by_category(spec).items() if category.on_host)
        return peak_of(spec).total + on_host
    return max(rank.peak().total + sum(rank.at_rest_on_host.values()) for _, rank in alike(predict(spec).ranks))


def may_have_gpu() -> bool:
    """Whether engines may see an NVIDIA or AMD GPU; told from device files, since torch is not imported here."""
    hidden = any(
        os.environ.get(name, "unset").strip() in ("", "-1") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    )
    return not hidden and (Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists())


def free_nbytes() -> int:
    """Bytes the host can still give: what the system has available, or what a cgroup limit leaves if that is less."""
    return min([psutil.virtual_memory().available, *cgroup_headrooms()])


def cgroup_headrooms(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """limit - (usage - reclaimable file cache) of every limited memory cgroup above this process, version 1 and 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    headrooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit = root / "memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # In a container the path is the host's and may not exist here; the limit then stands at the mount's root.
        own = base / path.lstrip("/")
        for directory in (own, *own.parents):
            if not directory.is_relative_to(base):
                break
            headroom = _headroom(directory, limit, usage, cache)
            if headroom is not None:
                headrooms.append(headroom)
    return headrooms


def _headroom(directory: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        limit_text = (directory / limit).read_text().strip()
        used = int((directory / usage).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # "max" in version 2 and a number near 2**63 in version 1 mean no limit.
    if limit_text == "max" or int(limit_text) >= 2**60:
        return None
    return max(0, int(limit_text) - used + int(stat.get(cache, "0")))
