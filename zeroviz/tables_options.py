"""What a step's options mean, said at the head of a table: one entry for each that is not the default."""

from __future__ import annotations

from collections import Counter

from zeroviz.facts import QUANTIZED_BLOCK_NUMEL
from zeroviz.gathered import fsdp_root_numel, most_gathered, names
from zeroviz.implementations import WITHOUT_UNITS
from zeroviz.models import Family
from zeroviz.partition import buffer_numel, buffers_for, plan_for, shard_numel
from zeroviz.schedule import OpKind, schedule
from zeroviz.spec import DType, Implementation, Offload, Optimizer, RunSpec, Strategy

_OPTIMIZER = {
    Optimizer.ADAMW_FOREACH: "all units in one go, with a temporary for every owned element at once",
    Optimizer.ADAMW_FUSED: "one kernel a unit, which makes no temporaries",
    Optimizer.ADAMW_8BIT: f"each moment 1 byte an element and an fp32 scale for {QUANTIZED_BLOCK_NUMEL:,} of them",
    Optimizer.SGD_MOMENTUM: "one moment; the update makes no temporaries",
    Optimizer.SGD: "no state; the update makes no temporaries",
}


def option_entries(spec: RunSpec) -> list[tuple[str, str]]:
    """(label, text) of optimizer, gradient, checkpointing and offload."""
    entries = []
    if what := _OPTIMIZER.get(spec.optimizer):
        cast = "; a gradient is cast for it, one unit at a time" if spec.recipe.casts_grad else ""
        if spec.optimizer.steps_together:
            cast = cast.replace("one unit at a time", "all units at once")
        entries.append(("optimizer", f"{spec.optimizer.value}: {what}{cast}"))
    if spec.grad_dtype:
        cast = f", cast to {spec.recipe.update.value} for the update" if spec.recipe.casts_grad else ""
        entries.append(("gradients", f"{spec.grad_dtype.value} instead of {spec.precision.grad.value}{cast}"))
    if blocks := spec.checkpointing.blocks:
        kept = "each block keeps" if blocks == 1 else f"{blocks} blocks at a time keep"
        again = f"backward runs the forward of all {spec.model.layers} blocks once more"
        if extra := _gathered_for_recompute(spec):
            again += f", for which {extra} gathered once more as well"
        entries.append(("recompute", f"{spec.checkpointing}: {kept} only the first input; {again}"))
    if spec.offload is not Offload.NONE:
        entries.append(("offload", _offload(spec)))
    if spec.clip_norm is not None:
        sends = spec.strategy.shards_optimizer and spec.num_shards > 1
        across = "; one number is summed over the ranks that own the rest" if sends else ""
        entries.append(("clipping", f"the mean gradient is scaled down to a norm of {spec.clip_norm:g}{across}"))
    return entries


def _gathered_for_recompute(spec: RunSpec) -> str:
    """`16 units are`: those that recomputing gathers, frees and leaves to be gathered again for their backward."""
    gathers = Counter(op.unit for op in schedule(spec) if op.kind is OpKind.UNSHARD)
    plain = 2 * spec.accumulation if spec.strategy.reshards_after_forward else spec.accumulation
    number = sum(times > plain for times in gathers.values())
    return f"{number:,} unit{'s are' if number > 1 else ' is'}" if number else ""


def _offload(spec: RunSpec) -> str:
    if spec.offload.moves_params:
        states = "parameters, gradients and optimizer state"
        return f"params: all {states} lie on the host, which updates them; a shard goes up for each gather"
    copy = "the master copy" if spec.recipe.master else "a copy of the owned parameters"
    moments = " and the optimizer's state" if spec.recipe.num_moments else ""
    verb = "lie" if moments else "lies"
    return f"optimizer: {copy}{moments} {verb} on the host, which makes the update"


def batch_text(spec: RunSpec) -> str:
    """`4 micro-batches a step, each of 1 sequence of 32 = 32 tokens on each rank; gradients are reduced in each`."""
    if spec.model.family is Family.BARE:
        text = "not counted: a bare count has no layers and so no activations"
        many = f"{spec.accumulation:,} micro-batches a step"
    else:
        sequences = f"{spec.batch:,} sequence{'s' * (spec.batch > 1)}"
        text = f"{sequences} of {spec.seq:,} = {spec.num_tokens_per_rank:,} tokens on each rank"
        many = f"{spec.accumulation:,} micro-batches a step, each of "
    if spec.accumulation == 1:
        return text
    when = "in each" if spec.reduces_each else "in the last only"
    held = ", and held whole till then" if spec.strategy.shards_grad and not spec.reduces_each else ""
    body = f"{many}; {text}" if spec.model.family is Family.BARE else f"{many}{text}"
    return f"{body}; gradients are reduced {when}{held}"


def unit_entries(spec: RunSpec) -> list[tuple[str, str]]:
    """(label, text) below the list of units: how much of the model is whole at once, and what FSDP's root would be.

    Of our own step alone; the order of another implementation is not known by arithmetic.
    """
    if spec.impl in WITHOUT_UNITS:
        return [
            ("  names only", f"{spec.impl.label} knows no units; here they say where in the step a byte is counted")
        ]
    if spec.impl is not Implementation.OWN:
        return []
    num_units, num_params = len(plan_for(spec).units), spec.model.num_params
    if spec.strategy.has_whole_buffer:
        (buffer,) = buffers_for(spec)
        whole = buffer_numel(buffer, spec)
        return [("  in one buffer", f"{whole:,} elements, {whole - buffer.numel:,} of them padding")]
    gathered = most_gathered(spec)
    if gathered is None:
        if spec.strategy is Strategy.ZERO2 and num_units == 1:
            return [("  whole at once", f"the whole gradient, for there is one unit; {_finer(spec)}")]
        return []
    if gathered.numel < num_params:
        share = f"{gathered.numel:,} elements, {gathered.numel / num_params:.0%}: {names(gathered.units)}"
        entries = [("  gathered at once", f"up to {share}")]
    elif num_units == 1:
        entries = [("  gathered at once", f"the whole model, for it is one unit; {_finer(spec)}")]
    elif not spec.strategy.reshards_after_forward:
        entries = [("  gathered at once", "the whole model, at the end of forward")]
    else:
        entries = [("  gathered at once", f"the whole model: {names(gathered.units)}")]
    root = fsdp_root_numel(spec)
    if root and not spec.model.tied:
        share = f"{root:,} elements, {root / num_params:.0%}"
        entries.append(("  FSDP's root", f"{share}, if its blocks alone are wrapped; embed and head are apart here"))
    return entries


def _finer(spec: RunSpec) -> str:
    if spec.model.family is Family.BARE:
        return "name a model, which has smaller ones"
    return "--unit block makes smaller ones"


def scales_nbytes(spec: RunSpec) -> int:
    """Bytes of the scales of quantized moments, which `OPTIMIZER_STATE` contains; 0 without any."""
    recipe = spec.recipe
    num_scales = sum(recipe.num_scales(shard_numel(buffer, spec)) for buffer in buffers_for(spec))
    return recipe.num_moments * num_scales * DType.FP32.itemsize
