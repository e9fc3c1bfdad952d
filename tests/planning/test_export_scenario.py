"""`manage.py simulate --export`: the live fleet and its ledger as a scenario that `simulate` runs."""

import json
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from controlplane.fleet.models import PerformanceProfile
from controlplane.gateway.models import LedgerRow
from controlplane.planning import services
from controlplane.planning.execution import strategies
from controlplane.planning.models import ScalingPolicy
from controlplane.tuning import services as tuning
from controlplane.tuning.selectors import tuned
from scheduling.simulation.scenario import load_scenario

pytestmark = pytest.mark.django_db
START = datetime(2026, 3, 2, 12, tzinfo=UTC)


@pytest.fixture
def requests(acme, deployment, profile):
    for number in range(40):
        LedgerRow.objects.create(
            request_id=f"r{number}", arrived_at=START + timedelta(seconds=5 * number), tenant=acme, model="llama-3.1-8b",
            slo_class="interactive", region="us-east", streamed=True, outcome="done", status_code=200, prompt_tokens=100,
            output_tokens=20 + number, predicted_output_tokens=30, trace=[{"round_trip_ms": 4.0}],
        )  # fmt: skip


def export(folder: Path, *arguments: str) -> str:
    out = StringIO()
    call_command("simulate", "--export", str(folder), *arguments, stdout=out)
    return out.getvalue()


def test_the_live_fleet_is_a_scenario_that_runs(requests, deployment, tmp_path: Path) -> None:
    ScalingPolicy.objects.create(model=deployment.model, strategy="lt_u", mode="auto", parameters={"out_above": 0.6})
    tuning.change("LOOKAHEAD_OVERLOAD_ABOVE", 0.9, "test", model=deployment.model)
    for name, value in {"SPILL_ABOVE": 0.6, "FORECASTER": "seasonal_naive"}.items():
        tuning.change(name, value, "test", model=deployment.model)
    folder = tmp_path / "live"
    assert "40 requests and 1 deployments" in export(folder)
    scenario = load_scenario(folder / "scenario.toml")
    (group,) = scenario.fleet
    assert (group.model, group.regions, group.gpu) == ("llama-3.1-8b", ["us-east"], "a100-80gb")
    assert group.instances + group.empty == deployment.max_instances
    (endpoint,) = scenario.endpoints
    assert (endpoint.strategy, endpoint.parameters) == ("lt_u", strategies.marks("lt_u", tuned()) | {"out_above": 0.6})
    assert endpoint.look_ahead.overload_above == 0.9
    assert (endpoint.min_instances, endpoint.max_instances) == (deployment.min_instances, deployment.max_instances)
    assert endpoint.dispatch_round_trip_ms == pytest.approx(4.0)
    marks = endpoint.region_threshold, endpoint.floor_cooldown_s, endpoint.forecaster
    assert marks == (0.6, 15.0, "seasonal_naive")
    assert scenario.models["llama-3.1-8b"].bundle is None
    assert scenario.classes["interactive"].ttft_ms == 1000
    out = StringIO()
    call_command("simulate", str(folder / "scenario.toml"), "--json", stdout=out)
    answer = json.loads(out.getvalue())
    assert answer["requests"] == 40
    assert answer["strategy"] == "lt_u"
    assert answer["plans"]


def test_a_model_that_embeds_keeps_its_task(requests, deployment, tmp_path: Path) -> None:
    type(deployment.model).objects.update(task="embed")
    LedgerRow.objects.update(surface="embeddings", output_tokens=0, predicted_output_tokens=0)
    folder = tmp_path / "live"
    assert "40 requests and 1 deployments" in export(folder)
    scenario = load_scenario(folder / "scenario.toml")
    assert scenario.pooling == {"llama-3.1-8b"}
    out = StringIO()
    call_command("simulate", str(folder / "scenario.toml"), "--json", stdout=out)
    answer = json.loads(out.getvalue())
    assert answer["requests"] == 40
    (produced,) = (
        row["value"] for row in answer["measures"] if (row["by"], row["statistic"]) == ("all", "output_tokens_per_s")
    )
    assert produced == 0


def test_where_no_strategy_acts_the_floor_is_alone(requests, deployment, tmp_path: Path) -> None:
    ScalingPolicy.objects.create(model=deployment.model, strategy="lt_u", mode="shadow")
    tuning.change("SCALE_OUT_ABOVE", 0.65, "test", model=deployment.model)
    export(tmp_path / "live")
    scenario = load_scenario(tmp_path / "live" / "scenario.toml")
    (endpoint,) = scenario.endpoints
    marks = {"out_above": 0.65, "in_below": 0.3, "cooldown_s": 15.0, "patience_s": 60.0}
    assert (endpoint.strategy, endpoint.parameters) == ("floor", marks)


def test_a_models_bundle_is_named(requests, deployment, operator, tmp_path: Path) -> None:
    services.switch_bundle(deployment.model, "preserve", operator)
    export(tmp_path)
    scenario = load_scenario(tmp_path / "scenario.toml")
    assert scenario.models["llama-3.1-8b"].bundle == "preserve"
    key = "llama-3.1-8b", "us-east"
    assert scenario.at(*key).forecaster == "mlstm"
    assert [one.routing for _, one in scenario.of_endpoint(*key)] == ["preserve", "preserve"]


def test_nothing_to_write_is_said(requests, deployment, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no request to a model of the fleet"):
        export(tmp_path, "--since", "2027-01-01")
    PerformanceProfile.objects.all().delete()
    with pytest.raises(CommandError, match="No active deployment has a performance profile"):
        export(tmp_path)
