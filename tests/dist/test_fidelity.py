"""A sample of the grid of docs/fidelity.py on real ranks: strategies, N, recipes, units, checkpointing, both families.

The page says what the whole grid gave; here the same comparison must find nothing in every 67th case, a stride that has
no factor with any side of the grid and so meets every value of each.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from cluster.live import environment
from cluster.session import Session
from zeroviz.precision import OWN_PRECISIONS
from zeroviz.spec import RunSpec
from zeroviz.trace import Origin, merge, rank_from_dict

pytestmark = pytest.mark.dist
STRIDE = 143


def load_grid() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "fidelity.py"
    spec = importlib.util.spec_from_file_location("fidelity", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


grid = load_grid()
SAMPLE: list[tuple[str, str, RunSpec]] = list(grid.cases())[::STRIDE]


def test_the_sample_meets_every_value_of_each_side() -> None:
    met = Counter(str(value) for model, way, spec in SAMPLE for value in (model, way, spec.unit, spec.checkpointing))
    assert {*grid.MODELS, *grid.WAYS, *grid.OPTIONS, *grid.UNITS, *grid.CHECKPOINTING} <= set(met)
    assert {spec.ranks for *_, spec in SAMPLE} == set(grid.RANKS)
    assert {spec.precision for *_, spec in SAMPLE} == set(OWN_PRECISIONS)


@pytest.mark.timeout(400)
def test_the_sample_is_as_predicted_to_the_byte(warm: Session) -> None:
    for model, way, spec in SAMPLE:
        run = warm.run_sync(spec)
        trace = merge(Origin.LIVE, spec, map(rank_from_dict, run.ranks), environment(run))
        assert grid.findings(spec, trace) == [], f"{model}, {way}, N={spec.ranks}, {spec.precision.value}, {spec.unit}"
