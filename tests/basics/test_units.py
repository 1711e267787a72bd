"""Units: words in, words out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.basics import units

SAID = [
    (units.parse_seconds, "320ms", 0.32),
    (units.parse_seconds, "50us", 50e-6),
    (units.parse_seconds, "50 µs", 50e-6),
    (units.parse_seconds, "1.5s", 1.5),
    (units.parse_seconds, "2min", 120.0),
    (units.parse_seconds, " 1h ", 3600.0),
    (units.parse_seconds, "0", 0.0),
    (units.parse_seconds, "1e3ns", 1e-6),
    (units.parse_rate, "10Gbps", 1.25e9),
    (units.parse_rate, "100Mbps", 12.5e6),
    (units.parse_rate, "1.25GBps", 1.25e9),
    (units.parse_rate, "1.25 GB/s", 1.25e9),
    (units.parse_rate, "8 kbit/s", 1000.0),
    (units.parse_bytes, "25MB", 25_000_000),
    (units.parse_bytes, "64KiB", 65536),
    (units.parse_bytes, "512", 512),
    (units.parse_bytes, "100k", 100_000),
    (units.parse_bytes, "7B", 7),
    (units.parse_count, "100k", 100_000),
    (units.parse_count, "25.6M", 25_600_000),
    (units.parse_count, "7", 7),
    (units.parse_count, "1.5e3", 1500),
]

REFUSED = [
    (units.parse_seconds, "320", "'320' has no unit; write 320ms or 320s"),
    (units.parse_seconds, "3 parsecs", "'parsecs' is not a unit known here"),
    (units.parse_seconds, "-5ms", "'-5ms' is not a duration such as .*negative"),
    (units.parse_seconds, "nan", "is not a duration"),
    (units.parse_seconds, "", "is not a duration"),
    (units.parse_seconds, "1.2.3s", "is not a duration"),
    (units.parse_rate, "10G", "'10G' is not a rate"),
    (units.parse_rate, "0Gbps", "never deliver"),
    (units.parse_rate, "-1Gbps", "negative"),
    (units.parse_bytes, "25Mb", "'25Mb' is not a number of bytes"),
    (units.parse_bytes, "0.3B", "0.3 bytes, which is not a whole number"),
    (units.parse_count, "1.5", "not a whole number"),
    (units.parse_count, "25MB", "'25MB' is not a count"),
]

SHOWN = [
    (units.format_seconds, 0.00032, "320 µs"),
    (units.format_seconds, 0.0, "0 s"),
    (units.format_seconds, 0.9999, "1 s"),
    (units.format_seconds, 0.0123456, "12.3 ms"),
    (units.format_seconds, 59.97, "1 min"),
    (units.format_seconds, 90.0, "1.5 min"),
    (units.format_seconds, 7200.0, "2 h"),
    (units.format_seconds, 3600.0 * 5000, "5000 h"),
    (units.format_seconds, -0.002, "-2 ms"),
    (units.format_seconds, 2e-10, "0.2 ns"),
    (units.format_seconds, math.inf, "inf s"),
    (units.format_bytes, 1.3e9, "1.3 GB"),
    (units.format_bytes, 512, "512 B"),
    (units.format_bytes, 999_999, "1 MB"),
    (units.format_bytes, 0, "0 B"),
    (units.format_rate, 1.25e9, "10 Gbps"),
    (units.format_rate, 12.5e6, "100 Mbps"),
    (units.format_count, 25_600_000, "25.6M"),
    (units.format_count, 7, "7"),
    (units.format_count, 0, "0"),
]


@pytest.mark.parametrize(("parse", "text", "value"), SAID)
def test_words_mean_numbers(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value
    assert type(parse(text)) is type(value)


@pytest.mark.parametrize(("parse", "text", "sentence"), REFUSED)
def test_unclear_words_are_answered_with_a_sentence(parse: Callable[[str], float], text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(text)


@pytest.mark.parametrize(("show", "value", "text"), SHOWN)
def test_numbers_are_shown_with_three_digits_and_a_unit(show: Callable[[float], str], value: float, text: str) -> None:
    assert show(value) == text


@given(st.floats(1e-9, 1e8))
def test_a_shown_duration_can_be_read_back(seconds: float) -> None:
    assert units.parse_seconds(units.format_seconds(seconds)) == pytest.approx(seconds, rel=0.0051)


@given(st.floats(1.0, 1e14))
def test_a_shown_rate_can_be_read_back(rate: float) -> None:
    assert units.parse_rate(units.format_rate(rate)) == pytest.approx(rate, rel=0.0051)


@given(st.integers(1000, 10**17))
def test_shown_bytes_and_counts_can_be_read_back(count: int) -> None:
    assert units.parse_bytes(units.format_bytes(count)) == pytest.approx(count, rel=0.0051)
    assert units.parse_count(units.format_count(count)) == pytest.approx(count, rel=0.0051)
