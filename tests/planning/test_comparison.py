"""Strategies on the ledger's last hours: the fleet and the requests are the rows', plans know nothing of what came later."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import Deployment, Model, SloClass, SwapGroup
from controlplane.fleet.swaps.times import PCIE_BYTES_PER_S
from controlplane.gateway.models import LedgerRow, MinuteRow
from controlplane.planning.comparison import services
from controlplane.planning.comparison.services import Replay, recorded_planner
from controlplane.planning.execution import rows, strategies
from controlplane.planning.forecasts import demand
from controlplane.planning.models import Forecast, PolicyMode, Quantity, ScalingPolicy
from controlplane.planning.plans import inventory
from controlplane.planning.plans.services import make_plans
from controlplane.tuning import services as tuning
from scheduling.scaling import EndpointView, Floor
from scheduling.simulation.cluster.world import State
from scheduling.simulation.strategies import Bounds
from tests import database
from tests.examples import at_night_but

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
PLACE = ("llama-3.1-8b", "us-east")


@pytest.fixture(autouse=True)
def pace(settings):
    settings.FORECAST_WINDOW_S, settings.FORECAST_WINDOWS = 60, 5
    settings.FORECAST_EVERY_S = settings.PLAN_EVERY_S = 60.0


@pytest.fixture
def ledger(acme, deployment):
    """Write twenty minutes with a request a second, and a surge of four a second in the middle."""
    Deployment.objects.update(max_num_seqs=8)
    database.write(write_ledger)
    return list(LedgerRow.objects.order_by("pk"))


def write_ledger() -> None:
    acme = Tenant.objects.get(name="acme")
    draw = np.random.default_rng(0)
    at, rows = 0.0, []
    while at < 1200:
        at += draw.exponential(0.25 if 400 <= at < 700 else 1.0)
        arrived = NOW - timedelta(seconds=1200 - at)
        rows.append(
            LedgerRow(
                request_id=str(len(rows)),
                arrived_at=arrived,
                tenant=acme,
                model=PLACE[0],
                region=PLACE[1],
                slo_class="interactive",
                streamed=True,
                outcome="done",
                status_code=200,
                prompt_tokens=int(draw.integers(100, 800)),
                output_tokens=int(draw.integers(100, 400)),
                predicted_output_tokens=200,
            )
        )
    rows = [row for row in rows if row.arrived_at < NOW]
    LedgerRow.objects.bulk_create(rows)
    minutes = {}
    for row in rows:
        minute = row.arrived_at.replace(second=0, microsecond=0)
        total = minutes.setdefault(minute, [0, 0, 0])
        for place, value in enumerate((1, row.prompt_tokens, row.output_tokens)):
            total[place] += value
    MinuteRow.objects.bulk_create(
        MinuteRow(
            minute=minute, model=PLACE[0], region=PLACE[1], slo_class="interactive",
            requests=count, prompt_tokens=prompt, output_tokens=output,
        )
        for minute, (count, prompt, output) in minutes.items()
    )  # fmt: skip


def advisor_of(last_hours):
    return recorded_planner(last_hours.fleet, last_hours.from_at, last_hours.to_at)


def test_too_little_says_what_is_missing(ledger, make_instance, monkeypatch):
    """Many requests of a young ledger span too little time."""
    make_instance()
    LedgerRow.objects.filter(arrived_at__lt=NOW - timedelta(seconds=180)).delete()
    note = services.compare_strategies(1.0, NOW).note
    assert note == f"Too little to compare: {LedgerRow.objects.count()} requests of the 200 that are needed."
    monkeypatch.setattr(services, "LEAST_REQUESTS", 100)
    first = LedgerRow.objects.order_by("arrived_at").first().arrived_at
    covered_s = int((NOW - first).total_seconds())
    note = services.compare_strategies(1.0, NOW).note
    assert note == f"Too little to compare: requests of {covered_s} s; 5 minutes are needed."


def test_the_newest_requests_of_a_busy_fleet_are_compared_whatever_time_they_cover(
    ledger, make_instance, monkeypatch, settings
):
    make_instance()
    monkeypatch.setattr(Replay, "line", lambda self, name: {"strategy": name})
    settings.COMPARE_REQUESTS = 250
    row = services.compare_strategies(1.0, NOW)
    assert row.requests == 250
    assert len(row.rows) == len(strategies.names())
    assert row.note.startswith("the newest 250 requests, of 4.")


def test_requests_come_from_their_callers_regions_and_those_not_served_are_among_them(
    ledger, make_instance, monkeypatch
):
    make_instance()
    spilled, refused, other = ledger[-3:]
    LedgerRow.objects.filter(request_id=ledger[0].request_id).update(retry=1, repeated=True)
    LedgerRow.objects.filter(request_id=spilled.request_id).update(region="elsewhere", own_region=PLACE[1])
    LedgerRow.objects.filter(request_id=refused.request_id).update(
        outcome="rejected", unserved=True, prompt_tokens=0, output_tokens=0,
        predicted_prompt_tokens=321, predicted_output_tokens=123,
    )  # fmt: skip
    LedgerRow.objects.filter(request_id=other.request_id).update(outcome="rejected", prompt_tokens=0, output_tokens=0)
    replays: list[Replay] = []
    monkeypatch.setattr(Replay, "line", lambda self, name: replays.append(self) or {"strategy": name})
    row = services.compare_strategies(1.0, NOW)
    assert row.requests == len(ledger) - 2
    requests = replays[0].workload
    assert (requests.prompt_tokens[-2], requests.prompt_tokens[-1]) == (spilled.prompt_tokens, 321)
    assert (requests.output_tokens[-1], requests.predicted_tokens[-1]) == (123, 123)


def test_it_says_which_endpoints_are_left_out_for_want_of_a_profile(ledger, make_instance, monkeypatch):
    make_instance()
    other = Deployment.objects.get()
    Deployment.objects.create(
        model=Model.objects.create(name="unmeasured", weights_bytes=1, kv_bytes_per_token=1, context_tokens=4096),
        region=other.region, gpu_type=other.gpu_type, max_instances=1,
    )  # fmt: skip
    monkeypatch.setattr(Replay, "line", lambda self, name: {"strategy": name})
    said = f"unmeasured in {PLACE[1]} left out, without a performance profile"
    assert services.compare_strategies(1.0, NOW).note == said
    LedgerRow.objects.all().delete()
    assert services.compare_strategies(1.0, NOW).note.endswith(f"needed; {said}.")


@pytest.mark.nightly
def test_every_strategy_has_a_line_and_more_instances_serve_better(ledger, make_instance):
    make_instance()
    row = services.compare_strategies(1.0, NOW)
    assert row.requests == len(ledger)
    assert row.note == ""
    assert [line["strategy"] for line in row.rows] == strategies.names()
    for line in row.rows:
        assert line["instance_hours"] * 2 * 1.35 == pytest.approx(line["usd"], abs=0.01)
        assert 0 < line["slo_met"] <= 1
        assert line["p95_ttft_ms"] > 0
        assert line["p95_e2e_ms"] > line["p95_ttft_ms"]
        assert 0 <= line["waste_hours"] <= line["instance_hours"]
    assert any(line["moves"] for line in row.rows)
    assert len({line["instance_hours"] for line in row.rows}) > 1


def test_bounded_in_requests_the_newest_first(ledger, make_instance, settings):
    settings.COMPARE_REQUESTS = 300
    fleet = inventory.read({PLACE[0]})
    last_hours = Replay.read(LedgerRow.objects.all(), fleet, NOW)
    assert len(last_hours.workload) == 300
    assert last_hours.from_at == ledger[-300].arrived_at
    assert last_hours.workload.arrival_s.tolist() == sorted(last_hours.workload.arrival_s)
    assert last_hours.note == "the newest 300 requests, of 5.1 min"


def test_the_fleet_has_the_round_trips_and_limits_that_it_had_live(ledger, make_instance):
    fleet = inventory.read({PLACE[0]})
    (deployment,) = fleet.deployments.values()
    simulated = Replay.read(LedgerRow.objects.all(), fleet, NOW).varied("reactive")[1].cluster
    policy = simulated.policy(PLACE[:2])
    assert (policy.dispatch_round_trip_ms, policy.requests_ahead_limit) == (0.0, None)
    LedgerRow.objects.update(trace=[{"moved": "a to b"}, {"round_trip_ms": 40.0}])
    LedgerRow.objects.filter(pk__in=[row.pk for row in ledger[-3:]]).update(trace=[{"round_trip_ms": None}])
    deployment.requests_ahead_limit = 2
    simulated = Replay.read(LedgerRow.objects.all(), fleet, NOW).varied("reactive")[1].cluster
    policy = simulated.policy(PLACE[:2])
    assert (policy.dispatch_round_trip_ms, policy.requests_ahead_limit) == (40.0, 2)


def test_and_in_time(ledger, make_instance, settings):
    settings.COMPARE_LIMIT_S = -1.0
    row = services.compare_strategies(1.0, NOW)
    assert row.rows == []
    assert row.note.startswith("the time was over after 0 of ")


@pytest.mark.nightly
def test_hours_are_counted_while_requests_come_and_a_little_longer(ledger, make_instance):
    tuning.change("USUAL_START_S", 90_000.0, "test")
    last_hours = Replay.read(LedgerRow.objects.all(), inventory.read({PLACE[0]}), NOW)
    cluster, last_s = last_hours.varied("reactive")[1].cluster, float(last_hours.workload.arrival_s[-1])
    most_s = len(cluster.instances) * (last_s + services.SETTLE_S)
    for name in ("reactive", "lt_u"):
        assert 0 < last_hours.line(name)["instance_hours"] <= most_s / 3600


def test_a_strategy_that_cannot_be_simulated_costs_its_own_line(ledger, make_instance, monkeypatch, caplog):
    real = Replay.line

    def line(self, name):
        if name == "lt_u":
            raise ArithmeticError("no")
        return {"strategy": name}

    assert real is not line
    monkeypatch.setattr(Replay, "line", line)
    row = services.compare_strategies(1.0, NOW)
    assert "lt_u" not in {line["strategy"] for line in row.rows}
    assert len(row.rows) == len(strategies.names()) - 1
    assert row.note == "lt_u: ArithmeticError: no"


def test_the_fleet_is_that_of_the_rows(ledger, make_instance):
    make_instance(), make_instance(state="stopped")
    last_hours = Replay.read(LedgerRow.objects.all(), inventory.read({PLACE[0]}), NOW)
    instances = last_hours.varied("reactive")[1].cluster.instances
    assert [spec.state for spec in instances] == [State.READY, State.EMPTY, State.EMPTY]
    assert [spec.usd_per_hour for spec in instances] == [pytest.approx(2.7)] * 3
    (engine,) = {spec.engine for spec in instances}
    assert (engine.max_num_seqs, engine.max_model_len) == (8, 8192)


def test_instances_that_share_gpus_are_as_they_are_now(ledger, make_instance):
    group = SwapGroup.objects.create(name="pair", cpu_memory_bytes=20 * 10**9)
    make_instance(), make_instance(swap_group=group), make_instance(state="sleeping", sleep_level=1, swap_group=group)
    cluster = Replay.read(LedgerRow.objects.all(), inventory.read({PLACE[0]}), NOW).varied("reactive")[1].cluster
    assert [(spec.state.name, spec.sharing is not None) for spec in cluster.instances] == [
        ("READY", False),
        ("READY", True),
        ("ASLEEP", True),
    ]
    sharing = cluster.instances[1].sharing
    assert (sharing.group, sharing.weights_bytes) == ("pair-us-east-1", pytest.approx(16.06e9))
    assert sharing.wake_s == pytest.approx(16.06e9 / (2 * PCIE_BYTES_PER_S))
    assert cluster.swap_memory_bytes == {"pair-us-east-1": 20e9}


def test_requests_for_undeployed_models_are_left_out(ledger, make_instance):
    LedgerRow.objects.filter(pk__gt=ledger[100].pk or 0).update(model="gone")
    Deployment.objects.update(active=False)
    assert Replay.read(LedgerRow.objects.all(), inventory.read({PLACE[0]}), NOW) is None


class TestAdvice:
    def view(self, **values):
        names = dict.fromkeys(("coming", "draining", "spot", "spot_other", "waiting"), 0)
        loads = dict.fromkeys(("use", "kv_use", "tokens_per_s", "since_change_s"), 0.5)
        bounds = {"ready": 1, "min_instances": 1, "max_instances": 3}
        return EndpointView(*PLACE, **names | loads | bounds | values)

    def test_it_follows_the_forecast_of_that_time(self, ledger, make_instance):
        start = ledger[0].arrived_at
        bands = {name: [90_000.0] * 5 for name in ("mean", "lower_80", "upper_80", "lower_95", "upper_95")}
        for quantity in ("prompt", "output"):
            Forecast.objects.create(
                made_at=start + timedelta(seconds=300), start_at=start.replace(second=0) + timedelta(seconds=300),
                model=PLACE[0], region=PLACE[1], quantity=quantity, forecaster="x", window_s=60, **bands,
            )  # fmt: skip
        make_instance()
        fleet = inventory.read({PLACE[0]})
        last_hours = Replay.read(LedgerRow.objects.all(), fleet, NOW)
        (before,), (after,) = (advisor_of(last_hours).advise(at, [self.view()]) for at in (299.0, 301.0))
        assert before.target_instances == 1
        assert (after.target_instances, after.forecast_tokens_per_s) == (3, 180_000.0)

    @pytest.mark.parametrize("name", at_night_but(["lt_ua"], ["pilothouse", "lt_ua", "preserve"]))
    @pytest.mark.parametrize("buffer", at_night_but([0.1], [0.0, 0.1]))
    def test_the_advice_is_that_of_the_plan_that_would_be_made_live(
        self, ledger, make_instance, language_model, settings, name, buffer
    ):
        """The same demand level, room for non-interactive work, bounds and validity."""
        settings.PLAN_NIW_BUFFER, settings.FORECAST_WINDOW_S, settings.PLAN_EVERY_S = buffer, 600, 900.0
        SloClass.objects.create(name="flexible", title="Flexible", kind="non_interactive", deadline_s=60, priority=5)
        MinuteRow.objects.create(
            minute=NOW.replace(second=0) - timedelta(minutes=5), model=PLACE[0], region=PLACE[1], slo_class="flexible",
            requests=1, prompt_tokens=9_000_000, output_tokens=0,
        )  # fmt: skip
        for quantity in Quantity:
            Forecast.objects.create(
                made_at=NOW - timedelta(seconds=30), start_at=demand.window_start(NOW, 600), model=PLACE[0],
                region=PLACE[1], quantity=quantity, forecaster="x", window_s=600, mean=[3000.0, 4000.0, 9000.0, 1.0, 1.0],
                upper_80=[6000.0, 8000.0, 18_000.0, 1.0, 1.0],
            )  # fmt: skip
        make_instance()
        policy = ScalingPolicy.objects.create(model=language_model, strategy=name, mode=PolicyMode.AUTO)
        (row,) = make_plans(NOW)
        made = recorded_planner(inventory.read({PLACE[0]}), NOW, NOW + timedelta(hours=1), policy.strategy)
        bounds = {"min_instances": 1, "max_instances": 3}
        zero_s = NOW.timestamp()
        for after_s in (0.0, 300.0, 600.0, 899.0):
            live = rows.endpoint_plans(row)[PLACE[1]].advice((NOW + timedelta(seconds=after_s)).timestamp())
            (simulated,) = made.advise(after_s, [self.view(**bounds)])
            assert simulated.target_instances == live.target_instances
            assert simulated.soon_instances == live.soon_instances
            assert simulated.forecast_tokens_per_s == pytest.approx(live.forecast_tokens_per_s, abs=0.1)
            assert simulated.made_at_s + zero_s == pytest.approx(live.made_at_s, abs=1e-3)
            assert simulated.next_plan_s + zero_s == pytest.approx(live.next_plan_s, abs=1e-3)
            assert simulated.valid_until_s + zero_s == pytest.approx(live.valid_until_s, abs=1e-3)
        assert (live.soon_instances is not None) == (name == "pilothouse")

    def test_bounds_are_those_of_each_endpoint(self, ledger, make_instance):
        make_instance()
        replayed = Replay.read(LedgerRow.objects.all(), inventory.read({PLACE[0]}), NOW)
        assert replayed.varied("lt_u")[1].scaled.bounds == {PLACE: Bounds(1, 3)}

    def test_without_one_by_the_last_minutes_and_never_by_what_comes(self, ledger, make_instance):
        make_instance()
        last_hours = Replay.read(LedgerRow.objects.all(), inventory.read({PLACE[0]}), NOW)

        def forecast_at(at_s):
            return advisor_of(last_hours).advise(at_s, [self.view()])[0].forecast_tokens_per_s

        calm = forecast_at(380.0)
        assert forecast_at(700.0) > 2 * calm
        MinuteRow.objects.filter(minute__gt=last_hours.from_at + timedelta(seconds=360)).delete()
        assert forecast_at(380.0) == calm


def test_marks_that_an_operator_changed_are_simulated(ledger, make_instance):
    make_instance()
    tuning.change("SPILL_ABOVE", 0.55, "test")
    tuning.change("MAX_HOLD_S", 40.0, "test")
    tuning.change("REORDER_BY", "shepherd", "test")
    model = Model.objects.get(name=PLACE[0])
    tuning.change("SCALE_OUT_ABOVE", 0.6, "test", model=model)
    tuning.change("LOOKAHEAD_OVERLOAD_ABOVE", 0.5, "test", model=model)
    tuning.change("SCALE_COOLDOWN_S", 30.0, "test", model=model)
    tuning.change("SWAP_BY_QUEUE", False, "test", model=model)

    def staged():
        return Replay.read(LedgerRow.objects.all(), inventory.read({PLACE[0]}), NOW).varied("reactive")[1]

    made = staged()
    assert {each.out_above for each in made.scaled.strategies.values()} == {0.6}
    assert made.cluster.policy(PLACE).look_ahead.overload_above == 0.5
    assert made.cluster.policy(PLACE).region_threshold == 0.55
    assert made.cluster.reordering == "shepherd"
    assert not made.cluster.policy(PLACE).swap_by_queue
    assert set(made.requests.hold_s) == {40.0}
    assert made.scaled.floor == {PLACE: Floor(cooldown_s=30.0)}
    tuning.change("FLOOR", False, "test")
    assert staged().scaled.floor is None
    tuning.change("SPILL_ABOVE", 0.4, "test", model=model)
    assert staged().cluster.policy(PLACE).region_threshold == 0.4
