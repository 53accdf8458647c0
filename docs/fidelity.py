"""Run the whole grid on real ranks, compare with the arithmetic to the byte, and write docs/fidelity.md.

    python docs/fidelity.py            the whole grid, some fifty minutes on two cores
    python docs/fidelity.py --sample   every 97th case, and nothing is written
    python docs/fidelity.py --again    the cases that the page says differ, once more; the page says what came of it

A case is right when, on every rank, what is held at rest by category, the peak with its place and its categories, the
largest and the last total of every op of the step, and every collective are as predicted; and when the allocator's own
figures are too: its peak equals the predicted one, kernels' scratch and gloo's copies included, or what it differs by
has a name. In fp32 without overlap no name is accepted.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from textwrap import fill

import torch

from cluster.live import environment
from cluster.session import Session
from zeroviz.compare import compare, machine_maxima, maxima
from zeroviz.models import PRESETS
from zeroviz.precision import OWN_PRECISIONS, WHOLE_BUFFER_PRECISIONS
from zeroviz.predict import predict
from zeroviz.spec import (
    Checkpointing,
    DType,
    Offload,
    Optimizer,
    RunSpec,
    Strategy,
    UnitPolicy,
    Zero1Form,
)
from zeroviz.toggles import usual_shard_ranks
from zeroviz.trace import Origin, RankTrace, Trace, merge, rank_from_dict

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
    "shard_grad_op": {"strategy": Strategy.SHARD_GRAD_OP},
    "hybrid_shard": {"strategy": Strategy.HYBRID_SHARD},
    "hybrid_shard, groups of one rank": {"strategy": Strategy.HYBRID_SHARD, "shard_ranks": 1},
    "megatron_optim": {"strategy": Strategy.MEGATRON_OPTIM},
}
# Options that change a step's order or its states, several at a time so that they meet; blocks are recomputed as well.
OPTIONS: dict[str, dict[str, object]] = {
    "ddp, 2 micro-batches reduced each, sgd": {
        "strategy": Strategy.DDP,
        "accumulation": 2,
        "no_sync": False,
        "optimizer": Optimizer.SGD,
    },
    "zero1, 2 micro-batches, adamw-fused, offload optimizer": {
        "strategy": Strategy.ZERO1,
        "accumulation": 2,
        "optimizer": Optimizer.ADAMW_FUSED,
        "offload": Offload.OPTIMIZER,
    },
    "zero2, gradients bf16, adamw-foreach, offload optimizer": {
        "strategy": Strategy.ZERO2,
        "grad_dtype": DType.BF16,
        "optimizer": Optimizer.ADAMW_FOREACH,
        "offload": Offload.OPTIMIZER,
    },
    "zero3, 3 micro-batches, gradients fp32, offload params": {
        "strategy": Strategy.ZERO3,
        "accumulation": 3,
        "grad_dtype": DType.FP32,
        "offload": Offload.PARAMS,
    },
    "zero3, 2 micro-batches without sync, sgd-momentum": {
        "strategy": Strategy.ZERO3,
        "accumulation": 2,
        "no_sync": True,
        "optimizer": Optimizer.SGD_MOMENTUM,
    },
    "hybrid_shard, 2 micro-batches, clipped, prefetch 1, async reduce": {
        "strategy": Strategy.HYBRID_SHARD,
        "accumulation": 2,
        "clip_norm": 0.5,
        "prefetch": 1,
        "async_reduce": True,
    },
    "megatron_optim, 3 micro-batches, clipped, adamw-foreach": {
        "strategy": Strategy.MEGATRON_OPTIM,
        "accumulation": 3,
        "clip_norm": 0.5,
        "optimizer": Optimizer.ADAMW_FOREACH,
    },
    "zero3, clipped, offload optimizer": {
        "strategy": Strategy.ZERO3,
        "clip_norm": 0.5,
        "offload": Offload.OPTIMIZER,
    },
}
CHECKPOINTING = ("none", "block")
# 17 tokens: no tensor of the step has a size that anything divides.
SHAPE = {"batch": 2, "seq": 17, "steps": 2}
PAGE = Path(__file__).with_name("fidelity.md")
MEASURED_TWICE = "as predicted when measured once more"


def cases() -> Iterator[tuple[str, str, RunSpec]]:
    """(model, way, spec) of the whole grid."""
    ways = (WAYS | OPTIONS).items()
    for (model_name, model), (way, settings), ranks, precision, unit, checkpointing in itertools.product(
        MODELS.items(), ways, RANKS, OWN_PRECISIONS, UNITS, CHECKPOINTING
    ):
        if way in OPTIONS and checkpointing == "none":
            continue
        if settings["strategy"] is Strategy.MEGATRON_OPTIM and precision not in WHOLE_BUFFER_PRECISIONS:
            continue
        if settings["strategy"] is Strategy.HYBRID_SHARD:  # 4 ranks are two groups of two; 2 and 3 are one group
            settings = {"shard_ranks": usual_shard_ranks(ranks), **settings}
        shape = {"model": model, "ranks": ranks, "precision": precision, **SHAPE}
        policies = {"unit": UnitPolicy.parse(unit), "checkpointing": Checkpointing.parse(checkpointing)}
        yield model_name, way, RunSpec(**shape, **policies, **settings)  # type: ignore[arg-type]


def findings(spec: RunSpec, trace: Trace) -> list[str]:
    """What differs from the prediction, by name; empty when nothing does."""
    found: list[str] = []
    kind = kind_of(spec)
    for live, arithmetic in zip(trace.ranks, predict(spec).ranks, strict=True):
        reading = live.allocator
        assert reading is not None
        exact = kind is Kind.EXACT
        for name, same in (
            ("at rest", live.at_rest == arithmetic.at_rest),
            ("peak", live.peak() == arithmetic.peak()),
            ("an op's maximum", maxima(live) == maxima(arithmetic)),
            ("at rest on the host", live.at_rest_on_host == arithmetic.at_rest_on_host),
            ("wire", live.collectives == arithmetic.collectives),
            ("link", live.transfers == arithmetic.transfers),
            ("step counters", live.step_counter_nbytes == arithmetic.step_counter_nbytes),
            ("the allocator's books", reading.peak_nbytes == live.machine_peak().total),
            ("unattributed bytes", not reading.unattributed_nbytes),
            ("the allocator's peak", not exact or reading.peak_nbytes == arithmetic.machine_peak().total),
            ("an op's maximum as here", not exact or machine_maxima(live) == machine_maxima(arithmetic)),
        ):
            if not same:
                found.append(f"{name}, rank {live.rank}")
    unexplained = compare(predict(spec), trace).unexplained
    return [*found, *(f"unexplained: {_short(row)}" for row in unexplained[:3])]


def _short(row: object) -> str:
    """`MemoryRow, rank 1: 45852 B in machine peak, BACKEND_COPY`."""
    named = {name: getattr(row, name) for name in ("moment", "category", "phase", "op", "unit") if hasattr(row, name)}
    place = ", ".join(str(getattr(value, "value", value)) for value in named.values())
    nbytes = getattr(row, "difference", getattr(row, "nbytes", "?"))
    return f"{type(row).__name__}, rank {getattr(row, 'rank', '?')}: {nbytes} B in {place}"


class Kind(Enum):
    """What the allocator's peak may differ from the predicted one by."""

    EXACT = "fp32"
    """Nothing."""
    SCRATCH = "the bf16 recipes"
    """Scratch that this machine's kernels borrow."""
    OVERLAP = "communication beside compute"
    """The moment at which gloo's thread makes its copies."""


