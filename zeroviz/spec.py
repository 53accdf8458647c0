"""RunSpec: one frozen description of a training step, the same for arithmetic and for a live run.

Every part is validated when it is made. Invalid input raises SpecError with what was given, what is allowed and what
to do; nothing is mapped to something else quietly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from zeroviz.errors import SpecError
from zeroviz.models import PRESETS, Family, ModelShape
from zeroviz.quantity import parse_count

EnumT = TypeVar("EnumT", bound=Enum)


class Strategy(Enum):
    """What each rank keeps of the model states. P parameters, N ranks."""

    DDP = "ddp"
    """Everything whole on every rank; one all-reduce of the gradient."""
    ZERO1 = "zero1"
    """Optimizer state (and fp32 master) sharded; parameters and gradients whole."""
    ZERO2 = "zero2"
    """Optimizer state and gradients sharded; parameters whole."""
    ZERO3 = "zero3"
    """Optimizer state, gradients and parameters sharded; a unit is gathered only while it is used (FULL_SHARD)."""

    @property
    def label(self) -> str:
        return {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}[self.value]

    @property
    def shards_optimizer(self) -> bool:
        return self is not Strategy.DDP

    @property
    def shards_grad(self) -> bool:
        return self in (Strategy.ZERO2, Strategy.ZERO3)

    @property
    def shards_param(self) -> bool:
        return self is Strategy.ZERO3


class Implementation(Enum):
    """Whose code runs the step."""

    OWN = "own"
    """The teaching implementation of this repository (`cluster/own`)."""


class Zero1Form(Enum):
    """How ZeRO-1 brings the gradient to its owner. In elements sent per rank, times (N-1)/N."""

    REDUCE_SCATTER = "reduce-scatter"
    """Reduce-scatter the gradient, all-gather the parameters: 2P, as much as DDP."""
    ALL_REDUCE = "all-reduce"
    """All-reduce the gradient and use one slice of it, all-gather the parameters: 3P, the naive form."""


class DType(Enum):
    """An element type and its width."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return {"fp32": 4, "bf16": 2}[self.value]


class Precision(Enum):
    """A recipe: the dtype of every copy of the model states. The same "16 bytes" has several meanings; these name them.

    Each recipe sums to `bytes_per_param` under DDP.
    """

    FP32 = "fp32"
    """4 + 4 + 8 = 16 bytes a parameter: everything in fp32, no separate master."""
    BF16_MIXED = "bf16-mixed"
    """2 + 2 + 4 + 8 = 16: bf16 parameters and gradients, fp32 master and moments (the ZeRO paper's 2 + 2 + 12)."""
    BF16_FP32GRAD = "bf16-fp32grad"
    """2 + 4 + 4 + 8 = 18: as bf16-mixed with gradients accumulated and reduced in fp32 (Megatron's 18)."""
    BF16 = "bf16"
    """2 + 2 + 4 = 8: everything in bf16, no master."""

    @property
    def param(self) -> DType:
        """Resident and compute dtype of the parameters."""
        return DType.FP32 if self is Precision.FP32 else DType.BF16

    @property
    def grad(self) -> DType:
        """Dtype in which the gradient is accumulated, reduced and kept."""
        return DType.FP32 if self in (Precision.FP32, Precision.BF16_FP32GRAD) else DType.BF16

    @property
    def master(self) -> DType | None:
        """Dtype of the optimizer's own copy of the parameters; None where the parameter itself is updated."""
        return DType.FP32 if self in (Precision.BF16_MIXED, Precision.BF16_FP32GRAD) else None

    @property
    def moments(self) -> DType:
        """Dtype of each of Adam's two moments."""
        return DType.BF16 if self is Precision.BF16 else DType.FP32

    @property
    def bytes_per_param(self) -> int:
        """Bytes of model states a parameter costs when nothing is sharded."""
        master = self.master.itemsize if self.master else 0
        return self.param.itemsize + self.grad.itemsize + master + 2 * self.moments.itemsize


