"""The live fleet as a scenario: instances, sharing, limits, round trips and settings are those of the rows."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.fleet.lifecycle.launching import launch_spec
from controlplane.fleet.models import Deployment, Instance, Model, SwapGroup
from controlplane.fleet.swaps.times import PCIE_BYTES_PER_S
from controlplane.gateway.models import LedgerRow
from controlplane.planning.execution import strategies
from controlplane.planning.models import PolicyMode, ScalingPolicy
from controlplane.planning.sizing.demand import OfModel
from controlplane.planning.sizing.offers import offers
from controlplane.planning.sizing.selectors import gpu_types
from controlplane.simulation.whatif.start import stage_start
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from controlplane.tuning import services as tuning
from controlplane.tuning.selectors import tuned
from scheduling.scaling import Floor
from scheduling.simulation.cluster.world import State
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.strategies import Bounds
from tests.console.conftest import make_request  # noqa: F401 (a fixture)

pytestmark = pytest.mark.django_db
PLACE = ("llama-3.1-8b", "us-east")


@pytest.fixture
def staged(deployment, make_request):  # noqa: F811
    """`staged()`: the fleet as it is now, prepared for the requests of the ledger."""
    now = timezone.now()
    for number in range(5):
        make_request(arrived_at=now - timedelta(seconds=50 - number), prompt_tokens=200, trace=[{"moved": "a to b"}])

    def stage():
        start = start_of(Begin(kind="ledger", since=now - timedelta(seconds=100), until=now), 100.0)
        return stage_start(start, Scenario.model_validate(start.scenario), 1, (), 100.0)

    return stage


def test_the_fleet_is_that_of_the_rows(staged, make_instance):
    Deployment.objects.update(max_num_seqs=8)
    make_instance(), make_instance(state="stopped")
    made = staged()
    assert [spec.state for spec in made.cluster.instances] == [State.READY, State.EMPTY, State.EMPTY]
    assert [spec.usd_per_hour for spec in made.cluster.instances] == [pytest.approx(2.7)] * 3
    (engine,) = {spec.engine for spec in made.cluster.instances}
    assert (engine.max_num_seqs, engine.max_model_len) == (8, 8192)
    assert made.scaled.bounds == {PLACE: Bounds(1, 3)}


@pytest.mark.parametrize("launcher", ["emulated", "external"])
@pytest.mark.parametrize("settings", [{}, {"kv_events": True}, {"kv_offload_gib": 9.0}])
def test_a_simulated_server_caches_prefixes_as_the_launched_does(staged, make_instance, launcher, settings):
    cached = launcher == "external" or bool(settings)
    Deployment.objects.update(**settings)
    make_instance(launcher=launcher)
    assert {spec.engine.prefix_caching for spec in staged().cluster.instances} == {cached}
    (offer,) = offers({PLACE[0]: OfModel(prompt=[9], output=[9], interactive=[True])}, gpu_types({}), {})
    assert offer.group("us-east", 1)["prefix_caching"] is cached
    assert launcher == "external" or launch_spec(Instance.objects.get()).enable_prefix_caching is cached


def test_instances_that_share_gpus_are_as_they_are_now(staged, make_instance):
    group = SwapGroup.objects.create(name="pair", cpu_memory_bytes=20 * 10**9)
    make_instance(), make_instance(swap_group=group), make_instance(state="sleeping", sleep_level=1, swap_group=group)
    cluster = staged().cluster
    states = [(spec.state.name, spec.sharing is not None) for spec in cluster.instances]
    assert states == [("READY", False), ("READY", True), ("ASLEEP", True)]
    sharing = cluster.instances[1].sharing
    sizes = sharing.weights_bytes, sharing.memory_bytes
    assert (sharing.group, *sizes) == ("pair-us-east-1", pytest.approx(16.06e9), 20e9)
    assert sharing.wake_s == pytest.approx(16.06e9 / (2 * PCIE_BYTES_PER_S))


def test_round_trips_are_those_of_the_newest_decisions(staged, make_instance):
    make_instance()
    assert staged().cluster.policy(PLACE).dispatch_round_trip_ms == 0.0
    LedgerRow.objects.update(trace=[{"moved": "a to b"}, {"round_trip_ms": 40.0}])
    LedgerRow.objects.filter(pk=LedgerRow.objects.first().pk).update(trace=[{"round_trip_ms": None}])
    assert staged().cluster.policy(PLACE).dispatch_round_trip_ms == 40.0


def test_marks_that_an_operator_changed_are_simulated(staged, make_instance):
    make_instance()
    model = Model.objects.get(name=PLACE[0])
    ScalingPolicy.objects.create(model=model, strategy="reactive", mode=PolicyMode.AUTO)
    for name, value in {"SPILL_ABOVE": 0.55, "MAX_HOLD_S": 40.0}.items():
        tuning.change(name, value, "test")
    for name, value in {
        "SCALE_OUT_ABOVE": 0.6, "LOOKAHEAD_OVERLOAD_ABOVE": 0.5, "SCALE_COOLDOWN_S": 30.0, "SWAP_BY_QUEUE": False,
    }.items():  # fmt: skip
        tuning.change(name, value, "test", model=model)
    made = staged()
    policy = made.cluster.policy(PLACE)
    assert {each.out_above for each in made.scaled.strategies.values()} == {0.6}
    assert (policy.look_ahead.overload_above, policy.region_threshold, policy.swap_by_queue) == (0.5, 0.55, False)
    assert set(made.requests.hold_s) == {40.0}
    assert made.scaled.floor == {PLACE: Floor(cooldown_s=30.0)}
    tuning.change("FLOOR", False, "test")
    assert staged().scaled.floor is None
    tuning.change("SPILL_ABOVE", 0.4, "test", model=model)
    assert staged().cluster.policy(PLACE).region_threshold == 0.4


def test_the_floor_under_a_strategy_is_the_operators(deployment):
    strategy = strategies.make("reactive", {}, tuned(deployment.model.name))
    tuning.change("SCALE_COOLDOWN_S", 30.0, "test", model=deployment.model)
    assert strategies.floored(strategy, tuned(deployment.model.name)).floor == Floor(cooldown_s=30.0)
    tuning.change("FLOOR", False, "test")
    assert strategies.floored(strategy, tuned(deployment.model.name)) is strategy
