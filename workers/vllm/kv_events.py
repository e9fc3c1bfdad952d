"""KV events of a vLLM server: which blocks its prefix cache has stored, removed and cleared.

A server publishes batches of them on a ZeroMQ socket (`--kv-events-config`), numbered from 0, and keeps the last ones for
replay (`vllm/distributed/kv_events.py`, 0.32). A `Stream` puts what comes in order: it finds what is missing, and when the
server restarted. `follow` reads one server's socket, asks for the replay of what is missing, and reports what cannot be
mended. Nothing that comes raises.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio
from msgspec import Meta, Struct

TokenId = Annotated[int, Meta(ge=0, le=2**62)]
BlockHash = int | bytes
"""As vLLM names a block: 32 bytes, or a number of 64 bits."""


class Stored(Struct, tag="BlockStored", gc=False):
    """Blocks that can be known from now on, each after the one before it."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[TokenId]
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class Removed(Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(Struct, tag="AllBlocksCleared", gc=False):
    """Nothing is cached any longer."""


class Lost(Struct, gc=False):
    """What is known of the cache no longer holds, for *reason*; nothing is cached if it *restarted*, or is followed now."""

    reason: str
    restarted: bool = False


Event = Stored | Removed | Cleared | Lost
KNOWN: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


class _Batch(Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(_Batch)
_event = msgspec.msgpack.Decoder(Stored | Removed | Cleared)

ANY: Final = ("*", "0.0.0.0", "[::]")  # noqa: S104
END: Final = (-1).to_bytes(8, "big", signed=True)
"""Number that ends a replay."""
NUMBER_BYTES: Final = 8


class Source(Struct, frozen=True):
    """Where a server publishes: addresses to connect to."""

    events: str
    replay: str = ""  # "": nothing is kept for replay
    topic: str | None = None  # None: any


def sources(url: str, answer: bytes) -> list[Source]:
    """Return the sources in the *answer* of the server at *url* to `GET /kv_event_sources`, one for each engine.

    Addresses for any interface become those of its host. Nothing where it publishes none, or says something else.
    """
    host = urlsplit(url).hostname or "127.0.0.1"
    try:
        configs = msgspec.json.decode(answer, type=dict[str, dict[str, Any]])
    except msgspec.DecodeError:
        return []
    known = []
    for config in configs.values():
        events, replay, topic = (config.get(name) or "" for name in ("endpoint", "replay_endpoint", "topic"))
        if config.get("publisher", "zmq") != "zmq" or not all(isinstance(one, str) for one in (events, replay, topic)):
            continue
        if address := _reachable(events, host):
            known.append(Source(address, _reachable(replay, host), topic))
    return known


def _reachable(address: str, host: str) -> str:
    """Return *address* with *host* in place of any interface; "" if it is not of TCP with a port."""
    scheme, _, rest = address.partition("://")
    name, _, port = rest.rpartition(":")
    if scheme != "tcp" or not (port.isascii() and port.isdigit()) or not name:
        return ""
    host = f"[{host}]" if ":" in host else host
    return f"tcp://{host if name in ANY else name}:{port}"


class Stream:
    """What comes of one server, in order. `take` what is published and what is replayed."""

    def __init__(self) -> None:
        self.next = 0  # number of the batch that is due
        self.garbled = 0
        """Frames and events that could not be read."""
        self.batches = 0
        self.replays = 0
        self._ts = float("-inf")  # of the last batch

    def take(self, frames: Sequence[bytes]) -> list[Event] | None:
        """Return the events of the published or replayed *frames* (topic, number, batch); None where batches before it
        are missing: mend that, and take it again.

        Nothing for a batch that was there before.
        """
        number = int.from_bytes(frames[-2], "big") if len(frames) >= 2 and len(frames[-2]) == NUMBER_BYTES else -1
        try:
            batch = _batch.decode(frames[-1]) if number >= 0 else None
        except msgspec.DecodeError:
            batch = None
        if batch is None:
            self.garbled += 1
            return [] if number != self.next else None
        events: list[Event] = []
        if number < self.next:
            if batch.ts <= self._ts:
                return []
            events.append(self.begin())
        if number > self.next:
            return events or None
        self.next, self._ts = number + 1, batch.ts
        self.batches += 1
        for raw in batch.events:
            try:
                events.append(_event.decode(raw))
            except msgspec.DecodeError as error:
                if _kind(raw) in KNOWN:
                    self.garbled += 1
                    events.append(Lost(f"an event could not be read: {error}"))
        return events

    def begin(self) -> Lost:
        """Begin with another server."""
        self.next, self._ts = 0, float("-inf")
        return Lost("the server restarted", restarted=True)

    def skip(self, number: int) -> Lost:
        """Continue at *number*: what is before it is not available."""
        before, self.next = self.next, number
        return Lost(f"events {before} to {number - 1} are gone")


def _kind(raw: msgspec.Raw) -> str:
    try:
        event = msgspec.msgpack.decode(raw)
    except msgspec.DecodeError:
        return "BlockStored"
    kind = event.get("type") if isinstance(event, dict) else None
    return kind if isinstance(kind, str) else "BlockStored"


REPLAY_S: Final = 5.0
"""Longest wait for the next batch of a replay: vLLM answers between two batches, or every 0.1 s."""
BUFFERED: Final = 10_000
"""Batches that wait to be read; more are dropped, and replayed."""


class Follower:
    """Reads the events of one server at *source* and gives them to *take*. `run` until it is cancelled."""

    def __init__(self, source: Source, take: Callable[[list[Event]], None]) -> None:
        self.source, self.stream, self._take = source, Stream(), take

    async def run(self) -> None:
        context = zmq.asyncio.Context.instance()
        published = context.socket(zmq.SUB)
        published.setsockopt(zmq.LINGER, 0)
        published.setsockopt(zmq.RCVHWM, BUFFERED)
        topic = None if self.source.topic is None else self.source.topic.encode()
        connected = published.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            published.setsockopt(zmq.SUBSCRIBE, topic or b"")
            poller = zmq.asyncio.Poller()
            poller.register(connected, zmq.POLLIN)
            poller.register(published, zmq.POLLIN)
            published.connect(self.source.events)
            while True:
                ready = dict(await poller.poll())
                if connected in ready:  # what was published meanwhile is missing, or it is another server by now
                    await connected.recv_multipart()
                    if not self.stream.next:
                        self._take([self.stream.begin()])
                    await self._mend(context)
                elif published in ready:
                    frames = await published.recv_multipart()
                    if topic is None or frames[0] == topic:  # subscribed by its beginning alone
                        await self._give(frames, context)
                    await asyncio.sleep(0)  # what is there already does not wait for the loop
        except zmq.ZMQError as error:
            self._take([Lost(f"{self.source.events}: {error}")])
        finally:
            published.disable_monitor()
            connected.close()
            published.close()

    async def _give(self, frames: list[bytes], context: Any) -> None:
        """Take *frames*; where something before them is missing, have it replayed, or say that it is gone."""
        events = self.stream.take(frames)
        if events:
            self._take(events)
        if events is not None and not _is_another(events, self.stream):
            return
        await self._mend(context)
        number = int.from_bytes(frames[-2], "big")
        if number >= self.stream.next:
            self._take_late(number, frames)

    def _take_late(self, number: int, frames: list[bytes]) -> None:
        """Take *frames*, of batch *number*, though what is before them is gone, or they cannot be read."""
        lost: list[Event] = [self.stream.skip(number)] if number > self.stream.next else []
        events = self.stream.take(frames)
        if events is None:
            lost.append(self.stream.skip(number + 1))
        self._take([*lost, *(events or [])])

    async def _mend(self, context: Any) -> None:
        """Take what the server replays from the batch that is due; from its first one if it is another server by now."""
        if not self.source.replay:
            self._take([Lost("the server keeps no events for replay: what it has cached is not known")])
            return
        self.stream.replays += 1
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        try:
            dealer.connect(self.source.replay)
            if await self._replay(dealer, max(0, self.stream.next - 1)):
                await self._replay(dealer, 0)
        except TimeoutError:
            return  # what is missing is missing: the next batch shows it
        finally:
            dealer.close()

    async def _replay(self, dealer: Any, first: int) -> bool:
        """Take what the server replays from batch *first*; return whether it is another server, which has to be asked again.

        That it still has the last batch shows that it is not.
        """
        last, is_there, another = self.stream.next - 1, False, False
        await dealer.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
        while True:
            async with asyncio.timeout(REPLAY_S):
                frames = await dealer.recv_multipart()
            if len(frames) < 3 or frames[-2] == END:
                break
            number = int.from_bytes(frames[-2], "big")
            is_there = is_there or number == last
            events = None if another else self.stream.take(frames)
            await asyncio.sleep(0)  # a hundred thousand may be there already
            if another:
                continue
            if events is None:
                self._take_late(number, frames)
            elif events:
                self._take(events)
                another = _is_another(events, self.stream)
        if last >= 0 and not is_there and not another:
            another = self.stream.next == last + 1
            if another:
                self._take([self.stream.begin()])
        return another


def _is_another(events: list[Event], stream: Stream) -> bool:
    """Whether *events* say that the server restarted, and its first batches are missing."""
    return stream.next == 0 and bool(events) and isinstance(events[0], Lost) and events[0].restarted
