"""Demand, its forecast and capacity on one chart: past and expected, in one unit, and why there is no forecast."""

import csv
import functools
import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from django.urls import reverse

from controlplane.console.charts import demand
from controlplane.console.charts.demand import demand_chart
from controlplane.console.pages.models.selectors import model_rows
from controlplane.events.services import record
from controlplane.fleet.models import ScheduledMinimum, SloClass, SloKind
from controlplane.gateway.models import MinuteRow
from controlplane.planning import capacity
from controlplane.planning import outlook as outlooks
from controlplane.planning.forecasts import selectors
from controlplane.planning.forecasts.demand import DEFERRED
from controlplane.planning.models import Forecast, Quantity, ScalingMove
from controlplane.resources.tables import cell
from tests import database
from tests.console import planning_rows

NOW = datetime(2026, 11, 20, 14, 23, 20, tzinfo=UTC)
SERIES = ("llama-3.1-8b", "us-east")
WHOLE = (*SERIES, 6)
furnish = functools.partial(planning_rows.furnish, NOW)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("django.utils.timezone.now", lambda: NOW)


def page(reader, **query) -> str:
    answer = reader.get(reverse("console:model", args=[SERIES[0]]), query)
    assert answer.status_code == 200
    return answer.content.decode()


def table(answer) -> list[list[str]]:
    return list(csv.reader(io.StringIO(b"".join(answer.streaming_content).decode())))


def minute(
    at: datetime, output: int, region: str = "us-east", model: str = "llama-3.1-8b", slo_class: str = "interactive"
) -> None:
    MinuteRow.objects.create(
        minute=at, model=model, region=region, slo_class=slo_class, prompt_tokens=3 * output, output_tokens=output
    )


# Reading


def test_a_quiet_minute_has_no_demand_and_an_uncounted_one_is_unknown(db):
    begin = datetime(2026, 11, 20, 14, 0, tzinfo=UTC)
    minute(begin, 600)
    minute(begin + timedelta(minutes=1), 1200)
    minute(begin + timedelta(minutes=5), 999, region="us-west")  # the gateway ran, and this series was quiet
    starts = selectors.grid(begin, begin + timedelta(minutes=8), 120)
    assert selectors.demand(*SERIES, "output", starts, 120) == [15.0, None, 0.0, None]
    assert selectors.demand(*SERIES, "prompt", starts, 120) == [45.0, None, 0.0, None]
    assert selectors.demand(*SERIES, "output", [], 120) == []
    minute(begin, 60, slo_class="flexible")
    assert selectors.demand(*SERIES, "output", starts, 120, "flexible") == [0.5, None, 0.0, None]
    assert selectors.demand_now("output", begin + timedelta(minutes=3), "flexible") == {SERIES: 0.5}


def test_the_grid_holds_the_windows_that_meet_a_range():
    since, until = NOW, NOW + timedelta(minutes=20)
    starts = selectors.grid(since, until, 600)
    assert [start.minute for start in starts] == [20, 30, 40]
    assert starts[0] <= since
    assert starts[-1] < until <= starts[-1] + timedelta(seconds=600)


def test_a_past_window_has_what_was_said_last_before_it(db):
    begin = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
    for number in range(3):
        row = planning_rows.forecast(*SERIES, Quantity.OUTPUT, begin + timedelta(minutes=10 * number))
        row.mean = [100.0 * number + at for at in range(planning_rows.AHEAD)]
        row.save()
    other = planning_rows.forecast(*SERIES, Quantity.OUTPUT, begin)
    other.window_s = 60
    Forecast.objects.bulk_create([other])
    newest = Forecast.objects.filter(window_s=600).latest("pk")
    means = [window.mean for window in selectors.tracks([newest], begin)[0]]
    assert means[:4] == [0.0, 100.0, 200.0, 201.0]
    assert len(means) == 2 + planning_rows.AHEAD
    assert selectors.tracks([newest], begin + timedelta(minutes=15))[0][0].mean == 200.0


