"""Category: what the bytes of a step are for, and which of them belong to the step and not to the machine."""

from __future__ import annotations

from zeroviz.members import Members


class Category(Members):
    """What bytes are for. The docstring says when they come and go, and what they cost."""

    SHARDED_PARAM = "SHARDED_PARAM"
    """The owned 1/N of the parameters (ZeRO-3). Always held."""
    UNSHARDED_PARAM = "UNSHARDED_PARAM"
    """Whole parameters. Always held where they are replicated; under ZeRO-3 one unit from unshard to reshard."""
    SHARDED_GRAD = "SHARDED_GRAD"
    """The owned 1/N of the gradient (ZeRO-2, ZeRO-3). Always held; rewritten by each reduce-scatter."""
    UNSHARDED_GRAD = "UNSHARDED_GRAD"
    """Whole gradients. Always held under DDP and ZeRO-1; else one unit from its backward to its reduction."""
    MASTER_PARAM = "MASTER_PARAM"
    """fp32 copy of the owned parameters for the optimizer, in recipes that have one. Always held."""
    OPTIMIZER_STATE = "OPTIMIZER_STATE"
    """Adam's two moments of the owned parameters. Always held from step 1 on."""
    ACTIVATION = "ACTIVATION"
    """What autograd saved in forward for backward, unit boundaries included."""
    ALL_GATHER_BUFFER = "ALL_GATHER_BUFFER"
    """A separate buffer an all-gather fills. Our own implementation gathers in place and needs none."""
    REDUCE_SCATTER_BUFFER = "REDUCE_SCATTER_BUFFER"
    """A separate buffer a reduce-scatter reads. Our own implementation reduces in place and needs none."""
    BUCKET = "BUCKET"
    """Gradient buckets beside the gradients (torch DDP without gradient_as_bucket_view)."""
    TEMPORARY = "TEMPORARY"
    """Alive within one op of the schedule: results on their way, fresh gradients, optimizer scratch."""
    INPUT = "INPUT"
    """Tokens and targets, and rotary tables. Held from the start of the step to the end of backward."""
    KERNEL_SCRATCH = "KERNEL_SCRATCH"
    """Born and freed inside one operator: tiles of the flash kernel, packed operands. Another device, other scratch."""
    BACKEND_COPY = "BACKEND_COPY"
    """A working copy the communication backend makes of what it sends: gloo's clones. NCCL makes none."""
    UNATTRIBUTED = "UNATTRIBUTED"
    """What the allocator's total moved by although no event and no block of the step accounts for it. A finding."""
    HOST_PARAM = "HOST_PARAM"
    """Offloaded to the host: the owned parameters."""
    HOST_GRAD = "HOST_GRAD"
    """Offloaded to the host: the owned gradient."""
    HOST_MASTER_PARAM = "HOST_MASTER_PARAM"
    """On the host: the optimizer's copy of the owned parameters; fp32, or without a master in their own dtype."""
    HOST_OPTIMIZER_STATE = "HOST_OPTIMIZER_STATE"
    """Offloaded to the host: the optimizer's moments."""
    HOST_TEMPORARY = "HOST_TEMPORARY"
    """On the host within one op: the optimizer's scratch, what is on its way over the link."""

    # Attributes and not properties: walks ask thousands of times a step.
    is_artefact: bool
    """Whether it belongs to this machine's kernels or backend and not to the step: never part of `peak`."""
    on_host: bool
    """Whether it lies in the host's memory and not in the device's: never part of `peak`."""
    on_device: bool
    """Whether it counts in `peak`: neither of the two."""

    def __init__(self, name: str) -> None:
        self.is_artefact = name in ("KERNEL_SCRATCH", "BACKEND_COPY", "UNATTRIBUTED")
        self.on_host = name.startswith("HOST_")
        self.on_device = not self.is_artefact and not self.on_host


# The order of stacking and of tables: what is always held first.
CATEGORY_ORDER = tuple(Category)
# What a rank's device holds for the step, wherever it runs: at rest and peak are sums over these.
DEVICE_CATEGORIES = tuple(category for category in Category if category.on_device)
