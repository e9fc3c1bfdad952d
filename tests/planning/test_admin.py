"""The admin: plans are decided with a reason."""

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.planning.models import PlanStatus, ScalingPlan

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
    assert [str(said) for said in response.context["messages"]] == [f"{plan}: {verb} is done"]
    again = decide(acting, verb, plan, confirmed="yes", reason="again")
    assert "only advice can be" in str(next(iter(again.context["messages"])))
