"""What the walk through a sublayer's kernels works with: sizes, a place in the segment, and a tape.

[Note: sums] Where a tensor is used twice its gradients are added. Autograd adds in place when nobody else holds the
first one. Three things prevent that. A gradient that came in over a segment's border is still held by the caller. A
gradient that is a view, as a linear layer gives it, shares its memory with its base. And while a TorchDispatchMode is
active (a meter, or fake tensors) autograd always adds out of place: a step that is watched so holds one tensor more
at a sum than one that is not, (n, hidden) at a residual connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from zeroviz.ledger import Ledger
from zeroviz.models import ModelShape
from zeroviz.spec import Recipe
from zeroviz.trace import Category

FP32_NBYTES = 4
NUMBER_NBYTES = 8  # a Python number becomes a tensor of fp64 or int64 before an operator takes it
Change = tuple[Category, int]


@dataclass(frozen=True)
class Sizes:
    """What fixes every size. watched: whether the step runs under a TorchDispatchMode, see [Note: sums]."""

    model: ModelShape
    recipe: Recipe
    batch: int
    seq: int
    watched: bool

    @property
    def num_tokens(self) -> int:
        return self.batch * self.seq

    @property
    def itemsize(self) -> int:
        return self.recipe.param.itemsize

    @property
    def is_narrow(self) -> bool:
        """Whether the compute dtype is narrower than fp32."""
        return self.itemsize < FP32_NBYTES

    def rows(self, width: int, itemsize: int | None = None) -> int:
        """Bytes of (batch, seq, width) in the compute dtype, or with another itemsize."""
        return self.num_tokens * width * (itemsize or self.itemsize)


@dataclass(frozen=True)
class Place:
    """Where a sublayer stands in its segment.

    first, last: its input or its output crosses the segment's border, and so the caller holds it.
    tied: embedding and head of a tied model are both in the segment.
    dropped: its output ends a recomputed region, where nobody takes it.
    """

    first: bool
    last: bool
    tied: bool
    dropped: bool = False


class Tape(Ledger):
    """The ledger of one sublayer. views: gradients that share their memory with a base, see [Note: sums].

    keeps: whether autograd builds a graph. Without one, as in the forward of a checkpointed region, what backward would
    need is temporary as well and lives as long as the code that made it holds it.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        super().__init__()
        self.views: set[str] = set()
        self.keeps = keeps

    def save(self, key: str, nbytes: int) -> None:
        """Allocate something that backward needs."""
        self.alloc(key, nbytes, Category.ACTIVATION if self.keeps else Category.TEMPORARY)

    def let_go(self, *keys: str) -> None:
        """The code that made these holds them no longer; without a graph they are freed."""
        if not self.keeps:
            self.free(*keys)

    def make(self, key: str, nbytes: int) -> None:
        """Allocate something that is freed within the same pass."""
        self.alloc(key, nbytes, Category.TEMPORARY)

    @contextmanager
    def scratch(self, *nbytes: int) -> Iterator[None]:
        """What an operator borrows while the block inside happens: taken in this order, given back in reverse."""
        for position, part in enumerate(nbytes):
            self.alloc(("scratch", position), part, Category.KERNEL_SCRATCH)
        yield
        self.free(*(("scratch", position) for position in reversed(range(len(nbytes)))))

    def number(self, itemsize: int) -> AbstractContextManager[None]:
        """A Python number beside a tensor of `itemsize`: a tensor of 8 bytes, and of it one in the tensor's dtype."""
        return self.scratch(NUMBER_NBYTES, itemsize)

    def take(self) -> tuple[Change, ...]:
        """What happened since the last call."""
        changes = tuple((event.category, event.delta_nbytes) for event in self.events)
        self.events.clear()
        return changes


def add_grads(tape: Tape, s: Sizes, first: str, second: str, total: str, nbytes: int, *, held: bool = False) -> None:
    """total = first + second. held: the caller keeps `first`. See [Note: sums]."""
    if held or s.watched or first in tape.views:
        tape.views.discard(first)
        tape.make("sum", nbytes)
        tape.free(second, *(() if held else (first,)))
        tape.rename("sum", total)
    else:
        tape.free(second)
        if first != total:
            tape.rename(first, total)
