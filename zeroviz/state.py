"""Explorer: the toggles, the run, the traces. The state that every view observes; no widget is known here.

[Note: threads] ipykernel 7 hands widget messages to a second thread, so a toggle may move on one thread while a run
lands on another. `lock` is held while the state changes, and with it by every view that draws from a change. A live run
is one asyncio task on the kernel's main loop; nothing that is called from a widget waits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from traitlets import Bool, Float, Instance, Int, TraitError, Tuple, Unicode, UseEnum, observe, validate

from zeroviz.advice import Advice, advise
from zeroviz.backend import Backend
from zeroviz.capacities import DEFAULT_GPU, DEFAULT_RESERVE_NBYTES, parse_capacity
from zeroviz.capacity_line import CapacityLine
from zeroviz.command import command_line
from zeroviz.derivation import build_formula
from zeroviz.derivation_terms import Formula
from zeroviz.dtypes_apart import Copy, with_dtype
from zeroviz.errors import SpecError, TraceError, ZerovizError
from zeroviz.guess import Asked
from zeroviz.heatmap import HeatMap, Upward, build_heatmap
from zeroviz.implementations import can_rehearse
from zeroviz.intake import take_in
from zeroviz.labels import Language, say
from zeroviz.models import PRESETS, ModelShape
from zeroviz.peak import peak_of
from zeroviz.pins import Comparison, Pin, compare_pins, with_pin
from zeroviz.precision import OWN_PRECISIONS
from zeroviz.predict import predict
from zeroviz.quantity import format_nbytes
from zeroviz.rank_trace import alike
from zeroviz.scene import Reference, Scene, build_scene
from zeroviz.settings import BackwardPrefetch
from zeroviz.spec import DType, Implementation, Offload, Optimizer, Precision, RunSpec, Strategy, UnitKind, Zero1Form
from zeroviz.state_runs import Runs
from zeroviz.timeline import Timeline, build_timeline, distinct_ranks
from zeroviz.toggles import TOGGLES, applies, chosen_after, coming_back, largest, settle, spec_of, toggles_of
from zeroviz.trace import Origin
from zeroviz.wire_scene import WireScene, build_wire_scene

MAX_TIMES_LONGER = 8  # an axis beyond this many times the longest bar leaves its parts too narrow to be told apart
_SEEN_AS = ("zoom", "from_rest", "in_elements", "language", "gpu", "upward")
"""What is looked at, whatever the state; but for the rank."""
MAX_UNDONE = 100
"""Changes that can be undone, the newest."""


class Explorer(Runs):
    """One state of the explorer. Set a toggle, or several at once with `choose`; the rest follows.

    The toggles are those of `zeroviz.toggles`. predicted and measured are traces of the toggles as they stand; measured
    is None unless this very state was run. earlier: whether `measured` is from before the last run of this state, which
    came to no end. message: the cluster's last news. notice: what was changed along with a toggle. error: one sentence;
    what it refused was not done.

    What is looked at, and changes no number: zoom, whether the picture's axis ends at its own longest bar, instead of
    at DDP's, which leaves bars comparable over strategies and ranks. rank: whose step the timeline shows. from_rest:
    whether its axis begins at what is held at rest. in_elements: what is sent, in elements instead of bytes. gpu and
    upward: the capacity and the rows of the map of what fits. language: of labels. pins: states kept to be compared.
    guessing: whether each state is a question first; asked: of which figure; guess_nbytes: the guess, once it is made.
    """

    model = Instance(ModelShape)
    impl = UseEnum(Implementation, default_value=Implementation.OWN)
    strategy = UseEnum(Strategy, default_value=Strategy.ZERO3)
    ranks = Int(4)
    shard_ranks = Int(None, allow_none=True)
    precision = UseEnum(Precision, default_value=Precision.FP32)
    unit = UseEnum(UnitKind, default_value=UnitKind.BLOCK)
    blocks = Int(1)
    batch = Int(RunSpec.batch)
    seq = Int(RunSpec.seq)
    optimizer = UseEnum(Optimizer, default_value=Optimizer.ADAMW)
    grad_dtype = UseEnum(DType, default_value=None, allow_none=True)
    checkpointing = Bool(False)
    region = Int(1)
    offload = UseEnum(Offload, default_value=Offload.NONE)
    accumulation = Int(1)
    no_sync = Bool(None, allow_none=True)
    clip_norm = Float(None, allow_none=True)
    zero1_form = UseEnum(Zero1Form, default_value=Zero1Form.REDUCE_SCATTER)
    prefetch = Int(0)
    async_reduce = Bool(False)
    bucket_nbytes = Int(None, allow_none=True)
    bucket_view = Bool(None, allow_none=True)
    bucket_numel = Int(None, allow_none=True)
    persistence_numel = Int(None, allow_none=True)
    reduce_dtype = UseEnum(DType, default_value=None, allow_none=True)
    reshard_ranks = Int(None, allow_none=True)
    use_orig_params = Bool(None, allow_none=True)
    backward_prefetch = UseEnum(BackwardPrefetch, default_value=None, allow_none=True)
    limit_all_gathers = Bool(None, allow_none=True)

    zoom = Bool(False)
    rank = Int(0)
    from_rest = Bool(False)
    in_elements = Bool(False)
    language = UseEnum(Language, default_value=Language.ENGLISH)
    pins = Tuple()
    guessing = Bool(False)
    asked = UseEnum(Asked, default_value=Asked.PEAK)
    guess_nbytes = Int(None, allow_none=True)
    gpu = Unicode(DEFAULT_GPU)
    upward = UseEnum(Upward, default_value=Upward.BATCH)

    def __init__(self, backend: Backend | None = None, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is where runs live: in a notebook, `asyncio.get_running_loop()` of the cell. Without it, or without a
        backend, nothing can be run."""
        self._choosing = False
        self._before: list[dict[str, Any]] = []  # the toggles of earlier states
        super().__init__(backend, loop, model=PRESETS["tiny"])
        self.opening = self.toggles
        self._chosen = chosen_after({}, self.toggles, {})  # of what others may overrule meanwhile
        self.predicted = predict(spec_of(self.toggles))

    # ---- the toggles ----

    @property
    def toggles(self) -> dict[str, Any]:
        """The toggles by name."""
        return {name: getattr(self, name) for name in TOGGLES}

    def choose(self, **toggles: Any) -> bool:
        """Set toggles together and predict, or refuse: then nothing changes and `error` says why.

        Toggles that no longer apply, or no longer fit, follow, and `notice` says so.
        """
        return self._go_to(toggles, remembers=True)

    def _go_to(self, toggles: Mapping[str, Any], *, remembers: bool) -> bool:
        with self.lock:
            wanted = {**self.toggles, **coming_back(self._chosen, self.toggles, toggles), **toggles}
            notes = settle(wanted, given=toggles)
            try:
                predicted = predict(spec_of(wanted))
            except SpecError as error:
                self.error, self.notice = str(error), ""
                return False
            if remembers and wanted != self.toggles:
                self._before = [*self._before, self.toggles][-MAX_UNDONE:]
            with self._choose(), self.hold_trait_notifications():
                for name, value in wanted.items():
                    setattr(self, name, value)
                self.predicted = predicted
                self._chosen = chosen_after(self._chosen, wanted, toggles)
                self.guess_nbytes = None
                self.rank = min(self.rank, predicted.spec.ranks - 1)
                self._show_run()
                self.error, self.notice = "", " ".join(notes)
                self._tell_run()  # the sentence that said why a run failed has just gone
            return True

    def choose_dtype(self, copy: Copy, dtype: DType | None) -> bool:
        """Give one copy of the model states a dtype, None for no master: the nearest recipe that has it. Refuses as
        `choose` does, and where no recipe has it."""
        with self.lock:
            try:
                change = with_dtype(self.toggles, copy, dtype)
            except SpecError as error:
                self.error, self.notice = str(error), ""
                return False
            if not self.choose(**change.toggles):
                return False
            self.notice = " ".join(note for note in (*change.notes, self.notice) if note)
            return True

    @property
    def can_undo(self) -> bool:
        return bool(self._before)

    def undo(self) -> None:
        """Back to the toggles before the last change; nothing where there was none."""
        with self.lock:
            if self._before:
                self._go_to(self._before.pop(), remembers=False)

    def start_from(self, toggles: Mapping[str, Any]) -> bool:
        """The opening state with `toggles` set."""
        return self.choose(**{**self.opening, **toggles})

    def reset(self) -> None:
        """The opening state; an undo takes it back."""
        self.start_from({})

    def take_in(self, text: str, name: str = "") -> bool:
        """Go to what a text says: a config.json's model, a number of parameters, a recorded trace, or the path of a
        file with one of them. Refuses as `choose` does, with one sentence."""
        with self.lock:
            try:
                taken = take_in(text, name)
                toggles = {"model": taken.model} if taken.trace is None else _toggles_of(taken.trace.spec)
            except ZerovizError as error:
                self.error, self.notice = str(error).replace(": --params COUNT", ""), ""  # the shell's
                return False
            if not self.choose(**toggles):
                return False
            if taken.trace is not None and taken.trace.origin is not Origin.PREDICTED:
                self._keep_run(self.spec, replace(taken.trace, spec=self.spec))
            self.notice = " ".join(note for note in (self.notice, *taken.notes) if note)
            return True

    def choose_gpu(self, text: str) -> bool:
        """Another GPU by name or capacity, or a sentence why not: then nothing changes."""
        with self.lock:
            try:
                self.gpu = text
            except TraitError as error:
                self.error, self.notice = str(error), ""
                return False
            self.error = ""
            return True

    @validate("gpu")
    def _gpu_that_holds(self, proposal: Any) -> str:
        try:
            capacity = parse_capacity(proposal.value)
        except SpecError as error:
            raise TraitError(str(error).replace("--gpu is", "GPU is")) from None
        if capacity.nbytes <= DEFAULT_RESERVE_NBYTES:
            raise TraitError(
                f"GPU is {proposal.value!r}, {format_nbytes(capacity.nbytes)}; it must be more than the "
                f"{format_nbytes(DEFAULT_RESERVE_NBYTES)} that are kept for what is no tensor, such as 80GB or 80GiB."
            )
        return str(proposal.value)

    @contextmanager
    def _choose(self) -> Iterator[None]:
        self._choosing = True
        try:
            yield
        finally:
            self._choosing = False

    @observe("asked", "guessing", "rank")
    def _asked_anew(self, _: Any) -> None:
        self.guess_nbytes = None

    @observe(*TOGGLES)
    def _toggled(self, change: Any) -> None:
        """A toggle set by assignment: the same as `choose`, and a refusal is raised as well."""
        if self._choosing or not isinstance(change.old, type(change.new)):  # a trait's first value
            return
        if not self.choose(**{change.name: change.new}):
            with self._choose():
                setattr(self, change.name, change.old)
            raise TraitError(self.error)

    def beside(self, **toggles: Any) -> Explorer | None:
        """Another state: this one with `toggles` set, as `choose` would set them, seen as this one is. None where that
        is refused. It runs nothing, but has the runs of this one."""
        with self.lock:
            other = Explorer()
            other._runs, other._unfinished = self._runs, self._unfinished
            if not other.choose(**self.toggles):
                return None
            other._chosen = self._chosen
            if not other.choose(**toggles):
                return None
            for view in _SEEN_AS:
                setattr(other, view, getattr(self, view))
            other.rank = min(self.rank, other.spec.ranks - 1)
            return other

    def applies(self, name: str) -> bool:
        """Whether a toggle means anything as the others stand."""
        return applies(name, self.toggles)

    def largest(self, name: str) -> int:
        """The largest value of a toggle that the model and the units leave room for."""
        return largest(name, self.spec)

    # ---- pinned states ----

    def pin(self) -> bool:
        """Pin this state, or say why not. Pinned again, it is the newer one with its run."""
        with self.lock:
            try:
                self.pins = with_pin(self.pins, Pin(self.toggles, self.predicted, self.measured))
            except TraceError as error:
                self.error, self.notice = str(error), ""
                return False
            self.error = ""
            return True

    def unpin(self, number: int) -> None:
        """Take out the pin of this number; nothing where there is none."""
        with self.lock:
            self.pins = tuple(pin for place, pin in enumerate(self.pins) if place != number)

    def go_to_pin(self, number: int) -> None:
        """Set the toggles of a pinned state; nothing where there is none."""
        with self.lock:
            if 0 <= number < len(self.pins):
                self.choose(**self.pins[number].toggles)

    def comparison(self) -> Comparison | None:
        """Pinned states beside this one; None where there is nothing to compare."""
        return compare_pins(self.pins, self.predicted, self.measured)

    # ---- what the views show ----

    def scene(self) -> Scene:
        """The picture of this state."""
        reference = None if self.zoom else ddp_peak(self.spec)
        return build_scene(
            self.predicted,
            self.measured,
            reference=reference,
            earlier=self.earlier,
            expects_run=not self.too_large,
            capacity=CapacityLine.of(parse_capacity(self.gpu), DEFAULT_RESERVE_NBYTES),
        )

    def advice(self) -> Advice:
        """What to cut first, or what there is to spare."""
        return advise(self.spec, parse_capacity(self.gpu).nbytes, DEFAULT_RESERVE_NBYTES)

    def formula(self) -> Formula:
        """The figures of `rank` derived: symbols, indices, numbers."""
        return build_formula(self.predicted, self.rank)

    def say(self, label: str) -> str:
        """A label in the language that is chosen."""
        return say(label, self.language)

    def wire(self) -> WireScene:
        """What each rank sends."""
        return build_wire_scene(self.predicted, self.measured, in_elements=self.in_elements)

    def timeline(self) -> Timeline:
        """The whole step of `rank`."""
        return build_timeline(self.predicted, self.measured, rank=self.rank, from_rest=self.from_rest)

    @property
    def ranks_apart(self) -> tuple[int, ...]:
        """The first of the ranks that share one timeline, for each timeline there is."""
        return distinct_ranks(self.predicted, self.measured)

    def heatmap(self) -> HeatMap:
        """What fits around this state. Raises SpecError for a bare count, which has no batch."""
        return build_heatmap(self.spec, self.upward, parse_capacity(self.gpu), DEFAULT_RESERVE_NBYTES)

    @property
    def short_bars(self) -> str:
        """A sentence when DDP's peak leaves the bars too short to be read; else empty."""
        longest = max(rank.peak().total for _, rank in alike(self.predicted.ranks))
        if self.zoom or longest * MAX_TIMES_LONGER > ddp_peak(self.spec).nbytes:
            return ""
        return "The bars are short beside DDP's; set axis to the longest bar to see what they are made of."

    @property
    def too_large(self) -> str:
        """A sentence when the ranks together need more than this machine's memory; else empty."""
        need = sum(len(ranks) * rank.peak().total for ranks, rank in alike(self.predicted.ranks))
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if need <= total:
            return ""
        return (
            f"Prediction only: the ranks together need {format_nbytes(need)} at the peak and this machine has "
            f"{format_nbytes(total)} of memory, so its CPUs cannot run it.{self._rehearsal}"
        )

    @property
    def _rehearsal(self) -> str:
        if not can_rehearse(self.spec.impl):
            return ""
        line = command_line("rehearse", self.spec)
        return f" In a terminal, `{line}` runs the same code on tensors without memory."


def _toggles_of(spec: RunSpec) -> dict[str, Any]:
    """Raises SpecError for a unit that no control sets."""
    if spec.unit.kind is UnitKind.NUMEL:
        raise SpecError(f"The trace's unit is {spec.unit}; the explorer's are model, block, block:K and layer.")
    return toggles_of(spec)


def ddp_peak(spec: RunSpec) -> Reference:
    """The peak of the same step with nothing sharded and no option set, so that an option moves the bars and not the
    axis. It does not depend on N, so one rank stands for all. It is our own code's, which has every recipe but one; in
    place of that stands the other of 16 bytes a parameter that computes in bf16."""
    precision = spec.precision if spec.precision in OWN_PRECISIONS else Precision.BF16_MIXED
    plain = RunSpec(
        model=spec.model, strategy=Strategy.DDP, ranks=1, precision=precision, unit=spec.unit, batch=spec.batch,
        seq=spec.seq,
    )  # fmt: skip
    options = ("optimizer", "grad_dtype", "checkpointing", "offload", "accumulation")
    is_plain = precision is spec.precision and all(getattr(spec, name) == getattr(plain, name) for name in options)
    return Reference(peak_of(plain).total, "peak of DDP" if is_plain else "peak of plain DDP")
