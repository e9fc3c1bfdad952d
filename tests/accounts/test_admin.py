"""The admin as a whole: who enters, every registered page, and that edits leave events."""

import pytest
from django.contrib import admin
from django.urls import reverse

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.fleet.models import Region, SloClass

pytestmark = pytest.mark.django_db

admin.autodiscover()
MODELS = sorted(admin.site._registry, key=lambda model: model._meta.label)


def url_of(model, page, *args):
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=args)


def test_the_side_list_of_a_page_is_the_index(as_admin):
    page, index = as_admin.get(url_of(Region, "changelist")), as_admin.get(reverse("admin:index"))
    assert b"<script>" not in page.content
    assert page.context["is_nav_sidebar_enabled"]
    for model in MODELS:
        link = f'href="{url_of(model, "changelist")}"'.encode()
        assert link in page.content
        assert link in index.content


def values_of(page) -> dict:
    """What the form of *page* would post, unchanged."""
    form = page.context["adminform"].form
    given = {name: form[name].value() for name in form.fields}
    return {
        name: [getattr(each, "pk", each) for each in value] if isinstance(value, list) else value
        for name, value in given.items()
        if value is not False and value is not None
    }


class TestWhoEnters:
    def test_staff_flag_alone_opens_nothing(self, client, make_user):
        client.force_login(make_user("clerk", is_staff=True))
        assert client.get(reverse("admin:index"), follow=True).status_code == 403

    def test_a_superuser_may_do_all(self, client, make_user, region):
        client.force_login(make_user("root", is_superuser=True))
        assert client.get(url_of(Region, "add")).status_code == 200

    def test_open_redirects_are_not_followed(self, as_admin):
        response = as_admin.get(reverse("admin:login") + "?next=https://elsewhere.example/")
        assert response.url == reverse("admin:index")


class TestEdits:
    def test_an_edit_is_an_event_with_before_and_after(self, as_admin, region, fleet_admin):
        as_admin.post(url_of(Region, "change", region.pk), {"name": "us-east", "title": "US East 2", "active": "on"})
        event = Event.objects.get()
        assert (event.kind, event.user, event.subject) == ("region.changed", fleet_admin, "US East 2")
        assert (event.before, event.after) == ({"title": "US East"}, {"title": "US East 2"})

    @pytest.mark.parametrize(
        ("model", "changes", "errors", "after"),
        [
            (Tenant, {"slo_classes": ["interactive", "batch"]}, set(), {"slo_classes": ["Batch", "Interactive"]}),
            (Tenant, {"slo_classes": ["batch"]}, {"default_slo_class"}, None),
            (Tenant, {"time_zone": "Asia/Nowhere"}, {"time_zone"}, None),
        ],
    )
    @pytest.mark.sql
    def test_a_form_is_saved_with_its_event_or_refused_at_its_field(
        self, as_admin, acme, slo_class, model, changes, errors, after
    ):
        SloClass.objects.create(name="batch", title="Batch", kind="non_interactive", deadline_s=60)
        if names := changes.get("slo_classes"):
            changes = {"slo_classes": [SloClass.objects.get(name=name).pk for name in names]}
        row = model.objects.get(name="acme")
        url = url_of(model, "change", row.pk)
        response = as_admin.post(url, values_of(as_admin.get(url)) | changes)
        if errors:
            assert set(response.context["adminform"].form.errors) == errors
        else:
            assert response.status_code == 302, response.context["errors"]
        assert [event.after for event in Event.objects.filter(kind__endswith=".changed")] == [after] * (not errors)

    @pytest.mark.sql
    def test_deletion_is_an_event_one_by_one_and_in_bulk(self, as_admin):
        one, two, three = (Region.objects.create(name=name, title=name) for name in ("r1", "r2", "r3"))
        as_admin.post(url_of(Region, "delete", one.pk), {"post": "yes"})
        as_admin.post(
            url_of(Region, "changelist"),
            {"action": "delete_selected", "_selected_action": [two.pk, three.pk], "post": "yes"},
        )
        events = Event.objects.filter(kind="region.deleted")
        assert sorted(event.before["name"] for event in events) == ["r1", "r2", "r3"]
        assert not Region.objects.exists()
