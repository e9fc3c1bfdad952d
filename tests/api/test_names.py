"""Names with a slash, as nearly each repository of Hugging Face has one, in every path of the API that has a name."""

import json
import re
from urllib.parse import quote

import pytest
from django.core.exceptions import ValidationError

from controlplane.api.urls import api
from controlplane.fleet.models import Model
from controlplane.fleet.validators import ACTIONS, validate_model_name

pytestmark = pytest.mark.django_db

NAME = "meta-llama/Llama-3.1-8B-Instruct"
PATHS = {
    (operation.methods[0], path)
    for _, router in api._routers
    for path, view in router.path_operations.items()
    for operation in view.operations
    if operation.include_in_schema
}
SIZES = {"weights_bytes": 2**34, "kv_bytes_per_token": 2**17}
MAY_HAVE_SLASHES = ("/models/", "/inventory/{kind}/", "/scaling/policies/")


@pytest.fixture(params=["/", "%2F"])
def path(request):
    def written(template, name):
        return "/api" + template.replace("NAME", quote(name, safe="/" if request.param == "/" else ""))

    return written


@pytest.fixture
def caller(client, fleet_admin):
    client.force_login(fleet_admin)

    def call(method, address, **body):
        return client.generic(method, address, content_type="application/json", data=json.dumps(body))

    return call


def test_every_path_with_such_a_name_takes_slashes():
    """One converter everywhere: a new path without it fails here."""
    of_names = {(method, path) for method, path in PATHS if path.startswith(MAY_HAVE_SLASHES) and "{" in path}
    assert len(of_names) >= 3
    assert [path for _, path in of_names if "{name:" not in path] == []


def test_a_model_is_changed_retired_and_deleted(caller, path, language_model):
    made = caller("PATCH", "/api/inventory", models=[{"name": NAME, "context_tokens": 8192, **SIZES}])
    assert made.status_code == 200, made.content
    policy = caller("PATCH", path("/scaling/policies/NAME", NAME), strategy="lt_u", mode="shadow")
    assert (policy.status_code, policy.json()["model"]) == (200, NAME), policy.content
    assert caller("POST", path("/models/NAME/retire", NAME), reason="gone").status_code == 200
    assert not Model.objects.get(name=NAME).active
    gone = [caller("DELETE", path("/inventory/models/NAME", NAME)).status_code for _ in range(2)]
    assert gone == [204, 404]


@pytest.mark.parametrize("action", ACTIONS)
def test_no_name_ends_in_an_action(action):
    with pytest.raises(ValidationError, match="does not end in"):
        validate_model_name(f"team/{action}")
    for name in (action, f"team/{action}d", f"{action}/team"):
        validate_model_name(name)


def test_actions_are_those_that_follow_a_name():
    assert {match[1] for _, path in PATHS if (match := re.fullmatch(r"/models/\{name:\w+\}/(\w+)", path))} == set(
        ACTIONS
    )
