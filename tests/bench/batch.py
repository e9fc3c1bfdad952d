"""A batch alongside interactive load on the emulated fleet, against the same load without: its price, and what it fills.

The whole stack with the large models of the demo's fleet. Interactive requests come at three hours of the day, one for each
region, so that one is full, one half empty and one in its trough; they repeat every `--minutes`, so that both parts have the
same.
"""

import argparse
import asyncio
import contextlib
import io
import json
import math
import os
import random
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import openai

from tests.bench._soak.stack import Stack
from workers.traffic.prompts import Instructions
from workers.traffic.waves import KINDS, Stream, requested_tokens, streams

ENDPOINT: Final = "/v1/chat/completions"
SEED: Final = 30
REPORT_S: Final = 30.0
END_STATES: Final = ("completed", "failed", "expired")


class Load(NamedTuple):
    """What a model of the demo's fleet gets."""

    context_tokens: int
    peak_per_s: float
    """Interactive requests at the region's busiest hour."""
    share: float
    """Of the lines."""
    line_tokens: int
    """Asked of an answer to a line."""


LOADS: Final = {
    "llama-2-70b": Load(4_096, 2.9, 0.41, 45),
    "bloom-176b": Load(2_048, 4.8, 0.59, 50),
}
"""Set so that interactive requests use about 35% of the fleet, and that the lines take as long for both models.

The small models get nothing, and do not count as fleet: to fill one of their instances takes so many tokens a second that
the cores of the machine would be what is measured.
"""
REGIONS: Final = ("us-central", "us-east", "us-west")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--settle-s", type=float, default=45.0, help="with interactive load, before the first part")
    parser.add_argument("--minutes", type=float, default=3.0, help="of the part without a batch")
    parser.add_argument("--most-minutes", type=float, default=11.0, help="of the part with it")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on the interactive load")


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pilothouse-batch-") as folder:
        stack = Stack(Path(folder), "--no-traffic")
        load = None
        try:
            link = stack.wait_until_up()
            stack.wait_for("the sign-in page", lambda: stack.sign_in(link) or True)
            stack.wait_for("a ready fleet", lambda: ready_ratio(stack) > 0.99)
            keys = stack.keys("acme", "globex")
            load = Interactive(f"{stack.url}/v1", keys["acme"], options.minutes * 60, options.rate)
            say(f"the fleet is ready; interactive load for {options.settle_s:g} s")
            time.sleep(options.settle_s)
            load.restart()
            before = watch(stack, lambda: "", options.minutes * 60)
            client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=keys["globex"], max_retries=10)
            load.restart()
            batch = start(client, options.lines)

            def ended() -> str:
                nonlocal batch
                with contextlib.suppress(openai.APIError):
                    batch = client.batches.retrieve(batch.id)
                done = batch.request_counts.completed if batch.request_counts else 0
                return "" if batch.status in END_STATES else f"{batch.status}, {done:,} of {options.lines:,} lines"

            after = watch(stack, ended, options.most_minutes * 60)
            batch = client.batches.retrieve(batch.id)
            answers = client.files.content(batch.output_file_id).text.splitlines() if batch.output_file_id else []
            ids = [json.loads(line)["custom_id"] for line in answers]
            done = batch.request_counts.completed if batch.request_counts else 0
            return {
                "interactive_ttft_p95_ratio": after["ttft_p95_ms"] / before["ttft_p95_ms"],
                "interactive_ttft_p50_ms": [before["ttft_p50_ms"], after["ttft_p50_ms"]],
                "interactive_ttft_p95_ms": [before["ttft_p95_ms"], after["ttft_p95_ms"]],
                "interactive_requests_per_s": [part["requests"] / part["seconds"] for part in (before, after)],
                "interactive_failed": load.failed,
                "lines_answered_once": len(set(ids)) if len(ids) == len(set(ids)) else -1,
                "fleet_use_before": before["use"],
                "fleet_use_after": after["use"],
                "deadline_met": float(batch.status == "completed"),
                "lines_per_s": done / after["seconds"],
                "rss_growth_mb": after["rss_mb"] - before["rss_mb"],
                "cpu_cores": {
                    part: [round(each["cpu"].get(part, 0.0), 3) for each in (before, after)] for part in after["cpu"]
                },
            }
        finally:
            if load is not None:
                load.stop()
            stack.interrupt()
            stack.kill()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def ready_ratio(stack: Stack) -> float:
    states = stack.summary(stack.url)["instances"]["state"]
    return sum(state == "ready" for state in states) / max(1, len(states))


def fleet_use(stack: Stack) -> float:
    """Return the mean use, of sequences or of KV memory, whichever is more, of the instances that serve `LOADS`."""
    rows = stack.summary(stack.url)["instances"]
    return statistics.mean(
        use or 0.0 for model, use in zip(rows["model"], rows["use_ratio"], strict=True) if model in LOADS
    )


