"""Number formats for people."""

from datetime import UTC, datetime

import pytest

from controlplane.console.formats import FORMATS, amount, bar, mark, moment, seconds, ticking


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("quantity", 38.44, "38.4"),
        ("quantity", 48_230, "48.2k"),
        ("quantity", 1_234_567, "1.23M"),
        ("milliseconds", 8.44, "8.4 ms"),
        ("milliseconds", 412.2, "412 ms"),
        ("milliseconds", 1_500, "1.50 s"),
        ("milliseconds", 73_000, "73.0 s"),
        ("percent", 0.615, "62%"),
        ("percent_fine", 0.9996, "99.9%"),
        ("percent_fine", 1.0, "100%"),
        ("clock", 119.7, "2:00 min"),
        ("count", 1329, "1,329"),
        ("ready_of", 63, "63 of 64"),
    ],
)
def test_numbers_read_as_people_write_them(name, value, text):
    assert FORMATS[name](value, {"instances": 64}) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (10, "10"), (9_999, "9,999"), (48_230, "48.2k"), (None, "\N{EN DASH}")]
)
def test_counts_have_no_decimals(value, text):
    assert amount(value) == text


def test_marks_bars_and_times_escape_and_say_what_they_show():
    assert 'href="#mark-ready"' in mark("ready")
    assert "<b>" not in mark("<b>")
    assert 'data-level="critical"' in bar(0.99)
    assert 'width="100.0"' in bar(7.0)
    assert ticking("age", None) == FORMATS["count"](None, {})
    assert ticking("since", 0.0).startswith('<time datetime="1970-01-01T00:00:00+00:00" data-since="0.0">')


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (datetime(2026, 11, 27, 9, 5, 7), "09:05:07"),
        (datetime(2026, 11, 26, 23, 59, 58), "26 Nov 23:59:58"),
        (datetime(2025, 11, 27, 9, 5, 7), "27 Nov 2025 09:05:07"),
        (datetime(1970, 1, 1, tzinfo=UTC), "the start"),
    ],
)
def test_times_of_today_have_no_date(at, text):
    assert moment(at, datetime(2026, 11, 27, 20, 0, 0)) == text


@pytest.mark.parametrize(
    ("value_s", "text"), [(0.64, "0.6 s"), (99.9, "99.9 s"), (99.96, "1:40 min"), (5_220.0, "1:27 h")]
)
def test_short_times_are_in_seconds_and_longer_ones_in_minutes(value_s, text):
    assert seconds(value_s) == text
