"""Requests drawn from the served OpenAPI document (schemathesis): no operation of `/api`, and none of files and batches,
has a server error."""

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import Client
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from controlplane.accounts.services import create_api_key
from controlplane.api.urls import api
from tests.access.expected import REST
from tests.access.test_every_address import filled, joined, standing

if TYPE_CHECKING:
    from schemathesis.generation import GenerationMode

__all__ = ["standing"]  # a fixture

BATCH_PATHS = ("/v1/files", "/v1/batches")
TENANT_PATHS = (*BATCH_PATHS, "/v1/runs")
DRAWN = settings(
    max_examples=4,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""Per operation, caller and mode: some 130 operations in two minutes."""


def operations() -> list:
    import schemathesis  # late: it takes as long as all else that is imported for these tests

    document = json.loads(json.dumps(api.get_openapi_schema(), default=str))
    every = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
    return [each for each in every if each.path.startswith(("/api", *TENANT_PATHS))]


def name_of(operation) -> str:
    return operation.definition.raw["operationId"]


def drawn(data, operation, mode: "GenerationMode", known: dict):
    """Return a request that the document allows, or one that breaks it; half of the time its path names rows that exist."""
    given_path = known if known and data.draw(st.booleans(), label="of known rows") else None
    return data.draw(operation.as_strategy(generation_mode=mode, path_parameters=given_path), label="request")


def send(client: Client, case) -> tuple[int, str]:
    """Send *case* and roll back what it wrote."""
    wire = case.as_transport_kwargs(base_url="http://testserver")
    body = wire.get("json", wire.get("data"))
    form = case.media_type == "multipart/form-data"
    content = {} if form else {"content_type": case.media_type or "application/json"}
    if form:
        from requests import Request

        prepared = Request("POST", "http://testserver/", data=wire.get("data"), files=wire.get("files")).prepare()
        body, content = prepared.body or b"", {"content_type": prepared.headers.get("Content-Type", "")}
    elif "json" in wire:
        body = json.dumps(body)
    elif not isinstance(body, (bytes, str)):
        body = b""
    with transaction.atomic():
        answer = client.generic(
            case.method,
            case.formatted_path,
            body,
            query_params={name: value for name, value in (case.query or {}).items() if value is not None},
            **content,
        )
        if not answer.streaming:
            text = answer.content
        elif answer.is_async:
            text = async_to_sync(joined)(answer.streaming_content)
        else:
            text = b"".join(answer.streaming_content)
        transaction.set_rollback(True)
    return answer.status_code, text.decode(errors="replace")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("role", ["fleet_admin", "key_manager"])
def test_no_request_to_an_operation_has_a_server_error(role, world, sign_in, acme, caplog, subtests):
    from schemathesis.generation import GenerationMode

    modes = st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    caplog.set_level(logging.ERROR, "django.request")
    _, secret = create_api_key(acme, "of the schema", "test")
    for operation in operations():
        if operation.path.startswith(TENANT_PATHS):
            client = Client(headers={"Authorization": f"Bearer {secret}"})
            batch = world.batches["acme"]
            known: dict[str, Any] = {"file_id": batch.input_file_id, "batch_id": batch.public_id, "run": world.run.run}
            known = {name: value for name, value in known.items() if f"{{{name}}}" in operation.path}
        else:
            client = sign_in(role)
            known = filled(REST[name_of(operation)], world)
        client.raise_request_exception = False

        with subtests.test(name_of(operation)):
            draw_requests(client, operation, modes, known, caplog)


def draw_requests(client: Client, operation, modes: st.SearchStrategy, known: dict, caplog) -> None:
    @DRAWN
    @given(data=st.data(), mode=modes)
    def has_none(data, mode):
        caplog.clear()
        status, text = send(client, drawn(data, operation, mode, known))
        logged = [record.getMessage() + "\n" + (record.exc_text or "") for record in caplog.records]
        if '"no_gateway"' not in text:  # no Redis stands behind these
            assert status < 500, (status, text[:500], logged)
            assert not logged

    has_none()


@pytest.mark.parametrize("path", BATCH_PATHS)
def test_a_limit_of_thousands_of_digits_is_refused(path, acme):
    _, secret = create_api_key(acme, "of the schema", "test")
    answer = Client(headers={"Authorization": f"Bearer {secret}"}).get(path, {"limit": "9" * 5000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


FORM, JSON = "application/x-www-form-urlencoded", "application/json"


@pytest.mark.parametrize(
    ("path", "body", "kind", "refused"),
    [
        ("/sign-in/?q=%00", b"", FORM, True),
        ("/keys/a%00/", b"", FORM, True),
        ("/sign-in/", b"username=a%00", FORM, True),
        ("/api/keys", rb'{"name": "\\\u0000"}', JSON, True),
        ("/v1/batches", rb'{"input_file_id": "\u0000"}', JSON, True),
        ("/v1/batches", rb'{"input_file_id": "\\u0000"}', JSON, False),
        *(("/v1/batches", rb'{"metadata": {%s}}' % pair, kind, True)
          for pair in (rb'"a": "\u0000"', rb'"\u0000": "a"') for kind in (JSON, FORM)),
        *((f"/v1/{path}", b"", JSON, True)
          for path in ("files?purpose=%00", "files?after=%00", "files/a%00", "files/a%00/content",
                       "batches?after=%00", "batches/a%00", "batches/a%00/cancel")),
        ("/sign-in/?q=%2500", b"username=a%2500", FORM, False),
    ],
)  # fmt: skip
def test_a_nul_is_refused_before_it_comes_to_a_database(client, db, path, body, kind, refused):
    answer = client.post(path, body, content_type=kind)
    assert (answer.status_code == 400 and b"U+0000" in answer.content) is refused
    assert not refused or not path.startswith(("/api", "/v1")) or answer.json()["error"]["code"] == "invalid_value"