class Interactive:
    """Sender of interactive requests, in a thread: those of *period_s*, drawn once, again and again."""

    def __init__(self, url: str, key: str, period_s: float, rate: float) -> None:
        self.url, self.period_s, self.failed = url, period_s, 0
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.requests = self._draw(rate)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sender: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.restart()

    def _draw(self, rate: float) -> list[tuple[float, str, bytes]]:
        """Return (seconds from the start, region, body) of Poisson arrivals."""
        draw, instructions, drawn = random.Random(SEED), Instructions(SEED), []
        endpoints = [(model, region, load.context_tokens) for model, load in LOADS.items() for region in REGIONS]
        for stream in streams(endpoints, {"interactive": ""}, math.inf):
            kind = replace(KINDS["interactive"], peak_per_s=rate * LOADS[stream.model].peak_per_s)
            at_s = 0.0
            while (at_s := at_s + draw.expovariate(replace(stream, kind=kind).rate_per_s(0.0, False))) < self.period_s:
                drawn.append((at_s, stream.region, body_of(stream, draw, instructions)))
        return sorted(drawn, key=lambda one: one[0])

    def restart(self) -> None:
        """Begin the period again; open requests end as they would."""

        async def begin() -> None:
            if self._session is None:
                connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
                self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
            if self._sender is not None:
                self._sender.cancel()
            self._sender = asyncio.create_task(self._send_all(self._session))

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(60)

    async def _send_all(self, session: aiohttp.ClientSession) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        while True:
            for at_s, region, body in self.requests:
                await asyncio.sleep(began_s + at_s - clock())
                task = asyncio.create_task(self._send(session, region, body))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            began_s += self.period_s

    async def _send(self, session: aiohttp.ClientSession, region: str, body: bytes) -> None:
        headers = {**self.headers, "X-Region": region, "X-SLO-Class": "interactive"}
        try:
            async with session.post(f"{self.url}/completions", data=body, headers=headers) as response:
                async for _ in response.content.iter_any():
                    pass
                self.failed += response.status != 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            self.failed += 1

    def stop(self) -> None:
        """Stop sending, and cut off what is open."""

        async def end() -> None:
            tasks = [task for task in (self._sender, *self._tasks) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._session is not None:
                await self._session.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def body_of(stream: Stream, draw: random.Random, instructions: Instructions) -> bytes:
    prompt_tokens, output_tokens, most_output = requested_tokens(stream, draw)
    prompt = instructions.prompt(prompt_tokens, output_tokens, True)
    streamed = draw.random() < stream.kind.streamed
    body = {"model": stream.model, "prompt": prompt, "max_tokens": most_output, "stream": streamed}
    return json.dumps(body).encode()


def start(client: openai.OpenAI, lines: int) -> Any:
    """Create the batch: lines of every model, mixed."""
    models = random.Random(SEED).choices(list(LOADS), [load.share for load in LOADS.values()], k=lines)
    content = io.BytesIO()
    for number, model in enumerate(models):
        words = LOADS[model].line_tokens
        message = {"role": "user", "content": f"Write about the number {number} in about {words} words."}
        body = {"model": model, "messages": [message], "max_tokens": 4 * words}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
        content.write(json.dumps(line).encode() + b"\n")
    content.seek(0)
    file = client.files.create(file=("bench.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")


def watch(stack: Stack, progress: Any, most_s: float) -> dict[str, Any]:
    """Watch until *progress* returns nothing after it returned something, or *most_s*.

    Return mean use of the fleet, TTFT of interactive requests, memory of the web process and CPU cores by part of the stack.
    """
    began_at, uses, sizes, cpu_s = time.time(), [], [], cpu_by_part(stack)
    said_at, began = began_at, False
    while time.time() < began_at + most_s:
        time.sleep(1.0)
        said = progress()
        if began and not said:
            break
        began = began or bool(said)
        with contextlib.suppress(OSError):  # a busy machine answers late: one sample less
            uses.append(fleet_use(stack))
        sizes.append(sum(stack.by_part().get("web", {}).values()) / 2**20)
        if uses and time.time() - said_at >= REPORT_S:
            said_at = time.time()
            say(f"{said_at - began_at:4.0f} s: use {statistics.mean(uses[-30:]):.3f}  {said}")
    seconds = time.time() - began_at
    now_s = cpu_by_part(stack)
    rows = stack.rows(
        "SELECT ttft_ms FROM gateway_ledgerrow WHERE slo_class = 'interactive' AND ttft_ms IS NOT NULL"
        " AND strftime('%s', arrived_at) + 0 >= ?",
        int(began_at),
    )
    times = sorted(row["ttft_ms"] for row in rows)
    return {
        "seconds": seconds,
        "use": statistics.mean(uses) if uses else math.nan,
        "ttft_p50_ms": times[len(times) // 2],
        "ttft_p95_ms": times[int(0.95 * len(times))],
        "requests": float(len(times)),
        "rss_mb": statistics.median(sizes[-10:]),
        "cpu": {part: max(0.0, used_s - cpu_s.get(part, 0.0)) / seconds for part, used_s in now_s.items()},
    }


def cpu_by_part(stack: Stack) -> dict[str, float]:
    """Return the CPU seconds that each part of the stack has used, and this process, which sends the interactive load."""
    used_s = {"sender": time.process_time()}
    for part, processes in stack.by_part().items():
        for number in processes:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                used_s[part] = used_s.get(part, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return used_s
