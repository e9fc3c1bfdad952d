"""The demo's generated past on the pages: drawn as such, part of no error, and mentioned while learned from."""

from datetime import UTC, datetime, timedelta

import pytest
from django.urls import reverse

from controlplane.console.pages.forecast import charts
from controlplane.console.pages.forecast import selectors as outlooks
from controlplane.console.pages.forecast.selectors import OutlookFilter
from controlplane.gateway.models import MinuteRow
from controlplane.planning.forecasts import selectors
from controlplane.planning.models import Forecast

NOW = datetime(2026, 11, 20, 14, 23, 20, tzinfo=UTC)
SERIES = ("llama-3.1-8b", "us-east")
NOTICE = "learn from a generated past"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("django.utils.timezone.now", lambda: NOW)


def page(reader, name="forecast") -> str:
    answer = reader.get(reverse(f"console:{name}"))
    assert answer.status_code == 200
    return answer.content.decode()


def minute(at: datetime, output: int) -> None:
    series = {"model": SERIES[0], "region": SERIES[1], "slo_class": "interactive"}
    MinuteRow.objects.create(minute=at, prompt_tokens=3 * output, output_tokens=output, **series)


def generated(**of: datetime) -> None:
    """Mark the existing rows as generated."""
    MinuteRow.objects.filter(**of).update(generated=True)


def test_a_generated_past_is_drawn_as_such_and_judges_nothing(deployment, reader):
    for back in range(1, 31):
        minute(NOW.replace(second=0) - timedelta(minutes=back), 600 * back)
    counted_from = NOW.replace(second=0) - timedelta(minutes=10)
    generated(minute__lt=counted_from)
    at = NOW - timedelta(minutes=29)
    values = {name: [10.0] * 40 for name in ("mean", "lower_80", "upper_80", "lower_95", "upper_95")}
    of = {"model": SERIES[0], "region": SERIES[1], "quantity": "output", "forecaster": "blend", "window_s": 60}
    Forecast.objects.create(made_at=at, start_at=at.replace(second=0), **of, **values)
    seen = outlooks.see(OutlookFilter(*SERIES, "output", 6), NOW)
    young = seen.outlook.since_known()
    assert [start for start, value in zip(young.starts, young.generated, strict=True) if value] == [
        counted_from - timedelta(minutes=back) for back in range(20, 0, -1)
    ]
    assert next(start for start, value in zip(young.starts, young.actual, strict=True) if value) == counted_from
    # Counting began within the first minute: that one is shown but not judged.
    assert seen.accuracy.windows == sum(value is not None for value in young.actual) - 1 == 8
    chart = charts.demand_and_forecast(seen.outlook, "")
    assert {line.label for line in chart.series} > {"actual", "generated"}
    assert chart.table.header[-1] == "Generated (tok/s)"
    assert selectors.demand_now("output", NOW) == {SERIES: 60.0}  # minutes 2 to 10 before, not the generated ones
    html = page(reader)
    assert NOTICE in html
    assert ">generated<" in html
    scaling = page(reader, "scaling")
    assert NOTICE in scaling
    assert NOTICE in page(reader, "plans")


def test_without_a_generated_past_nothing_speaks_of_one(deployment, reader):
    minute(NOW.replace(second=0) - timedelta(minutes=2), 600)
    for name in ("forecast", "scaling", "plans"):
        assert "generated" not in page(reader, name)


def test_a_generated_past_that_is_learned_from_no_more_is_not_spoken_of(deployment, reader, settings):
    minute(NOW - timedelta(days=settings.FORECAST_HISTORY_DAYS, minutes=2), 600)
    generated()
    assert selectors.generated_past(NOW) is None
