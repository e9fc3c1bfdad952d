"""Policy bundles: which one a model has, what switching writes, and that a running gateway follows it."""

import pytest
from channels.db import database_sync_to_async
from django.core.exceptions import ValidationError

from controlplane.events.models import Event
from controlplane.fleet.models import Deployment, Model
from controlplane.planning import bundles, parts, services
from controlplane.planning.execution import strategies
from controlplane.planning.models import PlanStatus, ScalingPlan, ScalingPolicy
from controlplane.tunable import Tunable
from controlplane.tuning.models import Setting
from controlplane.tuning.selectors import tuned
from forecasting.workload import FORECASTERS
from scheduling.bundles import BUNDLES
from tests.gateway.conftest import gateway_options, served, until  # noqa: F401 (fixtures)


@pytest.mark.parametrize("bundle", BUNDLES.values(), ids=BUNDLES)
def test_every_value_of_a_bundle_is_one_that_there_is(bundle):
    strategies.make(bundle.strategy, bundle.parameters, Tunable())
    assert bundle.forecaster in FORECASTERS


@pytest.mark.django_db
class TestSwitching:
    def test_a_model_has_the_bundle_whose_values_it_has(self, deployment, operator):
        model = deployment.model
        before = bundles.present(model)
        assert (before.name, before.title) == ("custom", "Custom")
        for name, bundle in BUNDLES.items():
            made = services.switch_bundle(model, name, operator)
            assert (made.name, made.title, made.differences(bundle)) == (name, bundle.title, [])
        Deployment.objects.update(routing_policy="round_robin")
        custom = bundles.present(Model.objects.get())
        assert (custom.name, custom.nearest.name) == ("custom", "pilothouse")
        (differs,) = custom.differences(custom.nearest)
        assert (differs.what, differs.present, differs.bundled) == ("routing_policy", "round_robin", "least_delay")

    def test_switching_is_one_event_with_before_and_after(self, deployment, operator):
        services.switch_bundle(deployment.model, "preserve", operator)
        services.switch_bundle(deployment.model, "ssjf", operator, "short ones first")
        services.switch_bundle(deployment.model, "ssjf", operator, "once more")
        event = Event.objects.latest("pk")
        assert Event.objects.count() == 2
        assert (event.kind, event.subject, event.reason) == (
            "model.bundle_switched", "llama-3.1-8b", "short ones first",
        )  # fmt: skip
        assert event.before == {
            "bundle": "preserve", "routing_policy": "preserve", "ordering_policy": "fcfs", "strategy": "preserve",
            "FORECASTER": "mlstm",
        }  # fmt: skip
        assert event.after == {
            "bundle": "ssjf", "routing_policy": "join_shortest_queue", "ordering_policy": "ssjf",
            "strategy": "reactive", "FORECASTER": "blend",
        }  # fmt: skip

    def test_rows_settings_and_plans_follow(self, deployment, operator):
        model = deployment.model
        policy = services.set_policy(model, "lt_ua", "auto", {"gap_out": 4}, "test")
        plan = ScalingPlan.objects.create(
            model=model, strategy="lt_ua", valid_until=policy.changed_at, status="in_force"
        )
        services.switch_bundle(model, "preserve", operator)
        policy.refresh_from_db()
        assert (policy.strategy, policy.mode, policy.parameters) == ("preserve", "auto", {})
        plan.refresh_from_db()
        assert plan.status == PlanStatus.SUPERSEDED
        assert tuned(model.name).FORECASTER == "mlstm"
        assert tuned().FORECASTER == ""

    def test_one_that_there_is_not_changes_nothing(self, deployment, operator):
        with pytest.raises(ValidationError, match=r"no bundle 'best'; there are sageserve-lt-ua"):
            services.switch_bundle(deployment.model, "best", operator)
        assert not Event.objects.exists()

    def test_what_fails_half_way_leaves_all_as_it_was(self, deployment, operator, monkeypatch):
        def broken(*_):
            raise RuntimeError

        monkeypatch.setattr(services.settings, "put", broken)
        with pytest.raises(RuntimeError):
            services.switch_bundle(deployment.model, "preserve", operator)
        assert not ScalingPolicy.objects.exists()
        assert not Setting.objects.exists()
        assert Deployment.objects.get().routing_policy == "join_shortest_queue"


@pytest.mark.asyncio
async def test_the_next_decisions_of_a_running_gateway_follow(served):  # noqa: F811
    assert (await served.chat()).status == 200
    model = await database_sync_to_async(Model.objects.get)(name="m")
    await database_sync_to_async(services.switch_bundle)(model, "pilothouse", "test")
    (endpoint,) = served.gateway.dispatching.topology.endpoints
    served.gateway.dispatching.refresh_now()
    await until(lambda: endpoint.spec.policy.routing == "least_delay")
    assert (await served.chat()).status == 200
    first, second = [row.trace[-1] for row in await served.rows()]
    assert (first["policy"], first["ordering"]) != ("least_delay", "ssjf")
    assert (second["policy"], second["ordering"]) == ("least_delay", "ssjf")


@pytest.mark.django_db
def test_every_choice_of_a_part_has_a_sentence():
    for part in parts.PARTS:
        choices = part.choices()
        assert all(choice.title and choice.about.endswith(".") for choice in choices)
        for bundle in BUNDLES.values():
            assert bundles.values_of(bundle)[part.name] in {choice.value for choice in choices}


@pytest.mark.django_db
class TestParts:
    def test_a_new_strategy_has_its_own_parameters_and_no_old_plans(self, deployment, operator):
        model = deployment.model
        policy = services.set_policy(model, "lt_ua", "auto", {"gap_out": 4}, "test")
        plan = ScalingPlan.objects.create(
            model=model, strategy="lt_ua", valid_until=policy.changed_at, status="in_force"
        )
        services.switch_parts(model, {"strategy": "reactive", "FORECASTER": "arima"}, operator, "less to explain")
        policy.refresh_from_db()
        plan.refresh_from_db()
        assert (policy.strategy, policy.mode, policy.parameters) == ("reactive", "auto", {})
        assert (plan.status, tuned(model.name).FORECASTER) == (PlanStatus.SUPERSEDED, "arima")
        event = Event.objects.latest("pk")
        assert (event.kind, event.reason) == ("model.parts_switched", "less to explain")
        assert event.before == {"strategy": "lt_ua", "FORECASTER": "", "parameters": {"gap_out": 4}}

    @pytest.mark.parametrize("name", ["routing_policy", "strategy", "FORECASTER", "colour"])
    def test_what_there_is_not_names_the_part_and_changes_nothing(self, deployment, operator, name):
        with pytest.raises(ValidationError) as refused:
            services.switch_parts(deployment.model, {"routing_policy": "preserve", name: "best"}, operator)
        assert list(refused.value.message_dict) == [name]
        assert not Event.objects.exists()
        assert Deployment.objects.get().routing_policy == "join_shortest_queue"

    def test_the_same_again_is_no_event(self, deployment, operator):
        services.switch_parts(deployment.model, {"ordering_policy": "priority"}, operator)
        assert not Event.objects.exists()


def test_the_page_names_everything_that_a_bundle_sets():
    assert set(bundles.SET) <= bundles.WORDS.keys()
