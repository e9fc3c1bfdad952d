"""The live connection: access, messages, what is lost, and closing."""

import asyncio
import re
import time

import pytest
from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from django.test import Client
from redis import ConnectionError as RedisAway
from uvicorn.protocols.utils import ClientDisconnected

from controlplane.asgi import websockets
from controlplane.console.live import consumers, fragments
from controlplane.console.live.state import Source
from controlplane.events.services import record
from tests.console.sockets import Socket

pytestmark = pytest.mark.django_db(transaction=True)
ALL = "/ws/live/?topics=overview:,instances,events"


def cookies_of(user) -> dict[str, str]:
    client = Client()
    client.force_login(user)
    return {"sessionid": client.cookies["sessionid"].value}


@pytest.fixture
def open_socket(viewer):
    """`open_socket(path, cookies=…)`: a connected socket and the fragments that it was given first."""
    cookies = cookies_of(viewer)

    async def connect(path=ALL, **options):
        socket = Socket(websockets, path, options.pop("cookies", cookies), **options)
        assert await socket.connect()
        return socket

    return connect


async def whole(socket: Socket, topics: int) -> dict[str, str]:
    """Return the fragments of the next message of each of *topics*."""
    html: dict[str, str] = {}
    for _ in range(topics + 1):  # the first topic is that of every page
        html |= (await socket.receive())["html"]
    return html


async def send(live) -> None:
    await database_sync_to_async(live.feed._send)()


async def test_first_all_fragments_then_those_that_changed(open_socket, live, fleet_feed):
    summary = live.show(fleet_feed)
    await database_sync_to_async(live.judge)()
    socket = await open_socket("/ws/live/?topics=overview:,instances")
    first = await socket.receive()
    assert (first["ts"], first["source"]) == (summary["ts"], "live")
    assert first["now"] == pytest.approx(time.time(), abs=5)
    shown = first["html"]
    for _ in range(2):
        shown |= (await socket.receive())["html"]
    assert "instance-5 failed" in shown["attention"]
    assert {name.partition("/")[0] for name in shown} == {"attention", "badge", "drawn", "endpoint", "instance", "tile"}
    for step in range(1, 4):
        live.show(fleet_feed, ts=time.time() + step * 60)
        await send(live)
        messages = [await socket.receive() for _ in range(3)]
        assert 0 < sum(len(message["html"]) for message in messages) < len(shown)
        for message in messages:
            shown |= message["html"]
        state = live.feed.latest()
        expected: dict[str, str] = {}
        for topic in ("", "overview:", "instances"):
            expected |= await database_sync_to_async(fragments.html_of)(state, topic)
        assert _without_clock(shown) == _without_clock(expected)
    assert live.feed.connections == 3
    await socket.close()
    assert live.feed.connections == 0


def _without_clock(html: dict[str, str]) -> dict[str, str]:
    return {name: re.sub(r"(<time [^>]*>)[^<]*", r"\1", text) for name, text in html.items()}


async def test_a_topic_is_rendered_once_for_all_browsers(open_socket, live, fleet_feed, monkeypatch):
    """C42."""
    live.show(fleet_feed)
    sockets = [await open_socket("/ws/live/?topics=instances") for _ in range(20)]
    for socket in sockets:
        await whole(socket, 1)
    rendered, render = [], fragments.html_of

    def counted(state, topic):
        rendered.append(topic)
        return render(state, topic)

    monkeypatch.setattr(fragments, "html_of", counted)
    live.show(fleet_feed, ts=time.time() + 60)
    await send(live)
    for socket in sockets:
        assert (await socket.receive())["source"] == "live"
        await socket.close()
    assert sorted(rendered) == ["", "instances"]


async def test_a_browser_that_lost_a_message_gets_all_of_its_topic(open_socket, live, fleet_feed):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=instances")
    shown = await whole(socket, 1)
    live.feed.message("instances")  # rendered and never sent
    live.show(fleet_feed, ts=time.time() + 60)
    await send(live)
    messages = [await socket.receive() for _ in range(2)]
    assert {name for name in shown if name.startswith("instance/")} <= max(
        (message["html"].keys() for message in messages), key=len
    )
    await socket.close()


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
    assert (sent[-1]["type"], sent[-1]["code"]) == ("websocket.close", consumers.TRY_AGAIN)
    assert live.feed.connections == 0


async def test_rows_that_arrive_or_change_their_state_change_the_mark(open_socket, live, fleet_feed):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=instances")
    before = (await whole(socket, 1))["drawn/instances"]
    live.show(fleet_feed, ts=time.time() + 60)
    await send(live)
    assert "drawn/instances" not in await whole(socket, 1)
    fleet_feed.rows[0]["state"] = "draining"
    live.show(fleet_feed, ts=time.time() + 120)
    await send(live)
    assert (await whole(socket, 1))["drawn/instances"] != before
    await socket.close()


