"""`/ws/live/?topics=overview:llama,instances,events`: live state for a page over one websocket.

Messages are JSON objects with `t` (kind):

- `hello` {protocol, interval_s, now}: first; *now* is this server's clock, by which pages compute ages
- `state` {ts, source, html, drawn}: the fragments that changed since the last one (initially all), and by topic the mark of
the page's remaining content, see `fragments.py`
- `alive` {now}: nothing else was sent for `ALIVE_S`; a page that receives nothing for longer has lost its connection, even
if its socket is open

A client sends nothing. It gets at most one state a second, rendered when sent: nothing queues. Close codes: 4001 signed out,
4003 not allowed, 4008 too slow, 4010 message not understood.
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
from controlplane.console.live.fragments import OPERATORS_TOPICS, is_topic
from controlplane.console.live.hub import LiveHub, hub

logger = logging.getLogger(__name__)

PROTOCOL = 2
INTERVAL_S = 1.0
ALIVE_S = 5.0
SEND_TIMEOUT_S = 5.0
SESSION_CHECK_S = 60.0
SIGNED_OUT, NOT_ALLOWED, TOO_SLOW, NOT_UNDERSTOOD = 4001, 4003, 4008, 4010

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Closed(Exception):
    """Closure of the connection with *code*."""

    def __init__(self, code: int) -> None:
        self.code = code


async def role_of_session(session: SessionBase) -> Role | None:
    """Return the current fleet role of the session's user; None once signed out, expired, blocked or demoted."""
    fresh = import_module(settings.SESSION_ENGINE).SessionStore(session.session_key)
    user = await get_user(cast(Any, {"session": fresh}))
    return await database_sync_to_async(user.fleet_role)() if isinstance(user, User) else None


class LiveConnection:
    """One browser's connection: the last sent state, and the loop that sends changes."""

    def __init__(self, send: Send, topics: list[str], live: LiveHub) -> None:
        self._send = send
        self._topics = topics
        self._hub = live
        self._sent: dict[str, str] = {}
        self._version: int | None = None
        self._watcher = live.watch(topics)

    async def run(self) -> None:
        """Send until cancelled. Raise Closed on refusal."""
        try:
            await self._message("hello", protocol=PROTOCOL, interval_s=INTERVAL_S, now=time.time())
            await asyncio.to_thread(self._hub.state)
            while True:
                self._watcher.changed.clear()
                await self._send_state()
                await asyncio.sleep(INTERVAL_S)
                await self._news()
        finally:
            self._hub.unwatch(self._watcher)

    async def _news(self) -> None:
        """Wait for a possible change, sending `alive` messages meanwhile."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_S):
                    await self._watcher.changed.wait()
                    return
            await self._message("alive", now=time.time())

    async def _send_state(self) -> None:
        if self._hub.latest().version == self._version:
            return
        state, html, drawn = await database_sync_to_async(self._hub.draw)(self._topics)
        changed = {name: text for name, text in html.items() if self._sent.get(name) != text}
        self._sent, self._version = html, state.version
        await self._message("state", ts=state.ts, source=state.source, html=changed, drawn=drawn)

    async def _message(self, t: str, **content: Any) -> None:
        text = orjson.dumps({"t": t, **content}).decode()
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send({"type": "websocket.send", "text": text})
        except TimeoutError:
            raise Closed(TOO_SLOW) from None


async def _listen(receive: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    """Wait until the client disconnects. Raise Closed if it sends anything."""
    message = await receive()
    if message["type"] != "websocket.disconnect":
        raise Closed(NOT_UNDERSTOOD)


async def _guard(session: SessionBase, least: Role) -> None:
    """Never return; raise Closed once the session loses its permission."""
    while True:
        await asyncio.sleep(SESSION_CHECK_S)
        role = await role_of_session(session)
        if role is None or role.rank < least.rank:
            raise Closed(SIGNED_OUT)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel *tasks* until they have ended: one that waits for the database may swallow a first cancellation.

    Results are retrieved, otherwise asyncio would log the exceptions of sends to a closed connection.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.5)
    await asyncio.gather(*tasks, return_exceptions=True)


async def live(scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Send) -> None:
    """Serve one connection as an ASGI application; `asgi.py` has checked its origin and loaded its session."""
    await receive()  # websocket.connect
    query = parse_qs(scope.get("query_string", b"").decode("ascii", "replace"))
    topics = sorted(set(filter(None, query.get("topics", [""])[0].split(","))))
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
    connection = LiveConnection(send, topics, hub)
    tasks = [
        asyncio.create_task(connection.run(), name="live-send"),
        asyncio.create_task(_listen(receive), name="live-listen"),
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
        # A slow reader may not receive the close message either.
        with suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "websocket.close", "code": code})
