"""The dtype of each copy of the model states by itself: which recipe has it, and what else changes on the way there.

[Note: copies apart] Not every set of four dtypes exists. torch's optimizers keep their moments in the dtype of what
they update: of the master where there is one, else of the parameters; the one exception is the 8-bit AdamW. And a
master is an fp32 copy of parameters that are not fp32 themselves. All that does exist is a precision with a gradient
dtype and an optimizer, so a choice here is a choice of these three, and RunSpec has no dtype of its own for a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from zeroviz.errors import SpecError
from zeroviz.facts import QUANTIZED_BLOCK_NUMEL
from zeroviz.implementations import PAIRS, implementations_of
from zeroviz.members import Members
from zeroviz.precision import DType, Optimizer, Precision, Recipe, recipe_of
from zeroviz.spec import RunSpec
from zeroviz.strategy import Implementation, Strategy
from zeroviz.toggles import settle, spec_of


class Copy(Members):
    """A copy of the model states, by what it is called. The order is that of a recipe's sum."""

    PARAM = "parameters"
    """What is held between steps; what is computed with may be another, see `Precision.FSDP_MIXED`."""
    GRAD = "gradients"
    MASTER = "master"
    """The optimizer's own fp32 copy of the parameters, or none."""
    MOMENTS = "moments"

    @property
    def choices(self) -> tuple[DType | None, ...]:
        """The dtypes that a copy has in some recipe."""
        if self is Copy.MASTER:
            return (None, DType.FP32)
        return (DType.FP32, DType.BF16, DType.INT8) if self is Copy.MOMENTS else (DType.FP32, DType.BF16)

    @property
    def verb(self) -> str:
        return "is" if self is Copy.MASTER else "are"


class Change(NamedTuple):
    """What to choose for a dtype. toggles: none where the copy has it already. notes: what else changes, and why."""

    toggles: Mapping[str, Any]
    notes: tuple[str, ...]


Dtypes = Mapping[Copy, DType | None]
"""Of each copy; None where there is no such copy."""


def dtypes_of(spec: RunSpec) -> Dtypes:
    """The dtype of each copy."""
    return _dtypes(spec.recipe, spec.impl, spec.strategy)


def _dtypes(recipe: Recipe, impl: Implementation, strategy: Strategy) -> Dtypes:
    """DeepSpeed's optimizer from stage 1 on updates an fp32 partition of its own, whatever the parameters are."""
    has_own = impl is Implementation.DEEPSPEED and strategy is not Strategy.DDP
    return {
        Copy.PARAM: recipe.param,
        Copy.GRAD: recipe.grad,
        Copy.MASTER: DType.FP32 if has_own else recipe.master,
        Copy.MOMENTS: recipe.moments if recipe.num_moments else None,
    }


def sum_words(spec: RunSpec) -> str:
    """What a parameter costs in bytes, `2 + 2 + 4 + 8 = 16`: a term for each copy, in order, 0 for none."""
    terms = {copy: dtype.itemsize if dtype else 0 for copy, dtype in dtypes_of(spec).items()}
    terms[Copy.MOMENTS] *= spec.recipe.num_moments
    return f"{' + '.join(map(str, terms.values()))} = {sum(terms.values())}"


def asides(spec: RunSpec) -> tuple[str, ...]:
    """What four dtypes do not tell of a recipe, in sentences."""
    recipe, found = spec.recipe, []
    if recipe.compute is not recipe.param:
        at_rest, compute = recipe.param.value, recipe.compute.value
        found.append(f"Parameters are {at_rest} at rest, gathered and computed with in {compute}.")
    if recipe.num_moments and recipe.moments is not DType.INT8:
        found.append(f"Moments follow what is updated, the {_updated(dtypes_of(spec))}.")
    elif recipe.num_moments:
        found.append(f"Beside int8 moments stands an fp32 scale for every {QUANTIZED_BLOCK_NUMEL:,} elements of each.")
    return tuple(found)


