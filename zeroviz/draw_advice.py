"""Advice -> words: a table for the page, whose changes can be pressed, and text of 80 columns for a terminal.

It says the same in both: whether it fits and by how much; then the changes, the lowest peak first, each with its peak,
whether it fits, what falls and what it costs; then, where none is enough, a combination.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import Any

from zeroviz.advice import Advice, Change
from zeroviz.capacity_line import both
from zeroviz.changes import as_plain
from zeroviz.columns import WIDTH

MAX_CHANGES = 8
"""Shown; how many more there are is said."""
CAPTION = "What to cut first, one change at a time, the lowest peak first"
_HEADS = ("change", "peak", "fits", "what falls at the peak", "what it costs")


def verdict_words(advice: Advice, name: str = "the GPU") -> str:
    """`Does not fit h100-80gb by 28.50 GB (26.54 GiB).`, or what is spare and the largest batch. Empty where a
    reserve leaves nothing to speak of."""
    if not 0 <= advice.reserve_nbytes < advice.capacity_nbytes:
        return ""
    if not advice.fits:
        return f"Does not fit {name} by {both(-advice.spare_nbytes)}."
    words = f"Fits {name} with {both(advice.spare_nbytes)} to spare."
    if advice.largest_batch is None or advice.largest_batch_peak_nbytes is None:
        return words
    if advice.largest_batch == advice.spec.batch:
        return f"{words} No larger batch fits than the present {advice.spec.batch:,}."
    return (
        f"{words} The largest batch that still fits is {advice.largest_batch:,}, now it is {advice.spec.batch:,}: peak "
        f"{both(advice.largest_batch_peak_nbytes)}."
    )


def together_words(advice: Advice) -> str:
    """What stands above the combination; what to say where there is none. Empty where a single change fits."""
    if advice.fits or advice.why_not or any(change.fits for change in advice.changes):
        return ""
    if not advice.changes:
        return "No change that is known here lowers the peak; take a smaller model, or a larger GPU."
    last, count = advice.together[-1], len(advice.together)
    if last.fits:
        return f"No single change is enough. These {count} together are, found one after the other:"
    many = f"these {count} together are not" if count > 1 else "no second one helps"
    return f"No single change is enough, and {many}; {both(-last.spare_nbytes)} are still too much:"


# ---- the page ----


def advice_html(advice: Advice, name: str = "the GPU", *, can_press: bool = False) -> str:
    """The advice as HTML. Every change carries its toggles as JSON in `data-toggles`, for `changes.from_plain` to read.

    name: of the GPU. can_press: changes are buttons; whoever asks for them answers their clicks.
    """
    parts = [_paragraph("verdict", verdict_words(advice, name)), _paragraph("why-not", advice.why_not)]
    if advice.changes:
        parts.append(_table(advice.changes[:MAX_CHANGES], can_press))
        parts.append(_paragraph("more", _more(advice)))
    parts.append(_paragraph("together", together_words(advice)))
    if advice.together:
        parts.append(_list(advice, can_press))
    fits = str(advice.fits).lower()
    return f'<div class="zeroviz-tables zeroviz-advice" data-fits="{fits}">{"".join(parts)}</div>'


def _paragraph(kind: str, words: str) -> str:
    return f'<p class="zeroviz-{kind}">{escape(words)}</p>' if words else ""


def _table(changes: Iterable[Change], can_press: bool) -> str:
    heads = "".join(f'<th scope="col">{head}</th>' for head in _HEADS)
    body = "".join(_row(change, can_press) for change in changes)
    return (
        f'<div class="zeroviz-scroll" tabindex="0"><table class="zeroviz-changes"><caption>{CAPTION}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(change: Change, can_press: bool) -> str:
    costs = " ".join([f"{change.costs}.", *change.notes])
    return (
        f'<tr data-peak="{change.peak_nbytes}" data-fits="{str(change.fits).lower()}">'
        f'<th scope="row">{_pressed(change.words, change.toggles, can_press)}</th>'
        f"<td>{both(change.peak_nbytes)}</td><td>{_verdict(change)}</td>"
        f'<td class="zeroviz-words">{escape(change.reason)}</td>'
        f'<td class="zeroviz-words">{escape(costs)}</td></tr>'
    )


def _list(advice: Advice, can_press: bool) -> str:
    """The combination in the order in which it was found; a press takes all of it."""
    items = "".join(
        f'<li data-peak="{change.peak_nbytes}">{escape(change.words)}: peak {both(change.peak_nbytes)}, '
        f"{_verdict(change)}; {escape(change.reason)}</li>"
        for change in advice.together
    )
    steps = f'<ol class="zeroviz-changes-together">{items}</ol>'
    if len(advice.together) == 1:  # it stands in the table
        return steps
    named = ", ".join(change.words for change in advice.together)
    return steps + _pressed(f"All of it: {named}", advice.toggles_together, can_press)


def _pressed(words: str, toggles: Mapping[str, Any], can_press: bool) -> str:
    tag, more = ("button", ' type="button"') if can_press else ("span", "")
    return f'<{tag}{more} class="zeroviz-change" data-toggles="{_json(toggles)}">{escape(words)}</{tag}>'


def _json(toggles: Mapping[str, Any]) -> str:
    return escape(json.dumps(as_plain(toggles), separators=(",", ":")))


def _verdict(change: Change) -> str:
    """In words, for a sign alone is not read aloud and a colour is not seen by all."""
    return "fits" if change.fits else "not enough"


def _more(advice: Advice) -> str:
    left = len(advice.changes) - MAX_CHANGES
    return f"{left} more {'change' if left == 1 else 'changes'} with higher peaks." if left > 0 else ""


# ---- the terminal ----


def advice_text(advice: Advice, name: str = "the GPU") -> str:
    """The advice as text, no line longer than 80 columns."""
    paragraphs = [wrap(words, WIDTH) for words in (verdict_words(advice, name), advice.why_not) if words]
    if advice.changes:
        shown = advice.changes[:MAX_CHANGES]
        paragraphs.append([*wrap(f"{CAPTION}:", WIDTH), *_lines(shown), *wrap(_more(advice), WIDTH)])
    if words := together_words(advice):
        paragraphs.append([*wrap(words, WIDTH), *_lines(advice.together)])
    return "\n\n".join("\n".join(lines) for lines in paragraphs) + "\n"


def _lines(changes: Sequence[Change]) -> Iterator[str]:
    """A change is a line of figures, and below it what falls and what it costs."""
    for number, change in enumerate(changes, 1):
        head = f"{number}. {change.words}"
        figures = f"peak {both(change.peak_nbytes)}, {_verdict(change)}"
        gap = WIDTH - len(head) - len(figures)
        yield from [f"{head}{' ' * gap}{figures}"] if gap >= 2 else [head, f"{figures:>{WIDTH}}"]
        words = " ".join([f"{change.reason}; {change.costs}.", *change.notes])
        yield from wrap(words, WIDTH, initial_indent="   ", subsequent_indent="   ")
