import json

import pytest

from controlplane.accounts.services import create_api_key
from tests.inventory import *  # noqa: F403 (fixtures)


class Caller:
    """A client with one identity: JSON in, JSON out."""

    def __init__(self, client, headers=None):
        self.client, self.headers = client, headers or {}

    def get(self, path, **query):
        return self.client.get(f"/api/{path}", query, headers=self.headers)

    def send(self, method, path, body):
        return self.client.generic(
            method, f"/api/{path}", json.dumps(body), content_type="application/json", headers=self.headers
        )

    def post(self, path, **body):
        return self.send("POST", path, body)

    def patch(self, path, **body):
        return self.send("PATCH", path, body)


@pytest.fixture
def sign_in(request):
    """`sign_in("operator")`: a caller with the session of that fixture's user."""
    from django.test import Client

    def as_user(name):
        client = Client()
        client.force_login(request.getfixturevalue(name))
        return Caller(client)

    return as_user


@pytest.fixture
def with_key():
    """`with_key(tenant)`: a caller with a new API key of *tenant*; `.key` is the row."""
    from django.test import Client

    def as_tenant(tenant):
        key, secret = create_api_key(tenant, "test", "test")
        caller = Caller(Client(), {"Authorization": f"Bearer {secret}"})
        caller.key = key
        return caller

    return as_tenant


@pytest.fixture
def anonymous():
    from django.test import Client

    return Caller(Client())
