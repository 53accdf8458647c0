"""The figures of the wire that people have in mind instead of the right one, each with its error named.

What is believed: every strategy sends what DDP does, ZeRO-3 twice as much, ZeRO-2 more than DDP; a ring's traffic grows
with the ranks, or falls with them; an all-reduce sends its payload once; elements are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from zeroviz.collectives import CollectiveOp, Group
from zeroviz.guess_case import Case, Misconception, replaced
from zeroviz.guess_figure import Part, amounts, part_label
from zeroviz.spec import DType, RunSpec, Strategy, Zero1Form

LIKELY = {
    Strategy.DDP: (Strategy.ZERO3,),
    Strategy.ZERO1: (Strategy.ZERO3, Strategy.DDP),
    Strategy.ZERO2: (Strategy.ZERO3, Strategy.DDP),
    Strategy.ZERO3: (Strategy.DDP, Strategy.SHARD_GRAD_OP),
    Strategy.SHARD_GRAD_OP: (Strategy.ZERO3, Strategy.DDP),
    Strategy.HYBRID_SHARD: (Strategy.ZERO3, Strategy.DDP),
    Strategy.MEGATRON_OPTIM: (Strategy.ZERO3, Strategy.DDP),
}
"""The strategies that each is taken for. ZeRO-1 and ZeRO-2 send what DDP does, and then it is no wrong figure."""


def sent(case: Case) -> Iterator[Misconception]:
    """What is taken for the bytes sent in a step, the likeliest first."""
    strategies = list(_strategies(case))
    yield from strategies[:1]
    yield from _inside_groups(case)
    yield from _reductions(case)
    yield from _gradient_alone(case)
    yield from _micro_batches(case)
    yield from strategies[1:]
    yield from _rings(case)
    yield from _widths(case)


def _strategies(case: Case) -> Iterator[Misconception]:
    for strategy, spec in case.rivals(LIKELY):
        if spec is not None:
            words = f"Your figure is that of {case.whose(strategy, spec)}: {_sent_words(case, spec)}."
            yield Misconception(strategy.label, case.nbytes_of(spec), words)


def _sent_words(case: Case, there: RunSpec) -> str:
    """What is sent there and what here, by collective."""
    theirs, ours = case.figure_of(there).parts, case.exact.parts
    texts = iter(amounts(*(part.nbytes for part in (*theirs, *ours))))

    def words(parts: tuple[Part, ...]) -> str:
        return " + ".join(f"{next(texts)} {part_label(part.key, case.spec)}" for part in parts)

    return f"{words(theirs)}; here it is {words(ours)}"


def _inside_groups(case: Case) -> Iterator[Misconception]:
    """HYBRID_SHARD as if its groups had nothing to tell each other."""
    across = sum(total.sent_nbytes for total in case.seen.wire() if total.group is Group.REPLICA)
    if across:
        words = f"Your figure leaves out what crosses the groups, the sum of their gradients, {amounts(across)[0]}."
        yield Misconception("inside groups", case.exact.nbytes - across, words)


def _reductions(case: Case) -> Iterator[Misconception]:
    """An all-reduce for a reduce-scatter and the other way, and an all-reduce counted as one pass."""
    spec, exact = case.spec, case.exact.nbytes
    if scattered := case.of((CollectiveOp.REDUCE_SCATTER,)):
        words = "Your figure all-reduces the gradient; a rank needs its own part alone, so it is reduce-scattered."
        yield Misconception("all-reduced", exact + scattered, words)
    if spec.zero1_form is Zero1Form.ALL_REDUCE:
        words = "Your figure is that of a reduce-scatter; here the gradient is all-reduced and a slice of it is used."
        yield from case.changed("reduce-scatter", words, replaced(spec, zero1_form=Zero1Form.REDUCE_SCATTER))
    if reduced := case.of((CollectiveOp.ALL_REDUCE,)):
        words = (
            "Your figure counts an all-reduce once; it is a reduce-scatter and then an all-gather, so it sends twice."
        )
        yield Misconception("all-reduce once", exact - reduced // 2, words)


def _gradient_alone(case: Case) -> Iterator[Misconception]:
    reduced = case.of((CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER))
    if reduced < case.exact.nbytes:
        words = (
            f"Your figure is the gradient's; parameters are sent as well, {amounts(case.exact.nbytes - reduced)[0]}."
        )
        yield Misconception("gradient alone", reduced, words)


def _micro_batches(case: Case) -> Iterator[Misconception]:
    number, one = case.spec.accumulation, replaced(case.spec, accumulation=1, no_sync=None)
    if number > 1 and one is not None:
        words = f"Your figure is that of one micro-batch; this step has {number:,}, and sends in more than one of them."
        nbytes = case.nbytes_of(one)
        yield Misconception("one micro-batch", nbytes, words)
        words = f"Your figure sends everything {number:,} times; some of it is sent once a step."
        yield Misconception("every micro-batch", number * nbytes, words)


def _rings(case: Case) -> Iterator[Misconception]:
    """Without the ring's (n - 1)/n, without a ring, and as if a rank sent its own part alone."""
    totals = case.seen.wire()
    numbers = {total.num_ranks for total in totals}
    payload = sum(total.op.ring_passes * total.payload_nbytes for total in totals)
    if len(numbers) == 1 and (n := max(numbers)) > 2:
        words = f"Your figure is one rank's part; in a ring each rank passes on {n - 1:,} parts."
        yield Misconception("own part", case.exact.nbytes // (n - 1), words)
    share = f", {max(numbers) - 1:,}/{max(numbers):,} here" if len(numbers) == 1 else ""
    words = f"Your figure is the whole payload's; a ring sends (n - 1)/n of it{share}."
    yield Misconception("whole payload", payload, words)
    to_each = sum((total.num_ranks - 1) * total.payload_nbytes for total in totals)
    words = (
        "Your figure sends all to each of the others; in a ring a byte is sent on once a pass, however many they are."
    )
    yield Misconception("to each other", to_each, words)


def _widths(case: Case) -> Iterator[Misconception]:
    """Everything in another width, and elements for bytes."""
    totals = case.seen.wire()
    widths = {DType(total.dtype) for total in totals}
    if widths == {DType.BF16}:
        yield Misconception("in fp32", 2 * case.exact.nbytes, "Your figure sends fp32; here it is bf16, 2 bytes.")
    elif widths == {DType.FP32}:
        yield Misconception("in bf16", case.exact.nbytes // 2, "Your figure sends bf16; here it is fp32, 4 bytes.")
    numel = sum(total.sent_nbytes // DType(total.dtype).itemsize for total in totals)
    yield Misconception("elements", numel, "Your figure counts elements, and not their bytes.")
