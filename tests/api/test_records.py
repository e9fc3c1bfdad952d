"""`/api`: events and requests."""

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.events.services import record
from controlplane.gateway.models import LedgerRow, Outcome

pytestmark = pytest.mark.django_db

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def ledger_row(tenant, number=0, **values):
    defaults = {
        "request_id": f"r{number}",
        "arrived_at": NOON + timedelta(seconds=number),
        "model": "llama-3.1-8b",
        "slo_class": "interactive",
        "region": "us-east",
        "instance": "instance-1",
        "streamed": True,
        "outcome": Outcome.DONE,
        "status_code": 200,
        "prompt_tokens": 100,
        "output_tokens": 10,
        "slo_met": True,
        "attempts": 1,
        "trace": [{"instance": "instance-1"}],
    }
    return LedgerRow.objects.create(tenant=tenant, **defaults | values)


class TestEvents:
    @pytest.mark.sql
    def test_pages_by_cursor_neither_repeat_nor_skip(self, sign_in, operations):
        for number in range(7):
            record("test.happened", actor=f"a{number}")
        caller = sign_in("viewer")
        first = caller.get("events", limit=3).json()
        record("test.happened", actor="late")  # arrives while someone pages
        second = caller.get("events", limit=3, cursor=first["next_cursor"]).json()
        third = caller.get("events", limit=3, cursor=second["next_cursor"]).json()
        actors = [item["actor"] for page in (first, second, third) for item in page["items"]]
        assert actors == ["a6", "a5", "a4", "a3", "a2", "a1", "a0"]
        assert third["next_cursor"] is None


class TestRequests:
    def test_queries_do_not_grow_with_rows(self, sign_in, acme, django_assert_num_queries):
        for number in range(10):
            ledger_row(acme, number)
        caller = sign_in("viewer")
        with django_assert_num_queries(4):  # session, user, role, rows
            caller.get("requests")

    def test_demand_is_marked_that_was_not_served_and_of_another_region(self, sign_in, acme):
        ledger_row(acme, 0, outcome=Outcome.CANCELLED)
        unserved = {"unserved": True, "predicted_prompt_tokens": 50, "own_region": "us-west"}
        ledger_row(acme, 7, outcome=Outcome.REJECTED, prompt_tokens=0, output_tokens=0, **unserved)
        caller = sign_in("operator")
        row = caller.get("requests", limit=1).json()["items"][0]
        assert (row["own_region"], row["unserved"], row["predicted_prompt_tokens"]) == ("us-west", True, 50)
        for mark in ("unserved", "spilled"):
            for value, there in (("true", "r7"), ("false", "r0")):
                (row,) = caller.get("requests", **{mark: value}).json()["items"]
                assert row["request_id"] == there
        row = caller.get("requests", outcome="cancelled").json()["items"][0]
        assert (row["region"], row["own_region"], row["unserved"]) == ("us-east", "us-east", False)
