"""The controls: one widget a toggle, each showing the Explorer's value and asking it for another.

A control never decides: it asks, and then shows what the Explorer says, which after a refusal is the old value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

from zeroviz.facts import GPU_CAPACITY_NBYTES
from zeroviz.implementations import PRECISIONS
from zeroviz.labels import Language
from zeroviz.models import PRESETS, Family, ModelShape
from zeroviz.panel.dtypes import DtypesApart
from zeroviz.settings import MIB, SETTINGS, BackwardPrefetch
from zeroviz.spec import DType, Implementation, Offload, Optimizer, Precision, Strategy, UnitKind, Zero1Form
from zeroviz.state import Explorer
from zeroviz.toggles import applies, group_choices
from zeroviz.wording import model_text

RANKS = (*range(1, 65), *(2**power * eighths // 8 for power in range(6, 12) for eighths in range(9, 17)))
"""Each up to 64, then eight to an octave, up to 4,096. A few run on a laptop; the others are for arithmetic."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
ACCUMULATIONS = (1, 2, 3, 4, 8, 16, 32, 64)
SEQS = tuple(2**power for power in range(4, 18))

UNSET = ""
"""What a control shows for None, which to a widget means that nothing is chosen."""

Choices = tuple[tuple[str, Any], ...]
"""What is chosen among: (label, value)."""
_CLIPS: Choices = (("off", UNSET), ("0.1", 0.1), ("1", 1.0), ("10", 10.0))
_CHOICES: dict[str, Choices] = {
    "unit": (("whole model", UnitKind.MODEL), ("block", UnitKind.BLOCK), ("layer", UnitKind.LAYER)),
    "optimizer": tuple((kind.value if kind.runs else f"{kind.value}, arithmetic only", kind) for kind in Optimizer),
    "grad_dtype": (("as precision", UNSET), ("fp32", DType.FP32), ("bf16", DType.BF16)),
    "checkpointing": (("nothing", False), ("blocks", True)),
    "offload": tuple((place.value, place) for place in Offload),
    "clip_norm": _CLIPS,
    "no_sync": (("as usual", UNSET), ("in the last", True), ("in each", False)),
    "zoom": (("to DDP's peak", False), ("to the longest bar", True)),
    "from_rest": (("from zero", False), ("from rest", True)),
    "in_elements": (("bytes", False), ("elements", True)),
}
"""Whose labels are said in the page's language; all others are names."""
OVERLAP = "overlap reduction and compute"
DESCRIPTIONS = {
    "impl": ("code", "Whose code runs the step: our own, or a library's"),
    "strategy": ("strategy", "What is sharded: nothing, optimizer state, gradients too, parameters too"),
    "ranks": ("ranks", "Processes in the group, each with its own bars"),
    "shard_ranks": ("group", "Ranks that shard together; the groups are copies of one another; for HYBRID_SHARD"),
    "precision": ("precision", "Which number format each copy of the model states has"),
    "unit": ("unit", "Parameters that are gathered and freed together"),
    "blocks": ("blocks/unit", "Transformer blocks in one unit; for unit block"),
    "model": ("model", "The model; small ones run here, large ones are for prediction"),
    "batch": ("batch", "Sequences on each rank"),
    "seq": ("sequence", "Tokens in a sequence"),
    "optimizer": ("optimizer", "What updates the parameters: how many moments it keeps, and what it makes meanwhile"),
    "grad_dtype": ("gradient", "Number format in which gradients are added up, reduced and kept"),
    "checkpointing": ("recompute", "Keep only the inputs of blocks in forward and run them again in backward"),
    "region": ("together", "Transformer blocks that are recomputed together; for recompute"),
    "offload": ("offload", "Which states lie in the host's memory instead of the device's"),
    "accumulation": ("accumulate", "Batches whose gradients are added up before one update"),
    "no_sync": ("reduce", "In which micro-batch gradients are reduced; for 2 micro-batches or more"),
    "clip_norm": ("clip", "Scale the gradient down where its norm over all parameters exceeds this"),
    "zero1_form": ("gradient by", "How ZeRO-1 brings the gradient to its owner; for ZeRO-1"),
    "prefetch": ("prefetch", "Units gathered ahead of the one in use; where parameters are sharded"),
    "async_reduce": (
        "",
        "Reduce a unit's gradient during the next backward, gather updated parameters during the next update",
    ),
    "bucket_nbytes": ("bucket", "Bytes of a gradient bucket"),
    "bucket_view": ("gradients", "Gradients beside their buckets, or views into them"),
    "bucket_numel": ("bucket", "Elements of a gradient bucket"),
    "persistence_numel": ("keep whole", "Parameters of fewer elements are not sharded"),
    "reduce_dtype": ("reduce in", "Number format in which gradients are reduced"),
    "reshard_ranks": ("reshard to", "Among how many ranks a unit is left after its forward"),
    "use_orig_params": ("parameters", "One flat parameter a unit, or each a tensor of its own inside it"),
    "backward_prefetch": ("gather ahead", "When the next unit of backward is gathered"),
    "limit_all_gathers": ("gathers", "Whether gathered units may wait for a GPU in any number"),
    "zoom": (
        "axis",
        "Where the axis ends: at DDP's peak, to compare strategies, or at the longest bar, to see more",
    ),
    "from_rest": (
        "film axis",
        "Where the film's axis begins: at zero, to see the whole, or at rest, to see what the step adds",
    ),
    "gpu": (
        "GPU",
        "A GPU by name, or a capacity such as 24GB or 24GiB: a line across the bars, and the map of what fits",
    ),
    "language": ("labels", "Labels in English or in Chinese; sentences stay English"),
    "in_elements": ("wire in", "What is sent: bytes, as a ring sends them, or elements, to read it as multiples of P"),
    "rank": ("film of", "Whose step the film shows; ranks that are alike to the byte share one"),
}
VIEWS = ("zoom", "from_rest", "rank", "gpu", "in_elements", "language")
"""What is looked at: these change no number."""


