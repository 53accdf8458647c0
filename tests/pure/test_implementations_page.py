"""docs/implementations.md: the page is what its script writes, and every implementation and setting is on it."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from zeroviz.implementations import PAIRS
from zeroviz.settings import SETTINGS
from zeroviz.spec import Implementation

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("implementations", DOCS / "implementations.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_its_script_writes(script: ModuleType) -> None:
    """`python docs/implementations.py` writes it anew."""
    assert (DOCS / "implementations.md").read_text() == script.page()


def test_every_pair_and_every_setting_is_on_it() -> None:
    text = (DOCS / "implementations.md").read_text()
    for impl, strategies in PAIRS.items():
        for strategy in strategies:
            assert f"| {impl.value} | {strategy.value} |" in text
        section = text.split(f"\n## {impl.value}\n")[1].split("\n## ")[0]
        settings = [name for name, setting in SETTINGS.items() if impl in setting.library]
        assert all(f"`--{name.replace('_', '-')}`" in section for name in settings)
        assert impl is Implementation.OWN or "Trap: " in section
