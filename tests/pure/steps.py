"""What a predicted step holds and prints, for tests that derive a figure and look for it there."""

from __future__ import annotations

from collections import Counter

from zeroviz.memory import rest_by_category
from zeroviz.partition import Unit, plan_units
from zeroviz.predict import predict
from zeroviz.schedule import OpKind
from zeroviz.spec import RunSpec, UnitPolicy
from zeroviz.tables import render
from zeroviz.trace import Category, Event

GB, GIB = 10**9, 2**30
MODEL = UnitPolicy.parse("model")
# Sizes that nothing divides: uneven shards, padding, an odd number of heads.
UNEVEN = ("tiny", "tiny-llama")


def rest(spec: RunSpec, category: Category) -> int:
    return rest_by_category(spec).get(category, 0)


def rest_nbytes(spec: RunSpec) -> int:
    return sum(rest_by_category(spec).values())


def units_of(spec: RunSpec) -> tuple[Unit, ...]:
    return plan_units(spec.model, spec.unit).units


def events_of(spec: RunSpec) -> tuple[Event, ...]:
    """Rank 0's; ranks differ in padding alone."""
    return tuple(predict(spec).ranks[0].events)


def blocks_made(spec: RunSpec, categories: tuple[Category, ...]) -> Counter[int]:
    """How many blocks of each size the step allocates in these categories."""
    return Counter(event.delta_nbytes for event in events_of(spec) if event.category in categories)


def held_at_loads(spec: RunSpec, category: Category) -> list[int]:
    """What is held in `category` each time a micro-batch is loaded."""
    held, found = rest(spec, category), []
    for event in events_of(spec):
        if event.op == OpKind.LOAD_BATCH.value:
            found.append(held)
        if event.category is category:
            held += event.delta_nbytes
    return found


def text_of(spec: RunSpec) -> str:
    """What `zeroviz predict` prints, line ends and columns undone."""
    return " ".join(render(predict(spec)).split())
