"""What a rank of any implementation has trained, and what it holds at rest after it.

`parts_of` reads a rank's share as the implementation keeps it; `whole` puts the ranks' shares together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from cluster.allocator import live_nbytes
from cluster.collectives import Collectives
from cluster.meter import Meter, held_by_category
from cluster.rank import RankJob, collect, joined_group, set_imports_aside
from cluster.settle import settle
from cluster.steps import counted_of, steps_of
from tests.dist.ranks import RankPool
from zeroviz.partition import buffers_for
from zeroviz.spec import Implementation, RunSpec, Strategy
from zeroviz.trace import Category

NUM_STEPS = 5
CPU = torch.device("cpu")
T = TypeVar("T")
Parts = Mapping[Any, Any]
"""A rank's share: by parameter's name, whole or its rows; by (name, first element) pieces; by unit's number shards."""


@dataclass(frozen=True)
class Trained:
    """One rank after its steps. allocator_nbytes: live bytes beyond those before the model was made."""

    parts: Parts
    rest: dict[Category, int]
    step_counter_nbytes: int
    padding_nbytes: int
    allocator_nbytes: int


def trained(rank_pool: RankPool, spec: RunSpec, num_steps: int = NUM_STEPS) -> list[dict[str, Tensor]]:
    """Every parameter, fp32, by name, once for each copy that the ranks hold between them."""
    return whole(spec, [rank.parts for rank in rank_pool.run(partial(train, num_steps=num_steps), spec)])


def in_group(job: RankJob, work: Callable[[Collectives], T]) -> T:
    """What `work` makes of a rank's group.

    What it made is dropped while the group stands. If a model were the last to hold the group, the group's end would
    wait for gloo's threads with Python's lock in hand, and they, letting go of the last collective's tensors, for the
    lock.
    """
    torch.set_num_threads(1)
    with joined_group(job) as comm:
        result = work(comm)
        collect()  # libraries' objects hold each other
        return result


def train(job: RankJob, num_steps: int = NUM_STEPS) -> Trained:
    """Train as one rank."""

    def work(comm: Collectives) -> Trained:
        make = steps_of(job.spec, comm, CPU)
        set_imports_aside()
        collect()
        before = live_nbytes(CPU)
        assert before is not None
        steps: Any = make(Meter())
        counted = counted_of(steps)
        for number in range(num_steps):
            # Buckets are known by what is sent from them.
            with counted.counted.counting() if counted and number == num_steps - 1 else nullcontext():
                steps.step()
        collect()
        rest = held_by_category(steps.held_tensors())
        counters = sum(counter.untyped_storage().nbytes() for counter in steps.step_counters())
        comm.barrier()
        allocated = settle(CPU, before + sum(rest.values()) + counters) - before
        return Trained(parts_of(job.spec, steps), rest, counters, steps.padding_nbytes(), allocated)

    return in_group(job, work)


# ---- a rank's share ----


def parts_of(spec: RunSpec, steps: Any) -> Parts:
    """Of the masters where there are any, fp32."""
    return {
        Implementation.OWN: _owned,
        Implementation.FSDP1: _summoned,
        Implementation.FSDP2: _rows,
        Implementation.DEEPSPEED: _masters_of_deepspeed,
        Implementation.MEGATRON: _pieces,
    }.get(spec.impl, _named)(spec, steps)


def _owned(_: RunSpec, steps: Any) -> Parts:
    return {index: unit.owned.detach().float().clone() for index, unit in enumerate(steps.units)}


def _named(_: RunSpec, steps: Any) -> Parts:
    return {name: value.detach().float().clone() for name, value in steps.plain.by_name.items()}


def _summoned(_: RunSpec, steps: Any) -> Parts:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from cluster.witness.plain import PlainSegment

    with FullyShardedDataParallel.summon_full_params(steps.model, writeback=False):
        return {
            name: getattr(*slot).detach().float().clone()
            for segment in steps.model.modules()
            if isinstance(segment, PlainSegment)
            for sublayer in segment.sublayers
            for name, slot in sublayer.slots.items()
        }