class Controls:
    """All controls, bound to an Explorer. `box` lays them out; `widget` finds one by its toggle's name. `dtypes` stands
    under the precision, which it takes apart: no toggle of its own."""

    def __init__(self, state: Explorer, *, leave_out: Collection[str] = ()) -> None:
        self._state = state
        self._showing = False
        self.widget: dict[str, Any] = {
            "impl": widgets.Dropdown(options=[(_impl_words(impl), impl) for impl in Implementation]),
            "strategy": _buttons((strategy.label, strategy) for strategy in Strategy),
            "ranks": widgets.SelectionSlider(options=RANKS),
            "shard_ranks": widgets.SelectionSlider(options=(1,)),
            "precision": _buttons((recipe.value, recipe) for recipe in Precision),
            "model": widgets.Dropdown(options=[(model_text(model), model) for model in PRESETS.values()]),
            "unit": _buttons(_CHOICES["unit"]),
            "blocks": widgets.IntSlider(min=1, max=1),
            "batch": widgets.SelectionSlider(options=BATCHES),
            "seq": widgets.SelectionSlider(options=SEQS),
            "optimizer": widgets.Dropdown(options=_CHOICES["optimizer"]),
            "grad_dtype": _buttons(_CHOICES["grad_dtype"]),
            "checkpointing": _buttons(_CHOICES["checkpointing"]),
            "region": widgets.IntSlider(min=1, max=1),
            "offload": _buttons(_CHOICES["offload"]),
            "accumulation": widgets.SelectionSlider(options=ACCUMULATIONS),
            "no_sync": _buttons(_CHOICES["no_sync"]),
            "clip_norm": _buttons(_CHOICES["clip_norm"]),
            "zero1_form": _buttons((form.value, form) for form in Zero1Form),
            "prefetch": widgets.IntSlider(min=0, max=1),
            "async_reduce": widgets.Checkbox(description=OVERLAP, indent=False),
            **{name: _buttons((("as usual", UNSET),)) for name in SETTINGS},
            "zoom": _buttons(_CHOICES["zoom"]),
            "from_rest": _buttons(_CHOICES["from_rest"]),
            "rank": widgets.Dropdown(options=[("each rank", 0)]),
            "gpu": gpu_control(state),
            "in_elements": _buttons(_CHOICES["in_elements"]),
            "language": _buttons((language.value, language) for language in Language),
        }
        for name in leave_out:
            del self.widget[name]
        self.dtypes = DtypesApart(state)
        rows = []
        for name, control in self.widget.items():
            label, tooltip = DESCRIPTIONS[name]
            control.tooltip = tooltip
            control.layout.width = "auto"
            if label:
                control.description = label
            control.add_class(f"zeroviz-{css_name(name)}")
            rows.append(control)
            if name == "precision":
                rows.append(self.dtypes)
        self.box = widgets.Box(rows)
        self.box.add_class("zeroviz-controls")
        self._name()
        for name, control in self.widget.items():
            control.observe(self._asker(name), "value")
        state.observe(lambda _: self.show(), ["predicted", "measured", *VIEWS])
        state.observe(lambda _: self._name(), "language")

    def _name(self) -> None:
        """Call every control, and what it offers, by their labels."""
        with self._state.lock:
            self._showing = True
            try:
                for name, control in self.widget.items():
                    control.description = self._state.say(DESCRIPTIONS[name][0] or OVERLAP)
                    if name in _CHOICES:
                        self._offer_choices(name, _CHOICES[name])
            finally:
                self.show()

    def _offer_choices(self, name: str, choices: Choices) -> None:
        """What a control is chosen among, unless it is that already; the value is put by `show`."""
        control = self.widget[name]
        said = tuple((self._state.say(label), value) for label, value in choices)
        if _pairs(control) != said:
            control.options = said

    def _asker(self, name: str) -> Any:
        def ask(change: Any) -> None:
            with self._state.lock:
                if self._showing:
                    return
                if name == "gpu":  # which answers by itself
                    return
                if name in VIEWS:
                    setattr(self._state, name, change.new)
                else:
                    self._state.choose(**{name: None if change.new == UNSET else change.new})
                    if self._value(name) != change.new:
                        self.show()

        return ask

    def show(self) -> None:
        """Bring every control to the state: range first, so that the value is always inside it."""
        state = self._state
        with state.lock:
            self._showing = True
            try:
                for name in ("blocks", "region"):
                    self.widget[name].max = state.largest(name)
                self.widget["prefetch"].max = max(state.prefetch, state.largest("prefetch"))
                _offer(self.widget["ranks"], RANKS, state.ranks)
                # Where there are no groups the handle stays at its end, and a move of the ranks is one message here.
                groups = group_choices(state.ranks) if state.strategy.replicates else (1, state.ranks)
                _offer(self.widget["shard_ranks"], groups, self._value("shard_ranks"))
                precisions = tuple((precision.value, precision) for precision in PRECISIONS[state.impl])
                self._offer_choices("precision", precisions)
                self._offer_settings()
                self._offer_choices("clip_norm", _clips(state.clip_norm))
                _offer(self.widget["batch"], BATCHES, state.batch)
                _offer(self.widget["accumulation"], ACCUMULATIONS, state.accumulation)
                _offer(self.widget["seq"], _seqs(state.model), state.seq)
                if "rank" in self.widget:
                    self._offer_choices("rank", _ranks_of_films(state))
                models = {model_text(model): model for model in (*PRESETS.values(), state.model)}
                self._offer_choices("model", tuple(models.items()))
                toggles = state.toggles
                for name, control in self.widget.items():
                    control.value = self._value(name)
                    is_fixed = name == "rank" and len(control.options) == 1
                    control.disabled = not applies(name, toggles) or is_fixed
            finally:
                self._showing = False

    def _offer_settings(self) -> None:
        """Of an implementation's own settings only those that it has are on the page."""
        for name, setting in SETTINGS.items():
            if name not in self.widget:
                continue
            here = self._state.impl in setting.library
            self.widget[name].layout.display = None if here else "none"
            if here:
                self._offer_choices(name, _setting_options(name, self._state))

    def _value(self, name: str) -> Any:
        """What a control shows: the Explorer's value, and a strategy's own way where it is no choice."""
        value = getattr(self._state, name)
        if name == "zero1_form" and self._state.strategy is Strategy.DDP:
            return Zero1Form.ALL_REDUCE
        if name == "shard_ranks" and value is None:  # all ranks shard together, or none does
            return self._state.ranks if self._state.strategy.shards_optimizer else 1
        return UNSET if value is None else value

    def words(self) -> dict[str, str]:
        """What each enabled control says on the page once the page has caught up with the Explorer."""
        said: dict[str, str] = {}
        toggles = self._state.toggles
        for name, control in self.widget.items():
            if not applies(name, toggles):
                continue
            value = self._value(name)
            if isinstance(control, widgets.ToggleButtons | widgets.Dropdown):
                said[css_name(name)] = next(label for label, option in _pairs(control) if option == value)
            elif isinstance(control, widgets.Checkbox):
                said[css_name(name)] = "on" if value else "off"
            else:
                said[css_name(name)] = str(value)
        return said | self.dtypes.words()


