"""Totals of a day are equal in every grouping, on the page, in files and by REST; half days make the whole (D04, D27)."""

import csv
import io
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from django.db.models import ProtectedError
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.accounts.services import create_api_key, revoke_api_key
from controlplane.gateway.models import LedgerRow
from controlplane.usage.counting import count_usage
from controlplane.usage.models import SUMS
from controlplane.usage.selectors import UsageScope, summed, usage

pytestmark = pytest.mark.sql
KOLKATA = ZoneInfo("Asia/Kolkata")  # half an hour beside UTC
BEGIN = datetime(2026, 11, 20, tzinfo=KOLKATA)
GROUPS = ["tenant", "key", "model", "slo_class", "work", "gpu_type", "application", "batch", "instance", "day", "hour"]


@pytest.fixture
def day(acme, globex, make_instance, make_request, inventory, fleet_admin):
    """A day of three tenants with five keys, one of which is revoked; a batch, failed and waiting calls, two instances."""
    drawn = np.random.default_rng(7)
    third = Tenant.objects.create(name="initech", default_slo_class=acme.default_slo_class)
    keys = [
        create_api_key(tenant, f"key {at}", "a test")[0] for at, tenant in enumerate([acme, acme, globex, third, third])
    ]
    revoke_api_key(keys[1], fleet_admin, "left")
    for _ in range(2):
        make_instance(created_at=BEGIN + timedelta(hours=1))
    names = ["instance-1", "instance-2", ""]
    rows = []
    for number in range(300):
        key = keys[drawn.integers(5)]
        instance = names[drawn.choice(3, p=[0.5, 0.4, 0.1])]
        minutes = float(drawn.uniform(90, 24 * 60 - 30))
        ended_ms = float(drawn.uniform(1_000, 1_200_000))
        ran = [["instance-1", 0.0, ended_ms / 3], ["instance-2", ended_ms / 2, ended_ms]] if number % 17 == 0 else None
        rows.append(
            LedgerRow(
                request_id=f"batch_req_67ab_{number}" if number % 5 == 0 else f"chatcmpl-{number}",
                tenant=key.tenant,
                api_key=key,
                arrived_at=BEGIN + timedelta(minutes=minutes),
                model=("llama-3.1-8b", "other")[number % 2],
                slo_class="interactive",
                instance=instance,
                streamed=True,
                outcome="done",
                status_code=200,
                application=("", "triage")[number % 3 == 0],
                run="r" if number % 3 == 0 else "",
                queue_ms=10.0 if instance else None,
                e2e_ms=ended_ms,
                ran=ran if instance else None,
                prompt_tokens=int(drawn.integers(1, 9_000)) if instance else 0,
                output_tokens=int(drawn.integers(0, 900)) if instance else 0,
            )
        )
    LedgerRow.objects.bulk_create(rows)
    count_usage(BEGIN + timedelta(days=1, hours=3))
    Tenant.objects.filter(pk=third.pk).update(name="initrode")
    return keys


def sums(rows) -> dict[str, float]:
    rows = list(map(summed, rows))
    return {name: sum(row[name] for row in rows) for name in SUMS}


def asked(hours_since: float = 0, hours_until: float = 24) -> UsageScope:
    since, until = (BEGIN + timedelta(hours=hours) for hours in (hours_since, hours_until))
    return UsageScope(since, until, None, zone=KOLKATA)


def test_every_grouping_adds_up_to_the_same_cent_and_token(day):
    whole = sums(usage(asked()))
    assert whole["requests"] == 300
    assert whole["cost_usd"] == pytest.approx(23 * 2 * 2 * 1.35)
    for group in GROUPS:
        assert sums(usage(asked(), [group])) == pytest.approx(whole, rel=1e-9), group
    halves = [sums(usage(asked(0, 12.25))), sums(usage(asked(12.25, 24)))]
    assert {name: sum(half[name] for half in halves) for name in SUMS} == pytest.approx(whole, rel=1e-9)
    by_tenant = [sums(usage(UsageScope(BEGIN, BEGIN + timedelta(days=1), Tenant.objects.filter(pk=pk), zone=KOLKATA)))
                 for pk in Tenant.objects.values_list("pk", flat=True)]  # fmt: skip
    assert sum(one["charged_usd"] for one in by_tenant) == pytest.approx(whole["charged_usd"])


