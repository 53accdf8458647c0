"""How a step is put into words: its recipe as a sum, its settings that are not the defaults. One wording everywhere."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from zeroviz.dtypes_apart import Copy, dtypes_of
from zeroviz.models import Family, ModelShape
from zeroviz.partition import plan_for
from zeroviz.spec import DType, Implementation, Offload, Optimizer, RunSpec, Zero1Form

MAX_SPANS = 2
"""Stretches of neighbours that are named of ranks that are none."""


def title(spec: RunSpec) -> str:
    """A spec in a few words: `ZeRO-3 on 4 ranks, bf16-mixed`."""
    return f"{strategy_label(spec)} on {ranks_text(spec)}, {spec.precision.value}"


def ranks_text(spec: RunSpec) -> str:
    """`1 rank`, `1,024 ranks`, `16 ranks in groups of 8`."""
    groups = "" if spec.shard_ranks is None else f" in groups of {spec.shard_ranks:,}"
    return f"{spec.ranks:,} rank{'s' * (spec.ranks > 1)}{groups}"


def strategy_label(spec: RunSpec) -> str:
    """`ZeRO-3`, and whose code it is where that is not our own: `ZeRO-3 (fsdp2)`."""
    return spec.strategy.label + ("" if spec.impl is Implementation.OWN else f" ({spec.impl.value})")


def counters_text(spec: RunSpec, nbytes: int) -> str:
    """The optimizer's step counters: our own code updates one tensor a slice, others one a parameter."""
    per = "slice" if spec.impl is Implementation.OWN else "parameter"
    return f"{nbytes:,} B of step counters, one scalar a {per}"


def recipe_sum(spec: RunSpec, per: str) -> str:
    """What a parameter costs when nothing is sharded: `2 param + 2 grad + 4 master + 8 Adam = 16 bytes/param`."""
    dtypes, num_moments = dtypes_of(spec), spec.recipe.num_moments
    name = "Adam" if num_moments == 2 else "momentum"
    names = {Copy.PARAM: "param", Copy.GRAD: "grad", Copy.MASTER: "master", Copy.MOMENTS: name}
    widths = {copy: dtype.itemsize for copy, dtype in dtypes.items() if dtype}
    if num_moments:
        widths[Copy.MOMENTS] *= num_moments
    parts = " + ".join(f"{width} {names[copy]}" for copy, width in widths.items())
    scales = " and scales" if dtypes[Copy.MOMENTS] is DType.INT8 else ""
    return f"{parts} = {sum(widths.values())} {per}{scales}"


def parameters_text(model: ModelShape) -> str:
    """`133,106 parameters`, `1 parameter`."""
    return f"{model.num_params:,} parameter{'s' * (model.num_params != 1)}"


def model_text(model: ModelShape) -> str:
    """`tiny, 133,106 parameters`. A bare count is called by its count, which is said once."""
    return parameters_text(model) if model.family is Family.BARE else f"{model.name}, {parameters_text(model)}"


def what_text(spec: RunSpec) -> str:
    """Model, units, batch and options: `tiny, 133,106 parameters in 4 units (block); 1 x 32 tokens on each rank`."""
    units = len(plan_for(spec).units)
    what = f"{model_text(spec.model)} in {units:,} {'unit' if units == 1 else 'units'}"
    return "; ".join([f"{what} ({spec.unit}){batch_words(spec)}", *step_options(spec)])


def batch_words(spec: RunSpec) -> str:
    """`; 1 x 32 tokens on each rank`, nothing for a bare count."""
    return "" if spec.model.family is Family.BARE else f"; {spec.batch:,} x {spec.seq:,} tokens on each rank"


def overlap_options(spec: RunSpec) -> list[str]:
    """The settings of communication that are not the defaults."""
    options = []
    if spec.zero1_form is not Zero1Form.REDUCE_SCATTER:
        options.append(f"zero1 form {spec.zero1_form.value}")
    if spec.prefetch:
        options.append(f"prefetch {spec.prefetch}")
    if spec.async_reduce:
        options.append("async reduce")
    return options


def step_options(spec: RunSpec) -> list[str]:
    """The settings of optimizer, gradient, checkpointing, offload, micro-batches and clipping that are not defaults."""
    options = []
    if spec.optimizer is not Optimizer.ADAMW:
        options.append(spec.optimizer.value)
    if spec.grad_dtype:
        options.append(f"gradients {spec.grad_dtype.value}")
    if spec.checkpointing:
        options.append(f"checkpointing {spec.checkpointing}")
    if spec.offload is not Offload.NONE:
        options.append(f"offload {spec.offload.value}")
    if spec.accumulation > 1:
        sync = {None: "", True: " without sync", False: " with sync"}[spec.no_sync]
        options.append(f"{spec.accumulation:,} micro-batches{sync}")
    if spec.clip_norm is not None:
        options.append(f"gradient norm clipped at {spec.clip_norm:g}")
    return options


@lru_cache(maxsize=256)
def ranks_words(ranks: tuple[int, ...]) -> str:
    """`rank 3`, `ranks 0-30`; of more than two stretches of neighbours the first two: `ranks 0-2, 4-6, …`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    stops = [place for place, (rank, after) in enumerate(pairwise(ranks), start=1) if after != rank + 1]
    spans = [ranks[start:stop] for start, stop in pairwise((0, *stops[:MAX_SPANS], len(ranks)))][:MAX_SPANS]
    words = [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
    return f"ranks {', '.join(words)}{', …' if len(stops) >= MAX_SPANS else ''}"
