"""The local clock: a season is the same time of day over changes of the clocks, and days are of kinds."""

from datetime import UTC, date, datetime
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.workload import FORECASTERS, Series
from forecasting.workload.calendar import SATURDAY, SUNDAY, WORKING, Calendar, Days, straightened
from forecasting.workload.experts import FARTHEST_DAYS, _days_of_the_kind

WINDOW_S = 1800.0
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Chatham")
moments = st.integers(0, 365 * 48).map(lambda at: datetime(2026, 1, 1, tzinfo=UTC).timestamp() + WINDOW_S * at)


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@given(st.sampled_from(ZONES), moments, st.integers(1, 400))
def test_a_position_is_the_time_of_the_zones_clock(zone, start_s, count):
    positions = Calendar(zone).positions(start_s, 900.0, count)
    for at, position in enumerate(positions.tolist()):
        local = datetime.fromtimestamp(start_s + 900.0 * at, ZoneInfo(zone)).replace(tzinfo=UTC)
        assert position * 900.0 == local.timestamp()


@given(st.sampled_from(ZONES), moments, st.integers(1, 400))
def test_by_the_clock_each_window_has_its_value_and_an_hour_twice_the_first(zone, start_s, count):
    positions, values = Calendar(zone).positions(start_s, WINDOW_S / 2, count), np.arange(count, dtype=float)
    straight, least = straightened(values, positions), int(positions.min())
    for position in range(least, int(positions.max()) + 1):
        had = values[positions == position]
        np.testing.assert_equal(straight[position - least], had[0] if len(had) else np.nan)


def by_the_clock(zone: str, start: str, days: int) -> Series:
    """A rate that is the minute of the local day."""
    starts_s = seconds(start) + WINDOW_S * np.arange(days * 48)
    local = [datetime.fromtimestamp(at, ZoneInfo(zone)) for at in starts_s]
    return Series(
        seconds(start), WINDOW_S, np.array([60.0 * at.hour + at.minute for at in local]), zone, Calendar(zone)
    )


@pytest.mark.parametrize("start", ["2026-03-26T00:00", "2026-10-22T00:00"])
@pytest.mark.parametrize("zone", ["Europe/Berlin", "UTC"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_day_like_the_last_is_foretold_over_a_change_of_the_clocks(start, zone, saved):
    series = by_the_clock(zone, start, 6)
    kind = FORECASTERS["seasonal_naive"]
    forecaster = kind()
    forecaster.fit(series.part(0, 72))
    wrong = 0
    for at in range(72, len(series) - 6):
        if saved and at % 40 == 0:
            forecaster = kind.load(forecaster.state())
        wrong += int((forecaster.predict(6).mean != series.tokens_per_s[at : at + 6]).sum())
        assert forecaster.predict(1).start_s == series.start_s + WINDOW_S * at
        forecaster.update(series.tokens_per_s[at : at + 1])
    # The hour that comes twice is foretold as its last known value; in spring the missing hour has none for the next day.
    assert wrong <= (0 if zone == "UTC" else 24)
    plain = kind()
    plain.fit(Series(series.start_s, WINDOW_S, series.tokens_per_s[:72]))
    unaware = 0
    for at in range(72, len(series) - 6):
        unaware += int((plain.predict(6).mean != series.tokens_per_s[at : at + 6]).sum())
        plain.update(series.tokens_per_s[at : at + 1])
    assert unaware >= (0 if zone == "UTC" else 200)


@pytest.mark.parametrize(
    ("day", "kind"),
    [
        ("2026-11-27", WORKING), ("2026-11-28", SATURDAY), ("2026-11-29", SUNDAY), ("2026-11-30", WORKING),
        ("2026-12-25", SUNDAY), ("2026-12-26", SUNDAY), ("1970-01-01", WORKING), ("1970-01-03", SATURDAY),
    ],
)  # fmt: skip
def test_kinds_of_days(day, kind):
    holidays = frozenset({date(2026, 12, 25), date(2026, 12, 26)})
    number = np.array([(date.fromisoformat(day) - date(1970, 1, 1)).days])
    assert Calendar("UTC", holidays).kinds(number).tolist() == [kind]


@given(
    st.integers(0, 20_000), st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(1, 3), st.integers(1, 3)
)
def test_days_of_a_kind_are_the_last_ones(first_day, targets, nearest, count):
    days = Days(Calendar(), 48 * first_day, 48)
    found = _days_of_the_kind(days, 48 * np.array(targets), np.full(len(targets), nearest), count)
    for target, backs in zip(targets, found.T.tolist(), strict=True):
        kinds = {back: days.kinds(np.array(48 * target), back) for back in range(FARTHEST_DAYS)}
        same = [back for back in range(nearest, FARTHEST_DAYS) if kinds[back] == kinds[0]]
        assert backs == [*same, *[FARTHEST_DAYS] * count][:count]


@pytest.mark.nightly
def test_weekends_are_foretold_better_by_days_of_their_kind():
    """Three weeks of work by the clock, with quiet weekends: what is learned in two, judged in the third, an hour ahead."""
    random, window_s = np.random.default_rng(5), 1800.0
    start_s = seconds("2026-09-07T00:00")
    local = [datetime.fromtimestamp(start_s + window_s * at, ZoneInfo("Europe/Berlin")) for at in range(21 * 48)]
    shape = [
        0.15 + (0.3 if at.weekday() >= 5 else 1.0) * np.exp(-(((at.hour + at.minute / 60 - 13) / 3.5) ** 2))
        for at in local
    ]
    values = 1000 * np.array(shape) * np.exp(0.1 * random.standard_normal(len(shape)))
    errors = {}
    for name, calendar in (("plain", None), ("calendar", Calendar("Europe/Berlin"))):
        forecaster = FORECASTERS["blend"]()
        series = Series(start_s, window_s, values, calendar=calendar)
        forecaster.fit(series.part(0, 14 * 48))
        of = {True: [], False: []}
        for at in range(14 * 48, len(values) - 4):
            turns = local[at + 3].weekday() in (0, 5)
            of[turns].append(abs(forecaster.predict(4).mean[3] - values[at + 3]) / values.mean())
            forecaster.update(values[at : at + 1])
        errors[name] = {turns: float(np.mean(each)) for turns, each in of.items()}
    assert errors["calendar"][True] < 0.9 * errors["plain"][True]  # Saturdays and Mondays
    assert errors["calendar"][False] < 1.05 * errors["plain"][False]
