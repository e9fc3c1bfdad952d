"""Forecasts and plans over hours of the demo: never later than twice their period, whatever slows or kills a worker.

Beat, the broker and three workers under a clock of the test's own; tasks, locks and rows are the real ones.
"""

import heapq
import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from controlplane.jobs.schedule import look_s
from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts import services as forecasts
from controlplane.planning.models import Forecast, ScalingPlan, ScalingPolicy
from controlplane.planning.plans import services as plans
from scheduling.planning.advisor import valid_until_s
from workers.tasks import planning as tasks

pytestmark = pytest.mark.django_db
START = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
PERIOD_S = 60.0


class Killed(BaseException):
    """kill -9: nothing of the task runs any more, and the operating system lets go of its locks."""


class Stack:
    """Beat looks every LOOK_S; a look that comes while a worker is busy is another worker's."""

    def __init__(self, look_s, seed):
        self.now_s, self.look_s, self.random = 0.0, look_s, random.Random(seed)
        self.looks = [look_s]
        self.outages = []
        """(from, to) in seconds: no message is sent or taken."""
        self.kill_share = 0.0
        self.takes_s = {"forecasts": (1.0, 3.0), "plans": (0.5, 2.0)}
        self.made = {"forecasts": [], "plans": []}
        self.workers = 3

    def now(self):
        return START + timedelta(seconds=self.now_s)

    def work(self, what, now, write):
        """A task of that many seconds; other triggers arrive meanwhile."""
        until_s = self.now_s + self.random.uniform(*self.takes_s[what])
        if self.random.random() < self.kill_share:
            self.run(self.now_s + self.random.random() * (until_s - self.now_s))
            raise Killed
        self.run(until_s)
        write(now)
        self.made[what].append(now)
        return [None]

    def run(self, until_s):
        while self.looks and self.looks[0] <= until_s:
            look_s = heapq.heappop(self.looks)
            heapq.heappush(self.looks, look_s + self.look_s)
            self.now_s = max(self.now_s, look_s + self.random.uniform(0.0, 0.5))
            if self.workers and not any(begin <= look_s < end for begin, end in self.outages):
                self.workers -= 1
                try:
                    tasks.forecast_and_plan()
                except Killed:
                    pass
                finally:
                    self.workers += 1
        self.now_s = max(self.now_s, until_s)

    def longest_gap_s(self, what, until_s):
        moments = [START, *self.made[what], START + timedelta(seconds=until_s)]
        return max((later - earlier).total_seconds() for earlier, later in pairwise(moments))


@pytest.fixture
def stack(settings, tmp_path, monkeypatch, language_model):
    settings.STATE_DIR, settings.FORECAST_EVERY_S, settings.PLAN_EVERY_S = tmp_path, PERIOD_S, PERIOD_S
    ScalingPolicy.objects.create(model=language_model, strategy="lt_ua")
    ScalingPolicy.objects.update(changed_at=START - timedelta(days=1))
    stack = Stack(look_s(), seed=1)
    monkeypatch.setattr(tasks.timezone, "now", stack.now)

    def forecast(now):
        Forecast.objects.create(
            made_at=now, model="m", region="r", quantity="prompt", forecaster="x", window_s=60, start_at=now
        )

    def plan(now):
        # One window is forecast: it may be over at once, as at the end of a long period.
        ends_s = valid_until_s(now.timestamp(), PERIOD_S, demand.window_start(now, 60).timestamp() + 60)
        until = datetime.fromtimestamp(ends_s, UTC)
        ScalingPlan.objects.create(model=language_model, strategy="x", made_at=now, valid_until=until)

    monkeypatch.setattr(forecasts, "make_forecasts", lambda now: stack.work("forecasts", now, forecast))
    monkeypatch.setattr(plans, "make_plans", lambda now, models: stack.work("plans", now, plan))
    return stack


HOURS_S = 2 * 3600.0


def check(stack, until_s=HOURS_S):
    assert stack.longest_gap_s("forecasts", until_s) <= 2 * PERIOD_S
    assert stack.longest_gap_s("plans", until_s) <= 2 * PERIOD_S
    rows = ScalingPlan.objects.order_by("made_at").values_list("made_at", "valid_until")
    for (_, until), (successor_at, _) in pairwise(rows):
        assert successor_at <= until, "some time had no plan in force"


@pytest.mark.nightly
def test_on_a_quiet_machine_they_keep_their_period(stack):
    stack.run(HOURS_S)
    check(stack)
    for what in ("forecasts", "plans"):
        assert HOURS_S / PERIOD_S * 0.85 < len(stack.made[what]) <= HOURS_S / PERIOD_S + 1
        assert stack.longest_gap_s(what, HOURS_S) <= PERIOD_S + 2 * stack.look_s


@pytest.mark.nightly
def test_when_forecasts_take_longer_than_their_period(stack):
    stack.takes_s["forecasts"] = (40.0, 100.0)
    stack.run(HOURS_S)
    check(stack)


@pytest.mark.nightly
def test_when_every_third_task_is_killed_in_the_middle(stack):
    stack.kill_share = 1 / 3
    stack.run(HOURS_S)
    check(stack)


@pytest.mark.nightly
def test_when_redis_is_away_for_most_of_a_period_again_and_again(stack):
    stack.outages = [(at, at + 45.0) for at in range(100, int(HOURS_S), 400)]
    stack.run(HOURS_S)
    check(stack)