def kind_of(spec: RunSpec) -> Kind:
    if spec.ranks > 1 and (spec.prefetch or spec.async_reduce):
        return Kind.OVERLAP
    return Kind.EXACT if spec.recipe.param is DType.FP32 else Kind.SCRATCH


def residual(rank: RankTrace, arithmetic: RankTrace) -> int:
    """The allocator's peak beyond the predicted one, in bytes."""
    assert rank.allocator is not None
    return rank.allocator.peak_nbytes - arithmetic.machine_peak().total


def measure(session: Session, spec: RunSpec) -> Trace:
    run = session.run_sync(spec)
    return merge(Origin.LIVE, spec, map(rank_from_dict, run.ranks), environment(run))


def place_of(model_name: str, way: str, spec: RunSpec) -> str:
    """What a case is called on the page."""
    settings = f"N={spec.ranks}, {spec.precision.value}, {spec.unit}, checkpointing {spec.checkpointing}"
    return f"{model_name}, {way}, {settings}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--sample", action="store_true", help="run every 97th case and write nothing")
    parser.add_argument("--again", action="store_true", help="run what differs on the page once more")
    asked = parser.parse_args()
    return run_again() if asked.again else run_grid(sample=asked.sample)


def run_again() -> int:
    """Measure the page's differing cases once more. One that is right now is counted as right, and stays on the page
    with what was found before: times of a busy machine can leave events of two threads that no order explains."""
    page = PAGE.read_text()
    listed = [" ".join(entry.split()) for entry in re.findall(r"^- (.*(?:\n  .*)*)", page, re.MULTILINE)]
    found = {entry: case for entry in listed for case in cases() if entry.startswith(f"{place_of(*case)}: ")}
    left = 0
    with Session() as session:
        for entry, (model_name, way, spec) in found.items():
            if entry.endswith(MEASURED_TWICE):
                continue
            if findings(spec, measure(session, spec)):
                left += 1
                continue
            page = _counted_as_right(page, model_name, way)
            page = page.replace(_bullet(entry), _bullet(f"{entry}; {MEASURED_TWICE}"))
    print(page)
    PAGE.write_text(page)
    return 1 if left else 0


