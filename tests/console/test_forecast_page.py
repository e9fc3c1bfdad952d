"""The forecast page: past and expected demand, capacity alongside, backtests, and its empty state."""

import copy
import csv
import functools
import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from django.urls import reverse

from controlplane.console.charts.sparklines import sparkline
from controlplane.console.pages.forecast import charts
from controlplane.console.pages.forecast import selectors as outlooks
from controlplane.console.pages.forecast.selectors import OutlookFilter
from controlplane.events.services import record
from controlplane.fleet.models import SloClass, SloKind
from controlplane.gateway.models import MinuteRow
from controlplane.planning import capacity
from controlplane.planning.forecasts import selectors
from controlplane.planning.forecasts.demand import DEFERRED
from controlplane.planning.models import Forecast, Quantity, ScalingMove
from controlplane.resources.tables import cell
from tests import database
from tests.console import planning_rows

NOW = datetime(2026, 11, 20, 14, 23, 20, tzinfo=UTC)
SERIES = ("llama-3.1-8b", "us-east")
WHOLE = OutlookFilter(*SERIES, "tokens", 6, "*")
furnish = functools.partial(planning_rows.furnish, NOW)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("django.utils.timezone.now", lambda: NOW)


def page(reader, **query) -> str:
    answer = reader.get(reverse("console:forecast"), query)
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
    outlook = outlooks.see(WHOLE, NOW).outlook
    over = [start for start in outlook.starts if start + timedelta(minutes=10) <= NOW]
    for start, actual, able in zip(outlook.starts, outlook.actual, outlook.capacity, strict=True):
        assert start in over or actual is None
        assert (able is None) == (start > NOW)
    assert outlook.actual[len(over) - 1] is not None
    assert outlook.capacity_now == 2 * 3_100
    assert outlook.planned == pytest.approx(1.5 * outlook.capacity_now)  # the plan adds one to two
    assert outlook.peak == max(outlook.ahead, key=lambda window: window.mean)
    assert outlook.ahead[0].start == NOW.replace(minute=20, second=0)


# The page


def test_all_numbers_are_there_before_any_script(reader, make_instance, language_model):
    make_instance()
    database.write(furnish)
    html = page(reader)
    for word in ("Demand, last 10 min", "Peak ahead", "Peak load", "Within 80% band", "All series", "Backtest"):
        assert word in html
    assert html.count(" data-plot>") == 3
    assert "Seasonal ARIMA" in html
    assert "best" in html
    assert "No forecast" not in html
    figure = json.loads(re.search(r'id="figure-forecast"[^>]*>(.*?)</script>', html, re.S).group(1))["figure"]
    assert [trace["name"] for trace in figure["data"]] == [
        "interactive",
        "95%",
        "95%",
        "80%",
        "80%",
        "forecast, interactive",
        "forecast",
        "interactive and deferred",
        "capacity",
        "as planned",
    ]


def test_the_chart_is_its_table_and_its_file(reader, make_instance):
    make_instance()
    database.write(furnish)
    query = {"table": "forecast", "quantity": "prompt", "hours": "6"}
    html = page(reader, **query)
    rows = table(reader.get(reverse("console:forecast"), query | {"format": "csv"}))
    assert rows[0][:3] == ["Window from (UTC)", "Actual (tok/s)", "Forecast (tok/s)"]
    assert html.count('<th scope="row">20 Nov ') + html.count('<th scope="row">21 Nov ') == len(rows) - 1
    asked = OutlookFilter(*SERIES, "prompt", 6)
    outlook = outlooks.see(asked, NOW).outlook
    assert [row[1] for row in rows[1:]] == [cell(value) for value in outlook.actual]
    assert [row[2] for row in rows[1:]] == [cell(seen and seen.mean) for seen in outlook.expected]


def test_filters_choose_the_series_and_mistyped_ones_show_a_page(reader, make_instance):
    make_instance()
    database.write(furnish)
    html = page(reader, model="nobody", region="nowhere", quantity="words", hours="7")
    assert '<option value="6" selected>' in html
    assert '<option value="tokens" selected>' in html
    assert '<option value="prompt" selected>' in page(reader, quantity="prompt")
    assert "in windows of 10 min" in page(reader, hours="72")


# One SLO class


