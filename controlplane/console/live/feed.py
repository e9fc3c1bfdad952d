"""The live state of this process, and the channel groups of those who watch it.

A thread reads the published summary from Redis and the rows that pages follow. When something changed, each followed topic
is rendered once, and what changed is sent to the group of its connections (`consumers.py`). Pages read `feed.state()`.
Losing Redis is a normal state: the thread keeps trying, and pages show it.
"""

import asyncio
import hashlib
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import orjson
import redis
from channels.layers import get_channel_layer
from django.conf import settings
from django.db import DatabaseError, close_old_connections
from redis.backoff import NoBackoff
from redis.retry import Retry

from controlplane.alerts.selectors import unresolved
from controlplane.console.live import batches, capacity, fragments, jobs, what_ifs
from controlplane.console.live.state import SILENT_S, LiveState, Source, state_of, without_summaries
from controlplane.console.selectors.events import newest_event_id
from controlplane.dispatch.wire import HISTORY_EVERY_S, HISTORY_KEY, HISTORY_LENGTH, SUMMARY_KEY

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
"""Interval between two reads of Redis, and between two messages to a connection."""
UNANSWERED_S: Final = 0.2
"""The same while a page waits for the first answer to its question."""
ALIVE_S: Final = 5.0
"""A topic that did not change for so long sends a message without fragments."""
FIRST_READ_S: Final = 1.0
"""Longest wait of a process's first page for the first read of Redis."""


@dataclass(slots=True)
class Part:
    """What the connections of a topic show: its fragments by name, and the number of the last message."""

    html: dict[str, str] = field(default_factory=dict)
    number: int = 0
    sent_s: float = 0.0


