"""What the machine borrows beside a step's own tensors, outside the model's kernels (`zeroviz.kernels` has those).

Nothing here is part of what the step holds on other machines: KERNEL_SCRATCH and BACKEND_COPY are left out of
`RankTrace.peak` and are part of `RankTrace.machine_peak`. Sizes and order were read off torch 2.13 on CPU with gloo;
tests compare them with the allocator's own events.

[Note: gloo's copies] An all-gather makes its whole output twice, one after the other: once in the caller's thread, to
see what it would look like, and once in gloo's, to receive. A reduce-scatter clones its whole input and reduces the
clone. An all-reduce works in place. gloo's ring buffers lie outside torch's allocator: `ring_scratch_nbytes`.

[Note: numbers] A Python number beside a tensor becomes a tensor of 8 bytes, and of that one in the other's dtype.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache

from zeroviz.collectives import CollectiveOp
from zeroviz.events import Change, Changes
from zeroviz.ledger import Ledger
from zeroviz.precision import DType, Optimizer
from zeroviz.tape import NUMBER_NBYTES
from zeroviz.trace import Category

# gloo sends in pieces of at most this (gloo/allreduce.cc), whatever the message.
RING_SCRATCH_NBYTES = 2 * 2**20


def start_copies(ledger: Ledger, op: CollectiveOp, nbytes: int, key: Hashable) -> None:
    """gloo's copies as a collective of `nbytes` starts; what lives until its wait has `key`. See [Note: gloo's copies].

    One rank sends nothing, so nothing is called.
    """
    match op:
        case CollectiveOp.ALL_GATHER:
            ledger.replay(gather_copies(nbytes))
        case CollectiveOp.REDUCE_SCATTER:
            ledger.alloc(("clone", key), nbytes, Category.BACKEND_COPY)


@lru_cache
def gather_copies(nbytes: int) -> Changes:
    """A copy made and dropped, then another one."""
    return Changes(2 * ((Category.BACKEND_COPY, nbytes), (Category.BACKEND_COPY, -nbytes)))


def end_copies(ledger: Ledger, key: Hashable) -> None:
    """The wait is over: gloo lets the clone go."""
    if ledger.holds(("clone", key)):
        ledger.free(("clone", key))


def ring_scratch_nbytes(op: CollectiveOp, nbytes: int, num_ranks: int) -> int:
    """What gloo takes from the heap, and not from torch, to pass a message of `nbytes` around a ring of ranks."""
    reduces = op in (CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER)
    return min(-(-nbytes // num_ranks), RING_SCRATCH_NBYTES) if reduces and num_ranks > 1 else 0


@lru_cache
def number(itemsize: int) -> Changes:
    """A Python number beside a tensor of `itemsize`, taken and given back. See [Note: numbers]."""
    taken = ((Category.KERNEL_SCRATCH, NUMBER_NBYTES), (Category.KERNEL_SCRATCH, itemsize))
    return Changes((*taken, *((category, -nbytes) for category, nbytes in reversed(taken))))


def update(optimizer: Optimizer, numels: Sequence[int], moments: DType, temporary: Category) -> Iterator[Change]:
    """What torch's optimizer allocates and frees when it updates tensors of `numels` elements, and what it borrows.

    AdamW's plain loop holds a tensor's denominator in a variable until that of the next one is there: of two
    neighbours both, beside the square root of the second.
    temporary: the category of its temporaries, the device's or the host's. Tensors and moments have one dtype.
    """
    rows = [numel * moments.itemsize for numel in numels]
    beside_a_tensor = number(moments.itemsize)
    beside_the_counter = number(DType.FP32.itemsize)
    match optimizer:
        case Optimizer.ADAMW:
            for row, before in zip(rows, (0, *rows), strict=False):
                yield from (*beside_the_counter, *2 * beside_a_tensor)  # step, weight decay, second moment
                yield temporary, row  # sqrt(v)
                taken, given_back = beside_a_tensor[:2], beside_a_tensor[2:]
                yield from (*taken, (temporary, row), *given_back)  # the denominator
                yield temporary, -row
                yield from beside_a_tensor  # plus epsilon
                if before:
                    yield temporary, -before
            if rows:
                yield temporary, -rows[-1]
        case Optimizer.ADAMW_FOREACH:
            one = DType.FP32.itemsize  # what is added to the counters, a tensor
            yield from ((temporary, one), (temporary, -one))
            for _ in ("weight decay", "second moment"):
                yield from beside_a_tensor * len(rows)
            yield from ((temporary, row) for row in rows)  # sqrt(v), which becomes the denominator in place
            for _ in ("divided", "plus epsilon"):
                yield from beside_a_tensor * len(rows)
            yield from ((temporary, -row) for row in reversed(rows))
        case Optimizer.ADAMW_FUSED:
            yield from beside_the_counter * len(rows)
        case Optimizer.SGD_MOMENTUM:
            yield from beside_a_tensor * len(rows)


@lru_cache(maxsize=256)
def clip_of(numels: tuple[int, ...], grad: DType) -> tuple[Changes, Changes]:
    """What clipping makes before the norms' sum is sent, and after: norm and scale are fp32 numbers on the device.

    A gradient that is not fp32 is cast inside the kernel that sums its squares, and the scale inside the one that
    multiplies.
    """
    one, casts = DType.FP32.itemsize, grad is not DType.FP32
    before: list[Change] = [(Category.TEMPORARY, one)]  # the sum of squares
    for numel in numels:
        cast = numel * one
        before.append((Category.TEMPORARY, one))  # one buffer's norm
        before += [(Category.KERNEL_SCRATCH, cast), (Category.KERNEL_SCRATCH, -cast)] * casts
        before.append((Category.TEMPORARY, -one))
    after = [*number(one), *number(one)]  # plus epsilon, times the largest norm
    after += [(Category.KERNEL_SCRATCH, grad.itemsize), (Category.KERNEL_SCRATCH, -grad.itemsize)] * casts * len(numels)
    after.append((Category.TEMPORARY, -one))
    return Changes(before), Changes(after)


@lru_cache(maxsize=1024)
def update_of(optimizer: Optimizer, numels: tuple[int, ...], moments: DType, temporary: Category) -> Changes:
    """`update` as one stretch: units of a size share it."""
    return Changes(update(optimizer, numels, moments, temporary))


@lru_cache(maxsize=1024)
def update_of_slices(
    optimizer: Optimizer, numels: tuple[int, ...], moments: DType, cast: DType | None, temporary: Category
) -> Changes:
    """The update of our own slices of `numels` elements as one stretch: one after another, each by an optimizer of its
    own, or all in one go. cast: what their gradients are cast to first, if that is another dtype than theirs."""
    changes: list[Change] = []
    for turn in [numels] if optimizer.steps_together else [(numel,) for numel in numels]:
        copies = [numel * cast.itemsize for numel in turn] if cast else []
        changes += [(temporary, nbytes) for nbytes in copies]
        changes += update(optimizer, turn, moments, temporary)
        changes += [(temporary, -nbytes) for nbytes in copies]
    return Changes(changes)
