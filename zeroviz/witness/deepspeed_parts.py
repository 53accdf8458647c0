"""How DeepSpeed cuts a model: what each rank holds between steps, to the byte.

[Note: flat groups] Under stages 1 and 2 all parameters lie in one flat tensor, whole on every rank, its end padded to a
multiple of 2 N elements (`nccl_start_alignment_factor`). Rank r owns the r-th of N equal parts: of it the master, an
fp32 copy also where the parameters are fp32, and the moments. The last ranks own the padding. (deepspeed 0.19.8,
stage_1_and_2.py, and bf16_optimizer.py for stage 1 with bf16 parameters and fp32 gradients, which also holds these
gradients, whole and between steps.)

[Note: chunks] Under stage 3 each parameter is cut by itself, into N chunks of ceil(numel / N) elements whatever its
rows, so that the last chunks are shorter, or empty, and padded. A rank's chunks lie in one buffer, their gradients in
another one that is there for good, and so is the bucket gradients are reduced in, whatever the model:
`reduce_bucket_size` elements. Parameters of at most `stage3_param_persistence_threshold` elements are whole besides.
The chunk of a single rank is the whole, and is used as it is. (partition_parameters.py, stage3.py.)

[Note: stage 0] Nothing is cut. Gradients are dropped with the step. bf16 parameters have an fp32 master each.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from zeroviz.category import Category
from zeroviz.models import NamedShape
from zeroviz.partition import padded_numel, plan_for
from zeroviz.settings import value_of
from zeroviz.spec import DType, Precision, RunSpec, Strategy

ALIGNMENT = 2  # elements a rank, `nccl_start_alignment_factor`
SUB_GROUP_NUMEL = 1_000_000_000  # `sub_group_size`: elements of a rank's chunks that are updated together
NORM_NBYTES, WIDE_NORM_NBYTES, FLAG_NBYTES = 4, 8, 1


@lru_cache(maxsize=256)
def parameter_order(spec: RunSpec) -> tuple[NamedShape, ...]:
    """The parameters as the model has them: in order of first use."""
    shapes = (
        shape for segment in plan_for(spec).segments for sublayer in segment.sublayers for shape in sublayer.params
    )
    return tuple({shape.name: shape for shape in shapes}.values())


def flat_numel(spec: RunSpec) -> int:
    """Elements of the flat tensor of stages 1 and 2, padding included. See [Note: flat groups]."""
    return padded_numel(spec.model.num_params, ALIGNMENT * spec.ranks)


def part_numel(spec: RunSpec) -> int:
    """Elements of each rank's part of it."""
    return flat_numel(spec) // spec.ranks


