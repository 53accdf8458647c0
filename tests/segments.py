"""A segment's forward, recomputation or backward alone, by the tokens and changes that a prediction is made of."""

from __future__ import annotations

from zeroviz.bookings import compute_changes
from zeroviz.ledger import Ledger
from zeroviz.outline import segment_tokens
from zeroviz.partition import Segment
from zeroviz.schedule import OpKind
from zeroviz.tape import Sizes


def book(ledger: Ledger, op: OpKind, sizes: Sizes, segment: Segment) -> None:
    """Book FORWARD, RECOMPUTE or BACKWARD of a segment, the unit's gradient buffer left out."""
    for token in segment_tokens(op, segment):
        ledger.replay(compute_changes(token, sizes))
