"""A bad value of any setting, from any source: refused with the setting's name, or, in a row, ignored with one event."""

from typing import Literal, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from channels.db import database_sync_to_async
from django.core.exceptions import ImproperlyConfigured, ValidationError
from pydantic import AfterValidator

from controlplane import env
from controlplane.events.models import Event
from controlplane.tunable import Tunable
from controlplane.tuning import selectors, services
from controlplane.tuning.models import Setting
from tests.gateway.conftest import gateway_options, served  # noqa: F401 (fixtures)

TEXTS = {"TENANT_WEIGHTS": ["acme=x", "acme=0", "=2"], "FORECASTER": ["crystal ball"], "LENGTH_ENCODER": [""]}


def bad_values(name):
    """Return values that the setting *name* must not have: another kind, beyond each limit, and beyond all use."""
    field = Tunable.model_fields[name]
    if get_origin(field.annotation) is Literal:
        return ["no such choice"]
    if field.annotation is str:
        return TEXTS[name]
    if field.annotation is bool:
        return ["perhaps"]
    beyond = {Ge: lambda limit: limit.ge - 1, Gt: lambda limit: limit.gt, Le: lambda limit: limit.le + 1}
    beyond[Lt] = lambda limit: limit.lt
    useless = [10**12] if any(isinstance(each, AfterValidator) for each in field.metadata) else []
    return ["much", "nan", *useless, *(beyond[type(each)](each) for each in field.metadata if type(each) in beyond)]


CASES = [(name, value) for name in Tunable.model_fields for value in bad_values(name)]


@pytest.mark.parametrize(("name", "value"), [case for case in CASES if case[1] != ""])
def test_environment(monkeypatch, name, value):
    monkeypatch.setenv(variable := f"{env.PREFIX}{name}", str(value))
    with pytest.raises(ImproperlyConfigured, match=f"(?m)^{variable} is "):
        env.read()


@pytest.mark.django_db
def test_rest_and_form(operator, client):
    client.force_login(operator)
    for name, value in CASES:
        answer = client.put(f"/api/settings/{name}", {"value": value}, content_type="application/json")
        assert answer.status_code == 422, (name, value)
        assert answer.json()["error"]["message"].startswith(f"{name} cannot be {value!r}"), (name, value)
        with pytest.raises(ValidationError, match=f"{name} cannot be"):
            services.change(name, str(value), "test")  # as a form sends it
    assert not Setting.objects.exists()
    assert not Event.objects.exists()


@pytest.mark.django_db
def test_rows():
    for name, value in CASES:
        row = Setting.objects.create(name=name, value=value)
        assert selectors.read().of() == selectors.Values().of(), (name, value)
        for _ in range(2):
            services.report_ignored(selectors.read())
        event = Event.objects.get(subject=name, before={name: value})
        assert event.kind == "setting.ignored"
        assert event.after == {name: getattr(Tunable(), name)}
        row.delete()


@pytest.mark.asyncio
async def test_requests_are_answered_with_the_default(served):  # noqa: F811
    gateway = served.gateway
    await database_sync_to_async(Setting.objects.create)(name="TENANT_WEIGHTS", value="acme=x")
    for _ in range(2):
        await gateway.dispatching.read_inventory()
    assert gateway.dispatching.topology.tuned.TENANT_WEIGHTS == ""
    assert (await served.chat()).status == 200
    event = await Event.objects.aget(kind="setting.ignored")
    assert event.reason == "'acme=x' cannot be: 'acme=x' is not name=weight."
