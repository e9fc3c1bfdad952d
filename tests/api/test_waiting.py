"""`/api/v1/waiting` and `/api/v1/wait-estimates`: what waits now, and how well waits were estimated."""

import orjson
import pytest

from controlplane.api.routers import system

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
