"""The live connection: who may, what it says, that nothing queues, and how it ends."""

import asyncio
import gc
import time

import pytest
from channels.db import database_sync_to_async
from django.test import Client
from uvicorn.protocols.utils import ClientDisconnected

from controlplane.asgi import websockets
from controlplane.console.live import consumers
from controlplane.console.live.state import Source
from controlplane.events.services import record
from tests.console.apply import apply
from tests.console.sockets import Socket

pytestmark = pytest.mark.django_db(transaction=True)
ALL = "/ws/live/?topics=overview,instances,events"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(consumers, "INTERVAL_S", 0.05)


def cookies_of(user) -> dict[str, str]:
    client = Client()
    client.force_login(user)
    return {"sessionid": client.cookies["sessionid"].value}


@pytest.fixture
def open_socket(viewer):
    """`open_socket(path, cookies=…)`: connected sockets, closed at the end of the test."""
    cookies = cookies_of(viewer)
    opened = []

    async def connect(path=ALL, **options):
        socket = Socket(websockets, path, options.pop("cookies", cookies), **options)
        opened.append(socket)
        assert await socket.connect()
        return socket

    connect.opened = opened
    return connect


async def test_hello_then_a_snapshot_of_the_topics(open_socket, live, fleet_feed):
    summary = live.show(fleet_feed)
    socket = await open_socket()
    hello = await socket.receive()
    assert (hello["t"], hello["seq"], hello["protocol"]) == ("hello", 1, 1)
    assert hello["now"] == pytest.approx(time.time(), abs=5)
    snapshot = await socket.receive()
    assert (snapshot["t"], snapshot["seq"], snapshot["ts"]) == ("snapshot", 2, summary["ts"])
    assert set(snapshot["tables"]) == {"tiles", "instances", "endpoints"}
    assert snapshot["tables"]["tiles"]["scope"] == ["", "llama-3.1-8b"]
    assert snapshot["attention"]["items"][0]["title"] == "instance-5 failed"
    assert live.hub.clients == 1
    await socket.close()
    assert live.hub.clients == 0


async def test_what_it_says_makes_the_newest_state(open_socket, live, fleet_feed):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=overview,instances")
    await socket.receive()
    state, seq = apply(None, await socket.receive()), 2
    for step in range(1, 4):
        live.show(fleet_feed, ts=time.time() + step * 60)
        for kind in ("tick", "delta"):
            message = await socket.receive()
            seq += 1
            assert (message["t"], message["seq"]) == (kind, seq)
            state = apply(state, message)
        assert state == live.hub.latest().project(["overview", "instances"])
    await socket.close()


async def test_a_topic_is_all_that_is_sent(open_socket, live, fleet_feed):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=overview")
    assert set((await socket.next("snapshot"))["tables"]) == {"tiles"}
    live.show(fleet_feed, ts=time.time() + 60)
    assert (await socket.receive())["t"] == "tick"
    assert await socket.silent(0.2)
    await socket.close()


async def test_the_latest_wins_and_nothing_queues(open_socket, live, fleet_feed, monkeypatch):
    monkeypatch.setattr(consumers, "INTERVAL_S", 0.3)
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=overview")
    await socket.next("snapshot")
    for step in range(1, 51):
        summary = live.show(fleet_feed, samples=1, ts=time.time() + step * 10)
    tick = await socket.receive()
    assert (tick["t"], tick["ts"]) == ("tick", summary["ts"])
    assert await socket.silent(0.8)
    await socket.close()


async def test_losing_the_source_is_sent(open_socket, live, fleet_feed):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=overview")
    await socket.next("snapshot")
    live.source(Source.UNREACHABLE)
    assert (await socket.receive())["source"] == "unreachable"
    await socket.close()


async def test_resync_is_answered_with_a_snapshot(open_socket, live, fleet_feed):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=instances")
    await socket.next("snapshot")
    await socket.say('{"t": "resync"}')
    assert (await socket.receive())["t"] == "snapshot"
    await socket.close()


