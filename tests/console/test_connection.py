"""The live connection: access, messages, backpressure, and closing."""

import asyncio
import gc
import os
import re
import time
from pathlib import Path
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET, create_server
from socket import socket as Connection

import pytest
import uvicorn
from channels.db import database_sync_to_async
from django.test import Client
from uvicorn.protocols.utils import ClientDisconnected

from controlplane.asgi import websockets
from controlplane.console.live import consumers, fragments
from controlplane.console.live.state import Source
from controlplane.events.services import record
from tests.console.sockets import Socket

pytestmark = pytest.mark.django_db(transaction=True)
ALL = "/ws/live/?topics=overview:,instances,events"


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


async def test_hello_then_all_fragments_of_the_topics(open_socket, live, fleet_feed):
    summary = live.show(fleet_feed)
    socket = await open_socket()
    hello = await socket.receive()
    assert (hello["t"], hello["protocol"]) == ("hello", 2)
    assert hello["now"] == pytest.approx(time.time(), abs=5)
    state = await socket.receive()
    assert (state["t"], state["ts"], state["source"]) == ("state", summary["ts"], "live")
    assert "instance-5 failed" in state["html"]["attention"]
    assert {name.partition("/")[0] for name in state["html"]} == {"attention", "badge", "endpoint", "instance", "tile"}
    assert set(state["drawn"]) == {"instances"}  # the hub has not read events yet
    assert live.hub.clients == 1
    await socket.close()
    assert live.hub.clients == 0


async def test_its_fragments_add_up_to_the_servers_page(open_socket, live, fleet_feed):
    topics = ["overview:", "instances"]
    live.show(fleet_feed)
    socket = await open_socket(f"/ws/live/?topics={','.join(topics)}")
    shown = (await socket.next("state"))["html"]
    for step in range(1, 4):
        live.show(fleet_feed, ts=time.time() + step * 60)
        message = await socket.receive()
        assert 0 < len(message["html"]) < len(shown)  # only what changed
        shown |= message["html"]
        state, html, drawn = await asyncio.to_thread(live.hub.draw, topics)
        assert _without_clock(shown) == _without_clock(html)
        assert (message["ts"], message["drawn"]) == (state.ts, drawn)
    await socket.close()


def _without_clock(html: dict[str, str]) -> dict[str, str]:
    return {name: re.sub(r"(<time [^>]*>)[^<]*", r"\1", text) for name, text in html.items()}


async def test_a_topic_is_drawn_once_for_all_browsers(open_socket, live, fleet_feed, monkeypatch):
    drawn, draw = [], fragments.html_of

    def counted(state, topic):
        drawn.append((state.version, topic))
        return draw(state, topic)

    monkeypatch.setattr(fragments, "html_of", counted)
    live.show(fleet_feed)
    sockets = [await open_socket("/ws/live/?topics=instances") for _ in range(3)]
    for socket in sockets:
        await socket.next("state")
        await socket.close()
    assert len(drawn) == len(set(drawn)) == 2


async def test_rows_that_come_or_change_their_state_change_the_mark(open_socket, live, fleet_feed):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=instances")
    before = (await socket.next("state"))["drawn"]
    live.show(fleet_feed, ts=time.time() + 60)
    assert (await socket.receive())["drawn"] == before
    fleet_feed.rows[0]["state"] = "draining"
    live.show(fleet_feed, ts=time.time() + 120)
    assert (await socket.receive())["drawn"] != before
    await socket.close()


async def test_the_latest_wins_and_nothing_queues(open_socket, live, fleet_feed, monkeypatch):
    monkeypatch.setattr(consumers, "INTERVAL_S", 0.3)
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=overview:")
    await socket.next("state")
    for step in range(1, 51):
        summary = live.show(fleet_feed, samples=1, ts=time.time() + step * 10)
    state = await socket.receive()
    assert (state["t"], state["ts"]) == ("state", summary["ts"])
    assert await socket.silent(0.8)
    await socket.close()


async def test_losing_the_source_is_sent(open_socket, live, fleet_feed):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=overview:")
    await socket.next("state")
    live.source(Source.UNREACHABLE)
    assert (await socket.receive())["source"] == "unreachable"
    await socket.close()


