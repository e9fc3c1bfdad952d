"""The way back of events: the reverse operation or the values before, once, and only while it is open."""

import pytest

from controlplane.alerts.services import ALERT_RULE
from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.inventory.kinds import TENANT
from controlplane.fleet.inventory.services import change, create
from controlplane.resources.undo import REVERSED, WRITTEN
from controlplane.tuning import services as tuning
from controlplane.tuning.models import Setting
from controlplane.tuning.selectors import tuned

pytestmark = pytest.mark.django_db


def undo(client, event) -> str:
    return client.post(f"/events/{event.pk}/undo/", {"reason": "a mistake"}, follow=True).content.decode()


def test_reverse_operations_are_those_of_the_resources():
    assert REVERSED["region.cordoned"][1].verb == "uncordon"
    assert {"api_key.created", "model.retired", "deployment.created", "instance.stop_requested"} <= REVERSED.keys()
    assert {"deployment.changed", "alert_rule.changed", "tenant.changed"} <= WRITTEN.keys()


def test_a_cordon_is_undone_once(acting, operator, node):
    services.cordon(node, operator, "fan")
    event = Event.objects.get(kind="node.cordoned")
    assert "Undo: Uncordon…" in acting.get(f"/events/{event.pk}/").content.decode()
    assert f"/events/{event.pk}/#undo" in acting.get("/events/").content.decode()
    assert "is uncordoned" in undo(acting, event)
    node.refresh_from_db()
    assert not node.cordoned
    assert "Undo:" not in acting.get(f"/events/{event.pk}/").content.decode()
    assert acting.post(f"/events/{event.pk}/undo/", {"reason": "again"}).status_code == 403


def test_a_setting_is_set_back_unless_another_changed_it_since(acting, operator):
    tuning.change("PLAN_EPSILON", 0.5, operator, "a try")
    event = Event.objects.latest("pk")
    assert "PLAN_EPSILON from 0.5 to 0.8" in undo(acting, event)
    assert tuned().PLAN_EPSILON == 0.8
    tuning.change("PLAN_EPSILON", 0.3, "alice")
    assert "alice changed PLAN_EPSILON" in undo(acting, event)
    assert tuned().PLAN_EPSILON == 0.3


def test_a_first_value_is_removed_so_that_others_hold_again(acting, operator, language_model):
    tuning.change("SCALE_COOLDOWN_S", 33, operator, "a try", language_model)
    assert "SCALE_COOLDOWN_S of llama-3.1-8b is set back" in undo(acting, Event.objects.latest("pk"))
    tuning.change("SCALE_COOLDOWN_S", 77, operator, "all")
    first = Event.objects.latest("pk")
    assert tuned("llama-3.1-8b").SCALE_COOLDOWN_S == 77
    tuning.change("SCALE_COOLDOWN_S", 88, operator, "all")
    undo(acting, Event.objects.latest("pk"))
    assert tuned().SCALE_COOLDOWN_S == 77
    assert "is set back" in undo(acting, first)
    assert not Setting.objects.exists()


def test_changed_values_are_set_back_by_admins_and_secrets_are_not(client, fleet_admin, operator, acme):
    change(TENANT, acme, {"max_concurrent_requests": 7}, "test", "too many")
    event = Event.objects.get(kind="tenant.changed")
    rule = create(ALERT_RULE, {"name": "r", "condition": "job", "receivers": "https://hooks.example.com/a"}, "test")
    change(ALERT_RULE, rule, {"receivers": "https://hooks.example.com/b"}, "test")
    client.force_login(operator)
    assert client.post(f"/events/{event.pk}/undo/", {"reason": "x"}).status_code == 403
    client.force_login(fleet_admin)
    assert "max_concurrent_requests from 7 to 256" in undo(client, event)
    acme.refresh_from_db()
    assert acme.max_concurrent_requests == 256
    secret = Event.objects.get(kind="alert_rule.changed")
    assert client.post(f"/events/{secret.pk}/undo/", {"reason": "x"}).status_code == 403


def test_what_comes_each_minute_is_folded_and_kinds_are_words(acting, acme):
    from controlplane.events.services import record

    for number in range(5):
        record("plan.in_force", acme, actor="planner", reason=f"minute {number}")
    record("api_key.revoked", acme, actor="test")
    page = acting.get("/events/").content.decode()
    assert page.count("minute ") == 1
    assert "and 4 more" in page
    assert ">Api key revoked<" in page
    assert acting.get("/events/?kind=plan.in_force").content.decode().count("minute ") == 5
