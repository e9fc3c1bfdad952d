"""Whether a machine that one model has let go serves another: the fleet says it once, and every simulation of it obeys."""

from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from controlplane.fleet.models import Deployment, Model, PerformanceProfile
from controlplane.gateway.models import LedgerRow
from controlplane.planning.execution import executor
from controlplane.planning.execution.executor import Why
from controlplane.planning.models import MoveSource
from controlplane.simulation.whatif.exporting import export
from controlplane.simulation.whatif.fork import fork_of
from controlplane.simulation.whatif.start import stage_start
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from scheduling.fleet.state import FleetState
from scheduling.simulation.cluster.description import cluster_of
from scheduling.simulation.cluster.world import State
from scheduling.simulation.scenario import Scenario, load_scenario
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.console.conftest import make_request  # noqa: F401 (a fixture)

pytestmark = pytest.mark.django_db
NAMES = ("llama-3.1-8b", "another")


@pytest.fixture
def two_models(deployment, profile, make_instance):
    """A ready instance and two empty places for each model, of one GPU type and region."""
    another = Model.objects.create(name=NAMES[1], title="Another", source="a", weights_bytes=16_060_000_000,
                                   kv_bytes_per_token=131_072, context_tokens=8_192)  # fmt: skip
    profile.pk, profile.model = None, another
    profile.save(force_insert=True)
    other = Deployment.objects.get(pk=deployment.pk)
    other.pk, other.model = None, another
    other.save(force_insert=True)
    make_instance(), make_instance(deployment=other)
    return deployment, other


@pytest.fixture
def clusters(two_models, make_request, tmp_path: Path):  # noqa: F811
    """The live fleet as each of its readers simulates it, by name."""
    now = timezone.now()
    for number in range(20):
        make_request(arrived_at=now - timedelta(seconds=100 - number), prompt_tokens=200, output_tokens=60)
    seen = FleetState([], [], [], [], at=now.timestamp())
    start = start_of(Begin(kind="ledger", since=now - timedelta(seconds=200), until=now), 200.0)
    export(tmp_path / "live")
    return {
        "fork": cluster_of(Scenario.model_validate(fork_of(seen, 60.0).scenario)),
        "ledger": stage_start(start, Scenario.model_validate(start.scenario), 1, (), 200.0).cluster,
        "export": cluster_of(load_scenario(tmp_path / "live" / "scenario.toml")),
    }


def test_no_simulation_of_the_fleet_lends_what_the_fleet_does_not(clusters, two_models):
    """One model releases its instance; the other, which needs two, starts its own empty places."""
    for name, cluster in clusters.items():
        simulation = Simulation(cluster, make_requests([0.0], 10, 10))
        own, others = (cluster.endpoints.index((model, "us-east")) for model in NAMES)
        gone = next(
            at for at, spec in enumerate(cluster.instances) if (spec.model, spec.state) == (NAMES[0], State.READY)
        )
        assert simulation.scale_in(own) == 1
        simulation.run(until_s=10.0)
        assert simulation.scale_out(others, 2) == 2, name
        simulation.run(until_s=2000.0)
        changed = {int(row["instance"]): int(row["endpoint"]) for row in simulation.result().changes}
        assert changed[gone] == own, name
        assert simulation.result().counters["redeploys"] == 0, name


def test_nor_does_the_live_fleet(two_models):
    """An instance added to one model, after another released one, belongs to its own deployment."""
    two_models[0].instances.update(state="stopped")
    before = set(two_models[0].instances.values_list("pk", flat=True))
    executor.add(NAMES[1], "us-east", Why(MoveSource.FLOOR, "", "one more"))
    assert set(two_models[0].instances.values_list("pk", flat=True)) == before
    assert two_models[1].instances.count() == 2


def test_the_ledger_is_simulated_without_models_that_have_no_profile(two_models, make_request):  # noqa: F811
    """E2: the nightly what-if failed as soon as a server without one had served a request."""
    other = two_models[1]
    PerformanceProfile.objects.filter(model=other.model).delete()
    now = timezone.now()
    for number in range(20):
        made = make_request(arrived_at=now - timedelta(seconds=100 - number))
        if number % 2:
            LedgerRow.objects.filter(pk=made.pk).update(model=other.model.name)
    start = start_of(Begin(kind="ledger", since=now - timedelta(seconds=200), until=now), 200.0)
    staged = stage_start(start, Scenario.model_validate(start.scenario), 1, (), 200.0)
    assert len(staged.requests.arrival_s) == 10
    assert any(NAMES[1] in remark for remark in start.remarks)
