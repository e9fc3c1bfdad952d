"""Capacity plans over rows: what is refused, a worker's answer, the fleet file, the what-if, and the loss of a region."""

import tomllib
from datetime import timedelta

import numpy as np
import pytest
from django.utils import timezone

from controlplane.fleet.inventory import fleet_file as files
from controlplane.fleet.models import GpuType, Node, Region, SloClass
from controlplane.planning.models import CapacityPlan, CapacityState, RegionLoss
from controlplane.planning.sizing import demand, futures, services, survival, working
from controlplane.planning.sizing.fleet_file import fleet_file
from controlplane.planning.sizing.question import Question
from controlplane.simulation.whatif.arrivals import forecast_arrivals
from controlplane.simulation.whatif.start import Start
from tests.console.conftest import make_request  # noqa: F401 (a fixture)
from tests.planning import capacity_rows
from tests.simulation.whatif import rows as what_if_rows

pytestmark = pytest.mark.django_db


@pytest.fixture
def asked_of(deployment, make_request):  # noqa: F811
    """A minute of requests, some of them long."""
    now = timezone.now()
    for number in range(60):
        make_request(
            arrived_at=now - timedelta(seconds=60 - number), prompt_tokens=100 + 40 * (number % 9),
            output_tokens=20 + 7 * (number % 11), slo_class="interactive", region="us-east",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("question", "field", "said"),
    [
        ({"percent": 900}, "percent", "less than or equal to 300"),
        ({"months": 99}, "months", "less than or equal to 60"),
        ({"growth": "curve"}, "curve", "at least one month"),
        ({"growth": "curve", "curve": "1, 1.1\n2, much"}, "curve", "Line 2 is '2, much'"),
        ({"gpus": {"abacus": 1.0}}, "gpus.abacus", "Nothing is known of this GPU type"),
        ({"gpus": {"b200-180gb": None}}, "gpus.b200-180gb", "No price is kept"),
        ({"promises": {"gold": {}}}, "promises", "there is no SLO class"),
        ({"promises": {"interactive": {"ttft_ms": 0}}}, "promises.interactive.ttft_ms", "greater than 0"),
        ({"survives_loss": True}, "survives_loss", "There is one region"),
        ({"reserved": 2}, "reserved", "less than or equal to 1"),
        ({"grows": 2}, "grows", "not permitted"),
    ],
)
def test_a_question_is_refused_at_its_field(deployment, slo_class, question, field, said):
    with pytest.raises(services.Refused) as refused:
        services.read(question)
    assert said.lower() in refused.value.fields[field].lower()


@pytest.mark.parametrize("growth", ["forecast", "percent"])
def test_a_part_of_the_classes_has_its_own_part_of_the_demand(deployment, slo_class, make_request, growth):  # noqa: F811
    """One request a second: nine of ten are short, the long ones have eleven of twelve tokens."""
    SloClass.objects.create(name="chat", title="Chat", kind="interactive", ttft_target_ms=500)
    now = timezone.now()
    for number in range(100):
        name, tokens = ("chat", 5_000) if number % 10 == 0 else ("interactive", 50)
        lengths = {"prompt_tokens": tokens, "output_tokens": tokens, "slo_class": name, "region": "us-east"}
        make_request(arrived_at=now - timedelta(seconds=100 - number), **lengths)
    for names, tokens_per_s, per_s in ((["interactive"], 90, 0.9), (["chat"], 1000, 0.1), ([], 1090, 1.0)):
        asked = Question(growth=growth, months=0, promises={name: {} for name in names})
        read = demand.read(asked, now)
        assert read.models["llama-3.1-8b"].tokens_per_s == {"us-east": pytest.approx(tokens_per_s)}
        assert read.arrivals["streams"][0]["requests_per_s"]["mean"] == [pytest.approx(per_s)]


