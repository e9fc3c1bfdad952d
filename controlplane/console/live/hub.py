"""Live hub: one thread of the web process that follows Redis and new events, and wakes its watchers.

Pages read `hub.state()`; connections (`consumers.py`) hold a `Watcher`, which wakes them and carries no data: a slow reader
sees a later state, and nothing queues. Losing Redis is a normal state; the hub keeps trying, and pages say so.
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import orjson
import redis
from django.conf import settings
from django.db import DatabaseError, close_old_connections
from redis.backoff import NoBackoff
from redis.retry import Retry

from controlplane.console.live import batches, fragments, what_ifs
from controlplane.console.live.attention import Known
from controlplane.console.live.state import SILENT_S, LiveState, Source, state_of, without_summaries
from controlplane.console.selectors.attention import (
    alerts_open,
    batches_at_risk,
    endpoints_flapping,
    held,
    min_instances,
    plans_waiting,
    queue_bounds,
    rollouts_failed,
)
from controlplane.console.selectors.events import newest_event_id
from controlplane.dispatch.wire import HISTORY_EVERY_S, HISTORY_KEY, HISTORY_LENGTH, LIVE_CHANNEL, SUMMARY_KEY
from controlplane.resources.names import place_titles

logger = logging.getLogger(__name__)

KNOWN_S = 5.0
FIRST_LOOK_S = 1.0  # longest wait of a process's first page for the first read of Redis
RETRY_S = (0.5, 5.0)


class Watcher:
    """Reader woken when the hub has something new. `changed` is set from the hub's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, topics: Iterable[str]) -> None:
        self.changed = asyncio.Event()
        topics = frozenset(topics)
        self.wants_events = "events" in topics
        self.wants_batches = "batches" in topics
        self.what_ifs = frozenset(
            int(subject) for kind, _, subject in (topic.partition(":") for topic in topics) if kind == "what-if"
        )
        self._loop = loop

    def wake(self) -> None:
        # RuntimeError: the loop was closed before its connection.
        try:
            self._loop.call_soon_threadsafe(self.changed.set)
        except RuntimeError:
            logger.debug("a watcher's event loop is closed")


