"""Text tables of a live run: what was predicted beside what was measured, exact bytes and their difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import wrap

from zeroviz.quantity import format_decimal_nbytes
from zeroviz.tables import WIDTH, columns, entry, header, peak_sentence, rank_groups, rank_label
from zeroviz.trace import CATEGORY_ORDER, Category, RankTrace, Trace

MAX_LOSS_RANKS = 8
MAX_LOSS_STEPS = 5
_HEADS = ("predicted", "measured", "difference", "measured")


def render_live(predicted: Trace, measured: Trace) -> str:
    """The whole report of a live run beside its prediction."""
    lines = header(measured)
    for group in rank_groups(measured):
        every = "each rank" if len(group.ranks) == len(measured.ranks) else group.label
        expected, got = predicted.ranks[group.first.rank], group.first
        lines += ["", *_held(f"AT REST, {every}", expected.at_rest, got.at_rest)]
        lines += ["", *_held(f"AT THE PEAK, {every}", expected.peak().by_category, got.peak().by_category)]
        lines += _when(expected, got)
        lines += ["", *_wire(f"ON THE WIRE, {every}", expected, got)]
    lines += [*_allocator(measured), *_losses(measured), *_step_time(measured), *_environment(measured)]
    for note in measured.notes:
        lines += ["", *wrap(f"Note: {note}", WIDTH)]
    return "\n".join(lines) + "\n"


def _pair(label: str, expected: int, got: int) -> list[str]:
    difference = f"{got - expected:+,}" if got != expected else "0"
    return [f"  {label}", f"{expected:,}", f"{got:,}", difference, format_decimal_nbytes(got)]


def _held(title: str, expected: Mapping[Category, int], got: Mapping[Category, int]) -> list[str]:
    rows = [[title, *_HEADS]]
    for category in CATEGORY_ORDER:
        if category in expected or category in got:
            rows.append(_pair(category.value, expected.get(category, 0), got.get(category, 0)))
    rows.append(_pair("total", sum(expected.values()), sum(got.values())))
    return columns(rows)


def _when(expected: RankTrace, got: RankTrace) -> list[str]:
    predicted, measured = peak_sentence(expected.peak()), peak_sentence(got.peak())
    if predicted == measured:
        return entry("  when, both", measured)
    return [*entry("  when, predicted", predicted), *entry("  when, measured", measured)]


def _wire(title: str, expected: RankTrace, got: RankTrace) -> list[str]:
    sent = {(total.op, total.dtype): total for total in expected.wire()}
    seen = {(total.op, total.dtype): total for total in got.wire()}
    if not sent and not seen:
        return [f"{title}: nothing; one rank has nobody to send to."]
    rows = [[title, *_HEADS]]
    for key in dict.fromkeys((*sent, *seen)):
        before = sent[key].sent_nbytes if key in sent else 0
        after = seen[key].sent_nbytes if key in seen else 0
        calls = {total.count for total in (sent.get(key), seen.get(key)) if total}
        many = "/".join(f"{count:,}" for count in sorted(calls))
        rows.append(_pair(f"{many} {key[0].value} {key[1]}", before, after))
    rows.append(_pair("sent", expected.sent_nbytes, got.sent_nbytes))
    return columns(rows)


def _allocator(trace: Trace) -> list[str]:
    """The allocator's figures beside the counted ones: two meters of one process, never mixed."""
    lines: list[str] = []
    for ranks, rank in _alike(trace.ranks, lambda rank: (rank.allocator, rank.rest_nbytes, rank.peak().total)):
        reading = rank.allocator
        if reading is None:
            continue
        title = "ALLOCATOR, each rank" if len(ranks) == len(trace.ranks) else f"ALLOCATOR, {rank_label(ranks)}"
        rows = [[title, "counted", "allocator", "difference", "allocator"]]
        rows.append(_pair("at rest", rank.rest_nbytes + rank.step_counter_nbytes, reading.rest_nbytes))
        rows.append(_pair("peak", rank.peak().total + rank.step_counter_nbytes, reading.peak_nbytes))
        lines += ["", *columns(rows), *entry("  read from", reading.source)]
    return lines


def _losses(trace: Trace) -> list[str]:
    ranks = [rank for rank in trace.ranks if rank.losses]
    if not ranks:
        return []
    num_steps = len(ranks[0].losses)
    steps = list(range(num_steps))
    if num_steps > MAX_LOSS_STEPS:
        steps = [0, *steps[-(MAX_LOSS_STEPS - 1) :]]

    def row(label: str, losses: Sequence[float]) -> list[str]:
        return [f"  {label}", *(f"{losses[step]:.4f}" for step in steps)]

    rows = [["LOSS", *(f"step {step + 1:,}" for step in steps)]]
    if len(ranks) <= MAX_LOSS_RANKS:
        rows += [row(f"rank {rank.rank}", rank.losses) for rank in ranks]
    means = [sum(rank.losses[step] for rank in ranks) / len(ranks) for step in range(num_steps)]
    rows.append(row("mean of the ranks", means))
    return ["", *columns(rows, min_width=11)]


def _step_time(trace: Trace) -> list[str]:
    times = [rank.step_time_ns for rank in trace.ranks if rank.step_time_ns]
    if not times:
        return []
    slowest = [max(step) / 1e6 for step in zip(*times, strict=True)]
    shown = slowest if len(slowest) <= MAX_LOSS_STEPS else slowest[-(MAX_LOSS_STEPS - 1) :]
    which = "each step" if shown is slowest else f"last {len(shown)} steps"
    return ["", *entry("STEP TIME", f"{', '.join(f'{ms:,.1f}' for ms in shown)} ms ({which}, slowest rank)")]


def _environment(trace: Trace) -> list[str]:
    if not trace.environment:
        return []
    text = ", ".join(f"{name} {value}" for name, value in trace.environment.items() if value not in (None, "", [], {}))
    return ["", *entry("ENVIRONMENT", text)]


def _alike(
    ranks: Iterable[RankTrace], key: Callable[[RankTrace], object]
) -> Iterable[tuple[tuple[int, ...], RankTrace]]:
    groups: dict[object, list[RankTrace]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return [(tuple(rank.rank for rank in members), members[0]) for members in groups.values()]
