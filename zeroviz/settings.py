"""Settings of other people's implementations that decide memory: each library's name for it, and its default.

A RunSpec carries only what was set; what was not is the library's own default, and `value_of` says which that is. A
setting that an implementation does not have is refused, never left out quietly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Any

from zeroviz.errors import SpecError
from zeroviz.precision import DType
from zeroviz.strategy import Implementation

MIB = 2**20


class BackwardPrefetch(Enum):
    """When FSDP1 gathers the next unit of backward."""

    PRE = "pre"
    """Before the present unit's backward: the two are whole at the same time."""
    POST = "post"
    """After it, when its parameters are freed and before its gradient is reduced."""
    NONE = "none"
    """When its own backward begins."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was set; None is the library's default. See `SETTINGS` for what each means."""

    bucket_nbytes: int | None = None
    bucket_view: bool | None = None
    bucket_numel: int | None = None
    persistence_numel: int | None = None
    reduce_dtype: DType | None = None
    reshard_ranks: int | None = None
    use_orig_params: bool | None = None
    backward_prefetch: BackwardPrefetch | None = None
    limit_all_gathers: bool | None = None

    @cached_property
    def given(self) -> dict[str, Any]:
        """What was set, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back."""
        return {name: value.value if isinstance(value, Enum) else value for name, value in self.given.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`. TypeError or SpecError for other data."""
        kinds = {name: setting.kind for name, setting in SETTINGS.items() if issubclass(setting.kind, Enum)}
        values: dict[str, Any] = {name: kinds[name](value) if name in kinds else value for name, value in data.items()}
        return cls(**values)


LIBRARY_DEFAULTS = Settings()


@dataclass(frozen=True)
class Setting:
    """One of them. defaults: for each implementation that has it what it does unless told; library: its name there.

    kind: bool, int or an Enum. least, most: of a number.
    """

    kind: type
    text: str
    library: Mapping[Implementation, str]
    defaults: Mapping[Implementation, Any]
    least: int = 1
    most: int = 2**50


_DDP, _ZRO = Implementation.DDP, Implementation.ZERO_REDUNDANCY
_FSDP1, _FSDP2 = Implementation.FSDP1, Implementation.FSDP2
_DEEPSPEED, _MEGATRON = Implementation.DEEPSPEED, Implementation.MEGATRON

SETTINGS: Mapping[str, Setting] = {
    "bucket_nbytes": Setting(
        int,
        "bytes of a gradient bucket; unless set, the first has 1 MiB",
        {_DDP: "bucket_cap_mb", _ZRO: "bucket_cap_mb of its DDP"},
        {_DDP: 25 * MIB, _ZRO: 25 * MIB},
    ),
    "bucket_view": Setting(
        bool,
        "let gradients be views into the buckets",
        {_DDP: "gradient_as_bucket_view", _ZRO: "gradient_as_bucket_view of its DDP"},
        {_DDP: False, _ZRO: False},
    ),
    "bucket_numel": Setting(
        int,
        "elements of a gradient bucket",
        {_DEEPSPEED: "reduce_bucket_size", _MEGATRON: "bucket_size"},
        {_DEEPSPEED: 500_000_000, _MEGATRON: None},
    ),
    "persistence_numel": Setting(
        int,
        "parameters of at most so many elements stay whole under stage 3",
        {_DEEPSPEED: "stage3_param_persistence_threshold"},
        {_DEEPSPEED: 100_000},
        least=0,
    ),
    "reduce_dtype": Setting(
        DType,
        "the dtype gradients are reduced in",
        {_FSDP1: "MixedPrecision.reduce_dtype", _FSDP2: "MixedPrecisionPolicy.reduce_dtype"},
        {_FSDP1: None, _FSDP2: None},
    ),
    "reshard_ranks": Setting(
        int,
        "ranks among which a unit is resharded after its forward",
        {_FSDP2: "reshard_after_forward"},
        {_FSDP2: None},
    ),
    "use_orig_params": Setting(
        bool,
        "keep each parameter a tensor of its own, 16-byte aligned in the flat one",
        {_FSDP1: "use_orig_params"},
        {_FSDP1: False},
    ),
    "backward_prefetch": Setting(
        BackwardPrefetch,
        "when the next unit of backward is gathered: pre, post or none",
        {_FSDP1: "backward_prefetch"},
        {_FSDP1: BackwardPrefetch.PRE},
    ),
    "limit_all_gathers": Setting(
        bool,
        "let no more than two gathered units wait for a GPU; on CPU nothing waits",
        {_FSDP1: "limit_all_gathers"},
        {_FSDP1: True},
    ),
}


def value_of(settings: Settings, name: str, impl: Implementation) -> Any:
    """What `impl` really does: what was set, else the library's default. KeyError where it has no such setting."""
    given = getattr(settings, name)
    return SETTINGS[name].defaults[impl] if given is None else given


def check_settings(settings: Settings, impl: Implementation) -> None:
    """Raise SpecError for a setting that `impl` does not have, or a value that none may have."""
    for name, value in settings.given.items():
        setting = SETTINGS[name]
        if impl not in setting.library:
            has = " and ".join(each.value for each in setting.library) + (
                " have it" if len(setting.library) > 1 else " has it"
            )
            raise SpecError(f"{name} is {_shown(value)} with impl {impl.value}, which has no such setting; {has}.")
        if setting.kind is int:
            if isinstance(value, bool) or not isinstance(value, int) or not setting.least <= value <= setting.most:
                raise SpecError(
                    f"{name} is {value!r}; it must be a whole number from {setting.least} to {setting.most:,}."
                )
        elif not isinstance(value, setting.kind):
            raise SpecError(f"{name} is {value!r}; it must be {_allowed(setting.kind)}.")
        if value is DType.INT8:
            raise SpecError(f"{name} is 'int8'; allowed are fp32 and bf16.")


def _allowed(kind: type) -> str:
    if kind is bool:
        return "true or false"
    return "fp32 or bf16" if kind is DType else " or ".join(member.value for member in kind)  # type: ignore[attr-defined]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, Enum) else value)
