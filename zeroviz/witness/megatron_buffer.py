"""The buffers of megatron-core's distributed optimizer: where each parameter lies, and what each rank owns of it.

[Note: padding] All parameters lie in one buffer, in the reverse of the order in which the model has them, and their
gradients in a second one at the same places. A parameter begins at a multiple of 64 elements. A bucket ends with the
parameter that fills it, at a multiple of lcm(N, 128) elements: rank r owns the r-th of N equal parts of every bucket,
and the next bucket begins 256 bytes aligned. Both buffers hold this padding on every rank. The fp32 master and the
moments are tensors of their own, one for each piece of a parameter that falls into a rank's parts, and hold none. So
ranks differ: who owns more of the padding holds fewer of the states, and each piece has a step counter.
(megatron-core 0.16.1, param_and_grad_buffer.py: `_pad_start_of_param_if_needed`, `_pad_end_of_bucket_if_needed`;
distrib_optimizer.py: `_build_model_gbuf_param_range_map`.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from zeroviz.models import NamedShape
from zeroviz.partition import plan_for
from zeroviz.settings import value_of
from zeroviz.spec import RunSpec

PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements [start, stop) of the buffer: a parameter's, without the padding before it."""

    shape: NamedShape
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, stop) of the buffer, padding included, and the parameters in them, in order."""

    start: int
    stop: int
    extents: tuple[Extent, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def pieces(self, num_ranks: int, rank: int) -> list[int]:
        """Elements of each piece of a parameter that the rank owns, in order: what the optimizer updates."""
        part = self.numel // num_ranks
        start = self.start + rank * part
        pieces = []
        first = max(0, bisect_right(self.extents, start, key=lambda extent: extent.start) - 1)
        for extent in self.extents[first:]:
            if extent.start >= start + part:
                break
            numel = min(extent.stop, start + part) - max(extent.start, start)
            if numel > 0:
                pieces.append(numel)
        return pieces

    def borders(self, num_ranks: int) -> set[int]:
        """Ranks whose pieces may be others than those of the rank before: around a parameter's first and last."""
        part = self.numel // num_ranks
        ends = {
            (element - self.start) // part for extent in self.extents for element in (extent.start, extent.stop - 1)
        }
        return ends | {rank + 1 for rank in ends if rank + 1 < num_ranks}


def parameter_order(spec: RunSpec) -> tuple[NamedShape, ...]:
    """The parameters as the model has them: in order of first use."""
    return tuple(
        {
            shape.name: shape
            for segment in plan_for(spec).segments
            for sublayer in segment.sublayers
            for shape in sublayer.params
        }.values()
    )


def buckets(spec: RunSpec) -> tuple[Bucket, ...]:
    """The buffer, bucket by bucket. See [Note: padding]."""
    limit: int | None = value_of(spec.settings, "bucket_numel", spec.impl)
    found: list[Bucket] = []
    extents: list[Extent] = []
    start = stop = 0

    def close() -> None:
        nonlocal start, stop
        stop = _padded(stop, lcm(spec.ranks, BUCKET_ALIGNMENT))
        found.append(Bucket(start, stop, tuple(extents)))
        extents.clear()
        start = stop

    for shape in reversed(parameter_order(spec)):
        at = _padded(stop, PARAMETER_ALIGNMENT)
        stop = at + shape.numel
        extents.append(Extent(shape, at, stop))
        if limit is not None and stop - start >= limit:
            close()
    if extents:
        close()
    return tuple(found)


def owned_pieces(parts: Sequence[Bucket], num_ranks: int, rank: int) -> tuple[int, ...]:
    """Elements of each tensor that the rank's optimizer updates, in its order."""
    return tuple([numel for bucket in parts for numel in bucket.pieces(num_ranks, rank)])


def alike_stretches(parts: Sequence[Bucket], num_ranks: int) -> tuple[range, ...]:
    """Stretches of neighbouring ranks that own equal pieces."""
    borders = {0, num_ranks}.union(*(bucket.borders(num_ranks) for bucket in parts))
    return tuple(range(start, stop) for start, stop in pairwise(sorted(borders)))


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
