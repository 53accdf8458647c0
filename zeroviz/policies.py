"""How parameters are grouped, what is recomputed, what updates them and where the states lie."""

from __future__ import annotations

from dataclasses import dataclass

from zeroviz.errors import SpecError
from zeroviz.members import Members
from zeroviz.quantity import parse_count


class UnitKind(Members):
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
        if not colon:
            return cls(kind)
        try:
            return cls(kind, parse_count(number, "K"))
        except SpecError:
            example = "block:2" if kind is UnitKind.BLOCK else "numel:1e6"
            raise SpecError(f"Unit is {text!r}; K is a whole number of at least 1, such as {example}.") from None


ONE_BLOCK = UnitPolicy()


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Activation checkpointing: `blocks` consecutive transformer blocks keep only their input and are recomputed in
    backward; 0 keeps everything. (Not the checkpoint that is a file.) Chen et al., arXiv 1604.06174, section 3."""

    blocks: int = 0

    def __post_init__(self) -> None:
        if self.blocks < 0:
            raise SpecError(f"Checkpointing every {self.blocks} blocks was asked for; it must be at least 1.")

    def __str__(self) -> str:
        return {0: "none", 1: "block"}.get(self.blocks, f"block:{self.blocks}")

    def __bool__(self) -> bool:
        return self.blocks > 0

    @classmethod
    def parse(cls, text: str) -> Checkpointing:
        """From `none`, `block` or `block:4`."""
        name, colon, number = text.strip().partition(":")
        if name == "none" and not colon:
            return cls()
        if name != "block":
            raise SpecError(f"Checkpointing is {text!r}; allowed are none, block, block:K.")
        if colon and (not number.isdecimal() or not int(number)):
            raise SpecError(f"Checkpointing is {text!r}; K is how many blocks, 1 or more; none keeps everything.")
        return cls(int(number) if colon else 1)


KEEP_ALL = Checkpointing()


class Offload(Members):
    """Which states lie in the host's memory between uses, and not in the device's."""

    NONE = "none"
    """Everything on the device."""
    OPTIMIZER = "optimizer"
    """Moments and master on the host, where the update runs: each step the gradient goes down, the parameters up."""
    PARAMS = "params"
    """Parameter and gradient shards as well (FSDP's CPU offload): a shard goes up each time its unit is gathered."""

    @property
    def moves_optimizer(self) -> bool:
        return self is not Offload.NONE

    @property
    def moves_params(self) -> bool:
        return self is Offload.PARAMS