_USUAL: dict[str, tuple[int, ...]] = {
    "bucket_nbytes": (2**16, 2**20, 25 * MIB),
    "bucket_numel": (10**5, 10**6, 10**7, 10**8, 5 * 10**8),
    "persistence_numel": (0, 10**3, 10**5),
}


def _setting_options(name: str, state: Explorer) -> Choices:
    """The library's default first; then what else there is, the present value included."""
    setting, value = SETTINGS[name], getattr(state, name)
    default = setting.defaults[state.impl]
    usual = f"{_setting_words(default)}, as usual" if default is not None else "as usual"
    if setting.kind is bool:
        others: Iterable[Any] = (True, False)
    elif setting.kind is int:
        divisors = [number for number in group_choices(state.ranks) if 1 < number < state.ranks]
        others = sorted({*(divisors if name == "reshard_ranks" else _USUAL[name]), *([] if value is None else [value])})
    elif setting.kind is DType:
        others = (DType.FP32, DType.BF16)
    else:
        others = tuple(BackwardPrefetch)
    return ((usual, UNSET), *((_setting_words(other), other) for other in others if other != default or other == value))


def _setting_words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value.value)


def gpu_control(state: Explorer) -> widgets.Combobox:
    """A GPU by name, or a capacity; what is no such thing is said, and the field goes back."""
    control = widgets.Combobox(
        value=state.gpu, options=list(GPU_CAPACITY_NBYTES), description="GPU", continuous_update=False
    )
    control.tooltip = DESCRIPTIONS["gpu"][1]
    control.add_class("zeroviz-gpu")

    def ask(change: Any) -> None:
        # Going back is no question of its own: it would take the sentence away.
        if change.new != state.gpu and not state.choose_gpu(change.new):
            control.value = state.gpu

    control.observe(ask, "value")
    state.observe(lambda _: setattr(control, "value", state.gpu), "gpu")
    return control


