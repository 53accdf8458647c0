"""peak_of(spec): the peak of the predicted step in microseconds, without making an event.

It equals `predict(spec).ranks[0].peak()` in every field and for every spec; tests/pure/test_peak.py compares the two.

[Note: linear moments] At any moment a rank holds a set of tensors. The size of each is a whole multiple of n = batch
seq, of seq, of a constant, or of the elements of some unit's whole buffer w, shard s or slice l that is updated at a
time (Megatron's one buffer over all units is like a unit here). Which tensors they are depends on the step's order and
on the recipe, but not on batch, seq or N. So with all these fixed, what is held at a moment is a linear form

    a n + b seq + c + sum over unit sizes (d w + e s + f q + g l)    s = ceil(numel / N), w = N s; DDP: s = w = numel

with G in place of N under HYBRID_SHARD, q = ceil(s / 2048), the scales of a quantized moment, l = ceil(s / slices),

and the peak is the largest of the step's forms, the first of them where several are equal. The variables are ordered:
n >= seq >= 1, and w >= s >= 1; of two units the larger one's w - s, s and q are no less than the smaller one's. So a
form can be written by the steps n - seq, seq - 1, 1, (w - s) - (w - s of the next smaller unit) and so on, of which
none is below 0. A moment whose coefficients of these are nowhere above those of another one is never larger. It is no
candidate if the other is earlier, or always larger, by a step that is never 0: of the thousands of moments of a step
about ten are left, whatever the model.

[Note: repeats] Blocks are alike, so stretches of a step repeat: a pattern of changes with the net D, r times. At one
place of the pattern the repetitions hold base, base + D, ..., base + (r - 1) D. Whatever the sign of D, the largest of
these is the first or the last, and the first one is the earliest where D = 0. So the first and the last repetition are
visited and (r - 2) D is added in between. This is said of bytes, not of coefficients, so it holds for all sizes alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from operator import add, ge, mul, neg

from zeroviz.activations import NBYTES_PER_TOKEN_ID
from zeroviz.bookings import compute_changes
from zeroviz.memory import RestPlaces
from zeroviz.models import Family, ModelShape
from zeroviz.outline import Outline, Token, outline
from zeroviz.schedule import OpKind, Order, last_wait
from zeroviz.spec import DType, Recipe, RunSpec, Strategy
from zeroviz.tape import Sizes
from zeroviz.trace import CATEGORY_ORDER, Category, Peak

# Coefficients of (n, seq, 1), and after them of (w, s, q, l) for each distinct size of a unit.
Form = tuple[int, ...]
Terms = tuple[tuple[int, int], ...]
"""The places of a form's coefficients and these, where they are not 0."""
NUM_FIXED = 3
CONSTANT = 2
NUM_PER_SIZE = 4
SHARD, SLICE = 1, 3  # their places among the four
AT_REST = -1  # the position of the moment before the step


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of the step: what is held in all and by category, and the outline's position that led to it."""

    total: Form
    held: Mapping[Category, Form]
    position: int


