"""A future becomes the plan: what it writes and proposes, what stops it, how it is taken back, and how it is followed."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet import services as fleet
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import Deployment, Instance
from controlplane.gateway.models import LedgerRow
from controlplane.planning import bundles, services
from controlplane.planning.execution import plan_rollout
from controlplane.planning.models import WHAT_IF, ScalingPlan, ScalingPolicy
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


def test_policies_are_given_in_one_event_and_given_back(asked, operator, deployment):
    before = present(deployment)
    made = plan.make_plan(asked, "B", operator, "it waits less")
    assert present(deployment) == bundles.values_of(bundles.BUNDLES["qlm"])
    event = Event.objects.get(kind="what_if.made_the_plan")
    assert (event.reason, event.inputs["changes"]) == ("it waits less", [f"policy to QLM, {MODEL}"])
    assert made.plan["event"] == event.pk
    with pytest.raises(ActionError, match="B is the plan already"):
        plan.make_plan(asked, "B", operator)
    with pytest.raises(ActionError, match="A plan was made of it"):
        what_ifs.delete(made, operator)
    plan.undo(asked, operator)
    assert present(deployment) == before
    with pytest.raises(ActionError, match="It is not the plan"):
        plan.undo(asked, operator)


def test_bounds_are_an_admins(asked, operator, fleet_admin, deployment):
    with pytest.raises(ActionError, match="changed by an admin"):
        plan.make_plan(asked, "C", operator)
    plan.make_plan(asked, "C", fleet_admin)
    deployment.refresh_from_db()
    assert (deployment.min_instances, deployment.max_instances) == (2, 3)
    (proposal,) = ScalingPlan.objects.all()
    assert proposal.status == "advice"
    assert [(row["present"], row["target"]) for row in proposal.targets] == [(1, 2)]
    plan.undo(asked, fleet_admin)
    deployment.refresh_from_db()
    proposal.refresh_from_db()
    assert (deployment.min_instances, proposal.status) == (1, "rejected")


@pytest.mark.nightly
def test_assumptions_are_stated(asked, operator, deployment):
    made = plan.make_plan(asked, "D", operator)
    assert made.plan["assumed"] == ["a100-80gb $1.35 to $3.00 an hour"]
    assert present(deployment)["routing_policy"] == "round_robin"


@pytest.mark.nightly
def test_one_that_misses_its_target_in_every_seed_is_confirmed_first(asked, operator, client):
    for run in FutureSeed.objects.filter(future__letter="B"):
        for columns in run.result["columns"].values():
            columns["slo_met"] = 0.5
        run.save()
    asked.start["kind"] = "fleet"  # the page offers no plan of any other start
    asked.save()
    with pytest.raises(ActionError, match=r"B does not keep 99% of requests in time in its only seed\. Confirm"):
        plan.make_plan(asked, "B", operator)
    client.force_login(operator)
    page = client.get(f"/what-if/{asked.pk}/", {"future": "B"}).content.decode()
    assert 'type="checkbox" name="confirmed" value="yes" required' in page
    made = plan.make_plan(asked, "B", operator, confirmed=True)
    assert made.plan["letter"] == "B"
    assert "does not keep 99%" in Event.objects.get(kind="what_if.made_the_plan").inputs["misses"]


def test_a_future_that_assumed_another_world_is_not_compared_with_this_one(asked, operator, make_request):
    plan.make_plan(asked, "D", operator)
    came = plan.followed(WhatIf.objects.get(pk=asked.pk))
    assert len(came["assumed"]) == 1
    assert (came["predicted_slo_met"], came["predicted_ttft_p95_ms"]) == (None, None)
    assert {each["predicted"] for each in came["instances"]} == {None}


def test_it_is_refused_where_what_it_rests_on_has_gone(asked, operator, deployment):
    future = asked.futures.get(letter="B")
    assert plan.obstacles(asked, future) == []
    services.switch_parts(deployment.model, {"routing_policy": "least_request"}, operator)
    (obstacle,) = plan.obstacles(asked, future)
    assert obstacle.startswith(f"routing of {MODEL} in us-east is least_request, and was ")
    with pytest.raises(ActionError, match="Since its start, this has changed: routing of"):
        plan.make_plan(asked, "B", operator)
    Deployment.objects.update(active=False)
    assert plan.obstacles(asked, future)[0] == f"{MODEL} is no longer served"
    assert not ScalingPolicy.objects.exists()


def test_instances_that_came_or_went_do_not_stop_it(asked, operator, make_instance):
    make_instance()
    assert plan.changed_since(asked) == [f"{MODEL} in US East: 2 instead of 1 instance"]
    assert plan.make_plan(asked, "B", operator).plan["letter"] == "B"


def test_a_future_that_is_not_done_is_refused(asked, operator):
    asked.futures.get(letter="B").runs.update(state="queued")
    with pytest.raises(ActionError, match="Future B is not done"):
        plan.make_plan(asked, "B", operator)


def test_it_is_followed(asked, operator, make_request):
    assert plan.followed(asked) is None
    made = plan.make_plan(asked, "B", operator)
    now = timezone.now()
    for number in range(10):
        make_request(arrived_at=now, slo_met=number > 0, ttft_ms=100.0 * number)
    WhatIf.objects.update(plan={**made.plan, "at": (now - timedelta(minutes=1)).isoformat()})
    made.refresh_from_db()
    seen = plan.followed(made)
    assert LedgerRow.objects.count() == seen["requests"] == 10
    assert seen["slo_met"] == 0.9
    assert seen["ttft_p95_ms"] == pytest.approx(855.0)
    assert 0 <= seen["predicted_slo_met"] <= 1
    (place,) = seen["instances"]
    assert (place["model"], place["region"], place["ready"]) == (MODEL, "us-east", 1)


def test_a_page_asks_for_what_comes_of_it_alone(asked, fleet_admin, client, monkeypatch):
    client.force_login(fleet_admin)
    address = f"/what-if/{asked.pk}/"
    assert client.get(f"{address}followed").content == b""  # nothing is followed
    plan.make_plan(asked, "C", fleet_admin)
    now = timezone.now()
    monkeypatch.setattr("django.utils.timezone.now", lambda: now)
    panel, page = (
        re.sub(
            r'csrfmiddlewaretoken" value="\w+"|\d+ s ago',
            "",
            client.get(f"{address}{part}?region=us-east").content.decode(),
        )
        for part in ("followed", "")
    )
    assert panel.strip().startswith('<section class="panel following" id="what-if-followed"')
    assert f'name="next" value="{address}?region=us-east"' in panel
    assert panel.strip() in page


def test_its_plans_are_approved_carried_out_and_followed(asked, fleet_admin, deployment, monkeypatch):
    made = plan.make_plan(asked, "C", fleet_admin)
    seen = plan.followed(made)
    assert [(each["status"], each["moves"]) for each in seen["plans"]] == [("advice", 0)]
    (place,) = seen["instances"]
    assert (place["began"], place["ready"], place["starting"]) == (1, 1, 0)
    services.approve(ScalingPlan.objects.get(), fleet_admin, "the what-if asks for it")
    (move,) = plan_rollout.apply_plans(timezone.now())
    assert (move.delta, move.strategy, move.plan_id) == (1, WHAT_IF, made.plan["plans"][0])
    seen = plan.followed(made)
    assert [(each["status"], each["moves"]) for each in seen["plans"]] == [("carried_out", 1)]
    (place,) = seen["instances"]
    assert (place["ready"], place["starting"]) == (1, 1)
    started = Instance.objects.get(name=move.instance)
    for state in (InstanceState.LOADING, InstanceState.READY):
        fleet.move(started, state, actor="test", reason="it starts")
    (place,) = plan.followed(made)["instances"]
    assert (place["ready"], place["starting"]) == (2, 0)
    steps = plan.ready_since(made)
    assert [count for _, count in steps] == [1, 2, 2]
    assert steps == sorted(steps)
    assert plan.ready_since(made, "elsewhere")[-1][1] == 0


@pytest.mark.nightly
def test_approved_moves_not_yet_made_end_with_the_plan(asked, fleet_admin, monkeypatch):
    made = plan.make_plan(asked, "C", fleet_admin)
    approved = services.approve(ScalingPlan.objects.get(), fleet_admin)
    plan.undo(made, fleet_admin)
    approved.refresh_from_db()
    assert (approved.status, approved.note.startswith("1 instance not added")) == ("superseded", True)
    assert plan_rollout.apply_plans(timezone.now()) == []
