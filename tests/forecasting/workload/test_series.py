import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.workload.series import (
    Series,
    aggregate,
    from_trace,
    windows_in_a_day,
    without_partial,
)

rates = st.lists(st.one_of(st.floats(0, 1e6), st.just(math.nan)), max_size=60)


@pytest.mark.parametrize(
    ("window_s", "values", "word"),
    [
        (0.0, [1.0], "window"),
        (60.0, [-1.0], "rate"),
        (60.0, [math.inf], "rate"),
        (60.0, [[1.0]], "dimension"),
    ],
)
def test_an_invalid_series_is_refused(window_s, values, word):
    with pytest.raises(ValueError, match=word):
        Series(0.0, window_s, np.array(values))


def test_a_series_keeps_its_own_values():
    values = np.array([1.0, 2.0])
    series = Series(0.0, 60.0, values)
    values[0] = 9.0
    assert series.tokens_per_s[0] == 1.0
    with pytest.raises(ValueError):
        series.tokens_per_s[0] = 9.0


def test_a_part_begins_where_it_begins():
    series = Series(600.0, 60.0, np.arange(10.0), "x")
    part = series.part(2, 5)
    assert (part.start_s, part.end_s, part.name) == (720.0, 900.0, "x")
    assert part.tokens_per_s.tolist() == [2.0, 3.0, 4.0]
    assert series.part(8, 99).end_s == series.end_s


def test_a_trace_is_counted_by_window_and_its_last_window_is_left_out():
    series = from_trace([0.0, 30.0, 59.9, 130.0, 185.0], [60, 30, 30, 600, 1], 60.0)
    assert series.start_s == 0.0
    assert series.tokens_per_s.tolist() == [2.0, 0.0, 10.0]
    assert len(from_trace([], [], 60.0)) == 0
    assert from_trace([5.0], [60], 60.0).tokens_per_s.tolist() == [1.0]


def test_traces_that_cannot_be():
    with pytest.raises(ValueError, match="one of each"):
        from_trace([1.0, 2.0], [1], 60.0)
    with pytest.raises(ValueError, match="from 0 up"):
        from_trace([-1.0], [1], 60.0)
    with pytest.raises(ValueError, match="more than"):
        from_trace([0.0, 1e12], [1, 1], 60.0)


@given(
    st.lists(st.tuples(st.floats(0, 5000), st.integers(0, 10_000)), min_size=1, max_size=80),
    st.sampled_from([1.0, 60.0, 600.0]),
)
def test_no_token_of_a_trace_is_lost_but_in_the_last_window(requests, window_s):
    arrivals, tokens = zip(*requests, strict=True)
    series = from_trace(arrivals, tokens, window_s)
    plain = [0.0] * (int(max(arrivals) // window_s) + 1)
    for at_s, count in requests:
        plain[int(at_s // window_s)] += count
    plain = plain[:-1] if len(plain) > 1 else plain
    assert np.allclose(series.tokens_per_s * window_s, plain)


@given(rates, st.integers(0, 20), st.sampled_from([1, 2, 5, 10]))
def test_wide_windows_are_means_of_what_is_known(values, lead, factor):
    series = Series(60.0 * lead, 60.0, np.array(values))
    wide = aggregate(series, 60.0 * factor)
    assert wide.start_s % (60.0 * factor) == 0 or factor == 1
    for index, rate in enumerate(wide.tokens_per_s):
        begin_s = wide.start_s + index * wide.window_s
        inside = [
            value
            for place, value in enumerate(values)
            if begin_s <= series.start_s + 60.0 * place < begin_s + wide.window_s and not math.isnan(value)
        ]
        if len(inside) >= max(1, 0.5 * factor):
            assert rate == pytest.approx(sum(inside) / len(inside))
        else:
            assert math.isnan(rate)


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no whole number"):
        aggregate(Series(0.0, 60.0, np.ones(9)), 90.0)
    with pytest.raises(ValueError, match="no whole number"):
        aggregate(Series(0.0, 600.0, np.ones(9)), 60.0)


def test_a_partly_collected_window_is_a_gap_and_a_quiet_one_is_not():
    values = np.full(100, 50.0)
    values[10] = 0.5  # quiet, but nothing around it is missing
    values[40:43], values[43], values[39] = np.nan, 1.0, 0.5  # the collector stopped and came back
    values[60:62], values[62] = np.nan, 30.0  # it came back in time
    mended = without_partial(Series(0.0, 600.0, values)).tokens_per_s
    assert np.flatnonzero(np.isnan(mended)).tolist() == [39, 40, 41, 42, 43, 60, 61]
    assert mended[10] == 0.5


@given(rates)
def test_mending_only_ever_makes_gaps(values):
    series = Series(0.0, 600.0, np.array(values))
    mended = without_partial(series)
    still = mended.known
    assert (series.tokens_per_s[still] == mended.tokens_per_s[still]).all()
    assert not (still & ~series.known).any()


def test_days():
    assert (windows_in_a_day(600.0), windows_in_a_day(60.0), windows_in_a_day(86_400.0 * 3)) == (144, 1440, 1)
