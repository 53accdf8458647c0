"""Counts and bytes: what is read is exact, what is printed names its unit."""

from __future__ import annotations

import pytest

from zeroviz.errors import SpecError
from zeroviz.quantity import (
    GB,
    GIB,
    format_binary_nbytes,
    format_decimal_nbytes,
    format_gb_gib,
    format_nbytes,
    parse_count,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7e9", 7_000_000_000),
        ("7B", 7_000_000_000),
        ("7b", 7_000_000_000),
        ("7_000_000", 7_000_000),
        ("7,000,000", 7_000_000),
        ("1.5k", 1500),
        ("1", 1),
        ("1e18", 10**18),
        # 2**53 + 1 is the first whole number a float cannot hold.
        ("9007199254740993", 9007199254740993),
    ],
)
def test_counts_are_read_exactly(text: str, count: int) -> None:
    assert parse_count(text, "--params") == count


@pytest.mark.parametrize(
    "text", ["", "B", "0", "-1", "0.5", "1e-5", "nan", "inf", "sNaN", "0x10", "seven", "1e19", "1e9999999999"]
)
def test_other_counts_are_refused_by_name(text: str) -> None:
    with pytest.raises(SpecError, match=r"^--params is .* must be a whole number from 1 to 1e18"):
        parse_count(text, "--params")


def test_a_long_answer_is_quoted_to_its_eightieth_letter_and_the_sentence_goes_on() -> None:
    with pytest.raises(SpecError) as caught:
        parse_count("9" * 400, "--params")
    assert str(caught.value).startswith(f"--params is '{'9' * 80}…'; it must be a whole number")


def test_gb_and_gib_are_never_the_same_word() -> None:
    # 38.5e9 / 1e9 = 38.5; 38.5e9 / 2**30 = 35.856.
    assert format_gb_gib(38_500_000_000) == "38.50 GB (35.86 GiB)"
    assert format_nbytes(38_500_000_000) == "38.5 GB"
    assert format_decimal_nbytes(38_500_000_000) == "38.50 GB"
    assert format_binary_nbytes(38_500_000_000) == "35.86 GiB"
    assert (format_decimal_nbytes(GB), format_binary_nbytes(GIB)) == ("1.00 GB", "1.00 GiB")


def test_small_and_negative_bytes() -> None:
    assert (format_nbytes(0), format_nbytes(999), format_nbytes(1000)) == ("0 B", "999 B", "1 kB")
    assert (format_binary_nbytes(1023), format_binary_nbytes(1024)) == ("1023 B", "1.00 KiB")
    assert format_decimal_nbytes(-1_500_000) == "-1.50 MB"


def test_columns_know_a_larger_unit() -> None:
    assert (format_decimal_nbytes(16 * 10**15), format_binary_nbytes(2**50)) == ("16.00 PB", "1.00 PiB")


@pytest.mark.parametrize("power", range(1, 11))
def test_each_unit_takes_over_where_the_one_before_would_have_four_digits(power: int) -> None:
    unit = "kMGTPEZYRQ"[power - 1]
    assert format_decimal_nbytes(1000**power) == f"1.00 {unit}B" and format_nbytes(1000**power) == f"1 {unit}B"
    assert format_binary_nbytes(1024**power) == f"1.00 {unit.upper()}iB"
    # A byte less belongs to the unit before, which has at most 1,023 of its own.
    assert not format_binary_nbytes(1024**power - 1).endswith(f"{unit.upper()}iB")


def test_beyond_the_last_unit_there_is_an_exponent() -> None:
    # A peak of 2**40 sequences of 2**40 tokens in a 70B model, of a million ranks, is some 1e37 bytes.
    assert (format_decimal_nbytes(10**37), format_nbytes(10**37)) == ("1.00e+07 QB", "1.000e+7 QB")
