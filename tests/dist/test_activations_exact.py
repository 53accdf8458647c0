"""Predicted activations and temporaries against torch: event by event, on single segments without collectives.

Between two changes of direction (allocations, then frees, ...) torch's order is not promised; the bytes by category at
every such turn are, and so every maximum is compared.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cluster.allocator import cpu_counter
from cluster.dtypes import TORCH_DTYPE
from cluster.event_tree import COMPOSITE
from cluster.model import build_sublayer, initial_value
from cluster.own.layers import ADDING
from cluster.text import load_batch
from tests.segments import book
from zeroviz.events import Events
from zeroviz.ledger import Ledger
from zeroviz.models import Sublayer, SublayerKind
from zeroviz.partition import Segment
from zeroviz.schedule import OpKind
from zeroviz.spec import Precision, RunSpec, preset
from zeroviz.tape import Sizes
from zeroviz.trace import Category, Event

TINY, LLAMA = preset("tiny"), preset("tiny-llama")
MODELS = {
    "tiny": TINY,
    "tiny-llama": LLAMA,
    "gpt2-no-bias": replace(TINY, heads=1, kv_heads=1, head_dim=55, attention_bias=False, mlp_bias=False, tied=False),
    "gpt2-full-table": replace(TINY, positions=7),  # every position is used
    "llama-tied": replace(LLAMA, tied=True),
    "llama-bias": replace(LLAMA, attention_bias=True, mlp_bias=True),
    "qwen2": replace(LLAMA, heads=4, kv_heads=2, head_dim=14, qkv_bias=True, tied=True),
    "llama-no-groups": replace(LLAMA, heads=2, kv_heads=2, head_dim=6),
    "llama-groups": replace(LLAMA, heads=4, kv_heads=2, head_dim=14, attention_bias=True),
}
# The models have three blocks: embedding 0, blocks 1-2, 3-4, 5-6, head 7.
SEGMENTS = {
    "embedding": (0,),
    "attention": (1,),
    "mlp": (2,),
    "head": (7,),
    "block": (1, 2),
    "astride": (2, 3),
    "two blocks": (1, 2, 3, 4),
    "embedding and block": (0, 1, 2),
    "block and head": (5, 6, 7),
    "model": (0, 1, 2, 3, 4, 5, 6, 7),
}
SHAPES = [(2, 7), (1, 5), (3, 1)]
RECIPES = [Precision.FP32, Precision.BF16_MIXED, Precision.BF16_FP32GRAD]

Turn = dict[Category, int]


class Run:
    """One segment's forward and backward, as an executor does them."""

    def __init__(self, spec: RunSpec, sublayers: tuple[Sublayer, ...]) -> None:
        param_dtype, grad_dtype = TORCH_DTYPE[spec.recipe.param], TORCH_DTYPE[spec.recipe.grad]
        shapes = {shape.name: shape for sublayer in sublayers for shape in sublayer.params}
        numel = sum(shape.numel for shape in shapes.values())
        self.flat = torch.empty(numel, dtype=param_dtype)
        self.flat_grad = torch.zeros(numel, dtype=grad_dtype)
        self.parameters, start = {}, 0
        for name, shape in shapes.items():
            view = self.flat[start : start + shape.numel].view(shape.shape)
            view.copy_(initial_value(spec.model, shape, seed=0))
            parameter = nn.Parameter(view)
            parameter.grad_dtype = grad_dtype
            parameter.grad = self.flat_grad[start : start + shape.numel].view(shape.shape)
            self.parameters[name], start = parameter, start + shape.numel
        self.modules = [build_sublayer(sublayer, spec.model, ADDING) for sublayer in sublayers]
        for module in self.modules:
            for name in module.slots:
                module.install(name, self.parameters[name])

        self.batch = load_batch(spec, rank=0, step=0)
        border = torch.Size((spec.batch, spec.seq, spec.model.hidden))
        embeds, ends = sublayers[0].kind is SublayerKind.EMBED, sublayers[-1].kind is SublayerKind.HEAD
        self.activation = None if embeds else torch.ones(border, dtype=param_dtype).cumsum(-1)
        self.grad = None if ends else torch.full(border, 0.5, dtype=param_dtype)
        self.edge: Any = None

    def known(self) -> Iterable[tuple[torch.Tensor, Category | None]]:
        """All that is there before; what the segment frees in the end has a category."""
        yield from ((tensor, None) for tensor in (self.flat, self.flat_grad, *self.batch.tensors()))
        if self.activation is not None:
            yield self.activation, Category.ACTIVATION
        if self.grad is not None:
            yield self.grad, Category.TEMPORARY

    def forward(self) -> None:
        self.entry = None if self.activation is None else self.activation.detach().requires_grad_()
        self.activation = None
        y = self.entry
        for module in self.modules:
            y = module(y, self.batch)
        self.edge = get_gradient_edge(y)
        self.activation = y.detach()

    @torch.no_grad()
    def forward_without_graph(self, *, keeps_input: bool) -> None:
        y, self.activation = self.activation, None
        entry = y
        for module in self.modules:
            y = module(y, self.batch)
        self.entry = entry if keeps_input else None
        self.activation = y

    def recompute(self, *, drops_output: bool) -> None:
        assert self.entry is not None
        self.activation = self.entry.detach()
        self.forward()
        if drops_output:
            self.activation = None

    def drop_output(self) -> None:
        """The next segment's backward frees it; the loss is freed by this one's."""
        if self.grad is not None:
            self.activation = None

    def backward(self) -> None:
        edge, entry, self.edge, self.entry, grad = self.edge, self.entry, None, None, self.grad
        if grad is None:
            grad = torch.ones_like(self.activation)
            self.activation = None
        torch.autograd.backward(edge, grad)
        self.grad = None if entry is None else entry.grad


