"""What can be changed about a step so that a rank holds less: a toggle at a time, in words, with what it costs. Two
toggles are one change where neither does anything alone.

Whether a change is legal and whether it helps is for `zeroviz.advice`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zeroviz.budget import MAX_RANKS
from zeroviz.errors import SpecError
from zeroviz.models import Family
from zeroviz.spec import Offload, Optimizer, Precision, RunSpec, Strategy, UnitKind, parse_enum

MAX_HALVINGS = 3
"""How often a sequence is halved in search of one that fits: an eighth of it is still the same task."""
Fits = Callable[[Mapping[str, Any]], bool]
"""Whether the spec fits with these toggles set."""


@dataclass(frozen=True, slots=True)
class Option:
    """`toggles` to set, in words, and what one pays for it."""

    toggles: Mapping[str, Any]
    words: str
    costs: str


def options(spec: RunSpec, fits: Fits, batch: int) -> Iterator[Option]:
    """Everything worth trying, what costs least first. A value that can be chosen is the mildest that `fits`; of the
    batch that is `batch`, or 1."""
    yield from _order(spec)
    yield from _units(spec)
    yield from _sharding(spec, fits)
    yield from _activations(spec)
    yield from _sizes(spec, fits, batch)
    yield from _dtypes(spec)
    yield from _offload(spec)


def _order(spec: RunSpec) -> Iterator[Option]:
    """What is held for speed alone."""
    if spec.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH):
        yield Option(
            {"optimizer": Optimizer.ADAMW_FUSED}, "optimizer adamw-fused", "nothing: the same update in one kernel"
        )
    if spec.optimizer is Optimizer.ADAMW_FOREACH:
        yield Option({"optimizer": Optimizer.ADAMW}, "optimizer adamw, a slice at a time", "more, smaller kernels")
    if spec.prefetch:
        yield Option({"prefetch": 0}, "prefetch 0", "gathers no longer overlap compute")
    if spec.async_reduce:
        yield Option({"async_reduce": False}, "no overlap of reductions", "reductions no longer overlap compute")
    if spec.no_sync and spec.strategy.shards_grad:
        costs = "gradients cross the wire once a micro-batch"
        yield Option({"no_sync": None}, "reduce in every micro-batch", costs)


def _units(spec: RunSpec) -> Iterator[Option]:
    kind, count = spec.unit.kind, spec.unit.count
    costs = "more, smaller collectives"
    if spec.model.family is Family.BARE or kind is UnitKind.LAYER:
        return
    if kind is UnitKind.BLOCK and count > 1:
        yield Option({"blocks": 1}, f"unit block instead of {spec.unit}", costs)
    elif kind is UnitKind.BLOCK:
        yield Option({"unit": UnitKind.LAYER}, "unit layer instead of block", costs)
    else:
        yield Option({"unit": UnitKind.BLOCK, "blocks": 1}, f"unit block instead of {spec.unit}", costs)


_NEXT: Mapping[Strategy, tuple[Strategy, ...]] = {
    Strategy.DDP: (Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3),
    Strategy.ZERO1: (Strategy.ZERO2, Strategy.ZERO3),
    Strategy.MEGATRON_OPTIM: (Strategy.ZERO2, Strategy.ZERO3),
    Strategy.ZERO2: (Strategy.ZERO3,),
    Strategy.SHARD_GRAD_OP: (Strategy.ZERO3,),
    Strategy.HYBRID_SHARD: (Strategy.ZERO3,),
}
_COSTS = {
    Strategy.ZERO1: "two collectives, of gradients and of parameters, in place of one",
    Strategy.ZERO2: "gradients are reduced in every micro-batch",
    Strategy.ZERO3: "parameters are gathered in forward and again in backward",
}


def _sharding(spec: RunSpec, fits: Fits) -> Iterator[Option]:
    """More of the states cut, among more ranks."""
    for strategy in _NEXT.get(spec.strategy, ()):
        yield Option({"strategy": strategy}, f"strategy {strategy.label}", _COSTS[strategy])
    doubled = _doubled(spec.ranks, MAX_RANKS)
    is_whole = spec.ranks == 1 if spec.strategy is Strategy.DDP else spec.strategy.replicates
    if is_whole and spec.num_shards == spec.ranks:
        yield from _both(spec, doubled, fits)
    elif spec.strategy.replicates:
        group = _mildest(_larger_groups(spec), lambda number: fits({"shard_ranks": number}), -1)
        words = f"shard groups of {group:,} instead of {spec.shard_ranks:,}"
        yield Option({"shard_ranks": group}, words, "gathers among more ranks")
    if spec.strategy.replicates or not doubled:
        return  # more groups are copies, and do not help
    ranks = _mildest(doubled, lambda number: fits({"ranks": number}))
    yield Option({"ranks": ranks}, f"{ranks:,} ranks instead of {spec.ranks:,}", "more GPUs, and more tokens a step")


def _both(spec: RunSpec, doubled: list[int], fits: Fits) -> Iterator[Option]:
    """ZeRO-3 and more ranks, where neither does anything alone."""
    if doubled:
        ranks = _mildest(doubled, lambda number: fits({"strategy": Strategy.ZERO3, "ranks": number}))
        words = f"strategy {Strategy.ZERO3.label} and {ranks:,} ranks instead of {spec.ranks:,}"
        costs = f"more GPUs, and {_COSTS[Strategy.ZERO3]}"
        yield Option({"strategy": Strategy.ZERO3, "ranks": ranks}, words, costs)


def _larger_groups(spec: RunSpec) -> list[int]:
    """Powers of two times the group that divide the ranks, and all ranks."""
    doubled = [number for number in _doubled(spec.num_shards, spec.ranks) if spec.ranks % number == 0]
    return list(dict.fromkeys([*doubled, spec.ranks]))


def _doubled(number: int, most: int) -> list[int]:
    return [number << power for power in range(1, 21) if number << power <= most]


def _mildest(values: Sequence[int], fits: Callable[[int], bool], otherwise: int = 0) -> int:
    """The first value that fits; where not even the last one does that at `otherwise`.

    The last is asked first: where it does not fit none does, but for what padding does to a few bytes.
    """
    if not fits(values[-1]):
        return values[otherwise]
    return next(value for value in values if fits(value))


def _activations(spec: RunSpec) -> Iterator[Option]:
    if spec.model.family is Family.BARE:
        return
    if not spec.checkpointing:
        yield Option({"checkpointing": True}, "recompute blocks", "each block's forward runs a second time")
    elif spec.checkpointing.blocks > 1:
        words = f"recompute block by block instead of {spec.checkpointing.blocks} together"
        yield Option({"region": 1}, words, "nothing: as much is recomputed, and more inputs are kept")


def _sizes(spec: RunSpec, fits: Fits, batch: int) -> Iterator[Option]:
    """Fewer tokens at a time."""
    if spec.model.family is Family.BARE:
        return
    if batch < spec.batch:
        words = f"batch {batch:,} instead of {spec.batch:,}"
        yield Option({"batch": batch}, words, "fewer tokens a step, unless micro-batches make up for it")
    halved = [spec.seq >> power for power in range(1, MAX_HALVINGS + 1) if spec.seq >> power]
    if halved:
        seq = _mildest(halved, lambda number: fits({"seq": number}))
        words = f"sequence {seq:,} instead of {spec.seq:,}"
        yield Option({"seq": seq}, words, "a shorter context, and fewer tokens a step")


def _dtypes(spec: RunSpec) -> Iterator[Option]:
    if spec.grad_dtype is not None:
        grad = spec.precision.grad.value
        yield Option({"grad_dtype": None}, f"gradients {grad}, as the precision has them", "gradients of that dtype")
    for precision, costs in (
        (Precision.BF16_MIXED, "bf16 parameters and gradients beside an fp32 master"),
        (Precision.BF16_FP32GRAD, "bf16 parameters beside an fp32 master"),
        (Precision.BF16, "no fp32 master: small updates are rounded away"),
    ):
        if precision is not spec.precision:
            yield Option({"precision": precision}, f"precision {precision.value}", costs)
    if spec.optimizer.num_moments == 2 and spec.optimizer is not Optimizer.ADAMW_8BIT:
        costs = "rounded moments; worked out here, not run"
        yield Option({"optimizer": Optimizer.ADAMW_8BIT}, "optimizer adamw-8bit", costs)


def _offload(spec: RunSpec) -> Iterator[Option]:
    if spec.offload is Offload.NONE:
        costs = "gradients go to the host and parameters come back in each step; its CPU updates"
        yield Option({"offload": Offload.OPTIMIZER}, "offload the optimizer", costs)
    if not spec.offload.moves_params and spec.strategy.shards_param:
        costs = "each unit comes from the host whenever it is gathered; its CPU updates"
        yield Option({"offload": Offload.PARAMS}, "offload parameters and optimizer", costs)


_KINDS: Mapping[str, type] = {
    "strategy": Strategy, "precision": Precision, "unit": UnitKind, "optimizer": Optimizer, "offload": Offload,
    **dict.fromkeys(("ranks", "shard_ranks", "batch", "seq", "blocks", "region", "prefetch"), int),
    **dict.fromkeys(("async_reduce", "checkpointing"), bool),
    **dict.fromkeys(("grad_dtype", "no_sync"), type(None)),
}  # fmt: skip
"""Of every toggle that an option sets; of the last two only what unsets them."""


def as_plain(toggles: Mapping[str, Any]) -> dict[str, Any]:
    """Toggles as JSON has them: `{"strategy": "zero3"}`. `from_plain` reads it back."""
    return {name: getattr(value, "value", value) for name, value in toggles.items()}


def from_plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Toggles for `Explorer.choose`, from what a page sends back. SpecError for what no option sets."""
    return {name: _toggle(name, value) for name, value in data.items()}


def _toggle(name: str, value: object) -> Any:
    kind = _KINDS.get(name)
    if kind is not None and issubclass(kind, Enum):
        return parse_enum(kind, str(value), name)
    if type(value) is not kind:
        raise SpecError(f"{name} = {value!r} is no change that is proposed here.")
    return value