class UnitKind(Enum):
    """How parameters are grouped into units, the things gathered and freed together."""

    MODEL = "model"
    """One unit: the whole model."""
    BLOCK = "block"
    """One unit for every `count` transformer blocks; embedding and head apart, or together when they are tied."""
    LAYER = "layer"
    """One unit for every attention layer and every MLP layer, each with its norm; embedding and head as for BLOCK."""
    NUMEL = "numel"
    """Consecutive layers until a unit has at least `count` elements."""


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """A unit grouping: its kind, and the `count` of blocks (BLOCK) or elements (NUMEL); 1 for the other two."""

    kind: UnitKind = UnitKind.BLOCK
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SpecError(f"A unit of {self.count} {self.kind.value}s was asked for; it must be at least 1.")
        if self.count > 1 and self.kind in (UnitKind.MODEL, UnitKind.LAYER):
            raise SpecError(
                f"A unit of {self.count} {self.kind.value}s was asked for; {self.kind.value} takes no count."
            )

    def __str__(self) -> str:
        if self.kind is UnitKind.NUMEL or (self.kind is UnitKind.BLOCK and self.count > 1):
            return f"{self.kind.value}:{self.count}"
        return str(self.kind.value)

    @classmethod
    def parse(cls, text: str) -> UnitPolicy:
        """From `model`, `block`, `block:2`, `layer` or `numel:1e6`."""
        name, colon, number = text.strip().partition(":")
        allowed = "model, block, block:K, layer, numel:K"
        try:
            kind = UnitKind(name)
        except ValueError:
            raise SpecError(f"Unit is {text!r}; allowed are {allowed}.") from None
        if kind is UnitKind.NUMEL and not number:
            raise SpecError("Unit is 'numel' without a number; write numel:K, for example numel:1e6.")
        if colon and kind not in (UnitKind.BLOCK, UnitKind.NUMEL):
            raise SpecError(f"Unit is {text!r}, but {kind.value} takes no number; allowed are {allowed}.")
        return cls(kind, parse_count(number, f"The number in unit {text!r}") if colon else 1)


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
    prefetch: how many units ZeRO-3 gathers ahead of the one in use; 0 gathers each when it is needed.
    async_reduce: let a unit's gradient reduction overlap the backward of the unit before it.
    steps: training steps of a live run; at rest and peak are read in the last, and never in the first, in which
        Adam's state is still being made.
    """

    model: ModelShape
    strategy: Strategy = Strategy.ZERO3
    impl: Implementation = Implementation.OWN
    ranks: int = 2
    precision: Precision = Precision.FP32
    unit: UnitPolicy = UnitPolicy()
    batch: int = 1
    seq: int = 32
    zero1_form: Zero1Form = Zero1Form.REDUCE_SCATTER
    prefetch: int = 0
    async_reduce: bool = False
    steps: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        model, unit = self.model, self.unit
        for name, least, most in (
            ("ranks", 1, 2**20),
            ("batch", 1, 2**40),
            ("seq", 1, 2**40),
            ("prefetch", 0, 2**20),
            ("steps", 2, 10**6),
            ("seed", 0, 2**63 - 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise SpecError(f"{name} is {value!r}; it must be a whole number from {least} to {most}.")
        if not isinstance(self.async_reduce, bool):
            raise SpecError(f"async_reduce is {self.async_reduce!r}; it must be true or false.")
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
        if self.zero1_form is not Zero1Form.REDUCE_SCATTER and self.strategy is not Strategy.ZERO1:
            raise SpecError(
                f"zero1_form is {self.zero1_form.value!r} with strategy {self.strategy.value}; "
                "it can be set for zero1 only."
            )
        if self.prefetch and self.strategy is not Strategy.ZERO3:
            raise SpecError(
                f"prefetch is {self.prefetch} with strategy {self.strategy.value}, which keeps its parameters whole "
                "and gathers none ahead; it can be set for zero3 only."
            )

    @property
    def num_tokens_per_rank(self) -> int:
        return self.batch * self.seq

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
            "precision": self.precision.value,
            "unit": str(self.unit),
            "batch": self.batch,
            "seq": self.seq,
            "optimizer": "adamw",
            "zero1_form": self.zero1_form.value,
            "prefetch": self.prefetch,
            "async_reduce": self.async_reduce,
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
                precision=parse_enum(Precision, data["precision"], "Precision"),
                unit=UnitPolicy.parse(data["unit"]),
                batch=data["batch"],
                seq=data["seq"],
                zero1_form=parse_enum(Zero1Form, data["zero1_form"], "zero1_form"),
                prefetch=data["prefetch"],
                async_reduce=data["async_reduce"],
                steps=data["steps"],
                seed=data["seed"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise SpecError(
                f"A spec lacks or garbles a field ({error}); it must be what RunSpec.to_dict gave."
            ) from None
