"""Demo traffic: days of a few minutes that reach one region after another, with bursts and jobs, in three SLO classes.

It is synthetic, to show a live fleet; a real load is replayed with `manage.py replay`. Prompts are in words, of kinds whose
answers' lengths can be predicted, and are answered at the requested length. Each (model, region, class) is a Poisson process
whose rate follows a wave; everything is drawn from one seed.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from controlplane.gateway.replay.prompts import Instructions

logger = logging.getLogger(__name__)

DAY_S = 480.0
NIGHT = 0.25  # of the peak rate
BURST_EVERY_S = 240.0  # per stream, on average
BURST_S = 20.0
BURST_FACTOR = 3.0
JOB_EVERY_S = 360.0
MOST_OPEN = 600  # across all streams: a hanging gateway must not pile up requests here
QUIET_S = 1.0  # after a connection failure
COMPLAIN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one SLO class: peak rate per model and region, median lengths, share that is streamed.

    Lengths are for a context of `CONTEXT_TOKENS`; a model with a longer one gets longer work. Requests without output
    are embeddings of up to *texts* texts, as long for any context.
    """

    peak_per_s: float
    prompt_tokens: int
    output_tokens: int
    streamed: float
    texts: int = 1

    @property
    def embeds(self) -> bool:
        return not self.output_tokens


KINDS = {
    "interactive": Kind(peak_per_s=0.7, prompt_tokens=500, output_tokens=120, streamed=0.6),
    "non-interactive": Kind(peak_per_s=0.6, prompt_tokens=1200, output_tokens=300, streamed=0.0),
    "opportunistic": Kind(peak_per_s=0.3, prompt_tokens=900, output_tokens=400, streamed=0.0),
}
EMBEDDINGS = {"interactive": Kind(peak_per_s=0.5, prompt_tokens=180, output_tokens=0, streamed=0.0, texts=8)}
"""Requests to models that embed."""
CONTEXT_TOKENS = 4096
LONGER_PROMPTS, LONGER_OUTPUTS = 0.6, 0.5  # exponents of the ratio of the context to it
SPREAD = 0.6  # sigma of the logarithm of lengths


@dataclass(frozen=True, slots=True)
class Stream:
    """One source of requests."""

    model: str
    region: str
    slo_class: str
    key: str
    context_tokens: int
    phase: float  # of the day, 0 to 1
    kind: Kind
    day_s: float = DAY_S
    share: float = 1.0  # of the kind's rate, sent by this tenant

    def rate_per_s(self, now_s: float, burst: bool) -> float:
        """Return requests a second at *now_s*, seconds since 1970: days continue across a restart."""
        light = (1 + math.sin(2 * math.pi * (now_s / self.day_s + self.phase))) / 2
        peak_per_s = self.kind.peak_per_s * self.share
        return peak_per_s * (NIGHT + (1 - NIGHT) * light) * (BURST_FACTOR if burst else 1.0)


@dataclass(frozen=True, slots=True)
class Job:
    """A batch of *requests* like those of *stream*, sent *first_s* after the start and every *every_s* from then on."""

    stream: Stream
    first_s: float
    every_s: float = JOB_EVERY_S
    requests: int = 300


def streams(
    endpoints: Iterable[tuple[str, str, int]],
    keys: dict[str, str],
    day_s: float = DAY_S,
    kinds: Mapping[str, Kind] = KINDS,
) -> list[Stream]:
    """Return a stream for each (model, region, context tokens) of *endpoints* and each SLO class with a key in *keys*."""
    endpoints = sorted(endpoints)
    regions = sorted({region for _, region, _ in endpoints})
    return [
        Stream(model, region, slo_class, keys[slo_class], context, regions.index(region) / len(regions), kind, day_s)
        for model, region, context in endpoints
        for slo_class, kind in kinds.items()
        if slo_class in keys
    ]


Begin = Callable[[Stream, random.Random], Awaitable[None]]


