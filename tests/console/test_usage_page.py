"""The usage page: sums, groups, order, periods, files; a tenant's people see their own."""

import csv
import io
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.utils import timezone

from controlplane.accounts.services import create_api_key
from controlplane.console.pages.usage.charts import SHOWN, usage_over_time
from controlplane.fleet.models import Donation, DonationState
from controlplane.usage.models import UsageHour
from controlplane.usage.selectors import UsageScope, usage

URL = "/usage/"


@pytest.fixture
def hours(acme, globex):
    """Two hours of today, one of two weeks ago."""
    key, _ = create_api_key(acme, "shop window", "a test")
    now = timezone.now().astimezone(UTC).replace(minute=0, second=0, microsecond=0)

    def row(hour, tenant, model, usd, tokens=1_000, **values):
        slo_class = "interactive" if tenant else ""
        UsageHour.objects.create(
            hour=hour, tenant=tenant, model=model, slo_class=slo_class, cost_usd=usd, charged_usd=usd / 2, gpu_s=3600,
            prompt_tokens=tokens, output_tokens=0, requests=tokens // 100, **values,
        )  # fmt: skip

    row(now, acme, "llama-3.1-8b", 4.0, api_key=key)
    row(now, acme, "llama-2-70b", 2.0)
    row(now, globex, "globex-tuned", 11.0, tokens=200)
    row(now, None, "llama-2-70b", 17.0, tokens=0)
    row(now - timedelta(days=14), globex, "llama-2-70b", 50.0)
    return key


def shown(client, **query) -> list[dict]:
    return client.get(URL, query).context["lines"]


def test_the_fleets_people_land_on_the_tenant_that_costs_most(reader, hours):
    lines = shown(reader)
    assert [(line["name"], line["cost_usd"]) for line in lines] == [("globex", 11.0), ("acme", 6.0), ("Idle", 17.0)]
    text = reader.get(URL).content.decode()
    assert "$34.00" in text
    assert "50%" in text
    assert [line["name"] for line in shown(reader, sort="name")] == ["acme", "globex", "Idle"]
    assert shown(reader, period="30")[0]["cost_usd"] == 61.0


def test_what_was_donated_is_a_bill_of_the_fleet(client, viewer, member, hours, make_instance):
    now = timezone.now()
    Donation.objects.create(
        instance=make_instance(), actor="planner", spot_usd_per_hour="1.2", state=DonationState.RECLAIMED,
        donated_at=now - timedelta(hours=10), reclaim_at=now - timedelta(hours=5), ended_at=now - timedelta(hours=5),
    )  # fmt: skip
    client.force_login(viewer)
    (line,) = client.get(URL).context["donated"]
    assert (line.model, line.instance_hours, line.gpu_hours) == ("llama-3.1-8b", pytest.approx(5), pytest.approx(10))
    assert line.cost_usd == pytest.approx(5 * 2 * 1.35)
    assert line.offered_usd == pytest.approx(6.0)
    assert "$6.00" in client.get(URL).content.decode()
    assert client.get(URL, {"tenant": "acme"}).context["donated"] == []
    assert client.get(URL, {"model": "llama-2-70b"}).context["donated"] == []
    client.force_login(member)
    assert client.get(URL).context["donated"] == []
    assert client.get("/api/v1/usage").json()["donated"] is None


def test_each_group_and_what_is_behind_it(reader, hours):
    by_model = {line["name"]: line for line in shown(reader, by="model")}
    assert (by_model["llama-2-70b"]["cost_usd"], by_model["llama-2-70b"]["idle_usd"]) == (2.0, 17.0)
    assert "Idle" not in by_model
    by_key = {line["name"]: line for line in shown(reader, by="key")}
    assert by_key["shop window"]["detail"].startswith(hours.prefix)
    narrowed = reader.get(URL + by_key["shop window"]["href"]).context["lines"]
    assert [(line["name"], line["cost_usd"]) for line in narrowed] == [("llama-3.1-8b", 4.0)]
    assert [line["name"] for line in shown(reader, by="class")] == ["interactive", "Idle"]
    days = shown(reader, by="day", period="30")
    assert [line["cost_usd"] for line in days] == [17.0, 50.0]
    assert [line["cost_usd"] for line in reader.get(URL + days[1]["href"]).context["lines"]] == [50.0]


