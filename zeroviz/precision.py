"""Element types, optimizers, and the recipes: which dtype every copy of the model states has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from zeroviz.facts import QUANTIZED_BLOCK_NUMEL
from zeroviz.members import Members


class DType(Members):
    """An element type and its width."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    """Quantized moments only: no parameter and no gradient has it."""

    itemsize: int
    """Bytes an element. An attribute and not a property: walks ask thousands of times a step."""

    def __init__(self, name: str) -> None:
        self.itemsize = {"fp32": 4, "bf16": 2, "int8": 1}[name]


class Precision(Members):
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
    FSDP_MIXED = "fsdp-mixed"
    """4 + 4 + 8 = 16: fp32 shards, gathered and computed with in bf16; the shard itself is the master (the mixed
    precision of FSDP1 and FSDP2, which alone have it). What gradients are reduced in is `Settings.reduce_dtype`."""

    @property
    def param(self) -> DType:
        """Resident dtype of the parameters."""
        return DType.FP32 if self in (Precision.FP32, Precision.FSDP_MIXED) else DType.BF16

    @property
    def compute(self) -> DType:
        """Dtype of the parameters a unit is computed with, and of its activations."""
        return DType.FP32 if self is Precision.FP32 else DType.BF16

    @property
    def grad(self) -> DType:
        """Dtype in which the gradient is kept; but for fsdp-mixed also that in which it is added up and reduced."""
        return DType.BF16 if self in (Precision.BF16_MIXED, Precision.BF16) else DType.FP32

    @property
    def master(self) -> DType | None:
        """Dtype of the optimizer's own copy of the parameters; None where the parameter itself is updated."""
        return DType.FP32 if self in (Precision.BF16_MIXED, Precision.BF16_FP32GRAD) else None

    @property
    def moments(self) -> DType:
        """Dtype of each of Adam's two moments, where they are not quantized."""
        return DType.BF16 if self is Precision.BF16 else DType.FP32

    @property
    def bytes_per_param(self) -> int:
        """Bytes of model states a parameter costs under AdamW when nothing is sharded."""
        return recipe_of(self, None, Optimizer.ADAMW).bytes_per_param


OWN_PRECISIONS = tuple(precision for precision in Precision if precision is not Precision.FSDP_MIXED)
"""The recipes of our own implementation: parameters are held as they are computed with."""
WHOLE_BUFFER_PRECISIONS = (Precision.FP32, Precision.BF16_FP32GRAD)
"""Those of Megatron's optimizer, whose one gradient buffer is fp32."""


class Optimizer(Members):
    """What updates the parameters. m is the width of a moment, s the elements a rank updates at a time."""

    ADAMW = "adamw"
    """AdamW's plain loop, a slice at a time: two moments; sqrt(v) and the denominator are temporaries, 2 m s."""
    ADAMW_FOREACH = "adamw-foreach"
    """AdamW over all owned tensors at once (torch's default on GPUs): the denominators of all units live together."""
    ADAMW_FUSED = "adamw-fused"
    """AdamW in one kernel, a slice at a time: two moments and no temporary."""
    ADAMW_8BIT = "adamw-8bit"
    """AdamW with block-wise quantized moments, one byte each and an fp32 scale a block. Arithmetic only."""
    SGD_MOMENTUM = "sgd-momentum"
    """SGD with momentum: one moment."""
    SGD = "sgd"
    """Plain SGD: no state at all."""

    @property
    def num_moments(self) -> int:
        return {"sgd": 0, "sgd-momentum": 1}.get(self.value, 2)

    @property
    def num_temporaries(self) -> int:
        """How many tensors like a moment the update makes."""
        return {"adamw": 2, "adamw-foreach": 1}.get(self.value, 0)

    @property
    def steps_together(self) -> bool:
        """Whether all units are updated in one go, so that what each needs adds up."""
        return self is Optimizer.ADAMW_FOREACH

    @property
    def counts_steps(self) -> bool:
        """Whether torch keeps a step counter, one fp32 scalar for each tensor it updates."""
        return self in (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH, Optimizer.ADAMW_FUSED)

    @property
    def runs(self) -> bool:
        """Whether it can be run, and not only be worked out."""
        return self is not Optimizer.ADAMW_8BIT


@dataclass(frozen=True, slots=True)
class Recipe:
    """The dtype of every copy of the model states, and how many moments there are: a Precision with its options set.

    param: resident dtype. compute: of the parameters a unit is computed with. grad: in which the gradient is kept, and
    unless param and compute differ added up and reduced. master: None where the parameter itself is updated. moments:
    of each moment.
    """

    param: DType
    compute: DType
    grad: DType
    master: DType | None
    moments: DType
    num_moments: int

    @property
    def update(self) -> DType:
        """Dtype of what the optimizer updates, and so of the gradient it takes."""
        return self.master or self.param

    @property
    def casts_grad(self) -> bool:
        """Whether the gradient is cast for the update, one copy of the owned elements."""
        return self.grad is not self.update

    @property
    def bytes_per_param(self) -> int:
        """Bytes of model states a parameter costs when nothing is sharded; scales of quantized moments apart."""
        master = self.master.itemsize if self.master else 0
        return self.param.itemsize + self.grad.itemsize + master + self.num_moments * self.moments.itemsize

    def moments_nbytes(self, numel: int) -> int:
        """Bytes of the moments of `numel` elements, scales included."""
        return self.num_moments * (numel * self.moments.itemsize + self.num_scales(numel) * DType.FP32.itemsize)

    def num_scales(self, numel: int) -> int:
        """Scales of one quantized moment of `numel` elements: one a block, the last block perhaps not full."""
        return -(-numel // QUANTIZED_BLOCK_NUMEL) if self.moments is DType.INT8 else 0


@lru_cache(maxsize=64)
def recipe_of(precision: Precision, grad: DType | None, optimizer: Optimizer) -> Recipe:
    """`precision` with another gradient dtype, if one is given, and the moments of `optimizer`."""
    moments = DType.INT8 if optimizer is Optimizer.ADAMW_8BIT else precision.moments
    return Recipe(
        precision.param, precision.compute, grad or precision.grad, precision.master, moments, optimizer.num_moments
    )