class Waves:
    """Sender of every stream and job to *url* (ends in /v1) until cancelled, whatever happens to the gateway."""

    def __init__(self, url: str, sources: list[Stream], seed: int, jobs: Iterable[Job] = ()) -> None:
        self.url, self.sources, self.seed, self.jobs = url, sources, seed, list(jobs)
        self.others: list[Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]]] = []
        """Further senders, called with the session."""
        self.sent = self.done = 0
        self._instructions = Instructions(seed)
        self._complained_s = -COMPLAIN_EVERY_S

    async def run(self) -> None:
        room = asyncio.Semaphore(MOST_OPEN)
        timeout = aiohttp.ClientTimeout(total=600, sock_connect=5)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):

            async def begin(stream: Stream, draw: random.Random) -> None:
                """Send a request, unless too many are open."""
                if not room.locked():
                    await room.acquire()
                    group.create_task(self._send(session, stream, draw)).add_done_callback(lambda _: room.release())

            for number, stream in enumerate(self.sources):
                group.create_task(self._flow(stream, random.Random(f"{self.seed} {number}"), begin))
            for number, job in enumerate(self.jobs):
                group.create_task(self._repeat(job, random.Random(f"{self.seed} job {number}"), begin))
            for send in self.others:
                group.create_task(send(session))

    async def _flow(self, stream: Stream, draw: random.Random, begin: Begin) -> None:
        """Poisson arrivals by thinning: draw at the highest possible rate, keep the share of the current rate."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        highest = stream.kind.peak_per_s * stream.share * BURST_FACTOR
        burst_from_s = draw.expovariate(1 / BURST_EVERY_S)
        while True:
            await asyncio.sleep(draw.expovariate(highest))
            now_s = clock() - began_s
            if now_s > burst_from_s + BURST_S:
                burst_from_s = now_s + draw.expovariate(1 / BURST_EVERY_S)
            burst = burst_from_s <= now_s
            if draw.random() * highest < stream.rate_per_s(time.time(), burst):
                await begin(stream, draw)

    async def _repeat(self, job: Job, draw: random.Random, begin: Begin) -> None:
        await asyncio.sleep(job.first_s)
        while True:
            for _ in range(job.requests):
                await begin(job.stream, draw)
            await asyncio.sleep(job.every_s)

    def call(self, stream: Stream, draw: random.Random) -> tuple[str, dict[str, object]]:
        """Return path and body of a request."""
        kind = stream.kind
        if kind.embeds:
            lengths = [
                _length(draw, kind.prompt_tokens, stream.context_tokens) for _ in range(draw.randint(1, kind.texts))
            ]
            texts = [self._instructions.passage(tokens) for tokens in lengths]
            return "embeddings", {"model": stream.model, "input": texts}
        prompt_tokens, output_tokens, most_output = requested_tokens(stream, draw)
        return "completions", {
            "stream": draw.random() < kind.streamed,
            "model": stream.model,
            "prompt": self._instructions.prompt(prompt_tokens, output_tokens, kind.streamed > 0),
            "max_tokens": most_output,
        }

    async def _send(self, session: aiohttp.ClientSession, stream: Stream, draw: random.Random) -> None:
        path, body = self.call(stream, draw)
        await self.post(session, stream, orjson.dumps(body), {}, path)

    async def post(
        self,
        session: aiohttp.ClientSession,
        stream: Stream,
        data: bytes,
        headers: Mapping[str, str],
        path: str = "completions",
    ) -> bool:
        """Send *data* to *path* as *stream* with further *headers*; return whether it was answered."""
        headers = {
            "Authorization": f"Bearer {stream.key}",
            "Content-Type": "application/json",
            "X-Region": stream.region,
            "X-SLO-Class": stream.slo_class,
            **headers,
        }
        self.sent += 1
        try:
            async with session.post(f"{self.url}/{path}", data=data, headers=headers) as response:
                async for _ in response.content.iter_any():
                    pass
                if response.status in {401, 403}:
                    self._complain(f"the gateway refuses demo traffic with {response.status}")
                self.done += response.status == 200
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._complain(f"the gateway does not answer ({type(error).__name__}); demo traffic keeps trying")
            await asyncio.sleep(QUIET_S)
        return False

    def _complain(self, text: str) -> None:
        """Log *text*, but not for every request."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            logger.warning("%s", text)


def requested_tokens(stream: Stream, draw: random.Random) -> tuple[int, int, int]:
    """Return prompt tokens, requested output tokens and the output limit of one request of *stream*."""
    context, kind = stream.context_tokens, stream.kind
    longer = max(1.0, context / CONTEXT_TOKENS)
    output_tokens = _length(draw, kind.output_tokens * longer**LONGER_OUTPUTS, context // 3)
    prompt_tokens = _length(draw, kind.prompt_tokens * longer**LONGER_PROMPTS, context - output_tokens)
    return prompt_tokens, output_tokens, max(output_tokens, min(context // 3, context - prompt_tokens))


def _length(draw: random.Random, median: float, most: int) -> int:
    return min(max(1, round(draw.lognormvariate(math.log(median), SPREAD))), most)
