"""What fits a budget of bytes: the smallest number of ranks, the largest batch, the longest sequence. Exactly.

[Note: exact searches] What a rank holds at a moment is a sum of tensors, see [Note: linear moments] in peak.py, and
the peak is the largest of these sums.

- In batch and in seq every tensor grows or stays, so every sum does, and so does the largest: the peak never falls.
  What fits is a range from 1 up, and bisection finds its end.
- In N it may rise: a gathered buffer is padded to a multiple of N. The same sums over unpadded buffers are a floor
  that never rises, for a shard is ceil(numel / N) and all else does not depend on N. Bisection finds the first N whose
  floor fits; no smaller one can. From there every N is tried, and padding decides: nearly always the first one fits.
  HYBRID_SHARD's peak depends on its group's G alone, so N = G fits, or no N does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from zeroviz.errors import SpecError
from zeroviz.memory import rest_by_category
from zeroviz.models import Family
from zeroviz.peak import floor_of, peak_of
from zeroviz.schedule import Phase
from zeroviz.spec import RunSpec, Strategy, UnitKind
from zeroviz.trace import Category, Peak

MAX_RANKS = 4096
MAX_COUNT = 2**40  # what RunSpec takes as batch and as seq


@dataclass(frozen=True, slots=True)
class PeakLedger:
    """What a rank holds at its peak, in the parts by which one thinks about cutting it. In bytes."""

    at_rest: int
    """Of the states held between steps, what is there at the peak: before backward the gradient is not. Padding
    included."""
    gathered: int
    """Whole parameters beyond those at rest (ZeRO-3, SHARD_GRAD_OP)."""
    gradients: int
    """Whole gradients beyond those at rest, where gradients are sharded."""
    update: int
    """The optimizer's temporaries, where the peak is there."""
    activations: int
    temporaries: int
    """Tensors on their way in forward and backward."""
    inputs: int
    """The batch itself."""

    @property
    def total(self) -> int:
        return self.at_rest + self.of_units + self.of_batch

    @property
    def of_units(self) -> int:
        """What smaller units cut."""
        return self.gathered + self.gradients + self.update

    @property
    def of_batch(self) -> int:
        """What a smaller batch or a shorter sequence cuts."""
        return self.activations + self.temporaries + self.inputs


@dataclass(frozen=True, slots=True)
class Answer:
    """`value` is None if nothing fits; `spec` is then the attempt that comes closest, and `reason` says why not."""

    value: int | None
    spec: RunSpec
    peak: Peak
    ledger: PeakLedger
    spare_nbytes: int
    reason: str = ""

    @property
    def host_nbytes(self) -> int:
        """What the rank's host holds of it between steps, where states are offloaded."""
        return sum(nbytes for category, nbytes in rest_by_category(self.spec).items() if category.on_host)


@dataclass(frozen=True, slots=True)
class Row:
    """The answers for one strategy and one recipe. A bare count has no batch, and so no answers about it."""

    spec: RunSpec
    smallest_ranks: Answer
    largest_batch: Answer | None
    longest_seq: Answer | None


def budget_row(spec: RunSpec, budget_nbytes: int) -> Row:
    """All answers for `spec`: N at its batch and seq, batch and seq at its N."""
    if budget_nbytes < 1:
        raise SpecError(f"A budget of {budget_nbytes:,} bytes was given; it must be at least 1.")
    is_bare = spec.model.family is Family.BARE
    return Row(
        spec,
        smallest_ranks(spec, budget_nbytes),
        None if is_bare else largest_batch(spec, budget_nbytes),
        None if is_bare else longest_seq(spec, budget_nbytes),
    )


def smallest_ranks(spec: RunSpec, budget_nbytes: int) -> Answer:
    """The smallest N up to MAX_RANKS with which `spec` fits."""
    found = _smallest_ranks(spec, budget_nbytes)
    if found is not None:
        return _answer(found, replace(spec, ranks=found), budget_nbytes)
    closest = _answer(None, replace(spec, ranks=_roomiest_ranks(spec)), budget_nbytes)
    return replace(closest, reason=f"{_no_ranks_help(spec)}: {_excess(closest, budget_nbytes)}")


def largest_batch(spec: RunSpec, budget_nbytes: int) -> Answer:
    """The largest batch on each of `spec.ranks` ranks."""
    return _largest(spec, budget_nbytes, MAX_COUNT, lambda batch: replace(spec, batch=batch), "one sequence")


def longest_seq(spec: RunSpec, budget_nbytes: int) -> Answer:
    """The longest sequence with `spec.batch` of them on each of `spec.ranks` ranks; GPT-2's positions are a limit."""
    most = spec.model.positions if spec.model.family is Family.GPT2 else MAX_COUNT
    return _largest(spec, budget_nbytes, most, lambda seq: replace(spec, seq=seq), "one token")


def ledger_of(spec: RunSpec, peak: Peak) -> PeakLedger:
    """The parts of `peak`. They sum to its total."""
    rest = {category: nbytes for category, nbytes in rest_by_category(spec).items() if category.on_device}
    held = peak.by_category
    temporaries = held.get(Category.TEMPORARY, 0)
    is_update = peak.phase == Phase.OPTIMIZER.value

    def beyond_rest(category: Category) -> int:
        return max(0, held.get(category, 0) - rest.get(category, 0))

    return PeakLedger(
        at_rest=sum(min(nbytes, held.get(category, 0)) for category, nbytes in rest.items()),
        gathered=beyond_rest(Category.UNSHARDED_PARAM),
        gradients=beyond_rest(Category.UNSHARDED_GRAD),
        update=temporaries if is_update else 0,
        activations=held.get(Category.ACTIVATION, 0),
        temporaries=0 if is_update else temporaries,
        inputs=held.get(Category.INPUT, 0),
    )


