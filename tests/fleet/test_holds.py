"""Stop means stop: what an operator holds or cordons, nobody else starts, and everything that plans estimates with it."""

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controlplane.dispatch.live_fleet import inventory
from controlplane.events.models import Event
from controlplane.fleet import places, services
from controlplane.fleet.inventory.deploy import DeployRequest, deploy, out_of_use
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import Deployment, Instance, Launcher, Model, Node, SwapGroup
from controlplane.fleet.rollouts import services as rollouts
from controlplane.fleet.swaps import services as swaps
from controlplane.gateway.models import LedgerRow
from controlplane.planning.execution import executor
from controlplane.planning.models import MoveSource, ScalingPlan
from controlplane.planning.plans import inventory as planned
from controlplane.planning.scenario import live_scenario

pytestmark = pytest.mark.django_db
S = InstanceState
PLACE = ("llama-3.1-8b", "us-east")
WHY = executor.Why(MoveSource.FLOOR, "floor", "one fewer than the minimum")


@pytest.fixture
def two(make_instance, deployment):
    """Both instances of a deployment with a minimum and maximum of two."""
    Deployment.objects.filter(pk=deployment.pk).update(min_instances=2, max_instances=2)
    return [make_instance(state=S.READY, launcher=Launcher.EMULATED) for _ in range(2)]


def stop_by_hand(instance, user):
    services.stop(instance, user, "for a kernel update, do not start")
    Instance.objects.filter(pk=instance.pk).update(
        state=S.STOPPED, state_changed_at=timezone.now() - timedelta(hours=1)
    )
    instance.commands.update(state="done")
    instance.refresh_from_db()


def test_the_floor_starts_none_that_an_operator_stopped(two, operator):
    stop_by_hand(two[0], operator)
    assert "do not start" in two[0].held
    assert operator.get_username() in two[0].held
    for to_minimum in (True, False):
        with pytest.raises((executor.Refused, executor.Waits)):
            executor.add(*PLACE, WHY, to_minimum=to_minimum)
    [endpoint] = inventory.read().endpoints
    assert (endpoint.missing_instances, endpoint.min_instances, endpoint.max_instances) == (0, 2, 1)
    assert Instance.objects.count() == 2, "and no other is made in its place"


@pytest.mark.parametrize("actor", ["safety autoscaler", "autoscaler pilothouse", "planner", "swap", "rollout"])
def test_only_an_operator_starts_it(two, operator, actor):
    stop_by_hand(two[0], operator)
    with pytest.raises(ActionError, match=r"is held by .*do not start"):
        services.start(two[0], actor, "more is needed")
    services.start(two[0], operator, "the update is done")
    two[0].refresh_from_db()
    assert (two[0].held, two[0].state) == ("", S.PROVISIONING)
    services.stop(two[1], "safety autoscaler", "little is asked for")
    two[1].refresh_from_db()
    assert two[1].held == "", "what scaling stops is not held"


def test_plans_have_no_place_where_one_is_held(two, operator):
    stop_by_hand(two[0], operator)
    fleet = planned.read({PLACE[0]})
    [deployed] = fleet.to_plan().deployments.values()
    assert (deployed.min_instances, deployed.max_instances, deployed.instances) == (1, 1, 1)


@pytest.mark.parametrize("what", ["node", "region"])
def test_nothing_is_started_where_it_is_cordoned(make_instance, deployment, node, operator, what):
    here = make_instance(state=S.STOPPED, launcher=Launcher.EMULATED, node=node)
    place = node if what == "node" else node.region
    assert "nothing is started there" in services.cordon(place, operator, "cooling fails")
    with pytest.raises((executor.Refused, executor.Waits)):
        executor.add(*PLACE, WHY)
    for actor in ("autoscaler pilothouse", operator):
        with pytest.raises(ActionError, match=r"is cordoned by .*cooling fails"):
            services.start(Instance.objects.get(pk=here.pk), actor, "more is needed")
    with pytest.raises(ActionError, match="cordoned already"):
        services.cordon(type(place).objects.get(pk=place.pk), operator, "again")
    services.uncordon(place, operator, "it cools")
    assert executor.add(*PLACE, WHY).instance == here.name
    kinds = list(Event.objects.filter(kind__contains="cordon").order_by("pk").values_list("kind", flat=True))
    assert kinds == [f"{what}.cordoned", f"{what}.uncordoned"]


