"""What callers are answered: no caller, no valid key, the wrong kind of caller, and a session without its CSRF token."""

import pytest
from django.test import Client

from controlplane.api.urls import api

pytestmark = pytest.mark.django_db

WRITES = sorted(
    (operation.methods[0], path, operation.view_func.__name__)
    for prefix, router in api._routers
    for path, view in router.path_operations.items()
    for operation in view.operations
    if operation.include_in_schema and operation.methods[0] != "GET"
)
"""Every operation that changes something."""


def send(client, method, path, **headers):
    for parameter, value in (("{int:", "1"), ("{", "x")):
        while parameter in path:
            begin = path.index(parameter)
            path = path[:begin] + value + path[path.index("}", begin) + 1 :]
    return client.generic(method, f"/api{path}", "{}", content_type="application/json", headers=headers)


def code_of(answer):
    return answer.status_code, answer.json()["error"]["code"]


@pytest.fixture
def strict():
    """A client whose writes need a CSRF token, as a browser's do."""
    return Client(enforce_csrf_checks=True)


def test_a_write_without_a_key_is_401(strict):
    assert len(WRITES) > 30
    for method, path, name in WRITES:
        assert code_of(send(strict, method, path)) == (401, "not_authenticated"), name
        unknown = send(strict, method, path, Authorization="Bearer ph_unknown")
        assert code_of(unknown) == (401, "not_authenticated"), name


def test_a_session_needs_its_csrf_token(strict, operator):
    strict.force_login(operator)
    answer = send(strict, "PUT", "/settings/PLAN_EPSILON")
    assert answer.status_code == 403
    assert "CSRF" in answer.json()["error"]["message"]
