"""Say of every implementation what its categories mean and what its traps cost, and write docs/implementations.md.

    python docs/implementations.py

Every figure of the page is worked out by `zeroviz.predict`; nothing is run live, and no extra need be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from itertools import accumulate
from pathlib import Path
from textwrap import fill
from typing import Any

from zeroviz.collectives import CollectiveOp
from zeroviz.implementations import PAIRS
from zeroviz.models import PRESETS
from zeroviz.partition import plan_for
from zeroviz.predict import predict
from zeroviz.quantity import format_nbytes
from zeroviz.rank_trace import alike
from zeroviz.settings import SETTINGS
from zeroviz.spec import DType, Implementation, Precision, RunSpec, Settings, Strategy, UnitPolicy
from zeroviz.trace import Category, RankTrace

PAGE = Path(__file__).with_name("implementations.md")
WIDTH = 120
BASE = RunSpec(model=PRESETS["gpt2"], ranks=4, seq=128)
P = BASE.model.num_params
C, Impl, S = Category, Implementation, Strategy

COLUMNS: dict[str, tuple[Category, ...]] = {
    "parameters": (C.SHARDED_PARAM, C.UNSHARDED_PARAM),
    "gradients": (C.SHARDED_GRAD, C.UNSHARDED_GRAD),
    "master": (C.MASTER_PARAM,),
    "moments": (C.OPTIMIZER_STATE,),
    "buckets": (C.BUCKET,),
}
"""What is held at rest, in the columns of the table."""


def spec_of(impl: Implementation, strategy: Strategy, **options: Any) -> RunSpec:
    groups = {"shard_ranks": 2} if strategy is S.HYBRID_SHARD else {}
    return replace(BASE, impl=impl, strategy=strategy, **{**groups, **options})


def ranks_of(spec: RunSpec) -> list[RankTrace]:
    """One of each kind."""
    return [rank for _, rank in alike(predict(spec).ranks)]


def rest(spec: RunSpec, *categories: Category) -> int:
    """Bytes at rest of the rank that holds most, of some categories or of all."""
    return max(sum(rank.at_rest.get(c, 0) for c in categories or rank.at_rest) for rank in ranks_of(spec))


def peak(spec: RunSpec) -> int:
    return max(rank.peak().total for rank in ranks_of(spec))


def most(spec: RunSpec, category: Category) -> int:
    """The most that a rank holds of one category at any moment of the step."""
    found = 0
    for rank in ranks_of(spec):
        held = accumulate(
            (e.delta_nbytes for e in rank.events if e.category is category), initial=rank.at_rest.get(category, 0)
        )
        found = max(found, *held)
    return found


def sent_in_p(spec: RunSpec) -> float:
    """Elements a rank sends in a step, in parameters and without the ring's (N-1)/N."""
    whole = 0.0
    for call in ranks_of(spec)[0].collectives:
        whole += call.op.ring_passes * call.payload_nbytes / DType(call.dtype).itemsize
    return whole / spec.model.num_params


def sent_text(spec: RunSpec) -> str:
    """`3.00 P`; of a hybrid `3.00 P in groups, 1.00 P across`. The replicas' all-reduce is the only one there."""
    if spec.strategy is not S.HYBRID_SHARD:
        return f"{sent_in_p(spec):.2f} P"
    across = sum(
        call.op.ring_passes * call.payload_nbytes / DType(call.dtype).itemsize
        for call in ranks_of(spec)[0].collectives
        if call.op is CollectiveOp.ALL_REDUCE
    )
    return f"{sent_in_p(spec) - across / P:.2f} P in groups, {across / P:.2f} P across"


def overview() -> list[str]:
    """A row for each pair: bytes a parameter at rest, the peak, and what is sent."""
    head = ["implementation", "strategy", *COLUMNS, "at rest, each rank", "peak", "sent"]
    lines = [_row(head), _row(["---"] * len(head))]
    for impl, strategies in PAIRS.items():
        for strategy in strategies:
            spec = spec_of(impl, strategy)
            cells = [f"{rest(spec, *categories) / P:.2f}" for categories in COLUMNS.values()]
            cells = ["" if cell == "0.00" else cell for cell in cells]
            figures = [format_nbytes(rest(spec)), format_nbytes(peak(spec)), sent_text(spec)]
            lines.append(_row([impl.value, strategy.value, *cells, *figures]))
    return lines


def settings_table(impl: Implementation) -> list[str]:
    rows = [
        (name, setting.library[impl], setting.text, _shown(setting.defaults[impl]))
        for name, setting in SETTINGS.items()
        if impl in setting.library
    ]
    if not rows:
        return []
    head = ["option", "its name there", "what it does", "default"]
    lines = [_row(head), _row(["---"] * len(head))]
    return ["", *lines, *(_row([f"`--{name.replace('_', '-')}`", f"`{there}`", *more]) for name, there, *more in rows)]


# ---- what each holds, and its traps: a sentence with its price ----


