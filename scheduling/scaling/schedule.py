"""Scheduled minimums of instances: at least so many on these weekdays between two times of a zone's clock.

A window begins on a day of `weekdays` that is not excepted, and ends at the next `ends` after it, which may be tomorrow's.
Times are the clock's: a window that a change of the clocks lengthens or shortens still begins and ends by the clock. Where
a time does not exist, the clock's jump stands for it; where it exists twice, windows begin at the first and end at the last.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import TypeVar
from zoneinfo import ZoneInfo, available_timezones

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EVERY_DAY = frozenset(range(7))
SUCH_AS = {"weekdays": "mon", "begins": "08:30", "ends": "18:00", "except_on": "2026-12-25"}
CHUNK_S = 86_400.0
"""Time for which windows are listed at once."""
EARLY_S = 15.0
"""Beside the time of a start: by which an instance is asked for before a window, since scaling looks now and then."""
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Rule:
    """At least *instances* between *begins* and *ends*; the same time twice is a whole day. Monday is 0."""

    instances: int
    begins: time
    ends: time
    weekdays: frozenset[int] = EVERY_DAY
    zone: str = "UTC"
    except_on: frozenset[date] = frozenset()

    @classmethod
    def read(
        cls, instances: int, begins: str, ends: str, weekdays: Iterable[str], zone: str, except_on: Iterable[str]
    ) -> "Rule":
        """Return the rule of texts such as 08:30, mon and 2026-12-25. Raise ValueError, naming the field, for others."""
        days = frozenset(_read("weekdays", WEEKDAYS.index, each) for each in weekdays)
        if zone not in available_timezones():
            raise ValueError(f"time_zone: there is no time zone {zone!r}, name one such as Europe/Berlin")
        first, last = _read("begins", time.fromisoformat, begins), _read("ends", time.fromisoformat, ends)
        excepted = frozenset(_read("except_on", date.fromisoformat, each) for each in except_on)
        return cls(instances, first, last, days or EVERY_DAY, zone, excepted)

    def windows(self, from_s: float, until_s: float) -> Iterator[tuple[float, float]]:
        """Yield (begin, end) of each window that overlaps *from_s* to *until_s*, in seconds since 1970."""
        zone = ZoneInfo(self.zone)
        day = datetime.fromtimestamp(from_s, zone).date() - timedelta(1)
        while (begin_s := datetime.combine(day, self.begins, zone).timestamp()) < until_s:
            if day.weekday() in self.weekdays and day not in self.except_on:
                last = day + timedelta(self.ends <= self.begins)
                end_s = datetime.combine(last, self.ends, zone).replace(fold=1).timestamp()
                if end_s > from_s:
                    yield begin_s, end_s
            day += timedelta(1)


def clock_changes(zone: str, from_s: float, until_s: float) -> Iterator[tuple[float, float]]:
    """Yield (moment, seconds that clocks of *zone* are put forward, below 0 back) of each change, to the hour."""
    at_s, offset = from_s // 3600 * 3600, ZoneInfo(zone).utcoffset
    while at_s < until_s:
        before, after = (offset(datetime.fromtimestamp(each, ZoneInfo(zone))) for each in (at_s, at_s + 3600))
        at_s += 3600
        if before != after and before is not None and after is not None:
            yield at_s, (after - before).total_seconds()


def _read(field: str, read: Callable[[str], Read], text: str) -> Read:
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{field}: {text!r} is not such as {SUCH_AS[field]}") from error


class Schedule:
    """The rules of one endpoint."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = tuple(rules)
        self._listed: tuple[float, float, list[tuple[float, float, int]]] = (0.0, 0.0, [])

    def minimum(self, now_s: float, ahead_s: float = 0.0) -> int:
        """Return the most instances that any rule wants between *now_s* and *ahead_s* later, in seconds since 1970."""
        if not self.rules:
            return 0
        begin_s, end_s, windows = self._listed
        if not begin_s <= now_s <= now_s + ahead_s < end_s:
            begin_s, end_s = now_s, now_s + ahead_s + CHUNK_S
            windows = [(*each, rule.instances) for rule in self.rules for each in rule.windows(begin_s, end_s)]
            self._listed = begin_s, end_s, windows
        return max((count for begin, end, count in windows if begin <= now_s + ahead_s and end > now_s), default=0)

    def steps(self, from_s: float, until_s: float) -> list[tuple[float, int]]:
        """Return (moment, minimum from then on) of each change within *from_s* to *until_s*, the first at *from_s*."""
        windows = [(*each, rule.instances) for rule in self.rules for each in rule.windows(from_s, until_s)]
        moments = sorted({from_s, *(at for window in windows for at in window[:2] if from_s < at < until_s)})
        of = [(at, max((count for begin, end, count in windows if begin <= at < end), default=0)) for at in moments]
        return [each for at, each in enumerate(of) if not at or of[at - 1][1] != each[1]]


NO_SCHEDULE = Schedule()
Schedules = Mapping[tuple[str, str], Schedule]
"""By (model, region)."""


def schedules_of(rules: Iterable[tuple[str, str, Rule]], regions: Sequence[str]) -> Schedules:
    """Return the schedule of each endpoint that has rules, each with its model and region; "" is each of *regions*."""
    by: dict[tuple[str, str], list[Rule]] = {}
    for model, region, rule in rules:
        for each in [region] if region else regions:
            by.setdefault((model, each), []).append(rule)
    return {key: Schedule(of) for key, of in by.items()}
