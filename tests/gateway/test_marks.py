"""Marks of requests: what names the application, the run and the unit, and runs that are recognized by conversation."""

import itertools

import orjson
import pytest
from channels.db import database_sync_to_async
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from controlplane.applications.models import Application, ApplicationRun
from controlplane.applications.services import follow_runs
from controlplane.gateway.admission import conversations
from controlplane.gateway.admission.conversations import Conversations, digest_of
from controlplane.gateway.admission.marks import Marks, marks_of
from controlplane.gateway.admission.validation import Kind, parse
from controlplane.gateway.errors import ApiError
from controlplane.gateway.serving.http import HttpRequest
from scheduling.applications.recording import first_request

NO_MARKS = Marks()
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
    return parse(raw, Kind.CHAT, max_depth=64)


class Caller:
    """A key that sends one request after the other."""

    def __init__(self, known=None, name="acme"):
        self.known, self.name, self.number = known or Conversations(), name, itertools.count(1)

    def __call__(self, *messages, marks=NO_MARKS, again=False, **body):
        request = f"{self.name}-{next(self.number)}"
        return self.known.complete(marks, call(*messages, **body), self.name, request, again=again)


def test_a_request_that_extends_an_earlier_one_is_a_call_of_its_run():
    send = Caller()
    assert send(SYSTEM, USER_SAYS) == Marks()  # nothing has extended it yet
    name = digest_of(SYSTEM["content"])
    assert send(SYSTEM, USER_SAYS, CALLS_TOOL, RESULT) == Marks(name, "~acme-1", "after-tool")
    more = (SYSTEM, USER_SAYS, CALLS_TOOL, RESULT, ANSWER, USER_SAYS)
    assert send(*more) == Marks(name, "~acme-1", "after-user")
    assert send(SYSTEM, USER_SAYS, CALLS_TOOL, RESULT, ANSWER, USER_SAYS, ANSWER, USER_SAYS).run == "~acme-1"


def test_requests_with_the_same_id_do_not_begin_the_same_run():
    known = Conversations()

    def send(*messages, at_s):
        return known.complete(NO_MARKS, call(*messages), "acme", "constant", given_at=at_s).run

    snow = {"role": "user", "content": "Snow?"}
    for at_s, first in ((100.0, USER_SAYS), (101.5, snow)):
        assert send(SYSTEM, first, at_s=at_s) == ""
    runs = [send(SYSTEM, first, ANSWER, USER_SAYS, at_s=103.0) for first in (USER_SAYS, snow)]
    assert runs == ["~constant@100000", "~constant@101500"]
    assert [first_request(run) for run in runs] == [("constant", 100.0), ("constant", 101.5)]


@pytest.mark.parametrize(
    "later",
    [
        pytest.param((SYSTEM, USER_SAYS), id="the-same"),
        pytest.param((SYSTEM, USER_SAYS, USER_SAYS), id="no-answer-between"),
        pytest.param((USER_SAYS, ANSWER, USER_SAYS), id="another-system-prompt"),
        pytest.param((SYSTEM, {"role": "user", "content": "Snow?"}, ANSWER, USER_SAYS), id="another-question"),
    ],
)
def test_what_does_not_extend_a_request_is_no_call_of_its_run(later):
    send = Caller()
    send(SYSTEM, USER_SAYS)
    assert send(*later).run == ""


def test_conversations_of_others_are_not_compared():
    known = Conversations()
    Caller(known)(USER_SAYS)
    assert Caller(known, "globex")(USER_SAYS, ANSWER, USER_SAYS).run == ""
    send = Caller(known, "initech")
    send(USER_SAYS, user="ann")
    assert send(USER_SAYS, ANSWER, USER_SAYS, user="ben").run == ""
    assert send(USER_SAYS, ANSWER, USER_SAYS, user="ann").run == "~initech-1"


def test_a_marked_run_is_left_alone_and_an_application_may_be_marked_alone():
    send, marked = Caller(), Marks("review", "one", "write")
    assert send(USER_SAYS, marks=marked) == marked
    assert send(USER_SAYS, ANSWER, USER_SAYS, marks=marked) == marked
    send(USER_SAYS, marks=Marks("audit"))
    assert send(USER_SAYS, ANSWER, USER_SAYS, marks=Marks("audit")) == Marks("audit", "~acme-3", "after-user")