class LiveHub:
    def __init__(self, redis_url: str | None = None) -> None:
        self._redis_url = redis_url
        self._state = LiveState()
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_LENGTH)
        self._known = Known()
        self._watchers: set[Watcher] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._looked = threading.Event()
        self._thread: threading.Thread | None = None
        self._followed: dict[str, Any] = {"what_ifs": {}, "batches": None, "newest_event_id": None}
        self._drawn: dict[str, tuple[dict[str, str], str]] = {}
        self._drawn_of: LiveState | None = None
        self._drawing = threading.Lock()
        self._due = dict.fromkeys(("history", "known", *FOLLOWED), 0.0)

    # Public methods

    def state(self) -> LiveState:
        """Return the newest state; start the hub if needed, and wait briefly for the first read."""
        self.start()
        self._looked.wait(FIRST_LOOK_S)
        return self._state

    def latest(self) -> LiveState:
        """Return the newest state without waiting, for code on an event loop."""
        return self._state

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._stopping.clear()
                self._thread = threading.Thread(target=self._run, name="live-hub", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread:
            self._stopping.set()
            thread.join(timeout=2)

    def watch(self, topics: Iterable[str]) -> Watcher:
        """Return a watcher for the running event loop; release it with `unwatch`."""
        watcher = Watcher(asyncio.get_running_loop(), topics)
        with self._lock:
            self._watchers.add(watcher)
        self.start()
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers.discard(watcher)

    @property
    def clients(self) -> int:
        return len(self._watchers)

    def draw(self, topics: Iterable[str]) -> tuple[LiveState, dict[str, str], dict[str, str]]:
        """Return the newest state, its fragments of *topics*, and the page marks by topic.

        Each topic is rendered once per state, for all connections.
        """
        html: dict[str, str] = {}
        marks: dict[str, str] = {}
        with self._drawing:
            state = self._state
            if state is not self._drawn_of:
                self._drawn, self._drawn_of = {}, state
            for topic in ("", *topics):
                if topic not in self._drawn:
                    self._drawn[topic] = fragments.html_of(state, topic), fragments.drawn_of(state, topic)
                own, mark = self._drawn[topic]
                html.update(own)
                if mark:
                    marks[topic] = mark
        if "events" in marks:
            marks["events"] = str(state.newest_event_id)
        return state, html, marks

    # Thread

    def _run(self) -> None:
        retry_s = RETRY_S[0]
        while not self._stopping.is_set():
            try:
                self._read_known()
                with redis.Redis.from_url(
                    self._redis_url or settings.REDIS_URL,
                    socket_connect_timeout=2,
                    socket_timeout=5,
                    health_check_interval=10,
                    retry=Retry(NoBackoff(), 0),  # this loop retries itself
                ) as client:
                    self._follow(client)
                retry_s = RETRY_S[0]
            except (redis.RedisError, OSError) as error:
                if self._state.source == Source.LIVE:
                    logger.warning("live hub: Redis does not answer: %s", error)
                    retry_s = RETRY_S[0]
                self._publish(replace(self._state, version=self._state.version + 1, source=Source.UNREACHABLE))
                self._looked.set()
            except Exception:
                logger.exception("live hub: starts again")
            try:
                self._wait(retry_s * random.uniform(0.75, 1.25))
            except Exception:
                logger.exception("live hub: waits again")
            retry_s = min(retry_s * 2, RETRY_S[1])

    def _wait(self, wait_s: float) -> None:
        """Do due work without Redis, for *wait_s* or until the hub stops."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until and not self._stopping.wait(0.25):
            self._do_due(None)

    def _follow(self, client: redis.Redis) -> None:
        """Read existing data, then follow updates until Redis disconnects or the hub stops."""
        with client.pubsub(ignore_subscribe_messages=True) as channel:
            channel.subscribe(LIVE_CHANNEL)
            # An empty Redis does not clear the history.
            self._take_history(cast(list[bytes], client.lrange(HISTORY_KEY, 0, -1)))
            summary = cast(bytes | None, client.get(SUMMARY_KEY))
            if summary is not None:
                self.take(summary)
            else:
                self._publish(replace(self._state, version=self._state.version + 1, source=Source.SILENT))
            self._looked.set()
            while not self._stopping.is_set():
                message = channel.get_message(timeout=0.25)
                if message is not None:
                    self.take(message["data"])
                self._do_due(client)

    def take(self, data: bytes) -> None:
        """Make the published summary *data* the newest state. Log and skip an unreadable one."""
        try:
            summary = orjson.loads(data)
            state = state_of(summary, self._state.version + 1, self._known, tuple(self._history))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.error("live hub: a summary could not be read: %r", error)
            return
        if state.ts is not None and time.time() - state.ts > SILENT_S:
            state = replace(state, source=Source.SILENT)
        self._publish(state)

    def _publish(self, state: LiveState) -> None:
        self._state = replace(without_summaries(state, self._known), **self._followed)
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher.wake()

    def _do_due(self, client: redis.Redis | None) -> None:
        """Run periodic work between messages; *client* is None while Redis is down."""
        now = time.monotonic()
        if now >= self._due["known"]:
            self._due["known"] = now + KNOWN_S
            self._read_known()
        for name, (period_s, _) in FOLLOWED.items():
            if now >= self._due[name]:
                self._due[name] = now + period_s
                self._read_followed(name)
        if client is None:
            return
        if now >= self._due["history"]:
            self._due["history"] = now + HISTORY_EVERY_S
            self._take_history(cast(list[bytes], client.lrange(HISTORY_KEY, -3, -1)))
        state = self._state
        if state.source == Source.LIVE and state.ts is not None and time.time() - state.ts > SILENT_S:
            self._publish(replace(state, version=state.version + 1, source=Source.SILENT))

    def _take_history(self, lines: list[bytes]) -> None:
        """Add the samples of *lines* that are newer than the newest stored one."""
        newest = self._history[-1]["ts"] if self._history else float("-inf")
        for line in lines:
            try:
                sample = orjson.loads(line)
                if sample["ts"] <= newest:
                    continue
            except (ValueError, KeyError, TypeError) as error:
                logger.error("live hub: a history sample could not be read: %r", error)
                continue
            self._history.append(sample)
            newest = sample["ts"]
        self._state = replace(self._state, history=tuple(self._history))

    def _read_known(self) -> None:
        try:
            close_old_connections()
            self._known = Known(
                queue_bounds(),
                min_instances(),
                plans_waiting(),
                endpoints_flapping(),
                rollouts_failed(),
                held(),
                place_titles(),
                batches_at_risk(),
                alerts_open(),
            )
        except DatabaseError as error:
            logger.debug("live hub: the rows could not be read, the last ones stay: %s", error)
        finally:
            close_old_connections()

    def _read_followed(self, name: str) -> None:
        """Read the rows *name* that open pages follow, and publish them if they changed."""
        with self._lock:
            watchers = list(self._watchers)
        try:
            close_old_connections()
            made = FOLLOWED[name][1](watchers)
        except DatabaseError as error:
            logger.warning("live hub: %s could not be read: %s", name, error)
            return
        finally:
            close_old_connections()
        if made != self._followed[name]:
            self._followed[name] = made
            self._publish(replace(self._state, version=self._state.version + 1))


def read_what_ifs(watchers: Iterable[Watcher]) -> dict[int, dict[str, Any]]:
    wanted = frozenset[int]().union(*(watcher.what_ifs for watcher in watchers))
    return {number: progress for number in wanted if (progress := what_ifs.read(number)) is not None}


def read_batches(watchers: Iterable[Watcher]) -> batches.Reading | None:
    return batches.read() if any(watcher.wants_batches for watcher in watchers) else None


def read_events(watchers: Iterable[Watcher]) -> int | None:
    return newest_event_id() if any(watcher.wants_events for watcher in watchers) else None


FOLLOWED: dict[str, tuple[float, Callable[[Iterable[Watcher]], Any]]] = {
    "what_ifs": (0.5, read_what_ifs),
    "batches": (1.0, read_batches),
    "newest_event_id": (1.0, read_events),
}
"""Fields of the state that are read only while a page follows them: period in seconds, and how they are read."""


hub = LiveHub()
