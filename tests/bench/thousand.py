"""A thousand emulated instances on fifty nodes in three regions, before one gateway process.

In turn, under a modest load: nothing happens (the processor time of heartbeats and all other periodic work), all models
are rolled out everywhere at once, and a region goes silent (its emulator is frozen) and answers again. Reported by phase:
processor time of the gateway, requests, failures, and those that took longer than a second. Of the region: for how long
requests that were sent after its silence began were still slow or failed, and how its share of the answers grew after it
answered again.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import aiohttp
import uvloop

from tests.bench.gateway import KEY, ROOT, cpu_s, free_port, process, rss_mb, uvicorn
from tests.bench.streams import put_instances
from tests.postgres import server
from tests.redis_server import RedisServer

REGIONS = ("east", "north", "west")
SLOW_S = 1.0
PROFILE = {
    "prefill_t0_s": 0.012, "prefill_a_s": 0.008, "prefill_b_s_per_token": 4.5e-5, "prefill_c_s_per_token2": 2.0e-10,
    "decode_a_s": 0.0085, "decode_b_s_per_sequence": 2.5e-5, "decode_c_s_per_token": 4.0e-8,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer; half of them are streamed")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the phase in which nothing happens")
    parser.add_argument("--dark", type=float, default=25.0, help="seconds of the region's silence")
    parser.add_argument("--postgres", action="store_true", help="instead of SQLite")
    parser.add_argument("--phases", nargs="*", choices=["idle", "roll", "region"], default=["idle", "roll", "region"])


class Answer(NamedTuple):
    sent_s: float
    took_s: float
    first_s: float
    failed: str
    region: str


class Load:
    """Requests at a constant rate, whatever becomes of them."""

    def __init__(self, port: int, models: list[str], rate: float, tokens: int) -> None:
        self.port, self.models, self.rate, self.tokens = port, models, rate, tokens
        self.answers: list[Answer] = []
        self.open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        timeout, connector = aiohttp.ClientTimeout(total=60), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            next_s, draw = time.monotonic(), random.Random(1)
            try:
                while True:
                    await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                    next_s += 1 / self.rate
                    task = asyncio.create_task(
                        self._ask(session, draw.choice(self.models), draw.choice(REGIONS), draw.random() < 0.5)
                    )
                    self.open.add(task)
                    task.add_done_callback(self.open.discard)
            finally:
                if self.open:
                    await asyncio.wait(self.open, timeout=30)

    async def _ask(self, session: aiohttp.ClientSession, model: str, region: str, stream: bool) -> None:
        sent_s, first_s, failed = time.monotonic(), 0.0, ""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": self.tokens,
            "stream": stream,
        }
        headers = {"Authorization": f"Bearer {KEY}", "X-Region": region}
        try:
            url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
            async with session.post(url, json=body, headers=headers) as response:
                text = b""
                async for chunk in response.content.iter_any():
                    first_s = first_s or time.monotonic() - sent_s
                    text += chunk
                if response.status != 200 or (stream and not text.rstrip().endswith(b"[DONE]")):
                    failed = f"{response.status}: {text[-200:].decode(errors='replace')}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failed = repr(error)
        self.answers.append(Answer(sent_s, time.monotonic() - sent_s, first_s, failed, region))

    def seen(self, from_s: float, to_s: float) -> dict[str, Any]:
        """What became of the requests that were sent between two moments."""
        answers = [one for one in self.answers if from_s <= one.sent_s < to_s]
        took_s = sorted(one.took_s for one in answers)
        failed = Counter(one.failed for one in answers if one.failed)
        return {
            "requests": len(answers),
            "failed": failed.total(),
            "slow": sum(one.took_s > SLOW_S for one in answers),
            "p50_ms": 1000 * took_s[len(took_s) // 2] if took_s else None,
            "p99_ms": 1000 * took_s[len(took_s) * 99 // 100] if took_s else None,
            "worst_s": took_s[-1] if took_s else None,
        } | ({"failures": dict(failed.most_common(3))} if failed else {})


class Phase(NamedTuple):
    began_s: float
    cpu_s: float


@contextmanager
def emulator(instances: dict[str, str]) -> Iterator[tuple[int, str]]:
    """One process with the instances (name, model) of a region; yield its id and address."""
    common = {"profile": PROFILE, "max_num_seqs": 64, "output_median_tokens": 64.0}
    port = free_port()
    with process([sys.executable, "-m", "workers.emulator", "--port", str(port)], port, {}) as child:
        put_instances(port, {name: common | {"model": model} for name, model in instances.items()})
        try:
            yield child.pid, f"http://127.0.0.1:{port}"
        finally:
            child.send_signal(signal.SIGCONT)


class Bench:
    def __init__(self, options: argparse.Namespace, load: Load, gateway: int, frozen: int, redis: RedisServer) -> None:
        self.options, self.load, self.gateway, self.frozen, self.redis = options, load, gateway, frozen, redis

    def begin(self) -> Phase:
        return Phase(time.monotonic(), cpu_s(self.gateway))

    def end(self, phase: Phase) -> dict[str, Any]:
        now_s = time.monotonic()
        seconds = now_s - phase.began_s
        return {
            "seconds": seconds,
            "gateway_cpu_share": (cpu_s(self.gateway) - phase.cpu_s) / seconds,
            **self.load.seen(phase.began_s, now_s - 1.0),
        }

    def summary(self) -> dict[str, Any]:
        text = self.redis.client.get("pilothouse:summary")
        return json.loads(text) if text else {}

    def ready(self) -> int:
        return int((self.summary().get("fleet") or {}).get("instances_ready", 0))

    async def run(self) -> dict[str, Any]:
        options, result = self.options, dict[str, Any]()
        async with asyncio.timeout(300):
            while self.ready() < options.instances:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        await asyncio.sleep(3.0)
        phase = self.begin()
        heartbeats = await self.count_heartbeats(options.seconds)
        used_s = cpu_s(self.gateway) - phase.cpu_s
        result["quiet"] = {
            "gateway_cpu_share": used_s / (time.monotonic() - phase.began_s),
            "heartbeats_per_s": heartbeats / options.seconds,
            "cpu_us_per_heartbeat": 1e6 * used_s / max(heartbeats, 1),
            "rss_mb": rss_mb(self.gateway),
            "jobs_ms": self.jobs(),
        }
        print("quiet", result["quiet"], flush=True)
        requests = asyncio.create_task(self.load.run())
        await asyncio.sleep(3.0)
        for name in options.phases:
            phase = self.begin()
            more = await getattr(self, name)()
            result[name] = self.end(phase) | more
            print(name, result[name], flush=True)
        requests.cancel()
        await asyncio.wait([requests])
        return result

    async def count_heartbeats(self, seconds: float) -> int:
        """Count answered heartbeats over *seconds*; on a busy machine they are fewer than one a second and instance."""
        end_s, seen, count = time.monotonic() + seconds, dict[str, float](), 0
        while time.monotonic() < end_s:
            rows = self.summary().get("instances") or {"name": (), "heartbeat_at": ()}
            for name, at in zip(rows["name"], rows["heartbeat_at"], strict=True):
                count += seen.get(name, at) != at
                seen[name] = at
            await asyncio.sleep(0.4)
        return count

    def jobs(self) -> dict[str, float]:
        jobs = (self.summary().get("system") or {}).get("jobs", [])
        return {one["name"]: round(1000 * one["last_duration_s"], 1) for one in jobs if one.get("last_duration_s")}

    async def idle(self) -> dict[str, Any]:
        await asyncio.sleep(self.options.seconds)
        return {"jobs_ms": self.jobs()}

    async def roll(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.bench._thousand_rows", "roll", *self.load.models]
        child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE)
        text, _ = await child.communicate()
        if child.returncode:
            raise RuntimeError(f"the rollout ended with {child.returncode}")
        return {"rollout": json.loads(text), "jobs_ms": self.jobs()}

    async def region(self) -> dict[str, Any]:
        began_s = time.monotonic()
        os.kill(self.frozen, signal.SIGSTOP)
        at_once = [self.ready()]
        share = list[int]()
        try:
            for _ in range(int(self.options.dark)):
                await asyncio.sleep(1.0)
                at_once.append(self.ready())
        finally:
            os.kill(self.frozen, signal.SIGCONT)
        back_s = time.monotonic()
        for _ in range(40):
            await asyncio.sleep(1.0)
            rows = self.summary().get("instances") or {"max_num_seqs": (), "region": ()}
            share.append(sum(n for n, r in zip(rows["max_num_seqs"], rows["region"], strict=True) if r == REGIONS[-1]))
            at_once.append(self.ready())
        hurt = [one.sent_s - began_s for one in self.load.answers if one.sent_s >= began_s - 2 and self._hurt(one)]
        late = [one for one in hurt if one <= back_s - began_s]
        return {
            "hurt_until_s": max(late, default=None),
            "hurt_after_return": len(hurt) - len(late),
            "dark": self.load.seen(began_s - 1.0, back_s),
            "after": self.load.seen(back_s, time.monotonic() - 1.0),
            "instances_ready_by_second": at_once,
            "room_by_second_after": share,
        }

    @staticmethod
    def _hurt(one: Answer) -> bool:
        return bool(one.failed) or one.took_s > SLOW_S

    environment: dict[str, str] = {}


def run(options: argparse.Namespace) -> dict[str, Any]:
    models = [f"model-{n}" for n in range(options.models)]
    names: dict[str, dict[str, str]] = {region: {} for region in REGIONS}
    for n in range(options.instances):
        here = names[REGIONS[n % len(REGIONS)]]
        model = models[len(here) % len(models)]
        here[f"{REGIONS[n % len(REGIONS)]}-{len(here)}"] = model
    with tempfile.TemporaryDirectory(prefix="pilothouse-bench-") as text, ExitStack() as stack:
        redis, port = RedisServer().start(), free_port()
        stack.callback(redis.stop)
        database = stack.enter_context(server("max_connections=100")).url if options.postgres else ""
        environment = {
            "PILOTHOUSE_SECRET_KEY": "bench",
            "PILOTHOUSE_STATE_DIR": text,
            "REDIS_URL": redis.url,
            "DATABASE_URL": database,
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PYTHONWARNINGS": "ignore",
        }
        emulators = {name: stack.enter_context(emulator(names[name])) for name in REGIONS}
        rows = {
            "regions": {name: url for name, (_, url) in emulators.items()},
            "models": models,
            "instances": {name: list(of) for name, of in names.items()},
            "nodes": options.nodes,
        }
        command = [sys.executable, "-m", "tests.bench._thousand_rows", "seed", json.dumps(rows)]
        subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)
        target = uvicorn("controlplane.asgi:application", port)
        gateway = stack.enter_context(process(target, port, environment, wait_s=180.0))
        load = Load(port, models, options.rate, options.tokens)
        bench = Bench(options, load, gateway.pid, emulators[REGIONS[-1]][0], redis)
        bench.environment = os.environ | environment
        return {"instances": options.instances, "nodes": options.nodes, **uvloop.run(bench.run())}