@dataclass
class Block:
    nbytes: int
    category: Category | None
    reference: Any = None


class Storages(TorchDispatchMode):
    """Every storage an operator returns, from its birth to its death; aliases count once."""

    def __init__(self, known: Iterable[tuple[torch.Tensor, Category | None]]) -> None:
        super().__init__()
        self.live: dict[int, Block] = {}
        self.log: list[tuple[Block, int]] = []
        for tensor, category in known:
            self.watch(tensor.untyped_storage(), Block(tensor.untyped_storage().nbytes(), category))

    def watch(self, storage: torch.UntypedStorage, block: Block) -> None:
        key = storage._cdata
        block.reference = weakref.ref(storage, lambda _: self.log.append((self.live.pop(key), -1)))
        self.live[key] = block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.live:
                block = Block(leaf.untyped_storage().nbytes(), None)
                self.log.append((block, 1))
                self.watch(leaf.untyped_storage(), block)
        return result

    def take(self, left: Category) -> list[Turn]:
        """The turns so far. left: the category of what was born in them and is still alive."""
        log, self.log = self.log, []
        alive = {id(block) for block in self.live.values()}
        for block, sign in log:
            if sign > 0:
                block.category = left if id(block) in alive else Category.TEMPORARY
        return turns((block.category, sign * block.nbytes) for block, sign in log if block.category)


def turns(changes: Iterable[tuple[Category, int]]) -> list[Turn]:
    """Sums by category of each run of allocations and of each run of frees."""
    runs: list[tuple[bool, Counter[Category]]] = []
    for category, nbytes in changes:
        if not runs or runs[-1][0] != (nbytes > 0):
            runs.append((nbytes > 0, Counter()))
        runs[-1][1][category] += nbytes
    return [dict(run) for _, run in runs]


def measured(spec: RunSpec, sublayers: tuple[Sublayer, ...]) -> tuple[list[Turn], list[Turn]]:
    run = Run(spec, sublayers)
    with Storages(run.known()) as storages:
        run.forward()
        forward = storages.take(left=Category.ACTIVATION)
        run.drop_output()
        storages.take(left=Category.TEMPORARY)
        run.backward()
        backward = storages.take(left=Category.TEMPORARY)
    return forward, backward


