"""Sends a trace at its recorded times, divided by a speed: an open loop, where a slow answer delays no later request.

A conversation turn that has a delay in the trace is sent that long after the answer to the turn before. Open requests are
bounded all the same; requests that were sent late are counted, since such a run measured the sender.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import numpy as np
import orjson

from scheduling.simulation.workload.traces import TraceError, TraceRequest
from workers.traffic.prompts import prompt_ids

DONE: Final = "done"
LATE_S: Final = 0.1
MAX_OPEN: Final = 2000
MAX_REQUEST_S: Final = 3600.0
PERCENTILES: Final = (50, 95, 99)


@dataclass(slots=True)
class Answer:
    """Result of one request: *outcome* is `done`, or briefly why not."""

    outcome: str = "interrupted"
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0


@dataclass(slots=True)
class Replay:
    """Sender of requests for *model* to *url* (ends in /v1), with the ids `<run>-<number>`, and what became of them."""

    url: str
    model: str
    run: str
    headers: dict[str, str]
    context_tokens: int = 0
    """Of the model; 0 if unknown."""
    speed: float = 1.0
    answers: list[Answer] = field(default_factory=list)
    """Of every request sent."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Requests of the trace that were not sent, by reason."""
    late: int = 0
    mistake: str = ""
    """In the trace, which ended the run there."""

    async def send(self, requests: Iterator[TraceRequest]) -> None:
        """Send *requests*; return when every one is answered, or the trace has a mistake."""
        room, draw = asyncio.Semaphore(MAX_OPEN), np.random.default_rng(0)
        turns: dict[str, asyncio.Task[None]] = {}  # the last of each session
        timeout = aiohttp.ClientTimeout(total=MAX_REQUEST_S, sock_connect=30)
        clock = asyncio.get_running_loop().time
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            began_s = clock()
            for number in itertools.count(1):
                try:
                    request = next(requests, None)
                except TraceError as error:
                    self.mistake = str(error)
                    return
                if request is None:
                    return
                if why := self._unfit(request):
                    self.skipped[why] += 1
                    continue
                due_s = None if request.delay_s is not None else began_s + request.arrival_s / self.speed
                if due_s is not None and due_s > clock():
                    await asyncio.sleep(due_s - clock())
                before = turns.get(request.session) if due_s is None else None
                task = group.create_task(self._one(session, room, request, number, draw, due_s, before))
                if request.session:
                    turns[request.session] = task

    def _unfit(self, request: TraceRequest) -> str:
        """Return why *request* is not sent; empty if it is."""
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            return "no prompt or output in the trace"
        if self.context_tokens and request.prompt_tokens + request.output_tokens > self.context_tokens:
            return f"longer than the model's context of {self.context_tokens} tokens"
        return ""

    async def _one(
        self,
        session: aiohttp.ClientSession,
        room: asyncio.Semaphore,
        request: TraceRequest,
        number: int,
        draw: np.random.Generator,
        due_s: float | None,
        before: asyncio.Task[None] | None,
    ) -> None:
        if due_s is None:
            if before is not None:
                await asyncio.wait({before})
            await asyncio.sleep((request.delay_s or 0.0) / self.speed)
        async with room:
            self.late += due_s is not None and asyncio.get_running_loop().time() - due_s > LATE_S
            self.answers.append(answer := Answer())
            body = {
                "model": self.model,
                "prompt": prompt_ids(draw, request.prompt_tokens, request.prefix_blocks),
                "max_tokens": request.output_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
            headers = {**self.headers, "Content-Type": "application/json", "X-Request-Id": f"{self.run}-{number}"}
            try:
                answer.outcome = await self._complete(session, data, headers, answer)
            except (aiohttp.ClientConnectorError, ConnectionRefusedError):
                answer.outcome = "not reached"
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                answer.outcome = f"connection lost ({type(error).__name__})"

    async def _complete(
        self, session: aiohttp.ClientSession, data: bytes, headers: dict[str, str], answer: Answer
    ) -> str:
        """Send *data*, read the stream to its end into *answer* and return the outcome."""
        clock = asyncio.get_running_loop().time
        began_s, event = clock(), b""
        async with session.post(f"{self.url}/completions", data=data, headers=headers) as response:
            if response.status != 200:
                return f"{response.status} {_code(await response.read())}".strip()
            async for line in response.content:
                if not line.startswith(b"data: "):  # a keep-alive comment, or between events
                    continue
                answer.ttft_ms = answer.ttft_ms or (clock() - began_s) * 1000
                if line.startswith(b"data: [DONE]"):
                    answer.e2e_ms = (clock() - began_s) * 1000
                    usage = (orjson.loads(event) if event else {}).get("usage")
                    if not usage:
                        return "no usage in the stream"
                    answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                    return DONE
                event = line[6:]
        error = _code(event)
        return f"stream ended with {error}" if error else "stream cut short"

    def report(self) -> dict[str, Any]:
        """Return counts that account for every request of the trace, tokens, and percentiles of latencies in ms."""
        done = [answer for answer in self.answers if answer.outcome == DONE]
        failures = Counter(answer.outcome for answer in self.answers if answer.outcome != DONE)

        def percentiles(values: list[float]) -> dict[str, float]:
            known = np.percentile(values, PERCENTILES) if values else ()
            return {f"p{name}": round(float(value), 1) for name, value in zip(PERCENTILES, known, strict=False)}

        return {
            "run": self.run,
            "model": self.model,
            "sent": len(self.answers),
            "done": len(done),
            "failed": failures.total(),
            "failures": dict(failures),
            "skipped": dict(self.skipped),
            "late": self.late,
            "prompt_tokens": sum(answer.prompt_tokens for answer in done),
            "output_tokens": sum(answer.output_tokens for answer in done),
            "ttft_ms": percentiles([answer.ttft_ms for answer in done]),
            "e2e_ms": percentiles([answer.e2e_ms for answer in done]),
        }


def _code(raw: bytes) -> str:
    """Return the code (or type) of an OpenAI error body; empty without one."""
    try:
        error = orjson.loads(raw)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return ""