def test_instances_on_a_cordoned_node_continue_and_plans_count_no_more(make_instance, node, operator):
    make_instance(state=S.READY, launcher=Launcher.EMULATED, node=node)
    before = planned.read({PLACE[0]}).units
    services.cordon(node, operator, "cooling fails")
    after = planned.read({PLACE[0]}).units
    key = node.region.name, node.gpu_type.name
    gpus = Node.objects.with_gpus_used().get(pk=node.pk).gpus_used
    assert after[key] == gpus < before[key]


def test_simulations_of_what_comes_have_no_place_there_either(make_instance, deployment, profile, node, operator):
    """What-ifs and exports all start from this scenario."""
    Deployment.objects.filter(pk=deployment.pk).update(min_instances=1, max_instances=4)
    rows = [make_instance(state=S.READY, launcher=Launcher.EMULATED, node=node) for _ in range(2)]

    def places_of():
        [table] = live_scenario(planned.read({PLACE[0]}), LedgerRow.objects.none())["fleet"]
        return table["instances"], table["empty"]

    assert places_of() == (2, 2)
    stop_by_hand(rows[0], operator)
    assert places_of() == (1, 2)
    services.cordon(node, operator, "cooling fails")
    assert places_of() == (1, 0)
    services.uncordon(node, operator, "it cools")
    services.cordon(node.region, operator, "flood")
    assert places_of() == (1, 0)


def test_a_rollout_starts_no_held_one(two, operator):
    stop_by_hand(two[0], operator)
    Deployment.objects.filter(pk=two[0].deployment_id).update(max_instances=3)
    assert rollouts._startable(Deployment.objects.get()).pk not in {row.pk for row in two}


def test_no_swap_to_a_held_one_but_an_operators(make_instance, deployment, node, operator, language_model):
    group = SwapGroup.objects.create(name="shared")
    other = Deployment.objects.create(
        model=Model.objects.create(
            name="other", title="other", weights_bytes=1, kv_bytes_per_token=1, context_tokens=9
        ),
        region=deployment.region,
        gpu_type=deployment.gpu_type,
        tensor_parallel=deployment.tensor_parallel,
    )
    make_instance(state=S.READY, swap_group=group, node=node)
    asleep = make_instance(deployment=other, state=S.SLEEPING, swap_group=group, node=node)
    Instance.objects.filter(pk=asleep.pk).update(state=S.STOPPED, held="ada, broken weights")
    asleep.refresh_from_db()
    with pytest.raises(ActionError, match="is held by ada"):
        swaps.request(asleep, "safety autoscaler", "its queue waits")
    [seen] = inventory.read().swap_groups
    assert asleep.name not in {one.name for one in seen.members}
    assert swaps.request(asleep, operator, "mended").instance == asleep
    asleep.refresh_from_db()
    assert asleep.held == ""


def test_a_held_one_keeps_its_gpus_for_itself(make_instance, deployment, node, operator):
    Deployment.objects.filter(pk=deployment.pk).update(max_instances=20)
    rows = []
    while node.free_gpus() >= deployment.tensor_parallel:
        rows.append(make_instance(state=S.READY, launcher=Launcher.EMULATED, node=node))
    stop_by_hand(rows[0], operator)
    deployment.refresh_from_db()
    with pytest.raises(places.NoRoom):
        places.pick(deployment)
    assert places.pick(deployment, by_operator=True) == node


def test_a_model_is_undeployed_and_retired_and_its_history_stays(two, deployment, operator):
    model = deployment.model
    ScalingPlan.objects.create(model=model, status="advice", valid_until=timezone.now() + timedelta(hours=1))
    assert "2 instances stop" in services.undeploy(deployment, operator, "no demand")
    deployment.refresh_from_db()
    assert not deployment.active
    assert {row.state for row in Instance.objects.all()} == {S.DRAINING}
    assert "its history stays" in services.retire(model, operator, "replaced by another")
    model.refresh_from_db()
    assert not model.active
    assert ScalingPlan.objects.count() == 1
    assert inventory.read().models == {}
    with pytest.raises(ActionError, match="retired already"):
        services.retire(model, operator, "again")
    names = {"model": model.name, "region": deployment.region.name, "gpu_type": deployment.gpu_type.name}
    with pytest.raises(ValidationError, match=r"is retired\. Set it active again: `PATCH /api/inventory`") as no:
        deploy(DeployRequest(**names), operator)
    assert "then its deployment" in no.value.message_dict["model"][0]
    deployment.refresh_from_db()
    assert services.activate(deployment, operator, "again") == f"{model} and {deployment} are active again"
    assert out_of_use(DeployRequest(**names)) is None
    with pytest.raises(ActionError, match="active already"):
        services.activate(model, operator, "again")