def css_name(name: str) -> str:
    """A toggle's name as it ends its control's CSS class."""
    return name.replace("_", "-")


def _pairs(control: Any) -> Choices:
    return tuple(control.options)


def _buttons(options: Iterable[tuple[str, Any]]) -> widgets.ToggleButtons:
    return widgets.ToggleButtons(options=list(options))


def _offer(slider: widgets.SelectionSlider, usual: Iterable[int], value: int) -> None:
    """Offer the usual values, and the present one where it is not among them."""
    options = tuple(sorted({*usual, value}))
    if tuple(slider.options) != options:
        # The options in a message of their own, with the handle at its first place: ipywidgets 8.1 forgets to make a
        # slider longer where its place changes as well, then cuts a place beyond the old length to the last one and
        # sends that back, as if the reader had moved there.
        slider.index = 0
        slider.options = options
        slider.value = value


def _ranks_of_films(state: Explorer) -> Choices:
    """The ranks whose steps differ, and the present one."""
    apart = state.ranks_apart
    if len(apart) == 1:
        return (("each rank", state.rank),)
    return tuple((f"rank {rank}", rank) for rank in sorted({*apart, state.rank}))


def _clips(value: float | None) -> Choices:
    """The usual norms, and the present one where it is not among them."""
    usual = {norm for _, norm in _CLIPS}
    return _CLIPS if value is None or value in usual else (*_CLIPS, (f"{value:g}", value))


def _seqs(model: ModelShape) -> tuple[int, ...]:
    """Powers of two up to what the model has positions for, and that limit itself."""
    limit = model.positions if model.family is Family.GPT2 else min(model.positions, SEQS[-1])
    return (*(seq for seq in SEQS if seq < limit), limit)


def _impl_words(impl: Implementation) -> str:
    return f"{impl.value}: {impl.label}"