def predicted(spec: RunSpec, sublayers: tuple[Sublayer, ...], *, watched: bool) -> tuple[Events, Events]:
    segment = Segment(index=0, unit=0, name="segment", sublayers=sublayers)
    forward, backward, sizes = Ledger(), Ledger(), Sizes.of(spec, watched=watched)
    book(forward, OpKind.FORWARD, sizes, segment)
    book(backward, OpKind.BACKWARD, sizes, segment)
    return forward.events, backward.events


def case(
    model: str, precision: Precision, segment: str, shape: tuple[int, int]
) -> tuple[RunSpec, tuple[Sublayer, ...]]:
    spec = RunSpec(model=MODELS[model], precision=precision, batch=shape[0], seq=shape[1], ranks=1)
    return spec, tuple(spec.model.sublayers[index] for index in SEGMENTS[segment])


@pytest.mark.parametrize("precision", RECIPES, ids=lambda recipe: recipe.value)
@pytest.mark.parametrize("model", MODELS)
def test_every_allocation_and_free_is_predicted(model: str, precision: Precision) -> None:
    for segment in SEGMENTS:
        for shape in SHAPES if model in ("tiny", "tiny-llama") else SHAPES[:1]:
            spec, sublayers = case(model, precision, segment, shape)
            expected = [
                turns((event.category, event.delta_nbytes) for event in events if event.category.on_device)
                for events in predicted(spec, sublayers, watched=True)
            ]
            for name, want, got in zip(("forward", "backward"), expected, measured(spec, sublayers), strict=True):
                assert got == want, f"{segment} {name}, batch {shape[0]}, seq {shape[1]}"


# The allocator's own events, without a dispatch mode in the way: scratch is in them.


def allocator_changes(function: Callable[[], None]) -> list[tuple[Category, int]]:
    """Bytes allocated and freed by `function`, as KERNEL_SCRATCH or, for all that leaves its operator, TEMPORARY.

    What oneDNN's matrix products borrow in bf16 depends on the processor and is left out: it is never predicted.
    """
    with profile(use_kineto=True, profile_memory=True) as profiler:
        function()
    found: list[tuple[int, int, int, tuple[tuple[int, str], ...]]] = []

    def visit(node: Any, operators: tuple[tuple[int, str], ...]) -> None:
        if node.name == "[memory]":
            found.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size, operators))
            return
        if node.name.startswith("aten::") and node.name not in COMPOSITE:
            operators = (*operators, (node.id, node.name))
        for child in node.children:
            visit(child, operators)

    for root in profiler.kineto_results.experimental_event_tree():
        visit(root, ())
    found.sort()
    born: dict[int, int] = {}
    scratch: set[int] = set()
    of_matmul: set[int] = set()
    for position, (_, pointer, nbytes, operators) in enumerate(found):
        if nbytes > 0:
            born[pointer] = position
        elif pointer in born:
            birth = born.pop(pointer)
            # A Python number becomes a tensor before its operator begins, and dies after it.
            if operators[:1] == found[birth][3][:1] and (operators or nbytes == -8):
                scratch |= {birth, position}
                if found[birth][3] and found[birth][3][-1][1] in ("aten::mm", "aten::addmm", "aten::addmm_"):
                    of_matmul |= {birth, position}
    return [
        (Category.KERNEL_SCRATCH if position in scratch else Category.TEMPORARY, nbytes)
        for position, (_, _, nbytes, _) in enumerate(found)
        if position not in of_matmul
    ]


def booked(events: Iterable[Event]) -> list[Turn]:
    """As the allocator sees it: what is kept for backward and what is not are alike."""
    return turns((Category.TEMPORARY if e.category.on_device else e.category, e.delta_nbytes) for e in events)


