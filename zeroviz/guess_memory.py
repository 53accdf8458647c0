"""The figures of memory that people have in mind instead of the right one, each with its error named.

None is invented: a figure is that of the same step with one thing changed, or the right one without something that it
holds. What is believed: sharding divides all by N, SHARD_GRAD_OP is the paper's ZeRO-2, what is held at rest is the
peak, activations are sharded too, the optimizer is small, sixteen bytes a parameter is a law.
"""

from __future__ import annotations

from collections.abc import Iterator

from zeroviz.category import Category
from zeroviz.compare import place_text
from zeroviz.guess_case import Case, Misconception, in_our_own_code, replaced, rest_by_hand, with_strategy
from zeroviz.guess_figure import Asked, amounts
from zeroviz.implementations import WITHOUT_UNITS
from zeroviz.models import Family
from zeroviz.partition import plan_for
from zeroviz.policies import KEEP_ALL
from zeroviz.schedule import Phase
from zeroviz.spec import (
    Checkpointing,
    DType,
    Implementation,
    Precision,
    Strategy,
    UnitKind,
    UnitPolicy,
)

PARAMS = (Category.SHARDED_PARAM, Category.UNSHARDED_PARAM)
GRADS = (Category.SHARDED_GRAD, Category.UNSHARDED_GRAD)
OPTIMIZER = (Category.MASTER_PARAM, Category.OPTIMIZER_STATE)
ACTIVATIONS = (Category.ACTIVATION, Category.TEMPORARY, Category.INPUT)
BUFFERS = (Category.ALL_GATHER_BUFFER, Category.REDUCE_SCATTER_BUFFER, Category.BUCKET)

LIKELY = {
    Strategy.DDP: (Strategy.ZERO3, Strategy.ZERO1, Strategy.ZERO2),
    Strategy.ZERO1: (Strategy.DDP, Strategy.ZERO2, Strategy.ZERO3),
    Strategy.ZERO2: (Strategy.DDP, Strategy.ZERO3, Strategy.ZERO1),
    Strategy.ZERO3: (Strategy.ZERO2, Strategy.DDP, Strategy.SHARD_GRAD_OP, Strategy.ZERO1),
    Strategy.SHARD_GRAD_OP: (Strategy.ZERO2, Strategy.ZERO3, Strategy.DDP, Strategy.ZERO1),
    Strategy.HYBRID_SHARD: (Strategy.ZERO3, Strategy.ZERO2, Strategy.DDP),
    Strategy.MEGATRON_OPTIM: (Strategy.DDP, Strategy.ZERO3, Strategy.ZERO2),
}
"""The strategies that each is taken for, the likeliest first."""


def at_rest(case: Case) -> Iterator[Misconception]:
    """What is taken for the bytes between two steps, the likeliest first."""
    strategies = list(_strategies(case))
    yield from _host_counted(case)
    yield from strategies[:2]
    yield from case.without("no optimizer", OPTIMIZER, "the optimizer's states")
    yield from strategies[2:]
    yield from _recipes(case)
    yield from _moments(case)
    yield from _left_out(case)
    yield _parameters_alone(case)
    yield from _by_the_book(case)
    yield _elements(case)


def at_peak(case: Case) -> Iterator[Misconception]:
    """What is taken for the bytes at the peak, the likeliest first."""
    strategies = list(_strategies(case))
    place = place_text(case.seen.peak())
    words = f"Your figure is what is held between two steps; the peak is in {place}."
    yield Misconception("at rest", case.seen.rest_nbytes, words)
    yield from _host_counted(case)
    is_update = case.seen.peak().phase == Phase.OPTIMIZER.value
    what = "what the update borrows" if is_update else "activations and temporaries"
    yield from case.without("no temporaries" if is_update else "no activations", ACTIVATIONS, what)
    yield from strategies[:1]
    yield from _all_divided(case)
    yield from _one_unit(case)
    yield from _recomputed(case)
    yield from strategies[1:]
    yield from case.without("no optimizer", OPTIMIZER, "the optimizer's states")
    yield from _recipes(case)
    yield from _left_out(case)
    yield _parameters_alone(case)
    yield from _by_the_book(case)
    yield _elements(case)


# ---- other strategies ----


def _strategies(case: Case) -> Iterator[Misconception]:
    for strategy, spec in case.rivals(LIKELY):
        if spec is None and case.what is not Asked.REST:
            continue
        nbytes = rest_by_hand(case.spec, strategy) if spec is None else case.nbytes_of(spec)
        whose, difference = case.whose(strategy, spec), nbytes - case.exact.nbytes
        holds_less, state = _state_words(case, strategy)
        words = f"Your figure is that of {whose}: {state}."
        # A library's buffers, or a shard beside the whole, may weigh more than what is divided.
        if holds_less is not None and holds_less != (difference < 0):
            text = amounts(abs(difference))[0] if difference else "nothing"
            words = f"Your figure is that of {whose}, which holds {text} {'less' if difference < 0 else 'more'}."
        yield Misconception(strategy.label, nbytes, words)


def _state_words(case: Case, there: Strategy) -> tuple[bool | None, str]:
    """What of the state is otherwise, `parameters are not divided there`, and whether a rank so holds less there; None
    where that depends on numbers."""
    spec, here = case.spec, case.spec.strategy
    divided_here, divided_there = _divided(here), _divided(there)
    more = [state for state in divided_there if state not in divided_here]
    less = [state for state in divided_here if state not in divided_there]
    if more:
        return True, f"{_listed(more)} are divided by {spec.ranks:,} there, and whole here"
    if less and not divided_there:
        return False, "nothing is divided there"
    groups = f"by {spec.ranks:,} there, and by the {spec.num_shards:,} ranks of a group here"
    if less and here is Strategy.HYBRID_SHARD and spec.num_replicas > 1:
        return None, f"{_listed(less)} are not divided there; the rest is, {groups}"
    if less:
        return False, f"{_listed(less)} are not divided there"
    if here is Strategy.HYBRID_SHARD:
        return True, f"all is divided {groups}"
    if here.reshards_after_forward:
        return False, "units stay gathered from forward to backward there"
    return True, "a unit is freed after its forward there, and gathered again"


