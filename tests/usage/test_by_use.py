"""Dollars by use: whose requests, what was donated, and what was idle."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.models import Donation, DonationState, SloClass, SloKind
from controlplane.usage.by_use import by_use, dollars_by_use
from controlplane.usage.models import UsageHour
from tests.inventory import *  # noqa: F403 (fixtures)

KINDS = {"chat": "interactive", "batch": "non_interactive", "spare": "opportunistic"}
USD = st.floats(0, 1e6)


@pytest.mark.parametrize(
    ("donated_usd", "spot_usd", "idle_usd"),
    [(0, 1, 8), (1, 1, 8), (5, 5, 4), (100, 9, 0)],
    ids=["nothing donated", "donated and busy", "donated, partly idle", "all that was idle was donated"],
)
def test_idle_time_of_donated_instances_is_spot(donated_usd, spot_usd, idle_usd):
    dollars = by_use([("chat", 4.0), ("batch", 2.0), ("spare", 1.0), ("gone", 1.0), (None, 8.0)], KINDS, donated_usd)
    assert dollars == (4, 3, spot_usd, idle_usd)


@given(st.lists(st.tuples(st.sampled_from([*KINDS, "gone", None]), USD)), USD)
def test_no_dollar_is_lost_or_counted_twice(costs, donated_usd):
    dollars = by_use(costs, KINDS, donated_usd)
    assert dollars.total_usd == pytest.approx(sum(usd for _, usd in costs))
    assert min(dollars) >= 0


@pytest.mark.django_db
def test_stored_hours_are_summed(acme, slo_class, make_instance):
    SloClass.objects.create(name="spare", title="Spare", kind=SloKind.OPPORTUNISTIC)
    hour = datetime(2026, 3, 2, 12, tzinfo=UTC)
    common = {"hour": hour, "model": "m"}
    UsageHour.objects.create(**common, tenant=acme, slo_class=slo_class.name, cost_usd=3.0)
    UsageHour.objects.create(**common, tenant=acme, slo_class="spare", cost_usd=0.5)
    UsageHour.objects.create(**common, cost_usd=4.0)
    UsageHour.objects.create(hour=hour - timedelta(hours=1), model="m", cost_usd=9.0)
    Donation.objects.create(
        instance=make_instance(), actor="planner", spot_usd_per_hour=Decimal("1.2"), state=DonationState.RECLAIMED,
        donated_at=hour - timedelta(hours=1), reclaim_at=hour + timedelta(minutes=30),
        ended_at=hour + timedelta(minutes=31),
    )  # fmt: skip
    # Half an hour of two GPUs for $1.35 each.
    assert dollars_by_use(hour, hour + timedelta(hours=1)) == pytest.approx((3.0, 0.0, 1.35, 3.15))