def assert_as_the_allocator_says(spec: RunSpec, sublayers: tuple[Sublayer, ...]) -> None:
    """Forward and backward of a segment, unwatched: the step's bytes and the kernels' scratch, turn by turn."""
    assert cpu_counter() is not None
    torch.set_num_threads(1)  # a kernel's scratch grows with its threads
    run = Run(spec, sublayers)
    in_forward = allocator_changes(run.forward)
    run.drop_output()
    in_backward = allocator_changes(run.backward)

    forward, backward = predicted(spec, sublayers, watched=False)
    assert turns(in_forward) == booked(forward)
    assert turns(in_backward) == booked(backward)


@pytest.mark.parametrize("precision", RECIPES, ids=lambda recipe: recipe.value)
@pytest.mark.parametrize("model", ["tiny", "tiny-llama", "llama-bias", "llama-tied"])
@pytest.mark.parametrize("segment", ["mlp", "two blocks", "model"])
def test_an_unwatched_step_adds_gradients_in_place(model: str, precision: Precision, segment: str) -> None:
    assert_as_the_allocator_says(*case(model, precision, segment, (2, 7)))


@pytest.mark.parametrize("precision", RECIPES, ids=lambda recipe: recipe.value)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("segment", ["attention", "mlp", "block", "astride", "two blocks"])
@pytest.mark.parametrize("alone", [True, False], ids=["whole region", "middle of a region"])
def test_a_checkpointed_segment_is_predicted(model: str, precision: Precision, segment: str, alone: bool) -> None:
    """Forward without a graph, then the same once more with one. Inside a region the input is let go after forward, and
    what is recomputed goes on to the next segment."""
    spec, sublayers = case(model, precision, segment, (2, 7))
    torch.set_num_threads(1)
    place = Segment(0, 0, "segment", sublayers, region=0, starts_region=alone, ends_region=alone)
    dry, again, sizes = Ledger(), Ledger(), Sizes.of(spec)
    book(dry, OpKind.FORWARD, sizes, place)
    book(again, OpKind.RECOMPUTE, sizes, place)

    run = Run(spec, sublayers)
    kept = run.activation
    assert allocator_turns(lambda: run.forward_without_graph(keeps_input=alone), kept, alone) == booked(dry.events)
    run.entry, run.activation = kept, None
    del kept
    got = turns(allocator_changes(lambda: run.recompute(drops_output=alone)))
    assert got == booked(again.events)


def allocator_turns(function: Callable[[], None], entry: torch.Tensor | None, keeps_input: bool) -> list[Turn]:
    """The turns of `function`; the test itself holds `entry`, so its free is added where the executor would free it."""
    assert entry is not None
    changes = allocator_changes(function)
    if not keeps_input:
        changes.append((Category.TEMPORARY, -entry.untyped_storage().nbytes()))
    return turns(changes)


@pytest.mark.parametrize("seq", [1, 31, 32, 33, 191, 192, 193, 511, 512, 767, 768, 1024])
@pytest.mark.parametrize("model", ["tiny", "llama-groups"])
def test_the_flash_kernels_tiles_follow_seq(model: str, seq: int) -> None:
    """Forward: scores q k, a maximum and a sum a row 2 q, the output q head_dim, in fp32. Backward: 2 q k and q.

    q is 32 queries, 64 from 192 tokens on, 256 from 768 on; k is 512 keys; both at most seq. Heads of 11 (an odd
    width) and of 14, grouped by two.
    """
    spec = RunSpec(model=replace(MODELS[model], positions=2048), batch=1, seq=seq, ranks=1)
    sublayers = (spec.model.sublayers[1],)
    query = 256 if seq >= 768 else 64 if seq >= 192 else 32
    query, key = min(query, seq), min(512, seq)
    forward, backward = predicted(spec, sublayers, watched=False)
    scratch = [event.delta_nbytes for event in forward if event.category is Category.KERNEL_SCRATCH]
    assert max(scratch) == 4 * (query * key + 2 * query + query * spec.model.head_dim)
    assert {8 * query * key, 4 * query} <= {event.delta_nbytes for event in backward}
    assert_as_the_allocator_says(spec, sublayers)