def test_accuracy_is_counted_by_hand():
    begin = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
    expected = [
        selectors.ForecastWindow(begin + timedelta(minutes=10 * at), 100.0, 90.0, 110.0, 80.0, 120.0) for at in range(5)
    ]
    actual = dict(zip((window.start for window in expected), [100.0, 125.0, 85.0, 0.0, None], strict=True))
    accuracy = selectors.accuracy(expected, actual)
    assert accuracy.windows == 4
    assert accuracy.coverage_80 == 1 / 4
    assert accuracy.coverage_95 == 2 / 4
    assert accuracy.error == pytest.approx((0 + 25 + 15 + 100) / (125 + 85 + 100))
    assert selectors.accuracy(expected, {}) == selectors.Accuracy(0, None, None, None)


def test_capacity_is_counted_in_the_planners_unit(make_instance, language_model):
    make_instance()
    planning_rows.plan(language_model, NOW, "superseded")
    minute(NOW - timedelta(minutes=3), 500)  # three times as many prompt tokens
    minute(NOW - timedelta(minutes=3), 100, slo_class="batch")
    assert capacity.capabilities() == {("llama-3.1-8b", "a100-80gb"): 3_100}
    load = capacity.endpoint_loads(NOW)[SERIES]
    assert (load.ready, load.capacity_tokens_per_s) == (1, 3_100)
    assert load.demand_tokens_per_s == 4 * 600 / 60  # prompts and outputs of both classes
    assert load.load == load.demand_tokens_per_s / 3_100


def test_past_capacity_is_without_what_was_moved_since(make_instance, language_model, deployment):
    make_instance(), make_instance()
    hour = timedelta(hours=1)
    moments = [NOW - 3 * hour, NOW - 1.5 * hour, NOW]
    over_time = functools.partial(capacity.capacity_over_time, moments=moments)
    assert over_time(*SERIES, loads=capacity.endpoint_loads(NOW)) == [None] * 3
    planning_rows.plan(language_model, NOW, "superseded")
    for at, delta in ((NOW - 2 * hour, 1), (NOW - hour, -1)):
        ScalingMove.objects.create(
            at=at,
            source="floor",
            strategy="floor",
            model=SERIES[0],
            region=SERIES[1],
            gpu_type="a100-80gb",
            delta=delta,
        )
    loads = capacity.endpoint_loads(NOW)
    for place in (SERIES, (SERIES[0], ""), ("", "")):
        assert over_time(*place, loads=loads) == [6_200.0, 9_300.0, 6_200.0]
    assert over_time(SERIES[0], "elsewhere", loads=loads) == [None] * 3


def test_an_outlook_ends_actual_demand_now_and_capacity_too(make_instance, language_model):
    for _ in range(2):
        make_instance()
    planning_rows.minutes(NOW, 3)
    planning_rows.forecasts(NOW, 3)
    planning_rows.plan(language_model, NOW, "advice")
    outlook = outlooks.see(*WHOLE, NOW)
    over = [start for start in outlook.starts if start + timedelta(minutes=10) <= NOW]
    for start, actual, able in zip(outlook.starts, outlook.actual, outlook.capacity, strict=True):
        assert start in over or actual is None
        assert (able is None) == (start > NOW)
    assert outlook.actual[len(over) - 1] is not None
    assert outlook.capacity_now == 2 * 3_100
    assert outlook.planned == pytest.approx(1.5 * outlook.capacity_now)  # the plan adds one to two
    ahead = [window for window in outlook.expected if window and window.start >= NOW.replace(minute=20, second=0)]
    assert outlook.peak == max(ahead, key=lambda window: window.mean)


# The page


@pytest.fixture
def furnished(make_instance):
    """Demand, forecasts and plans; deferred demand is a ninth of the interactive one, and expected as such."""
    make_instance()
    database.write(furnish_both)


def furnish_both() -> None:
    SloClass.objects.create(name="flexible", title="Flexible", kind=SloKind.NON_INTERACTIVE, deadline_s=3600)
    furnish()
    rows = list(MinuteRow.objects.all())
    for row in rows:
        row.pk, row.slo_class = None, "flexible"
        row.prompt_tokens, row.output_tokens = row.prompt_tokens // 9, row.output_tokens // 9
    MinuteRow.objects.bulk_create(rows)
    made = list(Forecast.objects.all())
    for row in made:
        row.pk, row.slo_class = None, DEFERRED
        for name in ("mean", "lower_80", "upper_80", "lower_95", "upper_95"):
            setattr(row, name, [value / 9 for value in getattr(row, name)])
    Forecast.objects.bulk_create(sorted(made, key=lambda row: row.made_at))


