"""`/api`: events, requests and usage."""

import csv
import io
from datetime import UTC, datetime, timedelta

import pytest

from controlplane.events.services import record
from controlplane.gateway.models import LedgerRow, MinuteRow, Outcome

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


class TestUsage:
    RANGE = {"since": "2026-03-01T12:00:00Z", "until": "2026-03-01T12:02:00Z"}

    @pytest.fixture
    def rows(self, acme, globex):
        for number in range(3):
            ledger_row(acme, number)
        ledger_row(acme, 61, outcome=Outcome.REJECTED, slo_met=None, output_tokens=0)
        ledger_row(acme, 62, outcome=Outcome.CANCELLED, slo_met=False)
        ledger_row(globex, 5)
        series = {"model": "llama-3.1-8b", "region": "us-east", "slo_class": "interactive"}
        sums = {"requests": 4, "slo_met": 4, "slo_judged": 4, "prompt_tokens": 400, "output_tokens": 40}
        MinuteRow.objects.create(minute=NOON, **series, **sums)
        MinuteRow.objects.create(minute=NOON + timedelta(minutes=2), **series, requests=9)  # the range ends before it

    def test_the_fleet_reads_minute_rows(self, rows, sign_in):
        body = sign_in("viewer").get("usage", **self.RANGE).json()
        assert [(item["minute"], item["requests"]) for item in body["items"]] == [("2026-03-01T12:00:00Z", 4)]
        assert body["truncated"] is False

    @pytest.mark.sql
    @pytest.mark.parametrize("who", ["key", "member", "operator"])
    def test_a_tenants_series_is_counted_from_its_requests(self, who, rows, sign_in, with_key, acme):
        caller = with_key(acme) if who == "key" else sign_in(who)
        query = self.RANGE | ({"tenant": "acme"} if who == "operator" else {})
        items = caller.get("usage", **query).json()["items"]
        columns = ("requests", "failed", "slo_met", "slo_judged", "prompt_tokens", "output_tokens")
        assert [tuple(item[column] for column in columns) for item in items] == [
            (3, 0, 3, 3, 300, 30),
            (2, 1, 0, 1, 200, 10),
        ]

    def test_demand_is_marked_that_was_not_served_and_of_another_region(self, rows, sign_in, acme):
        unserved = {
            "unserved": True,
            "predicted_prompt_tokens": 50,
            "predicted_output_tokens": 5,
            "own_region": "us-west",
        }
        ledger_row(acme, 7, outcome=Outcome.REJECTED, prompt_tokens=0, output_tokens=0, **unserved)
        MinuteRow.objects.create(
            minute=NOON, model="llama-3.1-8b", region="us-east", own_region="us-west", slo_class="interactive",
            requests=1, unserved=1, unserved_prompt_tokens=50, unserved_output_tokens=5,
        )  # fmt: skip
        columns = ("region", "own_region", "requests", "unserved", "unserved_prompt_tokens", "unserved_output_tokens")
        for query in ({}, {"tenant": "acme"}):
            items = sign_in("operator").get("usage", **self.RANGE, **query).json()["items"]
            first, second = (tuple(item[column] for column in columns) for item in items[:2])
            assert (first[:2], first[3:]) == (("us-east", "us-east"), (0, 0, 0))
            assert second == ("us-east", "us-west", 1, 1, 50, 5)
        caller = sign_in("operator")
        row = caller.get("requests", limit=1).json()["items"][0]
        assert (row["own_region"], row["unserved"], row["predicted_prompt_tokens"]) == ("us-west", True, 50)
        for mark in ("unserved", "spilled"):
            assert len(caller.get("requests", **{mark: "true"}).json()["items"]) == 1
            assert len(caller.get("requests", **{mark: "false"}).json()["items"]) == 6
        row = caller.get("requests", outcome="cancelled").json()["items"][0]
        assert (row["region"], row["own_region"], row["unserved"]) == ("us-east", "us-east", False)

    def test_csv_holds_the_same_rows(self, rows, with_key, acme):
        response = with_key(acme).get("usage", **self.RANGE, format="csv")
        assert response.headers["Content-Type"] == "text/csv; charset=utf-8"
        lines = list(csv.DictReader(io.StringIO(b"".join(response.streaming_content).decode())))
        assert [(line["minute"], line["requests"]) for line in lines] == [
            ("2026-03-01T12:00:00Z", "3"),
            ("2026-03-01T12:01:00Z", "2"),
        ]

    def test_an_answer_says_when_rows_are_left_out(self, rows, with_key, acme):
        body = with_key(acme).get("usage", **self.RANGE, limit=1).json()
        assert (len(body["items"]), body["truncated"]) == (1, True)

    def test_an_empty_range_is_an_error(self, with_key, acme):
        response = with_key(acme).get("usage", since=self.RANGE["until"], until=self.RANGE["since"])
        assert response.json()["error"]["field"] == "since"
