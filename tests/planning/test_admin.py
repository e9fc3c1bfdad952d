"""The admin: every table is there for the fleet's people, plans are decided with a reason, policies are checked."""

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.planning import services
from controlplane.planning.models import PlanStatus, ScalingPlan, ScalingPolicy

pytestmark = pytest.mark.django_db
PLANS = "admin:planning_scalingplan_changelist"


@pytest.fixture
def plan(language_model):
    return ScalingPlan.objects.create(
        model=language_model,
        strategy="lt_ua",
        valid_until=timezone.now() + timedelta(hours=1),
        targets=[{"region": "us-east", "gpu_type": "a100-80gb", "present": 1, "target": 2}],
    )


def decide(client, verb, plan, **values):
    return client.post(reverse(PLANS), {"action": verb, "_selected_action": [plan.pk], **values}, follow=True)


@pytest.mark.parametrize(("verb", "status"), [("approve", PlanStatus.APPROVED), ("reject", PlanStatus.REJECTED)])
def test_operators_decide_with_a_reason(verb, status, acting, plan):
    assert decide(acting, verb, plan).templates[0].name == "admin/reason.html"
    response = decide(acting, verb, plan, confirmed="yes", reason="the peak")
    plan.refresh_from_db()
    assert plan.status == status
    assert Event.objects.get(kind=f"plan.{status}").reason == "the peak"
    assert [str(said) for said in response.context["messages"]] == [f"The plan for llama-3.1-8b is {status}"]
    again = decide(acting, verb, plan, confirmed="yes", reason="again")
    assert "only advice can be" in str(next(iter(again.context["messages"])))


def test_admins_edit_policies_and_mistakes_are_shown(client, fleet_admin, language_model):
    client.force_login(fleet_admin)
    url = reverse("admin:planning_scalingpolicy_add")
    values = {"model": language_model.pk, "strategy": "wish", "mode": "auto", "parameters": "{}"}
    refused = client.post(url, values)
    assert "strategy" in refused.context["adminform"].form.errors
    refused = client.post(url, values | {"strategy": "siloed"})
    assert "it can be simulated, not run" in str(refused.context["adminform"].form.errors["strategy"])
    assert client.post(url, values | {"strategy": "lt_u"}).status_code == 302
    assert ScalingPolicy.objects.get().strategy == "lt_u"
    assert Event.objects.get(kind="scaling_policy.created").user == fleet_admin


def test_a_policy_changed_here_starts_over_too(client, fleet_admin, language_model, plan):
    row = services.set_policy(language_model, "lt_u", "ask", {}, "a test")
    client.force_login(fleet_admin)
    values = {"model": language_model.pk, "strategy": "lt_ua", "mode": "ask", "parameters": "{}"}
    assert client.post(reverse("admin:planning_scalingpolicy_change", args=[row.pk]), values).status_code == 302
    row.refresh_from_db()
    plan.refresh_from_db()
    assert (row.strategy, plan.status) == ("lt_ua", PlanStatus.SUPERSEDED)
    empty = client.post(reverse("admin:planning_scalingpolicy_change", args=[row.pk]), values | {"parameters": ""})
    assert "parameters" in empty.context["adminform"].form.errors
    assert (
        client.post(reverse("admin:planning_scalingpolicy_delete", args=[row.pk]), {"post": "yes"}).status_code == 302
    )
    assert not ScalingPolicy.objects.exists()
