"""The one reader of sizes and speeds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.sizes import parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("0", 0), ("12", 12), ("12b", 12), (" 12 B ", 12), ("4096", 4096)),
        *(("4K", 4000), ("4kB", 4000), ("4KB", 4000), ("4KiB", 4096), ("4 kib", 4096)),
        *(("1GiB", 1 << 30), ("1gib", 1 << 30), ("1Gi", 1 << 30), ("1G", 10**9), ("1GB", 10**9)),
        *(("1.5MiB", 3 << 19), ("0.001K", 1), ("2TiB", 2 << 40), ("3PB", 3 * 10**15)),
        *(("0.5", Fraction(1, 2)), ("1.1KiB", Fraction(11264, 10))),
        ("999999999999999999", 999_999_999_999_999_999),
    ],
)
def test_sizes_are_exact(text: str, expected: int | Fraction) -> None:
    found = parse_bytes(text)
    assert found == expected
    assert isinstance(found, int) == (Fraction(expected).denominator == 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "K", "-1", "+1", "1e3", "4iB", "4i", "4 K B", "4  K", "1,5K", "4Kbit", "4X", "nan"),
        *("9" * 19, ".5", "5.", "1.0123456789", "٤K", "4K\n5", "4\u212aB"),
    ],
)
def test_what_is_no_size_is_none(text: str) -> None:
    assert parse_bytes(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("25Gbit", 3.125e9), ("25 Gbit/s", 3.125e9), ("100Gbps", 12.5e9), ("12GB", 12e9)),
        *(("1.5 TB/s", 1.5e12), ("500Mbit", 62.5e6), ("8kbit", 1e3), ("12e9", 12e9)),
        *(("8bit", 1.0), ("8B", 8.0), ("700000", 7e5), (" 1kB/s ", 1e3), ("1.5E+3", 1500.0)),
    ],
)
def test_speeds_are_bytes_per_second(text: str, expected: float) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "25Gb",
        "25 gbit",
        "25GBps",
        "-1GB",
        "1GiB",
        "1PB",
        "nan",
        "9" * 16,
        "1e-3",
        "2e100",
    ],
)
def test_what_is_no_speed_is_none(text: str) -> None:
    assert parse_rate(text) is None


@given(st.integers(0, 10**18 - 1), st.sampled_from(("", "K", "M", "G", "T", "P")), st.booleans())
def test_whole_numbers_are_multiplied_exactly(number: int, prefix: str, is_binary: bool) -> None:
    power = " KMGTP".index(prefix or " ")
    text = f"{number}{prefix}{'i' if is_binary and prefix else ''}B"
    assert parse_bytes(text) == number * (1024 if is_binary else 1000) ** power


@given(st.text(max_size=24))
def test_any_text_is_a_size_or_none(text: str) -> None:
    found = parse_bytes(text)
    assert found is None or found >= 0
    rate = parse_rate(text)
    assert rate is None or rate >= 0