async def test_new_events_come_as_a_list_and_a_mark(open_socket, live, fleet):
    def happen(reason):
        return record("instance.changed", fleet[0], actor="x", reason=reason).pk

    first = await database_sync_to_async(happen)("before")
    socket = await open_socket("/ws/live/?topics=overview:,events")
    await socket.next("state")
    await asyncio.to_thread(live.hub._read_followed, "newest_event_id")
    state = await socket.next("state")
    assert state["drawn"]["events"] == str(first)
    assert "before" in state["html"]["events"]
    newest = await database_sync_to_async(happen)("while a page is open")
    await asyncio.to_thread(live.hub._read_followed, "newest_event_id")
    state = await socket.next("state")
    assert state["drawn"]["events"] == str(newest)
    assert "while a page is open" in state["html"]["events"]
    await socket.close()


async def test_anything_a_client_says_ends_it(open_socket, live):
    socket = await open_socket()
    await socket.say('{"t": "drain everything"}')
    assert (await socket.next("closed"))["closed"] == consumers.NOT_UNDERSTOOD


async def test_an_unknown_topic_ends_it(open_socket):
    socket = await open_socket("/ws/live/?topics=overview:,secrets")
    assert (await socket.receive())["closed"] == consumers.NOT_UNDERSTOOD


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
    """C41."""
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
    scope = {"type": "websocket", "path": "/ws/live/", "query_string": b"topics=overview:", "headers": headers}
    await asyncio.wait_for(websockets(scope, receive, send), 5)
    assert sent[-1] == {"type": "websocket.close", "code": consumers.TOO_SLOW}
    assert live.hub.clients == 0


async def test_many_events_at_once_are_one_state_for_every_browser(open_socket, live, fleet):
    """C42: 120 events, twenty browsers."""

    def happen():
        return [record("instance.changed", fleet[0], actor="x", reason=f"event {number}").pk for number in range(120)]

    sockets = [await open_socket("/ws/live/?topics=events") for _ in range(20)]
    events = await database_sync_to_async(happen)()
    await asyncio.to_thread(live.hub._read_followed, "newest_event_id")
    for socket in sockets:
        while (await socket.next("state"))["drawn"].get("events") != str(events[-1]):
            pass
        assert await socket.silent(0.1)
        await socket.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.nightly
async def test_browsers_that_never_read_cost_no_memory(live, fleet_feed, viewer, monkeypatch):
    """C41: fifty of them, on real sockets, while the state changes as often as it is sent."""
    monkeypatch.setattr(consumers, "SEND_TIMEOUT_S", 0.5)
    cookies = await database_sync_to_async(cookies_of)(viewer)
    listener = create_server(("127.0.0.1", 0))
    listener.setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)  # the kernel would take megabytes for each
    address = listener.getsockname()[:2]
    server = uvicorn.Server(uvicorn.Config(websockets, log_level="warning", lifespan="off", ws="auto"))
    server.install_signal_handlers = lambda: None
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    asked = (
        f"GET /ws/live/?topics=overview:,instances HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n"
        f"Origin: http://{address[0]}:{address[1]}\r\nCookie: sessionid={cookies['sessionid']}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    live.show(fleet_feed)
    clients = []
    try:
        for _ in range(50):
            client = Connection()
            client.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
            clients.append(client)
            client.connect(address)
            client.sendall(asked.encode())
        async with asyncio.timeout(30):
            while live.hub.clients < 50:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            before, step = resident_bytes(), 0
            while live.hub.clients:
                step += 1
                live.show(fleet_feed, samples=1, ts=time.time() + step)
                await asyncio.sleep(0.05)
    finally:
        for client in clients:
            client.close()
        server.should_exit = True
        await serving
        listener.close()
    assert resident_bytes() - before < 50 * 2**20


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
    scope = {"type": "websocket", "path": "/ws/live/", "query_string": b"topics=overview:", "headers": headers}
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
    before = (await socket.next("state"))["drawn"]["system"]
    fleet_feed.trouble["forecasts"] = {"state": "late"}
    live.show(fleet_feed, ts=time.time() + 60)
    assert (await socket.next("state"))["drawn"]["system"] != before
    await socket.close()


def test_without_a_websocket_the_fragments_are_polled(client, live, fleet_feed, viewer):
    path = "/console/api/snapshot?topics=overview:,system"
    live.show(fleet_feed)
    client.force_login(viewer)
    assert client.get(path).status_code == 403
    path = "/console/api/snapshot?topics=overview:"
    answer = client.get(path)
    assert answer.json()["html"] == live.hub.draw(["overview:"])[1]
    again = client.get(path, headers={"if-none-match": answer["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    live.show(fleet_feed, ts=time.time() + 60)
    assert client.get(path, headers={"if-none-match": answer["ETag"]}).status_code == 200


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
