"""KV events of an emulated server, as vLLM 0.32 publishes them: what the simulator's engine stores in its prefix cache, and
what it reuses.

Only blocks of prompts are published, for only these can be found by another request here.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from workers.vllm.kv_events import END, NUMBER_BYTES, Cleared, Removed, Stored

MEDIUM = "GPU"
BUFFERED = 10_000
"""Batches kept for replay, vLLM's default."""
BIND_TRIES = 50
ANY_PORT = "tcp://127.0.0.1:*"
_pack = msgspec.msgpack.Encoder().encode


class PromptBlock(NamedTuple):
    """A full block of a prompt, equal to another with the same tokens up to its end."""

    digest: int
    parent: int | None
    token_ids: tuple[int, ...]
    adapter: str = ""
    salt: str = ""


def _bind(socket: Any, address: str) -> None:
    """Listen at *address*, where given: its last socket closes within milliseconds. At a free port if another has it."""
    for _ in range(BIND_TRIES if address else 0):
        try:
            socket.bind(address)
        except zmq.ZMQError:
            time.sleep(0.001)
        else:
            return
    socket.bind(ANY_PORT)


class Publisher:
    """Publishes the events of one server. Call `start` in a running event loop, `close` at the end."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._events: list[Stored | Removed | Cleared] = []
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFERED)
        self._next = 0
        self._sockets: list[Any] = []
        self._addresses = ("", "")
        self._replaying: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen at the same addresses as before, or at free ones, and number from 0."""
        context = zmq.asyncio.Context.instance()
        self._sockets = [zmq.Context.instance().socket(zmq.PUB), context.socket(zmq.ROUTER)]
        for socket, address in zip(self._sockets, self._addresses, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            _bind(socket, address)
        published, replayed = (socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets)
        self._addresses = published, replayed
        self._replaying = asyncio.create_task(self._replay())

    def close(self) -> None:
        """End as the process does: what it published is not kept."""
        if self._replaying is not None:
            self._replaying.cancel()
        for socket in self._sockets:
            socket.close()
        self._sockets = []
        self._events.clear()
        self._kept.clear()
        self._next = 0

    def sources(self) -> dict[str, dict[str, Any]]:
        """Return the answer to `GET /kv_event_sources`."""
        events, replay = self._addresses
        return {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events,
                "replay_endpoint": replay,
                "buffer_steps": BUFFERED,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": "",
            }
        }

    def stored(self, block: Hashable) -> None:
        if isinstance(block, PromptBlock):
            keys = [key for key in (block.adapter, block.salt if block.parent is None else "") if key]
            self._events.append(
                Stored(
                    [block.digest],
                    block.parent,
                    list(block.token_ids),
                    self._block_tokens,
                    MEDIUM,
                    block.adapter or None,
                    [keys or None],
                    0,
                )
            )

    def removed(self, block: Hashable) -> None:
        if isinstance(block, PromptBlock):
            self._events.append(Removed([block.digest], MEDIUM, 0))

    def cleared(self) -> None:
        """Publish that nothing is cached, at once."""
        self._events = [Cleared()]
        self.publish()

    def publish(self) -> None:
        """Publish the events since the last call as one batch. Call once a step."""
        if not self._events or not self._sockets:
            return
        number, batch = self._next.to_bytes(NUMBER_BYTES, "big"), _pack((time.time(), self._events, 0))
        self._next += 1
        self._events = []
        self._kept.append((number, batch))
        self._sockets[0].send_multipart((b"", number, batch))

    async def _replay(self) -> None:
        """Answer requests for what was published."""
        router = self._sockets[1]
        with contextlib.suppress(zmq.ZMQError):  # closed
            while True:
                frames = await router.recv_multipart()
                if len(frames) != 3:
                    continue
                caller, _, first = frames
                for number, batch in list(self._kept):
                    if number >= first:
                        await router.send_multipart((caller, b"", b"", number, batch))
                await router.send_multipart((caller, b"", b"", END, b""))
