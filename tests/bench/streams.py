"""A thousand concurrent streams through one gateway process, on emulated instances, for a minute.

Every connection sends its next request when its last stream has ended. Reported: streams and tokens, errors, time to
first byte, the slowest `/healthz` (polled ten times a second), and the change of the gateway's memory between the first
and last quarter. A minimal Python proxy is measured too: processor time per token needs a reference on the same
machine.

With `--relays 2`, as many streams go through each of that many relays beside a dispatcher, too, in turn with the one
process. `capacity_ratio` is how many times as many tokens these carry on as many cores as the one process does on one, by
processor time: what each uses idle, and then for each token, the dispatcher's in their cores, too.
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

import uvloop

from tests.bench.gateway import KEY, cpu_s, free_port, median, process, seed, uvicorn

GATEWAY = "controlplane.asgi:application"
INSTANCES = 16
IDLE_S = 5.0
PROFILE = {  # Llama-3.1-8B on 4 x A100, slowed to about 25 tokens a second for each stream
    "prefill_t0_s": 0.0303,
    "prefill_a_s": 0.0184,
    "prefill_b_s_per_token": 5.573e-5,
    "prefill_c_s_per_token2": 7.87e-10,
    "decode_a_s": 0.03,
    "decode_b_s_per_sequence": 1.5e-4,
    "decode_c_s_per_token": 0.0,
}


def put_instances(port: int, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Make the emulated instances of *specs* at the emulator on *port*."""
    for name, spec in specs.items():
        address = f"http://127.0.0.1:{port}/emulator/instances/{name}"
        urllib.request.urlopen(urllib.request.Request(address, json.dumps(spec).encode(), method="PUT")).close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1000, help="at one time")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=200, help="of a stream on average")
    parser.add_argument("--relays", type=int, default=0, help="measured beside a dispatcher, too; 0: none")
    parser.add_argument("--rounds", type=int, default=1, help="each measured in turn; medians are reported")


class Stream(asyncio.Protocol):
    """Run one connection: send, count events, repeat."""

    def __init__(self, totals: dict[str, int], ttft_ms: list[float], requests: list[bytes], stop_s: float) -> None:
        self.totals, self.ttft_ms, self.requests, self.stop_s = totals, ttft_ms, requests, stop_s
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
        self.ask()

    def ask(self):
        self.tail = b""
        self.began = False
        self.asked_s = time.perf_counter()
        self.transport.write(random.choice(self.requests))

    def data_received(self, data):
        if not self.began:
            self.began = True
            self.ttft_ms.append((time.perf_counter() - self.asked_s) * 1000)
            if b" 200 " not in data[:20]:
                self.totals["errors"] += 1
                print(data[:300], file=sys.stderr)
                self.transport.close()
                return
        self.totals["events"] += data.count(b"data: ")
        if b'"error"' in data:
            self.totals["errors"] += 1
        self.tail = (self.tail + data)[-32:]
        if self.tail.endswith(b"\r\n0\r\n\r\n"):
            self.totals["streams"] += 1
            if b"[DONE]" not in self.tail:
                self.totals["errors"] += 1
            if time.perf_counter() < self.stop_s:
                self.ask()
            else:
                self.done = True
                self.transport.close()

    def connection_lost(self, error):
        if not getattr(self, "done", False):
            self.totals["errors"] += 1
        if not self.closed.done():
            self.closed.set_result(None)


def request(tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Tell the fleet a story. " * 20}],
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    )


