"""Access by role: operators by role, a tenant's people only their own, visitors nothing.

Every address as every role, in a world full of rows: tests/access.
"""

import pytest
from django.urls import reverse

FLEET_PAGES = (
    "overview",
    "fleet",
    "timeline",
    "models",
    "scaling",
    "calendar",
    "events",
)
TENANT_PAGES = ("usage", "requests", "keys", "api-docs")


def url(name: str, *args) -> str:
    return reverse(f"console:{name}", args=args)


def test_every_page_opens_before_there_is_anything(acting):
    assert {name: acting.get(url(name)).status_code for name in FLEET_PAGES + TENANT_PAGES} == dict.fromkeys(
        FLEET_PAGES + TENANT_PAGES, 200
    )


def test_a_user_without_a_role_reads_why(client, make_user):
    client.force_login(make_user("newcomer"))
    answer = client.get(url("keys"))
    assert answer.status_code == 403
    assert "no role yet" in answer.content.decode()


@pytest.mark.parametrize(("actor", "shown"), [("viewer", False), ("operator", False), ("fleet_admin", True)])
def test_the_admin_is_in_the_navigation_of_admins(client, request, actor, shown):
    client.force_login(request.getfixturevalue(actor))
    assert ('href="/admin/"' in client.get(url("events")).content.decode()) == shown


def test_every_page_carries_the_policy(reader):
    policy = reader.get(url("overview"))["Content-Security-Policy"]
    assert "script-src 'self';" in policy
    assert "unsafe-eval" not in policy
