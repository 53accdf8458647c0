"""The fields of a parsed config.json, typed. Every refusal names the field, its value and what is allowed; every
default that fills a missing field is written down."""

from __future__ import annotations

from typing import Any

from zeroviz.errors import SpecError

MAX_FIELD = 10**9
MAX_SHOWN = 60  # characters of a value in a message


class Fields:
    """Typed access to a config's fields; `filled` says which were not there and what was taken instead.

    family: whose defaults these are, as its authors write it.
    """

    def __init__(self, config: dict[str, Any], name: str, family: str) -> None:
        self._config = config
        self.name, self.family = name, family
        self.filled: list[str] = []
        self._of_no_matter: list[str] = []

    def notes(self) -> tuple[str, ...]:
        """What was filled, one sentence each; in the last one what changes values and no byte."""
        if not self._of_no_matter:
            return tuple(self.filled)
        last = (
            f"Not in the config either, and of no matter to memory: {', '.join(self._of_no_matter)} ({self.family}'s "
            "defaults)."
        )
        return (*self.filled, last if self.filled else last.replace(" either", "", 1))

    def has(self, key: str) -> bool:
        """Whether the field is there and says something."""
        return self._config.get(key) is not None

    def value(self, key: str) -> Any:
        return self._config.get(key)

    def is_null(self, key: str) -> bool:
        """Whether the field is there and null."""
        return key in self._config and self._config[key] is None

    def fill(self, key: str, taken: str, why: str = "") -> None:
        """Note that `key` was filled. why: what the default is made of; the family's by itself otherwise."""
        state = "null" if self.is_null(key) else "not"
        made = why or f"{self.family}'s default"
        self.filled.append(f"{key} is {state} in the config; {taken}, {made}, was taken.")

    def same(self, key: str, other: str) -> None:
        """Two names of one number: both may stand there if they say the same."""
        values = self._config.get(key), self._config.get(other)
        if None not in values and values[0] != values[1]:
            raise SpecError(
                f"The config of {self.name!r} has {key} = {shown(values[0])} and {other} = {shown(values[1])}; they "
                "are one number, leave one of them out."
            )

    def size(self, key: str) -> int:
        """A whole number that must be there."""
        if not self.has(key):
            raise SpecError(f"The config of {self.name!r} lacks {key!r}; add it as a whole number of at least 1.")
        return self._whole(key)

    def count(self, key: str, default: int, why: str = "") -> int:
        if not self.has(key):
            self.fill(key, f"{default:,}", why)
            return default
        return self._whole(key)

    def _whole(self, key: str) -> int:
        value = self._config[key]
        # bool is an int in Python; `"num_hidden_layers": true` is a mistake, not one layer.
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_FIELD:
            raise SpecError(
                f"The config of {self.name!r} has {key} = {shown(value)}; it must be a whole number from 1 to 1e9."
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        if not self.has(key):
            self.fill(key, str(default).lower())
            return default
        value = self._config[key]
        if not isinstance(value, bool):
            raise SpecError(f"The config of {self.name!r} has {key} = {shown(value)}; it must be true or false.")
        return value

    def positions(self, key: str, default: int) -> int:
        """The longest sequence of a model with rotary positions, which bounds nothing in memory."""
        if not self.has(key):
            self._of_no_matter.append(f"{key} {default:,}")
            return default
        return self._whole(key)

    def real(self, key: str, default: float, *, inside: str = "") -> float:
        """A positive number that changes values and no byte; from the object `inside` if it stands there."""
        value = self._config.get(key)
        outer = self._config.get(inside) if inside else None
        if value is None and isinstance(outer, dict):
            value = outer.get(key)
        if value is None:
            self._of_no_matter.append(f"{key} {default:g}")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise SpecError(f"The config of {self.name!r} has {key} = {shown(value)}; it must be a positive number.")
        return float(value)

    def one_of(self, key: str, allowed: tuple[str, ...], default: str) -> None:
        """An activation, all of which keep as much."""
        if not self.has(key):
            self._of_no_matter.append(f"{key} {default}")
        elif self._config[key] not in allowed:
            raise SpecError(
                f"The config of {self.name!r} has {key} = {shown(self._config[key])}; supported are "
                f"{', '.join(allowed)}."
            )

    def quotient(self, numerator: str, denominator: str, values: tuple[int, int]) -> int:
        if values[0] % values[1]:
            raise SpecError(
                f"The config of {self.name!r} has {numerator} = {values[0]} and {denominator} = {values[1]}; "
                f"the second must divide the first ({values[0]} % {values[1]} = {values[0] % values[1]})."
            )
        return values[0] // values[1]


def shown(value: Any) -> str:
    """A value as a message shows it: its beginning, if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
