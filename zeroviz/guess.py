"""Predict first: a question about a step, up to four figures to choose from, and what a guess says about its maker.

    question = build_question(predict(spec), Asked.REST)
    answer(question, parse_guess("120 GB"), None).words
    "You said 120.0 GB, the model says 31.41 GB: off by a factor of 3.82."

[Note: choices] One choice is the right figure, to the byte. The others are figures of real misconceptions
(`zeroviz.guess_memory`, `zeroviz.guess_wire`), the likeliest first, each at least a tenth away from every other, so
that whoever has worked out a figure finds it and no second one beside it. If all of them lie on one side of the right
one, the last gives way to the likeliest of the other side, where there is one: the right figure is then not always the
smallest. They stand in order of their bytes, so the same step has the same choices in the same order.

A free guess is held against every misconception of the step, also those that are too near another to be a choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

from zeroviz.axis import amount
from zeroviz.errors import SpecError, TraceError
from zeroviz.guess_case import Case, Misconception
from zeroviz.guess_figure import Asked as Asked
from zeroviz.guess_figure import Figure as Figure
from zeroviz.guess_figure import Part as Part
from zeroviz.guess_figure import amounts, figure_of, part_label, question_words, sum_words, sums_of, unit_of
from zeroviz.guess_memory import at_peak, at_rest
from zeroviz.guess_wire import sent
from zeroviz.quantity import BINARY_UNITS, DECIMAL_UNITS
from zeroviz.spec import RunSpec
from zeroviz.trace import Origin, Trace

MOST_CHOICES, LEAST_CHOICES = 4, 2
APART = Decimal("1.1")
"""How many times the smaller of two choices the larger one is, at least."""
NEAR = Decimal("0.02")
"""How far a guess may be from a figure and still be taken for it."""
MOST_NBYTES = 10**24
_UNITS = {name.lower(): scale for name, scale in (*DECIMAL_UNITS, *BINARY_UNITS, ("B", 1), ("bytes", 1), ("byte", 1))}
"""By their names in small letters. No bare G: GB and GiB differ by 7 %, so whoever guesses has to say which."""
_NUMBER = re.compile(
    r"((?:[0-9]{1,3}(?:[,_][0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A figure to choose. text: in words, in the one unit of all choices. wrong: its error; None if it is right."""

    nbytes: int
    text: str
    wrong: Misconception | None

    @property
    def is_right(self) -> bool:
        return self.wrong is None


@dataclass(frozen=True)
class Question:
    """What is asked of one rank of a step, and all that is needed to answer it.

    words: the question in one sentence. model: the right figure. choices: by their bytes, the right one among them.
    known: every misconception of the step, the likeliest first.
    """

    spec: RunSpec
    what: Asked
    rank: int
    words: str
    model: Figure
    choices: tuple[Choice, ...]
    known: tuple[Misconception, ...]

    @property
    def right(self) -> Choice:
        """The choice that is right."""
        return next(choice for choice in self.choices if choice.is_right)


