"""A closed loop of streams in a separate process: each sends its next request when the last has ended.

    python -m tests.vllm.closed_loop URL KEY MODEL STREAMS REQUESTS MEAN_TOKENS SEED

Prints JSON: output tokens a second while all streams were busy, and E2E latencies in ms. Outputs have exactly the lengths
that the seed draws, so two runs with one seed ask for the same work.
"""

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

import numpy as np

from tests.bench._load import Connection


class Stream(Connection):
    """One of the streams; they share *lengths*, what is still to be asked for, and *ended*: (moment, tokens)."""

    def __init__(self, head: str, model: str, lengths: list[int], ended: list[tuple[float, int]], e2e_s: list[float]):
        super().__init__(b"", e2e_s, float("inf"), 1 << 60)
        self.head, self.model, self.lengths, self.ended = head, model, lengths, ended
        self.tokens = 0

    def send(self):
        if self.tokens:
            self.ended.append((time.perf_counter(), self.tokens))
        if not self.lengths:
            self.transport.close()
            return
        self.tokens = self.lengths.pop()
        body = {"model": self.model, "prompt": [7, 8, 9, 10], "max_tokens": self.tokens, "ignore_eos": True}
        raw = json.dumps(body | {"stream": True})
        self.request = f"{self.head}Content-Length: {len(raw)}\r\n\r\n{raw}".encode()
        super().send()


async def measure(url: str, key: str, model: str, streams: int, requests: int, mean: int, seed: int) -> dict:
    parts = urlsplit(url)
    head = (
        f"POST {parts.path}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    )
    lengths = np.random.default_rng(seed).integers(mean // 2, mean * 3 // 2 + 1, requests).tolist()
    ended: list[tuple[float, int]] = []
    e2e_s: list[float] = []
    loop = asyncio.get_running_loop()
    began_s = time.perf_counter()
    made = [
        (await loop.create_connection(lambda: Stream(head, model, lengths, ended, e2e_s), parts.hostname, parts.port))[
            1
        ]
        for _ in range(streams)
    ]
    await asyncio.gather(*(stream.closed for stream in made))
    failed = [stream.failed for stream in made if stream.failed]
    if failed:
        raise RuntimeError(f"{len(failed)} streams failed: {failed[0]}")
    busy = ended[: len(ended) - streams]  # afterwards there are fewer and fewer
    return {
        "tokens_per_s": sum(tokens for _, tokens in busy) / (busy[-1][0] - began_s),
        "e2e_p50_ms": float(np.median(e2e_s[: len(busy)])) * 1000,
        "answers": len(e2e_s),
    }


if __name__ == "__main__":
    url, key, model, *numbers = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(url, key, model, *map(int, numbers)))))
