"""Marks of requests: what names the application, the run and the unit."""

import orjson
import pytest
from channels.db import database_sync_to_async
from django.utils import timezone

from controlplane.applications.models import ApplicationRun
from controlplane.applications.services import follow_runs
from controlplane.gateway.admission import marks as module
from controlplane.gateway.admission.marks import Marks, Sessions, marks_of
from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.errors import ApiError
from controlplane.gateway.serving.http import HttpRequest

USER = "user_ab12_account_f3d1-22_session_9f4c2a3e-1111-4222-8333-444455556666"
UUID = "0199a213-81a0-7800-8aa1-bbab2a035a53"


def marks(headers=None, **body):
    scope = {"method": "POST", "path": "/v1/chat/completions", "headers": []}
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    return marks_of(HttpRequest.of(scope, None), body)


OURS = {"X-Application": "review", "X-Run": "one", "X-Unit": "write", "X-Run-Deadline": "90"}
METADATA = {"application": "audit", "run": "two", "unit": "read", "run_deadline_s": "60"}


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {}, Marks()),
        (OURS, {}, Marks("review", "one", "write", 90.0)),
        ({}, {"metadata": METADATA}, Marks("audit", "two", "read", 60.0)),
        (OURS, {"metadata": METADATA}, Marks("review", "one", "write", 90.0)),
        ({"X-Unit": "write"}, {"metadata": METADATA}, Marks("audit", "two", "write", 60.0)),
        ({}, {"metadata": METADATA | {"run_deadline_s": 5}}, Marks("audit", "two", "read", 5.0)),
        ({}, {"metadata": {"run": "has spaces", "application": "x" * 81, "run_deadline_s": "soon"}}, Marks()),
        ({}, {"metadata": ["run"]}, Marks()),
        ({}, {"metadata": {"run": 7, "run_deadline_s": True}}, Marks()),
        ({"X-Claude-Code-Session-Id": UUID}, {}, Marks("claude-code", UUID, session=True)),
        (
            {"X-Claude-Code-Session-Id": UUID, "X-Claude-Code-Agent-Id": "a1"},
            {},
            Marks("claude-code", UUID, "subagent", session=True),
        ),
        ({"session-id": UUID}, {}, Marks("codex", UUID, session=True)),
        ({"session_id": UUID}, {"prompt_cache_key": "other"}, Marks("codex", UUID, session=True)),
        ({"x-opencode-session": "ses_1"}, {}, Marks("opencode", "ses_1", session=True)),
        (
            {"x-session-affinity": "ses_2", "X-Parent-Session-Id": "ses_1"},
            {},
            Marks("", "ses_2", "subagent", parent="ses_1", session=True),
        ),
        (
            {"X-Dynamo-Session-ID": "d-2", "X-Dynamo-Parent-Session-ID": "d-1"},
            {},
            Marks("", "d-2", "subagent", parent="d-1", session=True),
        ),
        ({"X-Session-Id": "s"}, {}, Marks("", "s", session=True)),
        ({}, {"nvext": {"session_control": {"session_id": "n-1", "action": "bind"}}}, Marks("", "n-1", session=True)),
        ({}, {"metadata": {"user_id": USER}}, Marks("claude-code", USER[-36:], session=True)),
        ({}, {"metadata": {"user_id": "user-7"}}, Marks()),
        ({}, {"prompt_cache_key": UUID}, Marks("", UUID, session=True)),
        ({}, {"prompt_cache_key": "summaries"}, Marks()),  # the key of a prompt
        ({"X-Session-Id": "bad one"}, {"prompt_cache_key": UUID}, Marks("", UUID, session=True)),
        ({"X-Run": "one", "X-Session-Id": "s"}, {}, Marks("", "one")),
        ({"X-Application": "review", "X-Session-Id": "s"}, {}, Marks("review", "s", session=True)),
    ],
)  # fmt: skip
def test_what_marks_a_request(headers, body, expected):
    assert marks(headers, **body) == expected


@pytest.mark.parametrize("header", OURS)
@pytest.mark.parametrize("value", ["~ab", "a b", "x" * 81])
def test_a_wrong_header_of_ours_is_refused(header, value):
    with pytest.raises(ApiError) as refused:
        marks({header: value})
    assert (refused.value.status, refused.value.param) == (400, header)