def chunk_numel(numel: int, num_ranks: int) -> int:
    """Elements of each chunk of a parameter of `numel`: ceil(numel / N). See [Note: chunks]."""
    return -(-numel // num_ranks)


def owned_numel(spec: RunSpec, shape: NamedShape, rank: int) -> int:
    """Elements of the parameter in the rank's chunk, padding left out."""
    chunk = chunk_numel(shape.numel, spec.ranks)
    return chunk - _padding(shape.numel, chunk, rank)


def is_persistent(spec: RunSpec, shape: NamedShape) -> bool:
    """Whether the parameter stays whole under stage 3, beside its chunks."""
    return spec.ranks > 1 and shape.numel <= int(value_of(spec.settings, "persistence_numel", spec.impl))


def keeps_whole_gradients(spec: RunSpec) -> bool:
    """Whether fp32 gradients of the whole model are held between steps."""
    return spec.strategy is Strategy.ZERO1 and spec.precision is Precision.BF16_FP32GRAD


def scales_the_loss(spec: RunSpec) -> bool:
    """Whether the library's optimizer multiplies the loss by a scale: not stage 0, nor the one with fp32 gradients."""
    return spec.strategy is not Strategy.DDP and not keeps_whole_gradients(spec)


def sub_groups(spec: RunSpec) -> list[int]:
    """Elements of each tensor that stage 3's optimizer updates."""
    groups: list[int] = []
    numel = 0
    for shape in parameter_order(spec):
        numel += chunk_numel(shape.numel, spec.ranks)
        if numel >= SUB_GROUP_NUMEL:
            groups.append(numel)
            numel = 0
    return [*groups, numel] if numel else groups


def updated_numels(spec: RunSpec) -> list[int]:
    """Elements of each tensor that a rank's optimizer updates."""
    match spec.strategy:
        case Strategy.DDP:
            return [shape.numel for shape in spec.model.params]
        case Strategy.ZERO3:
            return sub_groups(spec)
        case _:
            return [part_numel(spec)]


@lru_cache(maxsize=256)
def rest_of(spec: RunSpec) -> dict[Category, int]:
    """What every rank holds between steps, padding included. Beside the states it is the norm of the last gradient, and
    under stage 3 a flag, which are TEMPORARY here."""
    recipe, numels = spec.recipe, updated_numels(spec)
    owned = sum(numels)
    rest = {Category.OPTIMIZER_STATE: sum(map(recipe.moments_nbytes, numels))}
    if spec.strategy is Strategy.DDP:
        rest[Category.UNSHARDED_PARAM] = owned * recipe.param.itemsize
        if recipe.master:
            rest[Category.MASTER_PARAM] = owned * recipe.master.itemsize
        return rest
    rest[Category.MASTER_PARAM] = owned * DType.FP32.itemsize
    if spec.strategy is Strategy.ZERO3:
        bucket: int = value_of(spec.settings, "bucket_numel", spec.impl)
        rest[Category.SHARDED_PARAM] = owned * recipe.param.itemsize
        whole = (shape.numel for shape in spec.model.params if is_persistent(spec, shape))
        gathered = sum(chunk_numel(numel, spec.ranks) * spec.ranks for numel in whole)
        rest[Category.UNSHARDED_PARAM] = gathered * recipe.param.itemsize
        rest[Category.SHARDED_GRAD] = owned * recipe.grad.itemsize
        rest[Category.BUCKET] = bucket * recipe.param.itemsize
        rest[Category.TEMPORARY] = WIDE_NORM_NBYTES + FLAG_NBYTES
        return rest
    rest[Category.UNSHARDED_PARAM] = flat_numel(spec) * recipe.param.itemsize
    if keeps_whole_gradients(spec):
        rest[Category.UNSHARDED_GRAD] = flat_numel(spec) * recipe.grad.itemsize
    rest[Category.TEMPORARY] = NORM_NBYTES
    return rest


def padding_nbytes(spec: RunSpec, rank: int) -> int:
    """How many bytes of `rest_of` are padding on this rank."""
    if spec.strategy is Strategy.DDP:
        return 0
    recipe = spec.recipe
    states = DType.FP32.itemsize + recipe.num_moments * recipe.moments.itemsize
    if spec.strategy is Strategy.ZERO3:
        own = sum(_padding(shape.numel, chunk_numel(shape.numel, spec.ranks), rank) for shape in spec.model.params)
        whole = sum(-shape.numel % spec.ranks for shape in spec.model.params if is_persistent(spec, shape))
        return own * (recipe.param.itemsize + recipe.grad.itemsize + states) + whole * recipe.param.itemsize
    whole = flat_numel(spec) - spec.model.num_params
    held_whole = recipe.param.itemsize + (recipe.grad.itemsize if keeps_whole_gradients(spec) else 0)
    return whole * held_whole + _padding(spec.model.num_params, part_numel(spec), rank) * states


def _padding(numel: int, part: int, rank: int) -> int:
    """Elements of padding in the rank's part of so many elements."""
    return part - max(0, min(part, numel - rank * part))


def step_counter_nbytes(spec: RunSpec) -> int:
    return len(updated_numels(spec)) * DType.FP32.itemsize if spec.optimizer.counts_steps else 0


def alike(spec: RunSpec) -> list[range]:
    """Stretches of neighbouring ranks with equal padding."""
    borders = {0, spec.ranks}
    if spec.strategy is Strategy.ZERO3:
        parts = {shape.numel: chunk_numel(shape.numel, spec.ranks) for shape in spec.model.params}
    else:
        parts = {spec.model.num_params: part_numel(spec)}
    if spec.strategy is not Strategy.DDP:
        for numel, part in parts.items():
            whole, rest = divmod(numel, part)
            borders |= {whole, whole + (rest > 0)}
    return [
        range(start, stop) for start, stop in pairwise(sorted(border for border in borders if border <= spec.ranks))
    ]
