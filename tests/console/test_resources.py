"""Every resource that has a page: each filter and order of it is read, and its page and file have its columns."""

import csv
import io
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db.models import QuerySet
from django.urls import reverse

from controlplane.accounts.models import Role
from controlplane.console.lists import PageViewer
from controlplane.events.services import record
from controlplane.resources.alerts import ALERTS
from controlplane.resources.batches import BATCHES
from controlplane.resources.events import EVENTS
from controlplane.resources.filters import Select
from controlplane.resources.instances import INSTANCES
from controlplane.resources.inventory import MODELS
from controlplane.resources.jobs import JOBS
from controlplane.resources.keys import KEYS
from controlplane.resources.requests import REQUESTS
from controlplane.resources.resource import Resource
from controlplane.resources.settings import SETTINGS
from controlplane.resources.tables import ROW_LIMIT

PAGES = {
    "requests": REQUESTS,
    "events": EVENTS,
    "alerts": ALERTS,
    "keys": KEYS,
    "batches": BATCHES,
    "fleet": INSTANCES,
    "system": JOBS,
    "settings": SETTINGS,
    "models": MODELS,
}
of_pages = pytest.mark.parametrize(("address", "resource"), PAGES.items(), ids=list(PAGES))


@pytest.fixture
def rows(make_request, fleet, node, live, fleet_feed):
    """At least one row of most resources."""
    make_request()
    live.show(fleet_feed)


def queries(resource: Resource, viewer: PageViewer):
    """Yield one for each choice of each select, some text for the other controls, and one for each order."""
    filters, _ = resource.listed(viewer, {})
    for control, _ in filters:
        values = [value for value, _ in control.options] if isinstance(control, Select) else ["-x", "a b"]
        yield from ({control.name: value} for value in values)
    yield {"sort": "-no_such_column"}
    yield from ({"sort": f"{sign}{column.name}"} for column in resource.columns if column.sorts for sign in ("", "-"))


@pytest.mark.sql
@pytest.mark.django_db
@of_pages
def test_each_filter_and_order_is_read(address, resource, viewer, rows):
    for query in queries(resource, PageViewer(viewer, True)):
        filters, left = resource.listed(PageViewer(viewer, True), query)
        if isinstance(left, QuerySet) and not resource.whole:
            list(resource.page_of(left, filters, None).rows)


@of_pages
def test_page_and_file_have_the_columns(address, resource, client, viewer, operator, member, rows):
    url = reverse(f"console:{address}")
    for user, sees_fleet in ((operator if resource.least == Role.OPERATOR else viewer, True), (member, False)):
        if resource.least and not sees_fleet:
            continue
        client.force_login(user)
        html = client.get(url).content.decode()
        header, *values = file_of(client, url)
        assert header == [c.heading for c in resource.columns if c.heading and (sees_fleet or not c.fleet)]
        assert all(len(row) == len(header) for row in values)
        if values and not resource.row_template:
            assert all(f">{column.title}<" in html for column in resource.page_columns(PageViewer(user, sees_fleet)))


@pytest.mark.parametrize(
    ("address", "resource"), [(address, row) for address, row in PAGES.items() if row.whole], ids=lambda of: str(of)[:9]
)
def test_a_whole_list_is_sorted_by_each_column_both_ways(address, resource, acting, rows):
    url = reverse(f"console:{address}")
    for column in (column for column in resource.columns if column.sorts and column.heading):
        up, down = (
            [row[column.heading] for row in records(acting, url, sort=f"{sign}{column.name}")] for sign in ("", "-")
        )
        known = [value for value in up if value]
        assert [value for value in down if value] == known[::-1] or len(set(known)) < len(known)
        assert up[: len(known)] == known, "rows without a value come last"
        key = float if all(value.replace(".", "", 1).isdigit() for value in known) else str
        assert known == sorted(known, key=key)


def request_rows(make_request):
    for number, values in enumerate(
        (
            {"slo_class": "interactive"},
            {"outcome": "failed", "slo_met": False, "model": "other", "region": "eu", "instance": "elsewhere"},
            {"region": "us-east", "own_region": "us-west"},
            {"region": "", "own_region": "us-west", "outcome": "rejected", "unserved": True, "slo_met": None},
        )
    ):
        arrived_at = datetime(2026, 3, 1, 12, 0, number, tzinfo=UTC)
        make_request(request_id=f"r{number}", arrived_at=arrived_at, **values)


