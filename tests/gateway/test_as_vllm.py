"""The gateway is as `docs/tenants/as-vllm.md` says: each route and field of vLLM is served as by vLLM, or otherwise."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from controlplane.gateway.admission.forms import read_form
from controlplane.gateway.admission.validation import SPEECH, Call, Kind
from controlplane.gateway.errors import ApiError
from controlplane.gateway.upstream.bodies import payload
from tests.docs import as_vllm
from tests.gateway.test_speech import form

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[Kind, dict[str, Any]] = {
    Kind.CHAT_BATCH: {"messages": [HELLO]},
    Kind.COMPLETION: {"prompt": "hi"},
    Kind.RESPONSE: {"input": "hi"},
    Kind.MESSAGE: {"messages": HELLO, "max_tokens": 9},
    Kind.SCORE: {"queries": "a", "documents": "b"},
    Kind.RERANK: {"query": "a", "documents": ["b"]},
    Kind.DETOKENIZE: {"tokens": [1]},
    Kind.CHAT: {"messages": HELLO},
}
ALONE = {"texts", "images", "inputs", "prompt", "messages", "input", "data"}
"""Fields of which a body has one."""


def sent(kind: Kind, name: str, value: Any) -> Any:
    """Return the fields that an instance gets of a call with the field *name*, or the error that refuses it."""
    if kind in SPEECH:
        raw, content_type = form(
            model="m", file=b"x", **({name: json.dumps(value)} if name not in ("model", "file") else {})
        )
        call = Call.read(raw, kind, max_depth=9, content_type=content_type)
        got = read_form(b"".join(payload(call, 7777)), content_type).fields
        return {field: json.loads(said) if field == name != "model" else said for field, said in got.items()} | {
            "file": value
        }
    body = (
        {"model": "m"}
        | BODIES.get(kind, {})
        | ({"input": "hi"} if kind in (Kind.EMBEDDING, Kind.POOLING, Kind.CLASSIFY) else {})
    )
    if name in ALONE and kind is not Kind.RESPONSE:
        body = {field: said for field, said in body.items() if field not in ALONE}
    elif kind is Kind.COHERE_EMBED:
        body["texts"] = ["a"]
    try:
        call = Call.read(json.dumps(body | {name: value}).encode(), kind, max_depth=32)
    except ApiError as error:
        return error
    return json.loads(b"".join(payload(call, 7777)))


@pytest.mark.parametrize(("route", "kind"), as_vllm.calls())
def test_each_field_reaches_the_instance_as_it_was_sent_or_is_said_to_differ(route, kind):
    other = as_vllm.differing(kind)
    wrong = []
    for name, value in as_vllm.SURFACE[route].items():
        given = [[{"role": "user", "content": "hi"}]] if (kind, name) == (Kind.CHAT_BATCH, "messages") else value
        outcome = sent(kind, name, given)
        if name in other:
            if not other[name].check(outcome):
                wrong.append((name, given, outcome))
        elif name != "model" and (isinstance(outcome, ApiError) or outcome.get(name) != given):
            wrong.append((name, given, getattr(outcome, "message", outcome)))
    assert wrong == []


def test_each_route_of_vllm_is_in_one_column():
    asked = {route for route, _ in as_vllm.calls()}
    columns = (asked, as_vllm.SERVED.keys(), as_vllm.NOT_SERVED.keys())
    for route in as_vllm.SURFACE:
        assert sum(route in column for column in columns) == 1, route
    assert set().union(*columns) == set(as_vllm.SURFACE)
    assert not as_vllm.ONLY_HERE.keys() & as_vllm.SURFACE.keys()
    assert {field.name for field in as_vllm.FIELDS} <= {name for fields in as_vllm.SURFACE.values() for name in fields}


async def test_each_route_is_answered_as_its_column_says(served):
    said = {}
    for route in [*as_vllm.SURFACE, *as_vllm.ONLY_HERE]:
        method, path = route.split()
        if method == "WEBSOCKET":
            continue
        url = served.url + re.sub(r"\{model\}", "m", re.sub(r"\{\w+_id\}", "r", path))
        async with served.http.request(
            method, url, json={} if method == "POST" else None, headers=served.headers
        ) as answer:
            text = await answer.text()
        error = json.loads(text)["error"] if answer.status >= 400 and answer.content_type == "application/json" else {}
        missing = answer.status == 405 or error.get("code") in ("unknown_url", "unsupported_endpoint")
        said[route] = not missing and (answer.status != 404 or bool(error))
    assert {route for route, here in said.items() if not here} == {
        route for route in as_vllm.NOT_SERVED if not route.startswith("WEBSOCKET")
    }


def test_what_is_said_of_behaviour_is_shown_by_a_test():
    names = set(
        re.findall(r"def (test_\w+)", "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py")))
    )
    for behaviour in as_vllm.BEHAVIOURS:
        assert set(behaviour.tests) <= names, behaviour.here
        assert behaviour.tests
