"""How fast the arithmetic answers: one prediction of each model, sweeps with and without events, and a budget.

Predictions and outlines are remembered, so every measured spec is a new one and each sweep starts from nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

from zeroviz.budget import budget_row
from zeroviz.models import PRESETS
from zeroviz.outline import outline
from zeroviz.peak import _moments, peak_of
from zeroviz.precision import OWN_PRECISIONS, WHOLE_BUFFER_PRECISIONS, Precision
from zeroviz.predict import predict
from zeroviz.spec import RunSpec, Strategy, UnitPolicy
from zeroviz.toggles import usual_shard_ranks

NUM_SWEPT = 10_000


def of(strategy: Strategy, ranks: int) -> dict[str, Any]:
    """`strategy` for a RunSpec of `ranks` ranks, with a shard group where it has one."""
    return {"strategy": strategy, "shard_ranks": usual_shard_ranks(ranks) if strategy.replicates else None}


def has(strategy: Strategy, precision: Precision) -> bool:
    return not strategy.has_whole_buffer or precision in WHOLE_BUFFER_PRECISIONS


def specs(models: Iterable[str], units: Iterable[str]) -> Iterator[RunSpec]:
    """Strategies, recipes, sizes and numbers of ranks; the models and units vary fastest of all."""
    policies = [UnitPolicy.parse(unit) for unit in units]
    sizes = itertools.product(range(1, 1025), ((1, 128), (2, 100), (4, 64)), Strategy, OWN_PRECISIONS, models, policies)
    for ranks, (batch, seq), strategy, precision, model, unit in sizes:
        if not has(strategy, precision):
            continue
        yield RunSpec(
            model=PRESETS[model],
            **of(strategy, ranks),
            ranks=ranks,
            precision=precision,
            unit=unit,
            batch=batch,
            seq=seq,
        )


def sweep_s(models: Iterable[str], units: Iterable[str]) -> float:
    """Seconds for the peaks of NUM_SWEPT specs, making the specs included."""
    outline.cache_clear()
    _moments.cache_clear()
    start = time.perf_counter()
    for spec in itertools.islice(specs(models, units), NUM_SWEPT):
        peak_of(spec)
    return time.perf_counter() - start


def main() -> None:
    print("one prediction, ZeRO-3 on 8 ranks, median of 9 sequence lengths: with the walk, and its peak alone")
    for model in PRESETS.values():
        times_ms = []
        for seq in range(20, 29):
            start = time.perf_counter()
            predict(RunSpec(model=model, ranks=8, seq=seq)).ranks[0].peak()
            middle = time.perf_counter()
            peak_of(RunSpec(model=model, ranks=8, seq=seq))
            times_ms.append(((middle - start) * 1e3, (time.perf_counter() - middle) * 1e3))
        walk_ms, peak_ms = (sorted(column)[4] for column in zip(*times_ms, strict=True))
        print(f"  {model.name:<16} {walk_ms:8.2f} ms {peak_ms:8.3f} ms")

    tiny = [
        RunSpec(model=PRESETS["tiny"], ranks=ranks, precision=precision, seq=seq, **of(strategy, ranks))
        for strategy, ranks, precision, seq in itertools.product(Strategy, range(1, 17), OWN_PRECISIONS, (31, 32))
        if has(strategy, precision)
    ]
    start = time.perf_counter()
    for spec in tiny:
        predict(spec)
    elapsed_s = time.perf_counter() - start
    print(f"sweep over {len(tiny)} specs of tiny: {elapsed_s:.2f} s, {elapsed_s / len(tiny) * 1e3:.2f} ms each")

    print(f"peaks of {NUM_SWEPT:,} specs, strategies x recipes x sizes x ranks")
    for models, units in (
        (["tiny"], ["block"]),
        (["llama3-70b"], ["block"]),
        (["llama3-70b"], ["model", "block", "block:4", "layer"]),
        (list(PRESETS), ["block"]),
    ):
        elapsed_s = sweep_s(models, units)
        name = models[0] if len(models) == 1 else f"{len(models)} models"
        print(f"  {name + ', ' + ', '.join(units):<42} {elapsed_s:6.2f} s {elapsed_s / NUM_SWEPT * 1e6:6.1f} us each")

    outline.cache_clear()
    _moments.cache_clear()
    start = time.perf_counter()
    pairs = [pair for pair in itertools.product(Strategy, OWN_PRECISIONS) if has(*pair)]
    for strategy, precision in pairs:
        spec = RunSpec(model=PRESETS["llama3-70b"], ranks=2, precision=precision, seq=2048, **of(strategy, 2))
        budget_row(spec, 78 * 2**30)
    print(f"a whole budget of llama3-70b, {len(pairs)} rows of 3 answers: {(time.perf_counter() - start) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
