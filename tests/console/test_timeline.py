"""The timeline: which time, its charts, what is marked, and what changed against the time before."""

from datetime import datetime, timedelta

import pytest
from django.http import QueryDict
from django.utils import timezone
from django.utils.http import urlencode

from controlplane.console.formats import MINUS
from controlplane.console.pages.overview import timeline
from controlplane.events.services import record
from controlplane.gateway.models import MinuteRow
from controlplane.planning.models import ScalingMove

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 20, 12, 0, tzinfo=timezone.get_default_timezone())


def minutes(count: int, until: datetime = NOW, model="llama-3.1-8b", **values) -> None:
    usual = {"requests": 6, "slo_met": 6, "slo_judged": 6, "prompt_tokens": 5_000, "output_tokens": 1_000}
    MinuteRow.objects.bulk_create(
        MinuteRow(
            minute=until - timedelta(minutes=back),
            model=model,
            region="us-east",
            slo_class="interactive",
            **usual | values,
        )
        for back in range(1, count + 1)
    )


def span(hours: float, until: datetime = NOW, model: str = "", region: str = "") -> timeline.Span:
    return timeline.Span(until - timedelta(hours=hours), until, model, region)


@pytest.mark.parametrize(
    ("query", "since", "until"),
    [
        ({}, NOW - timedelta(hours=6), NOW),
        ({"range": "720"}, NOW - timedelta(days=30), NOW),
        (
            {"from": "2026-11-20T10:30", "until": "2026-11-20T11:00"},
            NOW - timedelta(minutes=90),
            NOW - timedelta(hours=1),
        ),
        ({"range": "times", "from": "2026-11-20T10:30"}, NOW - timedelta(minutes=90), NOW),
        ({"range": "times", "from": "2027-01-01T10:30", "until": "2030-01-01T00:00"}, NOW - timedelta(minutes=1), NOW),
        ({"range": "times", "from": "1999-01-01T10:30"}, NOW - timeline.LONGEST, NOW),
        (
            {"range": "times", "from": "no time", "until": "2026-11-20"},
            datetime(2026, 11, 19, 18, 0),
            datetime(2026, 11, 20),
        ),
        ({"range": "times", "until": "0001-01-01T00:00"}, NOW - timedelta(hours=6), NOW),
        ({"range": "times", "from": "9999-12-31T23:59"}, NOW - timedelta(hours=6), NOW),
        ({"range": "-1"}, NOW - timedelta(hours=6), NOW),
    ],
)
def test_the_time_asked_for(query, since, until, inventory):
    zone = timezone.get_current_timezone()
    asked = timeline.span_of(timeline.filters_of(QueryDict(urlencode(query))), NOW)
    assert (asked.since, asked.until) == (since.replace(tzinfo=zone), until.replace(tzinfo=zone))
    assert 1 <= len(asked.starts) <= timeline.POINTS + 1


def test_charts_have_the_sums_of_their_steps(slo_class, deployment):
    minutes(24 * 60)
    asked = span(24)
    service, demand, requests = timeline.charts_of(asked, NOW)
    assert asked.step_s == 600
    assert [one.label for one in service.series] == ["interactive"]
    assert set(service.series[0].y) == {1.0}
    assert [row[1] for row in demand.rows] == pytest.approx([100.0] * len(demand.rows))
    assert {tuple(row[1:]) for row in requests.rows} == {(0.1, 0, 0)}
    assert timeline.charts_of(span(24, region="eu-west"), NOW)[2].empty


def test_marks_are_moves_deploys_policies_failures_and_alerts(slo_class, deployment, make_instance):
    moved = {"source": "floor", "strategy": "floor", "model": "llama-3.1-8b", "region": "us-east", "gpu_type": "h100"}
    for minute, delta in ((5, 1), (5, 1), (5, -1), (90, 1)):
        ScalingMove.objects.create(at=NOW - timedelta(minutes=minute), delta=delta, reason="use", **moved)
    instance = make_instance()
    for kind, after in (
        ("deployment.changed", {}),
        ("setting.changed", {}),
        ("alert.opened", {}),
        ("instance.moved", {"state": "failed"}),
        ("instance.moved", {"state": "ready"}),
        ("sign_in.failed", {}),
    ):
        severity = "critical" if after.get("state") == "failed" else "info"
        record(kind, instance, actor="test", after=after, severity=severity)
    marks = timeline.marks_of(span(1, timezone.now() + timedelta(seconds=1)))
    assert [mark.what for mark in marks] == ["Deploy", "Policy", "Alert", "Failure"]
    assert [mark.text for mark in timeline.marks_of(span(1))] == [f"+2, {MINUS}1"]


def test_what_changed_is_ranked_by_its_share(slo_class, deployment):
    minutes(60, NOW - timedelta(hours=1))
    minutes(60, slo_met=3, prompt_tokens=50_000, failed=1, refused=2)
    minutes(120, model="other")
    changes = timeline.changes_of(span(1))
    assert [(one.what, one.said) for one in changes if one.share] == [
        ("Demand for llama-3.1-8b, interactive", "+375%"),
        ("SLO met of llama-3.1-8b, interactive", f"{MINUS}50%"),
        ("Refused of llama-3.1-8b, interactive", "+33%"),
        ("Failed of llama-3.1-8b, interactive", "+17%"),
    ]
    assert (changes[0].before, changes[0].now) == ("100 tok/s", "850 tok/s")


def test_the_page_links_to_its_time_and_its_charts_refresh_alone(client, viewer, slo_class, deployment):
    minutes(30, timezone.now().replace(second=0, microsecond=0))
    client.force_login(viewer)
    page = client.get("/timeline/", {"range": "1"}).content.decode()
    assert "range=times&amp;from=" in page
    assert "Demand for llama-3.1-8b" in page
    assert set(client.get("/timeline/", {"range": "1", "charts": "service,demand"}).json()["charts"]) == {
        "service",
        "demand",
    }
    file = b"".join(
        client.get("/timeline/", {"range": "1", "table": "demand", "format": "csv"}).streaming_content
    ).decode()
    assert file.startswith("From (UTC),Demand (tok/s),Capacity (tok/s)")