async def test_events_come_once_and_from_where_the_page_was_drawn(open_socket, live, fleet):
    def happen(reason):
        return record("instance.moved", fleet[0], actor="x", after={"state": "ready"}, reason=reason).pk

    drawn = await database_sync_to_async(happen)("before the page")
    missed = await database_sync_to_async(happen)("between page and connection")
    socket = await open_socket(f"/ws/live/?topics=events&after={drawn}")
    event = await socket.next("event")
    assert [row["id"] for row in event["events"]] == [missed]
    assert event["events"][0]["title"] == "instance-1: ? to ready"
    await asyncio.to_thread(live.hub._read_events)
    newest = await database_sync_to_async(happen)("while somebody looks")
    await asyncio.to_thread(live.hub._read_events)
    event = await socket.next("event")
    assert [(row["id"], row["reason"]) for row in event["events"]] == [(newest, "while somebody looks")]
    await socket.close()


async def test_an_event_between_the_connection_and_the_hubs_first_look_comes_too(open_socket, live, fleet):
    def happen(reason):
        return record("instance.moved", fleet[0], actor="x", after={"state": "ready"}, reason=reason).pk

    drawn = await database_sync_to_async(happen)("before the page")
    socket = await open_socket(f"/ws/live/?topics=events&after={drawn}")
    await socket.next("snapshot")
    newest = await database_sync_to_async(happen)("before the hub looks")
    await asyncio.to_thread(live.hub._read_events)
    event = await socket.next("event")
    assert [row["id"] for row in event["events"]] == [newest]
    await socket.close()


async def test_more_events_than_a_message_holds_ask_for_a_reload(open_socket, fleet):
    def flood():
        return [record("instance.moved", fleet[0], actor="x").pk for _ in range(consumers.MAX_EVENTS + 2)]

    first = (await database_sync_to_async(flood)())[0]
    socket = await open_socket(f"/ws/live/?topics=events&after={first}")
    assert (await socket.next("resync"))["reason"]
    await socket.close()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x" * 1025, consumers.TOO_LONG),
        ("not json", consumers.NOT_UNDERSTOOD),
        ("[]", consumers.NOT_UNDERSTOOD),
        ('{"t": "drain everything"}', consumers.NOT_UNDERSTOOD),
    ],
)
async def test_what_it_does_not_know_ends_it(open_socket, live, text, code):
    socket = await open_socket()
    await socket.say(text)
    assert (await socket.next("closed"))["closed"] == code


async def test_an_unknown_topic_ends_it(open_socket):
    socket = await open_socket("/ws/live/?topics=overview,secrets")
    assert (await socket.receive())["closed"] == consumers.NOT_UNDERSTOOD


async def test_visitors_and_tenants_people_are_refused(open_socket, member):
    socket = await open_socket(cookies={})
    assert (await socket.receive())["closed"] == consumers.SIGNED_OUT
    cookies = await database_sync_to_async(cookies_of)(member)
    socket = await open_socket(cookies=cookies)
    assert (await socket.receive())["closed"] == consumers.NOT_ALLOWED


async def test_other_sites_are_refused(viewer):
    cookies = await database_sync_to_async(cookies_of)(viewer)
    socket = Socket(websockets, ALL, cookies, origin="https://elsewhere.example")
    assert not await socket.connect()


@pytest.mark.parametrize("how", ["signed out", "blocked", "demoted", "new password"])
async def test_the_session_is_checked_again(open_socket, live, viewer, monkeypatch, how):
    monkeypatch.setattr(consumers, "SESSION_CHECK_S", 0.1)
    socket = await open_socket()

    def end():
        from django.contrib.sessions.models import Session

        if how == "signed out":
            Session.objects.all().delete()
        elif how == "blocked":
            viewer.is_active = False
            viewer.save()
        elif how == "demoted":
            viewer.memberships.all().delete()
        else:
            viewer.set_password("another one, long enough")
            viewer.save()

    await asyncio.sleep(0.25)
    await database_sync_to_async(end)()
    assert (await socket.next("closed"))["closed"] == consumers.SIGNED_OUT