@dataclass(frozen=True)
class Moments:
    """The candidates for the peak in order of time; their forms speak of the distinct unit sizes of `step`."""

    step: Outline
    candidates: tuple[Moment, ...]
    _known: dict[int, tuple[tuple[Category, Terms], ...]] = field(default_factory=dict, compare=False, repr=False)

    def peak(self, values: Sequence[int]) -> Peak:
        """The peak for these values of the variables."""
        totals = self.totals(values)
        best = max(totals)
        number = totals.index(best)
        position = self.candidates[number].position
        where = ("at rest", "", "") if position == AT_REST else self.step.where(position)
        held = [(category, sum([c * values[i] for i, c in terms])) for category, terms in self._held(number)]
        return Peak(best, *where, {category: nbytes for category, nbytes in held if nbytes})

    def totals(self, values: Sequence[int]) -> list[int]:
        """What each candidate holds for these values of the variables."""
        alike, where, forms = self._apart
        held = sum([c * values[i] for i, c in alike])
        apart = [values[i] for i in where]
        return [held + sum(map(mul, form, apart)) for form in forms]

    @cached_property
    def _apart(self) -> tuple[Terms, tuple[int, ...], tuple[Form, ...]]:
        """The terms that are alike in all candidates; the places of the others, and what each candidate has there."""
        columns = list(zip(*(moment.total for moment in self.candidates), strict=True))
        where = tuple(i for i, column in enumerate(columns) if len(set(column)) > 1)
        forms = tuple(tuple(moment.total[i] for i in where) for moment in self.candidates)
        return tuple((i, c) for i, c in _terms(self.candidates[0].total) if i not in where), where, forms

    def _held(self, number: int) -> tuple[tuple[Category, Terms], ...]:
        """What a candidate holds by category, without the many coefficients that are 0."""
        found = self._known.get(number)
        if found is None:
            forms = self.candidates[number].held
            found = tuple((category, _terms(forms[category])) for category in CATEGORY_ORDER if category in forms)
            self._known[number] = found
        return found

    def values(self, spec: RunSpec, *, padded: bool = True) -> list[int]:
        """What the variables are for `spec`; whole buffers without their padding where `padded` is False."""
        values = [spec.batch * spec.seq, spec.seq, 1]
        for numel, num_slices in self.step.sizes:
            shard = numel if spec.strategy is Strategy.DDP else -(-numel // spec.num_shards)
            is_whole = spec.strategy is Strategy.DDP or not padded
            whole = numel if is_whole else shard * spec.num_shards
            values += (whole, shard, spec.recipe.num_scales(shard), -(-shard // num_slices))
        return values


def peak_of(spec: RunSpec) -> Peak:
    """The first moment at which the sum is largest: what `predict(spec).ranks[0].peak()` finds."""
    moments = moments_of(spec)
    return moments.peak(moments.values(spec))


def floor_of(spec: RunSpec) -> int:
    """What the peak would be if whole buffers had no padding: never above the peak, and never rising with N."""
    moments = moments_of(spec)
    return max(moments.totals(moments.values(spec, padded=False)))


def moments_of(spec: RunSpec) -> Moments:
    """The candidates for the peak of `spec`, the same for whatever batch, seq and ranks."""
    order = Order.of(spec)
    if order.accumulation > 3:  # nothing new comes then: the first, the last and one between hold all there is
        order = order._replace(accumulation=3)
    return _moments(order, spec.recipe)


@lru_cache(maxsize=2048)
def _moments(order: Order, recipe: Recipe) -> Moments:
    step = outline(order)
    steps = _Steps(tuple(slot for slot, _ in sorted(enumerate(step.sizes), key=lambda pair: pair[1])))
    pieces = [_piece(token, step, order, recipe, steps) for token in step.tokens]
    walk = _Walk(_rest(step, order, recipe, steps.width), steps)
    for run in step.runs:
        held, total = walk.held, walk.total
        for position in range(run.start, run.start + run.period):
            walk.visit(pieces[step.sequence[position]], position)
        if run.count > 1:
            walk.repeat_since(held, total, run.count - 2)
            last = run.start + (run.count - 1) * run.period
            for position in range(last, last + run.period):
                walk.visit(pieces[step.sequence[position]], position)
    # Their totals by the variables again: what they hold.
    found = ((_sum(moment.held.values(), steps.width), moment.held, moment.position) for moment in walk.found)
    return Moments(step, tuple(Moment(*each) for each in found))


@dataclass(frozen=True, slots=True)
class _Steps:
    """Forms by the steps between the ordered variables, see [Note: linear moments]. smallest_first: the slots of the
    unit sizes, by their elements."""

    smallest_first: tuple[int, ...]

    @property
    def width(self) -> int:
        """How many coefficients a form has, by the variables and by the steps alike."""
        return NUM_FIXED + NUM_PER_SIZE * len(self.smallest_first)

    def of(self, form: Form) -> Form:
        """Coefficients of n - seq, seq - 1, 1; then, for each size, of what w - s, s and q have more than the next
        smaller one, and of l."""
        n, seq, one, *_ = form
        sizes: list[tuple[int, ...]] = []
        over = shards = scales = 0
        for slot in reversed(self.smallest_first):  # what a small unit has, the larger ones have too
            w, s, q, slices = form[NUM_FIXED + NUM_PER_SIZE * slot :][:NUM_PER_SIZE]
            over, shards, scales = over + w, shards + w + s, scales + q
            sizes.append((over, shards, scales, slices))
        return (n, n + seq, n + seq + one, *chain.from_iterable(reversed(sizes)))

    def is_above(self, total: Form, other: Form) -> bool:
        """Whether a form that is nowhere below the other one is above it by a step that is never 0: the constant, the
        smallest unit's s, or a slice."""
        lasting = (CONSTANT, NUM_FIXED + SHARD, *range(NUM_FIXED + SLICE, self.width, NUM_PER_SIZE))
        return any(total[i] > other[i] for i in lasting if i < self.width)


class _Walk:
    """What is held so far, and the moments that no other one rules out. See [Note: linear moments].

    `held` and `total` are replaced and never changed, so a candidate may keep them: (total, what was held, what came to
    it, position). Totals are by steps, what is held by variables.
    """

    def __init__(self, held: Mapping[Category, Form], steps: _Steps) -> None:
        self.steps = steps
        self.held = held
        self.total = steps.of(_sum(held.values(), steps.width))
        self.candidates: list[tuple[Form, Mapping[Category, Form], Mapping[Category, Form], int]] = [
            (self.total, held, {}, AT_REST)
        ]

    @property
    def found(self) -> tuple[Moment, ...]:
        """The candidates, in order of time."""
        return tuple(Moment(total, _merge(held, more), position) for total, held, more, position in self.candidates)

    def change(self, held: Mapping[Category, Form], total: Form) -> None:
        """Add to what is held."""
        self.held = _merge(self.held, held)
        self.total = tuple(map(add, self.total, total))

    def consider(self, held: Mapping[Category, Form], total: Form, position: int) -> None:
        """Take a later moment up, at `held` more than now, unless one before is never smaller."""
        total = tuple(map(add, self.total, total))
        for candidate in reversed(self.candidates):
            if all(map(ge, candidate[0], total)):
                return
        self.candidates = [
            candidate
            for candidate in self.candidates
            if not (all(map(ge, total, candidate[0])) and self.steps.is_above(total, candidate[0]))
        ]
        self.candidates.append((total, self.held, held, position))

    def visit(self, piece: _Piece, position: int) -> None:
        for crest in piece.crests:
            self.consider(crest.held, crest.total, position)
        self.change(piece.net, piece.net_total)

    def repeat_since(self, held: Mapping[Category, Form], total: Form, times: int) -> None:
        """Repeat what changed since then. See [Note: repeats]."""
        net = {
            category: tuple(times * (now - before) for now, before in zip(form, held[category], strict=True))
            if category in held
            else tuple(times * now for now in form)
            for category, form in self.held.items()
        }
        self.change(net, tuple(times * (now - before) for now, before in zip(self.total, total, strict=True)))


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a token changes: its net, and the moments within it that can be its largest, counted from its start. Totals
    are by steps, as a walk's are."""

    net: Mapping[Category, Form]
    net_total: Form
    crests: tuple[Moment, ...]


def _summarize(changes: Iterable[tuple[Category, Form]], steps: _Steps) -> _Piece:
    walk = _Walk({}, steps)
    for category, form in changes:
        held, total = {category: form}, steps.of(form)
        walk.consider(held, total, 0)
        walk.change(held, total)
    # The start holds nothing: it is the moment before the token, which has been considered.
    return _Piece(walk.held, walk.total, tuple(moment for moment in walk.found if moment.held))


def _rest(step: Outline, order: Order, recipe: Recipe, width: int) -> dict[Category, Form]:
    """What `zeroviz.memory.rest_by_category` says of the device, as forms: so many units of a size hold so many times
    its w, s or q; none is a slice."""
    place = RestPlaces.of(order.strategy, order.offload, recipe)

    def form(whole: int = 0, shard: int = 0, scales: int = 0) -> Form:
        sizes = ((count * whole, count * shard, count * scales, 0) for count in step.sizes.values())
        return (*(0,) * NUM_FIXED, *chain.from_iterable(sizes))

    def state(sharded: bool, itemsize: int) -> Form:
        return form(shard=itemsize) if sharded else form(whole=itemsize)

    rest = {
        place.param: state(order.strategy.shards_param, recipe.param.itemsize),
        place.grad: state(order.strategy.shards_grad, recipe.grad.itemsize),
        place.moments: form(
            shard=recipe.num_moments * recipe.moments.itemsize, scales=recipe.num_moments * DType.FP32.itemsize
        ),
    }
    if place.master:
        rest[place.master] = form(shard=recipe.update.itemsize)
    return {category: form for category, form in rest.items() if category.on_device}


def _piece(token: Token, step: Outline, order: Order, recipe: Recipe, steps: _Steps) -> _Piece:
    """What `zeroviz.bookings` books for this token, as forms."""
    if token.sublayer or token.released or token.op in (OpKind.LOAD_BATCH, OpKind.DROP_BATCH):
        return _compute_piece(token, order.model, recipe, steps)
    param, grad, ends = recipe.param.itemsize, recipe.grad.itemsize, last_wait(order.strategy)
    strategy, shards_grad = order.strategy, order.strategy.shards_grad
    whole = NUM_FIXED + NUM_PER_SIZE * token.slot

    def change(category: Category, itemsize: int, at: int = whole) -> tuple[Category, Form]:
        return category, tuple(itemsize if i == at else 0 for i in range(steps.width))

    changes: list[tuple[Category, Form]] = []
    match token.op:
        case OpKind.UNSHARD:
            changes = [change(Category.UNSHARDED_PARAM, param)]
        case OpKind.RESHARD:
            changes = [change(Category.UNSHARDED_PARAM, -param)]
        case OpKind.DROP_GRAD:
            place = RestPlaces.of(strategy, order.offload, recipe).grad
            changes = [(place, tuple(map(neg, _rest(step, order, recipe, steps.width)[place])))]
        case OpKind.BACKWARD:  # the unit's buffer, see `Token.begins`
            changes = [change(Category.UNSHARDED_GRAD, grad)]
        case OpKind.REDUCE_GRAD if token.begins:
            changes = [change(Category.SHARDED_GRAD, grad, whole + SHARD)]
        case OpKind.WAIT_REDUCE | OpKind.WAIT_REPLICAS if shards_grad and token.op is ends:
            changes = [change(Category.UNSHARDED_GRAD, -grad)]
        case OpKind.CLIP_GRAD:  # the sum of squares, and beside it one norm at a time
            made = 2 * [change(Category.TEMPORARY, DType.FP32.itemsize, CONSTANT)]
            changes = [*made, *((category, tuple(map(neg, form))) for category, form in made)]
        case OpKind.OPTIMIZER_STEP:
            # The cast of another gradient, then the optimizer's temporaries; of all units, or of the token's.
            slots = range(len(step.sizes)) if order.optimizer.steps_together else (token.slot,)
            counts = list(step.sizes.values()) if order.optimizer.steps_together else [1] * len(step.sizes)
            cast = [recipe.update.itemsize] if recipe.casts_grad else []
            for itemsize in (*cast, *[recipe.moments.itemsize] * order.optimizer.num_temporaries):
                changes += [
                    change(Category.TEMPORARY, counts[slot] * itemsize, NUM_FIXED + NUM_PER_SIZE * slot + SLICE)
                    for slot in slots
                ]
            changes += [(category, tuple(map(neg, form))) for category, form in changes]
    return _summarize(changes, steps)


@lru_cache(maxsize=4096)
def _compute_piece(token: Token, model: ModelShape, recipe: Recipe, steps: _Steps) -> _Piece:
    """A sublayer's forward or backward, what is let go after it, or the batch."""
    if token.op in (OpKind.LOAD_BATCH, OpKind.DROP_BATCH):
        sign = 1 if token.op is OpKind.LOAD_BATCH else -1
        batch = tuple(sign * coefficient for coefficient in input_form(model, recipe))
        changes = [(Category.INPUT, batch)]
    else:
        # The sizes' coefficients of n, seq and 1 from three probes: a + b + c, 2 a + b + c and 2 a + 2 b + c.
        # What kernels borrow is no part of the peak, and no linear form.
        probes = [
            [change for change in compute_changes(token, sizes) if change[0].on_device]
            for sizes in (Sizes(model, recipe, *each, in_place=True) for each in ((1, 1), (2, 1), (1, 2)))
        ]
        changes = [
            (category, (n, seq, one - n - seq))
            for (category, one), (_, two), (_, four) in zip(*probes, strict=True)
            for n, seq in ((two - one, four - two),)
        ]
    padding = (0,) * (steps.width - NUM_FIXED)
    return _summarize([(category, (*form, *padding)) for category, form in changes], steps)


def input_form(model: ModelShape, recipe: Recipe) -> Form:
    """`zeroviz.activations.input_nbytes` as coefficients of n, seq and 1."""
    if model.family is Family.BARE:
        return (0, 0, 0)
    tables = 2 * (model.head_dim // 2) * recipe.compute.itemsize if model.family.is_rotary else 0
    return (2 * NBYTES_PER_TOKEN_ID, tables, 0)


def _terms(form: Form) -> Terms:
    return tuple((i, coefficient) for i, coefficient in enumerate(form) if coefficient)


def _sum(forms: Iterable[Form], width: int) -> Form:
    total: Form = (0,) * width
    for form in forms:
        total = tuple(map(add, total, form))
    return total


def _merge(held: Mapping[Category, Form], more: Mapping[Category, Form]) -> dict[Category, Form]:
    merged = dict(held)
    for category, form in more.items():
        merged[category] = tuple(map(add, merged[category], form)) if category in merged else form
    return merged
