"""Clock and days of a series: a model sees windows by the local clock, so that a season is the same time of day.

Where the clocks go forward the missing hour is a gap, and where they go back the second of the two hours is left out. Days
are of a kind: working days, Saturdays, and Sundays with holidays.
"""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

WORKING, SATURDAY, SUNDAY = range(3)
"""Kinds of days; a holiday is a Sunday."""


@dataclass(frozen=True, slots=True)
class Calendar:
    """*zone* and *holidays* of the people who ask."""

    zone: str = "UTC"
    holidays: frozenset[date] = frozenset()

    def positions(self, start_s: float, window_s: float, count: int) -> NDArray[np.int64]:
        """Return the number by the local clock of each of *count* windows from *start_s*, in seconds since 1970.

        It counts windows since 1970 of the zone: the clocks' changes make steps of other than one.
        """
        starts_s = start_s + window_s * np.arange(count)
        if self.zone == "UTC" or not count:
            return np.asarray(np.rint(starts_s / window_s), np.int64)
        zone = ZoneInfo(self.zone)
        # Clocks change at whole quarters of an hour.
        quarters, at = np.unique(starts_s // 900, return_inverse=True)
        moved_s = [_offset(zone, 900.0 * quarter) for quarter in quarters.tolist()]
        return np.asarray(np.rint((starts_s + np.array(moved_s)[at]) / window_s), np.int64)

    def kinds(self, days: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the kind of each of *days*, counted from 1 January 1970, a Thursday."""
        weekday = (days + 3) % 7
        kinds = np.where(weekday == 6, SUNDAY, np.where(weekday == 5, SATURDAY, WORKING))
        if self.holidays:
            epoch = date(1970, 1, 1)
            kinds = np.where(np.isin(days, [(day - epoch).days for day in self.holidays]), SUNDAY, kinds)
        return kinds


def _offset(zone: ZoneInfo, at_s: float) -> float:
    moment = datetime.fromtimestamp(0, UTC) + timedelta(seconds=at_s)
    return (moment.astimezone(zone).utcoffset() or timedelta()).total_seconds()


def straightened(values: Values, positions: NDArray[np.int64]) -> Values:
    """Return *values* by local window from the least position to the highest: NaN where there is none, the first of two."""
    least = positions.min(initial=positions[0])
    out = np.full(int(positions.max() - least) + 1, np.nan)
    out[(positions - least)[::-1]] = values[::-1]
    return out


@dataclass(frozen=True, slots=True)
class Days:
    """Days of the windows of a model: *first* is the position of its window 0, *season* the windows of a day."""

    calendar: Calendar
    first: int
    season: int

    def kinds(self, windows: NDArray[np.int64], back: NDArray[np.int64] | int = 0) -> NDArray[np.int64]:
        """Return the kind of the day of each of *windows*, or of the day *back* days before."""
        return self.calendar.kinds((self.first + windows) // self.season - back)
