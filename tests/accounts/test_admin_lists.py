"""Lists of the admin: of every model sorted, searched and filtered, and as many queries for many rows as for one.

Pages of a row, and who may what: tests/access.
"""

import json

import pytest
from django.contrib import admin
from django.http import QueryDict
from django.urls import reverse

from controlplane.accounts import services
from controlplane.accounts.models import ApiKey, Budget, Tenant
from controlplane.alerts.models import Alert, AlertRule
from controlplane.applications.models import UnitBackend
from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.fleet.models import (
    Adapter,
    CommandVerb,
    Instance,
    InstanceCommand,
    Node,
    Rollout,
    ScheduledMinimum,
    Swap,
    SwapGroup,
    Tier,
    WeightedTarget,
)
from controlplane.gateway.models import LedgerRow, MinuteRow, Outcome
from controlplane.lengths.models import LengthMinute, LengthSample, LengthVersion
from controlplane.planning.models import (
    Forecast,
    ScalingMove,
    ScalingPlan,
    ScalingPolicy,
)
from controlplane.resources.admin import KindAdmin
from controlplane.tuning.models import Setting
from controlplane.usage.models import InstanceHour, UsageHour
from tests.accounts.test_admin import values_of
from tests.inventory import Inventory, standing_with
from tests.simulation.whatif import rows as what_if_rows

admin.autodiscover()
MODELS = sorted(admin.site._registry, key=lambda model: model._meta.label)
KINDS = [model for model in MODELS if isinstance(admin.site.get_model_admin(model), KindAdmin)]
CHOICES = 3
"""Of each filter, the first so many are asked."""


def build(inventory: Inventory) -> None:
    """At least one row of every registered model."""
    now = inventory.now
    instance = inventory.make_instance()
    InstanceCommand.objects.create(instance=instance, verb=CommandVerb.STOP, actor="test")
    Rollout.objects.create(deployment=inventory.deployment, actor="test")
    Budget.objects.create(tenant=inventory.acme, kind="usd_per_month", hard=400)
    rule = AlertRule.objects.create(name="Instance down", condition="instance")
    Alert.objects.create(rule=rule, subject=instance.name, since=now, opened_at=now, seen_at=now)
    group = SwapGroup.objects.create(name="shared")
    Swap.objects.create(group=group, instance=instance, tier=Tier.CPU, actor="test")
    key, _ = services.create_api_key(inventory.acme, "laptop", inventory.fleet_admin)
    services.create_sign_in_link(inventory.member)
    record("test.happened", inventory.acme, actor=inventory.fleet_admin, reason="because " * 20)
    LedgerRow.objects.create(
        request_id="r1",
        arrived_at=now,
        tenant=inventory.acme,
        api_key=key,
        model="llama-3.1-8b",
        slo_class="interactive",
        streamed=True,
        outcome=Outcome.DONE,
        status_code=200,
    )
    MinuteRow.objects.create(minute=now, model="llama-3.1-8b", region="us-east", slo_class="interactive")
    WeightedTarget.objects.create(name="chat", target="llama-3.1-8b")
    ScheduledMinimum.objects.create(
        name="office", model=inventory.deployment.model, instances=2, begins="08:00", ends="18:00"
    )
    Adapter.objects.create(name="llama-sql", base=inventory.deployment.model, source="acme/llama-sql")
    UnitBackend.objects.create(name="python:3.11", url="http://functions/warm", secret="s3cret")
    place = {"model": "llama-3.1-8b", "region": "us-east"}
    Forecast.objects.create(**place, quantity="prompt", forecaster="blend", window_s=60, start_at=now)
    ScalingPolicy.objects.create(model=inventory.deployment.model)
    plan = ScalingPlan.objects.create(model=inventory.deployment.model, strategy="lt_ua", valid_until=now)
    ScalingMove.objects.create(
        **place, plan=plan, source="plan", strategy="lt_ua", gpu_type="h100", delta=1, reason="more is asked for"
    )
    of = {"model": "llama-3.1-8b", "output_tokens": 40, "predicted_tokens": 50}
    what_if_rows.furnish("as it could be", "because", now)
    UsageHour.objects.create(
        hour=now, tenant=inventory.acme, api_key=key, model="llama-3.1-8b", slo_class="interactive"
    )
    InstanceHour.objects.create(hour=now, instance="instance-1", model="llama-3.1-8b", gpu_type="a100-80gb")
    Setting.objects.create(name="PLAN_EPSILON", value=0.7, changed_by="test")
    LengthVersion.objects.create(number=1, kind="trees", measures={"mae": 61.2})
    LengthSample.objects.create(
        **of, tenant=inventory.acme, slo_class="interactive", prompt_tokens=9, predicted_by="prior"
    )
    LengthMinute.objects.create(**of, minute=now, tenant="acme", predictor="prior", requests=1)


standing = standing_with(build)


def list_of(model) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model._meta.model_name)
@pytest.mark.sql
def test_every_list_is_sorted_by_each_column_searched_and_filtered(model, as_admin, no_sidebar):
    assert model._default_manager.exists()
    columns = range(1, len(admin.site.get_model_admin(model).list_display) + 1)
    page = as_admin.get(list_of(model), {"q": "a", "o": ".".join(map(str, columns))})
    assert page.status_code == 200
    shown = page.context["cl"]
    choices = [list(spec.choices(shown)) for spec in shown.filter_specs]
    for number in range(1, CHOICES):  # the first of each is no filter
        query = QueryDict(mutable=True)
        for of in choices:
            if number < len(of) and "query_string" in of[number]:
                chosen = QueryDict(of[number]["query_string"].removeprefix("?"))
                query.update({name: value for name, value in chosen.items() if name not in ("q", "o")})
        if query:
            assert as_admin.get(list_of(model), query.dict()).status_code == 200, query.urlencode()


@pytest.mark.parametrize("model", KINDS, ids=lambda model: model._meta.model_name)
def test_a_form_of_a_kind_saved_as_it_is_writes_nothing(model, as_admin, no_sidebar):
    row = model._default_manager.first()
    url = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_change", args=[row.pk])
    page = as_admin.get(url)
    values = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in values_of(page).items()}
    newest = Event.objects.latest("pk")
    assert set(values) <= set(admin.site.get_model_admin(model).kind.fields)
    answer = as_admin.post(url, values)
    assert answer.status_code == 302, answer.context["errors"]
    assert Event.objects.latest("pk") == newest


def test_lists_of_the_longest_tables_do_not_grow_in_queries(as_admin, make_instance, django_assert_max_num_queries):
    """As many queries for many rows as for one."""
    for _ in range(20):
        make_instance()
    for model, queries in ((Instance, 13), (Node, 9), (Event, 9), (LedgerRow, 12), (ApiKey, 10), (Tenant, 10)):
        with django_assert_max_num_queries(queries) as captured:
            as_admin.get(list_of(model))
        assert captured