async def test_a_reader_that_does_not_read_is_dropped(live, viewer, monkeypatch):
    monkeypatch.setattr(consumers, "SEND_TIMEOUT_S", 0.1)
    sent = []

    async def send(message):
        sent.append(message)
        if message["type"] == "websocket.send":
            await asyncio.Event().wait()

    async def receive():
        if not sent:
            return {"type": "websocket.connect"}
        await asyncio.Event().wait()

    cookies = await database_sync_to_async(cookies_of)(viewer)
    cookie = f"sessionid={cookies['sessionid']}".encode()
    headers = [(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"cookie", cookie)]
    scope = {"type": "websocket", "path": "/ws/live/", "query_string": b"topics=overview", "headers": headers}
    await asyncio.wait_for(websockets(scope, receive, send), 5)
    assert sent[-1] == {"type": "websocket.close", "code": consumers.TOO_SLOW}
    assert live.hub.clients == 0


async def test_a_tab_that_closes_while_something_is_sent_leaves_no_line_in_the_log(live, fleet_feed, viewer, caplog):
    """As uvicorn does: once the peer is gone, sending raises `ClientDisconnected`."""
    live.show(fleet_feed)
    gone, sending = asyncio.Event(), asyncio.Event()
    sent = []

    async def send(message):
        if message["type"] == "websocket.send" and sent:
            sending.set()
            await gone.wait()
            raise ClientDisconnected
        sent.append(message)

    async def receive():
        if not sent:
            return {"type": "websocket.connect"}
        await sending.wait()
        gone.set()
        return {"type": "websocket.disconnect", "code": 1006}

    unretrieved = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unretrieved.append(context["message"]))
    cookies = await database_sync_to_async(cookies_of)(viewer)
    cookie = f"sessionid={cookies['sessionid']}".encode()
    headers = [(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"cookie", cookie)]
    scope = {"type": "websocket", "path": "/ws/live/", "query_string": b"topics=overview", "headers": headers}
    await asyncio.wait_for(websockets(scope, receive, send), 5)
    await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0)
    assert unretrieved == []
    assert live.hub.clients == 0


async def test_the_system_is_for_operators(open_socket, live, fleet_feed, operator):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=system")
    assert (await socket.receive())["closed"] == consumers.NOT_ALLOWED
    cookies = await database_sync_to_async(cookies_of)(operator)
    socket = await open_socket("/ws/live/?topics=system", cookies=cookies)
    assert set((await socket.next("snapshot"))["tables"]) == {"jobs", "parts"}
    fleet_feed.trouble["forecasts"] = {"state": "late"}
    live.show(fleet_feed, ts=time.time() + 60)
    assert (await socket.next("delta"))["changes"]["jobs"]["set"]["state"] == [[0], ["late"]]
    await socket.close()


def test_without_a_websocket_the_snapshot_is_polled(client, live, fleet_feed, viewer):
    live.show(fleet_feed)
    client.force_login(viewer)
    answer = client.get("/console/api/snapshot?topics=overview,instances")
    assert answer.json() == {"t": "snapshot", **live.hub.latest().project(["overview", "instances"])}
    again = client.get("/console/api/snapshot?topics=overview,instances", headers={"if-none-match": answer["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    live.show(fleet_feed, ts=time.time() + 60)
    later = client.get("/console/api/snapshot?topics=overview,instances", headers={"if-none-match": answer["ETag"]})
    assert later.status_code == 200


def test_charts_are_redrawn_from_the_same_figures(client, live, fleet_feed, viewer):
    live.show(fleet_feed)
    client.force_login(viewer)
    answer = client.get("/console/api/charts?charts=ttft,kv&range=5").json()
    assert set(answer["charts"]) == {"ttft", "kv"}
    assert len(answer["sparks"]) == 8
    assert [trace["name"] for trace in answer["charts"]["ttft"]["figure"]["data"]] == ["p50", "p95", "p99"]
    assert "Time to first token: p95 is" in answer["charts"]["ttft"]["sentence"]
    answer = client.get("/console/api/charts?charts=load,kv&instance=instance-1").json()
    assert set(answer["charts"]) == {"load", "kv"}
