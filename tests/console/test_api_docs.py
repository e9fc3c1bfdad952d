"""`/api/docs`: every operation of the OpenAPI document and of `/v1`, without an outside address, for everybody signed in."""

import json
import re
from pathlib import Path

import pytest
from django.urls import reverse

from controlplane.console.pages.api_docs import inference
from controlplane.console.pages.api_docs.document import Document
from controlplane.console.templatetags.console import coded
from controlplane.gateway.admission.validation import Kind

OPENAPI = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text())
BASE = "https://fleet.example"


@pytest.fixture(scope="module")
def operations():
    sections = [*Document(inference.document("llama"), BASE).sections(), *Document(OPENAPI, BASE).sections()]
    return {operation.id: operation for section in sections for operation in section.operations}


def test_every_operation_is_there(client, member):
    client.force_login(member)  # a tenant's person, as anybody who is signed in
    answer = client.get(reverse("console:api-docs"))
    assert answer.status_code == 200
    html = answer.content.decode()
    named = {item["operationId"] for path in OPENAPI["paths"].values() for item in path.values()}
    assert named <= set(re.findall(r'<details class="operation" id="(\w+)"', html))
    for kind in Kind:
        assert f'<span class="id">/v1/{kind}</span>' in html
    loaded = re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="([^"]+)"', html)
    assert loaded
    assert all(address.startswith("/") for address in loaded)
    assert "style=" not in html
    assert not re.search(r"<script(?![^>]* src=)", html)
    assert answer["Content-Security-Policy"]


def test_visitors_sign_in_first_and_other_paths_stay_the_api_s(client, db):
    path = reverse("console:api-docs")
    assert path == "/api/docs"
    assert client.get(path)["Location"].startswith(reverse("console:sign-in"))
    assert client.get("/api/nothing").json()["error"]["code"] == "not_found"
    assert client.get("/api/openapi.json").json()["openapi"]


def test_fields_are_flat_and_say_their_type(operations):
    listed = operations["list_requests"]
    assert listed.who == "API key or session"
    limit = next(field for field in listed.parameters if field.name == "limit")
    assert (limit.place, limit.kind, limit.required) == ("query", "integer", False)
    assert limit.limits == "default 50, at least 1, at most 500"
    fields = {field.name: field for field in listed.answers[0].fields}
    assert fields["items[].queue_ms"].kind == "number or null"
    assert fields["items[].outcome"].kind.startswith('"done" | ')
    made = operations["create_key"]
    assert made.who == "session"
    assert {field.name for field in made.body if field.required} >= {"name"}
    inferred = operations["create_response"]
    assert {field.name for field in inferred.body if field.required} == {"model", "input"}
    assert {"X-SLO-Class", "X-Request-Id"} <= {field.name for field in inferred.parameters}
    assert {"400", "401", "429", "503"} <= {answer.status for answer in inferred.answers}


def test_a_curl_has_what_the_call_needs(operations):
    chat = operations["create_chat_completion"].curl
    assert f'curl -X POST "{BASE}/v1/chat/completions"' in chat
    assert 'Bearer $KEY"' in chat
    assert json.loads(re.search(r"-d '(.+)'", chat)[1])["model"] == "llama"
    made = operations["create_key"].curl
    assert "X-CSRFToken" in made
    assert "name" in json.loads(re.search(r"-d '(.+)'", made)[1])
    assert f'"{BASE}/api/instances/NAME"' in operations["get_instance"].curl


def test_code_is_marked_and_text_escaped():
    assert coded("a `b<i>` c") == "a <code>b&lt;i&gt;</code> c"
    assert coded("one ` alone <b>") == "one ` alone &lt;b&gt;"


def test_a_new_key_comes_with_a_call_that_works_as_it_stands(client, key_manager, acme, make_instance):
    instance = make_instance(state="ready")
    client.force_login(key_manager)
    page = client.get(reverse("console:keys")).content.decode()
    assert re.search(r'name="name"[^>]* value="[^"]+, \d+ \w{3} \d{4}"', page)  # only a click is left
    made = client.post(reverse("console:keys"), {"name": "first", "tenant": acme.pk})
    html = client.get(made["Location"]).content.decode()
    secret = re.search(r"ph_[\w-]{43}", html)[0]
    curl, python = (re.search(rf'<pre id="{name}"[^>]*>(.*?)</pre>', html, re.DOTALL)[1] for name in ("curl", "python"))
    for snippet in (curl, python):
        assert secret in snippet
        assert "http://testserver/v1" in snippet
        assert instance.deployment.model.name in snippet
        assert acme.default_slo_class.name in snippet
    again = client.get(made["Location"]).content.decode()
    assert secret not in again
    assert "<pre" not in again
