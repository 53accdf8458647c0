"""What a rank keeps of the model states, and whose code runs the step."""

from __future__ import annotations

from zeroviz.members import Members


class Strategy(Members):
    """What each rank keeps of the model states. P parameters, N ranks."""

    DDP = "ddp"
    """Everything whole on every rank; one all-reduce of the gradient."""
    ZERO1 = "zero1"
    """Optimizer state (and fp32 master) sharded; parameters and gradients whole."""
    ZERO2 = "zero2"
    """Optimizer state and gradients sharded; parameters whole."""
    ZERO3 = "zero3"
    """Optimizer state, gradients and parameters sharded; a unit is gathered only while it is used (FULL_SHARD)."""
    SHARD_GRAD_OP = "shard_grad_op"
    """Sharded at rest as ZeRO-3; a unit is gathered once, in forward, and kept to the end of its backward (FSDP's
    SHARD_GRAD_OP, or reshard_after_forward=False). Not the paper's ZeRO-2, whose parameters are never sharded."""
    HYBRID_SHARD = "hybrid_shard"
    """ZeRO-3 inside groups of G ranks, whole copies of it across the R = N/G groups: a unit is gathered and its
    gradient reduce-scattered in the group, then the gradient shard is all-reduced across the groups."""
    MEGATRON_OPTIM = "megatron_optim"
    """Megatron's distributed optimizer: parameters and gradients whole, each in one buffer over the whole model;
    optimizer state (and fp32 master) of 1/N of that buffer, wherever it cuts. ZeRO-1's wire, and its memory but for
    padding; only the shards' bounds differ."""

    @property
    def label(self) -> str:
        return _LABEL[self.value]

    @property
    def shards_optimizer(self) -> bool:
        return self is not Strategy.DDP

    @property
    def shards_grad(self) -> bool:
        return self is Strategy.ZERO2 or self.shards_param

    @property
    def shards_param(self) -> bool:
        return self in (Strategy.ZERO3, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD)

    @property
    def syncs_param(self) -> bool:
        """Whether whole parameters are updated in shards, which then have to travel."""
        return self.shards_optimizer and not self.shards_param

    @property
    def reshards_after_forward(self) -> bool:
        """Whether a gathered unit is freed after its forward and gathered again for its backward."""
        return self in (Strategy.ZERO3, Strategy.HYBRID_SHARD)

    @property
    def replicates(self) -> bool:
        """Whether ranks form shard groups, which are copies of one another."""
        return self is Strategy.HYBRID_SHARD

    @property
    def has_whole_buffer(self) -> bool:
        """Whether shards are cut from one buffer over the whole model, and not from each unit's."""
        return self is Strategy.MEGATRON_OPTIM


_LABEL = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "shard_grad_op": "SHARD_GRAD_OP",
    "hybrid_shard": "HYBRID_SHARD",
    "megatron_optim": "Megatron optim",
}


class Implementation(Members):
    """Whose code runs the step. All but the first are code we did not write (`cluster/witness`)."""

    OWN = "own"
    """The teaching implementation of this repository (`cluster/own`)."""
    DDP = "ddp"
    """torch's DistributedDataParallel."""
    ZERO_REDUNDANCY = "zero_redundancy"
    """torch's ZeroRedundancyOptimizer, beside DistributedDataParallel."""
    FSDP1 = "fsdp1"
    """torch's FullyShardedDataParallel: flat parameters."""
    FSDP2 = "fsdp2"
    """torch's `fully_shard`: parameters cut by rows."""
    DEEPSPEED = "deepspeed"
    """DeepSpeed, stages 0 to 3; an optional extra."""
    MEGATRON = "megatron"
    """megatron-core's distributed optimizer; an optional extra."""

    @property
    def label(self) -> str:
        """What it is called in a sentence."""
        return _IMPLEMENTATION_LABEL[self.value]


_IMPLEMENTATION_LABEL = {
    "own": "our own code",
    "ddp": "torch's DistributedDataParallel",
    "zero_redundancy": "torch's ZeroRedundancyOptimizer",
    "fsdp1": "torch's FullyShardedDataParallel (FSDP1)",
    "fsdp2": "torch's fully_shard (FSDP2)",
    "deepspeed": "DeepSpeed",
    "megatron": "megatron-core",
}


class Zero1Form(Members):
    """How ZeRO-1 brings the gradient to its owner. In elements sent per rank, times (N-1)/N."""

    REDUCE_SCATTER = "reduce-scatter"
    """Reduce-scatter the gradient, all-gather the parameters: 2P, as much as DDP."""
    ALL_REDUCE = "all-reduce"
    """All-reduce the gradient and use one slice of it, all-gather the parameters: 3P, the naive form."""
