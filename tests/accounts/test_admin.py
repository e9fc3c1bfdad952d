"""The admin as a whole: who enters, every registered page, and that edits leave events."""

import pytest
from django.contrib import admin
from django.urls import reverse

from controlplane.accounts import services
from controlplane.accounts.models import ApiKey, Membership, SignInLink, Tenant, User, hash_secret
from controlplane.applications.models import Application, ApplicationRun, FollowedLedger, UnitReport
from controlplane.batches.models import Batch, BatchLine, StoredFile
from controlplane.events.models import Event
from controlplane.fleet.models import (
    Gpu,
    Owner,
    Region,
    SloClass,
    Stock,
)
from controlplane.fleet.models.spot import Donation
from controlplane.jobs.models import JobRow
from controlplane.usage.models import UsageMark

pytestmark = pytest.mark.django_db

admin.autodiscover()
MODELS = sorted(admin.site._registry, key=lambda model: model._meta.label)


def url_of(model, page, *args):
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=args)


def test_every_model_of_the_project_is_registered():
    from django.apps import apps

    ours = {model for model in apps.get_models() if model.__module__.startswith("controlplane.")}
    shown_elsewhere = {
        *{JobRow, UsageMark, StoredFile, Batch, BatchLine, Donation, Owner, Gpu, Stock},
        *{Application, ApplicationRun, FollowedLedger, UnitReport},
    }  # on pages of the console
    assert ours - shown_elsewhere == set(MODELS)


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
            (Membership, {"role": "admin"}, set(), {"role": "admin"}),
        ],
    )
    @pytest.mark.sql
    def test_a_form_is_saved_with_its_event_or_refused_at_its_field(
        self, as_admin, member, slo_class, model, changes, errors, after
    ):
        SloClass.objects.create(name="batch", title="Batch", kind="non_interactive", deadline_s=60)
        if names := changes.get("slo_classes"):
            changes = {"slo_classes": [SloClass.objects.get(name=name).pk for name in names]}
        row = member.memberships.get() if model is Membership else model.objects.get(name="acme")
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

    def test_passwords_never_enter_an_event(self, as_admin, member):
        member.set_password("first secret of mine")
        member.save()
        response = as_admin.post(
            reverse("admin:auth_user_password_change", args=[member.pk]),
            {"password1": "second secret of mine", "password2": "second secret of mine", "usable_password": "true"},
        )
        assert response.status_code == 302
        member.refresh_from_db()
        assert member.check_password("second secret of mine")
        assert Event.objects.filter(kind="user.password_changed", subject="member").exists()
        for event in Event.objects.all():
            assert "secret" not in str([event.before, event.after, event.inputs, event.reason])
            assert member.password not in str([event.before, event.after])

    def test_only_superusers_make_superusers(self, as_admin, member):
        page = as_admin.get(url_of(User, "change", member.pk))
        assert "is_superuser" not in page.context["adminform"].form.fields

    def test_only_superusers_touch_superusers(self, as_admin, make_user):
        root = make_user("root", is_superuser=True)
        assert as_admin.post(url_of(User, "change", root.pk), {"username": "mine"}).status_code == 403
        assert as_admin.get(reverse("admin:auth_user_password_change", args=[root.pk])).status_code == 403
        assert as_admin.post(url_of(User, "delete", root.pk), {"post": "yes"}).status_code == 403
        as_admin.post(url_of(User, "changelist"), {"action": "sign_in_link", "_selected_action": [root.pk]})
        assert not SignInLink.objects.exists()


class TestKeys:
    def test_the_secret_is_shown_once_and_works(self, as_admin, acme, fleet_admin):
        response = as_admin.post(url_of(ApiKey, "add"), {"tenant": acme.pk, "name": "laptop"})
        assert response.status_code == 200
        assert "no-store" in response.headers["Cache-Control"]
        secret = response.context["secret"]
        key = ApiKey.objects.get()
        assert key.sha256 == hash_secret(secret)
        assert key.created_by == fleet_admin
        assert secret not in as_admin.get(url_of(ApiKey, "change", key.pk)).content.decode()
        assert Event.objects.get(kind="api_key.created").after["prefix"] == key.prefix

    def test_a_date_in_the_past_is_refused_at_its_field(self, as_admin, acme):
        values = {"tenant": acme.pk, "name": "laptop", "expires_at_0": "2020-01-01", "expires_at_1": "00:00"}
        response = as_admin.post(url_of(ApiKey, "add"), values)
        assert "expires_at" in response.context["adminform"].form.errors

    def test_revoking_asks_for_a_reason(self, as_admin, acme, fleet_admin):
        key, _ = services.create_api_key(acme, "laptop", fleet_admin)
        choice = {"action": "revoke", "_selected_action": [key.pk]}
        page = as_admin.post(url_of(ApiKey, "changelist"), choice)
        assert page.templates[0].name == "admin/reason.html"
        again = as_admin.post(url_of(ApiKey, "changelist"), choice | {"confirmed": "yes", "reason": ""})
        assert again.context["form"].errors
        as_admin.post(url_of(ApiKey, "changelist"), choice | {"confirmed": "yes", "reason": "leaked"})
        key.refresh_from_db()
        assert not key.usable
        assert Event.objects.get(kind="api_key.revoked").reason == "leaked"

    def test_a_sign_in_link_is_for_one_user(self, as_admin, member, stranger):
        choice = {"action": "sign_in_link", "_selected_action": [member.pk]}
        page = as_admin.post(url_of(User, "changelist"), choice)
        token = page.context["secret"].rstrip("/").rpartition("/")[2]
        assert services.use_sign_in_link(token) == member
        both = {"action": "sign_in_link", "_selected_action": [member.pk, stranger.pk]}
        assert "Choose one user" in as_admin.post(url_of(User, "changelist"), both, follow=True).content.decode()
        assert SignInLink.objects.count() == 1
