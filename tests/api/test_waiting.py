"""`/api/v1/waiting` and `/api/v1/wait-estimates`: what waits now, and how well waits were estimated."""

import orjson
import pytest

from controlplane.api.routers import system
from controlplane.fleet.models import SloClass, SloKind
from controlplane.gateway.selectors import wait_calibration
from tests.api.test_records import ledger_row

pytestmark = pytest.mark.django_db


def row(tenant, position: int, **values) -> dict:
    return {
        "request_id": f"r-{position}",
        "tenant_id": tenant.pk,
        "model": "llama-3.1-8b",
        "region": "us-east",
        "slo_class": "interactive",
        "arrived_at": 1_790_000_000.0,
        "position": position,
        "estimated_wait_s": 1.5 * position,
        "estimated_wait_p99_s": 2.0 * position,
        **values,
    }


@pytest.fixture
def published(acme, globex, monkeypatch):
    said = {
        "at": 1_790_000_001.0,
        "requests": [row(acme, 1), row(globex, 2), row(acme, 3, model="other", estimated_wait_s=None)],
        "by_tenant": [[acme.pk, "llama-3.1-8b", 7], [acme.pk, "other", 1], [globex.pk, "llama-3.1-8b", 2]],
    }
    monkeypatch.setattr(system, "read_published", lambda key: orjson.dumps(said))


def test_a_tenant_sees_its_own_and_the_fleets_people_all(published, acme, sign_in, with_key):
    body = with_key(acme).get("v1/waiting").json()
    assert [item["request_id"] for item in body["items"]] == ["r-1", "r-3"]
    assert body["total"] == 8
    assert body["items"][0]["estimated_wait_p99_s"] == 2.0
    assert body["items"][1]["estimated_wait_s"] is None
    assert {item["tenant"] for item in sign_in("viewer").get("v1/waiting").json()["items"]} == {"acme", "globex"}
    narrowed = with_key(acme).get("v1/waiting", model="other").json()
    assert ([item["request_id"] for item in narrowed["items"]], narrowed["total"]) == (["r-3"], 1)


def test_without_a_gateway_it_says_so(sign_in, settings):
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    response = sign_in("viewer").get("v1/waiting")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_summary")


@pytest.mark.sql
def test_estimates_are_compared_with_actual_waits(acme, sign_in, with_key):
    for number in range(1, 11):
        ledger_row(
            acme, number, queue_position=number, estimated_wait_s=number + 0.5, estimated_wait_p99_s=float(number),
            queue_ms=number * 1000.0 + (500 if number > 8 else 0), attempts=1,
        )  # fmt: skip
    ledger_row(acme, 11, queue_position=0, estimated_wait_s=0.0, queue_ms=0.1, attempts=1)
    ledger_row(acme, 12, queue_position=3, estimated_wait_s=9.0, estimated_wait_p99_s=9.0, queue_ms=1.0, attempts=2)
    SloClass.objects.create(name="night", kind=SloKind.NON_INTERACTIVE, deadline_s=3600)
    held = {"slo_class": "night", "queue_position": 2, "estimated_wait_s": 1.0, "estimated_wait_p99_s": 2.0}
    ledger_row(acme, 13, queue_ms=600_000.0, attempts=1, **held)
    body = sign_in("viewer").get("v1/wait-estimates", since="2000-01-01T00:00:00Z", limit=4).json()
    assert len(body["points"]) == 4
    (model,) = body["models"]
    assert model["requests"] == 10
    assert 0.9 < model["r2"] < 1.0
    assert model["below_p99"] == 0.8
    assert model["mean_excess_s"] == pytest.approx(0.4)
    assert with_key(acme).get("v1/wait-estimates").status_code in (401, 403)
    assert sign_in("member").get("v1/wait-estimates").status_code == 403


def test_where_all_waited_the_same_there_is_no_r2():
    point = {"model": "m", "waited_s": 2.0, "estimated_wait_s": 2.5, "estimated_wait_p99_s": 3.0}
    (model,) = wait_calibration([point, point])
    assert (model["r2"], model["below_p99"], model["mean_excess_s"]) == (None, 1.0, 0.5)
