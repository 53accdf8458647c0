"""The names of what makes a measured step differ from the predicted one."""

from __future__ import annotations

UNEXPLAINED = "unexplained"
STEP_COUNTERS = "the optimizer's step counters, one scalar for each tensor it updates, which the categories leave out"
# Of the allocator's figure, where the step was not read from the allocator's own events.
KERNEL_SCRATCH = "scratch inside kernels, which no category counts"
GLOO_COPIES = (
    "gloo's working copies of what it gathers and reduces, and scratch inside kernels: no category counts them"
)
BF16_SCRATCH = (
    "kernel scratch of this machine in bf16: matrix products and attention pack their operands as the processor demands"
)
MOVED_BY_SCRATCH = "kernel scratch of this machine in bf16 moves the peak"
OVERLAPPED_COPIES = "beside compute, gloo's copies come and go as its thread gets to them"
WATCHED_SUMS = "the step was watched by a dispatch mode, under which autograd adds gradients out of place"
WORKSPACES = "cuBLAS's workspaces, one for each thread and stream, which the categories leave out"
AWAITING = "blocks already given back that another stream still works on"
HELD_BEFORE = "held at rest already"
CUDA_KERNELS = "CUDA's kernels keep and borrow other tensors than the CPU's, which the prediction counts"


def is_unexplained(cause: str) -> bool:
    """Whether a row's cause is none; a place or a size may follow the word."""
    return cause.startswith(UNEXPLAINED)
