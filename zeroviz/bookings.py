"""What each token of an outline books: the changes of an op, or of a sublayer within one, in bytes.

Equal tokens book equal changes, so a step of eighty blocks is worked out by looking at a few dozen tokens. Sizes are
the spec's; the order of things is the outline's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import chain

from zeroviz import artefacts
from zeroviz.activations import input_nbytes
from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.events import Change, Changes
from zeroviz.memory import rest_places
from zeroviz.outline import Outline, Token
from zeroviz.partition import buffer_numel, shard_numel, update_numels
from zeroviz.schedule import OpKind, last_wait
from zeroviz.spec import RunSpec
from zeroviz.sublayers import backward_halves, dry_pass, passes, release
from zeroviz.tape import Sizes
from zeroviz.traffic import gradient_op


def compute_changes(token: Token, sizes: Sizes) -> Iterable[Change]:
    """Of a sublayer's forward or backward, or of what is let go after a segment."""
    if token.released:
        row = sizes.rows(sizes.model.hidden)
        match token.op:
            case OpKind.FORWARD:
                return ((Category.ACTIVATION, -row),)
            case OpKind.RECOMPUTE:
                return ((Category.TEMPORARY, -row),)
        return release(sizes, *token.released)
    assert token.sublayer is not None
    if token.dry:
        return dry_pass(sizes, *token.sublayer)
    if token.half is not None:
        return backward_halves(sizes, *token.sublayer)[token.half]
    return passes(sizes, *token.sublayer)[token.op is OpKind.BACKWARD]


class Bookings:
    """What the tokens of `spec`'s outline book.

    wholes, shards: elements of a whole buffer and of its shard, by slot. slices: of the shard's that are updated at a
    time. has_clone: whether a gradient's reduction, among several ranks, has gloo clone the buffer until its wait.
    """

    def __init__(self, spec: RunSpec, step: Outline) -> None:
        self.spec, self.step = spec, step
        self.sizes = Sizes.of(spec)
        self.wholes = [buffer_numel(buffer, spec) for buffer in step.samples]
        self.shards = [shard_numel(buffer, spec) for buffer in step.samples]
        self.slices = [update_numels(buffer, spec) for buffer in step.samples]
        self.shards_grad, self.moves_params = spec.strategy.shards_grad, spec.offload.moves_params
        self.sends = spec.num_shards > 1
        self.has_clone = self.sends and gradient_op(spec) is CollectiveOp.REDUCE_SCATTER
        self._shared: dict[Hashable, Changes] = {}

    def of(self, token: Token) -> Changes:
        """What `token` books; equal stretches are one, and so are their sums."""
        computes = token.sublayer or token.released
        made = compute_changes(token, self.sizes) if computes else self._of_op(token)
        if isinstance(made, Changes):
            return made
        key = tuple(made)
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = Changes(key)
        return found

    def _of_op(self, token: Token) -> Iterable[Change]:
        spec, recipe, slot = self.spec, self.spec.recipe, token.slot
        param, grad = self.wholes[slot] * recipe.param.itemsize, self.wholes[slot] * recipe.grad.itemsize
        match token.op:
            case OpKind.UNSHARD:
                return ((Category.UNSHARDED_PARAM, param), *self._gathered(param))
            case OpKind.RESHARD:
                return ((Category.UNSHARDED_PARAM, -param),)
            case OpKind.BACKWARD:  # the unit's buffer, see `Token.begins`
                return ((Category.UNSHARDED_GRAD, grad),)
            case OpKind.REDUCE_GRAD:
                return self._reduce_grad(token, grad)
            case OpKind.WAIT_REDUCE | OpKind.WAIT_REPLICAS:
                return self._wait(token, grad)
            case OpKind.DROP_GRAD:
                numels = self.shards if self.shards_grad else self.wholes
                place, width = rest_places(spec).grad, recipe.grad.itemsize
                return ((place, -numels[slot] * width) for slot in self.step.slot_of)
            case OpKind.LOAD_BATCH:
                return ((Category.INPUT, input_nbytes(spec)),)
            case OpKind.DROP_BATCH:
                return ((Category.INPUT, -input_nbytes(spec)),)
            case OpKind.CLIP_GRAD:
                shards = tuple(self.shards[slot] for slot in self.step.slot_of)
                return chain.from_iterable(artefacts.clip_of(shards, recipe.grad))
            case OpKind.OPTIMIZER_STEP:
                return self._update(self._updated(token))
            case OpKind.HOST_STEP:
                return self._update_on_host(self._updated(token))
            case OpKind.SYNC_PARAM:
                return self._gathered(param)
        return ()  # waits for parameters, the zeroing of a buffer that stays, all-reduces in place

    def _gathered(self, nbytes: int) -> Changes | tuple[()]:
        """gloo's copies of an all-gather; a group of one rank sends nothing."""
        return artefacts.gather_copies(nbytes) if self.sends else ()

    def _reduce_grad(self, token: Token, grad: int) -> Iterator[Change]:
        if token.begins:
            yield Category.SHARDED_GRAD, self.shards[token.slot] * self.spec.recipe.grad.itemsize
        if self.has_clone:
            yield Category.BACKEND_COPY, grad

    def _wait(self, token: Token, grad: int) -> Iterator[Change]:
        """gloo lets the clone go; after the last reduction the gradient is divided by N and its buffer freed. With
        parameters on the host the reduced slice goes into the host's shard; from the second micro-batch on it is a copy
        that is added."""
        if self.has_clone and token.op is OpKind.WAIT_REDUCE:
            yield Category.BACKEND_COPY, -grad
        if token.op is not last_wait(self.spec.strategy):
            return
        width = self.spec.recipe.grad.itemsize
        yield from artefacts.number(width)
        if not self.shards_grad:
            return
        if self.moves_params and not token.begins:
            copy = self.shards[token.slot] * width
            yield from ((Category.HOST_TEMPORARY, copy), (Category.HOST_TEMPORARY, -copy))
        yield Category.UNSHARDED_GRAD, -grad

    def _updated(self, token: Token) -> tuple[int, ...]:
        """The slots of the buffers that an optimizer's op updates."""
        return self.step.slot_of if self.spec.optimizer.steps_together else (token.slot,)

    def _update(self, slots: tuple[int, ...], category: Category = Category.TEMPORARY) -> Changes:
        """The update, slice by slice of each unit, or of all in one go. `Optimizer` says what it makes."""
        recipe = self.spec.recipe
        slices = tuple(chain.from_iterable(self.slices[slot] for slot in slots))
        cast = recipe.update if recipe.casts_grad else None
        return artefacts.update_of_slices(self.spec.optimizer, slices, recipe.moments, cast, category)

    def _update_on_host(self, slots: tuple[int, ...]) -> Iterator[Change]:
        """Gradients down (unless they are there), the update among the host's copies, parameters up (likewise)."""
        recipe, host = self.spec.recipe, Category.HOST_TEMPORARY
        update = self._update(slots, host)
        if self.moves_params:
            yield from update
            return
        grads = [self.shards[slot] * recipe.grad.itemsize for slot in slots]
        yield from ((host, nbytes) for nbytes in grads)
        yield from update
        yield from ((host, -nbytes) for nbytes in grads)
        if recipe.update is not recipe.param:
            for slot in slots:
                narrow = self.shards[slot] * recipe.param.itemsize
                yield from ((host, narrow), (host, -narrow))
