"""`/ws/live/?topics=overview,instances,events&after=EVENT_ID`: a page follows the live state over one websocket.

Messages are JSON objects with `t` (kind), `seq` (grows by one with each message of the connection) and `ts`:

- `hello` {protocol, interval_s, now}: first; *now* is this server's clock, by which pages compute ages
- `snapshot`: the whole state of the topics
- `tick` (topic overview) and `delta` (topics instances, lengths, system, queues:REGION, what-if:ID): what makes the next
  state, see `deltas.py`
- `event` {events}: new rows of the event record, oldest first
- `alive` {now}: nothing else was sent for `ALIVE_S`; a page that hears nothing for longer has lost its connection, whatever
  its socket says
- `resync` {reason}: the page should load again, since more happened than one message holds

A client may send `{"t": "resync"}` and is answered with a snapshot. Each topic gets at most one message a second, made from
the newest state when it is sent: nothing queues. Close codes: 4001 signed out, 4003 not allowed, 4008 too slow, 4009 message
too long, 4010 message not understood.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, cast
from urllib.parse import parse_qs

import orjson
from channels.auth import get_user
from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.sessions.backends.base import SessionBase

from controlplane.accounts.models import Role, User
from controlplane.console.live import deltas
from controlplane.console.live.hub import LiveHub, hub
from controlplane.console.live.state import OPERATORS_TOPICS, is_topic
from controlplane.console.live.what_ifs import number_of as what_if_of
from controlplane.console.selectors.events import events_after, newest_event_id
from controlplane.resources.filters import number

logger = logging.getLogger(__name__)

PROTOCOL = 1
INTERVAL_S = 1.0
ALIVE_S = 5.0
SEND_TIMEOUT_S = 5.0
SESSION_CHECK_S = 60.0
MAX_INBOUND_BYTES = 1024
MAX_EVENTS = 20  # in one message
SIGNED_OUT, NOT_ALLOWED, TOO_SLOW, TOO_LONG, NOT_UNDERSTOOD = 4001, 4003, 4008, 4009, 4010

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Closed(Exception):
    """The connection ends with *code*."""

    def __init__(self, code: int) -> None:
        self.code = code


async def role_of_session(session: SessionBase) -> Role | None:
    """The fleet role of whom the stored session belongs to now; None once signed out, expired, blocked or demoted."""
    fresh = import_module(settings.SESSION_ENGINE).SessionStore(session.session_key)
    user = await get_user(cast(Any, {"session": fresh}))
    return await database_sync_to_async(user.fleet_role)() if isinstance(user, User) else None


class LiveConnection:
    """One browser's connection: the state that was last sent to it, and the loop that sends what came since."""

    def __init__(self, send: Send, topics: list[str], live: LiveHub, after: int | None) -> None:
        self._send = send
        self._topics = topics
        self._hub = live
        self._seq = 0
        self._sent: dict[str, Any] | None = None
        self._version = -1
        self._event_id = after
        followed = frozenset(number for topic in topics if (number := what_if_of(topic)) is not None)
        self._watcher = live.watch(wants_events="events" in topics, after=after, what_ifs=followed)

    async def run(self) -> None:
        """Send until cancelled. Raises Closed."""
        try:
            await self._message("hello", protocol=PROTOCOL, interval_s=INTERVAL_S, now=time.time(), ts=time.time())
            if "events" in self._topics:
                await self._catch_up()
            await asyncio.to_thread(self._hub.state)
            while True:
                self._watcher.changed.clear()
                await self._send_state()
                await self._send_new_events()
                await asyncio.sleep(INTERVAL_S)
                await self._news()
        finally:
            self._hub.unwatch(self._watcher)

    async def _news(self) -> None:
        """Wait until there may be something to send, and say meanwhile that the connection is alive."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_S):
                    await self._watcher.changed.wait()
                    return
            await self._message("alive", now=time.time(), ts=time.time())

    def resync(self) -> None:
        self._sent = None
        self._watcher.changed.set()

    async def _send_state(self) -> None:
        state = self._hub.latest()
        if self._sent is not None and state.version == self._version:
            return
        now, before = state.project(self._topics), self._sent
        self._sent, self._version = now, state.version
        if before is None:
            await self._message(**deltas.snapshot(now))
            return
        if "overview" in self._topics:
            await self._message(**deltas.tick(now))
        if not set(self._topics) <= {"overview", "events"}:
            await self._message(**deltas.delta(before, now))

    async def _catch_up(self) -> None:
        """What was recorded between the drawing of the page and the first look of the hub."""
        if self._event_id is None:
            self._event_id = await database_sync_to_async(newest_event_id)()
            return
        missed = await database_sync_to_async(events_after)(self._event_id, MAX_EVENTS + 1)
        await self._send_events(missed)

    async def _send_new_events(self) -> None:
        if "events" in self._topics:
            await self._send_events(self._hub.events_after(self._event_id))

    async def _send_events(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        self._event_id = events[-1]["id"]
        if len(events) > MAX_EVENTS:
            await self._message("resync", ts=time.time(), reason="more events than one message holds")
        else:
            await self._message("event", ts=time.time(), events=events)

    async def _message(self, t: str, **content: Any) -> None:
        self._seq += 1
        text = orjson.dumps({"t": t, "seq": self._seq, **content}).decode()
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send({"type": "websocket.send", "text": text})
        except TimeoutError:
            raise Closed(TOO_SLOW) from None


async def _listen(receive: Callable[[], Awaitable[dict[str, Any]]], connection: LiveConnection) -> None:
    """Take the client's messages until it goes. Raises Closed."""
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            return
        data = message.get("text") or message.get("bytes") or ""
        if len(data) > MAX_INBOUND_BYTES:
            raise Closed(TOO_LONG)
        try:
            kind = orjson.loads(data)["t"]
        except (ValueError, TypeError, KeyError):
            raise Closed(NOT_UNDERSTOOD) from None
        if kind != "resync":
            raise Closed(NOT_UNDERSTOOD)
        connection.resync()