def _updated(dtypes: Dtypes) -> str:
    return "master" if dtypes[Copy.MASTER] else "parameters"


def with_dtype(toggles: Mapping[str, Any], copy: Copy, dtype: DType | None) -> Change:
    """What to choose so that `copy` has `dtype` and as few other copies as can be change; of two equally near recipes
    the one that keeps the earlier copies, so that moments follow what is updated and not the other way round.

    Raises SpecError where no recipe that exists with these toggles has it.
    """
    if dtype not in copy.choices:
        raise SpecError(f"{copy.value} {copy.verb} {_name(dtype)}; allowed are {_or(copy.choices)}.")
    now = _Candidate(*(toggles[name] for name in _Candidate._fields))
    if now.dtypes(toggles)[copy] is dtype:
        return Change({}, ())
    candidates = _candidates(_optimizer_for(now.optimizer, copy, dtype))
    for candidate in sorted(candidates, key=lambda candidate: now.distance(candidate, toggles)):
        if candidate.dtypes(toggles)[copy] is dtype and candidate.exists(toggles):
            return Change(candidate._asdict(), tuple(_notes(now, candidate, toggles, copy)))
    raise SpecError(_refusal(toggles, copy, dtype))


class _Candidate(NamedTuple):
    """A recipe as the three toggles that make it."""

    precision: Precision
    grad_dtype: DType | None
    optimizer: Optimizer

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self.precision, self.grad_dtype, self.optimizer)

    def dtypes(self, toggles: Mapping[str, Any]) -> Dtypes:
        """The dtype of each copy beside the other toggles."""
        return _dtypes(self.recipe, toggles["impl"], toggles["strategy"])

    def distance(self, other: _Candidate, toggles: Mapping[str, Any]) -> tuple[Any, ...]:
        """How far another recipe is. Where all copies agree: a recipe with a name of its own before one with another
        gradient set, the present one before others, and one computed with as it is held before fsdp-mixed."""
        mine, others = self.dtypes(toggles), other.dtypes(toggles)
        changed = [mine[copy] is not others[copy] for copy in Copy]
        casts = other.recipe.compute is not other.recipe.param
        return sum(changed), changed, other.grad_dtype is not None, other.precision is not self.precision, casts

    def exists(self, toggles: Mapping[str, Any]) -> bool:
        """Whether it goes with the other toggles, once they have followed."""
        wanted = {**toggles, **self._asdict()}
        settle(wanted, given=self._asdict())
        try:
            spec_of(wanted)
        except SpecError:
            return False
        return True


def _candidates(optimizer: Optimizer) -> Iterator[_Candidate]:
    for precision, grad in product(Precision, (None, DType.FP32, DType.BF16)):
        if grad is not precision.grad:
            yield _Candidate(precision, grad, optimizer)


def _optimizer_for(present: Optimizer, copy: Copy, dtype: DType | None) -> Optimizer:
    """int8 moments are one optimizer's; to have others from there is to go back to AdamW."""
    if copy is not Copy.MOMENTS:
        return present
    if dtype is DType.INT8:
        return Optimizer.ADAMW_8BIT
    return Optimizer.ADAMW if present is Optimizer.ADAMW_8BIT else present


def _notes(before: _Candidate, after: _Candidate, toggles: Mapping[str, Any], chosen: Copy) -> Iterator[str]:
    """What changed that was not chosen, in sentences."""
    old, new = before.dtypes(toggles), after.dtypes(toggles)
    for copy in Copy:
        if copy is not chosen and new[copy] is not old[copy]:
            why = _why(copy, old, new, chosen) or _nowhere(_who(toggles), copy, old[copy], chosen, new[chosen])
            yield f"{copy.value} {copy.verb} now {_name(new[copy])}: {why}."
    if after.optimizer is not before.optimizer:
        only_int8 = f"{before.optimizer.value} has int8 moments only"
        why = "it alone has int8 moments" if new[chosen] is DType.INT8 else only_int8
        yield f"optimizer is now {after.optimizer.value}: {why}."


