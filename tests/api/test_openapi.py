"""The OpenAPI document, and the page that shows it."""

import re
from collections.abc import Iterator

import pytest
from django.urls import reverse
from pydantic import ValidationError

from controlplane.api.routers.accounts import KeyIn
from controlplane.api.routers.usage import PriceIn
from controlplane.api.urls import api
from controlplane.gateway.admission.validation import Kind
from controlplane.resources.alerts import SilenceIn
from controlplane.resources.inventory import MaintenanceIn
from controlplane.simulation.whatif.starts.begin import Begin


def test_every_operation_has_a_name_a_tag_and_the_common_error(client):
    schema = client.get("/api/openapi.json").json()
    names = []
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            names.append(operation["operationId"])
            assert operation["tags"], path
            assert operation["security"], path
            if path.startswith("/api"):
                error = operation["responses"]["default"]["content"]["application/json"]["schema"]
                assert error["$ref"].endswith("ErrorBody"), path
    assert len(names) == len(set(names))


@pytest.mark.parametrize("far", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_times_that_have_no_date_in_another_zone_are_refused(far, sign_in):
    """By each parameter of a list, and each field of a body."""
    caller, asked = sign_in("fleet_admin"), []
    for path, operations in api.get_openapi_schema()["paths"].items():
        for parameter in operations.get("get", {}).get("parameters", ()):
            if "date-time" in str(parameter["schema"]):
                answer = caller.get(path.removeprefix("/api/"), **{parameter["name"]: far})
                assert (answer.status_code, answer.json()["error"]["field"]) == (422, parameter["name"]), path
                asked.append(path)
    assert len(asked) > 10
    fields = [(KeyIn, "expires_at"), (PriceIn, "from_at"), (SilenceIn, "until"), (Begin, "since"), (Begin, "until"),
              (MaintenanceIn, "from_at"), (MaintenanceIn, "until")]  # fmt: skip
    for body, field in fields:
        with pytest.raises(ValidationError, match=rf"\n{field}\n.*give a time of the years"):
            body.model_validate({field: far})
    with pytest.raises(ValidationError, match=r"\nexpires_at\n.*should have timezone info"):
        KeyIn.model_validate({"expires_at": "2027-01-01T00:00:00"})


def floats(schema, path="") -> Iterator[str]:
    """Yield the fields of a schema of pydantic's core that take NaN, or a number without an end."""
    if isinstance(schema, dict):
        ends = any(each in schema for each in ("ge", "gt")) and any(each in schema for each in ("le", "lt"))
        if schema.get("type") == "float" and schema.get("allow_inf_nan", True) and not ends:
            yield path
        for name, part in schema.items():
            yield from floats(part, f"{path}.{name}") if name not in ("serialization", "metadata") else ()
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from floats(part, path)


def test_every_number_that_is_given_is_finite():
    """Rows of the inventory are checked as such, since forms and fleet files give them too; operations read theirs again."""
    models = [
        (path, model)
        for _, router in api._routers
        for path, view in router.path_operations.items()
        for operation in view.operations
        for model in operation.models
        if path != "/inventory" and "{action}" not in path
    ]
    assert len(models) > 50
    assert [path for name, model in models for path in floats(model.__pydantic_core_schema__, name)] == []


def test_a_search_is_as_long_as_on_pages(sign_in):
    caller = sign_in("fleet_admin")
    for name, length in (("events", 120), ("instances", 80), ("keys", 80)):
        assert [caller.get(name, q="a " * (each // 2)).status_code for each in (length, length + 2)] == [200, 422], name


def test_inference_calls_are_described_and_every_reference_leads_somewhere(client):
    answer = client.get("/api/openapi.json")
    schema = answer.json()
    assert {*(kind.path for kind in Kind), "/load"} <= set(schema["paths"])
    for reference in set(re.findall(r'"#/([^"]+)"', answer.content.decode())):
        place = schema
        for part in reference.split("/"):
            place = place[part]


def test_the_page_is_for_those_signed_in_and_loads_nothing_from_elsewhere(client, member):
    path = reverse("console:api-docs")
    assert client.get(path)["Location"].startswith(reverse("console:sign-in"))
    client.force_login(member)
    html = client.get(path).content.decode()
    assert 'data-document="/api/openapi.json"' in html
    loaded = re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="([^"]+)"', html)
    assert loaded
    assert all(address.startswith("/") for address in loaded)
    assert client.get("/api/nothing").json()["error"]["code"] == "not_found"
