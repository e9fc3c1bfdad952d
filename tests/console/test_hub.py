"""The hub's thread: reading from Redis, and surviving its loss visibly."""

import time

import pytest

from controlplane.console.live import hub as module
from controlplane.console.live.hub import LiveHub
from controlplane.console.live.state import Source
from controlplane.dispatch.wire import LIVE_CHANNEL, SUMMARY_KEY
from tests.console.conftest import REAL_START
from tests.console.feed import Feed, demo_rows, fill_history, publish
from tests.redis_server import RedisServer

pytestmark = pytest.mark.django_db(transaction=True)
FEED = Feed(demo_rows(6))


def until(condition, timeout_s: float = 15) -> None:
    """Wait until *condition()* is true; fails after *timeout_s*."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def real_thread(monkeypatch, live):
    monkeypatch.setattr(LiveHub, "start", REAL_START)


@pytest.fixture
def make_hub():
    hubs = []

    def make(url: str) -> LiveHub:
        hubs.append(LiveHub(url))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.stop()


@pytest.fixture
def real_redis():
    server = RedisServer().start()
    yield server
    server.stop()


def test_a_redis_that_is_not_there_is_said_at_once(make_hub):
    hub = make_hub("redis://127.0.0.1:1/0")
    began = time.monotonic()
    state = hub.state()
    assert state.source == Source.UNREACHABLE
    assert not state.known
    assert time.monotonic() - began < 10


def test_unexpected_replies_do_not_end_it(make_hub, monkeypatch, caplog):
    def fail():
        raise RuntimeError("nobody expected this")

    hub = make_hub("redis://127.0.0.1:1/0")
    with monkeypatch.context() as patch:
        patch.setattr(module, "queue_bounds", fail)
        hub.start()
        until(lambda: "starts again" in caplog.text and "waits again" in caplog.text)
    until(lambda: hub.latest().source == Source.UNREACHABLE)
    assert hub._thread.is_alive()


def test_what_cannot_be_read_is_left_out(make_hub, live, caplog):
    hub = make_hub("redis://127.0.0.1:1/0")
    hub.take(b"{}")
    hub.take(b"not json")
    hub.take(b'{"ts": 1, "fleet": 3}')
    assert hub.latest().ts is None
    assert caplog.text.count("could not be read") == 3


@pytest.mark.gate
@pytest.mark.services
def test_it_takes_what_is_there_and_what_comes(make_hub, real_redis):
    fill_history(real_redis.client, FEED, 30)
    publish(real_redis.client, FEED)
    hub = make_hub(real_redis.url)
    hub.start()
    until(lambda: hub.latest().source == Source.LIVE)
    state = hub.latest()
    assert len(state.history) == 30
    assert len(state.tables["instances"]) == 6
    publish(real_redis.client, FEED)
    until(lambda: hub.latest().version > state.version)
    assert hub.latest().ts > state.ts


@pytest.mark.services
def test_no_summary_is_a_silent_gateway(make_hub, real_redis):
    hub = make_hub(real_redis.url)
    assert hub.state().source == Source.SILENT
    publish(real_redis.client, FEED)
    until(lambda: hub.latest().source == Source.LIVE)


@pytest.mark.services
def test_an_old_summary_is_a_silent_gateway_too(make_hub, real_redis):
    import json

    real_redis.client.set(SUMMARY_KEY, json.dumps(FEED.summary(time.time() - 60)))
    hub = make_hub(real_redis.url)
    state = hub.state()
    assert state.source == Source.SILENT
    assert state.known  # the old numbers are shown, marked old


@pytest.mark.gate
@pytest.mark.services
def test_redis_goes_away_and_comes_back(make_hub, real_redis):
    fill_history(real_redis.client, FEED, 10)
    publish(real_redis.client, FEED)
    hub = make_hub(real_redis.url)
    before = hub.state()
    real_redis.stop()
    until(lambda: hub.latest().source == Source.UNREACHABLE)
    assert hub.latest().ts == before.ts  # the last numbers stay
    real_redis.start()
    until(lambda: hub.latest().source == Source.SILENT)  # a new Redis knows nothing
    assert len(hub.latest().history) == 10

    def published() -> bool:
        publish(real_redis.client, FEED)
        return hub.latest().source == Source.LIVE and hub.latest().ts > before.ts

    until(published)


@pytest.mark.services
def test_many_summaries_cost_watchers_nothing_but_a_wake(make_hub, real_redis):
    """Nothing queues in the hub: after a flood, everyone sees the newest."""
    import json

    hub = make_hub(real_redis.url)
    hub.state()
    now = time.time()
    for step in range(500):
        real_redis.client.publish(LIVE_CHANNEL, json.dumps(FEED.summary(now + step / 1000)))
    until(lambda: hub.latest().ts == now + 0.499)