def _rows(spec: RunSpec, steps: Any) -> Parts:
    """Joined by `whole` and not by `full_tensor`: that finds its groups in caches which outlive them, and in a process
    that was in another run before it waits for ranks of the wrong one."""
    from cluster.witness.chunks import local_part
    from zeroviz.witness.fsdp2_groups import parameter_order

    parts = (local_part(parameter) for parameter in steps.model.parameters())
    return {shape.name: part.detach().float().clone() for shape, part in zip(parameter_order(spec), parts, strict=True)}


def _masters_of_deepspeed(spec: RunSpec, steps: Any) -> Parts:
    from deepspeed.utils import safe_get_full_fp32_param

    named = steps.plain.by_name
    if spec.strategy is not Strategy.DDP:
        return {name: safe_get_full_fp32_param(value).detach().clone() for name, value in named.items()}
    if spec.recipe.master is None:
        return {name: value.detach().clone() for name, value in named.items()}
    (masters,) = steps._zero.fp32_groups
    order = [next(name for name, value in named.items() if value is each) for each in steps.plain.parameters()]
    return {name: master.detach().clone() for name, master in zip(order, masters, strict=True)}


def _pieces(_: RunSpec, steps: Any) -> Parts:
    names = {parameter: name for name, parameter in steps.plain.by_name.items()}
    sharded = steps._sharded
    of_fp32 = zip(sharded.model_fp32_groups, sharded.shard_fp32_groups, strict=True)
    of_bf16 = zip(sharded.model_float16_groups, sharded.shard_fp32_from_float16_groups, strict=True)
    return {
        (names[wholes[i]], sharded._get_model_param_range_map(wholes[i])["param"].start): pieces[i].detach().clone()
        for wholes, pieces in (*of_fp32, *of_bf16)
        for i in range(len(wholes))
    }


# ---- all ranks' shares ----


def whole(spec: RunSpec, ranks: list[Parts]) -> list[dict[str, Tensor]]:
    """Every parameter, fp32, by name: once for each copy that the ranks hold between them."""
    if spec.impl is Implementation.OWN:
        return [_of_shards(spec, ranks)]
    if spec.impl is Implementation.MEGATRON:
        return [of_pieces(spec, ranks)[0]]
    if spec.impl is Implementation.FSDP2:
        groups = [ranks[first : first + spec.num_shards] for first in range(0, spec.ranks, spec.num_shards)]
        return [{name: torch.cat([rank[name] for rank in group]) for name in group[0]} for group in groups]
    return [dict(rank) for rank in ranks]


def _of_shards(spec: RunSpec, ranks: list[Parts]) -> dict[str, Tensor]:
    """Concatenated in rank order, padding cut off."""
    result = {}
    for buffer in buffers_for(spec):
        shards = [rank[buffer.index] for rank in ranks]
        num_shards = spec.num_shards if spec.strategy.shards_optimizer else 1
        for rank, shard in enumerate(shards[num_shards:], num_shards):  # copies hold the same, to the bit
            assert torch.equal(shard, shards[rank % num_shards]), (spec.strategy, rank)
        flat = torch.cat(shards[:num_shards])
        start = 0
        for shape in buffer.params:
            result[shape.name] = flat[start : start + shape.numel].view(shape.shape)
            start += shape.numel
    return result


def of_pieces(spec: RunSpec, ranks: list[Parts]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every parameter and who owns each element of it: each has one owner."""
    flat = {shape.name: torch.full((shape.numel,), torch.nan) for shape in spec.model.params}
    owner = {shape.name: torch.full((shape.numel,), -1) for shape in spec.model.params}
    for rank, pieces in enumerate(ranks):
        for (name, start), values in pieces.items():
            place = slice(start, start + len(values))
            assert (owner[name][place] == -1).all()
            flat[name][place], owner[name][place] = values, rank
    assert all((rank >= 0).all() for rank in owner.values())
    shapes = {shape.name: shape.shape for shape in spec.model.params}
    return tuple(  # type: ignore[return-value]
        {name: values[name].view(shape) for name, shape in shapes.items()} for values in (flat, owner)
    )
