"""How fast the arithmetic answers: one prediction of each model, and a sweep over strategies, ranks and recipes.

Predictions are remembered by spec, so every measured spec is a new one.
"""

from __future__ import annotations

import itertools
import time

from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy


def main() -> None:
    print("one prediction, ZeRO-3 on 8 ranks, median of 9 sequence lengths")
    for model in PRESETS.values():
        times_ms = []
        for seq in range(20, 29):
            start = time.perf_counter()
            predict(RunSpec(model=model, ranks=8, seq=seq)).ranks[0].peak()
            times_ms.append((time.perf_counter() - start) * 1e3)
        print(f"  {model.name:<16} {sorted(times_ms)[4]:8.2f} ms")

    specs = [
        RunSpec(model=PRESETS["tiny"], strategy=strategy, ranks=ranks, precision=precision, seq=seq)
        for strategy, ranks, precision, seq in itertools.product(Strategy, range(1, 17), Precision, (31, 32))
    ]
    start = time.perf_counter()
    for spec in specs:
        predict(spec)
    elapsed_s = time.perf_counter() - start
    print(f"sweep over {len(specs)} specs of tiny: {elapsed_s:.2f} s, {elapsed_s / len(specs) * 1e3:.2f} ms each")


if __name__ == "__main__":
    main()
