"""`/api`: forecasts and scaling: who reads, who decides, and what they get."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.planning import services
from controlplane.planning.models import (
    PlanStatus,
    ScalingMove,
    ScalingPlan,
    ScalingPolicy,
)

pytestmark = pytest.mark.django_db
LISTS = [
    "scaling/policies",
    "scaling/plans",
    "scaling/moves",
]


@pytest.fixture
def plan(language_model):
    return ScalingPlan.objects.create(
        model=language_model,
        strategy="lt_ua",
        valid_until=timezone.now() + timedelta(hours=1),
        targets=[{"region": "us-east", "gpu_type": "a100-80gb", "present": 1, "target": 2}],
        inputs={"epsilon": 0.8},
    )


@pytest.fixture
def rows(plan, language_model):
    """One of everything."""
    names = {"model": "llama-3.1-8b", "region": "us-east"}
    services.set_policy(language_model, "lt_ua", "ask", {}, "a test")
    ScalingPlan.objects.update(status=PlanStatus.ADVICE)
    ScalingMove.objects.create(
        plan=plan, source="plan", strategy="lt_ua", gpu_type="a100-80gb", delta=1, reason="a peak", **names
    )


def test_lists_have_what_there_is(rows, sign_in):
    """Who reads what of all addresses: tests/access."""
    viewer = sign_in("viewer")
    for path in LISTS:
        response = viewer.get(path)
        assert response.status_code == 200, path
        assert len(response.json()["items"]) == 1, path


def test_lists_narrow_and_have_pages(rows, sign_in, plan):
    caller = sign_in("viewer")
    assert caller.get("scaling/plans", status="carried_out").json()["items"] == []
    assert caller.get("scaling/moves", source="plan", model="llama-3.1-8b").json()["items"][0]["plan"] == plan.pk
    assert caller.get("scaling/moves", source="nobody").status_code == 422
    ScalingPlan.objects.create(model=plan.model, strategy="lt_u", valid_until=timezone.now())
    first = caller.get("scaling/plans", limit=1).json()
    assert (first["items"][0]["strategy"], first["next_cursor"]) == ("lt_u", first["items"][0]["id"])
    second = caller.get("scaling/plans", limit=1, cursor=first["next_cursor"]).json()
    assert (second["items"][0]["strategy"], second["next_cursor"]) == ("lt_ua", None)


def test_a_plan_alone_has_its_inputs(sign_in, plan):
    caller = sign_in("viewer")
    assert "inputs" not in caller.get("scaling/plans").json()["items"][0]
    body = caller.get(f"scaling/plans/{plan.pk}").json()
    assert (body["inputs"], body["model"], body["status"]) == ({"epsilon": 0.8}, "llama-3.1-8b", "advice")
    assert caller.get("scaling/plans/999").status_code == 404


@pytest.mark.parametrize(("verb", "status"), [("approve", "approved"), ("reject", "rejected")])
def test_operators_decide_once(verb, status, sign_in, plan):
    assert sign_in("viewer").post(f"scaling/plans/{plan.pk}/{verb}", reason="x").status_code == 403
    response = sign_in("operator").post(f"scaling/plans/{plan.pk}/{verb}", reason="the evening peak")
    assert response.status_code == 200
    assert (response.json()["status"], response.json()["decided_by"]) == (status, "operator")
    again = sign_in("fleet_admin").post(f"scaling/plans/{plan.pk}/{verb}")
    assert again.status_code == 409
    assert f"is {status}" in again.json()["error"]["message"]


def test_operators_change_policies(sign_in, deployment):
    path, body = (
        "scaling/policies/llama-3.1-8b",
        {"strategy": "lt_u", "mode": "shadow", "parameters": {"out_above": 0.8}},
    )
    assert sign_in("viewer").patch(path, **body).status_code == 403
    operator = sign_in("operator")
    assert operator.patch(path, mode="shadow").json()["error"]["field"] == "strategy"
    changed = operator.patch(path, **body).json()
    assert changed | body | {"model": "llama-3.1-8b"} == changed
    assert ScalingPolicy.objects.get().parameters == {"out_above": 0.8}
    changed = operator.patch(path, bundle="ssjf").json()
    assert (changed["bundle"], changed["nearest"], changed["differs"], changed["mode"]) == (
        "ssjf",
        "ssjf",
        {},
        "shadow",
    )
    changed = operator.patch(path, routing_policy="round_robin").json()
    assert (changed["bundle"], changed["nearest"]) == ("custom", "ssjf")
    assert changed["values"]["routing_policy"] == "round_robin" != changed["differs"]["routing_policy"]
    for wrong in ({"bundle": "none"}, {"strategy": "none"}, {"routing_policy": "none"}):
        refused = operator.patch(path, **wrong)
        assert (refused.status_code, [refused.json()["error"]["field"]]) == (422, list(wrong))
    assert operator.patch("scaling/policies/none", **body).status_code == 404


def test_a_model_without_a_policy_has_the_floor_alone(sign_in, language_model):
    (item,) = sign_in("viewer").get("scaling/policies", model=language_model.name).json()["items"]
    assert (item["strategy"], item["mode"], item["parameters"]) == (None, "off", {})
    assert sign_in("viewer").get("scaling/policies", model="other").json() == {"items": []}
