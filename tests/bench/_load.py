"""Closed-loop load over raw keep-alive connections: every connection sends its next request when the last is
answered.
"""

import asyncio
import json
import random
import time
from functools import partial

import numpy as np


class Connection(asyncio.Protocol):
    def __init__(self, request: bytes, latencies_s: list[float], stop_s: float, most: int) -> None:
        self.request, self.latencies_s, self.stop_s, self.left = request, latencies_s, stop_s, most
        self.closed = asyncio.get_running_loop().create_future()
        self.failed = ""

    def connection_made(self, transport):
        self.transport = transport
        self.send()

    def send(self):
        self.data = bytearray()
        self.length = -1
        self.sent_s = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data):
        self.data += data
        if self.length < 0:
            head_end = self.data.find(b"\r\n\r\n")
            if head_end < 0:
                return
            head = bytes(self.data[:head_end]).lower()
            if b" 200 " not in head[:20]:
                self.failed = bytes(self.data[:500]).decode(errors="replace")
                self.transport.close()
                return
            at = head.find(b"content-length:")
            self.length = head_end + 4 + int(head[at + 15 : (head + b"\r\n").find(b"\r\n", at)]) if at >= 0 else 0
        done = len(self.data) >= self.length if self.length else self.data.endswith(b"0\r\n\r\n")
        if done:
            now_s = time.perf_counter()
            self.latencies_s.append(now_s - self.sent_s)
            self.left -= 1
            if now_s < self.stop_s and self.left:
                self.send()
            else:
                self.transport.close()

    def connection_lost(self, error):
        if not self.closed.done():
            self.closed.set_result(None)


def messages(tokens: int, seed: int) -> list[dict[str, str]]:
    """Return a conversation of *tokens*, four characters each, in messages of 2,000: as long as those of agents."""
    if not tokens:
        return [{"role": "user", "content": "Say hello to the fleet."}]
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(500)]
    return [
        {"role": "assistant" if at % 2 else "user", "content": " ".join(rng.choices(words, k=1_000))}
        for at in range(max(1, tokens // 2_000) | 1)
    ]


def request(port: int, key: str, *, stream: bool, tokens: int = 0, seed: int = 0) -> bytes:
    body = {"model": "m", "messages": messages(tokens, seed), "max_tokens": 64}
    raw = json.dumps(body | ({"stream": True} if stream else {}), separators=(",", ":")).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer %b\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (port, key.encode(), len(raw), raw)
    )


async def drive(
    port: int, key: str, *, connections: int, seconds: float, streams: float = 0.0, most: int = 1 << 60, tokens: int = 0
) -> dict[str, float]:
    """Return answers per second and latencies over *seconds*, or until each connection has had *most* answers.

    *streams* is the share of connections that ask for streams, *tokens* the length of a body (a short one without).
    """
    loop = asyncio.get_running_loop()
    latencies_s: list[float] = []
    sent = [request(port, key, stream=at < streams * connections, tokens=tokens, seed=at) for at in range(connections)]
    began_s = time.perf_counter()
    made = [
        (
            await loop.create_connection(
                partial(Connection, message, latencies_s, began_s + seconds, most), "127.0.0.1", port
            )
        )[1]
        for message in sent
    ]
    await asyncio.wait_for(asyncio.gather(*(connection.closed for connection in made)), seconds + 30)
    elapsed_s = time.perf_counter() - began_s
    failed = [connection.failed for connection in made if connection.failed]
    if failed or not latencies_s:
        raise RuntimeError(f"{len(failed)} connections failed, first: {failed[:1]}")
    p50, p99 = np.percentile(np.array(latencies_s) * 1000, [50, 99])
    return {
        "per_s": len(latencies_s) / elapsed_s,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "answers": len(latencies_s),
    }
