"""Two to five specs on one axis: how implementations, strategies or models differ.

A spec has one row, or two where it was run: that of the rank which peaks highest. Where ranks differ a note says by how
much, since the smallest is what a mean would hide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zeroviz.axis import amount, axis_unit, axis_words, ticks
from zeroviz.errors import TraceError
from zeroviz.quantity import format_nbytes
from zeroviz.rank_trace import alike
from zeroviz.scene import Padding, Row, Scene, Segment, legend_of, paddings_of, row_of, segments_of, wire_line
from zeroviz.spec import RunSpec
from zeroviz.trace import RankTrace, Trace
from zeroviz.wording import batch_words, model_text, parameters_text, recipe_sum

MIN_TRACES, MAX_TRACES = 2, 5

# What a spec is called by where it differs from the others, in this order.
_WORDS: Sequence[tuple[str, Callable[[RunSpec], str]]] = (
    ("model", lambda spec: spec.model.name),
    ("implementation", lambda spec: spec.impl.value),
    ("strategy", lambda spec: spec.strategy.label),
    ("settings", lambda spec: ", ".join(f"{name} {_plain(value)}" for name, value in spec.settings.to_dict().items())),
    ("ranks", lambda spec: f"{spec.ranks:,} rank{'s' * (spec.ranks > 1)}"),
    ("groups", lambda spec: "" if spec.shard_ranks is None else f"groups of {spec.shard_ranks:,}"),
    ("precision", lambda spec: spec.precision.value),
    ("unit", lambda spec: f"unit {spec.unit}"),
    ("optimizer", lambda spec: spec.optimizer.value),
    ("tokens", lambda spec: f"{spec.batch:,} x {spec.seq:,}"),
    ("checkpointing", lambda spec: f"checkpointing {spec.checkpointing}"),
    ("offload", lambda spec: f"offload {spec.offload.value}"),
    ("micro-batches", lambda spec: f"{spec.accumulation:,} micro-batch{'es' * (spec.accumulation > 1)}"),
)


def side_by_side(traces: Sequence[Trace], measured: Mapping[RunSpec, Trace] | None = None) -> Scene:
    """The picture of `traces`, one row each, and under it the run of the same spec where `measured` has one.

    Raises TraceError unless there are two to five, each of another spec.
    """
    runs = measured or {}
    specs = [trace.spec for trace in traces]
    names = names_of(specs)
    tops = [highest(trace) for trace in traces]
    rows: list[Row] = []
    segments: list[Segment] = []
    paddings: list[Padding] = []
    for trace, ours, name in zip(traces, tops, names, strict=True):
        sources: list[tuple[Trace, RankTrace, RankTrace | None]] = [(trace, ours, None)]
        if (run := runs.get(trace.spec)) is not None:
            sources.append((run, run.ranks[ours.rank], ours))
        for source, seen, beside in sources:
            row = row_of(len(rows), (seen.rank,), source.origin, seen, beside, name)
            held = segments_of(row, seen)
            rows.append(row)
            segments += held
            paddings += paddings_of(row, seen, held)
    axis_max = max(row.peak_nbytes for row in rows)
    unit, scale = axis_unit(axis_max)
    return Scene(
        spec=specs[0],
        title=heading(specs, names),
        recipe=_recipes(specs, names),
        subtitle=(
            _model(specs),
            *(f"{name}: {wire_line(trace, unit)}" for trace, name in zip(traces, names, strict=True)),
        ),
        rows=tuple(rows),
        segments=tuple(segments),
        paddings=tuple(paddings),
        legend=legend_of(segments, paddings, axis_max),
        ticks=ticks(0, axis_max, scale),
        axis_label=axis_words(unit, scale, "held by the rank that peaks highest"),
        axis_max=axis_max,
        unit=unit,
        reference=None,
        notes=tuple(note for trace, name in zip(traces, names, strict=True) for note in _notes(trace, name, unit)),
    )


def names_of(specs: Sequence[RunSpec]) -> list[str]:
    """Each spec by what sets it apart: `own`, `fsdp2`; `fsdp2, 2 ranks`. TraceError for specs that cannot share a
    picture."""
    if not MIN_TRACES <= len(specs) <= MAX_TRACES:
        raise TraceError(f"{len(specs)} were given to be compared; a picture takes {MIN_TRACES} to {MAX_TRACES}.")
    if len(set(specs)) < len(specs):
        raise TraceError("Two of the traces are of the same spec; a prediction and its run are one row and its twin.")
    differing = [say for _, say in _WORDS if len(_said(say, specs)) > 1]
    names = [", ".join(word for say in differing if (word := say(spec))) for spec in specs]
    if len(set(names)) < len(names) or not all(names):
        names = [f"{number}: {name}".rstrip(": ") for number, name in enumerate(names, 1)]
    return names


def heading(specs: Sequence[RunSpec], names: Sequence[str]) -> str:
    """What is said of every one of them; then their names, where these are short."""
    said = [_said(say, specs) for what, say in _WORDS if what in ("model", "strategy", "ranks", "groups", "precision")]
    same = [word for words in said if len(words) == 1 and (word := next(iter(words)))]
    what = ", ".join(same) + ": " if same else ""
    if any(", " in name for name in names):
        return f"{what}{len(names)} side by side"
    return f"{what}{', '.join(names[:-1])} and {names[-1]}"


def _said(say: Callable[[RunSpec], str], specs: Sequence[RunSpec]) -> set[str]:
    """What specs are called; nothing for one that has no such thing, as most have no shard groups."""
    return {say(spec) for spec in specs}


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


def highest(trace: Trace) -> RankTrace:
    """The rank with the largest peak, the first of them."""
    return max((rank for _, rank in alike(trace.ranks)), key=lambda rank: rank.peak().total)


def _model(specs: Sequence[RunSpec]) -> str:
    """The parameters, and the batch where that is the same for all."""
    models = list(dict.fromkeys(spec.model for spec in specs))
    if len(models) > 1:
        return "; ".join(map(model_text, models))
    batches = {batch_words(spec) for spec in specs}
    return parameters_text(models[0]) + (batches.pop() if len(batches) == 1 else "")


def _recipes(specs: Sequence[RunSpec], names: Sequence[str]) -> str:
    sums = [recipe_sum(spec, "bytes a parameter") for spec in specs]
    if len(set(sums)) == 1:
        return sums[0]
    return "; ".join(f"{name}: {each}" for name, each in zip(names, sums, strict=True))


def _notes(trace: Trace, name: str, unit: str) -> list[str]:
    notes = []
    rest = [(rank.rest_nbytes, rank.rank) for _, rank in alike(trace.ranks)]
    (least, first), (most, last) = min(rest), max(rest)
    if least < most:
        notes.append(
            f"{name}: ranks differ at rest, from {amount(least, unit)} on rank {first} to {amount(most, unit)} on rank "
            f"{last} ({format_nbytes(most - least)} apart)."
        )
    return [*notes, *(f"{name}: {note}" for note in trace.notes)]
