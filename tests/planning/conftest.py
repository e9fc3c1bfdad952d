"""Demand in rows, for what is forecast and planned from it."""

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.gateway.models import MinuteRow
from tests.inventory import *  # noqa: F403 (fixtures)

NOW = datetime(2026, 3, 2, 12, 0, 40, tzinfo=UTC)
PLACE = ("llama-3.1-8b", "us-east")


@pytest.fixture
def minute_windows(settings, tmp_path):
    """Five windows of a minute are forecast by the simplest forecaster, with files only of this test."""
    settings.FORECAST_WINDOW_S, settings.FORECAST_WINDOWS, settings.FORECASTER = 60, 5, "seasonal_naive"
    settings.STATE_DIR = tmp_path


@pytest.fixture
def make_minutes(deployment, slo_class):
    """`make_minutes(30, prompt=6000, …)`: write that many minutes before NOW, each with that many tokens."""

    def make(count, prompt=60_000, output=12_000, until=NOW, **values):
        until = until.replace(second=0, microsecond=0)
        defaults = {"model": PLACE[0], "region": PLACE[1], "slo_class": "interactive", "requests": 10} | values
        MinuteRow.objects.bulk_create(
            MinuteRow(minute=until - timedelta(minutes=ago), prompt_tokens=prompt, output_tokens=output, **defaults)
            for ago in range(1, count + 1)
        )

    return make
