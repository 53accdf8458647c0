"""What the walk through a sublayer's kernels works with: sizes, a place in the segment, and a tape.

[Note: sums] Where a tensor is used twice its gradients are added. Autograd adds in place when nobody else holds the
first one. Three things prevent that. A gradient that came in over a segment's border is still held by the caller. A
gradient that is a view, as a linear layer gives it, shares its memory with its base. And while a TorchDispatchMode is
active (a meter, or fake tensors) autograd always adds out of place: a step that is watched so holds one tensor more
at a sum than one that is not, (n, hidden) at a residual connection.

[Note: fresh gradients] A backward operator of torch's makes a parameter's gradient anew. Where none is there the fresh
tensor itself becomes the gradient: it leaves the sublayer's account, and whoever walks the graph says what happens to
it then (`zeroviz.witness.graph`). Where one is there, as in a second micro-batch, it is added and freed. Our own
operators add without one: see [Note: weight gradients] in `zeroviz.kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zeroviz.category import Category
from zeroviz.events import Changes
from zeroviz.ledger import Ledger
from zeroviz.models import ModelShape
from zeroviz.partition import Place as Place
from zeroviz.spec import Recipe, RunSpec

FP32_NBYTES = 4
NUMBER_NBYTES = 8  # a Python number becomes a tensor of fp64 or int64 before an operator takes it


@dataclass(frozen=True)
class Sizes:
    """What fixes every size. watched: whether the step runs under a TorchDispatchMode, see [Note: sums].

    fresh: under which category a parameter's fresh gradient is handed over, see [Note: fresh gradients]; None where it
    is added to what is there. in_place: our own code, where the operator itself adds it to what is there.
    """

    model: ModelShape
    recipe: Recipe
    batch: int
    seq: int
    watched: bool = False
    fresh: Category | None = None
    in_place: bool = False

    @classmethod
    def of(cls, spec: RunSpec, *, watched: bool = False) -> Sizes:
        """Those of our own code."""
        return cls(spec.model, spec.recipe, spec.batch, spec.seq, watched, in_place=True)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of some twenty fields; a walk asks for it with each sublayer."""
        return hash((self.model, self.recipe, self.batch, self.seq, self.watched, self.fresh, self.in_place))

    @property
    def num_tokens(self) -> int:
        return self.batch * self.seq

    @property
    def itemsize(self) -> int:
        return self.recipe.compute.itemsize

    @property
    def is_narrow(self) -> bool:
        """Whether the compute dtype is narrower than fp32."""
        return self.itemsize < FP32_NBYTES

    def rows(self, width: int, itemsize: int | None = None) -> int:
        """Bytes of (batch, seq, width) in the compute dtype, or with another itemsize."""
        return self.num_tokens * width * (itemsize or self.itemsize)


class Ready(NamedTuple):
    """The parameter whose gradient is there: of the sublayer's layers, counted from 0, the weight or the bias."""

    layer: int
    is_bias: bool = False


class Tape(Ledger):
    """The ledger of one sublayer. views: gradients that share their memory with a base, see [Note: sums].

    keeps: whether autograd builds a graph. Without one, as in the forward of a checkpointed region, what backward would
    need is temporary as well and lives as long as the code that made it holds it.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        super().__init__()
        self.views: set[str] = set()
        self.keeps = keeps
        self.handed_over: list[tuple[Changes, Ready]] = []
        """What was booked up to each gradient handed over, and which that is."""
        self.before_grads: Changes | None = None
        """Of our own code: what backward booked before it first touched a parameter's gradient."""

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

    def make_grad(self, s: Sizes, key: str, nbytes: int) -> None:
        """Allocate a parameter's gradient as it will be handed over."""
        self.alloc(key, nbytes, s.fresh or Category.TEMPORARY)

    def give_grad(self, s: Sizes, key: str, ready: Ready) -> None:
        """The gradient is added to what is there and freed, or handed over. See [Note: fresh gradients]."""
        if s.fresh is None:
            self.free(key)
        else:
            del self._live[key]
            self.handed_over.append((self.take(), ready))

    def begin_grads(self) -> None:
        """The first of the sublayer's gradients is added now; the unit's buffer must be there."""
        if self.before_grads is None:
            self.before_grads = self.take()

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


def add_grads(
    tape: Tape,
    s: Sizes,
    first: str,
    second: str,
    total: str,
    nbytes: int,
    *,
    held: bool = False,
    category: Category = Category.TEMPORARY,
) -> None:
    """total = first + second. held: the caller keeps `first`. category: of a new sum. See [Note: sums]."""
    if held or s.watched or first in tape.views:
        tape.views.discard(first)
        tape.alloc("sum", nbytes, category)
        tape.free(second, *(() if held else (first,)))
        tape.rename("sum", total)
    else:
        tape.free(second)
        if first != total:
            tape.rename(first, total)
