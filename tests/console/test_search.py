"""The search over everything: what each person finds, and where it leads."""

import re

import pytest
from django.urls import reverse

from controlplane.accounts.services import create_api_key
from controlplane.alerts.models import AlertRule, Condition
from controlplane.applications.models import Application
from controlplane.console.pages.search.views import SEARCHED
from controlplane.simulation.whatif.models import Future, WhatIf
from tests.console import batch_rows

pytestmark = pytest.mark.django_db


def found(client, text: str) -> dict[str, str]:
    """Addresses by the names that a search for *text* shows."""
    answer = client.get(reverse("console:search"), {"q": text})
    assert answer.status_code == 200
    links = re.findall(r'<a role="option"[^>]* href="([^"]+)">([^<]+)', answer.content.decode())
    return {name.strip(): href.replace("&amp;", "&") for href, name in links}


@pytest.fixture
def everything(acme, make_request, fleet, node):
    """Rows of every kind: the word by which each is found, and its address begins."""
    key, _ = create_api_key(acme, "shop window", "a test")
    rule = AlertRule.objects.create(name="Pager", condition=Condition.INSTANCE)
    batch = batch_rows.batch(acme, "llama-3.1-8b", done=1, total=2, due_in_s=60, status="in_progress")
    request = make_request(model="llama-3.1-8b")
    instance, what_if = fleet[0], WhatIf.objects.create(title="Double demand")
    Future.objects.create(what_if=what_if, letter="A", name="As now")
    return {
        "Models": ("llama-3.1", "/models/llama-3.1-8b/"),
        "Instances": (instance.name, f"/fleet/instances/{instance.name}/"),
        "Nodes": (node.name, f"/fleet/nodes/{node.name}/"),
        "Regions": (instance.deployment.region.title, f"/fleet/?region={instance.deployment.region.name}"),
        "Tenants": ("acme", "/usage/?tenant=acme"),
        "API keys": ("shop WINDOW", f"/keys/?q={key.prefix}"),
        "Batches": (batch.public_id, f"/batches/{batch.public_id}/"),
        "Applications": ("porter", f"/applications/{Application.objects.create(tenant=acme, name='porter').pk}/"),
        "What-ifs": ("double", f"/what-if/{what_if.pk}/"),
        "Alert rules": (rule.name, "/alerts/"),
        "Settings": ("plan epsilon", "/settings/?q=PLAN_EPSILON"),
        "Requests": (request.request_id, f"/requests/{request.pk}/"),
    }


def test_every_kind_is_found_by_name(reader, everything):
    assert everything.keys() == {kind.title for kind in SEARCHED}
    for text, address in everything.values():
        addresses = found(reader, text).values()
        assert address in addresses, (text, addresses)
        assert reader.get(address).status_code == 200


def test_a_tenants_people_find_their_own(as_member, everything, globex):
    own = {"Tenants", "API keys", "Batches", "Applications", "Requests"}
    for title, (text, address) in everything.items():
        assert (address in found(as_member, text).values()) == (title in own), title
    assert found(as_member, "globex") == {}
    pages = set(found(as_member, "").values())
    assert {"/usage/", "/keys/", "/api/docs"} <= pages
    assert not pages & {"/", "/fleet/", "/system/", "/admin/"}


def test_pages_are_found_by_their_names(reader):
    assert found(reader, "scal")["Scaling"] == "/scaling/"
    assert found(reader, "BUDGETS keys") == {"Keys and budgets": "/keys/"}
    assert found(reader, "no such thing") == {}