def test_a_request_sent_again_stays_in_its_run():
    send = Caller()
    send(USER_SAYS)
    send(USER_SAYS, again=True)
    assert send(USER_SAYS, ANSWER, USER_SAYS).run == "~acme-1"
    assert send(USER_SAYS, ANSWER, USER_SAYS, again=True).run == "~acme-1"


def test_a_session_gets_an_application_and_units_and_joins_the_session_that_began_it():
    send = Caller()
    assert send(SYSTEM, USER_SAYS, marks=Marks(run="s", session=True)) == Marks(
        digest_of(SYSTEM["content"]), "s", "after-user", session=True
    )
    child = Marks("opencode", "child", "subagent", parent="root", session=True)
    assert send(USER_SAYS, marks=child).run == "root"
    grandchild = child._replace(run="grandchild", parent="child")
    assert send(USER_SAYS, marks=grandchild).run == "root"


def test_recognition_can_be_switched_off():
    send = Caller()
    send.known.on = False
    send(USER_SAYS)
    assert send(USER_SAYS, ANSWER, USER_SAYS) == Marks()


def test_names_of_recognized_applications_ignore_dates():
    today = digest_of(SYSTEM["content"])
    assert digest_of("You tell the weather. Today is 28 Nov 2027.") == today
    assert digest_of("You write code.") != today
    assert digest_of("") == "~conversation"


def test_memory_is_bounded_and_holds_no_text(monkeypatch):
    monkeypatch.setattr(conversations, "MOST_CONVERSATIONS", 10)
    send = Caller()
    for number in range(50):
        send({"role": "user", "content": f"secret {number}"})
    assert len(send.known._runs) == 10
    assert all(isinstance(key, int) for key in send.known._runs._kept)
    assert send({"role": "user", "content": "secret 0"}, ANSWER, USER_SAYS).run == ""
    assert send({"role": "user", "content": "secret 49"}, ANSWER, USER_SAYS).run == "~acme-50"


TEXTS = st.text(max_size=8)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6), st.lists(TEXTS, min_size=1, max_size=4))
def test_a_conversation_of_any_length_is_one_run(exchanges, openings):
    send, messages = Caller(), []
    for number, (says, answered) in enumerate(exchanges):
        messages.append({"role": "user", "content": f"{openings[0]} {says}"})
        run = send(*messages).run
        assert run == ("" if number == 0 else "~acme-1")
        messages.append({"role": "assistant", "content": answered})


@pytest.mark.asyncio
async def test_the_ledger_has_marks_and_recognized_runs_with_their_first_call(served):
    tool = {"messages": [SYSTEM, USER_SAYS, CALLS_TOOL, RESULT]}
    await served.chat(metadata={"application": "audit", "run": "two", "unit": "read", "run_deadline_s": "60"})
    await served.chat(headers={"session-id": UUID})
    await served.chat(messages=[SYSTEM, USER_SAYS])
    await served.chat(**tool)
    rows = await served.rows()
    name = digest_of(SYSTEM["content"])
    assert [(row.application, row.run, row.unit, row.run_due_s) for row in rows] == [
        ("audit", "two", "read", 60.0),
        ("codex", UUID, "after-user", rows[1].run_due_s),
        ("", "", "", None),
        (name, f"~{rows[2].request_id}", "after-tool", rows[1].run_due_s),
    ]

    def followed():
        follow_runs(timezone.now())
        return {run.application.name: run.calls for run in ApplicationRun.objects.select_related("application")}

    assert await database_sync_to_async(followed)() == {"audit": 1, "codex": 1, name: 2}
    recognized = await database_sync_to_async(
        lambda: [row.name for row in Application.objects.all() if row.recognized]
    )()
    assert recognized == [name]


@pytest.mark.asyncio
async def test_reports_reach_the_dispatcher(served):
    async def post(path, **body):
        url = f"{served.url}/v1/runs{path}"
        async with served.http.post(url, json={"application": "review"} | body, headers=served.headers) as answer:
            return answer.status, await answer.json()

    standings = served.gateway.dispatcher.runs.standings
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
