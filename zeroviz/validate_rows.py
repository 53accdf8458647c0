"""What `zeroviz validate` compares: a Row is one published figure and the same figure worked out here."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from math import floor

from zeroviz.references import Reference


class Rule(Enum):
    """How a printed figure is compared with an exact one. Each is sharper than one unit of the last printed place."""

    EXACT = "exact"
    """The same, to the last digit."""
    ROUND = "round"
    """Rounded half up to the digits printed."""
    TRUNCATE = "truncate"
    """Cut off after the digits printed."""
    CLOSE = "close"
    """Within `rel_tol` of it: the expected figure is a float's digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a study page made of the figure. printed: as it stands there. carried: the rounded figures it came from.

    verdict: `right`, `right-rounded`, `sloppy`, or `inconsistent` with another place of the same page.
    """

    verdict: str
    printed: str | None = None
    carried: Fraction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. expected: as the source prints it. got: worked out here, exactly; text where it is no number.

    by: the function of zeroviz that worked it out, or the formula. formula, formula_got: for a row that has both, the
    published formula and what it gives, which must then hold as well.
    """

    id: str
    what: str
    expected: str
    got: Fraction | int | str
    unit: str = ""
    rule: Rule = Rule.EXACT
    rel_tol: float = 0.0
    by: str
    is_product: bool = True
    formula: str = ""
    formula_got: Fraction | None = None
    claim: Claim | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        if isinstance(self.got, str):
            return self.got == self.expected
        figures = [Fraction(self.got)] + ([] if self.formula_got is None else [self.formula_got])
        return all(self._agrees(figure) for figure in figures) and self._is_explained(figures[0])

    def _agrees(self, got: Fraction) -> bool:
        if self.rule is Rule.CLOSE:
            expected = Fraction(self.expected)
            return abs(got - expected) <= Fraction(str(self.rel_tol)) * abs(expected)
        return (self.rule is Rule.EXACT and got == Fraction(self.expected)) or is_printed_as(
            got, self.expected, self.rule
        )

    def _is_explained(self, got: Fraction) -> bool:
        """Whether what a page prints comes from this figure, or from the rounded ones that it carried on with."""
        claim = self.claim
        if claim is None or claim.printed is None:
            return True
        # Pages do not say how they round, and a zero at the end of a whole number need not be a known digit.
        printed = str(Decimal(claim.printed).normalize())
        figure = got if claim.carried is None else claim.carried
        return any(is_printed_as(figure, printed, rule) for rule in (Rule.ROUND, Rule.TRUNCATE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rows of one table, under its source. about: what the table says and how it rounds."""

    name: str
    reference: Reference
    place: str = ""
    about: str
    rows: tuple[Row, ...]

    @property
    def source(self) -> str:
        return f"{self.reference.title}, {self.place}" if self.place else self.reference.title


def is_printed_as(figure: Fraction, printed: str, rule: Rule) -> bool:
    """Whether `figure`, rounded or truncated to the last digit of `printed` (0.01 of 1.88, 1000 of 2E+3), is that."""
    unit = Fraction(10) ** int(Decimal(printed).as_tuple().exponent)
    half = Fraction(1, 2) if rule is Rule.ROUND else 0
    return floor(figure / unit + half) * unit == Fraction(printed)


def figure_text(value: Fraction | int) -> str:
    """A fraction as decimal text: exactly where it ends within eight digits after the point, else eight digits."""
    exact = Fraction(value)
    if exact.denominator == 1:
        return str(exact.numerator)
    scaled = exact * 10**8
    if scaled.denominator == 1:
        return f"{Decimal(scaled.numerator).scaleb(-8).normalize():f}"
    return f"{float(exact):.8g}"
