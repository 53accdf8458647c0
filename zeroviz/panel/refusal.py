"""A refusal as the page words it: what is refused goes by the labels of the controls, not by the names in code."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zeroviz.panel.controls import DESCRIPTIONS, OVERLAP, VIEWS
from zeroviz.spec import Strategy

_PLAIN = ("impl", "seq", "checkpointing", "accumulation")
"""Names that no sentence has in another sense; so it is with all of several words."""
LABELS: Mapping[str, str] = {
    **{
        name: label or OVERLAP
        for name, (label, _) in DESCRIPTIONS.items()
        if name not in VIEWS and ("_" in name or name in _PLAIN)
    },
    **{strategy.value: strategy.label for strategy in Strategy},
    "no grad_dtype": "gradient as precision",
}
"""What the page calls a toggle, and a strategy."""
_NAMES = "|".join(sorted(LABELS, key=len, reverse=True))
_WORDS = re.compile(rf"`[^`]*`|(?<![\w./-])(?P<name>{_NAMES})(?![\w/=-]|\.\w)")
"""A command, which stays as it is; or a name by itself."""


def page_words(refusal: str) -> str:
    """`strategy is 'megatron_optim'` as `strategy is 'Megatron optim'`, `grad_dtype fp32` as `gradient fp32`."""
    return _WORDS.sub(lambda found: LABELS.get(found["name"] or "", found[0]), refusal)