USER_SAYS = {"role": "user", "content": "Is it windy in Oslo?"}
SYSTEM = {"role": "system", "content": "You tell the weather. Today is 27 Nov 2026."}
ANSWER = {"role": "assistant", "content": "It is."}
CALLS_TOOL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "Windy."}


def call(*messages, **body):
    raw = orjson.dumps({"model": "m", "messages": messages} | body)
    return Call.read(raw, Kind.CHAT, max_depth=64)


@pytest.mark.parametrize(
    ("given", "messages", "expected"),
    [
        pytest.param(Marks(), (SYSTEM, USER_SAYS, ANSWER, USER_SAYS), Marks(), id="unmarked-is-no-run"),
        pytest.param(Marks("audit"), (USER_SAYS,), Marks("audit"), id="an-application-alone"),
        pytest.param(Marks("review", "one"), (USER_SAYS,), Marks("review", "one"), id="a-marked-run"),
        pytest.param(
            Marks(run="s", session=True), (SYSTEM, USER_SAYS), Marks("sessions", "s", "after-user", session=True),
            id="a-session-of-an-unknown-agent",
        ),
        pytest.param(
            Marks("codex", "s", session=True), (USER_SAYS, CALLS_TOOL, RESULT),
            Marks("codex", "s", "after-tool", session=True), id="after-a-tool",
        ),
    ],
)  # fmt: skip
def test_sessions_get_an_application_and_units(given, messages, expected):
    assert Sessions().complete(given, call(*messages), "acme") == expected


def test_a_session_joins_the_one_that_began_it(monkeypatch):
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    sessions = Sessions()

    def run_of(run, parent, caller="acme"):
        child = Marks("opencode", run, "subagent", parent=parent, session=True)
        return sessions.complete(child, call(USER_SAYS), caller).run

    assert (run_of("child", "root"), run_of("grandchild", "child")) == ("root", "root")
    assert run_of("other", "child", "globex") == "child", "a key knows its own sessions alone"
    assert run_of("later", "grandchild") == "root"
    assert len(sessions._roots) == 2


@pytest.mark.asyncio
async def test_the_ledger_has_marks(served):
    await served.chat(metadata={"application": "audit", "run": "two", "unit": "read", "run_deadline_s": "60"})
    await served.chat(headers={"session-id": UUID})
    await served.chat(messages=[SYSTEM, USER_SAYS, CALLS_TOOL, RESULT])
    rows = await served.rows()
    assert [(row.application, row.run, row.unit, row.run_due_s) for row in rows] == [
        ("audit", "two", "read", 60.0),
        ("codex", UUID, "after-user", rows[1].run_due_s),
        ("", "", "", None),
    ]

    def followed():
        follow_runs(timezone.now())
        return {run.application.name: run.calls for run in ApplicationRun.objects.select_related("application")}

    assert await database_sync_to_async(followed)() == {"audit": 1, "codex": 1}


@pytest.mark.asyncio
async def test_reports_reach_the_dispatcher(served):
    async def post(path, **body):
        url = f"{served.url}/v1/runs{path}"
        async with served.http.post(url, json={"application": "review"} | body, headers=served.headers) as answer:
            return answer.status, await answer.json()

    standings = served.gateway.dispatching.dispatcher.runs.standings
    status, opened = await post("", run="one", deadline_s=90)
    assert (status, opened["state"], opened["deadline_s"]) == (200, "running", 90.0)
    await served.chat(headers={"X-Application": "review", "X-Run": "one", "X-Unit": "write"})
    (run,) = [each for each in standings.runs.values() if each.name == "one"]
    assert run.due_s - run.began_s == pytest.approx(90, abs=1)
    had_s = run.attained_s()
    status, began = await post("/one/units", id="t1", unit="tests", kind="container", state="running")
    assert (status, began.get("state"), len(run.calls)) == (200, "running", 1), began
    status, ended = await post("/one/units", id="t1", unit="tests", kind="container", duration_s=7.5)
    assert (status, ended["state"], ended["duration_s"]) == (200, "done", 7.5)
    assert (len(run.calls), run.attained_s()) == (0, pytest.approx(had_s + 7.5))
    await post("/one/units", id="t1", unit="tests", kind="container", duration_s=7.5)  # again: counts once
    assert run.attained_s() == pytest.approx(had_s + 7.5)
    status, closed = await post("/one/close")
    assert (status, closed["state"], run in standings.runs.values()) == (200, "done", False)
    assert (await post("/one/units", id="x" * 20_000))[0] == 413