def furnish_two_classes() -> None:
    """Two classes with demand and forecasts, and a third with neither; the flexible one has a tenth."""
    for name in ("flexible", "idle"):
        SloClass.objects.create(name=name, title=name.title(), kind=SloKind.NON_INTERACTIVE, deadline_s=3600)
    furnish()
    rows = list(MinuteRow.objects.all())
    for row in rows:
        row.pk, row.slo_class = None, "flexible"
        row.prompt_tokens, row.output_tokens = row.prompt_tokens // 9, row.output_tokens // 9
    MinuteRow.objects.bulk_create(rows)
    made = list(Forecast.objects.all())
    for row in copy.deepcopy(made):
        row.slo_class = "flexible"
        for name in ("mean", "lower_80", "upper_80", "lower_95", "upper_95"):
            setattr(row, name, [value / 9 for value in getattr(row, name)])
        made += [row, copy.copy(row)]
        made[-1].slo_class = DEFERRED
    Forecast.objects.all().delete()
    for row in made:
        row.pk = None
    Forecast.objects.bulk_create(sorted(made, key=lambda row: row.made_at))


@pytest.fixture
def flexible(reader, make_instance):
    make_instance()
    database.write(furnish_two_classes)


def test_the_class_filter_chooses_chart_tiles_and_accuracy(reader, flexible):
    whole, one = page(reader), page(reader, **{"class": "flexible"})
    assert '<option value="*" selected>Interactive and deferred</option><option value="all-interactive">' in whole
    assert '<option value="flexible" selected>' in one
    assert "Mean error</span>" in one
    assert '<option value="flexible" selected>' not in page(reader, **{"class": "mistyped"})
    assert "Prompt and output tokens of the class flexible per second" in one
    assert "Capacity is counted in prompt and output tokens together and serves all classes" in one
    assert '<span class="label">Capacity</span>' in whole
    assert '<span class="label">Capacity</span>' not in one
    assert "by model and region, class flexible; select a row for its chart" in one
    figure = json.loads(re.search(r'id="figure-forecast"[^>]*>(.*?)</script>', one, re.S).group(1))["figure"]
    assert [trace["name"] for trace in figure["data"]] == ["95%", "95%", "80%", "80%", "forecast", "actual"]


def test_an_outlook_of_a_class_reads_its_own_rows_alone(flexible):
    whole, one = (outlooks.see(OutlookFilter(*SERIES, "output", 6, name), NOW) for name in ("", "flexible"))
    assert (whole.forecast.slo_class, one.forecast.slo_class) == ("", "flexible")
    pairs = zip(one.outlook.actual, one.outlook.expected, strict=True)
    at = next(place for place, (actual, expected) in enumerate(pairs) if actual and expected)
    assert one.outlook.actual[at] == pytest.approx(whole.outlook.actual[at] / 9, rel=1e-2)
    assert one.outlook.expected[at].mean == pytest.approx(whole.outlook.expected[at].mean / 9)
    assert one.accuracy.windows == whole.accuracy.windows > 0
    assert one.accuracy.error < 0.1
    assert set(one.outlook.capacity) == {None}
    assert one.outlook.planned is None
    tiles, row, both = (
        next(row for row in outlooks.series_rows("output", {}, NOW, name) if (row["model"], row["region"]) == SERIES)
        for name in ("flexible", "", "*")
    )
    assert both["demand"] == pytest.approx(row["demand"] + tiles["demand"])
    assert both["peak"] == pytest.approx(row["peak"] + tiles["peak"], rel=0.02)
    assert (both["capacity"], tiles["capacity"]) == (None, None)  # it is counted in all tokens
    assert tiles["demand"] == pytest.approx(row["demand"] / 9, rel=1e-2)
    assert tiles["peak"] == pytest.approx(row["peak"] / 9)
    assert tiles["peak_at"] == row["peak_at"]


def test_the_file_and_the_redrawn_chart_are_of_the_class_too(reader, flexible):
    query = {"table": "forecast", "class": "flexible"}
    rows = table(reader.get(reverse("console:forecast"), query | {"format": "csv"}))
    outlook = outlooks.see(OutlookFilter(*SERIES, "tokens", 6, "flexible"), NOW).outlook
    assert [row[2] for row in rows[1:]] == [cell(seen and seen.mean) for seen in outlook.expected]
    assert {row[-1] for row in rows[1:]} == {""}  # capacity
    answer = reader.get(reverse("console:forecast-charts"), {"charts": "forecast", "class": "flexible"})
    assert answer.json()["charts"]["forecast"]["sentence"].startswith("Demand of the class flexible: ")
    header, line = table(reader.get(reverse("console:forecast"), query | {"table": "series", "format": "csv"}))
    assert line[header.index("Capacity (tok/s)")] == ""