def test_all_numbers_are_there_before_any_script(reader, furnished):
    html = page(reader, region="us-east")
    for word in (
        "Forecast load",
        "Served elsewhere",
        "off by",
        "within its 80% band",
        "of interactive and deferred classes",
    ):
        assert word in html
    figure = json.loads(re.search(r'id="figure-demand"[^>]*>(.*?)</script>', html, re.S).group(1))["figure"]
    assert [trace["name"] for trace in figure["data"]] == [
        *("95%", "95%", "80%", "80%", "forecast", "demand", "capacity", "capacity as planned")
    ]
    url = reverse("console:model", args=[SERIES[0]])
    redrawn = reader.get(url, {"charts": "demand"})
    assert redrawn.json()["charts"]["demand"]["sentence"].startswith("Demand: the newest full window had")
    etag = {"If-None-Match": redrawn["ETag"]}
    assert reader.get(url, {"charts": "demand"}, headers=etag).status_code == 304


@pytest.mark.parametrize(
    ("query", "shown"),
    [({"region": "nowhere", "hours": "7"}, "6"), ({"hours": "72"}, "72"), ({"region": "us-east"}, "us-east")],
)
def test_mistyped_filters_show_a_page(reader, furnished, query, shown):
    assert f'<option value="{shown}" selected>' in page(reader, **query)


def test_demand_forecast_and_load_are_of_the_same_classes(furnished, live):
    outlook = outlooks.see(*WHOLE, NOW)
    (row,) = model_rows(live.feed.latest(), NOW)
    (endpoint,) = row.there
    of_interactive = selectors.demand_now("tokens", NOW)[SERIES]
    assert endpoint.load.demand_tokens_per_s == pytest.approx(of_interactive * 10 / 9, rel=1e-3)
    interactive = max(
        sum(sums)
        for sums in zip(
            *(row.mean for row in selectors.forecasts_in_force("tokens", NOW - timedelta(days=1), "")[SERIES]),
            strict=True,
        )
    )
    assert row.peak.mean == endpoint.peak.mean == outlook.peak.mean == pytest.approx(interactive * 10 / 9, rel=0.01)
    assert endpoint.forecast_load == outlook.peak.mean / outlook.capacity_now
    assert outlook.unforecast == 0


def test_demand_that_no_forecast_counts_is_said(reader, furnished):
    Forecast.objects.filter(slo_class=DEFERRED).delete()
    assert outlooks.see(*WHOLE, NOW).unforecast == 1
    said = "short of 1 endpoint whose demand, or a part of it, has none yet"
    assert page(reader).count(said) >= 2  # beside the chart, and in its caption


def test_a_small_demand_is_written_without_a_unit_of_measure(furnished):
    seen = replace(outlooks.see(*WHOLE, NOW), capacity=(), planned=None)
    for level, ticks in ((0.0, "~g"), (0.4, "~g"), (400.0, "~s")):
        windows = [None if row is None else replace(row, mean=level) for row in seen.expected]
        flat = replace(seen, actual=[level] * len(seen.starts), expected=windows, capacity=[None] * len(seen.starts))
        assert demand_chart(flat, *SERIES, "").figure["layout"]["yaxis"]["tickformat"] == ticks, level


# Without a forecast


def failed(kind: str, reason: str) -> None:
    record(f"planning.{kind}", actor="planner", reason=reason, severity="critical")


@pytest.mark.parametrize("failure", ["", "IndexError: index 20"])
def test_why_there_is_no_forecast_yet(reader, deployment, failure):
    assert "The first one that ends makes the first minute of demand." in page(reader)
    if failure:
        failed("forecaster_failed", failure)
    html = page(reader)
    assert "No forecast yet: it needs one full window of 10 min of demand" in html
    assert ("The forecaster failed" in html and failure in html) == bool(failure)


def test_forecasts_that_stopped_are_overdue_and_say_why(reader, furnished):
    assert "overdue" not in page(reader)
    Forecast.objects.filter(made_at__gt=NOW - timedelta(hours=3)).delete()
    html = page(reader)
    assert "overdue" in html
    assert "check that Celery" in html
    failed("forecasts_failed", "MemoryError: none left")
    html = page(reader)
    assert "MemoryError: none left" in html
    assert "check that Celery" not in html


