"""The live feed's thread: reading from Redis, and surviving its loss visibly."""

import json
import time

import pytest

from controlplane.console.live import feed as module
from controlplane.console.live.feed import LiveFeed
from controlplane.console.live.state import Source
from controlplane.dispatch.wire import SUMMARY_KEY
from tests.console.conftest import REAL_START
from tests.console.feed import Feed, fill_history, publish
from tests.redis_server import RedisServer

pytestmark = pytest.mark.django_db(transaction=True)
FEED = Feed(
    [{"id": at, "name": f"i-{at}", "model": "m", "region": "r", "gpu_type": "g", "state": "ready"} for at in range(6)]
)


def until(condition, timeout_s: float = 15) -> None:
    """Wait until *condition()* is true; fails after *timeout_s*."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def real_thread(monkeypatch, live):
    monkeypatch.setattr(LiveFeed, "start", REAL_START)
    monkeypatch.setattr(module, "PERIOD_S", 0.1)


@pytest.fixture
def make_feed():
    feeds = []

    def make(url: str) -> LiveFeed:
        feeds.append(LiveFeed(url))
        return feeds[-1]

    yield make
    for feed in feeds:
        feed.stop()


@pytest.fixture
def real_redis():
    server = RedisServer().start()
    yield server
    server.stop()


def test_a_redis_that_is_not_there_is_shown_at_once(make_feed):
    feed = make_feed("redis://127.0.0.1:1/0")
    began = time.monotonic()
    state = feed.state()
    assert state.source == Source.UNREACHABLE
    assert not state.known
    assert time.monotonic() - began < 10


def test_unexpected_errors_do_not_end_it(make_feed, monkeypatch, caplog):
    def fail(topics):
        raise RuntimeError("unexpected")

    feed = make_feed("redis://127.0.0.1:1/0")
    with monkeypatch.context() as patch:
        patch.setitem(module.FOLLOWED, "alerts", fail)
        feed.start()
        until(lambda: "a read failed" in caplog.text)
    until(lambda: feed.latest().source == Source.UNREACHABLE)
    assert feed._thread.is_alive()


def test_what_cannot_be_read_is_left_out(make_feed, caplog):
    feed = make_feed("redis://127.0.0.1:1/0")
    for data in (b"{}", b"not json", b'{"ts": 1, "fleet": 3}'):
        feed.read_summary(data)
    assert feed.latest().ts is None
    assert caplog.text.count("could not be read") == 3


@pytest.mark.gate
@pytest.mark.services
def test_it_reads_what_is_there_and_what_follows(make_feed, real_redis):
    feed = make_feed(real_redis.url)
    assert feed.state().source == Source.SILENT  # no summary yet
    fill_history(real_redis.client, FEED, 30)
    publish(real_redis.client, FEED)
    feed._history_due = 0.0
    until(lambda: feed.latest().source == Source.LIVE and len(feed.latest().history) == 30)
    state = feed.latest()
    assert len(state.tables["instances"]) == 6
    publish(real_redis.client, FEED)
    until(lambda: feed.latest().ts > state.ts)


@pytest.mark.services
def test_an_old_summary_is_a_silent_gateway(make_feed, real_redis):
    real_redis.client.set(SUMMARY_KEY, json.dumps(FEED.summary(time.time() - 60)))
    state = make_feed(real_redis.url).state()
    assert state.source == Source.SILENT
    assert state.known  # the old numbers are shown, marked old


@pytest.mark.gate
@pytest.mark.services
def test_redis_goes_away_and_returns(make_feed, real_redis):
    fill_history(real_redis.client, FEED, 10)
    publish(real_redis.client, FEED)
    feed = make_feed(real_redis.url)
    before = feed.state()
    real_redis.stop()
    until(lambda: feed.latest().source == Source.UNREACHABLE)
    assert feed.latest().ts == before.ts  # the last numbers stay
    real_redis.start()
    until(lambda: feed.latest().source == Source.SILENT)  # a new Redis is empty
    assert len(feed.latest().history) == 10

    def published() -> bool:
        publish(real_redis.client, FEED)
        return feed.latest().source == Source.LIVE and feed.latest().ts > before.ts

    until(published)
