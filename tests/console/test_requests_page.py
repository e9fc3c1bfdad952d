"""The list of requests: filters, order, pages."""

import re
from datetime import timedelta

import pytest
from django.urls import reverse

from controlplane.fleet.models import SloClass
from tests.console.test_pages import page


@pytest.fixture
def reader(client, viewer):
    client.force_login(viewer)
    return client


def test_requests_pages_by_cursor(reader, make_request):
    rows = [make_request() for _ in range(55)]
    first = page(reader, "requests")
    assert rows[-1].request_id[:15] in first
    cursor = re.search(r"before=(\d+)", first)[1]
    make_request()  # arrives while someone pages on
    second = page(reader, "requests", before=cursor)
    shown = re.findall(r"/requests/(\d+)/", first) + re.findall(r"/requests/(\d+)/", second)
    assert [int(pk) for pk in shown] == [row.pk for row in reversed(rows)]
    assert "That was the oldest" in second


def test_requests_filters(reader, make_request):
    kept = make_request(outcome="failed", error_code="instance_lost", status_code=502)
    make_request()
    for query in ({"outcome": "failed"}, {"q": kept.request_id}, {"tenant": "acme", "outcome": "failed"}):
        assert re.findall(r"/requests/(\d+)/", page(reader, "requests", **query)) == [str(kept.pk)]
    assert "No request fits" in page(reader, "requests", instance="elsewhere")


def test_requests_by_slo_and_region(reader, make_request):
    missed = make_request(slo_met=False, region="eu")
    make_request(slo_met=True, region="us")
    assert re.findall(r"/requests/(\d+)/", page(reader, "requests", slo="missed")) == [str(missed.pk)]
    assert re.findall(r"/requests/(\d+)/", page(reader, "requests", region="eu")) == [str(missed.pk)]


def test_a_request_has_its_end(reader, make_request):
    row = make_request(e2e_ms=90_000.0)
    assert row.ended_at == row.arrived_at + timedelta(seconds=90)
    assert f'<time datetime="{row.ended_at.isoformat(timespec="milliseconds")}">' in page(reader, "requests")
    assert make_request(e2e_ms=None).ended_at is None


def test_requests_sorted_by_latency(reader, make_request):
    """Slowest first, page by page; requests without a latency are left out."""
    rows = [make_request(e2e_ms=float(latency)) for latency in (5, 9, 1, *([3] * 50))]
    make_request(e2e_ms=None)
    first = page(reader, "requests", sort="-e2e_ms")
    assert "Slowest first" in first
    assert "sort=e2e_ms" in first, "the header turns the order round"
    assert re.findall(r"/requests/(\d+)/", first)[:2] == [str(rows[1].pk), str(rows[0].pk)]
    cursor = re.search(r"before=(\d+)", first).group(1)
    second = page(reader, "requests", sort="-e2e_ms", before=cursor)
    shown = re.findall(r"/requests/(\d+)/", first + second)
    assert len(shown) == len(set(shown)) == len(rows)
    assert shown[-1] == str(rows[2].pk)


def test_the_slo_tile_names_value_and_target(reader, make_request):
    row = make_request(slo_met=False, ttft_ms=3600.0, slo_class="interactive")
    SloClass.objects.update_or_create(name="interactive", defaults={"kind": "interactive", "ttft_target_ms": 1000})
    assert "TTFT 3.60 s, target 1.00 s" in page(reader, "request", row.pk)


def test_requests_by_what_became_of_the_demand(reader, make_request):
    served = make_request(region="us-east")
    spilled = make_request(region="us-east", own_region="us-west")
    unserved = make_request(region="", own_region="us-west", outcome="rejected", unserved=True)

    def listed(outcome):
        answer = reader.get(reverse("console:requests"), {"outcome": outcome, "format": "csv"})
        text = b"".join(answer.streaming_content).decode()
        return {row for row in (served, spilled, unserved) if row.request_id in text}

    assert listed("unserved") == {unserved}
    assert listed("spilled") == {spilled}
    assert listed("rejected") == {unserved}
    assert listed("") == listed("no such outcome") == {served, spilled, unserved}
    html = reader.get(reverse("console:requests")).content.decode()
    assert html.count("from us-west, taken by us-east") == 1
