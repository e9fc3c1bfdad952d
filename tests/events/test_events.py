"""The event record: append-only, filtered, paged, and seen by whom it concerns."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.accounts.services import create_api_key
from controlplane.events import selectors
from controlplane.events.audit import record_change, record_creation, record_deletion, snapshot
from controlplane.events.models import Event, Severity
from controlplane.events.services import record
from controlplane.resources.events import EVENTS

pytestmark = pytest.mark.django_db


class TestAppendOnly:
    @pytest.mark.sql
    def test_rows_are_neither_changed_nor_removed(self, acme):
        event = record("test.happened", acme, actor="test")
        for attempt in (
            event.save,
            event.delete,
            Event.objects.all().delete,
            lambda: Event.objects.update(reason="rewritten"),
        ):
            with pytest.raises(TypeError, match="append-only"):
                attempt()
        assert Event.objects.get().reason == ""

    def test_a_user_may_go_and_the_name_stays(self, make_user):
        user = make_user("ann")
        record("test.happened", actor=user)
        user.delete()
        event = Event.objects.get()
        assert (event.user, event.actor) == (None, "ann")


class TestAudit:
    def test_change_of_nothing_is_nothing(self, acme):
        assert record_change(acme, snapshot(acme), "test") is None

    def test_change_holds_what_differs(self, acme, slo_class):
        before = snapshot(acme)
        acme.tokens_per_minute = 5
        acme.slo_classes.clear()
        event = record_change(acme, before, "test", reason="abuse")
        assert event.before == {"tokens_per_minute": 0, "slo_classes": ["Interactive"]}
        assert event.after == {"tokens_per_minute": 5, "slo_classes": []}
        assert (event.kind, event.reason) == ("tenant.changed", "abuse")

    def test_secrets_stay_out(self, member, acme):
        member.set_password("a password of mine")
        key, _ = create_api_key(acme, "laptop", "test")
        assert snapshot(member)["password"] == "set"
        assert snapshot(key)["sha256"] == "set"

    def test_values_are_json(self, gpu_type, deployment):
        gpu_type.refresh_from_db()
        assert record_creation(gpu_type, "test").after["on_demand_usd_per_hour"] == "1.35"
        event = record_deletion(deployment, "test")
        assert (event.kind, event.severity) == ("deployment.deleted", Severity.WARNING)
        assert event.before["model"] == "llama-3.1-8b"


def listed(**given):
    return EVENTS.narrowed(Event.objects.all(), given)


class TestReading:
    @pytest.mark.sql
    def test_time_is_a_half_open_range(self):
        event = record("test.happened", actor="a")
        assert listed(since=event.at).exists()
        assert not listed(until=event.at).exists()
        later = timezone.now() + timedelta(seconds=1)
        assert listed(until=later).exists()

    @pytest.mark.sql
    def test_every_word_of_the_text_is_looked_for(self, acme):
        record("tenant.changed", acme, actor="ann", reason="more load at noon")
        for text, matches in (("noon", 1), ("NOON ann", 1), ("acme tenant.", 1), ("noon bob", 0), ("", 1)):
            assert listed(q=text).count() == matches, text

    @pytest.mark.sql
    def test_kinds_and_families(self):
        record("instance.moved", actor="a")
        record("instance_type.changed", actor="a")
        assert listed(kind="instance.").count() == 1
        assert listed(kind="instance").count() == 0
        assert selectors.event_kinds() == ["instance.moved", "instance_type.changed"]

    def test_about_one_row(self, acme, globex):
        record("test.one", acme, actor="a")
        record("test.two", globex, actor="a")
        assert [event.kind for event in selectors.events_about(acme)] == ["test.one"]

    def test_who_sees_them(self, viewer, member, stranger, acme, make_user):
        create_api_key(acme, "laptop", "test")
        record("instance.moved", actor="a")
        assert selectors.visible_events(viewer).count() == 2
        assert selectors.visible_events(member).count() == 1
        assert selectors.visible_events(stranger).count() == 0
        assert selectors.visible_events(make_user("new")).count() == 0
