"""predict(spec) -> Trace: the step as arithmetic, without a tensor.

It goes through the ops that `cluster.own` executes, in the same order, as the tokens of the step's outline: what a
token books is worked out once (`zeroviz.bookings`), however many blocks are alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import compress

from zeroviz import activations
from zeroviz.activations import NBYTES_PER_TOKEN_ID as NBYTES_PER_TOKEN_ID
from zeroviz.activations import input_nbytes as input_nbytes
from zeroviz.bookings import Bookings
from zeroviz.events import Events
from zeroviz.memory import rest_by_category, rest_padding_nbytes, step_counter_nbytes
from zeroviz.models import Family
from zeroviz.outline import outline
from zeroviz.partition import alike_stretches
from zeroviz.rank_trace import AlikeRanks
from zeroviz.schedule import Order
from zeroviz.spec import Implementation, RunSpec
from zeroviz.trace import Origin, RankTrace, Trace
from zeroviz.traffic import collectives_of, transfers_of
from zeroviz.witness.registry import PREDICTED

BARE_NOTE = (
    "A bare parameter count says nothing of layers, so the peak counts parameters, gradients and optimizer only; "
    "name a model to see activations."
)


@lru_cache(maxsize=512)
def predict(spec: RunSpec) -> Trace:
    """The predicted trace of one step: every rank's rest, events and collectives.

    Our own ranks differ in padding only, so they share one list of events.
    """
    notes = (BARE_NOTE,) if spec.model.family is Family.BARE else activations.formula_notes(spec.model)
    if spec.impl is not Implementation.OWN:
        return Trace(Origin.PREDICTED, spec, PREDICTED[spec.impl](spec), notes=notes)
    first = RankTrace(
        rank=0,
        rest=rest_by_category(spec),
        events=_events(spec),
        collectives=collectives_of(spec),
        transfers=transfers_of(spec),
        step_counter_nbytes=step_counter_nbytes(spec),
    )
    ranks = AlikeRanks(
        [
            (stretch, replace(first, rank=stretch.start, padding_nbytes=rest_padding_nbytes(spec, stretch.start)))
            for stretch in alike_stretches(spec)
        ]
    )
    return Trace(Origin.PREDICTED, spec, ranks, notes=notes)


def _events(spec: RunSpec) -> Events:
    step = outline(Order.of(spec))
    bookings = Bookings(spec, step)
    booked = [bookings.of(token) for token in step.tokens]
    stretches = [booked[number] for number in step.sequence]
    return Events(tuple(compress(step.wheres, stretches)), tuple(filter(None, stretches)))
