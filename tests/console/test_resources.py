"""Every resource that has a page: each filter and order of it is read by the database, and its file has its columns."""

import csv
import io

import pytest
from django.urls import reverse

from controlplane.console.lists import PageViewer
from controlplane.resources.events import EVENTS
from controlplane.resources.filters import Select
from controlplane.resources.keys import KEYS
from controlplane.resources.plans import MOVES, PLANS
from controlplane.resources.requests import REQUESTS
from controlplane.resources.resource import Resource

PAGES = (REQUESTS, EVENTS, KEYS, PLANS, MOVES)


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
@pytest.mark.parametrize("resource", PAGES, ids=lambda resource: resource.name)
def test_each_filter_and_order_is_read(resource, client, viewer, make_request):
    make_request()
    asked = list(queries(resource, PageViewer(viewer, True)))
    assert asked
    for query in asked:
        filters, rows = resource.listed(PageViewer(viewer, True), query)
        list(resource.page_of(rows, filters, None).rows)


@pytest.mark.parametrize("resource", PAGES, ids=lambda resource: resource.name)
def test_page_and_file_have_the_columns(resource, client, viewer, member, make_request):
    make_request()
    url = reverse(f"console:{resource.name}")
    for user, sees_fleet in ((viewer, True), (member, False)):
        if resource.least and not sees_fleet:
            continue
        client.force_login(user)
        assert client.get(url).status_code == 200
        lines = b"".join(client.get(url, {"format": "csv"}).streaming_content).decode()
        header, *values = csv.reader(io.StringIO(lines))
        assert header == [c.heading for c in resource.columns if c.heading and (sees_fleet or not c.fleet)]
        assert all(len(row) == len(header) for row in values)
