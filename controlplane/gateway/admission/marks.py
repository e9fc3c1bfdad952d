"""Marks of a request: the application, the run and the unit that it is a call of, as its caller sends them.

Each is read from the first place that has it: our headers, `metadata` of the body, then what agents send by themselves
(`SESSIONS`, in order). A wrong header of ours is refused; anything else that cannot be a name is not a mark, because callers
use those fields for other things too.
"""

import math
import re
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final, NamedTuple

from controlplane.gateway.admission.validation import Call
from controlplane.gateway.serving.http import NAME, HttpRequest
from scheduling.applications.recording import AFTER_TOOL, AFTER_USER, SUBAGENT

TEXT: Final = re.compile(NAME.pattern.decode())
UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
CLAUDE_USER: Final = re.compile(r"user_[A-Za-z0-9]*_account_[A-Za-z0-9-]*_session_([A-Za-z0-9-]{8,64})")


class Marks(NamedTuple):
    """Empty where nothing is marked."""

    application: str = ""
    run: str = ""
    unit: str = ""
    due_s: float | None = None
    """Of the run, after its first call."""
    max_tokens: float | None = None
    """That all calls of the run may use; next, dollars."""
    max_usd: float | None = None
    parent: str = ""
    """Session that began this one."""
    session: bool = False
    """The run is the session of an agent."""


MAX_SESSIONS: Final = 10_000
"""Sessions kept that other sessions began."""
TOOL_ROLES: Final = ("tool", "function")
SESSIONS_OF_ANY: Final = "sessions"
"""Application of sessions whose agent is not known."""


class SessionMark(NamedTuple):
    """Where an agent says which session a request belongs to: in a header, else in a field of the body."""

    header: bytes = b""
    field: tuple[str, ...] = ()
    form: re.Pattern[str] = TEXT
    """The whole value must match; the session is its first group, if it has one."""
    application: str = ""
    """Of the agent that sends it; empty where several send it."""
    parent: bytes = b""
    """Header with the session that began this one: calls of both are of one run."""
    subagent: bytes = b""
    """Header that only calls of subagents have."""


SESSIONS: Final = (
    SessionMark(b"x-claude-code-session-id", application="claude-code", subagent=b"x-claude-code-agent-id"),
    SessionMark(b"session-id", application="codex", parent=b"x-codex-parent-thread-id", subagent=b"x-openai-subagent"),
    SessionMark(b"session_id", application="codex", parent=b"x-codex-parent-thread-id", subagent=b"x-openai-subagent"),
    SessionMark(b"x-opencode-session", application="opencode", parent=b"x-parent-session-id"),
    SessionMark(b"x-dynamo-session-id", parent=b"x-dynamo-parent-session-id"),
    SessionMark(b"x-session-affinity", parent=b"x-parent-session-id"),
    SessionMark(b"x-session-id", parent=b"x-parent-session-id"),
    SessionMark(field=("nvext", "session_control", "session_id")),
    SessionMark(field=("metadata", "user_id"), form=CLAUDE_USER, application="claude-code"),
    SessionMark(field=("prompt_cache_key",), form=UUID),  # any other key is that of a prompt, not of a session
)


def _at(body: dict[str, Any], field: tuple[str, ...]) -> str:
    value: Any = body
    for name in field:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def _named(headers: dict[bytes, bytes], header: bytes) -> str:
    value = headers.get(header, b"") if header else b""
    return value.decode() if value and NAME.fullmatch(value) else ""


def _session_of(request: HttpRequest, body: dict[str, Any]) -> Marks:
    for mark in SESSIONS:
        said = _named(request.headers, mark.header) or (_at(body, mark.field) if mark.field else "")
        match = mark.form.fullmatch(said) if said else None
        if match is None:
            continue
        run = match.group(1) if mark.form.groups else said
        parent = _named(request.headers, mark.parent)
        below = parent or mark.subagent in request.headers
        return Marks(mark.application, run, SUBAGENT if below else "", parent=parent, session=True)
    return Marks()


def _text(metadata: dict[str, Any], name: str) -> str:
    value = metadata.get(name)
    return value if isinstance(value, str) and TEXT.fullmatch(value) else ""


def _number(value: object) -> float | None:
    """Return a limit in `metadata`, a number or its text; None if it is not a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if 0 < number < math.inf else None


LIMITS: Final = (
    (b"x-run-deadline", "seconds", "run_deadline_s"),
    (b"x-run-max-tokens", "tokens", "run_max_tokens"),
    (b"x-run-max-usd", "dollars", "run_max_usd"),
)
"""Of a run: header, its unit, and name in `metadata`."""


def marks_of(request: HttpRequest, body: dict[str, Any]) -> Marks:
    """Return the marks of a request. Raises ApiError 400 for a header of ours that cannot be a name, or no number."""
    metadata = body.get("metadata")
    given = metadata if isinstance(metadata, dict) else {}
    application = request.name(b"x-application") or _text(given, "application")
    run = request.name(b"x-run") or _text(given, "run")
    unit = request.name(b"x-unit") or _text(given, "unit")
    due_s, max_tokens, max_usd = (request.number(header, of) or _number(given.get(name)) for header, of, name in LIMITS)
    marks = Marks(run=run) if run else _session_of(request, body)
    marks = marks._replace(application=application or marks.application, unit=unit or marks.unit)
    return marks._replace(due_s=due_s, max_tokens=max_tokens, max_usd=max_usd)


class Sessions:
    """Completes the marks of agents' sessions."""

    def __init__(self) -> None:
        self._roots: OrderedDict[Hashable, str] = OrderedDict()

    def complete(self, marks: Marks, call: Call, caller: Hashable) -> Marks:
        """Return *marks* with the application, run and unit of a session. *caller* is the key that sent it: a session that
        another one of it began is of the run of that one.
        """
        if not marks.session:
            return marks
        run = marks.run
        if marks.parent:
            run = self._roots.get((caller, marks.parent)) or marks.parent
            if run != marks.run:
                self._roots[caller, marks.run] = run
                self._roots.move_to_end((caller, marks.run))
                if len(self._roots) > MAX_SESSIONS:
                    self._roots.popitem(last=False)
        unit = marks.unit or (AFTER_TOOL if call.turns and call.turns[-1][0] in TOOL_ROLES else AFTER_USER)
        return marks._replace(application=marks.application or SESSIONS_OF_ANY, run=run, unit=unit)
