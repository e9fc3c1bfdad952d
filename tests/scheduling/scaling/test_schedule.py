"""Scheduled minimums: windows by the clock of a zone, and instances that are ready when one begins."""

from datetime import UTC, date, datetime, time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.scaling import FLOOR, make_strategy
from scheduling.scaling.schedule import Rule, Schedule, schedules_of
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.cluster.world import State
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.strategies import Bounds, Control
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.scaling.test_in_simulation import ENGINE

HOUR_S = 3600.0
MONDAY_S = datetime(2026, 3, 2, tzinfo=UTC).timestamp()
minutes = st.integers(0, 1439).map(lambda at: time(at // 60, at % 60))
rules = st.builds(
    Rule,
    st.integers(1, 9),
    minutes,
    minutes,
    st.frozensets(st.integers(0, 6), min_size=1),
    except_on=st.frozensets(st.dates(date(2026, 3, 1), date(2026, 3, 20))),
)


def wanted(rule: Rule, at_s: float) -> int:
    """The minimum of a rule in UTC, from the minute of the day and of the day before."""
    now = datetime.fromtimestamp(at_s, UTC)
    minute, begins, ends = (each.hour * 60 + each.minute for each in (now, rule.begins, rule.ends))
    today, yesterday = (
        day.weekday() in rule.weekdays and day not in rule.except_on
        for day in (now.date(), date.fromordinal(now.toordinal() - 1))
    )
    over_midnight = ends <= begins
    within = today and minute >= begins and (over_midnight or minute < ends)
    return rule.instances if within or (over_midnight and yesterday and minute < ends) else 0


@given(st.lists(rules, max_size=3), st.lists(st.integers(0, 14 * 1440), min_size=1, max_size=20), st.integers(0, 300))
def test_the_minimum_is_that_of_the_clock(rules, moments, ahead_min):
    schedule = Schedule(rules)
    for minute in moments:
        at_s = MONDAY_S + 60 * minute
        now = max((wanted(each, at_s) for each in rules), default=0)
        assert schedule.minimum(at_s) == now
        some = (
            (max(wanted(each, at_s + 60 * later) for each in rules) for later in range(ahead_min + 1)) if rules else [0]
        )
        assert schedule.minimum(at_s, 60.0 * ahead_min) == max(some)


@given(st.lists(rules, max_size=3), st.integers(0, 1440), st.integers(1, 4 * 1440))
def test_steps_are_where_the_minimum_changes(rules, begin, minutes):
    schedule, begin_s = Schedule(rules), MONDAY_S + 60 * begin
    steps = schedule.steps(begin_s, begin_s + 60 * minutes)
    assert steps[0][0] == begin_s
    assert all(before[1] != after[1] for before, after in pairwise(steps))
    for minute in range(0, minutes, 7):
        at_s = begin_s + 60 * minute
        assert [count for moment, count in steps if moment <= at_s][-1] == schedule.minimum(at_s)


@pytest.mark.parametrize(
    ("begins", "ends", "day", "begin_utc", "hours"),
    [
        ("08:00", "18:00", "2026-03-27", "07:00", 10),  # winter
        ("08:00", "18:00", "2026-03-30", "06:00", 10),  # summer
        ("22:00", "06:00", "2026-03-28", "21:00", 7),  # an hour is missing in this night
        ("22:00", "06:00", "2026-10-24", "20:00", 9),  # and one comes twice in this
        ("02:30", "04:00", "2026-03-29", "01:30", 0.5),  # there is no 02:30: at 03:30 of summer
        ("01:00", "02:30", "2026-10-25", "23:00", 2.5),  # until the later 02:30
        ("00:00", "00:00", "2026-10-25", "22:00", 25),  # a whole day
    ],
)
def test_changes_of_the_clocks(begins, ends, day, begin_utc, hours):
    rule = Rule.read(2, begins, ends, [], "Europe/Berlin", [])
    noon_s = datetime.fromisoformat(f"{day}T12:00+00:00").timestamp()
    windows = rule.windows(noon_s - 12 * HOUR_S, noon_s + 12 * HOUR_S)
    known = {f"{datetime.fromtimestamp(begin_s, UTC):%H:%M}": end_s - begin_s for begin_s, end_s in windows}
    assert known[begin_utc] == hours * HOUR_S


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("begins", "8 am", "begins: '8 am' is not such as 08:30"),
        ("ends", "25:00", "ends: '25:00' is not such as 18:00"),
        ("weekdays", ["mon", "someday"], "weekdays: 'someday' is not such as mon"),
        ("zone", "Berlin", "time_zone: there is no time zone 'Berlin'"),
        ("except_on", ["Christmas"], "except_on: 'Christmas' is not such as 2026-12-25"),
    ],
)
def test_what_is_wrong_is_named(field, value, text):
    given = {"instances": 1, "begins": "08:00", "ends": "18:00", "weekdays": [], "zone": "UTC", "except_on": []}
    with pytest.raises(ValueError, match=text):
        Rule.read(**{**given, field: value})


@pytest.mark.parametrize("name", ["floor", "reactive", "lt_ua", "pilothouse"])
def test_instances_are_ready_when_a_window_begins_and_leave_after_it(name):
    start_s = 300.0
    specs = [
        InstanceSpec("llama", "east", ENGINE, state=state, start_s=start_s, pull_s=0.0)
        for state in [State.READY] + [State.EMPTY] * 5
    ]
    count = 400  # one request every half minute needs one instance
    requests = make_requests(np.arange(count) * 30.0, np.full(count, 20), np.full(count, 10))
    simulation = Simulation(Cluster(specs), requests)
    strategy = make_strategy(name)
    control = Control(simulation, strategy, {("llama", "east"): Bounds(1, 4)}, {("llama", "east"): FLOOR})
    rule = Rule(6, time(1), time(2))  # the bounds allow four
    control.follow(schedules_of([("llama", "", rule)], ["east"]), MONDAY_S)
    ready: dict[float, int] = {}

    def act(simulation):
        control(simulation)
        ready[simulation.now_s] = int((simulation.states == State.READY).sum())

    simulation.run(act, 1.0, 3 * HOUR_S)
    assert ready[HOUR_S - start_s - 20] == 1
    assert ready[HOUR_S] == 4
    assert min(ready[at] for at in np.arange(HOUR_S, 2 * HOUR_S)) == 4
    assert ready[3 * HOUR_S - 1] < 4
