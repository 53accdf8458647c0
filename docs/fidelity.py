"""Run the whole grid on real ranks, compare with the arithmetic to the byte, and write docs/fidelity.md.

    python docs/fidelity.py            the whole grid, some minutes on two cores
    python docs/fidelity.py --sample   every seventh case, and nothing is written

A case is right when, on every rank, what is held at rest by category, the peak with its place and its categories, the
largest and the last total of every op of the step, and every collective are as predicted.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import fill

import torch

from cluster.session import Session
from zeroviz.compare import maxima
from zeroviz.models import PRESETS
from zeroviz.predict import predict
from zeroviz.spec import Precision, RunSpec, Strategy, UnitPolicy, Zero1Form
from zeroviz.trace import Origin, RankTrace, merge, rank_from_dict

MODELS = {
    "GPT-2 family": PRESETS["tiny"],
    "Llama family": PRESETS["tiny-llama"],
    "Llama, tied, biases, 4 heads on 2": replace(
        PRESETS["tiny-llama"], tied=True, attention_bias=True, mlp_bias=True, heads=4, kv_heads=2
    ),
}
UNITS = ("model", "block", "block:2", "layer")
RANKS = (1, 2, 3, 4)
# Every way to run a strategy: ZeRO-1's two forms, and communication beside compute.
WAYS: dict[str, dict[str, object]] = {
    "ddp": {"strategy": Strategy.DDP},
    "zero1": {"strategy": Strategy.ZERO1},
    "zero1, all-reduce": {"strategy": Strategy.ZERO1, "zero1_form": Zero1Form.ALL_REDUCE},
    "zero2": {"strategy": Strategy.ZERO2},
    "zero2, async reduce": {"strategy": Strategy.ZERO2, "async_reduce": True},
    "zero3": {"strategy": Strategy.ZERO3},
    "zero3, prefetch 2, async reduce": {"strategy": Strategy.ZERO3, "prefetch": 2, "async_reduce": True},
}
# 17 tokens: no tensor of the step has a size that anything divides.
SHAPE = {"batch": 2, "seq": 17, "steps": 2}
PAGE = Path(__file__).with_name("fidelity.md")


def cases() -> Iterator[tuple[str, str, RunSpec]]:
    """(model, way, spec) of the whole grid."""
    for (model_name, model), (way, settings), ranks, precision, unit in itertools.product(
        MODELS.items(), WAYS.items(), RANKS, Precision, UNITS
    ):
        spec = RunSpec(model=model, ranks=ranks, precision=precision, unit=UnitPolicy.parse(unit), **settings, **SHAPE)  # type: ignore[arg-type]
        yield model_name, way, spec


def findings(spec: RunSpec, measured: tuple[RankTrace, ...]) -> list[str]:
    """What differs from the prediction, by name; empty when nothing does."""
    found: list[str] = []
    for live, arithmetic in zip(measured, predict(spec).ranks, strict=True):
        for name, same in (
            ("at rest", live.at_rest == arithmetic.at_rest),
            ("peak", live.peak() == arithmetic.peak()),
            ("an op's maximum", maxima(live) == maxima(arithmetic)),
            ("wire", live.collectives == arithmetic.collectives),
            ("step counters", live.step_counter_nbytes == arithmetic.step_counter_nbytes),
        ):
            if not same:
                found.append(f"{name}, rank {live.rank}")
    return found


def beyond_categories(rank: RankTrace) -> tuple[int, int]:
    """(allocator at rest, allocator's peak) beyond the categories and the step counters, in bytes."""
    assert rank.allocator is not None
    rest = rank.allocator.rest_nbytes - rank.rest_nbytes - rank.step_counter_nbytes
    return rest, rank.allocator.peak_nbytes - rank.peak().total - rank.step_counter_nbytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--sample", action="store_true", help="run every seventh case and write nothing")
    sample = parser.parse_args().sample
    chosen = [case for number, case in enumerate(cases()) if not sample or number % 7 == 0]
    num_right: Counter[tuple[str, str]] = Counter()
    num_cases: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    rest_beyond: Counter[int] = Counter()
    peak_beyond: dict[bool, list[int]] = {False: [], True: []}
    with Session() as session:
        for number, (model_name, way, spec) in enumerate(chosen):
            run = session.run_sync(spec)
            ranks = merge(Origin.LIVE, spec, map(rank_from_dict, run.ranks)).ranks
            found = findings(spec, ranks)
            num_cases[model_name, way] += 1
            num_right[model_name, way] += not found
            if found:
                wrong.append(f"{model_name}, {way}, N={spec.ranks}, {spec.precision.value}, {spec.unit}: {found}")
            for rank in ranks:
                at_rest, at_peak = beyond_categories(rank)
                rest_beyond[at_rest] += 1
                peak_beyond[spec.precision is not Precision.FP32].append(at_peak)
            if sys.stderr.isatty():
                print(f"\r{number + 1}/{len(chosen)}, {len(wrong)} differ", end="", file=sys.stderr)
    page = render(num_right, num_cases, wrong, rest_beyond, peak_beyond)
    print(page)
    if not sample:
        PAGE.write_text(page)
    return 1 if wrong else 0


def render(
    num_right: Counter[tuple[str, str]],
    num_cases: Counter[tuple[str, str]],
    wrong: list[str],
    rest_beyond: Counter[int],
    peak_beyond: dict[bool, list[int]],
) -> str:
    """The page: cases and how many are right by model and way, what differs, and the allocator beside."""
    total, right = sum(num_cases.values()), sum(num_right.values())
    num_ranks = sum(rest_beyond.values())
    recipes = ", ".join(recipe.value for recipe in Precision)
    opening = (
        f"Written by `docs/fidelity.py` on torch {torch.__version__}, CPU, gloo. {total} specs, {num_ranks} ranks: "
        f"N = {', '.join(map(str, RANKS))}; {recipes}; units {', '.join(UNITS)}; {SHAPE['batch']} x {SHAPE['seq']} "
        "tokens a rank. Predicted and measured are compared to the byte on every rank: at rest by category, the peak "
        "with its place and categories, the largest and the last total of every op, and every collective."
    )
    closing = (
        "The allocator's own figure counts every block of the process, whatever it is for. Beyond the categories and "
        f"the step counters it held at rest {_spread(list(rest_beyond.elements()))} bytes. Its peak lies beyond the "
        f"step's by {_spread(peak_beyond[False])} bytes in fp32 and by {_spread(peak_beyond[True])} in the bf16 "
        "recipes: scratch that kernels give back before they return, and the copies gloo makes of what it gathers and "
        "reduces."
    )
    lines = [
        "# Fidelity",
        "",
        fill(opening, 120),
        "",
        "| " + " | ".join(["", *MODELS]) + " |",
        "|" + "---|" * (1 + len(MODELS)),
    ]
    for way in WAYS:
        cells = [f"{num_right[model, way]} of {num_cases[model, way]}" for model in MODELS]
        lines.append("| " + " | ".join([way, *cells]) + " |")
    lines += ["", f"{right} of {total} specs differ by 0 bytes.", ""]
    lines += [f"- {line}" for line in wrong]
    lines += ["## Beside the categories", "", fill(closing, 120), ""]
    return "\n".join(lines)


def _spread(values: list[int]) -> str:
    """`0 to 12,288`, or one number where all are alike."""
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


if __name__ == "__main__":
    sys.exit(main())
