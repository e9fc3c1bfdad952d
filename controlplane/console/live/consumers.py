"""`/ws/live/?topics=overview:llama,instances,events`: the live parts of a page, one channel group for each topic.

Each message is a JSON object {ts, source, now, html}: time and source of the fleet's state, this server's clock, and the
fragments of one topic that changed (initially all). A topic sends at most one message a second (five while a page waits for
an answer), and at least one every five seconds; a browser that receives none for longer has lost its connection. Clients
send nothing. Close codes: 4001 signed out, 4003 not allowed, 4010 unknown topic, 1013 Redis is away or the browser reads too
slowly, try again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, cast
from urllib.parse import parse_qs

import orjson
import redis
from channels.auth import get_user
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.contrib.sessions.backends.base import SessionBase

from controlplane.accounts.models import Role, User
from controlplane.console.live.feed import feed
from controlplane.console.live.fragments import OPERATORS_TOPICS, is_topic

logger = logging.getLogger(__name__)

SESSION_CHECK_S: Final = 30.0
SEND_TIMEOUT_S: Final = 5.0
"""Longest wait for a browser to read: messages behind it are kept without a bound."""
SIGNED_OUT: Final = 4001
NOT_ALLOWED: Final = 4003
UNKNOWN_TOPIC: Final = 4010
TRY_AGAIN: Final = 1013


async def role_of_session(session: SessionBase) -> Role | None:
    """Return the fleet role of the signed-in user, read again; None once signed out, expired, blocked or demoted."""
    fresh = import_module(settings.SESSION_ENGINE).SessionStore(session.session_key)
    user = await get_user(cast(Any, {"session": fresh}))
    return await database_sync_to_async(user.fleet_role)() if isinstance(user, User) else None


class LiveConsumer(AsyncWebsocketConsumer):
    """One page's connection."""

    def __init__(self) -> None:
        super().__init__()
        self._topics: list[str] = []
        self._numbers: dict[str, int] = {}
        self._least = Role.VIEWER
        self._checked_s = 0.0

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Any]) -> None:
        try:
            await super().__call__(scope, receive, send)
        except (redis.RedisError, OSError) as error:  # the channel layer's Redis, or a browser that left while we sent
            logger.debug("live connection: %r", error)
            with suppress(OSError, RuntimeError):
                await send({"type": "websocket.close", "code": TRY_AGAIN})
        finally:
            feed.unfollow(self._topics)

    async def connect(self) -> None:
        await self.accept()  # before a refusal too: a browser cannot see the reason of a failed handshake
        query = parse_qs(self.scope.get("query_string", b"").decode("ascii", "replace"))
        topics = ["", *sorted(set(filter(None, query.get("topics", [""])[0].split(","))))]
        if not all(map(is_topic, topics)):
            await self.close(UNKNOWN_TOPIC)
            return
        self._least = Role.VIEWER if OPERATORS_TOPICS.isdisjoint(topics) else Role.OPERATOR
        if not await self._allowed():
            signed_in = getattr(self.scope.get("user"), "is_authenticated", False)
            await self.close(NOT_ALLOWED if signed_in else SIGNED_OUT)
            return
        feed.follow(topics)
        self._topics = topics
        for topic in topics:
            await self._show(await database_sync_to_async(feed.message)(topic, whole=True))
        for topic in topics:
            await self.channel_layer.group_add(feed.group(topic), self.channel_name)

    async def part_drawn(self, message: dict[str, Any]) -> None:
        """Pass on *message* of the feed; all of its topic if one before it was lost."""
        if time.monotonic() - self._checked_s > SESSION_CHECK_S and not await self._allowed():
            await self.close(SIGNED_OUT)
            return
        topic, number = message["topic"], message["number"]
        if number <= self._numbers[topic]:
            return
        if number != self._numbers[topic] + 1:
            message = await database_sync_to_async(feed.message)(topic, whole=True)
        await self._show(message)

    async def _allowed(self) -> bool:
        self._checked_s = time.monotonic()
        role = await role_of_session(self.scope["session"])
        return role is not None and role.rank >= self._least.rank

    async def _show(self, message: dict[str, Any]) -> None:
        self._numbers[message["topic"]] = message["number"]
        body = {name: message[name] for name in ("ts", "source", "html")}
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self.send(text_data=orjson.dumps({**body, "now": time.time()}).decode())