def event_rows(tenant):
    record("instance.moved", tenant, actor="ann", reason="new driver", severity="critical")
    record("api_key.created", tenant, actor="bob")


OF_REQUESTS = [
    ({"outcome": "failed"}, {"outcome": "failed"}, {1}),
    ({"outcome": "unserved"}, {"unserved": True}, {3}),
    ({"outcome": "spilled"}, {"spilled": True}, {2}),
    ({"outcome": "no such outcome"}, {}, {0, 1, 2, 3}),
    ({}, {"unserved": False, "spilled": False}, {0, 1}),
    ({"slo": "missed"}, {"slo_met": False}, {1}),
    ({"slo": "met"}, {"slo_met": True}, {0, 2}),
    ({"class": "interactive", "region": "eu"}, {"slo_class": "interactive", "region": "eu"}, {1}),
    ({"q": "r2"}, {"request_id": "r2"}, {2}),
    ({"instance": "elsewhere"}, {"instance": "elsewhere"}, {1}),
    ({"tenant": "acme"}, {"tenant": "acme", "model": "other"}, None),
    ({"hours": "1"}, {"until": datetime(2026, 3, 1, tzinfo=UTC)}, set()),
    ({}, {"since": datetime(2026, 3, 1, 12, 0, 2, tzinfo=UTC)}, None),
    ({"q": "nothing"}, {"model": "nothing"}, set()),
]
OF_EVENTS = [
    ({"kind": "instance.moved"}, {"kind": "instance."}, {0}),
    ({"severity": "critical"}, {"severity": "critical"}, {0}),
    ({"actor": "bob"}, {"actor": "bob"}, {1}),
    ({"q": "driver ann"}, {"q": "driver ann"}, {0}),
    ({}, {"subject_type": "tenant"}, {0, 1}),
    ({"q": "nothing says this"}, {"until": datetime(2001, 1, 1, tzinfo=UTC)}, set()),
]


def narrowed(resource, viewer, query, parameters) -> tuple[list[Any], list[Any]]:
    """Rows that the page's form and REST's parameters leave, oldest first."""
    reader = PageViewer(viewer, True)
    _, form = resource.listed(reader, query)
    return list(form.order_by("pk")), list(resource.narrowed(resource.rows(reader), parameters).order_by("pk"))


@pytest.mark.sql
@pytest.mark.parametrize(("query", "parameters", "left"), OF_REQUESTS)
def test_filters_of_requests(query, parameters, left, viewer, make_request):
    request_rows(make_request)
    form, rest = ([int(row.request_id[1:]) for row in rows] for rows in narrowed(REQUESTS, viewer, query, parameters))
    if left is None:
        assert len(form) == 4
        assert len(rest) in (1, 2)
    else:
        assert {*form} == (left if query else {0, 1, 2, 3})
        assert {*rest} == left


@pytest.mark.sql
@pytest.mark.parametrize(("query", "parameters", "left"), OF_EVENTS)
def test_filters_of_events(query, parameters, left, viewer, operations):
    event_rows(operations)
    reader = PageViewer(viewer, True)
    first = EVENTS.rows(reader).order_by("pk").first().pk
    form, rest = ({row.pk - first for row in rows} for rows in narrowed(EVENTS, viewer, query, parameters))
    assert form == (left if query else {0, 1})
    assert rest == left


@pytest.mark.parametrize(
    ("parameters", "left"),
    [
        ({"state": "draining"}, {"instance-4"}),
        ({"region": "us-west"}, set()),
        ({"model": "llama-3.1-8b", "gpu_type": "a100-80gb", "q": "instance-2 llama"}, {"instance-2"}),
    ],
)
def test_filters_of_instances(parameters, left, viewer, fleet):
    rows = INSTANCES.narrowed(INSTANCES.rows(PageViewer(viewer, True)), parameters)
    assert {row.name for row in rows} == left


def file_of(client, url, **query) -> list[list[str]]:
    answer = client.get(url, query | {"format": "csv"})
    assert answer.streaming
    assert answer["Content-Type"] == "text/csv; charset=utf-8"
    assert answer["X-Row-Limit"] == str(ROW_LIMIT)
    return list(csv.reader(io.StringIO(b"".join(answer.streaming_content).decode())))


def records(client, url, **query) -> list[dict[str, str]]:
    header, *values = file_of(client, url, **query)
    return [dict(zip(header, row, strict=True)) for row in values]
