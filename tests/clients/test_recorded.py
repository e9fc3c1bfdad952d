"""Requests as Claude Code and Codex send them, in `recorded/`: the gateway's answers are those of the instance alone.

Neither runs here: what they send after a tool has run depends on what a real model says.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import ADDRESSED, GATEWAY, INSTANCE, address_of

RECORDED = Path(__file__).with_name("recorded")
DRAWN = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "permission"}
"""Fields that differ between any two answers."""


def comparable(said: Any) -> Any:
    if isinstance(said, dict):
        return {name: comparable(value) for name, value in said.items() if name not in DRAWN}
    return [comparable(each) for each in said] if isinstance(said, list) else said


def events_of(stream: str) -> list[tuple[str, Any]]:
    """Return (name, data) of the events of *stream*, without comments."""
    events = []
    for part in stream.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.splitlines() if not line.startswith(":"))
        if fields:
            data = fields["data"]
            events.append((fields.get("event", ""), data if data == "[DONE]" else comparable(json.loads(data))))
    return events


async def answer_to(served, at: str, request: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
    """Return status and content of the answer to a recorded *request*."""
    url, method = f"{address_of(served, at)}{request['path']}", request.get("method", "POST")
    async with served.http.request(method, url, json=request.get("body"), headers=headers | served.headers) as answer:
        if answer.content_type == "text/event-stream":
            return answer.status, events_of(await answer.text())
        return answer.status, await answer.json()


@pytest.mark.parametrize("client", ["claude_code", "codex"])
async def test_recorded_sessions(served, client, subtests):
    """C11, C23."""
    recorded = json.loads((RECORDED / f"{client}.json").read_text())
    for request in recorded["requests"]:
        with subtests.test(request=request["name"]):
            answers = {at: await answer_to(served, at, request, recorded["headers"]) for at in ADDRESSED}
            assert answers[GATEWAY][0] == 200
            if request["name"] == "models":
                assert "m" in [model["id"] for model in answers[GATEWAY][1]["data"]]
            else:
                assert comparable(answers[GATEWAY][1]) == comparable(answers[INSTANCE][1])
    calls = len([request for request in recorded["requests"] if "body" in request])
    assert [row.outcome for row in await served.rows()] == ["done"] * calls
