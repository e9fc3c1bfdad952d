"""A future becomes the plan: what it writes and proposes, what stops it, how it is taken back, and how it is followed."""

import pytest
from django.utils import timezone

from controlplane.events import since
from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Deployment
from controlplane.planning import bundles, services
from controlplane.planning.execution import plan_rollout
from controlplane.planning.models import WHAT_IF, ScalingPlan
from controlplane.simulation.whatif import plan, selectors, working
from controlplane.simulation.whatif import services as what_ifs
from controlplane.simulation.whatif.models import FutureSeed, WhatIf
from tests.simulation.whatif import rows

pytestmark = pytest.mark.django_db
MODEL = "llama-3.1-8b"
QLM = {"name": "QLM", "changes": [{"kind": "policy", "part": "bundle", "value": "qlm"}]}
BOUNDS = {"name": "Two at least", "changes": [{"kind": "bounds", "model": MODEL, "min_instances": 2}]}
DEAR = {"kind": "price", "gpu": "a100-80gb", "usd_per_hour": 3.0}
OTHERS = {"name": "Dear", "changes": [DEAR, {"kind": "policy", "part": "routing", "value": "round_robin"}]}


@pytest.fixture(autouse=True)
def sent(monkeypatch) -> None:
    monkeypatch.setattr(working, "send_task", lambda *_, **__: True)


@pytest.fixture
def asked(operator, make_instance, slo_class) -> WhatIf:
    """A finished what-if, of the fleet as it is with two requests a second."""
    make_instance()
    length = {"median": 100.0, "p95": 300.0, "maximum": 800}
    client = {
        "tenant": "acme",
        "model": MODEL,
        "slo_class": slo_class.name,
        "requests_per_s": 2.0,
        "prompt": length,
        "output": length,
    }
    scenario = selectors.present_scenario() | {"clients": [client], "demand": {"duration_h": 1.0, "too_long": "clip"}}
    start = {"kind": "synthetic", "at": timezone.now().isoformat(), "scenario": scenario}
    row = rows.draft(operator, QLM, BOUNDS, OTHERS, start=start, horizon_s=300.0, seeds=1)
    assert what_ifs.check(row) == {}
    row = rows.run_all(what_ifs.submit(row, operator))
    assert not [each.error for each in FutureSeed.objects.all() if each.error]
    return row


def present(deployment: Deployment) -> dict:
    return bundles.present(deployment.model).values


def test_policies_are_given_in_one_event_that_has_what_was_before(asked, operator, deployment):
    before, read_at = present(deployment), str(since.newest(deployment))
    made = plan.make_plan(asked, "B", operator, "it waits less")
    assert present(deployment) == bundles.values_of(bundles.BUNDLES["qlm"])
    event = Event.objects.get(kind="what_if.made_the_plan")
    assert (event.reason, event.inputs["changes"]) == ("it waits less", [f"policy to QLM, {MODEL}"])
    assert made.plan["plans"] == event.inputs["plans"]
    with pytest.raises(ActionError, match="A plan was made of it"):
        what_ifs.delete(made, operator)
    with pytest.raises(since.Changed, match="changed ordering_policy"):  # nor does the undo of an older change
        since.check(read_at, deployment, fields=["ordering_policy"])
    services.give(deployment.model, event.before["values"][MODEL], operator)  # what was before is in the event
    assert present(deployment) == before


def test_bounds_are_an_admins(asked, operator, fleet_admin, deployment):
    with pytest.raises(ActionError, match="changed by an admin"):
        plan.make_plan(asked, "C", operator)
    plan.make_plan(asked, "C", fleet_admin)
    deployment.refresh_from_db()
    assert (deployment.min_instances, deployment.max_instances) == (2, 3)
    (proposal,) = ScalingPlan.objects.all()
    assert proposal.status == "advice"
    assert [(row["present"], row["target"]) for row in proposal.targets] == [(1, 2)]


@pytest.mark.nightly
def test_assumptions_are_stated(asked, operator, deployment):
    plan.make_plan(asked, "D", operator)
    assert Event.objects.get(kind="what_if.made_the_plan").inputs["assumed"] == ["a100-80gb $1.35 to $3.00 an hour"]
    assert present(deployment)["routing_policy"] == "round_robin"


def test_what_speaks_against_it_is_one_list_and_a_broken_promise_is_confirmed(
    asked, operator, deployment, make_instance
):
    future = asked.futures.get(letter="B")
    for run in future.runs.all():
        for columns in run.result["columns"].values():
            columns |= {"slo_met": 1.0, "missed": 0}
        run.save()
    assert plan.warnings(asked, future) == []
    make_instance()
    services.switch_parts(deployment.model, {"routing_policy": "least_request"}, operator)
    for run in future.runs.all():
        for columns in run.result["columns"].values():
            columns |= {"slo_met": 0.5, "missed": columns["judged"] // 2}
        run.save()
    instances, routing, target = plan.warnings(asked, future)
    assert instances == f"{MODEL} in US East: instances is 2, and was 1"
    assert routing.startswith(f"{MODEL} in US East: routing is least_request, and was ")
    assert target == "B: It keeps its promises in 0 of 1 repetitions (interactive)"
    with pytest.raises(ActionError, match="only if that is confirmed"):
        plan.make_plan(asked, "B", operator)
    assert plan.make_plan(asked, "B", operator, anyway=True).plan["letter"] == "B"
    assert Event.objects.get(kind="what_if.made_the_plan").inputs["warnings"] == [instances, routing, target]
    Deployment.objects.update(active=False)
    assert plan.warnings(asked, future)[0] == f"{MODEL} in US East is no longer served"


def test_a_future_that_is_not_done_is_refused(asked, operator):
    asked.futures.get(letter="B").runs.update(state="queued")
    with pytest.raises(ActionError, match="Future B is not done"):
        plan.make_plan(asked, "B", operator)


def test_its_plans_are_approved_and_carried_out(asked, fleet_admin):
    made = plan.make_plan(asked, "C", fleet_admin)
    services.approve(ScalingPlan.objects.get(), fleet_admin, "the what-if asks for it")
    (move,) = plan_rollout.apply_plans(timezone.now())
    assert (move.delta, move.strategy, move.plan_id) == (1, WHAT_IF, made.plan["plans"][0])
