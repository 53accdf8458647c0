"""A spec as Python: the script makes it again, and its last lines set a new explorer to it."""

from __future__ import annotations

import argparse
import ast
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from tests.every import settings_of
from tests.pure.exported import (
    BARE,
    CONFIG,
    HYBRID,
    LLAMA,
    SPEC,
    TINY,
)
from zeroviz.cli_spec import add_spec_options, spec_from_args
from zeroviz.errors import SpecError
from zeroviz.export import as_python
from zeroviz.hf_config import model_from_config
from zeroviz.implementations import PAIRS, PRECISIONS
from zeroviz.models import PRESETS, bare
from zeroviz.predict import predict
from zeroviz.settings import SETTINGS, BackwardPrefetch, Settings
from zeroviz.spec import (
    Checkpointing,
    DType,
    Implementation,
    Offload,
    Optimizer,
    Precision,
    RunSpec,
    Strategy,
    UnitKind,
    UnitPolicy,
    Zero1Form,
)
from zeroviz.toggles import TOGGLES, settle, spec_of

OPTIONS: list[dict[str, Any]] = [
    {"checkpointing": Checkpointing(2), "seq": 17, "unit": UnitPolicy(UnitKind.BLOCK, 2)},
    {"offload": Offload.PARAMS, "optimizer": Optimizer.ADAMW_FUSED},
    {"offload": Offload.OPTIMIZER, "grad_dtype": DType.BF16},
    {"accumulation": 3, "no_sync": False, "clip_norm": 0.3},
    {"prefetch": 2, "async_reduce": True, "unit": UnitPolicy(UnitKind.NUMEL, 5000)},
    {"unit": UnitPolicy(UnitKind.LAYER), "steps": 5, "seed": 12_345},
    {"strategy": Strategy.ZERO1, "zero1_form": Zero1Form.ALL_REDUCE, "optimizer": Optimizer.SGD_MOMENTUM},
    {"strategy": Strategy.ZERO1, "impl": Implementation.ZERO_REDUNDANCY, "settings": Settings(bucket_nbytes=100_000)},
    {"strategy": Strategy.DDP, "impl": Implementation.DDP, "settings": Settings(bucket_view=True)},
    {"impl": Implementation.DEEPSPEED, "settings": Settings(persistence_numel=0, bucket_numel=7)},
    {
        "impl": Implementation.FSDP1,
        "precision": Precision.FSDP_MIXED,
        "settings": Settings(reduce_dtype=DType.BF16, backward_prefetch=BackwardPrefetch.POST, use_orig_params=True),
    },
    {"impl": Implementation.FSDP2, "ranks": 6, "settings": Settings(reshard_ranks=3)},
]


def scripts() -> Iterator[RunSpec]:
    """Presets x strategies x implementations x precisions, then options on two models, a config and bare counts."""
    models = cycle(PRESETS.values())
    for impl, strategies in PAIRS.items():
        for strategy in strategies:
            for precision in PRECISIONS[impl]:
                try:
                    yield RunSpec(
                        model=next(models), impl=impl, precision=precision, ranks=6, batch=3, **settings_of(strategy, 6)
                    )
                except SpecError:
                    continue  # what an implementation lacks is for another test
    config = model_from_config(CONFIG, name='my "model" \\ \u00fc')
    for model in (TINY, LLAMA, config, replace(TINY, epsilon=1e-6)):
        yield from (RunSpec(**{"model": model, "ranks": 3, **options}) for options in OPTIONS)
    yield from (BARE, HYBRID, replace(BARE, model=bare(1)), RunSpec(model=replace(bare(9), name="x"), unit=BARE.unit))
    yield from (RunSpec(model=model) for model in PRESETS.values())


SCRIPTS = list(scripts())


def test_the_scripts_cover_presets_strategies_implementations_and_settings() -> None:
    assert len(SCRIPTS) > 100
    assert {spec.model.name for spec in SCRIPTS} >= set(PRESETS)
    assert {(spec.impl, spec.strategy) for spec in SCRIPTS} == {(impl, each) for impl in PAIRS for each in PAIRS[impl]}
    assert {name for spec in SCRIPTS for name in spec.settings.given} == set(SETTINGS) - {"limit_all_gathers"}


