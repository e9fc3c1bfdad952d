"""KV events are read in order, gaps are mended by replay, and what cannot be mended is said; by the emulated server's."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq

from tests.workers.conftest import eventually
from workers.vllm.kv_events import BUFFERED, Cleared, Event, Follower, Lost, Removed, Source, Stored, Stream, sources

pack = msgspec.msgpack.encode
BLOCK = {
    "type": "BlockStored",
    "block_hashes": [b"h" * 32],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None],
    "group_idx": 0,
    "session_id": None,
}


def frames(number: int, *events: object, ts: float | None = None, topic: bytes = b"") -> list[bytes]:
    return [topic, number.to_bytes(8, "big"), pack([float(number) if ts is None else ts, list(events), 0])]


def kinds(events: list[Event] | None) -> list[str] | None:
    return None if events is None else [type(event).__name__ for event in events]


def test_what_is_due_is_taken_once_and_what_is_missing_is_noticed() -> None:
    stream = Stream()
    assert kinds(stream.take(frames(0, BLOCK))) == ["Stored"]
    assert stream.take(frames(0, BLOCK)) == []  # replayed, and published too
    assert stream.take(frames(2, {"type": "AllBlocksCleared"})) is None
    assert kinds(stream.take(frames(1, {"type": "BlockRemoved", "block_hashes": [7], "medium": None}))) == ["Removed"]
    assert kinds(stream.take(frames(2, {"type": "AllBlocksCleared"}))) == ["Cleared"]
    lost = stream.skip(9)
    assert (lost.reason, lost.restarted, stream.next) == ("events 3 to 8 are gone", False, 9)


def test_a_server_that_counts_from_the_beginning_has_restarted() -> None:
    stream = Stream()
    for number in range(3):
        stream.take(frames(number, BLOCK))
    taken = stream.take(frames(0, BLOCK, ts=50.0))
    assert kinds(taken) == ["Lost", "Stored"]
    assert taken is not None
    assert taken[0] == Lost("the server restarted", restarted=True)
    assert stream.take(frames(2, BLOCK, ts=60.0)) is None  # 1 is missing


@pytest.mark.parametrize(
    "garbage",
    [
        [],
        [b""],
        [b"", b"short", b"x"],
        [b"", (0).to_bytes(8, "big"), b"\xc1"],
        [b"", (0).to_bytes(8, "big"), pack({"no": "batch"})],
        [b"", (5).to_bytes(8, "big"), b""],
    ],
)
def test_garbage_is_counted_and_does_not_raise(garbage: list[bytes]) -> None:
    stream = Stream()
    stream.take(garbage)
    assert (stream.garbled, stream.next) == (1, 0)


@pytest.mark.parametrize(
    ("event", "known"),
    [
        (BLOCK | {"token_ids": ["x"]}, True),
        (BLOCK | {"block_size": 0}, True),
        ({"type": "BlockStored"}, True),
        ({"type": "SomethingNew", "of": 1}, False),
        (17, True),
    ],
)
def test_an_event_that_cannot_be_read_loses_the_cache_and_an_unknown_kind_does_not(event: object, known: bool) -> None:
    stream = Stream()
    assert kinds(stream.take(frames(0, event, BLOCK))) == (["Lost"] if known else []) + ["Stored"]
    assert stream.garbled == known


def test_addresses_for_any_interface_become_those_of_the_servers_host() -> None:
    answer = {
        "0": {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv"},
        "1": {"publisher": "zmq", "endpoint": "tcp://10.0.0.7:5559", "replay_endpoint": None, "topic": ""},
        "2": {"publisher": "null", "endpoint": "tcp://*:5560"},
        "3": {"publisher": "zmq", "endpoint": "inproc://cache"},
    }
    assert sources("http://10.0.0.5:8000/one", msgspec.json.encode(answer)) == [
        Source("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558", "kv"),
        Source("tcp://10.0.0.7:5559", "", ""),
    ]
    assert sources("http://[::1]:8000", msgspec.json.encode(answer))[0].events == "tcp://[::1]:5557"
    for wrong in (b"", b"{}", b"[]", b'{"0": 3}', b"<html>"):
        assert sources("http://10.0.0.5:8000", wrong) == []


@dataclass
class Followed:
    """What came of a server."""

    events: list[Event] = field(default_factory=list)
    connected: bool = False  # it begins by that

    def take(self, events: list[Event]) -> None:
        self.events += events[events == [Lost("the server restarted", restarted=True)] and not self.connected :]
        self.connected = True

    def names(self, kind: type) -> list[object]:
        return [name for event in self.events if isinstance(event, kind) for name in event.block_hashes]


@asynccontextmanager
async def following(source: Source):
    followed = Followed()
    follower = Follower(source, followed.take)
    task = asyncio.create_task(follower.run())
    try:
        yield followed, follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def source_of(emulator, name: str = "one") -> Source:
    _, answer = await emulator.call("GET", f"/{name}/kv_event_sources")
    (source,) = sources(f"{emulator.url}/{name}", msgspec.json.encode(answer))
    return source


PUBLISHES = {
    "enable_prefix_caching": True,
    "enable_kv_cache_events": True,
    "enable_prompt_tokens_details": True,
    "block_size_tokens": 4,
    "kv_blocks": 8,
    "max_model_len": 32,
    "max_num_seqs": 4,
}


async def test_an_emulated_server_publishes_what_it_stores_evicts_and_clears_and_says_what_was_cached(emulator) -> None:
    await emulator.ready(**PUBLISHES)
    first, other = list(range(1, 14)), list(range(101, 126))
    await emulator.complete(prompt=first, max_tokens=1)  # before anyone listens: it is replayed
    async with following(await source_of(emulator)) as (followed, follower):
        await eventually(lambda: len(followed.names(Stored)) == 3)
        stored = [event for event in followed.events if isinstance(event, Stored)]
        assert [event.token_ids for event in stored] == [first[:4], first[4:8], first[8:12]]
        assert [event.parent_block_hash for event in stored] == [None, *followed.names(Stored)[:2]]
        _, answer = await emulator.complete(prompt=first, max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 12}
        events = await emulator.stream(prompt=first, max_tokens=1, stream_options={"include_usage": True})
        assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 12}
        _, answer = await emulator.complete(prompt=first, max_tokens=1, cache_salt="mine")
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        await eventually(lambda: len(followed.names(Stored)) == 6)
        salted = [event for event in followed.events if isinstance(event, Stored)][3:]
        assert [event.extra_keys for event in salted] == [[["mine"]], [None], [None]]
        await emulator.complete(prompt=other, max_tokens=1)
        await eventually(lambda: followed.names(Removed) != [])
        await emulator.call("POST", "/one/reset_prefix_cache")
        await eventually(lambda: isinstance(followed.events[-1], Cleared))
        assert follower.stream.garbled == 0
        assert not any(isinstance(event, Lost) for event in followed.events)


async def test_a_restart_of_the_server_is_seen(emulator) -> None:
    instance = await emulator.ready(**PUBLISHES)
    await emulator.complete(prompt=list(range(9)), max_tokens=1)
    async with following(await source_of(emulator)) as (followed, _):
        await eventually(lambda: len(followed.names(Stored)) == 2)
        await emulator.call("POST", "/emulator/instances/one/fault", {"kind": "crash"})
        await emulator.call("POST", "/emulator/instances/one/fault", {"kind": "none"})
        await eventually(lambda: instance.listening)
        await emulator.complete(prompt=list(range(13)), max_tokens=1)
        await eventually(lambda: len(followed.names(Stored)) == 5)
        assert followed.events[2] == Lost("the server restarted", restarted=True)


@pytest.mark.parametrize("kept", [True, False])
async def test_a_gap_is_mended_by_replay_or_said(kept: bool) -> None:
    context = zmq.Context.instance()
    publisher, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    for one in (publisher, router):
        one.setsockopt(zmq.LINGER, 0)
        one.bind("tcp://127.0.0.1:*")
    addresses = [one.getsockopt_string(zmq.LAST_ENDPOINT) for one in (publisher, router)]
    asked: list[int] = []

    async def replay() -> None:
        while True:
            if router.poll(0):
                caller, _, first = router.recv_multipart()
                asked.append(int.from_bytes(first, "big"))
                for number in range(asked[-1], 3 if kept else 1) if len(asked) > 1 else ():
                    router.send_multipart([caller, b"", *frames(number, BLOCK | {"block_hashes": [number]})])
                router.send_multipart([caller, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])
            await asyncio.sleep(0.005)

    task = asyncio.create_task(replay())
    try:
        async with following(Source(addresses[0], addresses[1])) as (followed, follower):
            await eventually(lambda: asked == [0])

            async def came() -> bool:
                publisher.send_multipart(frames(0, BLOCK | {"block_hashes": [0]}))
                return followed.names(Stored) == [0]

            await eventually(came)
            publisher.send_multipart(frames(3, BLOCK | {"block_hashes": [3]}))
            await eventually(lambda: followed.names(Stored)[-1] == 3)
            assert asked == [0, 0]  # with the last one that it has, by which it knows the server
            assert followed.names(Stored) == ([0, 1, 2, 3] if kept else [0, 3])
            assert [event for event in followed.events if isinstance(event, Lost)] == (
                [] if kept else [Lost("events 1 to 2 are gone")]
            )
            assert (follower.stream.next, BUFFERED) == (4, 10_000)
    finally:
        task.cancel()
        publisher.close()
        router.close()