async def _guard(session: SessionBase, least: Role) -> None:
    """Return never; raise Closed once the session no longer gives the right to look."""
    while True:
        await asyncio.sleep(SESSION_CHECK_S)
        role = await role_of_session(session)
        if role is None or role.rank < least.rank:
            raise Closed(SIGNED_OUT)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel *tasks* until they have ended: one that waits for the database may swallow a first cancellation.

    How they end is looked at, or asyncio would log what one of them met that was sending when the browser went away.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.5)
    await asyncio.gather(*tasks, return_exceptions=True)


async def live(scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Send) -> None:
    """The ASGI application of one connection; `asgi.py` has checked its origin and found its session."""
    await receive()  # websocket.connect
    query = parse_qs(scope.get("query_string", b"").decode("ascii", "replace"))
    topics = sorted(set(query.get("topics", ["overview"])[0].split(",")))
    await send(
        {"type": "websocket.accept"}
    )  # before a refusal too: a browser cannot see the reason of a failed handshake
    if not all(map(is_topic, topics)):
        await send({"type": "websocket.close", "code": NOT_UNDERSTOOD})
        return
    least = Role.VIEWER if OPERATORS_TOPICS.isdisjoint(topics) else Role.OPERATOR
    role = await role_of_session(scope["session"])
    if role is None or role.rank < least.rank:
        signed_in = getattr(scope.get("user"), "is_authenticated", False)
        await send({"type": "websocket.close", "code": NOT_ALLOWED if signed_in else SIGNED_OUT})
        return
    connection = LiveConnection(send, topics, hub, number(query.get("after", [""])[0]))
    tasks = [
        asyncio.create_task(connection.run(), name="live-send"),
        asyncio.create_task(_listen(receive, connection), name="live-listen"),
        asyncio.create_task(_guard(scope["session"], least), name="live-guard"),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        code = next(
            (error.code for task in tasks if task.done() and isinstance(error := task.exception(), Closed)), None
        )
        for task in tasks:
            if task.done() and (error := task.exception()) and not isinstance(error, Closed | OSError):
                logger.error("live connection: %r", error)
                code = 1011
    finally:
        await _end(tasks)
    if code is not None:
        # A reader that is too slow does not take the goodbye either.
        with suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "websocket.close", "code": code})
