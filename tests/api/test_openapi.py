"""The OpenAPI document, and the page that shows it."""

import re

from django.urls import reverse

from controlplane.gateway.admission.validation import Kind


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
