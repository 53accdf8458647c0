"""Results remembered by the identity of what they were made of.

The ranks of a prediction share their events, thousands of them on thousands of ranks; hashing them would cost as much
as walking them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")

MAX_WEIGHT = 64
"""Of all results that are kept; an ordinary one weighs 1."""

# A result is kept together with what it was made of, so that an identity in use is never another object's.
_kept: OrderedDict[tuple[object, ...], tuple[tuple[object, ...], Any, int]] = OrderedDict()
_lock = Lock()


def recall(
    what: str, made_of: tuple[object, ...], compute: Callable[[], T], *, weigh: Callable[[T], int] = lambda _: 1
) -> T:
    """`compute()`, or what it gave for the very same objects before. They must not change; the latest few are kept.

    weigh: how many ordinary results this one counts for, by its memory. The latest is kept whatever it weighs.
    """
    key = (what, *map(id, made_of))
    with _lock:
        found = _kept.get(key)
    if found is not None:
        before: T = found[1]
        return before
    result = compute()
    with _lock:
        _kept[key] = (made_of, result, weigh(result))
        total = sum(each for _, _, each in _kept.values())
        while total > MAX_WEIGHT and len(_kept) > 1:
            _, (_, _, each) = _kept.popitem(last=False)
            total -= each
    return result