async def test_losing_the_source_is_sent(open_socket, live, fleet_feed):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=overview:")
    await whole(socket, 1)
    live.source(Source.UNREACHABLE)
    await send(live)
    assert (await socket.receive())["source"] == "unreachable"
    await socket.close()


async def test_new_events_arrive_as_a_list_and_a_mark(open_socket, live, fleet):
    def happen(reason):
        made = record("instance.changed", fleet[0], actor="x", reason=reason).pk
        live.feed._read_followed("newest_event_id", lambda topics: made)
        live.feed._send()
        return made

    socket = await open_socket("/ws/live/?topics=overview:,events")
    await whole(socket, 2)
    newest = await database_sync_to_async(happen)("while a page is open")
    html = await whole(socket, 2)
    assert html["drawn/events"] == str(newest)
    assert "while a page is open" in html["events"]
    await socket.close()


async def test_an_unknown_topic_ends_it(open_socket):
    socket = await open_socket("/ws/live/?topics=overview:,secrets")
    assert (await socket.receive())["closed"] == consumers.UNKNOWN_TOPIC


async def test_other_sites_are_refused(viewer):
    cookies = await database_sync_to_async(cookies_of)(viewer)
    socket = Socket(websockets, ALL, cookies, origin="https://elsewhere.example")
    assert not await socket.connect()


@pytest.mark.parametrize("how", ["signed out", "blocked", "demoted", "new password"])
async def test_the_session_is_checked_again(open_socket, live, fleet_feed, viewer, monkeypatch, how):
    monkeypatch.setattr(consumers, "SESSION_CHECK_S", 0.0)
    socket = await open_socket("/ws/live/?topics=instances")
    await whole(socket, 1)

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

    await database_sync_to_async(end)()
    live.show(fleet_feed)
    await send(live)
    assert (await socket.next("closed"))["closed"] == consumers.SIGNED_OUT


async def test_without_redis_a_page_gets_the_last_state_and_tries_again(open_socket, live, monkeypatch):
    async def away(group, channel):
        raise RedisAway("Connection refused")

    monkeypatch.setattr(get_channel_layer(), "group_add", away)
    live.source(Source.UNREACHABLE)
    socket = await open_socket("/ws/live/?topics=overview:")
    assert (await socket.receive())["source"] == "unreachable"
    await socket.receive()
    assert (await socket.receive())["closed"] == consumers.TRY_AGAIN
    assert live.feed.connections == 0


async def test_a_tab_that_closes_while_something_is_sent_leaves_no_line_in_the_log(live, fleet_feed, viewer, caplog):
    """As uvicorn does: once the peer is gone, sending raises `ClientDisconnected`."""
    live.show(fleet_feed)
    sent = []

    async def send_to_it(message):
        sent.append(message)
        if message["type"] == "websocket.send":
            raise ClientDisconnected

    async def receive():
        if not sent:
            return {"type": "websocket.connect"}
        await asyncio.Event().wait()

    cookies = await database_sync_to_async(cookies_of)(viewer)
    cookie = f"sessionid={cookies['sessionid']}".encode()
    headers = [(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"cookie", cookie)]
    scope = {"type": "websocket", "path": "/ws/live/", "query_string": b"topics=overview:", "headers": headers}
    await asyncio.wait_for(websockets(scope, receive, send_to_it), 5)
    assert live.feed.connections == 0
    assert caplog.text == ""


async def test_the_system_is_for_operators(open_socket, live, fleet_feed, operator):
    live.show(fleet_feed)
    socket = await open_socket("/ws/live/?topics=system")
    assert (await socket.receive())["closed"] == consumers.NOT_ALLOWED
    cookies = await database_sync_to_async(cookies_of)(operator)
    socket = await open_socket("/ws/live/?topics=system", cookies=cookies)
    before = (await whole(socket, 1))["drawn/system"]
    fleet_feed.trouble["forecasts"] = {"state": "late"}
    live.show(fleet_feed, ts=time.time() + 60)
    await send(live)
    assert (await whole(socket, 1))["drawn/system"] != before
    await socket.close()


def test_charts_are_redrawn_from_the_same_figures(client, live, fleet_feed, viewer):
    live.show(fleet_feed)
    client.force_login(viewer)
    answer = client.get("/?charts=ttft&range=5").json()
    assert set(answer["charts"]) == {"ttft"}
    assert len(answer["sparks"]) == 8
    assert [trace["name"] for trace in answer["charts"]["ttft"]["figure"]["data"]] == ["p50", "p95", "p99"]
    assert "Time to first token: p95 is" in answer["charts"]["ttft"]["sentence"]
    answer = client.get("/fleet/instances/instance-1/?charts=load,kv").json()
    assert set(answer["charts"]) == {"load", "kv"}