def _why(copy: Copy, old: Dtypes, new: Dtypes, chosen: Copy) -> str:
    """What in a recipe makes `copy` change; empty where only the implementation or the strategy does."""
    if copy is Copy.MOMENTS:
        return f"they follow what is updated, the {_updated(new)}"
    if chosen is Copy.MOMENTS and copy in (Copy.PARAM, Copy.MASTER):
        return "the optimizer keeps moments in the dtype of what it updates"
    if copy is Copy.MASTER and new[Copy.PARAM] is DType.FP32:
        return "fp32 parameters are updated themselves"
    if copy is Copy.PARAM and chosen is Copy.MASTER and old[Copy.PARAM] is DType.FP32:
        return "fp32 parameters need no master"
    return ""


def _nowhere(who: str, copy: Copy, dtype: DType | None, chosen: Copy, chosen_dtype: DType | None) -> str:
    """`DeepSpeed has no bf16 parameters without a master`: which two do not meet."""
    if copy is Copy.MASTER:  # say first what is had or not with it
        copy, dtype, chosen, chosen_dtype = chosen, chosen_dtype, copy, dtype
    beside = f"{'with' if chosen_dtype else 'without'} a master"
    if chosen is not Copy.MASTER:
        beside = f"with {_name(chosen_dtype)} {chosen.value}"
    return f"{who} has no {_name(dtype)} {copy.value} {beside} here"


def _who(toggles: Mapping[str, Any]) -> str:
    """Whose doing it is: our own code has every recipe, so there it is the strategy's."""
    impl: Implementation = toggles["impl"]
    strategy: Strategy = toggles["strategy"]
    return strategy.label if impl is Implementation.OWN else impl.label


def _refusal(toggles: Mapping[str, Any], copy: Copy, dtype: DType | None) -> str:
    """What was given, what is allowed, what to do."""
    optimizer: Optimizer = toggles["optimizer"]
    given = f"{copy.value} {copy.verb} {_name(dtype)} with"
    if copy is Copy.MOMENTS and not optimizer.num_moments and dtype is not DType.INT8:
        return f"{given} optimizer {optimizer.value}, which keeps none; use optimizer adamw or sgd-momentum."
    impl, strategy = toggles["impl"], toggles["strategy"]
    if copy is Copy.MASTER:
        allowed, do = ("there is none", "leave it out") if dtype else ("there is always one", "leave it fp32")
    else:
        can = (other for other in copy.choices if _can(toggles, copy, other))
        allowed, do = f"they can be {_or(can)} only", "leave them so"
    elsewhere = " or ".join(_elsewhere(toggles, copy, dtype))
    return (
        f"{given} impl {impl.value} and strategy {strategy.value}, where {allowed}; {do}"
        f"{f', or use {elsewhere}' if elsewhere else ''}."
    )


def _elsewhere(toggles: Mapping[str, Any], copy: Copy, dtype: DType | None) -> list[str]:
    """The implementations of this strategy that have it; where none has, the strategies of this implementation."""
    strategy, impl = toggles["strategy"], toggles["impl"]
    impls = [other for other in implementations_of(strategy) if _can({**toggles, "impl": other}, copy, dtype)]
    if impls:
        return [f"impl {impls[0].value}", *(other.value for other in impls[1:])]
    strategies = [other for other in PAIRS[impl] if _can({**toggles, "strategy": other}, copy, dtype)]
    return [f"strategy {strategies[0].value}", *(other.value for other in strategies[1:])] if strategies else []


def _can(toggles: Mapping[str, Any], copy: Copy, dtype: DType | None) -> bool:
    optimizer = _optimizer_for(toggles["optimizer"], copy, dtype)
    return any(other.dtypes(toggles)[copy] is dtype and other.exists(toggles) for other in _candidates(optimizer))


def _name(dtype: DType | None) -> str:
    return dtype.value if dtype else "none"


def _or(dtypes: Iterable[DType | None]) -> str:
    return " or ".join(map(_name, dtypes))