def test_a_class_without_demand_says_so(reader, flexible):
    html = page(reader, **{"class": "idle"})
    assert "No request of the class idle for llama-3.1-8b in US East in the last 14 days" in html
    assert "No request of the class idle was counted in the time shown." in html
    assert html.count("data-plot>") == 2  # of the backtest: no axis of thousandths of a token
    assert "Mean error</span>" not in html
    assert "Nothing is known of this series yet." not in html  # others were counted: its demand is a measured zero
    minute(NOW - timedelta(days=15), 600, slo_class="idle")
    assert "No request of the class idle" in page(reader, **{"class": "idle"})
    minute(NOW - timedelta(minutes=2), 600, slo_class="idle")
    assert "It has 1 minute of demand so far" in page(reader, **{"class": "idle"})


def test_a_small_demand_is_written_without_a_unit_of_measure(reader, flexible):
    seen = outlooks.see(OutlookFilter(*SERIES, "output", 6, "flexible"), NOW).outlook
    for level, ticks in ((0.0, "~g"), (0.4, "~g"), (400.0, "~s")):
        windows = [None if row is None else replace(row, mean=level) for row in seen.expected]
        drawn = charts.demand_and_forecast(replace(seen, actual=[level] * len(seen.starts), expected=windows), "")
        assert drawn.figure["layout"]["yaxis"]["tickformat"] == ticks, level


def test_forecasts_of_a_class_that_ended_are_not_called_overdue(reader, flexible):
    Forecast.objects.filter(slo_class="flexible", made_at__gt=NOW - timedelta(hours=3)).delete()
    assert "overdue" not in page(reader, **{"class": "flexible"})
    Forecast.objects.filter(made_at__gt=NOW - timedelta(hours=3)).delete()
    assert "overdue" in page(reader, **{"class": "flexible"})


# Before there is anything


def test_nothing_deployed(reader):
    assert "Nothing is deployed" in page(reader)


def test_no_request_yet(reader, deployment):
    html = page(reader)
    assert "No request for llama-3.1-8b in US East yet" in html
    assert "Nothing is known of this series yet." in html
    assert "manage.py backtest" in html


def test_how_long_until_the_first_forecast(reader, deployment):
    minute(NOW - timedelta(minutes=2), 600)  # 14:21:20, in the window from 14:20: over, and counted, at 14:30:30
    html = page(reader)
    assert "It has 1 minute of demand so far" in html
    assert "the first comes in about 7 min" in html


def test_a_first_forecast_that_is_due_points_at_celery(reader, deployment):
    minute(NOW - timedelta(hours=2), 600)
    html = page(reader)
    assert "the first is due" in html
    assert "Celery" in html


def test_but_not_when_the_forecaster_failed(reader, deployment):
    minute(NOW - timedelta(hours=2), 600)
    why = "2 series have no forecast. llama-3.1-8b us-east output: IndexError: index 20"
    record("planning.forecaster_failed", actor="planner", reason=why, severity="critical")
    html = page(reader)
    assert "The forecaster failed" in html
    assert why in html
    assert "Celery" not in html
    assert page(reader, kind="planning.forecaster_failed")


def test_nor_is_celery_blamed_when_old_forecasts_are_not_followed_by_new_ones_for_that(reader, flexible):
    Forecast.objects.filter(made_at__gt=NOW - timedelta(hours=3)).delete()
    assert "check that Celery" in page(reader)
    record("planning.forecasts_failed", actor="planner", reason="MemoryError: none left", severity="critical")
    html = page(reader)
    assert "MemoryError: none left" in html
    assert "check that Celery" not in html


def test_a_note_of_a_simpler_forecaster_is_shown(reader, deployment):
    note = "only 3 windows are known: the last value stands in"
    planning_rows.forecast(*SERIES, Quantity.OUTPUT, NOW - timedelta(minutes=3), note=note).save()
    assert note in page(reader, quantity="output")


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


def test_charts_are_redrawn_alone(reader, make_instance):
    make_instance()
    database.write(furnish)
    answer = reader.get(reverse("console:forecast-charts"), {"charts": "forecast,coverage"})
    charts = answer.json()["charts"]
    assert set(charts) == {"forecast", "coverage"}
    assert charts["forecast"]["sentence"].startswith(
        "Demand of interactive and deferred classes: the newest full window had"
    )
    again = reader.get(
        reverse("console:forecast-charts"), {"charts": "forecast,coverage"}, headers={"If-None-Match": answer["ETag"]}
    )
    assert again.status_code == 304


