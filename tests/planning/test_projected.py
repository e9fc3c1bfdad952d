"""The week ahead: each hour's plan, with the minimums and the maintenance of that hour, and the capacity that it is."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from controlplane.console.charts.demand import demand_chart
from controlplane.fleet.models import Maintenance, Node, Region, ScheduledMinimum
from controlplane.fleet.selectors import cordoned_for_good
from controlplane.gateway.models import MinuteRow
from controlplane.planning import outlook, services
from controlplane.planning.models import PolicyMode, ProjectedFleet
from controlplane.planning.plans import projected
from controlplane.planning.plans.services import make_plans
from tests.planning.conftest import NOW, PLACE

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("minute_windows")]
FIRST = datetime(2026, 3, 2, 13, tzinfo=UTC)
NIGHT, DAY = range(6), range(9, 18)
NEED_S = 60 * 15_000
"""Tokens of a minute that need more than two instances of three."""


@pytest.fixture
def busy(make_minutes, make_instance, language_model):
    """An instance, and demand for three."""
    make_instance(node=Node.objects.get())
    services.set_policy(language_model, "lt_ua", PolicyMode.AUTO, {}, "a test")
    make_minutes(20, prompt=NEED_S * 2, output=NEED_S // 4)


@pytest.fixture
def days(busy):
    """Three days, of which the hours of `DAY` are busy."""
    MinuteRow.objects.bulk_create(
        MinuteRow(
            minute=at, model=PLACE[0], region=PLACE[1], slo_class="interactive", requests=10,
            prompt_tokens=NEED_S * 2 if at.hour in DAY else 6_000, output_tokens=NEED_S // 4 if at.hour in DAY else 600,
        )
        for ago in range(1, 72)
        if (at := NOW.replace(minute=30, second=0) - timedelta(hours=ago))
    )  # fmt: skip


def by_moment() -> dict[datetime, int]:
    (row,) = projected.make(NOW)
    ((*place, counts),) = row.places
    assert place == [*PLACE, "a100-80gb"]
    return dict(zip([datetime.fromtimestamp(at_s, UTC) for at_s in row.moments], counts, strict=True))


def test_each_hour_of_the_week_is_planned_for_its_forecast(days):
    made = by_moment()
    assert (min(made), len(made)) == (FIRST, 7 * 24)
    tomorrow = {at.hour: count for at, count in made.items() if at.date() == FIRST.date() + timedelta(days=1)}
    assert {tomorrow[hour] for hour in NIGHT} == {1}
    assert {tomorrow[hour] for hour in DAY[1:-1]} == {3}


def test_without_two_days_of_demand_every_hour_is_planned_as_now(busy):
    (plan,) = make_plans(NOW)
    assert set(by_moment().values()) == {plan.targets[0]["target"]}


def test_a_scheduled_minimum_and_maintenance_hold_from_their_begin_to_their_end(days, language_model, node):
    ScheduledMinimum.objects.create(name="early", model=language_model, instances=2, begins="03:30", ends="05:00")
    begins = FIRST.replace(hour=11) + timedelta(days=2, minutes=15)
    window = {"from_at": begins, "until": begins + timedelta(hours=2), "reason": "a test", "created_by": "a test"}
    Maintenance.objects.create(region=Region.objects.get(), **window)
    made = by_moment()
    tomorrow = FIRST.replace(hour=0) + timedelta(days=1)
    assert [made[tomorrow + timedelta(hours=hour)] for hour in (3, 3.5, 4, 5)] == [1, 2, 2, 1]
    assert [made[begins + timedelta(minutes=late)] for late in (-15, 0, 45, 105, 120)] == [3, 0, 0, 0, 3]


def test_a_place_that_its_maintenance_cordons_now_is_there_again_after_it(days, node):
    window = {"from_at": NOW, "until": FIRST + timedelta(hours=2), "reason": "a test", "created_by": "a test"}
    Maintenance.objects.create(node=node, begun_at=NOW, cordon="maintenance: a test", **window)
    Node.objects.update(cordoned="maintenance: a test")
    made = by_moment()
    assert [made[FIRST + timedelta(hours=hour)] for hour in (0, 1, 2)] == [0, 0, 3]
    assert cordoned_for_good() == []


def test_the_newest_projection_is_the_capacity_ahead(days):
    make_plans(NOW)
    made, (_, last) = by_moment(), (by_moment(), by_moment())
    assert made == last
    assert ProjectedFleet.objects.count() == 1
    able = outlook.capabilities()[PLACE[0], "a100-80gb"]
    seen = outlook.see(PLACE[0], "", 24, NOW, 48)
    assert [at for at, _ in seen.projected] == [at for at in made if at < NOW + timedelta(hours=48)]
    np.testing.assert_allclose([value for _, value in seen.projected], [made[at] * able for at, _ in seen.projected])
    chart = demand_chart(seen, PLACE[0], "", "calendar")
    assert "capacity, projected" in [series.label for series in chart.series]
    assert chart.table.header[-1] == "Capacity, projected (tok/s)"
    for values, left_out in (({"cordoned": "operator: repairs"}, True), ({"cordoned": ""}, False)):
        Node.objects.update(**values)
        caption = demand_chart(outlook.see(PLACE[0], "", 24, NOW, 48), PLACE[0], "", "calendar").caption
        assert ("left out to the end, as cordoned without one: node-1" in caption) == left_out
    assert {row[-1] for row in chart.table.rows if row[0] > NOW + timedelta(hours=1)} == {able, 3 * able}
    assert outlook.see(PLACE[0], "", 24, NOW).projected == []
