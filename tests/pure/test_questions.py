"""docs/questions.md: the page is what its script writes, and what it says in words holds as well."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from zeroviz.models import PRESETS
from zeroviz.peak import peak_of
from zeroviz.spec import Checkpointing, Precision, RunSpec, UnitPolicy
from zeroviz.trace import Category

DOCS = Path(__file__).resolve().parents[2] / "docs"

# [pytorch PR 125323]
ASKED = """the peak with this config? what does other wrapping change? the best batch? the longest sequence? more ranks?
optimizer on CPU? which checkpointing? fp32 reduction? when hybrid? is it safe not to reshard after forward? which unit
holds the memory?"""


@pytest.fixture(scope="module")
def questions() -> ModuleType:
    spec = spec_from_file_location("questions", DOCS / "questions.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_28_every_question_is_answered_by_name(questions: ModuleType) -> None:
    asked = [f"{question.strip()}?" for question in " ".join(ASKED.split()).split("?")[:-1]]
    assert [question.lower() for question in questions.QUESTIONS] == [question.lower() for question in asked]


def test_28_the_page_is_what_its_script_writes(questions: ModuleType) -> None:
    """Figures and commands: `python docs/questions.py` writes it anew."""
    assert (DOCS / "questions.md").read_text() == questions.page()


def test_28_every_answer_has_its_commands_and_a_figure_of_theirs() -> None:
    sections = (DOCS / "questions.md").read_text().split("\n## ")[1:]
    for section in sections[:-1]:  # the last one is about running it
        question, commands, answer = section.split("```\n", 2)
        assert commands.splitlines() and all(line.startswith("zeroviz ") for line in commands.splitlines()), question
        assert re.search(r"\d", answer), question
    assert max(map(len, "".join(sections).splitlines())) <= 120
    assert len(re.findall(r"\w+", "".join(sections))) < 1500  # five minutes, read aloud


def test_28_what_the_words_claim_holds() -> None:
    """Comparisons that are said without a figure."""
    base = RunSpec(model=PRESETS["llama3-8b"], ranks=8, precision=Precision.BF16_MIXED, seq=4096)
    peak = peak_of(base)
    assert (peak.phase, peak.unit) == ("backward", "head")
    assert peak.by_category[Category.ACTIVATION] > peak.total / 2
    # Temporaries are whole tensors of tokens times vocabulary in fp32, and a loss of 4 bytes.
    assert divmod(peak.by_category[Category.TEMPORARY], 4096 * base.model.vocab * 4) == (2, 4)

    def at(**settings: UnitPolicy | Checkpointing) -> int:
        changed = RunSpec(
            model=base.model, ranks=8, precision=base.precision, seq=4096, **{"unit": base.unit, **settings}
        )
        elsewhere = {"unit": {"model": "model"}, "checkpointing": {"block:8": "block 7"}}
        ((name, value),) = settings.items()
        assert peak_of(changed).unit == elsewhere[name].get(str(value), "head")
        return peak_of(changed).total

    block, layer, four = (at(unit=UnitPolicy.parse(unit)) for unit in ("block", "layer", "block:4"))
    assert four < block < layer < 1.03 * block < at(unit=UnitPolicy.parse("model"))
    # Attention and MLP apart: the border between them is one more bf16 activation in each of 32 blocks.
    assert layer - block == 32 * 4096 * base.model.hidden * 2
    each, two, eight = (at(checkpointing=Checkpointing(blocks)) for blocks in (1, 2, 8))
    assert 0.95 * each < two < each < eight < 1.1 * each < 0.5 * block
