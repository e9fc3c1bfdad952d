"""Lists of the admin: of every model sorted, searched and filtered, and as many queries for many rows as for one.

Pages of a row, and who may what: tests/access.
"""

import json

import pytest
from django.contrib import admin
from django.http import QueryDict
from django.urls import reverse

from controlplane.accounts.models import Tenant
from controlplane.applications.models import UnitBackend
from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.fleet.models import Adapter, Instance, Node, ScheduledMinimum, SwapGroup, WeightedTarget
from tests.accounts.test_admin import values_of
from tests.inventory import Inventory, standing_with

admin.autodiscover()
MODELS = sorted(admin.site._registry, key=lambda model: model._meta.label)
CHOICES = 3
"""Of each filter, the first so many are asked."""


def build(inventory: Inventory) -> None:
    """At least one row of every registered model."""
    inventory.make_instance()
    SwapGroup.objects.create(name="shared")
    record("test.happened", inventory.acme, actor=inventory.fleet_admin, reason=inventory.member.username)
    WeightedTarget.objects.create(name="chat", target="llama-3.1-8b")
    ScheduledMinimum.objects.create(
        name="office", model=inventory.deployment.model, instances=2, begins="08:00", ends="18:00"
    )
    Adapter.objects.create(name="llama-sql", base=inventory.deployment.model, source="acme/llama-sql")
    UnitBackend.objects.create(name="python:3.11", url="http://functions/warm", secret="s3cret")


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


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model._meta.model_name)
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
    for model, queries in ((Instance, 13), (Node, 9), (Tenant, 10)):
        with django_assert_max_num_queries(queries) as captured:
            as_admin.get(list_of(model))
        assert captured