def test_the_page_its_file_and_rest_show_the_same_sums(day, reader, settings):
    settings.TIME_ZONE = "Asia/Kolkata"
    with timezone.override(KOLKATA):
        whole = sums(usage(asked()))
        query = {"period": "dates", "from": "2026-11-20", "to": "2026-11-20"}
        for by in ("tenant", "key", "model", "class", "work", "application", "batch", "instance", "day"):
            page = reader.get("/usage/", query | {"by": by})
            assert "days in Asia/Kolkata" in page.content.decode()
            lines = page.context["lines"]
            assert sum(line["prompt_tokens"] for line in lines) == whole["prompt_tokens"], by
            cost = sum(line["cost_usd"] + line["idle_usd"] for line in lines)
            assert cost == pytest.approx(whole["cost_usd"]), by
            file = reader.get("/usage/", query | {"by": by, "format": "csv"})
            rows = list(csv.DictReader(io.StringIO(b"".join(file.streaming_content).decode())))
            shown = [(line["name"], round(line["cost_usd"], 6)) for line in lines]
            assert [(next(iter(row.values())), round(float(row["Cost (USD)"]), 6)) for row in rows] == shown
        given = {"since": BEGIN.isoformat(), "until": (BEGIN + timedelta(days=1)).isoformat()}
        for group in GROUPS:
            answer = reader.get("/api/v1/usage", given | {"group_by": group}).json()
            assert answer["time_zone"] == "Asia/Kolkata"
            assert sum(item["output_tokens"] for item in answer["items"]) == whole["output_tokens"]
            assert sum(item["charged_usd"] for item in answer["items"]) == pytest.approx(whole["charged_usd"])
        days = reader.get("/api/v1/usage", given | {"group_by": "day"}).json()["items"]
        assert {(item["day"], item["time_zone"]) for item in days} == {("2026-11-20", "Asia/Kolkata")}


def test_the_focus_file_adds_up_and_names_its_days_in_utc(day, reader, settings):
    """`focus-validator` 1.0.0 found nothing but five columns that it still wants under their names of 1.0-preview."""
    settings.TIME_ZONE = "Asia/Kolkata"
    with timezone.override(KOLKATA):
        whole = sums(usage(asked()))
        page = reader.get("/usage/", {"period": "dates", "from": "2026-11-20", "to": "2026-11-20", "format": "focus"})
        given = {"since": BEGIN.isoformat(), "until": (BEGIN + timedelta(days=1)).isoformat(), "format": "focus"}
        files = [b"".join(answer.streaming_content) for answer in (page, reader.get("/api/v1/usage", given))]
    assert files[0] == files[1]
    rows = list(csv.DictReader(io.StringIO(files[0].decode())))
    for column, name, scale in (
        ("BilledCost", "charged_usd", 1),
        ("EffectiveCost", "cost_usd", 1),
        ("ConsumedQuantity", "gpu_s", 3600),
        ("x_OutputTokens", "output_tokens", 1),
    ):
        assert sum(float(row[column]) for row in rows) * scale == pytest.approx(whole[name], rel=1e-4), column
    assert {(row["ChargePeriodStart"], row["BillingPeriodEnd"]) for row in rows} == {
        ("2026-11-19T18:30:00Z", "2026-11-30T18:30:00Z")
    }
    assert {row["SubAccountId"] for row in rows} == {"acme", "globex", "initrode", ""}


def test_a_key_with_usage_stays_a_line(day, reader):
    key = day[1]
    with pytest.raises(ProtectedError):
        key.delete()
    lines = reader.get("/usage/", {"period": "dates", "from": "2026-11-19", "to": "2026-11-21", "by": "key"}).context[
        "lines"
    ]
    (line,) = [line for line in lines if line.get("key") == key.pk]
    assert (line["name"], line["detail"]) == ("key 1", f"{key.prefix}…, revoked")
    by_tenant = reader.get("/usage/", {"period": "dates", "from": "2026-11-19", "to": "2026-11-21"}).context["lines"]
    assert "initrode" in {line["name"] for line in by_tenant}


def test_a_day_of_a_tenant_is_that_of_its_zone(day, reader):
    """The same requests are of two days in UTC, and of one in Kolkata."""
    given = {"since": "2026-11-19T00:00:00Z", "until": "2026-11-22T00:00:00Z", "group_by": "day", "tenant": "acme"}
    in_utc = reader.get("/api/v1/usage", given).json()
    assert (in_utc["time_zone"], len({item["day"] for item in in_utc["items"]})) == ("UTC", 2)
    Tenant.objects.filter(name="acme").update(time_zone="Asia/Kolkata")
    of_zone = reader.get("/api/v1/usage", given).json()
    assert (of_zone["time_zone"], [item["day"] for item in of_zone["items"]]) == ("Asia/Kolkata", ["2026-11-20"])
    assert of_zone["items"][0]["requests"] == sum(item["requests"] for item in in_utc["items"])
    text = reader.get("/usage/", {"tenant": "acme"}).content.decode()
    assert "days in Asia/Kolkata" in text
