"""A stretch of changes moment by moment, counted from its start: worked out once for each stretch, which is shared.

A moment follows each change of what the device or its host holds. This machine's artefacts, kernels' scratch and the
backend's copies, make no moment: they belong to the one they fall into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from zeroviz.category import Category

Change = tuple[Category, int]
Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments of a stretch. All bytes are counted from the stretch's start.

    changes: those that make a moment. device, host: what is held more at each moment. above: the most of artefacts
    more while it lasts; lead: the same from the start to the first moment. top, top_here: the most that the device
    holds more, the start included, without and with artefacts. net: what the changes leave, by category.
    """

    changes: tuple[Change, ...]
    device: Offsets
    host: Offsets
    above: Offsets
    lead: int
    top: int
    top_here: int
    net: tuple[Change, ...]
    net_device: int
    net_host: int
    net_artefacts: int

    @property
    def here(self) -> Offsets:
        """The most that the device holds more at each moment together with artefacts."""
        return tuple(map(sum, zip(self.device, self.above, strict=True)))

    @classmethod
    def of(cls, stretch: Iterable[Change]) -> Moments:
        changes: list[Change] = []
        device: list[int] = []
        host: list[int] = []
        above: list[int] = []
        net: Counter[Category] = Counter()
        on_device = on_host = artefacts = lead = top_here = 0
        for change in stretch:
            category, nbytes = change
            if category.is_artefact:
                artefacts += nbytes
                if above:
                    above[-1] = max(above[-1], artefacts)
                else:
                    lead = max(lead, artefacts)
            else:
                on_device += nbytes if category.on_device else 0
                on_host += nbytes if category.on_host else 0
                changes.append(change)
                device.append(on_device)
                host.append(on_host)
                above.append(artefacts)
                net[category] += nbytes
            top_here = max(top_here, on_device + artefacts)
        return cls(
            changes=tuple(changes),
            device=tuple(device),
            host=tuple(host),
            above=tuple(above),
            lead=lead,
            top=max(0, *device) if device else 0,
            top_here=top_here,
            net=tuple((category, nbytes) for category, nbytes in net.items() if nbytes),
            net_device=on_device,
            net_host=on_host,
            net_artefacts=artefacts,
        )
