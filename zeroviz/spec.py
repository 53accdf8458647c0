"""RunSpec: one frozen description of a training step, the same for arithmetic and for a live run.

Every part is validated when it is made. Invalid input raises SpecError with what was given, what is allowed and what
to do; nothing is mapped to something else quietly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import isfinite
from typing import Any, TypeVar

from zeroviz.errors import SpecError
from zeroviz.implementations import check_implementation
from zeroviz.models import PRESETS, Family, ModelShape
from zeroviz.policies import KEEP_ALL, ONE_BLOCK, Checkpointing, Offload, UnitKind, UnitPolicy
from zeroviz.precision import WHOLE_BUFFER_PRECISIONS, DType, Optimizer, Precision, Recipe, recipe_of
from zeroviz.settings import LIBRARY_DEFAULTS, Settings
from zeroviz.strategy import Implementation, Strategy, Zero1Form

__all__ = [
    "Checkpointing",
    "DType",
    "Implementation",
    "Offload",
    "Optimizer",
    "Precision",
    "Recipe",
    "RunSpec",
    "Settings",
    "Strategy",
    "UnitKind",
    "UnitPolicy",
    "Zero1Form",
    "parse_enum",
    "preset",
]

EnumT = TypeVar("EnumT", bound=Enum)
MAX_DIVISORS = 12  # named in a refusal
_WHOLE_NUMBERS = (
    ("ranks", 1, 2**20),
    ("batch", 1, 2**40),
    ("seq", 1, 2**40),
    ("prefetch", 0, 2**20),
    ("accumulation", 1, 64),
    ("steps", 2, 10**6),
    ("seed", 0, 2**63 - 1),
)  # of a spec: the least and the most


def parse_enum(kind: type[EnumT], text: str, what: str) -> EnumT:
    """The member of `kind` with value `text`; SpecError listing all of them otherwise."""
    try:
        return kind(text)
    except ValueError:
        allowed = ", ".join(str(member.value) for member in kind)
        raise SpecError(f"{what} is {text!r}; allowed are {allowed}.") from None


def preset(name: str) -> ModelShape:
    """A model by preset name; SpecError listing the presets otherwise."""
    try:
        return PRESETS[name]
    except KeyError:
        raise SpecError(
            f"Model is {name!r}; allowed are {', '.join(PRESETS)}, the path of a config.json, or --params COUNT."
        ) from None


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training step on `ranks` ranks.

    batch: sequences on each rank. seq: tokens in a sequence.
    shard_ranks: ranks of a shard group, G, of hybrid_shard: neighbouring ranks, N/G groups; None otherwise.
    prefetch: how many units ZeRO-3 gathers ahead of the one in use; 0 gathers each when it is needed.
    async_reduce: let a unit's gradient reduction overlap the backward of the unit before it, and the gather of its
        updated parameters, where they travel, the update of the unit after it.
    optimizer: what updates the parameters. grad_dtype: of the gradient, instead of the precision's own.
    checkpointing: which blocks are recomputed in backward. offload: which states lie in the host's memory.
    accumulation: micro-batches a step, each of `batch` sequences. no_sync: reduce gradients in the last micro-batch
        only; None is what the strategy does by itself: whole gradients (DDP, ZeRO-1) are reduced once, sharded ones in
        every micro-batch.
    clip_norm: scale the mean gradient down where its norm over all parameters exceeds this; None leaves it as it is.
    settings: of other people's implementations, where they are not the library's defaults.
    steps: training steps of a live run; at rest and peak are read in the last, and never in the first, in which
        Adam's state is still being made.
    """

    model: ModelShape
    strategy: Strategy = Strategy.ZERO3
    impl: Implementation = Implementation.OWN
    ranks: int = 2
    shard_ranks: int | None = None
    precision: Precision = Precision.FP32
    unit: UnitPolicy = ONE_BLOCK
    batch: int = 1
    seq: int = 32
    zero1_form: Zero1Form = Zero1Form.REDUCE_SCATTER
    prefetch: int = 0
    async_reduce: bool = False
    optimizer: Optimizer = Optimizer.ADAMW
    grad_dtype: DType | None = None
    checkpointing: Checkpointing = KEEP_ALL
    offload: Offload = Offload.NONE
    accumulation: int = 1
    no_sync: bool | None = None
    clip_norm: float | None = None
    settings: Settings = LIBRARY_DEFAULTS
    steps: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.grad_dtype is self.precision.grad:
            # One way to say a thing: specs that mean the same are equal.
            object.__setattr__(self, "grad_dtype", None)
        given = self.__dict__
        for name, least, most in _WHOLE_NUMBERS:
            value = given[name]
            if type(value) is not int or not least <= value <= most:  # True is an int, but no number
                raise SpecError(f"{name} is {value!r}; it must be a whole number from {least} to {most}.")
        if not isinstance(self.async_reduce, bool):
            raise SpecError(f"async_reduce is {self.async_reduce!r}; it must be true or false.")
        if self.no_sync is not None and not isinstance(self.no_sync, bool):
            raise SpecError(f"no_sync is {self.no_sync!r}; it must be true, false or left to the strategy.")
        self._check_units()
        self._check_groups()
        self._check_strategy()
        self._check_options()
        check_implementation(self)

    def _check_units(self) -> None:
        model, unit = self.model, self.unit
        if model.family is Family.BARE and unit.kind in (UnitKind.BLOCK, UnitKind.LAYER):
            raise SpecError(
                f"Unit is {str(unit)!r}, but a bare parameter count has no blocks or layers; "
                "use unit model or numel:K, or name a model."
            )
        if unit.kind is UnitKind.BLOCK and unit.count > model.layers:
            raise SpecError(
                f"Unit is {str(unit)!r}, but {model.name} has only {model.layers} blocks; "
                f"use block:K with K from 1 to {model.layers}, or model."
            )
        if unit.kind is UnitKind.NUMEL and unit.count > model.num_params:
            raise SpecError(
                f"Unit is {str(unit)!r}, but {model.name} has only {model.num_params:,} parameters; "
                f"use numel:K with K up to {model.num_params}, or model."
            )
        if model.family is Family.GPT2 and self.seq > model.positions:
            raise SpecError(
                f"seq is {self.seq}, but {model.name} has learned positions for {model.positions} tokens; "
                f"use seq from 1 to {model.positions}."
            )
        blocks = self.checkpointing.blocks
        if blocks > model.layers:
            what = f"{model.name} has only {model.layers} blocks; use none, or block:K with K up to that"
            if model.family is Family.BARE:
                what = "a bare parameter count has no blocks; use none, or name a model"
            raise SpecError(f"checkpointing is {str(self.checkpointing)!r}, but {what}.")

    def _check_groups(self) -> None:
        ranks, group = self.ranks, self.shard_ranks
        if not self.strategy.replicates:
            if group is not None:
                raise SpecError(
                    f"shard_ranks is {group!r} with strategy {self.strategy.value}, which has no groups of ranks; "
                    "it can be set for hybrid_shard only."
                )
            return
        if group is None:
            raise SpecError(
                f"strategy is hybrid_shard without shard_ranks; say how many ranks shard together, of {ranks}: "
                f"{_divisors_text(ranks)}."
            )
        if isinstance(group, bool) or not isinstance(group, int) or not 1 <= group <= ranks:
            raise SpecError(f"shard_ranks is {group!r}; it must be a whole number from 1 to ranks, {ranks}.")
        if ranks % group:
            raise SpecError(
                f"shard_ranks is {group} with {ranks} ranks, but {ranks} is not divisible by {group}; use "
                f"{_divisors_text(ranks)}, or ranks that are a multiple of {group}."
            )

    def _check_strategy(self) -> None:
        if self.zero1_form is not Zero1Form.REDUCE_SCATTER and self.strategy is not Strategy.ZERO1:
            raise SpecError(
                f"zero1_form is {self.zero1_form.value!r} with strategy {self.strategy.value}; "
                "it can be set for zero1 only."
            )
        if self.prefetch and not self.strategy.shards_param:
            raise SpecError(
                f"prefetch is {self.prefetch} with strategy {self.strategy.value}, which keeps its parameters whole "
                "and gathers none ahead; it can be set for zero3, shard_grad_op and hybrid_shard only."
            )
        if self.offload.moves_params and not self.strategy.shards_param:
            raise SpecError(
                f"offload is 'params' with strategy {self.strategy.value}, which keeps its parameters whole on the "
                "device; use zero3, shard_grad_op or hybrid_shard, or offload optimizer."
            )
        if self.no_sync is not None and self.accumulation == 1:
            raise SpecError(
                "no_sync is set, but a step has one micro-batch, in which gradients are always reduced; "
                "set accumulation to 2 or more, or leave no_sync out."
            )
        if self.no_sync is False and self.strategy in (Strategy.ZERO1, Strategy.MEGATRON_OPTIM):
            raise SpecError(
                f"no_sync is false with strategy {self.strategy.value}, whose owners get their sums in a slice of the "
                "whole gradient, once a step; leave no_sync out, or use zero2."
            )
        if self.strategy.has_whole_buffer:
            self._check_whole_buffer()

    def _check_whole_buffer(self) -> None:
        if self.precision not in WHOLE_BUFFER_PRECISIONS or self.grad_dtype is not None:
            raise SpecError(
                f"precision is {self.precision.value!r}"
                + (f" with grad_dtype {self.grad_dtype.value!r}" if self.grad_dtype else "")
                + f" and strategy {self.strategy.value}, which reduces fp32 gradients; use precision fp32 or "
                "bf16-fp32grad and no grad_dtype, or strategy zero1."
            )
        if self.offload is not Offload.NONE:
            raise SpecError(
                f"offload is {self.offload.value!r} with strategy {self.strategy.value}, whose states are one buffer "
                "on the device; use offload none, or strategy zero1."
            )
        if self.async_reduce:
            raise SpecError(
                f"async_reduce is true with strategy {self.strategy.value}, whose gradients are one buffer that is "
                "reduced when the whole backward is done; leave it out, or use strategy zero1."
            )

    def _check_options(self) -> None:
        if (norm := self.clip_norm) is not None:
            if isinstance(norm, bool) or not isinstance(norm, int | float) or not isfinite(norm) or norm <= 0:
                raise SpecError(f"clip_norm is {norm!r}; it must be a number above 0, or left out.")
            object.__setattr__(self, "clip_norm", float(norm))
            if self.offload.moves_params:
                raise SpecError(
                    f"clip_norm is {self.clip_norm:g} with offload params, where gradients lie on the host; leave it "
                    "out, or use offload optimizer, whose gradients are clipped on the device."
                )
        if self.grad_dtype is DType.INT8:
            raise SpecError("grad_dtype is 'int8'; allowed are fp32 and bf16.")
        if self.optimizer is Optimizer.ADAMW_8BIT and self.offload.moves_optimizer:
            raise SpecError(
                f"optimizer is 'adamw-8bit' with offload {self.offload.value!r}: its update is a GPU kernel; "
                "use offload none, or optimizer adamw."
            )

    @property
    def num_shards(self) -> int:
        """Ranks among which a state that is sharded is cut: a shard group's, or all."""
        return self.ranks if self.shard_ranks is None else self.shard_ranks

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same shard: one in each shard group."""
        return self.ranks // self.num_shards

    @property
    def num_tokens_per_rank(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.seq

    @cached_property
    def recipe(self) -> Recipe:
        """The dtype of every copy of the states: `precision` with `grad_dtype` and `optimizer` set."""
        return recipe_of(self.precision, self.grad_dtype, self.optimizer)

    @property
    def drops_grad(self) -> bool:
        """Whether a step begins by freeing the gradient of the step before. Megatron's one buffer, and gradients on the
        host, stay and are overwritten."""
        return not self.strategy.has_whole_buffer and not self.offload.moves_params

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced in every micro-batch, and not in the last only."""
        if self.no_sync is None:
            return self.strategy.shards_grad
        return not self.no_sync

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the report; `from_dict` reads it back."""
        model = self.model
        shape = {
            name: value.value if isinstance(value, Enum) else value
            for name in model.__dataclass_fields__
            if (value := getattr(model, name)) is not None
        }
        return {
            "model": model.name,
            "model_shape": shape,
            "strategy": self.strategy.value,
            "impl": self.impl.value,
            "ranks": self.ranks,
            "shard_ranks": self.shard_ranks,
            "precision": self.precision.value,
            "unit": str(self.unit),
            "batch": self.batch,
            "seq": self.seq,
            "optimizer": self.optimizer.value,
            "grad_dtype": self.recipe.grad.value,
            "checkpointing": str(self.checkpointing),
            "offload": self.offload.value,
            "accumulation": self.accumulation,
            "no_sync": self.no_sync,
            "clip_norm": self.clip_norm,
            "zero1_form": self.zero1_form.value,
            "prefetch": self.prefetch,
            "async_reduce": self.async_reduce,
            "settings": self.settings.to_dict(),
            "steps": self.steps,
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunSpec:
        """The inverse of `to_dict`. Raises SpecError for what is missing, wrong-typed or invalid."""
        try:
            shape = dict(data["model_shape"])
            shape["family"] = Family(shape["family"])
            return cls(
                model=ModelShape(**shape),
                strategy=parse_enum(Strategy, data["strategy"], "Strategy"),
                impl=parse_enum(Implementation, data["impl"], "Implementation"),
                ranks=data["ranks"],
                shard_ranks=data.get("shard_ranks"),
                precision=parse_enum(Precision, data["precision"], "Precision"),
                unit=UnitPolicy.parse(data["unit"]),
                batch=data["batch"],
                seq=data["seq"],
                optimizer=parse_enum(Optimizer, data["optimizer"], "Optimizer"),
                grad_dtype=_own_grad_dtype(data),
                checkpointing=Checkpointing.parse(data["checkpointing"]),
                offload=parse_enum(Offload, data["offload"], "Offload"),
                accumulation=data["accumulation"],
                no_sync=data["no_sync"],
                clip_norm=data.get("clip_norm"),
                zero1_form=parse_enum(Zero1Form, data["zero1_form"], "zero1_form"),
                prefetch=data["prefetch"],
                async_reduce=data["async_reduce"],
                settings=Settings.from_dict(data.get("settings", {})),
                steps=data["steps"],
                seed=data["seed"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise SpecError(
                f"A spec lacks or garbles a field ({error}); it must be what RunSpec.to_dict gave."
            ) from None


def _divisors_text(ranks: int) -> str:
    """`1, 2 or 4`; of many, the first few."""
    divisors = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
    if len(divisors) > MAX_DIVISORS:
        return f"{', '.join(divisors[:MAX_DIVISORS])} or another divisor"
    return " or ".join(filter(None, (", ".join(divisors[:-1]), divisors[-1])))


def _own_grad_dtype(data: dict[str, Any]) -> DType | None:
    """The gradient dtype where it is not the precision's own."""
    dtype = parse_enum(DType, data["grad_dtype"], "grad_dtype")
    return None if dtype is parse_enum(Precision, data["precision"], "Precision").grad else dtype
