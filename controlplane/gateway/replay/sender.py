"""Sends a trace at its recorded times, divided by a speed: an open loop, where a slow answer delays no later request.

A conversation turn that has a delay in the trace is sent that long after the answer to the turn before. Open requests are
bounded all the same; the report counts requests that were sent late, since such a run measured the sender.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import aiohttp
import orjson

from controlplane.gateway.replay.prompts import Prompts
from scheduling.simulation.workload.traces import TraceRequest

# The event before `[DONE]` carries the usage; it is a few hundred bytes long.
TAIL_BYTES = 4096
DONE = "done"


@dataclass(slots=True)
class Answer:
    """Result of one request. *outcome* is `done`, or briefly why not."""

    outcome: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float | None = None
    itl_ms: float | None = None  # mean time between this request's output tokens
    e2e_ms: float | None = None

    @property
    def done(self) -> bool:
        return self.outcome == DONE


def body(model: str, ids: bytes, output_tokens: int) -> bytes:
    """Return a streamed completion of exactly *output_tokens* tokens for the prompt *ids* (see `prompts`)."""
    return b'{"model":%b,"prompt":[%b],"max_tokens":%d,"ignore_eos":true,"stream":true,%b}' % (
        orjson.dumps(model),
        ids,
        output_tokens,
        b'"stream_options":{"include_usage":true}',
    )


async def complete(session: aiohttp.ClientSession, url: str, data: bytes, headers: dict[str, str]) -> Answer:
    """Send *data* to *url* (`…/v1/completions`) and read the stream to its end. Raises nothing but CancelledError."""
    answer = Answer()
    clock = asyncio.get_running_loop().time
    began_s = clock()
    first_s = last_s = 0.0
    tail = bytearray()
    try:
        async with session.post(url, data=data, headers=headers) as response:
            if response.status != 200:
                answer.outcome = f"{response.status} {_code(await response.read())}".strip()
                return answer
            async for chunk in response.content.iter_any():
                if first_s:
                    last_s = clock()
                elif b"data: " in chunk:  # before it there may be keep-alive comments
                    first_s = last_s = clock()
                tail += chunk
                if len(tail) > 2 * TAIL_BYTES:
                    del tail[:-TAIL_BYTES]
    except (aiohttp.ClientConnectorError, ConnectionRefusedError):
        answer.outcome = "not reached"
        return answer
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.outcome = f"connection lost ({type(error).__name__})"
        return answer
    answer.outcome = _read_tail(bytes(tail), answer)
    if answer.done:
        answer.ttft_ms = (first_s - began_s) * 1000
        answer.e2e_ms = (last_s - began_s) * 1000
        if answer.output_tokens > 1:
            answer.itl_ms = (last_s - first_s) * 1000 / (answer.output_tokens - 1)
    return answer


def _read_tail(tail: bytes, answer: Answer) -> str:
    """Take usage and return the outcome from the last events of a stream."""
    events = [line[6:] for line in tail.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        error = _code(events[-1]) if events else ""
        return f"stream ended with {error}" if error else "stream cut short"
    for event in reversed(events[:-1]):
        try:
            usage = orjson.loads(event).get("usage")
        except (orjson.JSONDecodeError, AttributeError):
            break
        if usage:
            answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            return DONE
    return "no usage in the stream"


def _code(raw: bytes) -> str:
    """Return the code (or type) of an OpenAI error body, or ""."""
    try:
        error = orjson.loads(raw)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return ""


LATE_S = 0.1
LONGEST_REQUEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of requests, and the sender's identity. *context_tokens* is the model's limit, 0 if unknown."""

    url: str  # ends in /v1
    key: str
    model: str
    context_tokens: int = 0
    slo_class: str = ""
    region: str = ""

    def headers(self, request_id: str) -> dict[str, str]:
        headers = {
            "Authorization": f"Bearer {self.key}",
            "Content-Type": "application/json",
            "X-Request-Id": request_id,
        }
        if self.slo_class:
            headers["X-SLO-Class"] = self.slo_class
        if self.region:
            headers["X-Region"] = self.region
        return headers


@dataclass(slots=True)
class Tally:
    """Counts so far."""

    sent: int = 0
    done: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    answers: list[Answer] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    clipped: int = 0
    late: int = 0
    latest_s: float = 0.0
    open: int = 0
    most_open: int = 0

    def enter(self, answer: Answer) -> None:
        self.answers.append(answer)
        if answer.done:
            self.done += 1
        else:
            self.failed[answer.outcome] += 1


