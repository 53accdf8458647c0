"""A question's case: the right figure of a step, and the same figure of a step that is one thing otherwise.

Steps that are otherwise: another strategy, another unit, another recipe. Where no code here has such a step there is
none, and nobody is asked about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from zeroviz.category import Category
from zeroviz.collectives import CollectiveOp
from zeroviz.errors import SpecError
from zeroviz.guess_figure import Asked, Figure, amounts, figure_of, figure_of_rank
from zeroviz.implementations import PAIRS
from zeroviz.memory import rest_by_category
from zeroviz.peak import peak_of
from zeroviz.predict import predict
from zeroviz.settings import LIBRARY_DEFAULTS
from zeroviz.spec import Implementation, Offload, RunSpec, Strategy, Zero1Form
from zeroviz.trace import RankTrace, Trace

Key = Category | CollectiveOp


@dataclass(frozen=True, slots=True)
class Misconception:
    """A wrong figure: what it is in a few words, its bytes, and the sentence that says what is wrong with it."""

    name: str
    nbytes: int
    sentence: str


class Case:
    """What is asked, the right figure, and how the wrong ones are worked out."""

    def __init__(self, predicted: Trace, what: Asked, rank: int) -> None:
        self.spec, self.what, self.rank = predicted.spec, what, rank
        self.exact: Figure = figure_of(predicted, what, rank)
        self.seen: RankTrace = predicted.ranks[rank]

    def figure_of(self, spec: RunSpec) -> Figure:
        """The same figure of another spec; of its last rank where it has fewer ranks."""
        return figure_of_rank(predict(spec).ranks[min(self.rank, spec.ranks - 1)], self.what)

    def nbytes_of(self, spec: RunSpec) -> int:
        """The bytes of it. Our own code's memory has closed forms, which spare the walk."""
        if spec.impl is Implementation.OWN and self.what is Asked.REST:
            return sum(nbytes for category, nbytes in rest_by_category(spec).items() if category.on_device)
        if spec.impl is Implementation.OWN and self.what is Asked.PEAK:
            return peak_of(spec).total
        return self.figure_of(spec).nbytes

    def of(self, keys: Iterable[Key]) -> int:
        """Bytes of these parts in the right figure."""
        wanted = frozenset(keys)
        return sum(part.nbytes for part in self.exact.parts if part.key in wanted)

    def without(self, name: str, keys: Iterable[Key], what: str) -> Iterator[Misconception]:
        """The right figure without these parts, where it has any."""
        if left_out := self.of(keys):
            words = f"Your figure leaves out {what}, {amounts(left_out)[0]}."
            yield Misconception(name, self.exact.nbytes - left_out, words)

    def changed(self, name: str, sentence: str, spec: RunSpec | None) -> Iterator[Misconception]:
        """The figure of a step that is otherwise; nothing where there is no such step."""
        if spec is not None:
            yield Misconception(name, self.nbytes_of(spec), sentence)

    def rivals(self, likely: Mapping[Strategy, tuple[Strategy, ...]]) -> Iterator[tuple[Strategy, RunSpec | None]]:
        """The strategies that this one is taken for, each with the step under it, None where no code here has it."""
        for strategy in likely[self.spec.strategy]:
            # Nobody takes a library for a strategy that is only FSDP's.
            if strategy is not Strategy.SHARD_GRAD_OP or strategy in PAIRS[self.spec.impl]:
                yield strategy, with_strategy(self.spec, strategy)

    def whose(self, strategy: Strategy, spec: RunSpec | None) -> str:
        """`ZeRO-2`, `ZeRO-2 in our own code` where the code that is asked about has none."""
        is_ours = spec is not None and spec.impl is not self.spec.impl
        return f"{strategy.label} in {Implementation.OWN.label}" if is_ours else strategy.label


# ---- steps that are otherwise ----


def replaced(spec: RunSpec, **changes: object) -> RunSpec | None:
    """`spec` with changes; None where that is no step."""
    try:
        return replace(spec, **changes)  # type: ignore[arg-type]
    except SpecError:
        return None


def in_our_own_code(spec: RunSpec) -> RunSpec | None:
    """The same step run by our own code, which does what the papers say and no more."""
    return replaced(spec, impl=Implementation.OWN, settings=LIBRARY_DEFAULTS)


def with_strategy(spec: RunSpec, strategy: Strategy) -> RunSpec | None:
    """The same step under a strategy without groups, in the same code if that has it and else in ours; options that it
    has not are off. None where no code here has it with the rest of the spec."""
    impl = spec.impl if strategy in PAIRS[spec.impl] else Implementation.OWN
    is_param_offload_lost = spec.offload.moves_params and not strategy.shards_param
    changes: dict[str, object] = {
        "strategy": strategy,
        "impl": impl,
        "shard_ranks": None,
        "prefetch": spec.prefetch if strategy.shards_param else 0,
        "zero1_form": Zero1Form.REDUCE_SCATTER,
        "no_sync": None,
        "offload": Offload.OPTIMIZER if is_param_offload_lost else spec.offload,
    }
    kept = spec.settings if impl is spec.impl else LIBRARY_DEFAULTS
    # A setting may belong to one strategy alone, as the persistence threshold does to DeepSpeed's stage 3.
    return replaced(spec, **changes, settings=kept) or replaced(spec, **changes, settings=LIBRARY_DEFAULTS)


def rest_by_hand(spec: RunSpec, strategy: Strategy) -> int:
    """What `strategy` holds at rest in the recipe of `spec`, without padding and offloading: see `zeroviz.memory`."""
    recipe, numel = spec.recipe, spec.model.num_params
    states = (
        (numel * recipe.param.itemsize, strategy.shards_param),
        (numel * recipe.grad.itemsize, strategy.shards_grad),
        (numel * recipe.master.itemsize if recipe.master else 0, strategy.shards_optimizer),
        (recipe.moments_nbytes(numel), strategy.shards_optimizer),
    )
    return sum(-(-nbytes // spec.ranks) if is_divided else nbytes for nbytes, is_divided in states)
