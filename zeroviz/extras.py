"""Implementations that are installed apart: what each needs, whether it is here, and what to say where it is not.

Nothing is imported to find out: an import takes seconds. Predictions need none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from zeroviz.errors import SpecError
from zeroviz.strategy import Implementation


@dataclass(frozen=True, slots=True)
class Extra:
    """One of `[project.optional-dependencies]` in pyproject.toml. module: what is imported. package: at PyPI."""

    name: str
    module: str
    package: str

    @property
    def line(self) -> str:
        """What installs it, in a checkout."""
        return f"pip install -c constraints.txt -e '.[{self.name}]'"

    @property
    def version(self) -> str | None:
        """The installed release; None where it cannot be imported."""
        try:
            return version(self.package) if find_spec(self.module) else None
        except (ImportError, PackageNotFoundError):  # a parent package that is not there, or files without a release
            return None


EXTRAS: Mapping[Implementation, Extra] = {
    Implementation.DEEPSPEED: Extra("deepspeed", "deepspeed", "deepspeed"),
    Implementation.MEGATRON: Extra("megatron", "megatron.core", "megatron-core"),
}


def check_installed(impl: Implementation) -> None:
    """Raise SpecError, with the line that installs it, where `impl` is not here to be run."""
    extra = EXTRAS.get(impl)
    if extra is not None and extra.version is None:
        raise SpecError(
            f"impl is {impl.value!r}, and {extra.package} is not installed here; install it with {extra.line}, or use "
            "`zeroviz predict`, which needs no installation."
        )
