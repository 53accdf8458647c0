"""The text table of a bench: our own figures beside another implementation's, and own over other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from textwrap import wrap
from typing import Any

from zeroviz.bench import Pair, Side, Spread
from zeroviz.columns import WIDTH, columns, entry
from zeroviz.spec import RunSpec
from zeroviz.wording import ranks_text, what_text

_BYTES = (
    ("peak, as on NCCL", "peak_nbytes"),
    ("peak, as here", "here_nbytes"),
    ("at rest", "rest_nbytes"),
    ("sent in a ring", "sent_nbytes"),
)


def render_bench(spec: RunSpec, num_rounds: int, pairs: Sequence[Pair], environment: Mapping[str, Any]) -> str:
    """The whole table; 80 columns."""
    what = f"BENCH: {ranks_text(spec)}, {spec.precision.value}; {what_text(spec)}"
    how = (
        f"{num_rounds} rounds, each a step of one and of the other in the same processes. A ratio is own over other: "
        "of times the median of the rounds' ratios, with the middle half of them; CPU time is that of all ranks."
    )
    lines = [*wrap(what, WIDTH), *wrap(how, WIDTH)]
    measured = [pair for pair in pairs if pair.own and pair.other]
    for pair in measured:
        lines += ["", *_pair(pair)]
    if absent := [pair for pair in pairs if pair.absent]:
        lines += ["", "ABSENT"]
        for pair in absent:
            lines += entry(f"  {pair.impl.value} {pair.strategy.value}", pair.absent, label_width=30)
    lines += ["", *_verdict(measured)]
    if environment:
        lines += ["", *entry("ENVIRONMENT", _environment(environment))]
    return "\n".join(lines) + "\n"


def _pair(pair: Pair) -> list[str]:
    own, other = pair.own, pair.other
    assert own is not None and other is not None
    rows = [[pair.strategy.label, "own", pair.impl.value, "own/other", "middle half"]]
    rows.append(_times("step time, ms", own.step_time_ns, other.step_time_ns, Spread.of(pair.time_ratios)))
    rows.append(_times("CPU time, ms", own.cpu_time_ns, other.cpu_time_ns, Spread.of(pair.cpu_ratios)))
    for label, name in _BYTES:
        ours, theirs = getattr(own, name), getattr(other, name)
        rows.append([f"  {label}", f"{ours:,}", f"{theirs:,}", f"{ours / theirs:.3f}" if theirs else "", ""])
    rows.append(["  loss", f"{own.loss:.4f}", f"{other.loss:.4f}", "", ""])
    return columns(rows, min_width=11)


def _times(label: str, own: Sequence[int], other: Sequence[int], ratio: Spread) -> list[str]:
    times = [f"{median(side) / 1e6:,.1f}" for side in (own, other)]
    return [f"  {label}", *times, f"{ratio.median:.3f}", f"{ratio.low:.2f}..{ratio.high:.2f}"]


def _verdict(pairs: Sequence[Pair]) -> list[str]:
    """Where our own is above the other, said in words."""
    above = []
    for pair in pairs:
        assert pair.own is not None and pair.other is not None
        name = f"{pair.strategy.value} beside {pair.impl.value}"
        if (ratio := Spread.of(pair.time_ratios).median) > 1:
            above.append(f"{name}: step time {ratio:.3f}")
        if (ratio := _peak_ratio(pair.own, pair.other)) > 1:
            above.append(f"{name}: peak {ratio:.3f}")
    if not pairs:
        return ["Nothing was measured."]
    if not above:
        where = f"all {len(pairs)} pairs" if len(pairs) > 1 else "the pair"
        return wrap(f"Own is at most the other in step time and peak in {where}.", WIDTH)
    return entry("ABOVE 1.0", "; ".join(above))


def _peak_ratio(own: Side, other: Side) -> float:
    return own.peak_nbytes / other.peak_nbytes


def _environment(facts: Mapping[str, Any]) -> str:
    devices = facts.get("gpus") or facts.get("devices") or []
    load = ", ".join(map(str, facts.get("load_before", [])))
    return (
        f"torch {facts.get('torch')}; Python {facts.get('python')}; {facts.get('backend')} on "
        f"{', '.join(dict.fromkeys(devices))}; {facts.get('host_cores')} cores; load of the machine before: {load}"
    )