def _counted_as_right(page: str, model_name: str, way: str) -> str:
    """The page with one more of the model's and way's cases right."""
    row = next(line for line in page.splitlines() if line.startswith(f"| {way} |"))
    cells = row.split(" | ")
    column = 1 + list(MODELS).index(model_name)
    number, rest = cells[column].split(" ", 1)
    cells[column] = f"{int(number) + 1} {rest}"
    total = re.search(r"^(\d+) of", page, re.MULTILINE)
    assert total is not None
    page = page.replace(f"\n{total[0]}", f"\n{int(total[1]) + 1} of")
    return page.replace(row, " | ".join(cells))


def _bullet(line: str) -> str:
    return fill(f"- {line}", 120, subsequent_indent="  ")


def run_grid(*, sample: bool) -> int:
    chosen = [case for number, case in enumerate(cases()) if not sample or number % 97 == 0]
    num_right: Counter[tuple[str, str]] = Counter()
    num_cases: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    residuals: dict[Kind, list[int]] = {kind: [] for kind in Kind}
    num_hidden = num_late = 0
    with Session() as session:
        for number, (model_name, way, spec) in enumerate(chosen):
            trace = measure(session, spec)
            found = findings(spec, trace)
            num_cases[model_name, way] += 1
            num_right[model_name, way] += not found
            if found:
                wrong.append(f"{place_of(model_name, way, spec)}: {'; '.join(found)}")
            for rank, arithmetic in zip(trace.ranks, predict(spec).ranks, strict=True):
                residuals[kind_of(spec)].append(residual(rank, arithmetic))
                assert rank.allocator is not None
                num_hidden += rank.allocator.num_hidden_frees
                num_late += rank.allocator.num_late
            if sys.stderr.isatty():
                print(f"\r{number + 1}/{len(chosen)}, {len(wrong)} differ", end="", file=sys.stderr)
    page = render(num_right, num_cases, wrong, residuals, num_hidden, num_late)
    print(page)
    if not sample:
        PAGE.write_text(page)
    return 1 if wrong else 0


def render(
    num_right: Counter[tuple[str, str]],
    num_cases: Counter[tuple[str, str]],
    wrong: list[str],
    residuals: dict[Kind, list[int]],
    num_hidden: int,
    num_late: int,
) -> str:
    """The page: cases and how many are right by model and way, what differs, and the allocator beside."""
    total, right = sum(num_cases.values()), sum(num_right.values())
    num_ranks = sum(map(len, residuals.values()))
    recipes = ", ".join(recipe.value for recipe in OWN_PRECISIONS)
    opening = (
        f"Written by `docs/fidelity.py` on torch {torch.__version__}, CPU, gloo. {total} specs, {num_ranks} ranks: "
        f"N = {', '.join(map(str, RANKS))}; {recipes}; units {', '.join(UNITS)}; checkpointing "
        f"{', '.join(CHECKPOINTING)}; {SHAPE['batch']} x {SHAPE['seq']} tokens a rank and micro-batch. Predicted and "
        "measured are compared to the byte on every rank: at rest by category, on the device and on the host, the peak "
        "with its place and categories, the largest and the last total of every op, every collective, and what goes "
        "over the link to the host."
    )
    closing = (
        "The allocator's own figure counts every block of the process, whatever it is for, and the running sum of the "
        "events was its total at every event. Blocks that no event and no name of ours accounts for: 0 bytes, or the "
        f"case is listed above. {num_hidden:,} frees had no event and were rebuilt from the total; the step waited "
        f"{num_late:,} times for gloo's thread to let a copy go. The allocator's peak less the predicted one, kernels' "
        "scratch and gloo's copies included:"
    )
    causes = {
        Kind.EXACT: "nothing may differ",
        Kind.SCRATCH: "kernel scratch of this machine in bf16, measured and never predicted",
        Kind.OVERLAP: "gloo's copies come and go as its thread gets to them",
    }
    lines = [
        "# Fidelity",
        "",
        fill(opening, 120),
        "",
        "| " + " | ".join(["", *MODELS]) + " |",
        "|" + "---|" * (1 + len(MODELS)),
    ]
    for way in WAYS | OPTIONS:
        cells = [f"{num_right[model, way]} of {num_cases[model, way]}" for model in MODELS]
        lines.append("| " + " | ".join([way, *cells]) + " |")
    lines += ["", f"{right} of {total} specs differ by 0 bytes.", ""]
    lines += [_bullet(line) for line in wrong] + [""] * bool(wrong)
    lines += ["## The allocator beside", "", fill(closing, 120), ""]
    lines += ["| | ranks | of them 0 | bytes | cause |", "|---|---|---|---|---|"]
    for kind, values in residuals.items():
        if values:
            cells = [kind.value, f"{len(values):,}", f"{values.count(0):,}", _spread(values), causes[kind]]
            lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    return "\n".join(lines)


def _spread(values: list[int]) -> str:
    """`0 to 12,288`, or one number where all are alike."""
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


if __name__ == "__main__":
    sys.exit(main())