def fit(request: TraceRequest, context_tokens: int, *, clip: bool) -> TraceRequest | str:
    """Return *request* if it fits a model of *context_tokens* (0 = unknown), shortened if *clip*; else why not."""
    if request.prompt_tokens < 1:
        return "no prompt in the trace"
    if request.output_tokens < 1:
        return "no output in the trace"
    if not context_tokens or request.prompt_tokens + request.output_tokens <= context_tokens:
        return request
    if not clip:
        return f"longer than the model's context of {context_tokens} tokens"
    output_tokens = min(request.output_tokens, context_tokens - 1)
    prompt_tokens = min(request.prompt_tokens, context_tokens - output_tokens)
    return replace(request, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


class Sender:
    """Sender of requests as `<run>-<number>`, with the tally; `stop` ends it early."""

    def __init__(self, target: Target, run: str, *, speed: float, clip: bool, connections: int, seed: int) -> None:
        self.target, self.run_name, self.speed, self.clip = target, run, speed, clip
        self.tally = Tally()
        self._connections = connections
        self._prompts = Prompts(seed)
        self._stopping = asyncio.Event()
        self._turns: dict[str, asyncio.Task[None]] = {}  # the last of each session

    def stop(self) -> None:
        """Send nothing more and cut open requests."""
        self._stopping.set()

    async def run(self, requests: Iterator[TraceRequest]) -> None:
        """Send *requests*; return when every one is answered. A TraceError from the iterator ends it the same way."""
        room = asyncio.Semaphore(self._connections)
        timeout = aiohttp.ClientTimeout(total=LONGEST_REQUEST_S, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0)  # the semaphore is the bound
        tasks: set[asyncio.Task[None]] = set()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            try:
                await self._feed(requests, session, room, tasks)
            finally:
                stop = asyncio.create_task(self._stopping.wait())
                while tasks and not stop.done():
                    await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                stop.cancel()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(
        self,
        requests: Iterator[TraceRequest],
        session: aiohttp.ClientSession,
        room: asyncio.Semaphore,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        for number in itertools.count(1):
            request = next(requests, None)
            if request is None or self._stopping.is_set():
                return
            fitted = fit(request, self.target.context_tokens, clip=self.clip)
            if isinstance(fitted, str):
                self.tally.skipped[fitted] += 1
                continue
            self.tally.clipped += fitted is not request
            request_id = f"{self.run_name}-{number}"
            if request.delay_s is not None:
                sending = self._after(self._turns.get(request.session), session, fitted, request_id, room)
            else:
                due_s = began_s + request.arrival_s / self.speed
                if due_s > clock() and await self._stops_within(due_s - clock()):
                    return
                while room.locked():
                    if await self._stops_within(0.02):
                        return
                await room.acquire()
                late_s = clock() - due_s
                self.tally.late += late_s > LATE_S
                self.tally.latest_s = max(self.tally.latest_s, late_s)
                sending = self._send(session, fitted, request_id, room)
            task = asyncio.create_task(sending)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if request.session:
                self._turns[request.session] = task

    async def _after(
        self,
        before: asyncio.Task[None] | None,
        session: aiohttp.ClientSession,
        request: TraceRequest,
        request_id: str,
        room: asyncio.Semaphore,
    ) -> None:
        """Send *request* its delay after the turn *before* has been answered."""
        if before is not None:
            await asyncio.wait({before})
        if not await self._stops_within((request.delay_s or 0.0) / self.speed):
            await room.acquire()
            await self._send(session, request, request_id, room)

    async def _stops_within(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    async def _send(
        self, session: aiohttp.ClientSession, request: TraceRequest, request_id: str, room: asyncio.Semaphore
    ) -> None:
        tally, target = self.tally, self.target
        tally.sent += 1
        tally.open += 1
        tally.most_open = max(tally.most_open, tally.open)
        ids = self._prompts.ids(request.prompt_tokens, request.prefix_blocks)
        data = body(target.model, ids, request.output_tokens)
        try:
            answer = await complete(session, f"{target.url}/completions", data, target.headers(request_id))
        except asyncio.CancelledError:
            tally.enter(Answer("interrupted"))
            raise
        finally:
            tally.open -= 1
            room.release()
        tally.enter(answer)