def _divided(strategy: Strategy) -> list[str]:
    states = (
        ("optimizer states", strategy.shards_optimizer),
        ("gradients", strategy.shards_grad),
        ("parameters", strategy.shards_param),
    )
    return [name for name, is_divided in states if is_divided]


def _listed(words: list[str]) -> str:
    """`gradients and parameters`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


# ---- the same strategy, something else ----


def _host_counted(case: Case) -> Iterator[Misconception]:
    if on_host := sum(case.seen.at_rest_on_host.values()):
        words = f"Your figure counts the {amounts(on_host)[0]} that lie in the host's memory."
        yield Misconception("with the host's", case.exact.nbytes + on_host, words)


def _recipes(case: Case) -> Iterator[Misconception]:
    """Other dtypes of the same states."""
    spec, recipe = case.spec, case.spec.recipe
    if recipe.grad is DType.BF16:
        words = "Your figure counts fp32 gradients, 4 bytes a parameter; here they are bf16, 2 bytes."
        yield from case.changed("fp32 gradients", words, replaced(spec, grad_dtype=DType.FP32))
    if recipe.master:
        words = "Your figure is that of pure bf16: no fp32 master, and Adam's states in bf16 as well."
        yield from case.changed("pure bf16", words, replaced(spec, precision=Precision.BF16, grad_dtype=None))
    elif recipe.param is DType.BF16:
        words = "Your figure is that of bf16-mixed: an fp32 master besides, and Adam's states in fp32."
        yield from case.changed("bf16-mixed", words, replaced(spec, precision=Precision.BF16_MIXED))


def _moments(case: Case) -> Iterator[Misconception]:
    """What the optimizer keeps for each parameter."""
    spec, recipe = case.spec, case.spec.recipe
    if recipe.param is DType.FP32 and not spec.offload.moves_optimizer:
        shards = spec.num_shards if spec.strategy.shards_optimizer else 1
        master = -(-spec.model.num_params * DType.FP32.itemsize // shards)
        words = f"Your figure has an fp32 master of {amounts(master)[0]} besides; fp32 parameters need none."
        yield Misconception("with a master", case.exact.nbytes + master, words)
    if recipe.num_moments == 2:
        moment = case.of((Category.OPTIMIZER_STATE,)) // 2
        words = f"Your figure has one of Adam's two numbers for each parameter, m and v, {amounts(moment)[0]} each."
        yield Misconception("one moment", case.exact.nbytes - moment, words)


def _left_out(case: Case) -> Iterator[Misconception]:
    yield from case.without("no buffers", BUFFERS, f"the buffers of {case.spec.impl.label}")
    yield from case.without("no gradients", GRADS, "the gradients")


def _parameters_alone(case: Case) -> Misconception:
    params = case.of(PARAMS)
    words = f"Your figure is the parameters' alone; all else is {amounts(case.exact.nbytes - params)[0]} more."
    return Misconception("parameters alone", params, words)


def _by_the_book(case: Case) -> Iterator[Misconception]:
    """Our own code holds what the papers count; others hold more, or less."""
    label, impl = case.spec.strategy.label, case.spec.impl
    if impl is not Implementation.OWN:
        words = f"Your figure is that of {label} by the book; {impl.label} holds otherwise."
        yield from case.changed(f"{label} by the book", words, in_our_own_code(case.spec))


def _elements(case: Case) -> Misconception:
    return Misconception("elements", case.spec.model.num_params, "Your figure counts parameters, and not their bytes.")


# ---- what a step adds ----


def _all_divided(case: Case) -> Iterator[Misconception]:
    """The activations too, as if the batch were cut as well."""
    spec, whole = case.spec, with_strategy(case.spec, Strategy.DDP)
    if whole is None or spec.num_shards == 1:
        return
    words = f"Your figure divides all by {spec.num_shards:,}, activations too; each rank has a batch of its own."
    if spec.model.family is Family.BARE:
        words = f"Your figure divides all by {spec.num_shards:,}; here some of it is whole, at least for a moment."
    yield Misconception("all divided", -(-case.nbytes_of(whole) // spec.num_shards), words)


def _one_unit(case: Case) -> Iterator[Misconception]:
    """The whole model gathered at once."""
    spec, num_units = case.spec, len(plan_for(case.spec).units)
    if spec.impl not in WITHOUT_UNITS and spec.strategy.shards_grad and num_units > 1:
        what = "gathers the whole model at once" if spec.strategy.shards_param else "has all gradients whole at once"
        words = f"Your figure {what}; here it is cut into {num_units:,} units."
        yield from case.changed("one unit", words, replaced(spec, unit=UnitPolicy(UnitKind.MODEL)))


def _recomputed(case: Case) -> Iterator[Misconception]:
    spec = case.spec
    if spec.checkpointing:
        words = "Your figure keeps all activations; here blocks are recomputed in backward."
        yield from case.changed("no checkpointing", words, replaced(spec, checkpointing=KEEP_ALL))
    elif spec.model.layers:
        words = "Your figure is that with checkpointing; here all activations are kept for backward."
        yield from case.changed("checkpointing", words, replaced(spec, checkpointing=Checkpointing(1)))