@dataclass(frozen=True)
class Answer:
    """A guess beside the model, and beside what was measured if there is that. In bytes.

    wrong: the misconception that the guess is, or is within 2 % of; None for others and for a right guess.
    """

    question: Question
    guess_nbytes: int
    measured: Figure | None
    measured_origin: Origin | None
    wrong: Misconception | None

    @property
    def model_nbytes(self) -> int:
        return self.question.model.nbytes

    @property
    def difference(self) -> int:
        """guess - model."""
        return self.guess_nbytes - self.model_nbytes

    @property
    def is_right(self) -> bool:
        """Whether the guess is within 2 % of the model's figure."""
        return _is_near(self.guess_nbytes, self.model_nbytes)

    @property
    def factor(self) -> float:
        """How many times the smaller of guess and model the larger one is: 1 or more."""
        return max(self.guess_nbytes, self.model_nbytes) / min(self.guess_nbytes, self.model_nbytes)

    @cached_property
    def unit(self) -> tuple[str, int]:
        """The unit that the model's figure is said in, and how many bytes it has."""
        measured = () if self.measured is None else (self.measured.nbytes,)
        return unit_of(self.guess_nbytes, *measured, self.model_nbytes)

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Guess, model and, where there is one, the measured figure, in one unit."""
        figures = [self.guess_nbytes, self.model_nbytes]
        return amounts(*figures, *([] if self.measured is None else [self.measured.nbytes]))

    @property
    def verdict(self) -> str:
        """`off by a factor of 3.82`, `right to the byte`, `right within 0.5 %`."""
        if not self.difference:
            return "right to the byte"
        if self.is_right:
            tenths = -(-abs(self.difference) * 1000 // self.model_nbytes)
            return f"right within {tenths / 10:g} %"
        return f"off by a factor of {factor_text(self.factor)}"

    @property
    def words(self) -> str:
        """`You said 120.0 GB, the model says 31.41 GB: off by a factor of 3.82.`"""
        return f"You said {self.texts[0]}, the model says {self.texts[1]}: {self.verdict}."

    @property
    def difference_words(self) -> str:
        """`88.59 GB too much`, `29.53 GB too little`; nothing where there is no difference."""
        if not self.difference:
            return ""
        text = amounts(abs(self.difference), self.guess_nbytes, self.model_nbytes)[0]
        return f"{text} too {'much' if self.difference > 0 else 'little'}"

    @property
    def why(self) -> str:
        """What of the state explains the gap: the misconception's sentence; for a guess that is none of them what most
        of the figure is; nothing for a right guess."""
        if self.wrong is not None:
            return self.wrong.sentence
        return "" if self.is_right else self.largest_words

    @property
    def largest_words(self) -> str:
        """What most of the model's figure is."""
        question = self.question
        sums = sums_of(question.model)
        key = max(sums, key=lambda key: sums[key])
        text = amount(sums[key], self.unit[0])
        return f"The largest part of the model's figure is {part_label(key, question.spec)}, {text}."

    @property
    def sum_words(self) -> str:
        """What the model's figure consists of, in one sentence."""
        return f"The model's {self.texts[1]} are {sum_words(self.question.model, self.question.spec, self.unit[0])}."

    @property
    def measured_words(self) -> str:
        """How far what was measured is from the model; nothing where nothing was."""
        if self.measured is None or self.measured_origin is None:
            return ""
        source, difference = self.measured_origin.label.capitalize(), self.measured.nbytes - self.model_nbytes
        if not difference:
            return f"{source}: {self.texts[2]}, the model's figure to the byte."
        more = "more" if difference > 0 else "less"
        return f"{source}: {self.texts[2]}, {abs(difference):,} B {more} than the model says."

    @property
    def sentence(self) -> str:
        """All of it in words, for those who do not see the picture."""
        return " ".join(filter(None, (self.question.words, self.words, self.why, self.sum_words, self.measured_words)))


def build_question(predicted: Trace, what: Asked, rank: int = 0) -> Question:
    """The question about `rank`. Raises SpecError where there is nothing to guess: the sentence says why."""
    case = Case(predicted, what, rank)
    if not case.exact.nbytes:
        raise SpecError(_nothing_words(case))
    known = _known(case)
    picked = _pick(case.exact.nbytes, known)
    if len(picked) + 1 < LEAST_CHOICES:
        raise SpecError("Nothing that is taken for this figure is far enough from it to be a choice; ask another one.")
    return Question(
        spec=case.spec,
        what=what,
        rank=rank,
        words=question_words(case.spec, what, rank),
        model=case.exact,
        choices=_choices(case.exact.nbytes, picked),
        known=(*known, *_misread(case.exact.nbytes)),
    )


def answer(question: Question, guess_nbytes: int, measured: Trace | None = None) -> Answer:
    """The guess beside the model and, of the same spec, what was measured. Raises TraceError for another spec."""
    if guess_nbytes < 1:
        raise SpecError(f"The guess is {guess_nbytes:,} bytes; it must be at least 1.")
    if measured is not None and measured.spec != question.spec:
        raise TraceError("The measured trace is of another spec than the question; a guess cannot stand beside both.")
    return Answer(
        question=question,
        guess_nbytes=guess_nbytes,
        measured=None if measured is None else figure_of(measured, question.what, question.rank),
        measured_origin=None if measured is None else measured.origin,
        wrong=_misconception_of(question, guess_nbytes),
    )