def test_a_worker_answers_with_a_fleet_that_the_simulator_found_to_keep_its_promises(asked_of, operator):
    row = services.ask({"percent": 20, "months": 12, "gpus": {"a100-80gb": None, "h200-141gb": 3.5}}, operator)
    working.work(row.pk)
    row.refresh_from_db()
    answer = row.answer
    assert (row.state, row.error) == (CapacityState.DONE, "")
    assert answer["demand"]["factor"] == pytest.approx(1.2**12, abs=1e-3)
    assert answer["check"]["holds"]
    assert answer["check"]["shares"][0]["met_ratio"] >= 0.95
    offers = {one["gpu_type"]: one for one in answer["offers"]}
    assert (offers["a100-80gb"]["estimated"], offers["h200-141gb"]["estimated"]) == (False, True)
    assert all(one["tokens_per_s"] > 0 and one["usd_per_million_tokens"] > 0 for one in offers.values())
    month = answer["usd_per_month"]
    assert month["on_demand"] == pytest.approx(sum(one["usd_per_month"] for one in answer["fleet"]))
    assert month["reserved"] == pytest.approx(0.6 * month["on_demand"], abs=0.01)
    points = answer["frontier"]
    assert [one["attainment"] for one in points] == [0.9, 0.95, 0.99, 0.999]
    usd = [one["usd_per_month"] for one in points if one["usd_per_month"] is not None]
    assert usd == sorted(usd)
    assert points[1]["usd_per_month"] == month["on_demand"], "the promise is 95%: one fleet for both"
    assert all(one["why"] for one in points if one["usd_per_month"] is None)
    assert answer["buy_by"]["known"]
    working.work(row.pk)  # a message that came twice
    assert CapacityPlan.objects.get().ended_at == row.ended_at


def test_without_requests_there_is_no_answer_but_a_reason(deployment, slo_class, operator):
    row = services.ask({}, operator)
    working.work(row.pk)
    row.refresh_from_db()
    assert row.state == CapacityState.FAILED
    assert row.error.startswith("No request of these classes came in the last hour")


def test_the_fleet_file_makes_the_fleet_of_the_plan(deployment, operator, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(fleet_file(capacity_rows.done()))
    tables = tomllib.loads(path.read_text())
    assert [node["gpu_count"] for node in tables["nodes"]] == [2]
    files.apply(files.read(path), operator)
    assert GpuType.objects.get(name="h200-141gb").on_demand_usd_per_hour == 3.5
    assert Node.objects.filter(gpu_type__name="h200-141gb").count() == 1
    deployment.refresh_from_db()
    assert (deployment.min_instances, deployment.max_instances) == (0, 0)
    assert deployment.model.deployments.get(gpu_type__name="h200-141gb").min_instances == 2


def test_a_what_if_compares_the_planned_fleet_with_the_present_one(asked_of, operator):
    row = services.ask({"gpus": {"h200-141gb": 3.5}, "months": 1}, operator)
    working.work(row.pk)
    row.refresh_from_db()
    made = what_if_rows.run_all(futures.ask_what_if(row, operator))
    assert made.state == "done"
    assert [future.name for future in made.futures.all()] == ["As now", str(row)]
    judged = [run.result["columns"]["all"]["judged"] for run in made.futures.get(letter="B").runs.all()]
    assert len(judged) == futures.SEEDS
    assert min(judged) > 0


def test_the_loss_of_the_only_region_that_serves_is_not_survived(asked_of, region, monkeypatch, settings):
    now = timezone.now()
    Region.objects.create(name="us-west", title="US West")
    assert survival.due(now)

    def start_of(begin, horizon_s):
        from controlplane.simulation.whatif import selectors

        arrivals, _ = forecast_arrivals(now, horizon_s)
        scenario = selectors.present_scenario() | {"demand": {"too_long": "clip"}}
        return Start(kind="fleet", at=now, scenario=scenario, arrivals=arrivals)

    monkeypatch.setattr(survival, "start_of", start_of)
    monkeypatch.setattr(survival, "HORIZON_S", 1500.0)
    (verdict,) = survival.judge(now).regions
    assert (verdict["region"], verdict["survives"], verdict["slo_class"]) == ("us-east", False, "interactive")
    assert verdict["slo_met_ratio"] < 0.05
    assert verdict["below_target_s"] == 1200.0
    assert verdict["without_loss_ratio"] > 0.9
    assert not survival.due(now + timedelta(hours=1))
    assert RegionLoss.objects.count() == 1


def test_a_class_falls_for_as_long_as_its_parts_are_below_target():
    kept, lost = np.full(4, 100), np.array([95, 81, 81, 100])
    assert survival._verdict({"chat": (0.95, kept, lost)}, {}) == {
        "survives": False, "slo_class": "chat", "slo_met_ratio": 0.81, "below_target_s": 600.0, "without_loss_ratio": None,
    }  # fmt: skip
    whole = {"chat": (0.95, kept, kept)}
    assert survival._verdict(whole, whole)["survives"]
