import logging

import orjson
import pytest
from django.test import Client

from controlplane.accounts.models import Tenant
from controlplane.api.routers import system
from controlplane.dispatch.wire import WAITING_KEY
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.lengths import services as lengths
from tests.access.world import World
from tests.console.conftest import *  # noqa: F403 (fixtures: a live state under the test's hand, and an inventory)


def waiting_of_all() -> dict:
    """A waiting request of each tenant, named after it."""
    rows = [
        {
            "request_id": f"waits-{tenant.name}", "tenant_id": tenant.pk, "model": "m", "region": "us-east",
            "slo_class": "interactive", "arrived_at": 1.79e9, "position": 1, "estimated_wait_s": 1.5,
            "estimated_wait_p99_s": 2.0,
        }
        for tenant in Tenant.objects.all()
    ]  # fmt: skip
    return {"at": 1.79e9, "requests": rows, "by_tenant": [[row["tenant_id"], "m", 1] for row in rows]}


def group_is_gone(command, **values):
    """A request group that was dispatched, as the gateway publishes it."""
    raise ActionError("Group 7 has left the queue")


def run_is_gone(tenant_id, application, run, action):
    raise ActionError(f"Run {run} has no call in progress, and none lately")


@pytest.fixture
def world(inventory, live, monkeypatch):
    """Return the running one, or one for this test; nothing is read from Redis."""

    world = vars(inventory).get("world") or World(inventory)
    summary = live.show(world.feed())
    monkeypatch.setattr(
        system, "read_published", lambda key: orjson.dumps(waiting_of_all() if key == WAITING_KEY else summary)
    )
    monkeypatch.setattr("controlplane.dispatch.queues.services.ask", group_is_gone)
    monkeypatch.setattr("controlplane.applications.reporting.ask_of_run", run_is_gone)
    monkeypatch.setattr(lengths, "_obstacle", lambda row: "")  # reads the files of versions: there are none
    return world


@pytest.fixture(autouse=True)
def _refusals_are_no_news():
    """Hundreds are expected, and each would log a traceback."""
    logger = logging.getLogger("django.request")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture
def sign_in(request, make_user, globex):
    """`sign_in(role)`: return a client with a session of that role."""

    def as_role(role: str) -> Client:
        client = Client(headers={"host": "testserver"})
        if role == "newcomer":
            client.force_login(make_user("newcomer"))
        elif role != "anonymous":
            client.force_login(request.getfixturevalue(role))
        return client

    return as_role
