"""Usage and cost by REST: each their own, grouped, narrowed, as JSON and as CSV."""

import csv
import io
from datetime import UTC, datetime, timedelta

import pytest

from controlplane.accounts.services import create_api_key
from controlplane.usage.models import UsageHour, UsageMark

NIGHT = datetime(2026, 3, 1, 23, tzinfo=UTC)
RANGE = {"since": "2026-03-01T00:00:00Z", "until": "2026-03-03T00:00:00Z"}


@pytest.fixture
def rows(acme, globex):
    key, _ = create_api_key(acme, "first", "a test")

    def row(hour, tenant, model, slo_class, usd, **values):
        UsageHour.objects.create(hour=hour, tenant=tenant, model=model, slo_class=slo_class, cost_usd=usd, **values)

    row(NIGHT, acme, "llama-3.1-8b", "interactive", 4.0, requests=3, api_key=key, charged_usd=4.0)
    row(NIGHT + timedelta(hours=1), acme, "llama-3.1-8b", "flexible", 2.0, requests=1, charged_usd=1.0)
    row(NIGHT, globex, "llama-2-70b", "interactive", 8.0, requests=5)
    row(NIGHT, None, "llama-2-70b", "", 16.0)
    row(NIGHT - timedelta(days=30), acme, "llama-3.1-8b", "interactive", 99.0)
    UsageMark.objects.create(counted_until=NIGHT + timedelta(hours=2))
    return key


def items(answer) -> list[dict]:
    assert answer.status_code == 200, answer.content
    return answer.json()["items"]


def test_the_fleets_people_see_all_and_what_was_idle(rows, sign_in):
    body = sign_in("viewer").get("v1/usage", **RANGE).json()
    assert sum(item["cost_usd"] for item in body["items"]) == 30.0
    assert [item["model"] for item in body["items"] if item["idle"]] == ["llama-2-70b"]
    assert body["counted_until"] == "2026-03-02T01:00:00Z"
    assert body["truncated"] is False


@pytest.mark.sql
@pytest.mark.parametrize("who", ["key", "member", "operator"])
def test_a_tenant_sees_its_own_by_day(who, rows, sign_in, with_key, acme):
    caller = with_key(acme) if who == "key" else sign_in(who)
    query = RANGE | ({"tenant": "acme"} if who == "operator" else {})
    shown = [(item["day"], item["tenant"], item["key"], item["slo_class"], item["requests"]) for item in
             items(caller.get("v1/usage", **query))]  # fmt: skip
    assert shown == [
        ("2026-03-01", "acme", rows.prefix, "interactive", 3),
        ("2026-03-02", "acme", None, "flexible", 1),
    ]


@pytest.mark.sql
def test_groups_and_filters(rows, sign_in):
    caller = sign_in("viewer")
    by_tenant = items(caller.get("v1/usage", group_by="tenant", **RANGE))
    costs = [(item["tenant"], item["idle"], item["cost_usd"]) for item in by_tenant]
    assert sorted(costs, key=str) == [("acme", False, 6.0), ("globex", False, 8.0), (None, True, 16.0)]
    by_hour = items(caller.get("v1/usage", group_by=["hour", "model"], model="llama-3.1-8b", **RANGE))
    assert [(item["hour"], item["charged_usd"]) for item in by_hour] == [
        ("2026-03-01T23:00:00Z", 4.0),
        ("2026-03-02T00:00:00Z", 1.0),
    ]
    assert len(items(caller.get("v1/usage", slo_class="flexible", **RANGE))) == 1
    first = caller.get("v1/usage", limit=1, **RANGE).json()
    assert (len(first["items"]), first["truncated"]) == (1, True)


def test_as_csv_by_either_way_of_asking(rows, sign_in):
    caller = sign_in("viewer")
    asked = caller.get("v1/usage", format="csv", group_by=["key", "tenant"], **RANGE)
    caller.headers = {"Accept": "text/csv"}
    accepted = caller.get("v1/usage", group_by=["key", "tenant"], **RANGE)
    texts = [b"".join(answer.streaming_content).decode() for answer in (asked, accepted)]
    assert texts[0] == texts[1]
    header, *lines = csv.reader(io.StringIO(texts[0]))
    assert header[:4] == ["tenant", "key", "key_name", "idle"]
    assert [line[:4] for line in lines if line[2]] == [["acme", rows.prefix, "first", "false"]]


def test_what_cannot_be_asked(rows, sign_in, anonymous):
    caller = sign_in("viewer")
    assert anonymous.get("v1/usage").status_code == 401
    empty = caller.get("v1/usage", since="2026-03-01T10:10:00Z", until="2026-03-01T10:14:00Z")
    assert (empty.status_code, empty.json()["error"]["field"]) == (422, "since")
    assert caller.get("v1/usage", group_by="colour").status_code == 422
    assert caller.get("v1/usage").json()["items"] == []  # the last week
