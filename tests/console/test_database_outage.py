"""A database that takes no writes, or does not answer: 503 with a sentence, in JSON for the API and as a page otherwise."""

import pytest
from django.db import InternalError, OperationalError, connection
from django.db.models import QuerySet

from controlplane.accounts.services import create_api_key
from controlplane.database import AWAY, BUSY, READ_ONLY, outage, probe_write
from controlplane.tuning.models import Setting

pytestmark = pytest.mark.django_db


@pytest.fixture
def read_only():
    """Call it to let the database refuse all further writes of this test."""
    sqlite = connection.vendor == "sqlite"

    def refuse():
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA query_only = ON" if sqlite else "SET LOCAL transaction_read_only = on")

    yield refuse
    if sqlite:
        connection.connection.execute("PRAGMA query_only = OFF")  # also after an error in the transaction


def test_an_action_of_an_operator(acting, read_only):
    read_only()
    answer = acting.post("/settings/PLAN_EPSILON/", {"value": "0.5", "reason": "less"})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
    assert READ_ONLY in answer.content.decode()


def test_the_api(acting, read_only):
    read_only()
    answer = acting.put("/api/settings/PLAN_EPSILON", {"value": 0.5}, content_type="application/json")
    assert answer.status_code == 503
    assert answer.json()["error"] == {"code": "database_unavailable", "message": READ_ONLY, "field": None}


def test_reads_with_a_key_need_no_write(client, acme, operator, monkeypatch):
    _, secret = create_api_key(acme, "mine", operator)

    def refuse(*_, **__):
        raise OperationalError("attempt to write a readonly database")

    monkeypatch.setattr(QuerySet, "update", refuse)
    assert client.get("/api/requests", headers={"Authorization": f"Bearer {secret}"}).status_code == 200


def test_files_of_tenants(client, acme, operator, read_only):
    _, secret = create_api_key(acme, "mine", operator)
    read_only()
    answer = client.post(
        "/v1/runs", {"application": "a", "run": "r"}, "application/json", HTTP_AUTHORIZATION=f"Bearer {secret}"
    )
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == READ_ONLY


def test_the_probe(read_only):
    probe_write()
    assert not Setting.objects.exists()
    read_only()
    with pytest.raises((OperationalError, InternalError)):
        probe_write()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OperationalError("attempt to write a readonly database"), READ_ONLY),
        (InternalError("cannot execute UPDATE in a read-only transaction"), READ_ONLY),
        (OperationalError("database is locked"), BUSY),
        (OperationalError("connection to server failed"), AWAY),
        (OperationalError("no such table: x"), ""),
        (InternalError("current transaction is aborted"), ""),
    ],
)
def test_mistakes_of_ours_are_no_outage(error, said):
    assert outage(error) == said