def test_a_period_from_and_to(reader, hours):
    day = f"{timezone.now() - timedelta(days=14):%F}"
    assert [line["cost_usd"] for line in shown(reader, period="dates", **{"from": day, "to": day})] == [50.0]
    for first, last in (("nonsense", "1000-01-01"), ("0001-01-01", "0001-01-01"), ("2026-01-01", "9999-12-31")):
        assert reader.get(URL, {"period": "dates", "from": first, "to": last}).status_code == 200


def test_a_tenants_people_see_their_own_alone(as_member, hours):
    assert as_member.get("/")["Location"] == URL
    for query in ({}, {"by": "tenant"}, {"tenant": "globex"}, {"model": "globex-tuned"}, {"by": "key"}):
        answer = as_member.get(URL, query)
        text = answer.content.decode().replace("?model=globex-tuned", "")
        assert "Idle" not in text
        assert "Globex" not in text
        assert {line.get("tenant", "acme") for line in answer.context["lines"]} <= {"acme"}
    assert sum(line["cost_usd"] for line in shown(as_member)) == 6.0
    assert shown(as_member, model="globex-tuned") == []


def test_files_have_what_the_page_shows(reader, hours):

    def rows(**query) -> list[list[str]]:
        answer = reader.get(URL, {**query, "format": "csv"})
        return list(csv.reader(io.StringIO(b"".join(answer.streaming_content).decode())))

    header, *lines = rows(by="model", sort="name")
    assert header[-1] == "Idle cost (USD)"
    assert [line[0] for line in lines] == ["globex-tuned", "llama-2-70b", "llama-3.1-8b"]
    header, *lines = rows(table="usage")
    assert header == ["Hour (UTC)", "globex (USD)", "acme (USD)", "Idle (USD)"]
    assert sum(float(line[1]) for line in lines) == 11.0


def test_the_chart_stacks_the_greatest_and_joins_the_rest(acme):
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    for number in range(9):
        UsageHour.objects.create(hour=begin, tenant=acme, model=f"m{number}", cost_usd=float(number + 1))
    asked = UsageScope(begin, begin + timedelta(days=3), None)
    chart = usage_over_time(asked, "model", SHOWN["cost"], by_hour=False)
    assert [series.label for series in chart.series] == ["m8", "m7", "m6", "m5", "m4", "Others"]
    assert sum(series.y[0] for series in chart.series) == 45.0
    assert [list(series.y[1:]) for series in chart.series] == [[0.0, 0.0]] * 6
    assert {trace["type"] for trace in chart.figure["data"]} == {"bar"}
    empty = usage_over_time(UsageScope(begin - timedelta(days=9), begin, None), "model", SHOWN["tokens"], by_hour=False)
    assert empty.empty
    assert not empty.figure


@pytest.mark.sql
@pytest.mark.parametrize(
    ("zone", "begin", "clock"),
    [
        ("Europe/Berlin", datetime(2026, 10, 24, 23), ["01:00", "02:00", "02:00", "03:00"]),
        ("Australia/Adelaide", datetime(2026, 4, 4, 14, 30), ["01:00", "02:00", "02:00", "03:00"]),
        ("Europe/Berlin", datetime(2026, 3, 29, 0), ["01:00", "03:00", "04:00", "05:00"]),
        ("Asia/Kathmandu", datetime(2026, 3, 29, 0, 15), ["06:00", "07:00", "08:00", "09:00"]),
    ],
)
def test_an_hour_that_the_clock_has_twice_is_two(acme, zone, begin, clock):
    begin = begin.replace(tzinfo=UTC)
    for number in range(16):
        at = begin + timedelta(minutes=15 * number)
        UsageHour.objects.create(hour=at, tenant=acme, model="m", cost_usd=float(number // 4 + 1))
    since, until = (at.astimezone(ZoneInfo(zone)) for at in (begin, begin + timedelta(hours=4)))
    asked = UsageScope(since, until, None, zone=ZoneInfo(zone))
    assert [(row["whole_hour"], row["sum_cost_usd"]) for row in usage(asked, ["hour"])] == [
        (begin + timedelta(hours=number), 4.0 * (number + 1)) for number in range(4)
    ]
    chart = usage_over_time(asked, "model", SHOWN["cost"], by_hour=True)
    assert [f"{at:%H:%M}" for at in chart.x] == clock
    assert list(chart.series[0].y) == [4.0, 8.0, 12.0, 16.0]


def test_the_chart_is_redrawn_alone(reader, hours):
    answer = reader.get(URL, {"charts": "usage", "show": "tokens", "by": "class"})
    traces = answer.json()["charts"]["usage"]["figure"]["data"]
    assert [(trace["name"], sum(trace["y"])) for trace in traces] == [("interactive", 2_200.0)]
