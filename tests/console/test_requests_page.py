"""The list of requests: filters, order, pages."""

import re
from datetime import timedelta

from controlplane.fleet.models import SloClass
from tests.console.test_pages import page


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