async def load(ports: list[int], pids: list[int], options: argparse.Namespace) -> dict[str, float]:
    """Load the servers at *ports* alike; *pids* are their processes, and any other whose processor time counts."""
    loop = asyncio.get_running_loop()
    totals = {"streams": 0, "events": 0, "errors": 0}
    ttft_ms: list[float] = []
    lengths = range(options.tokens // 2, options.tokens * 3 // 2)  # random, to keep streams out of step
    requests = [request(tokens) for tokens in lengths]
    idle_s = [cpu_s(pid) for pid in pids]
    await asyncio.sleep(IDLE_S)
    idle = [(cpu_s(pid) - before_s) / IDLE_S for pid, before_s in zip(pids, idle_s, strict=True)]
    watch = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "tests.bench._watch", str(ports[0]), str(pids[0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    began_s, cpu_before_s = time.perf_counter(), [cpu_s(pid) for pid in pids]
    made = []
    for index in range(options.streams * len(ports)):
        made.append(
            (
                await loop.create_connection(
                    lambda: Stream(totals, ttft_ms, requests, began_s + options.seconds),
                    "127.0.0.1",
                    ports[index % len(ports)],
                )
            )[1]
        )
        if index % 50 == 49:
            await asyncio.sleep(0.05)
    await asyncio.wait_for(asyncio.gather(*(stream.closed for stream in made)), options.seconds + 120)
    seen = json.loads((await asyncio.to_thread(watch.communicate))[0])
    health_ms, memory_mb = sorted(seen["health_ms"]), seen["memory_mb"]
    elapsed_s = time.perf_counter() - began_s
    used_s = [cpu_s(pid) - before_s for pid, before_s in zip(pids, cpu_before_s, strict=True)]
    carrying_s, beside_s = sum(used_s[: len(ports)]), sum(used_s[len(ports) :])
    idle_share, beside_share = sum(idle[: len(ports)]), sum(idle[len(ports) :])
    token_s = (sum(used_s) - sum(idle) * elapsed_s) / totals["events"]
    ttft_ms.sort()
    quarter = max(1, len(memory_mb) // 4)
    return {
        "concurrent_streams": len(made),
        "streams": totals["streams"],
        "errors": totals["errors"],
        "tokens_per_s": totals["events"] / elapsed_s,
        "ttft_p50_ms": ttft_ms[len(ttft_ms) // 2],
        "ttft_p99_ms": ttft_ms[int(len(ttft_ms) * 0.99)],
        "healthz_p99_ms": health_ms[int(len(health_ms) * 0.99)],
        "healthz_p50_ms": health_ms[len(health_ms) // 2],
        "healthz_max_ms": health_ms[-1],
        "rss_early_mb": max(memory_mb[quarter : 2 * quarter]),
        "rss_late_mb": max(memory_mb[-quarter:]),
        "gateway_cpu_share": carrying_s / elapsed_s,
        "cpu_us_per_token": carrying_s * 1e6 / totals["events"],
        "idle_cpu_share": idle_share,
        "dispatcher_idle_cpu_share": beside_share,
        "dispatcher_us_per_token": (beside_s - beside_share * elapsed_s) * 1e6 / totals["events"],
        "dispatcher_us_per_request": (beside_s - beside_share * elapsed_s) * 1e6 / totals["streams"],
        "loaded_us_per_token": token_s * 1e6,
        "capacity_tokens_per_s": (len(ports) - sum(idle)) / token_s,
        "elapsed_s": elapsed_s,
    }


def beside_a_dispatcher(environment: dict[str, str], options: argparse.Namespace) -> dict[str, float]:
    """Return what the streams cost through relays, with one dispatcher for all of them."""
    bind = f"ipc://{environment['PILOTHOUSE_STATE_DIR']}/dispatcher"
    parts = [{"PILOTHOUSE_PART": "dispatcher", "PILOTHOUSE_DISPATCHER_BIND": bind}]
    parts += [{"PILOTHOUSE_PART": "relay"}] * options.relays
    ports = [free_port() for _ in parts]
    with contextlib.ExitStack() as running:
        dispatcher, *relays = [
            running.enter_context(process(uvicorn(GATEWAY, port), port, environment | part)).pid
            for port, part in zip(ports, parts, strict=True)
        ]
        time.sleep(3.0)
        return uvloop.run(load(ports[1:], [*relays, dispatcher], options))


def run(options: argparse.Namespace) -> dict[str, Any]:
    emulator_port, gateway_port, proxy_port = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="pilothouse-bench-") as folder:
        instance = {
            "model": "m",
            "profile": PROFILE,
            "max_num_seqs": 128,
            "max_num_batched_tokens": 8192,
            "kv_blocks": 20_000,
            "max_model_len": 8192,
        }
        environment = {
            "PILOTHOUSE_SECRET_KEY": "bench",
            "PILOTHOUSE_STATE_DIR": folder,
            "REDIS_URL": "redis://127.0.0.1:1/0",
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PYTHONWARNINGS": "ignore",
        }
        emulator = [sys.executable, "-m", "workers.emulator", "--port", str(emulator_port)]
        urls = {f"m-{index}": f"http://127.0.0.1:{emulator_port}/m-{index}" for index in range(INSTANCES)}
        with process(emulator, emulator_port, environment):
            put_instances(emulator_port, dict.fromkeys(urls, instance))
            seed(environment, urls)
            whole, split = list[dict[str, float]](), list[dict[str, float]]()
            for _ in range(options.rounds):
                with process(uvicorn(GATEWAY, gateway_port), gateway_port, environment) as child:
                    time.sleep(3.0)
                    whole.append(uvloop.run(load([gateway_port], [child.pid], options)))
                if options.relays:
                    split.append(beside_a_dispatcher(environment, options))
            measured: dict[str, Any] = median(whole)
            if options.relays:
                measured["relays"] = relays = median(split)
                measured["capacity_ratio"] = relays["capacity_tokens_per_s"] / measured["capacity_tokens_per_s"]
            proxy = uvicorn("tests.bench._plain_proxy:app", proxy_port, "httptools")
            with process(proxy, proxy_port, environment | {"BACKENDS": ",".join(urls.values())}) as child:
                plain = uvloop.run(load([proxy_port], [child.pid], options))
            return measured | {
                "cpu_of_plain_proxy": measured["cpu_us_per_token"] / plain["cpu_us_per_token"],
                "plain_proxy": plain,
            }
