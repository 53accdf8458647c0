"""How long a toggle takes in the kernel: predict, pictures and tables, with shard map and film open and closed.

No browser and no cluster: what is measured is from a changed toggle to the new text of every widget. A toggle that asks
for a prediction which was made before is not measured, so the batch moves on each time.
"""

from __future__ import annotations

import sys
import time
from statistics import median

from zeroviz.models import PRESETS
from zeroviz.panel import ExplorerPanel
from zeroviz.state import Explorer

CASES = (
    ("tiny", 4, 1),
    ("tiny", 8, 1),
    ("gpt2", 8, 1),
    ("gpt2", 8, 16),
    ("llama3-8b", 8, 1),
    ("llama3-8b", 8, 16),
    ("llama3-70b", 16, 1),
    ("llama3-70b", 16, 32),
)
"""Model, ranks, micro-batches in a step."""
NUM_TOGGLES = 11


def toggle_ms(page: ExplorerPanel, *, stage: bool, fit: bool = False) -> float:
    """Milliseconds of CPU that a toggle takes, the median of a few; what else the machine does is not in them."""
    page.stage.is_open = dict.fromkeys(page.stage.is_open, stage)
    page.fit.button.value = fit
    times_s = []
    for _ in range(NUM_TOGGLES):
        started = time.process_time()
        if not page.state.choose(batch=page.state.batch + 1):
            sys.exit(page.state.error)
        times_s.append(time.process_time() - started)
    return median(times_s) * 1e3


def main() -> None:
    print(f"{'':40}{'bars alone':>12}{'map, film':>12}{'and fit':>12}")
    for model, ranks, accumulation in CASES:
        page = ExplorerPanel(Explorer())
        page.state.choose(model=PRESETS[model], ranks=ranks, accumulation=accumulation)
        figures = (
            toggle_ms(page, stage=False),
            toggle_ms(page, stage=True),
            toggle_ms(page, stage=True, fit=True),
        )
        name = f"{model}, {ranks} ranks, {accumulation} micro-batch{'es' * (accumulation > 1)}"
        print(f"{name:40}" + "".join(f"{figure:9.1f} ms" for figure in figures))


if __name__ == "__main__":
    main()
