"""Where in a step its collectives and copies stand: a trace says their phase and unit, and not their op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from zeroviz.collectives import CollectiveOp, Group
from zeroviz.course import OpSpan
from zeroviz.link import Transfer
from zeroviz.schedule import OpKind
from zeroviz.wire import Collective

Call = Collective | Transfer

_GATHERS = (OpKind.UNSHARD, OpKind.WAIT_UNSHARD, OpKind.SYNC_PARAM, OpKind.WAIT_SYNC)
_REDUCES = (OpKind.REDUCE_GRAD, OpKind.WAIT_REDUCE)
_REPLICAS = (OpKind.REDUCE_REPLICAS, OpKind.WAIT_REPLICAS)
_COPIES = (OpKind.HOST_STEP, OpKind.UNSHARD, *_REDUCES)


def kind_of(call: Call) -> str:
    """`all_gather fp32 in group`, `to host bf16`."""
    if isinstance(call, Transfer):
        return f"{call.direction.value} {call.dtype}"
    return f"{call.op.value} {call.dtype} {call.group.words}".rstrip()


def nbytes_of(calls: Iterable[Call]) -> dict[str, int]:
    """The bytes of calls of one kind, summed, and of collectives how many ranks take part."""
    sums: dict[str, int] = {}
    num_ranks: dict[str, int] = {}
    for call in calls:
        if isinstance(call, Transfer):
            more = {"nbytes": call.nbytes}
        else:
            more = {"payload_nbytes": call.payload_nbytes, "sent_nbytes": call.sent_nbytes}
            num_ranks = {"num_ranks": call.num_ranks}
        for name, nbytes in more.items():
            sums[name] = sums.get(name, 0) + nbytes
    return sums | num_ranks


def moments_of(calls: Sequence[Call], ops: Sequence[OpSpan]) -> list[int]:
    """The moment at which each call stands.

    Calls of one kind, phase and unit are dealt out, in order and evenly, to the ops of that place that start such
    calls; several of one op are spread over it. Where no op of the place changes what is held, a call stands with the
    one before it.
    """
    by_place: dict[tuple[str, str], list[OpSpan]] = {}
    for span in ops:
        by_place.setdefault((span.phase, span.unit), []).append(span)
    alike: dict[tuple[str, str, str], list[int]] = {}
    for number, call in enumerate(calls):
        alike.setdefault((call.phase, call.unit, kind_of(call)), []).append(number)
    found: dict[int, int] = {}
    for (phase, unit, _), numbers in alike.items():
        if spans := _starting(calls[numbers[0]], by_place.get((phase, unit), [])):
            shares = [(len(spans) * place // len(numbers), number) for place, number in enumerate(numbers)]
            for share, run in groupby(shares, key=lambda pair: pair[0]):
                span, some = spans[share], [number for _, number in run]
                length = span.stop - span.start
                found |= {number: span.start + length * place // len(some) for place, number in enumerate(some)}
    moments: list[int] = []
    for number in range(len(calls)):
        moments.append(found.get(number, moments[-1] if moments else 0))
    return moments


def _starting(call: Call, spans: Sequence[OpSpan]) -> Sequence[OpSpan]:
    """Of the ops of a place those that start such a call, or wait for it where its start changes nothing; else all."""
    for kind in _starters(call):
        if some := [span for span in spans if span.op == kind.value]:
            return some
    return spans


def _starters(call: Call) -> tuple[OpKind, ...]:
    if isinstance(call, Transfer):
        return _COPIES
    if call.op in (CollectiveOp.ALL_GATHER, CollectiveOp.BROADCAST):
        return _GATHERS
    return (*_REPLICAS, *_REDUCES) if call.group is Group.REPLICA else _REDUCES