def test_the_chart_is_its_table_and_its_file(reader, make_instance):
    make_instance()
    database.write(furnish)
    html = page(reader, table="demand")
    answer = reader.get(reverse("console:model", args=[SERIES[0]]), {"table": "demand", "format": "csv"})
    rows = table(answer)
    assert rows[0][:3] == ["Window from (UTC)", "Actual (tok/s)", "Forecast (tok/s)"]
    assert html.count('<th scope="row">20 Nov ') + html.count('<th scope="row">21 Nov ') == len(rows) - 1
    outlook = outlooks.see(SERIES[0], "", 6, NOW).since_known()
    assert [row[1] for row in rows[1:]] == [cell(value) for value in outlook.actual]
    assert [row[2] for row in rows[1:]] == [cell(seen and seen.mean) for seen in outlook.expected]


def test_scheduled_minimums_are_drawn_as_capacity(make_instance, furnished, language_model):
    window = {"begins": "15:00", "ends": "16:00", "time_zone": "UTC"}
    ScheduledMinimum.objects.create(name="office", model=language_model, instances=2, **window)
    outlook = outlooks.see(*WHOLE, NOW)
    each = capacity.capabilities()["llama-3.1-8b", "a100-80gb"]
    steps = [(f"{at:%H:%M}", value) for at, value in outlook.scheduled]
    assert ("15:00", 2 * each) in steps
    assert ("16:00", 0.0) in steps
    (line,) = [one for one in demand_chart(outlook, *SERIES, "").series if one.label == "scheduled minimum"]
    assert max(line.y) == 2 * each


def test_a_note_of_a_simpler_forecaster_is_shown(reader, deployment):
    note = "only 3 windows are known: the last value stands in"
    for quantity in Quantity:
        planning_rows.forecast(*SERIES, quantity, NOW - timedelta(minutes=3), note=note).save()
    assert note in page(reader)


def test_a_peak_above_the_capacity_is_critical(reader, make_instance, language_model):
    make_instance()
    planning_rows.minutes(NOW, 1)
    prompt = planning_rows.forecast(*SERIES, Quantity.PROMPT, NOW - timedelta(minutes=3))
    prompt.mean = [1.0] * planning_rows.AHEAD
    prompt.save()
    row = planning_rows.forecast(*SERIES, Quantity.OUTPUT, NOW - timedelta(minutes=3))
    planning_rows.plan(language_model, NOW, "shadow", (0,))
    row.mean = [900.0 * 20] * planning_rows.AHEAD
    row.save()
    html = page(reader)
    assert 'data-level="critical"' in html
    row.mean = [10.0] * planning_rows.AHEAD
    row.save()
    assert 'data-level="critical"' not in page(reader)


def test_queries_do_not_grow_with_rows(reader, make_instance, django_assert_max_num_queries):
    make_instance()
    database.write(furnish)
    with django_assert_max_num_queries(80):
        page(reader)


# Drawing


@pytest.fixture
def nothing(db):
    return outlooks.see(*WHOLE, NOW)


def test_the_chart_begins_where_anything_is_known(nothing):
    starts = [NOW + timedelta(minutes=at) for at in range(5)]
    young = replace(
        nothing, starts=starts, expected=[None] * 5, actual=[None, None, None, 7.0, None], capacity=[0.0] * 4 + [5.0]
    )
    assert young.since_known().starts == starts[3:]
    assert young.since_known().actual == [7.0, None]
    empty = replace(young, actual=[None] * 5, capacity=[0.0] * 5)
    assert empty.since_known() == empty


def test_bands_are_filled_for_each_run_of_windows_and_not_over_a_gap(nothing):
    starts = [NOW + timedelta(minutes=at) for at in range(6)]
    expected = [
        None if at in (0, 3) else selectors.ForecastWindow(start, 5.0, 4.0, 6.0, 3.0, 7.0)
        for at, start in enumerate(starts)
    ]
    bands = demand._band(starts, replace(nothing, starts=starts, expected=expected), 80)
    assert [list(edge.y) for edge in bands] == [[6.0, 6.0], [4.0, 4.0], [6.0, 6.0], [4.0, 4.0]]
    assert [edge.more.get("fill") for edge in bands] == [None, "tonexty", None, "tonexty"]