class LiveFeed:
    def __init__(self, redis_url: str | None = None) -> None:
        self._redis_url = redis_url
        self._client: redis.Redis | None = None
        self._summary = b""
        self._state = LiveState()
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_LENGTH)
        self._followed: dict[str, Any] = {"alerts": (), "what_ifs": {}, "batches": None, "newest_event_id": None}
        self._followers: Counter[str] = Counter()
        self._parts: dict[str, Part] = {}
        self._process = secrets.token_hex(4)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._first_read = threading.Event()
        self._thread: threading.Thread | None = None
        self._history_due = 0.0

    # Pages

    def state(self) -> LiveState:
        """Return the newest state; start the thread if needed, and wait briefly for the first read."""
        self.start()
        self._first_read.wait(FIRST_READ_S)
        return self._state

    def latest(self) -> LiveState:
        """Return the newest state without waiting, for code on an event loop."""
        return self._state

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._stopping.clear()
                self._thread = threading.Thread(target=self._run, name="live-feed", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread:
            self._stopping.set()
            thread.join(timeout=2)

    # Connections

    @property
    def connections(self) -> int:
        """Return how many topics are followed, each as often as it is."""
        return self._followers.total()

    def follow(self, topics: list[str]) -> None:
        """Render *topics* from now on. Call it from the event loop of the connections."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._followers.update(topics)
        self.start()

    def unfollow(self, topics: list[str]) -> None:
        with self._lock:
            self._followers.subtract(topics)
            self._followers = +self._followers
            self._parts = {topic: part for topic, part in self._parts.items() if topic in self._followers}

    def group(self, topic: str) -> str:
        """Return the channel group of this process's connections that show *topic*."""
        return f"live.{self._process}.{hashlib.blake2b(topic.encode(), digest_size=8).hexdigest()}"

    def message(self, topic: str, *, whole: bool = False) -> dict[str, Any]:
        """Render *topic*; return the message with the fragments that changed since the last one, or with all of them."""
        with self._lock:
            state = self._state
            part = self._parts.setdefault(topic, Part())
            shown = part.html
            if not whole or part.number == 0:
                html = fragments.html_of(state, topic)
                shown = {name: text for name, text in html.items() if part.html.get(name) != text}
                part.html, part.number, part.sent_s = html, part.number + 1, time.monotonic()
            body = {"ts": state.ts, "source": state.source.value, "html": shown}
            return {"type": "part.drawn", "topic": topic, "number": part.number, **body}

    def _send(self) -> None:
        """Send each followed topic that changed to its group."""
        layer, loop = get_channel_layer(), self._loop
        if layer is None or loop is None:
            return
        with self._lock:
            topics = [topic for topic, count in self._followers.items() if count > 0]
        for topic in topics:
            message = self.message(topic)
            try:
                sending = asyncio.run_coroutine_threadsafe(layer.group_send(self.group(topic), message), loop)
                sending.add_done_callback(_sent)
            except RuntimeError:
                logger.debug("the connections' event loop is closed")

    # Thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            began, period_s = time.monotonic(), PERIOD_S
            try:
                self._read()
                period_s = UNANSWERED_S if capacity.unanswered(set(self._followers)) else PERIOD_S
            except Exception:
                logger.exception("live feed: a read failed")
            self._first_read.set()
            self._stopping.wait(max(0.05, period_s - (time.monotonic() - began)))

    def _read(self) -> None:
        """Read Redis and the rows once, and send what changed."""
        before, now = self._state, time.monotonic()
        for name, read in FOLLOWED.items():
            self._read_followed(name, read)
        try:
            self._read_redis(now)
        except (redis.RedisError, OSError) as error:
            if self._state.source == Source.LIVE:
                logger.warning("live feed: Redis does not answer: %s", error)
            self._lose(Source.UNREACHABLE)
        if self._state is not before or any(now - part.sent_s >= ALIVE_S for part in self._parts.values()):
            self._send()

    def _read_redis(self, now: float) -> None:
        if self._client is None:
            self._client = redis.Redis.from_url(
                self._redis_url or settings.REDIS_URL,
                socket_connect_timeout=2,
                socket_timeout=5,
                retry=Retry(NoBackoff(), 0),  # the thread retries itself
            )
        if now >= self._history_due:
            first = -3 if self._history else 0
            self.add_history(cast(list[bytes], self._client.lrange(HISTORY_KEY, first, -1)))
            self._history_due = now + HISTORY_EVERY_S
        summary = cast(bytes | None, self._client.get(SUMMARY_KEY))
        if summary is None:
            self._lose(Source.SILENT)
        elif summary != self._summary or self._state.source == Source.UNREACHABLE:
            self._summary = summary
            self.read_summary(summary)
        elif self._state.ts is not None and time.time() - self._state.ts > SILENT_S:
            self._lose(Source.SILENT)

    def read_summary(self, data: bytes) -> None:
        """Make the published summary *data* the newest state. Log and skip an unreadable one."""
        try:
            state = state_of(orjson.loads(data), tuple(self._history))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.error("live feed: a summary could not be read: %r", error)
            return
        old = state.ts is not None and time.time() - state.ts > SILENT_S
        self._set(replace(state, source=Source.SILENT) if old else state)

    def _lose(self, source: Source) -> None:
        """Keep the last numbers, marked as old."""
        if self._state.source != source or jobs.own_tables():
            self._set(replace(self._state, source=source))

    def _set(self, state: LiveState) -> None:
        self._state = replace(without_summaries(state), **self._followed)

    def add_history(self, lines: list[bytes]) -> None:
        """Add the samples of *lines* that are newer than the newest stored one."""
        newest = self._history[-1]["ts"] if self._history else float("-inf")
        for line in lines:
            try:
                sample = orjson.loads(line)
                if sample["ts"] <= newest:
                    continue
            except (ValueError, KeyError, TypeError) as error:
                logger.error("live feed: a history sample could not be read: %r", error)
                continue
            self._history.append(sample)
            newest = sample["ts"]
        self._state = replace(self._state, history=tuple(self._history))

    def _read_followed(self, name: str, read: Callable[[set[str]], Any]) -> None:
        """Read the rows *name*, by the topics that open pages follow."""
        try:
            close_old_connections()
            rows = read(set(self._followers))
        except DatabaseError as error:
            logger.warning("live feed: %s could not be read: %s", name, error)
            return
        finally:
            close_old_connections()
        if rows != self._followed[name]:
            self._followed[name] = rows
            self._state = replace(self._state, **self._followed)


def _sent(sending: Future[None]) -> None:
    """Log why a message did not go out; the next one has all of its topic."""
    error = None if sending.cancelled() else sending.exception()
    if isinstance(error, redis.RedisError | OSError):
        logger.debug("live feed: a message was not sent: %s", error)
    elif error is not None:
        logger.error("live feed: a message was not sent", exc_info=error)


def read_what_ifs(topics: set[str]) -> dict[int, dict[str, Any]]:
    numbers = {int(topic.removeprefix("what-if:")) for topic in topics if topic.startswith("what-if:")}
    return {number: progress for number in numbers if (progress := what_ifs.read(number)) is not None}


FOLLOWED: Final[dict[str, Callable[[set[str]], Any]]] = {
    "alerts": lambda topics: unresolved(),
    "what_ifs": read_what_ifs,
    "batches": lambda topics: batches.read() if "batches" in topics else None,
    "newest_event_id": lambda topics: newest_event_id() if "events" in topics else None,
}
"""Fields of the state that are read from rows: alerts always, others only while a page follows them."""


feed = LiveFeed()