def own() -> list[str]:
    return [
        "A unit's parameters and gradients lie in one flat buffer each, padded to a multiple of N, and a shard is an "
        "Nth of it. Gathers fill the buffer in place and reductions read it in place, so there are no communication "
        "buffers. Backward adds each fresh gradient, a temporary, to its place in the gradient buffer.",
    ]


def ddp() -> list[str]:
    plain = spec_of(Impl.DDP, S.DDP)
    view = replace(plain, settings=Settings(bucket_view=True))
    second = rest(plain) - rest(view)
    return [
        "Parameters and gradients are tensors of their own, whole; BUCKET is the reducer's flat buffers, held from the "
        "first step to the end.",
        f"Trap: the buckets are a second copy of the gradients, {second / P:.0f} bytes a parameter, here "
        f"{format_nbytes(second)} at rest. `gradient_as_bucket_view` makes gradients views into them and spares it.",
    ]


def zero_redundancy() -> list[str]:
    spec = spec_of(Impl.ZERO_REDUNDANCY, S.ZERO1)
    moments = [rank.at_rest.get(C.OPTIMIZER_STATE, 0) for rank in ranks_of(spec)]
    own_sent, sent = sent_in_p(spec_of(Impl.OWN, S.ZERO1)), sent_in_p(spec)
    return [
        "Moments are those of whole parameters, which no rank shares: the largest parameter goes first, to the rank "
        "that owns least. The gradient's buckets are DDP's.",
        f"Trap: ranks are uneven. Here they hold {format_nbytes(min(moments))} to {format_nbytes(max(moments))} of "
        f"moments; an even share were {format_nbytes(8 * P // spec.ranks)}.",
        f"Trap: it all-reduces whole gradients and then broadcasts every parameter: {sent:.2f} P sent where "
        f"reduce-scatter and all-gather are {own_sent:.2f} P.",
    ]


def fsdp1() -> list[str]:
    spec = spec_of(Impl.FSDP1, S.ZERO3)
    copies = most(spec, C.UNSHARDED_GRAD)
    largest = 4 * max(unit.numel for unit in plan_for(spec).units)
    whole = replace(spec, unit=UnitPolicy.parse("model"))
    return [
        "A unit is one flat parameter; its shard is SHARDED_PARAM and the gathered whole UNSHARDED_PARAM, filled in "
        "place. Gradients of views wait until the unit's last is there and are copied into one flat gradient: both are "
        "UNSHARDED_GRAD, and so is a copy with padding, if N does not divide the unit.",
        f"Price of the copies: up to {format_nbytes(copies)} of whole gradients, {copies / largest:.2f} times what the "
        f"largest unit's are.",
        f"Trap: under unit `model` the whole model is the root's, which FULL_SHARD does not free after forward: "
        f"{sent_in_p(whole):.2f} P sent instead of {sent_in_p(spec):.2f} P, and a peak of "
        f"{format_nbytes(peak(whole))} instead of {format_nbytes(peak(spec))}.",
        "Trap: a hybrid of shard groups of one rank is refused here, since torch then sums over one rank and lets the "
        "replicas train apart.",
    ]


def fsdp2() -> list[str]:
    spec, ours = spec_of(Impl.FSDP2, S.ZERO3), spec_of(Impl.OWN, S.ZERO3)
    kept = spec_of(Impl.FSDP2, S.SHARD_GRAD_OP)
    many = replace(spec, model=PRESETS["tiny"], ranks=64, seq=32)
    padding, flat = (
        max(rank.padding_nbytes for rank in ranks_of(each)) for each in (many, replace(many, impl=Impl.OWN))
    )
    mixed = replace(spec, precision=Precision.FSDP_MIXED)
    in_fp32 = replace(mixed, settings=Settings(reduce_dtype=DType.FP32))
    moved = {
        name: sum(t.op.ring_passes * t.payload_nbytes for t in ranks_of(each)[0].wire()) / P
        for name, each in (("mixed", in_fp32), ("DDP", spec_of(Impl.OWN, S.DDP)))
    }
    return [
        "Each parameter is cut by rows, and padded to N equal chunks by itself. ALL_GATHER_BUFFER is what a gather "
        "fills; it is copied out into UNSHARDED_PARAM, a tensor a parameter. REDUCE_SCATTER_BUFFER is what gradients "
        "are copied into and what comes out of the reduction, until it is the gradient.",
        f"Price of the copies, and of gathering a unit ahead in backward: a peak of {format_nbytes(peak(spec))} where "
        f"our own in-place buffers peak at {format_nbytes(peak(ours))}.",
        f"SHARD_GRAD_OP (`reshard_after_forward=False`) sends {sent_in_p(kept):.2f} P instead of {sent_in_p(spec):.2f} "
        f"P, for a peak of {format_nbytes(peak(kept))}.",
        f"Trap: padding by rows. On tiny over 64 ranks a rank holds up to {padding:,} B of it at rest; one flat buffer "
        f"a unit has {flat:,} B.",
        f"Bytes and elements differ: with bf16 gathers and fp32 reduction it moves {moved['mixed']:.2f} bytes a "
        f"parameter, before the ring's (N-1)/N, and DDP in fp32 {moved['DDP']:.2f}.",
    ]