def parse_guess(text: str) -> int:
    """Bytes from `1.5 GB`, `1.5GiB`, `120 MB`, `7e9`, whatever the case of the unit. Raises SpecError otherwise.

    `1,500,000` is one and a half million; `1,5` could be one and a half and is refused.
    """
    found = _NUMBER.match(text.strip())
    unit = text.strip()[found.end() :].strip().lower() if found else ""
    scale = _UNITS.get(unit or "b")
    if found is None or scale is None:
        raise _refusal(text, "it must be a number, with a unit or of bytes, such as 1.5 GB, 1.5 GiB, 120 MB or 7e9")
    number = Decimal(re.sub("[,_]", "", found[0]))
    # An absurd exponent is refused before it is expanded into that many digits.
    nbytes = int((number * scale).to_integral_value()) if number.adjusted() <= 24 else 0
    if not 1 <= nbytes <= MOST_NBYTES:
        raise _refusal(text, "it must be from 1 byte to 1e24 bytes")
    return nbytes


def factor_text(factor: float) -> str:
    """Three significant digits, and never an exponent: `1.03`, `64.3`, `31,400`, `more than a million`."""
    if factor >= 10**6:
        return "more than a million"
    return f"{factor:.3g}" if factor < 999.5 else f"{float(f'{factor:.3g}'):,.0f}"


def _refusal(text: str, allowed: str) -> SpecError:
    return SpecError(f"The guess is {text!r}; {allowed}.")


def _nothing_words(case: Case) -> str:
    """Why there is nothing to guess."""
    if case.what is not Asked.SENT:
        return (
            f"All states of rank {case.rank:,} lie on the host between two steps, so its device holds nothing to guess."
        )
    if case.spec.ranks == 1:
        return "One rank has nobody to send to, so there is nothing to guess; take 2 ranks or more."
    return f"Rank {case.rank:,} sends nothing in this step, so there is nothing to guess."


def _known(case: Case) -> tuple[Misconception, ...]:
    """The misconceptions of the step, the likeliest first; none is the right figure, and no figure stands twice."""
    of_what = {Asked.REST: at_rest, Asked.PEAK: at_peak, Asked.SENT: sent}
    found: dict[int, Misconception] = {}
    for wrong in of_what[case.what](case):
        if wrong.nbytes > 0 and wrong.nbytes != case.exact.nbytes:
            found.setdefault(wrong.nbytes, wrong)
    return tuple(found.values())


def _misread(exact: int) -> Iterator[Misconception]:
    """GB taken for GiB and the other way: the same number in the wrong unit, and too near to be a choice."""
    for (unit, scale), (binary_unit, binary_scale) in zip(DECIMAL_UNITS, BINARY_UNITS, strict=True):
        if exact >= scale:
            same = f"{exact / scale:.4g} {unit} are {exact / binary_scale:.4g} {binary_unit}"
            words = f"The bytes are right and the unit is not: {same}."
            yield Misconception(f"{binary_unit} called {unit}", exact * scale // binary_scale, words)
            yield Misconception(f"{unit} called {binary_unit}", exact * binary_scale // scale, words)
            return


def _pick(exact: int, known: Iterable[Misconception]) -> list[Misconception]:
    """See [Note: choices]."""
    apart: list[Misconception] = []
    for wrong in known:
        if all(_is_apart(wrong.nbytes, nbytes) for nbytes in (exact, *(other.nbytes for other in apart))):
            apart.append(wrong)
    picked, left = apart[: MOST_CHOICES - 1], apart[MOST_CHOICES - 1 :]
    sides = {wrong.nbytes > exact for wrong in picked}
    other = next((wrong for wrong in left if (wrong.nbytes > exact) not in sides), None)
    return [*picked[:-1], other] if other else picked


def _choices(exact: int, picked: list[Misconception]) -> tuple[Choice, ...]:
    figures: list[tuple[int, Misconception | None]] = [(exact, None), *((wrong.nbytes, wrong) for wrong in picked)]
    figures.sort(key=lambda pair: pair[0])
    texts = amounts(*(nbytes for nbytes, _ in figures))
    return tuple(Choice(nbytes, text, wrong) for (nbytes, wrong), text in zip(figures, texts, strict=True))


def _misconception_of(question: Question, guess: int) -> Misconception | None:
    """The nearest of those that the guess is near, the likeliest of several; None for a right guess."""
    if _is_near(guess, question.model.nbytes):
        return None
    near = [wrong for wrong in question.known if _is_near(guess, wrong.nbytes)]
    return min(near, key=lambda wrong: abs(wrong.nbytes - guess), default=None)


def _is_apart(one: int, other: int) -> bool:
    return max(one, other) >= APART * min(one, other)


def _is_near(guess: int, nbytes: int) -> bool:
    return abs(guess - nbytes) <= NEAR * nbytes
