"""Many slow streams on instances of their own: open streams that cost little, each token counted."""

import asyncio
import itertools
import json
import math
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.bench._soak.seen import End, Seen
from tests.bench._soak.stack import Stack

MODEL, SLO_CLASS, TENANT = "slow", "non-interactive", "acme"
TOKEN_S = 0.33
SEQUENCES = 128  # of an instance
SPEC = {
    "model": MODEL,
    "profile": {
        "prefill_t0_s": 0.01,
        "prefill_a_s": 0.01,
        "prefill_b_s_per_token": 1e-5,
        "prefill_c_s_per_token2": 0.0,
        "decode_a_s": TOKEN_S,
        "decode_b_s_per_sequence": 0.0,
        "decode_c_s_per_token": 0.0,
    },
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": 8192,
    "kv_blocks": 20_000,
    "max_model_len": 8192,
}
SERVE = f"""
from controlplane.accounts.models import Tenant
from tests.gateway.rows import make_model
for tenant in Tenant.objects.filter(name="{TENANT}"):
    tenant.max_concurrent_requests = 100_000
    tenant.tokens_per_minute = 0
    tenant.save()
make_model("{MODEL}", *values, max_num_seqs={SEQUENCES}, queue_bound=10_000)
answer = None
"""
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell the fleet a story. " * 4}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
TRIED_WITHIN_S = 150.0
ATTEMPTS = 3  # as SDKs, where a connection breaks before an answer
AGAIN_S = 0.5
AFTER_KILL_S = 10.0


@dataclass(slots=True)
class Streams:
    """*number* streams open at a time, *rate_per_s* new ones a second; `seen` has those that have ended."""

    stack: Stack
    number: int
    rate_per_s: float
    seed: int
    shares: dict[str, float] = field(default_factory=lambda: {MODEL: 1.0})
    """Of each model."""
    seen: list[Seen] = field(default_factory=list)
    open: set[asyncio.Task[None]] = field(default_factory=set)
    most: int = 0
    """Most that were open at one time."""

    @property
    def instances(self) -> list[str]:
        return [f"{MODEL}-{number}" for number in range(math.ceil(1.5 * self.number / SEQUENCES) + 1)]

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self.stack.emulator_port}/{path}"

    async def prepare(self) -> None:
        """Start the instances, and serve their model."""
        async with aiohttp.ClientSession() as session:
            for name in self.instances:
                async with session.put(self.address(f"emulator/instances/{name}"), json=SPEC) as response:
                    response.raise_for_status()
        urls = [self.address(name) for name in self.instances]
        await asyncio.to_thread(self.stack.shell, SERVE, *urls)

    async def run(self, key: str, stop: asyncio.Event) -> None:
        draw = random.Random(self.seed)
        tokens = self.number / self.rate_per_s / TOKEN_S
        headers = {"Authorization": f"Bearer {key}", "X-SLO-Class": SLO_CLASS}
        timeout = aiohttp.ClientTimeout(total=TRIED_WITHIN_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
            next_s = time.monotonic()
            while not stop.is_set():
                next_s += draw.expovariate(self.rate_per_s)
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                (model,) = draw.choices([*self.shares], [*self.shares.values()])
                task = asyncio.create_task(self._one(session, model, max(2, round(tokens * draw.uniform(0.5, 1.5)))))
                self.open.add(task)
                task.add_done_callback(self.open.discard)
                self.most = max(self.most, len(self.open))
            if self.open:
                await asyncio.wait(self.open, timeout=TRIED_WITHIN_S)

    async def _one(self, session: aiohttp.ClientSession, model: str, tokens: int) -> None:
        kind = f"{model} stream"
        one = Seen(f"soak-{uuid.uuid4().hex[:12]}", kind, frozenset({200}), model=model, slo_class=SLO_CLASS)
        while one.attempts < ATTEMPTS:
            one.attempts += 1
            try:
                await self._read(session, one, tokens)
            except TimeoutError:
                one.left()
            except aiohttp.ClientConnectorError as error:
                one.end, one.why = End.UNREACHED, str(error)
            except (aiohttp.ClientError, OSError) as error:
                one.end, one.why = End.CUT, f"{type(error).__name__}: {error}"[:200]
            one.ended_at = time.time()
            if one.status or one.end not in (End.CUT, End.UNREACHED):
                break
            await asyncio.sleep(AGAIN_S)
        self.seen.append(one)

    @property
    def asked_again(self) -> int:
        return sum(one.attempts > 1 for one in self.seen)

    def silence_s(self, at: float) -> float:
        """Return the longest time without a first token of any stream that was not over at *at*, or began soon after."""
        firsts = sorted(one.first_at for one in self.seen if at - AFTER_KILL_S < one.first_at < at + 2 * AFTER_KILL_S)
        gaps = [late - early for early, late in itertools.pairwise(firsts) if early < at + AFTER_KILL_S and late > at]
        return round(max(gaps, default=math.inf), 2)

    async def _read(self, session: aiohttp.ClientSession, one: Seen, tokens: int) -> None:
        url, events, usage = f"{self.stack.url}/v1/chat/completions", 0, None
        headers = {"X-Request-Id": one.request_id}
        async with session.post(
            url, json=BODY | {"model": one.model, "max_tokens": tokens}, headers=headers
        ) as response:
            one.status = response.status
            if response.status != 200:
                error = (await response.json())["error"]
                one.end, one.code, one.why = End.REFUSED, str(error.get("code") or ""), str(error.get("message"))[:200]
                return
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    if not usage or events != usage["completion_tokens"] or events != tokens:
                        one.end, one.why = End.WRONG, f"{events} of {tokens} tokens, and usage {usage}"
                        return
                    one.done(output_tokens=events)
                    one.prompt_tokens = usage["prompt_tokens"]
                    return
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    one.end, one.code = End.INTERRUPTED, str(event["error"].get("code") or "")
                    one.why = str(event["error"].get("message"))[:200]
                    return
                usage = event.get("usage") or usage
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    events += 1
                    one.first_at = one.first_at or time.time()
        one.why = "the stream ended without its end"

    async def finished(self) -> int:
        """Return how many requests the instances have finished: those whose caller left are not counted."""
        total = 0.0
        async with aiohttp.ClientSession() as session:
            for name in self.instances:
                async with session.get(self.address(f"{name}/metrics")) as response:
                    for line in (await response.text()).splitlines():
                        if line.startswith("vllm:request_success_total") and '"abort"' not in line:
                            total += float(line.rsplit(" ", 1)[1])
        return int(total)