def deepspeed() -> list[str]:
    two, three = spec_of(Impl.DEEPSPEED, S.ZERO2), spec_of(Impl.DEEPSPEED, S.ZERO3)
    small = Settings(bucket_numel=200_000)
    bf16 = replace(three, precision=Precision.BF16_MIXED)
    cut = replace(three, settings=Settings(persistence_numel=0))
    whole = rest(three, C.UNSHARDED_PARAM)
    return [
        "Stages 1 and 2 keep parameters whole in one flat tensor and own an Nth of it; the master of that part is an "
        "fp32 copy. Stage 3 cuts each parameter by itself. BUCKET is what gradients are reduced in.",
        f"Trap: `reduce_bucket_size` is 500 million elements unless told. Stage 3 keeps the bucket for good: "
        f"{format_nbytes(rest(bf16, C.BUCKET))} in bf16 and {format_nbytes(rest(three, C.BUCKET))} in fp32, whatever "
        f"the model. Stage 2 on this model peaks at {format_nbytes(peak(two))}; with 200,000 elements at "
        f"{format_nbytes(peak(replace(two, settings=small)))}.",
        f"Trap: `stage3_param_persistence_threshold` keeps small parameters whole: here {format_nbytes(whole)} a rank, "
        f"and {format_nbytes(rest(cut, C.UNSHARDED_PARAM))} with 0.",
        f"Trap: fp32 has a master as well, a second fp32 copy of the owned part: "
        f"{format_nbytes(rest(two, C.MASTER_PARAM))} a rank under stages 1 to 3.",
        f"Trap: stage 3 frees a parameter only if more than a billion elements stand before its next use "
        f"(`stage3_max_reuse_distance`), so a model this small is gathered once a step and kept: "
        f"{sent_in_p(three):.2f} P sent and not 3 P, and whole parameters of up to "
        f"{format_nbytes(most(three, C.UNSHARDED_PARAM))}.",
        f"On the wire, in elements: stage 1 sends {sent_in_p(spec_of(Impl.DEEPSPEED, S.ZERO1)):.2f} P, stage 2 "
        f"{sent_in_p(two):.2f} P, stage 3 {sent_in_p(three):.2f} P.",
    ]


def megatron() -> list[str]:
    spec = spec_of(Impl.MEGATRON, S.MEGATRON_OPTIM, precision=Precision.BF16_FP32GRAD)
    n = spec.ranks
    return [
        "Parameters lie in one contiguous buffer and gradients in another, whole on every rank, each parameter at a "
        "multiple of 64 elements; master and moments are pieces of parameters, those that fall into the rank's Nth.",
        f"bf16 parameters with fp32 gradients are 6 + 12/N bytes a parameter: {6 + 12 / n:g} for N = {n}, and with the "
        f"buffers' padding {rest(spec) / P:.3f} here, of the rank that holds most.",
        "Trap: without `overlap_grad_reduce` the library sets `bucket_size` aside and reduces one bucket, so "
        "`--bucket-numel` turns the overlap on.",
    ]


SECTIONS: dict[Implementation, Callable[[], list[str]]] = {
    Impl.OWN: own,
    Impl.DDP: ddp,
    Impl.ZERO_REDUNDANCY: zero_redundancy,
    Impl.FSDP1: fsdp1,
    Impl.FSDP2: fsdp2,
    Impl.DEEPSPEED: deepspeed,
    Impl.MEGATRON: megatron,
}


def page() -> str:
    """The whole page."""
    opening = f"""
        What each implementation holds, what its categories mean there, and what its traps cost. This page is written by
        `docs/implementations.py`, by arithmetic; the tests of each implementation compare that arithmetic with real
        ranks, to the byte. The step of the table: {BASE.model.name}, {P:,} parameters P, {BASE.ranks} ranks
        (hybrid_shard in groups of 2), fp32, {BASE.batch} x {BASE.seq} tokens a rank, a unit a block, the libraries'
        defaults. Columns are bytes a parameter at rest, of the rank that holds most. Sent is in elements, without the
        ring's (N-1)/N.
        """
    lines = ["# Implementations", "", _filled(opening), "", *overview()]
    for impl, say in SECTIONS.items():
        strategies = ", ".join(strategy.value for strategy in PAIRS[impl])
        lines += ["", f"## {impl.value}", "", _filled(f"{impl.label[:1].upper()}{impl.label[1:]}: {strategies}.")]
        for paragraph in say():
            lines += ["", _filled(paragraph)]
        lines += settings_table(impl)
    return "\n".join([*lines, ""])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _filled(text: str) -> str:
    return fill(" ".join(text.split()), WIDTH, break_on_hyphens=False, break_long_words=False)


def _shown(value: Any) -> str:
    if value is None:
        return "the library's own rule"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value.value if isinstance(value, Enum) else value)


def main() -> int:
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}: {len(SECTIONS)} implementations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