@pytest.mark.parametrize("spec", SCRIPTS, ids=range(len(SCRIPTS)))
def test_the_script_makes_the_spec_and_predicts_it(spec: RunSpec) -> None:
    text = as_python(spec)
    names: dict[str, Any] = {}
    exec(compile(text, "script", "exec"), names)
    assert names["spec"] == spec
    assert names["trace"] is predict(spec)
    # Each name is imported because it is used.
    tree = ast.parse(text)
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & imported


def in_a_notebook(text: str) -> str:
    """The script's last lines without their `# `."""
    return "\n".join(line[2:] for line in text.partition("# In a notebook")[2].splitlines()[1:])


class Panel:
    """Stands for the explorer: what it is told is what a new one would be set to."""

    def __init__(self) -> None:
        plain = RunSpec(model=TINY, ranks=4)
        apart = {"unit": UnitKind.BLOCK, "blocks": 1, "checkpointing": False, "region": 1}
        fields = [each for each in TOGGLES if each not in apart and each not in SETTINGS]
        self.toggles = {**{each: getattr(plain, each) for each in fields}, **apart, **dict.fromkeys(SETTINGS)}
        self.state = self

    def choose(self, **toggles: Any) -> None:
        assert set(toggles) <= set(TOGGLES)
        self.toggles |= toggles
        assert settle(self.toggles, given=toggles) == [], "it would have changed something along with these"


@pytest.mark.parametrize("spec", SCRIPTS, ids=range(len(SCRIPTS)))
def test_its_last_lines_set_a_new_explorer(spec: RunSpec) -> None:
    lines = in_a_notebook(as_python(spec)).splitlines()
    assert lines[:2] == ["from cluster.live import LiveBackend", "from zeroviz.panel import explorer"]
    panel = Panel()
    backend = object()
    names = {
        "spec": spec,
        "LiveBackend": lambda: backend,
        "explorer": lambda given: panel if given is backend else None,
    }
    exec("\n".join(lines[2:]), names)
    assert lines[-1] == "panel"
    assert spec_of(panel.toggles) == replace(spec, steps=3, seed=0)


def test_only_what_is_not_the_default_is_said() -> None:
    assert as_python(RunSpec(model=TINY)) == (
        "# ZeRO-3 on 2 ranks, fp32\n"
        "# in a shell: zeroviz predict --model tiny --strategy zero3 --ranks 2\n"
        "from zeroviz.models import PRESETS\n"
        "from zeroviz.predict import predict\n"
        "from zeroviz.spec import RunSpec\n"
        "\n"
        "spec = RunSpec(\n"
        '    model=PRESETS["tiny"],\n'
        ")\n"
        "trace = predict(spec)\n"
        "\n"
        "# In a notebook, the explorer on this state:\n"
        "# from cluster.live import LiveBackend\n"
        "# from zeroviz.panel import explorer\n"
        "#\n"
        "# panel = explorer(LiveBackend())\n"
        "# panel.state.choose(\n"
        "#     model=spec.model,\n"
        "#     ranks=spec.ranks,\n"
        "# )\n"
        "# panel\n"
    )
    assert "all but steps and seed, which it does not ask for" in as_python(replace(SPEC, steps=4, seed=1))


@pytest.mark.parametrize("spec", SCRIPTS, ids=range(len(SCRIPTS)))
def test_its_command_line_asks_for_the_same(spec: RunSpec) -> None:
    (line,) = [line for line in as_python(spec).splitlines() if line.startswith("# in a shell: ")]
    program, verb, *words = shlex.split(line.removeprefix("# in a shell: "))
    assert (program, verb) == ("zeroviz", "predict")
    if "CONFIG.json" in words:  # a spec does not know the file
        words[words.index("CONFIG.json")] = "tiny"
        spec = replace(spec, model=TINY)
        if "--unit" in words and spec.unit.kind is UnitKind.MODEL:
            return
    parser = argparse.ArgumentParser()
    add_spec_options(parser)
    assert spec_from_args(parser.parse_args(words)) == spec
