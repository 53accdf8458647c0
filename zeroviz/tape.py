"""What the walk through a sublayer's kernels works with: sizes, a place in the segment, and a tape.

[Note: sums] Where a tensor is used twice its gradients are added. Autograd adds in place when nobody else holds the
first one. Three things prevent that. A gradient that came in over a segment's border is still held by the caller. A
gradient that is a view, as a linear layer gives it, shares its memory with its base. And while a TorchDispatchMode is
active (a meter, or fake tensors) autograd always adds out of place: a step that is watched so holds one tensor more
at a sum than one that is not, (n, hidden) at a residual connection.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroviz.ledger import Ledger
from zeroviz.models import ModelShape
from zeroviz.spec import Precision
from zeroviz.trace import Category

FP32_NBYTES = 4
Change = tuple[Category, int]


@dataclass(frozen=True)
class Sizes:
    """What fixes every size. watched: whether the step runs under a TorchDispatchMode, see [Note: sums]."""

    model: ModelShape
    precision: Precision
    batch: int
    seq: int
    watched: bool

    @property
    def num_tokens(self) -> int:
        return self.batch * self.seq

    @property
    def itemsize(self) -> int:
        return self.precision.param.itemsize

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
    """

    first: bool
    last: bool
    tied: bool


class Tape(Ledger):
    """The ledger of one sublayer. views: gradients that share their memory with a base, see [Note: sums]."""

    def __init__(self) -> None:
        super().__init__()
        self.views: set[str] = set()

    def save(self, key: str, nbytes: int) -> None:
        """Allocate something that backward needs."""
        self.alloc(key, nbytes, Category.ACTIVATION)

    def make(self, key: str, nbytes: int) -> None:
        """Allocate something that is freed within the same pass."""
        self.alloc(key, nbytes, Category.TEMPORARY)

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
