"""What is shown of demand over a long time is the mean of its windows, not one of many."""

from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from controlplane.gateway.models import MinuteRow
from controlplane.planning.outlook import POINTS, see

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 20, 12, 0, tzinfo=timezone.get_default_timezone())


@pytest.mark.parametrize("hours", [6, 7 * 24])
def test_a_short_demand_is_seen_over_any_time(deployment, slo_class, settings, hours):
    settings.FORECAST_WINDOW_S = 60
    MinuteRow.objects.bulk_create(
        MinuteRow(
            minute=NOW - timedelta(minutes=back),
            model="llama-3.1-8b",
            region="us-east",
            slo_class="interactive",
            requests=1,
            prompt_tokens=6_000,
        )
        for back in range(5, 9)
    )
    seen = see("", "", hours, NOW)
    assert len(seen.starts) <= POINTS
    assert max(filter(None, seen.actual)) == pytest.approx(100.0)
