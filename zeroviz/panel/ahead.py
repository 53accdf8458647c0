"""Pictures drawn ahead: those of the states one step of a slider away, made while the page rests.

The page keeps them and, when the slider moves there, shows them at once; the kernel's answer then finds them in place.
They are what the state draws when it comes, which tests/view/test_ahead.py compares, or there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroviz.panel.pictures import as_text, picture
from zeroviz.state import Explorer

SLIDERS = ("ranks", "shard_ranks", "batch", "seq", "accumulation")
"""The toggles that are sliders over a list of values."""


def pictures_ahead(
    state: Explorer,
    asked: Mapping[str, Any],
    offered: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    aspect: float = 0.0,
) -> dict[str, dict[str, str]]:
    """The pictures of these names, each as one text, by the place on its slider of the state that they show.

    asked: by the page: a `toggle`, and the places `at` which. offered: by toggle, the values along its slider. A place
    that is not on it, or whose state is refused, has no pictures. aspect: as for `picture`.
    """
    toggle, places = asked.get("toggle"), asked.get("at")
    if not isinstance(toggle, str) or toggle not in offered or not isinstance(places, list):
        return {}
    values = offered[toggle]
    ahead: dict[str, dict[str, str]] = {}
    for place in places:
        if type(place) is not int or not 0 <= place < len(values):
            continue
        beside = state.beside(**{toggle: values[place]})
        if beside is not None:
            scene = beside.scene()
            parts = [picture(name, beside, scene, aspect) for name in names]
            ahead[str(place)] = {name: as_text(data) for part in parts for name, data in part.items()}
    return ahead