def _roomiest_ranks(spec: RunSpec) -> int:
    """An N at which a rank holds as little as can be. Shard groups are copies, so one of them does as well as many."""
    return MAX_RANKS if spec.shard_ranks is None else spec.shard_ranks


def _no_ranks_help(spec: RunSpec) -> str:
    if spec.shard_ranks is None:
        return f"no N up to {MAX_RANKS:,} helps"
    return f"more shard groups of {spec.shard_ranks:,} are copies and do not help, larger ones might (--shard-ranks)"


def _smallest_ranks(spec: RunSpec, budget_nbytes: int) -> int | None:
    if spec.shard_ranks is not None:
        one_group = replace(spec, ranks=spec.shard_ranks)
        return one_group.ranks if peak_of(one_group).total <= budget_nbytes else None
    least = _first(MAX_RANKS, lambda ranks: floor_of(replace(spec, ranks=ranks)) <= budget_nbytes)
    if least is None:
        return None
    fits = (n for n in range(least, MAX_RANKS + 1) if peak_of(replace(spec, ranks=n)).total <= budget_nbytes)
    return next(fits, None)


def _largest(spec: RunSpec, budget_nbytes: int, most: int, at: Callable[[int], RunSpec], one: str) -> Answer:
    """The largest value up to `most` that fits; `one` is what the smallest value, 1, means in words."""
    above = _first(most, lambda value: peak_of(at(value)).total > budget_nbytes)
    value = most if above is None else above - 1
    if value:
        return _answer(value, at(value), budget_nbytes)
    closest = _answer(None, at(1), budget_nbytes)
    ranks = _smallest_ranks(at(1), budget_nbytes)
    if ranks is None:
        with_most = _answer(None, replace(at(1), ranks=_roomiest_ranks(spec)), budget_nbytes)
        whatever = f"whatever N up to {MAX_RANKS:,}" if spec.shard_ranks is None else _no_ranks_help(spec)
        reason = f"not even {one} fits, {whatever}: {_excess(with_most, budget_nbytes)}"
    elif ranks > spec.ranks:
        reason = f"{one} needs at least {ranks:,} ranks: more ranks first"
    else:
        reason = f"{one} fits on {ranks:,} ranks, but padding to a multiple of {spec.ranks:,} is too much: fewer ranks"
    return replace(closest, reason=reason)


def _first(most: int, holds: Callable[[int], bool]) -> int | None:
    """The first of 1..most for which `holds`, which stays true once it is; None if there is none.

    It doubles before it halves, so that no number far beyond the answer is tried.
    """
    low, high = 0, 1  # `holds` is false up to low
    while not holds(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _answer(value: int | None, spec: RunSpec, budget_nbytes: int) -> Answer:
    peak = peak_of(spec)
    return Answer(value, spec, peak, ledger_of(spec, peak), budget_nbytes - peak.total)


def _excess(answer: Answer, budget_nbytes: int) -> str:
    """Which part of the closest attempt is the largest, and so what to cut first."""
    ledger, spec, unit = answer.ledger, answer.spec, answer.peak.unit
    nbytes, what, cut = max(
        (ledger.of_batch, "activations, temporaries and the batch, which no strategy divides,", _cut_batch(spec)),
        (ledger.at_rest, "the states at rest", _cut_states(spec)),
        (ledger.of_units, _what_units_hold(spec, unit), _cut_units(spec, unit)),
    )
    if nbytes > budget_nbytes:
        return f"{what} alone exceed the budget; {cut} first"
    return f"no part alone exceeds the budget but their sum does, and most of it are {what.rstrip(',')}; {cut} first"


def _cut_batch(spec: RunSpec) -> str:
    is_kept = not spec.checkpointing and spec.model.family is not Family.BARE
    recompute = " or recompute (--checkpointing block)" if is_kept else ""
    if spec.batch > 1:
        return f"cut --batch{recompute}"
    return f"cut --seq{recompute}" if spec.seq > 1 else "take a smaller model"


def _cut_states(spec: RunSpec) -> str:
    if spec.strategy.shards_param:
        offload = "" if spec.offload.moves_optimizer else "offload (--offload params), "
        return f"{offload}take a narrower --precision or a smaller model"
    return "shard more (--strategy zero3)" if spec.ranks > 1 else "take more ranks and shard more (--strategy zero3)"


def _what_units_hold(spec: RunSpec, unit: str) -> str:
    if spec.strategy is Strategy.SHARD_GRAD_OP:
        return "the whole parameters, which are kept from forward to backward,"
    return f"whole buffers and temporaries of the unit in use ({unit})"


def _cut_units(spec: RunSpec, unit: str) -> str:
    if spec.strategy is Strategy.SHARD_GRAD_OP:
        return "free them after forward (--strategy zero3)"
    if spec.prefetch:
        return "gather fewer units ahead (--prefetch 0)"
    if spec.async_reduce:
        return "wait for each reduction (--async-reduce false)"
    # No unit is smaller than a layer, and the embedding and the head are layers.
    if unit in ("embed", "head", "root") or spec.unit.kind is UnitKind.LAYER:
        return "take a narrower --precision or a smaller model"
    if spec.model.family is Family.BARE:
        return "name a model, which has smaller units than a bare count,"
    is_coarse = spec.unit.kind is UnitKind.MODEL or spec.unit.count > 1
    return f"take smaller units (--unit {'block' if is_coarse else 'layer'})"