def test_queries_do_not_grow_with_rows(reader, make_instance, django_assert_max_num_queries):
    make_instance()
    database.write(furnish)
    with django_assert_max_num_queries(46):
        page(reader)


# Backtests


def test_scores_over_all_series_are_means_and_the_worst(db):
    backtest = planning_rows.backtest()
    for row in backtest.rows:
        if (row["forecaster"], row["series"], row["quantity"]) == ("ets", "m-mid", "output"):
            row |= {"error": 0.9, "max_ape": 7.0, "error_by_horizon": [0.5]}
    by_forecaster = {score.forecaster: score for score in outlooks.scores(backtest, "output")}
    small = next(score for score in outlooks.scores(backtest, "output", "m-small") if score.forecaster == "ets")
    assert by_forecaster["ets"].error == pytest.approx((small.error + 0.9) / 2)
    assert by_forecaster["ets"].max_ape == 7.0
    assert by_forecaster["ets"].by_horizon[0] == pytest.approx((small.by_horizon[0] + 0.5) / 2)
    assert by_forecaster["ets"].by_horizon[1:] == small.by_horizon[1:]
    assert outlooks.scores(backtest, "output")[0].forecaster == "blend"
    board = outlooks.leader_board(backtest)
    assert board[0]["forecaster"] == "blend"
    assert [score["best"] for score in board[0]["scores"]] == [True, True]
    assert not any(score["best"] for row in board[1:] for score in row["scores"])


def test_a_backtest_without_a_quantity_or_numbers_still_has_a_board(db):
    backtest = planning_rows.backtest(names=("one",))
    backtest.rows = [
        {"forecaster": "ets", "series": "one", "quantity": "prompt"},
        {"forecaster": "arima", "series": "one", "quantity": "prompt", "error": 0.2, "coverage_80": 0.7},
    ]
    board = outlooks.leader_board(backtest)
    assert [row["forecaster"] for row in board] == ["arima", "ets"]
    assert board[0]["scores"][1] is None
    scores = outlooks.scores(backtest, "prompt")
    assert charts.error_by_horizon(scores, 600, "").figure is None
    assert charts.coverage(scores, "").rows == [["ARIMA", 0.7, None]]


# In rows of tables


def test_a_sparkline_puts_points_where_their_times_are():
    figure = {
        "data": [
            {
                "type": "scatter",
                "x": ["2026-11-20 10:00:00", "2026-11-20 11:00:00"],
                "y": [0, 10],
                "mode": "lines",
                "line": {"color": "var(--s1)", "width": 2},
            },
            {
                "type": "scatter",
                "x": ["2026-11-20 11:00:00", "2026-11-20 14:00:00"],
                "y": [5, 10],
                "mode": "lines",
                "line": {"color": "var(--s2)", "width": 2, "shape": "hv"},
            },
        ],
    }
    svg = sparkline(figure)
    assert 'points="0.0,100.0 100.0,7.4"' in svg
    assert 'points="100.0,53.7 400.0,53.7 400.0,7.4"' in svg


def test_the_chart_begins_where_anything_is_known(db):
    starts = [NOW + timedelta(minutes=at) for at in range(5)]
    series = {"starts": starts, "expected": [None] * 5, "window_s": 60, "now": NOW, "planned": None, "unit": "output"}
    series["generated"] = [None] * 5
    young = outlooks.Outlook(actual=[None, None, None, 7.0, None], capacity=[0.0, 0.0, 0.0, 0.0, 5.0], **series)
    assert young.since_known().starts == starts[3:]
    assert young.since_known().actual == [7.0, None]
    empty = outlooks.Outlook(actual=[None] * 5, capacity=[0.0] * 5, **series)
    assert empty.since_known() == empty


def test_bands_are_filled_for_each_run_of_windows_and_not_over_a_gap():
    starts = [NOW + timedelta(minutes=at) for at in range(6)]
    expected = [
        None if at in (0, 3) else selectors.ForecastWindow(start, 5.0, 4.0, 6.0, 3.0, 7.0)
        for at, start in enumerate(starts)
    ]
    nothing = [None] * 6
    outlook = outlooks.Outlook(starts, 60, NOW, nothing, nothing, expected, nothing, None, "output")
    bands = charts._band(starts, outlook, 80)
    assert [list(edge.y) for edge in bands] == [[6.0, 6.0], [4.0, 4.0], [6.0, 6.0], [4.0, 4.0]]
    assert [edge.more.get("fill") for edge in bands] == [None, "tonexty", None, "tonexty"]
