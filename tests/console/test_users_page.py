"""Users and access in the console: one list, one dialog, and a link for who has no password."""

import re
from zoneinfo import ZoneInfo

import pytest
from django.utils import timezone

from controlplane.accounts.models import Membership, Role, User
from controlplane.accounts.services import use_sign_in_link
from controlplane.events.models import Event
from controlplane.fleet.models import Price

pytestmark = pytest.mark.django_db
REASON = {"reason": "a test"}


@pytest.fixture
def admin(client, fleet_admin):
    client.force_login(fleet_admin)
    return client


def roles(user) -> list[str]:
    return sorted(f"{one.role} of {one.tenant.name}" for one in user.memberships.all())


def test_a_person_is_added_gets_roles_and_a_password_and_goes(admin, acme):
    form = {"username": "new", "email": "new@example.com", "is_active": "on", "tenant": acme.pk, "role": "operator"}
    assert admin.post("/users/?edit=new", form | REASON).status_code == 302
    user = User.objects.get(username="new")
    assert (roles(user), user.has_usable_password()) == (["operator of acme"], False)
    assert "operator of Acme" in admin.get("/users/").content.decode()
    member = user.memberships.get()
    form = {"email": "new@example.com", "is_active": "on", f"role-{member.pk}": "viewer", "password": "short"}
    refused = admin.post(f"/users/?edit={user.pk}", form | REASON)
    assert "too short" in refused.content.decode()
    assert roles(user) == ["operator of acme"], "nothing of a refused form is kept"
    admin.post(f"/users/?edit={user.pk}", form | REASON | {"password": "second secret of mine"})
    user.refresh_from_db()
    assert (roles(user), user.check_password("second secret of mine")) == (["viewer of acme"], True)
    admin.post(f"/users/?edit={user.pk}", {"email": "", f"role-{member.pk}": ""} | REASON)
    user.refresh_from_db()
    assert (user.is_active, roles(user)) == (False, [])
    admin.post(f"/users/?edit={user.pk}", {"delete": "1"} | REASON)
    assert not User.objects.filter(username="new").exists()
    events = Event.objects.order_by("pk")
    assert [event.kind for event in events] == [
        "user.created", "membership.created", "membership.changed", "user.password_changed", "user.changed",
        "membership.deleted", "user.deleted",
    ]  # fmt: skip
    assert {event.reason for event in events} == {"a test"}
    assert "secret" not in str([[event.before, event.after, event.inputs] for event in events])


def test_nobody_changes_their_own_roles_or_a_superuser(admin, fleet_admin, make_user):
    root, own = make_user("root", is_superuser=True), fleet_admin.memberships.get()
    for user, form in (
        (root, {"email": "mine@example.com"}),
        (fleet_admin, {"is_active": ""}),
        (fleet_admin, {"is_active": "on", f"role-{own.pk}": "viewer"}),
    ):
        answer = admin.post(f"/users/?edit={user.pk}", form | REASON)
        assert 'role="alert"' in answer.content.decode(), form
        admin.post(f"/users/?edit={user.pk}", {"delete": "1"} | REASON)
    assert admin.post(f"/users/{root.pk}/link/").status_code == 403
    assert User.objects.filter(is_active=True, email="").count() == 2
    assert Membership.objects.get(user=fleet_admin).role == Role.ADMIN


def test_a_link_signs_one_person_in_and_is_shown_once(admin, member):
    page = admin.post(f"/users/{member.pk}/link/")
    assert "no-store" in page.headers["Cache-Control"]
    token = re.search(r"/sign-in/([^/]+)/", page.content.decode())[1]
    assert use_sign_in_link(token) == member
    assert token not in admin.get("/users/").content.decode()


def test_a_price_is_entered_from_a_date_on(admin, gpu_type):
    form = {"of": "gpu", "name": gpu_type.name, "amount": "2.5", "from_at": "2026-11-01 00:15"} | REASON
    with timezone.override(ZoneInfo("Asia/Tokyo")):
        far = admin.post("/usage/prices/?edit=new", form | {"from_at": "0001-01-01 00:00"})
    assert "Give a time of the years 1970 to 2199." in far.content.decode()
    wrong = admin.post("/usage/prices/?edit=new", form | {"from_at": "2026-11-01 00:07"})
    assert "a whole quarter of an hour" in wrong.content.decode()
    assert admin.post("/usage/prices/?edit=new", form).status_code == 302
    price = Price.objects.get(reason="a test")
    assert (price.amount, f"{price.from_at:%F %H:%M}") == (2.5, "2026-11-01 00:15")
